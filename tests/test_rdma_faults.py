"""What goes wrong on the RDMA path, by script: writers in the middle of READs, links and endpoints that die, deadlines.

And positive controls: each safety check is removed once, and the script that it stands against must then see the harm.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from clusters import wait_until
from fakefabric import FakeLink
from rdmascript import KEYS, ROOM, Harm, finds_harm, links_outlive_failures, reads, value_of, version_in
from rdmatown import RdmaTown, path_of, until_rdma
from town import ALL

from simm import lane as lane_module
from simm import rdmaget, rdmapath, remote_arena
from simm import session as session_module
from simm.fabric import READ, WRITE
from simm.layout import State, Word
from simm.reader import ArenaReader
from simm.remote_arena import Place
from simm.tcppath import TcpPath

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_buried() -> Iterator[None]:
    session_module._BURIED.clear()
    yield
    session_module._BURIED.clear()


# -- a writer between the steps of a READ ----------------------------------------------------------------


def storm(monkeypatch: pytest.MonkeyPatch, seed: int, rails: int = 1) -> int:
    """Reads into host memory while a writer works between any two steps; how many were hits. Raises Harm."""
    names = [f"r{number}" for number in range(rails)]
    with RdmaTown(monkeypatch, seed=seed, rails=names, mine=names, pieces=12) as town:
        client = town.rdma(deadline_s=20.0)
        sinks = [client.register(bytearray(ROOM)) for _ in KEYS]
        return reads(town, client, seed, sinks, lambda sink, size: bytes(sink.view()[:size]))


@pytest.mark.parametrize("rails", [1, 2])
def test_a_writer_between_all_steps(monkeypatch: pytest.MonkeyPatch, rails: int) -> None:
    assert sum(storm(monkeypatch, seed, rails) for seed in range(4)) > 50


def _believe(place: Place, between: bytes, now: bytes, word: int) -> bool:
    return True


def test_control_without_the_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdmaget, "confirmed", _believe)
    finds_harm(storm)


def late_value(monkeypatch: pytest.MonkeyPatch, *, single: bool) -> None:
    """A value's READ is held up until its chunk is another's, all else goes on. Raises Harm when it is believed."""
    with RdmaTown(monkeypatch, pieces=4) as town:
        client, writer = town.rdma(deadline_s=20.0), town.client("shm")
        path_of(client).tend = lambda now: None  # type: ignore[method-assign]
        assert writer.put("k", value_of("k", 1, 700))
        sinks = [client.register(bytearray(700)) for _ in range(2)]
        assert client.get_into("k", sinks[0]) == 700
        reader = ArenaReader(town.node.worker.segment.name)
        found = reader.locate(client.digest("k"))
        assert found is not None
        town.network.hold(lambda link, op: op[0] != WRITE and op[3] == 700)
        steps = 0

        def between() -> None:
            nonlocal steps
            steps += 1
            if steps != 200:
                return
            assert writer.delete("k")
            for number in range(200):
                assert writer.put(f"other{number}", value_of("other", number, 700))
                if reader.value(found)[:8] == value_of("other", number, 8):
                    town.network.release()
                    return
            pytest.fail("the chunk is never used again, so this shows nothing")

        town.network.between = between
        sinks[0].view()[:] = bytes(700)
        keys = ["k"] if single else ["k", "missing"]
        got = client.get_into_many(keys, sinks[: len(keys)])
        town.network.between = None
        assert steps > 200
        if got[0] is not None:
            raise Harm(f"believed: {bytes(sinks[0].view()[:16])!r}")


@pytest.mark.parametrize("single", [True, False])
def test_a_value_that_comes_late(monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    late_value(monkeypatch, single=single)


@pytest.mark.parametrize("single", [True, False])
def test_control_without_the_fence_before_it(monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    monkeypatch.setattr(rdmaget, "FENCED_READ", READ)
    with pytest.raises(Harm):
        late_value(monkeypatch, single=single)


def stale_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard has moved; the old owner's arena still has the value. Raises Harm when it is read there."""
    with RdmaTown(monkeypatch, 2) as town:
        town.settled({0: ALL})
        client, writer = town.rdma(), town.client("shm")
        assert writer.put("k", value_of("k", 1, 500))
        sink = client.register(bytearray(500))
        assert client.get_into("k", sink) == 500
        # The client's map stays the old one, and nobody answers its questions by TCP.
        town.own({1: ALL}, previous=0)
        town.instruct()
        town.nodes[0].freeze(town.epoch, ALL)
        for cached in (True, False):
            if not cached:
                path_of(client).locations.clear()
            if client.get_into("k", sink) is not None:
                raise Harm("a value was read at a worker that has given the shard up")


def test_an_owner_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
    stale_owner(monkeypatch)


def test_control_without_the_shard_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def confirmed(place: Place, between: bytes, now: bytes, word: int) -> bool:
        return remote_arena.confirmed(place, between, now, 1)

    monkeypatch.setattr(rdmaget, "confirmed", confirmed)
    with pytest.raises(Harm):
        stale_owner(monkeypatch)


# -- deadlines ---------------------------------------------------------------------------------------------


def late_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A READ into the caller's buffer is under way when the time is up. Raises Harm when it is written afterwards."""
    with RdmaTown(monkeypatch, size=64 * MIB) as town:
        client = town.rdma(deadline_s=0.8)
        value = value_of("k", 1, 100 * KIB)
        assert client.put("k", value)
        sink = client.register(bytearray(len(value)))
        assert client.get_into("k", sink) == len(value)
        town.network.hold(lambda link, op: op[0] != WRITE and op[3] >= 100 * KIB)
        sink.view()[:] = bytes(len(value))
        began = time.monotonic()
        assert client.get_into("k", sink) == len(value)  # by TCP, within the deadline
        assert time.monotonic() - began < 0.8 + 0.5
        assert sink.view() == value
        sink.view()[:] = b"\xee" * len(value)  # it is the caller's again
        town.network.release()
        town.network.run()
        if bytes(sink.view()) != b"\xee" * len(value):
            raise Harm("the buffer was written after the call had returned")
        assert client.counters["rdma_fallbacks"] == 1
        assert client.stats()["workers"][0]["path"] in ("tcp", "rdma")
        until_rdma(client)
        assert client.get_into("k", sink) == len(value)
        assert client.counters["rdma_fallbacks"] == 1


def test_a_deadline_with_a_read_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    late_bytes(monkeypatch)


def test_control_without_closing_the_links_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Harm), links_outlive_failures(monkeypatch):
        late_bytes(monkeypatch)


def test_a_deadline_with_a_write_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may change the value once put has returned: what is stored is what it was."""
    with RdmaTown(monkeypatch, size=64 * MIB) as town:
        client = town.rdma(deadline_s=0.8)
        value = value_of("k", 1, 100 * KIB)
        source = client.register(bytearray(value))
        town.network.hold(lambda link, op: op[0] == WRITE and op[3] >= 100 * KIB)
        assert client.put("k", source)
        source.view()[:] = bytes(len(value))
        town.network.release()
        town.network.run()
        assert town.client("shm").get("k") == value
        assert client.counters["rdma_fallbacks"] == 1
        assert client.counters["rdma_puts"] == 0


def test_an_endpoint_that_says_nothing_after_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What became of it is not known: no second put by TCP."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma(deadline_s=0.8)
        assert all(client.put("k", b"first") for _ in range(5))  # its grants are there from now on
        path = path_of(client)
        wait_until(lambda: path._idle, "the lane is idle")
        path.tend = lambda now: None  # type: ignore[method-assign]
        wait_until(lambda: path._idle, "the lane is idle still")
        asleep, go_on = threading.Event(), threading.Event()

        def sleep() -> None:
            asleep.set()
            go_on.wait(5.0)

        sleeper = threading.Thread(target=town.node.endpoint.call, args=(sleep,))
        sleeper.start()
        asleep.wait(5.0)
        with pytest.MonkeyPatch.context() as inner:
            stored: list[Any] = []

            def store(_path: TcpPath, entries: Any, until: float) -> list[int]:
                stored.append(entries)
                return [0] * len(entries)

            inner.setattr(TcpPath, "store", store)
            began = time.monotonic()
            assert not client.put("k", b"second")
            assert time.monotonic() - began < 0.8 + 0.5
            assert not stored
        go_on.set()
        sleeper.join()
        until_rdma(client)
        assert client.get("k") in (b"first", b"second")
        assert client.put("k", b"third")
        assert client.get("k") == b"third"


def test_all_lanes_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with RdmaTown(monkeypatch) as town:
        client = town.rdma(deadline_s=0.4)
        assert client.put("k", b"value")
        path = path_of(client)
        lanes = [path.take(time.monotonic() + 5) for _ in range(rdmapath.LANES_MAX)]
        assert client.get("k") == b"value"  # by TCP
        assert client.counters["rdma_fallbacks"] == 1
        timer = threading.Timer(0.05, path.give, [lanes.pop()])
        timer.start()
        assert client.get("k") == b"value"
        assert client.counters["rdma_fallbacks"] == 1
        timer.join()
        for lane in lanes:
            path.give(lane)


# -- what dies -----------------------------------------------------------------------------------------------


def links_of(town: RdmaTown) -> list[FakeLink]:
    return [link for rail in town.fabrics[-1].fakes for link in rail.links]


def test_a_link_that_breaks_in_the_middle_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any step: every key is right, or a miss; nothing is left open."""
    for step in range(0, 120, 29):
        with RdmaTown(monkeypatch, seed=step, rails=("a", "b"), mine=("c", "d"), pieces=4) as town:
            client = town.rdma(deadline_s=5.0)
            keys = [f"k{number}" for number in range(60)]
            values = [value_of(key, 1, 3000) for key in keys]
            assert all(client.put_many(keys, values))
            count = 0

            def between(town: RdmaTown = town, step: int = step) -> None:
                nonlocal count
                count += 1
                if count == step + 20:
                    for link in links_of(town)[:1]:
                        town.network.kill(link)

            town.network.between = between
            sinks = [client.register(bytearray(3000)) for _ in keys]
            assert client.get_into_many(keys, sinks) == [3000] * 60
            assert [bytes(sink.view()) for sink in sinks] == values
            count = 0
            assert all(client.put_many(keys, [value_of(key, 2, 3000) for key in keys])) or count
            town.network.between = None
            until_rdma(client)
            for key, got in zip(keys, client.get_many(keys)):
                assert got is not None
                assert version_in(key, got) in (1, 2)


def test_a_rail_that_goes_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two: its pair takes itself out, and is there again once it works."""
    with RdmaTown(monkeypatch, rails=("a", "b"), mine=("c", "d")) as town:
        client = town.rdma(deadline_s=3.0)
        value = value_of("k", 1, 2 * MIB)
        source = client.register(bytearray(value))
        assert client.put("k", source)
        second = town.fabrics[0].fakes[1]
        town.network.drop(second)
        sink = client.register(bytearray(len(value)))
        assert client.get_into("k", sink) == len(value)
        assert sink.view() == value
        assert client.counters["rdma_fallbacks"] == 1
        until_rdma(client)
        lanes = path_of(client)
        lane = lanes.take(time.monotonic() + 5)
        assert [wire.rail.name for wire in lane.wires] == ["c"]
        lanes.give(lane)
        assert client.get_into("k", sink) == len(value)
        town.network.restore(second)
        lanes.drop("look again")
        until_rdma(client)
        lane = lanes.take(time.monotonic() + 5)
        assert [wire.rail.name for wire in lane.wires] == ["c", "d"]
        lanes.give(lane)
        assert client.get_into("k", sink) == len(value)
        assert sink.view() == value


def test_rails_that_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first choice of a pair does not work, the other one does."""
    with RdmaTown(monkeypatch, rails=("a", "b"), mine=("c",)) as town:
        monkeypatch.setattr(lane_module, "LINKS_MAX", 1)
        probe = town.rdma()
        mine = town.fabrics[0].fakes[0]
        theirs = town.node.endpoint.fabric.fakes
        path = path_of(probe)
        for blocked, wanted in ((0, 1), (1, 0)):
            town.network._severed.clear()
            town.network.sever(mine, theirs[blocked])
            path.drop("again")
            until_rdma(probe)
            lane = path.take(time.monotonic() + 5)
            assert [wire.side.rail for wire in lane.wires] == [wanted]
            path.give(lane)
            assert probe.put("k", b"value")
            assert probe.get("k") == b"value"
        town.network.sever(mine, theirs[0])
        path.drop("again")
        wait_until(lambda: "no pair of rails works" in path.why, "no pair is found")
        assert probe.stats()["workers"][0]["path"] == "tcp"
        assert probe.get("k") == b"value"


def test_an_endpoint_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    with RdmaTown(monkeypatch) as town:
        client = town.rdma(deadline_s=3.0)
        assert client.put("k", b"value" * 100)
        assert client.get("k") == b"value" * 100
        arena = path_of(client).arena
        town.node.endpoint.stop()
        assert client.get("k") == b"value" * 100
        assert client.put("k", b"other" * 100)
        assert client.get("k") == b"other" * 100
        assert client.stats()["workers"][0]["path"] == "tcp"
        town.node.endpoint.start()
        until_rdma(client)
        before = client.counters["rdma_gets"]
        assert client.get("k") == b"other" * 100
        assert client.counters["rdma_gets"] == before + 1
        assert path_of(client).arena is not arena  # other keys: what was cached is of no use
        assert client.put("k", b"third")
        assert client.get("k") == b"third"


def test_a_worker_that_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """READs go on meanwhile; grants of before are stale, and the put goes by TCP, then by new grants."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma(deadline_s=5.0)
        keys = [f"k{number}" for number in range(20)]
        assert all(client.put_many(keys, [value_of(key, 1, 2000) for key in keys]))
        before = client.counters["rdma_gets"]
        town.node.worker.die()
        for key, got in zip(keys, client.get_many(keys)):
            assert got == value_of(key, 1, 2000)
        assert client.counters["rdma_gets"] == before + 20
        town.node.worker.start()
        town.instruct()

        def stored() -> bool:
            return client.put("new", value_of("new", 1, 2000))

        wait_until(stored, "puts work again")
        assert client.get("new") == value_of("new", 1, 2000)
        puts = client.counters["rdma_puts"]
        until_rdma(client)
        wait_until(lambda: stored() and client.counters["rdma_puts"] > puts, "puts go by RDMA again")


def test_a_closed_arena_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    with RdmaTown(monkeypatch) as town:
        client = town.rdma()
        assert client.put("k", b"value")
        segment = memoryview(town.node.worker.segment.mm).cast("Q")
        state = segment[Word.STATE]
        segment[Word.STATE] = State.SUSPENDED
        wait_until(lambda: not path_of(client).up, "the path is dropped")
        assert "closed" in path_of(client).why
        segment[Word.STATE] = state
        segment.release()
        until_rdma(client)
        assert client.get("k") == b"value"


def test_a_heartbeat_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a manager it means nothing. Without one the path is dropped, and comes back when the heart beats again."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma()
        assert client.put("k", b"value")
        town.node.worker.die()
        time.sleep(2 * rdmapath.STALE_S)
        assert path_of(client).up
        assert client.get("k") == b"value"
        town.manager.stop()
        wait_until(lambda: not path_of(client).up, "the path is dropped")
        wait_until(lambda: "heartbeat" in path_of(client).why, "for that reason")
        path_of(client).breaker.retry_at = 0.0
        before = path_of(client).breaker.failures
        wait_until(lambda: path_of(client).breaker.failures > before, "a try in vain")
        assert not path_of(client).up
        town.node.worker.start()
        town.instruct()
        path_of(client).breaker.retry_at = 0.0
        wait_until(lambda: path_of(client).up, "it comes back")
        wait_until(lambda: client.put("k", b"other"), "puts work again")
        assert client.get("k") == b"other"


def test_a_server_whose_memory_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks, and still the path is known to be down."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma()
        town.network.hold()
        wait_until(lambda: not path_of(client).up, "the background finds out")
        town.network.release()
        until_rdma(client)
        assert client.put("k", b"value")


def test_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at any step: the call raises, nothing touches its memory afterwards, and the next call works."""
    with RdmaTown(monkeypatch, rails=("a", "b"), mine=("c", "d"), pieces=4) as town:
        client = town.rdma(deadline_s=5.0)
        path_of(client).tend = lambda now: None  # type: ignore[method-assign]
        keys = [f"k{number}" for number in range(8)]
        values = [value_of(key, 1, 2000) for key in keys]
        me = threading.get_ident()
        hit = 0
        for step in range(1, 60, 7):
            until_rdma(client)
            count = 0

            def between(step: int = step) -> None:
                nonlocal count
                if threading.get_ident() == me:
                    count += 1
                    if count == step:
                        raise KeyboardInterrupt

            sources = [client.register(bytearray(value)) for value in values]
            sinks = [client.register(bytearray(2000)) for _ in values]
            for act, memory in ((client.put_many, sources), (client.get_into_many, sinks)):
                town.network.between = between
                try:
                    act(keys, memory)
                except KeyboardInterrupt:
                    hit += 1
                finally:
                    town.network.between = None
                for sink in sinks:
                    sink.view()[:] = b"\xee" * 2000
                for source in sources:
                    source.view()[:] = bytes(2000)
                town.network.run()
                assert all(bytes(sink.view()) == b"\xee" * 2000 for sink in sinks)
                for source, value in zip(sources, values):
                    source.view()[:] = value
                count = 0
        assert hit > 5
        until_rdma(client)
        assert all(client.put_many(keys, values))
        assert client.get_many(keys) == values
        path_of(client).bounce.check()


def test_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child uses none of the parent's lanes; the parent's go on."""
    with RdmaTown(monkeypatch) as town:
        client = town.rdma()
        span = client.register(bytearray(b"x" * 5000))
        assert client.put("k", span)
        fabric = town.fabrics[0]
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(write, f"{fabric.abandoned} {span.registration._regions} {client._routes.router}".encode())
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        said = os.read(read, 1000)
        os.close(read)
        assert said == b"True {} None"
        assert not fabric.abandoned
        sink = client.register(bytearray(5000))
        assert client.get_into("k", sink) == 5000
        assert sink.view() == b"x" * 5000
        assert client.counters["rdma_fallbacks"] == 0


def test_closing_while_others_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with RdmaTown(monkeypatch, background=True) as town:
        client = town.rdma(deadline_s=3.0)
        assert client.put("k", value_of("k", 1, 5000))
        wrong: list[Any] = []
        go = threading.Event()

        def work() -> None:
            sink = client.register(bytearray(5000))
            go.set()
            with contextlib.suppress(Exception):  # UsageError: closed
                for _ in range(2000):
                    got = client.get_into("k", sink)
                    if got and bytes(sink.view()) != value_of("k", 1, 5000):
                        wrong.append(got)
                    if client._closed and got is None:
                        return

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        go.wait(5)
        time.sleep(0.1)
        client.close()
        for thread in threads:
            thread.join(20)
        assert not wrong
        assert not any(thread.is_alive() for thread in threads)


def test_one_key_twice_when_the_lane_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later value is stored, whatever of both went by RDMA; and it never comes after a later put."""
    for step in range(5, 200, 39):
        with RdmaTown(monkeypatch, seed=step, pieces=4) as town:
            client = town.rdma(deadline_s=5.0)
            count = 0

            def between(town: RdmaTown = town, step: int = step) -> None:
                nonlocal count
                count += 1
                if count == step:
                    for link in links_of(town):
                        town.network.kill(link)

            keys = [f"k{number % 20}" for number in range(40)]
            values = [value_of(key, 1 + number // 20, 400) for number, key in enumerate(keys)]
            town.network.between = between
            done = client.put_many(keys, values)
            town.network.between = None
            for key, good, got in zip(keys[20:], done[20:], client.get_many(keys[20:])):
                if good:
                    assert got is not None
                    assert version_in(key, got) == 2, step


def test_grants_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with RdmaTown(monkeypatch) as town:
        client = town.rdma()
        assert all(client.put_many([f"k{number}" for number in range(40)], [bytes(3000)] * 40))
        path = path_of(client)
        wait_until(lambda: path._lanes == len(path._idle), "nobody has a lane")
        lanes = list(path._idle)
        assert any(pool for lane in lanes for pool in lane.pool.values())
        town.node.endpoint.call(lambda: town.node.endpoint.endpoint._recall(1 << 30))
        wait_until(
            lambda: not any(pool for lane in lanes for pool in lane.pool.values()), "the background returns them"
        )
        assert client.put("k", bytes(3000))
        client.close()
        wait_until(lambda: not town.node.endpoint.endpoint.lanes, "the lanes are gone")
        wait_until(lambda: not town.node.endpoint.endpoint.granted_bytes, "and their grants")


def test_no_room_is_said_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with RdmaTown(monkeypatch) as town:
        client = town.rdma()
        assert not client.put("k", bytes(40 * MIB))
        assert client.put("k", bytes(MIB))
        assert client.get("k") == bytes(MIB)
