"""Arenas that are found at a start: whose they are by name, and which are fit for a warm start."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simm import dataserver, shm
from simm.arena.layout import HEADER_BYTES, SHARDS_BYTES, SLOTS_MIN, Geometry, State, Word
from simm.arena.vault import Vault
from simm.dataserver import DataServer
from simm.errors import ConfigError, SegmentError
from simm.ipc import segments as ipc_segments
from simm.ipc.segments import (
    SOCKET_PATH_BYTES_MAX,
    ArenaName,
    admin_path,
    check_server_name,
    check_socket_paths,
    embedded_server_name,
    socket_path,
)
from simm.net.listeners import require_free
from simm.net.sd_notify import Notifier
from simm.server.arena_stock import ArenaStock
from simm.server.children import Children, WorkerSlot
from simm.server.options import DataServerOptions
from simm.shm import AttachedSegment, data_name
from tests.support.dose import dose
from tests.support.left_arenas import (
    CLUSTER,
    HARMLESS,
    MIB,
    SEEN,
    clean,
    files_of,
    fit,
    header_word,
    make_arena,
    make_suspended,
    name_of,
    spoil,
    start_warm,
)
from tests.support.notify_socket import NotifySocket

# -- names -------------------------------------------------------------------------------------------


def test_a_name_has_one_meaning() -> None:
    """What is put into a name comes out of it, and no two servers have one name."""
    rng = random.Random(7)
    pieces = ["gpu", "gpu-1", "0", "1", "-", "--", "simm-0-x", "0123456789abcdef", "local-7-0123abcd", ".", "_", "a\n"]
    seen: dict[str, ArenaName] = {}
    for _ in range(3000):
        server = "-".join(rng.choices(pieces, k=rng.randint(1, 4)))
        made = ArenaName(rng.choice([0, 1000]), server, rng.randrange(64), rng.choice([1, 15, (1 << 63) - 1, 1 << 63]))
        assert ArenaName.parse(str(made)) == made
        assert seen.setdefault(str(made), made) == made


@pytest.mark.parametrize(
    "name",
    ["", "simm-", "simm-0-gpu-0-", "simm-0-gpu-0-0123456789abcde", "simm-0-gpu-0-0123456789abcdeF",
     "simm-0--0-" + "0" * 16, "simm-0-gpu-00-" + "0" * 16, "simm-00-gpu-0-" + "0" * 16,
     "simm-0-gpu-0-" + "0" * 16 + "\n", "simm-0-gpu-x-" + "0" * 16, "xsimm-0-gpu-0-" + "0" * 16,
     "simm-bench-123-01234567", "simm-x-gpu-0-" + "0" * 16],
)  # fmt: skip
def test_what_is_no_arenas_name(name: str) -> None:
    assert ArenaName.parse(name) is None


def test_names_of_embedded_clusters_are_no_users() -> None:
    name = embedded_server_name(4711)
    check_server_name(name, 4711)
    for other in (0, 4712):
        with pytest.raises(ConfigError, match=r"--name local-4711-.*choose another"):
            check_server_name(name, other)
    for fine in ("local", "local-4711", "local-gpu", f"{name}x", f"x{name}", "local-7-0123ABCD", "local-07-0123abcd"):
        check_server_name(fine, 0)


@pytest.fixture
def shm_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own in place of /dev/shm."""
    monkeypatch.setattr(shm, "SHM_DIR", str(tmp_path))
    # What is free on a disk changes with everything that runs, so waiting for it is in vain.
    monkeypatch.setattr(ipc_segments, "LET_GO_S", 0.0)
    return tmp_path


def test_only_what_is_exactly_the_servers_is_removed(shm_dir: Path) -> None:
    mine = [name_of("gpu"), name_of("gpu", 1), name_of("gpu", 63, 5)]
    others = [
        name_of("gpu-1"), name_of("gpu-0"), name_of("gpu-1", 3), name_of("gp"), name_of("gpu-0-0000000000000abc"),
        name_of("local-gpu"), name_of("local-1"), name_of("local-77-0123abcdx"),
        str(ArenaName(os.geteuid() + 1, "gpu", 0, 1)), f"simm-{os.geteuid()}-gpu-0-1", f"simm-{os.geteuid()}-gpu-x",
        "simm-bench-1-01234567",
    ]  # fmt: skip
    embedded = [name_of(embedded_server_name(77)), name_of(embedded_server_name(78), 2)]
    for name in [*mine, *others, *embedded]:
        (shm_dir / name).write_bytes(bytes(8192))
    assert sorted(left.name for left in ipc_segments.left_by("gpu")) == sorted(mine)
    assert sorted(clean("gpu")) == sorted([*mine, *embedded])
    assert sorted(os.listdir(shm_dir)) == sorted(others)
    assert ipc_segments.left_by("gpu") == []


def test_mutation_a_prefix_takes_what_is_anothers(shm_dir: Path) -> None:
    other = name_of("gpu-1")
    (shm_dir / other).write_bytes(bytes(8192))
    assert shm.leftovers(f"simm-{os.geteuid()}-gpu-") == [other]


def test_live_ones_and_those_of_others_stay(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, locked = make_arena(name_of("gpu")), make_arena(name_of(embedded_server_name(os.getpid())))
    assert clean("gpu") == []
    names = {live.name, locked.name}
    for each in (live, locked):
        each.close()
    uid = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: uid + 1)
        (shm_dir / name_of("gpu")).write_bytes(b"of the other uid by its name, and ours by its owner")
        assert clean("gpu") == []
    assert set(ipc_segments.remove_old(names)) == names


def test_the_metadata_stays_as_long_as_the_data(shm_dir: Path) -> None:
    """The locks of a process that ends are released one after the other. Between them nothing is removed."""
    name = name_of("gpu")
    arena = make_arena(name)
    arena.meta.unlock()
    assert ipc_segments.remove_old([name]) == []
    assert sorted(os.listdir(shm_dir)) == [name, shm.data_name(name)]
    releasing = threading.Timer(0.02, arena.data.unlock)
    releasing.start()
    try:
        ipc_segments.remove_if_left(name, 30.0)
        assert os.listdir(shm_dir) == []
    finally:
        releasing.join()
        arena.close()


# -- warm starts: what is fit for one -------------------------------------------------------------------


def test_an_arena_that_was_left_in_order_is_taken(shm_dir: Path, tmp_path: Path) -> None:
    name = name_of("gpu")
    values = make_suspended(name)
    taken, why = fit("gpu", 1)
    assert {number: left.name for number, left in taken.items()} == {0: name} and not why
    assert (taken[0].epoch, taken[0].size) == (5, 8 * MIB)
    assert start_warm(name, tmp_path) == values


@pytest.mark.parametrize("what", SEEN)
def test_what_is_set_aside_at_sight(shm_dir: Path, what: str) -> None:
    name = name_of("gpu")
    make_suspended(name)
    damage, reason = SEEN[what]
    spoil(shm_dir / name, damage)
    taken, why = fit("gpu", 1)
    assert not taken and list(why) == [name] and reason in why[name]
    assert clean("gpu") == [name] and not os.listdir(shm_dir)


@pytest.mark.parametrize(
    "content", [b"", b"x", bytes(4096), bytes(8 * MIB), b"\xff" * 4096, random.Random(1).randbytes(8 * MIB)],
    ids=["empty", "a byte", "a page of zeros", "zeros", "ones", "random"],
)  # fmt: skip
def test_what_is_no_arena_is_not_looked_at_twice(shm_dir: Path, content: bytes) -> None:
    name = name_of("gpu")
    (shm_dir / name).write_bytes(content)
    (left,) = ipc_segments.left_by("gpu")
    assert left.state == 0 and left.fault
    assert fit("gpu", 1) == ({}, {})
    assert clean("gpu") == [name] and not os.listdir(shm_dir)


def test_holes_are_seen(shm_dir: Path) -> None:
    """Cut short and made longer again: the header is whole, and values would be zeros."""
    name = name_of("gpu")
    make_suspended(name)
    for file in (shm_dir / name, shm_dir / data_name(name)):
        whole = file.read_bytes()
        os.truncate(file, len(whole) - MIB)
        os.truncate(file, len(whole))
        taken, why = fit("gpu", 1)
        assert not taken and "pages of it are missing" in why[name]
        file.write_bytes(whole)
    assert fit("gpu", 1)[0]


def test_both_files_are_one_arenas(shm_dir: Path) -> None:
    """Without its data, or with another one's, nothing is taken; and data without an arena is removed."""
    name, other = name_of("gpu"), name_of("other")
    make_suspended(name)
    make_suspended(other)
    own = (shm_dir / data_name(name)).read_bytes()
    (shm_dir / data_name(name)).write_bytes((shm_dir / data_name(other)).read_bytes())
    assert fit("gpu", 1) == ({}, {name: "its data is another arena's"})
    (shm_dir / data_name(name)).unlink()
    assert fit("gpu", 1) == ({}, {name: "its data is gone"})
    assert clean("gpu") == [name] and sorted(os.listdir(shm_dir)) == files_of(other)
    (shm_dir / data_name(name)).write_bytes(own)
    assert [left.name for left in ipc_segments.left_by("gpu")] == [name]
    assert clean("gpu") == [name] and sorted(os.listdir(shm_dir)) == files_of(other)


@pytest.mark.parametrize("what", HARMLESS)
def test_what_recovery_gives_up_costs_no_value(shm_dir: Path, tmp_path: Path, what: str) -> None:
    name = name_of("gpu")
    values = make_suspended(name)
    spoil(shm_dir / name, HARMLESS[what])
    assert fit("gpu", 1)[0]
    assert start_warm(name, tmp_path) == values


@pytest.mark.parametrize("where", ["header", "slots", "ledger", "tables", "everything"])
@pytest.mark.parametrize("seed", dose(range(12), quick=2))
def test_damage_by_chance(shm_dir: Path, tmp_path: Path, where: str, seed: int) -> None:
    """Refused at sight, refused by recovery, or taken, and then right: it checks, takes puts, and has no other values
    than it had (bytes of values themselves are nobody's to check without ``--checksum``)."""
    rng = random.Random(f"{where} {seed}")
    name = name_of("gpu")
    values = make_suspended(name)
    geometry = Geometry.plan(8 * MIB)
    start, stop = {
        "header": (0, 17 * 8), "slots": (geometry.slots_offset, geometry.ledger_offset),
        "ledger": (geometry.ledger_offset, geometry.ledger_offset + geometry.ledger_bytes),
        "tables": (0, geometry.data_offset), "everything": (0, geometry.size),
    }[where]  # fmt: skip

    def damage(raw: bytearray) -> None:
        for _ in range(rng.choice([1, 3, 30, 3000])):
            at = rng.randrange(start, stop)
            if rng.random() < 0.5:
                at &= ~7
                raw[at : at + 8] = rng.choice([rng.randbytes(8), bytes(8), b"\xff" * 8, b"\1" + bytes(7)])
            else:
                raw[at] ^= 1 << rng.randrange(8)

    spoil(shm_dir / name, damage)
    taken, why = fit("gpu", 1)
    assert taken or why or ipc_segments.left_by("gpu")[0].state != State.SUSPENDED
    if taken:
        try:
            found = start_warm(name, tmp_path)
        except (MemoryError, OSError, AssertionError):
            raise
        except Exception:
            assert clean("gpu") == [name]
            return
        assert len(found) <= len(values)
        if where in ("header", "ledger"):
            assert found.items() <= values.items()
    assert clean("gpu") == [name]


def test_all_workers_or_none(shm_dir: Path) -> None:
    """JOIN has one flag and one epoch for all."""
    names = [name_of("gpu", number) for number in range(3)]
    make_suspended(names[0])
    assert fit("gpu", 2) == ({}, {names[0]: "of 2 workers' arenas 1 can be used"})
    make_suspended(names[1])
    assert set(fit("gpu", 2)[0]) == {0, 1}
    assert fit("gpu", 3)[0] == {}
    taken, why = fit("gpu", 1)
    assert set(taken) == {0} and why == {names[1]: "this server has 1 workers"}
    make_suspended(names[2], epoch=6)
    assert fit("gpu", 3) == ({}, dict.fromkeys(names, "the workers' arenas end with different maps"))


def grown(name: str, node: int = 0) -> None:
    with AttachedSegment.open(name, writable=True) as segment:
        with memoryview(segment.map(0, HEADER_BYTES, writable=True)).cast("Q") as words:
            words[Word.GROWN] = node + 1


def test_what_was_added_comes_back_with_the_others(shm_dir: Path) -> None:
    """Whatever its size, if it ends with their map. The others are as good without it, but not the other way round."""
    names = [name_of("gpu", number) for number in range(3)]
    for name in names[:2]:
        make_suspended(name)
    assert set(fit("gpu", 1)[0]) == {0}, "a worker that was not added stays behind when there are fewer"
    grown(names[1], 3)
    taken, why = fit("gpu", 1, 8 * MIB)
    assert set(taken) == {0, 1} and not why and (taken[0].grown, taken[1].grown) == (0, 4)
    make_suspended(names[2], epoch=6)
    grown(names[2])
    taken, why = fit("gpu", 1, 8 * MIB)
    assert set(taken) == {0, 1}
    assert why == {names[2]: "it was added to the running server, and ends with another map than the others"}
    taken, why = fit("gpu", 1, 16 * MIB)
    assert not taken and "--memory asks for 16" in why[names[0]]
    assert why[names[1]] == "of 1 workers' arenas 0 can be used", "the sum of all is no size of the first"
    assert set(fit("gpu", 2, 8 * MIB)[0]) == {0, 1}, "--workers may ask for what was added"
    assert fit("gpu", 4, 8 * MIB)[0] == {}


def test_the_newest_of_two(shm_dir: Path) -> None:
    old, new, twin = (name_of("gpu", 0, instance) for instance in (9, 8, 7))
    make_suspended(old)
    make_suspended(new, epoch=6)
    taken, why = fit("gpu", 1)
    assert taken[0].name == new and why == {old: f"{new} is at least as new"}
    make_suspended(twin, epoch=6)
    taken, why = fit("gpu", 1)
    assert not taken and set(why) == {old, new, twin}, "nobody knows which of the two is the one"


def test_other_sizes_are_set_aside(shm_dir: Path) -> None:
    name = name_of("gpu")
    make_suspended(name)
    slots = Geometry.plan(8 * MIB).slots
    for arguments in ((1,), (1, 8 * MIB), (1, 0, lambda _: slots), (1, 8 * MIB, lambda _: slots)):
        assert set(fit("gpu", *arguments)[0]) == {0}, arguments
    assert "--memory asks for 16" in fit("gpu", 1, 16 * MIB)[1][name]
    assert "--slots or --value-size asks for 64" in fit("gpu", 1, 0, lambda _: 64)[1][name]
    assert "--slots or --value-size asks for 64" in fit("gpu", 1, 0, lambda _: 57)[1][name]
    assert f"--slots or --value-size asks for {1 << 30}" in fit("gpu", 1, 0, lambda _: 1 << 30)[1][name]


def test_closing_what_is_damaged(shm_dir: Path) -> None:
    """Another layout's shard words are elsewhere, perhaps: only its state is changed."""
    name = name_of("gpu")
    make_suspended(name)
    before = (shm_dir / name).read_bytes()
    spoil(shm_dir / name, header_word(Word.VERSION, lambda version: version + 1))
    ipc_segments.store_closed(name)
    after = (shm_dir / name).read_bytes()
    assert ipc_segments.state_of(name) == State.CLOSED and after[HEADER_BYTES:] == before[HEADER_BYTES:]
    spoil(shm_dir / name, header_word(Word.VERSION, lambda version: version - 1))
    ipc_segments.store_closed(name)
    assert not any((shm_dir / name).read_bytes()[HEADER_BYTES : HEADER_BYTES + SHARDS_BYTES])
    (shm_dir / name).write_bytes(b"x" * 5000)
    ipc_segments.store_closed(name)
    assert (shm_dir / name).read_bytes() == b"x" * 5000


# -- two clusters on one host --------------------------------------------------------------------------


def test_no_arena_of_another_cluster_is_taken(shm_dir: Path) -> None:
    """What ``take_over`` does with ours, another's, one of no cluster, ones of another layout, a dead server's."""
    ours, foreign, none, newer, dead, newer_of_ours = (name_of("gpu", 0, instance) for instance in range(1, 7))
    make_suspended(ours, epoch=9)
    make_suspended(foreign, cluster=CLUSTER + 1)
    make_suspended(none)
    spoil(shm_dir / none, header_word(Word.CLUSTER, lambda _: 0))
    make_suspended(newer, cluster=CLUSTER + 1)
    make_suspended(newer_of_ours)
    for name in (newer, newer_of_ours):
        spoil(shm_dir / name, header_word(Word.VERSION, lambda version: version + 1))
    make_suspended(dead, cluster=CLUSTER + 1)
    spoil(shm_dir / dead, header_word(Word.STATE, lambda _: State.OPEN))
    before = {name: (shm_dir / name).read_bytes() for name in (foreign, newer)}
    for warm in (True, False):
        stock = ArenaStock(DataServerOptions("gpu", "", [0], warm=warm), 99)
        assert {left.name for left in stock.undecided()} >= {ours, foreign, newer}
        taken = stock.take_over(CLUSTER)
        assert [segment.name for segment in taken.values()] == [ours] * warm
        assert (stock.cluster, stock.epoch) == ((CLUSTER, 9) if warm else (0, 0))
        for segment in taken.values():
            segment.close()
        assert sorted(os.listdir(shm_dir)) == files_of(*[foreign, newer] + [ours] * warm)
    assert {name: (shm_dir / name).read_bytes() for name in before} == before


#: A worker that has suspended its arena, closed its sockets, and is not quite gone. It ends with its input.
ENDING_WORKER = """
import os, sys
from simm.host.file_locks import try_lock
assert try_lock(os.open(sys.argv[1], os.O_RDWR), 1)
print("locked", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def ending_worker(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the writer lock of the arena at ``path``."""
    arguments = [sys.executable, "-c", ENDING_WORKER, str(path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"locked\n"
        try:
            yield process
        finally:
            process.communicate()


def test_a_start_waits_for_a_worker_whose_server_was_killed(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel unmaps an arena before it releases the worker's lock, and its sockets may be closed by then."""
    name = name_of("gpu")
    make_suspended(name)
    monkeypatch.setattr(ipc_segments, "LET_GO_S", 600.0)
    look, looks = shm.without_owner, []
    with ending_worker(shm_dir / name) as process, caplog.at_level(logging.INFO, "simm"):

        def looked(*arguments: object) -> list[str]:
            looks.append(look(*arguments))  # type: ignore[arg-type]
            if len(looks) == 3:
                process.communicate()
            return looks[-1]

        monkeypatch.setattr(shm, "without_owner", looked)
        stock = ArenaStock(DataServerOptions("gpu", "", [0], warm=True), 99)
        assert [left.name for left in stock.undecided()] == [name]
        taken = stock.take_over(CLUSTER)
    assert [segment.name for segment in taken.values()] == [name]
    assert looks == [[name]] * 3 + [[]] and caplog.text.count("let go") == 1
    for segment in taken.values():
        segment.close()


def test_a_start_that_is_stopped_does_not_wait_for_a_worker(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service manager, which may end a start that takes long, hears before the wait how much is unmapped."""
    name = name_of("gpu")
    make_suspended(name)
    size = sum((shm_dir / each).stat().st_size for each in (name, data_name(name)))
    monkeypatch.setattr(ipc_segments, "LET_GO_S", 60.0)
    asked, waits = [], []  # type: ignore[var-annotated]

    def while_running() -> bool:
        asked.append(list(waits))
        return len(asked) < 3

    with ending_worker(shm_dir / name):
        stock = ArenaStock(DataServerOptions("gpu", "", [0], warm=True), 99, while_running, waits.append)
        assert stock.undecided() == []
    assert asked == [[], [size], [size]]


def test_issue_a_start_that_is_stopped_does_not_wait_for_memory(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name, frees = name_of("gpu"), list[int]()
    make_suspended(name)
    monkeypatch.setattr(ipc_segments, "LET_GO_S", 5.0)

    def free(_directory: str) -> int:
        frees.append(1 << 40)
        return frees[-1]

    monkeypatch.setattr(ipc_segments, "shm_free_bytes", free)
    stock = ArenaStock(DataServerOptions("gpu", "", [0]), 99, lambda: len(frees) < 3)
    assert stock.take_over(CLUSTER) == {} and not os.listdir(shm_dir)
    assert len(frees) == 3 and "not free yet" not in caplog.text


#: The same with its sockets open, as its files are closed last: the arena, one at a path, and a port, which it tells.
LISTENING_WORKER = """
import os, socket, sys
from simm.host.file_locks import try_lock
assert try_lock(os.open(sys.argv[1], os.O_RDWR), 1)
listeners = socket.create_server(sys.argv[2], family=socket.AF_UNIX), socket.create_server(("127.0.0.1", 0))
print(listeners[1].getsockname()[1], flush=True)
sys.stdin.read()
"""


class Start:
    """A data server that starts in this process, up to where it would ask the manager for its cluster."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        for name in ("stop_on_signals", "raise_file_limit"):
            monkeypatch.setattr(dataserver, name, lambda *_, **__: None)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(Children, "protect_parent", lambda _: None)
        monkeypatch.setattr(DataServer, "_find_cluster", lambda server: self._stop(server))
        monkeypatch.setattr(ipc_segments, "UNMAP_BYTES_PER_S", 1)  # the wait for a worker has no end
        look = shm.without_owner
        self.looks = 0
        self.third_look: Callable[[], object] = lambda: None
        self.asked = False
        self.server = DataServer(DataServerOptions("gpu", nodes=[0], warm=True, rdma="off", **options))

        def looked(*arguments: Any) -> list[str]:
            self.looks += 1
            assert self.looks < 500, "it waits for ever"
            if self.looks == 3:
                self.third_look()
            return look(*arguments)

        monkeypatch.setattr(shm, "without_owner", looked)

    def _stop(self, server: DataServer) -> int:
        self.asked = True
        server.loop.stop()
        return 0

    def run(self) -> None:
        try:
            self.server.start()
        finally:
            if self.server._lock is not None:
                self.server._lock.release()
            self.server.loop.close()


def test_a_start_waits_before_it_looks_at_the_sockets_of_a_killed_servers_worker(
    shm_dir: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are open as long as its arena is unmapped, which no bound for a process that just ends covers."""
    name = name_of("gpu")
    make_suspended(name)
    folder = str(tmp_path_factory.mktemp("run"))
    monkeypatch.setattr(dataserver, "require_free", lambda addresses: require_free(addresses, 0.0))
    arguments = [sys.executable, "-c", LISTENING_WORKER, str(shm_dir / name), socket_path(folder, "gpu", 0)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            start = Start(monkeypatch, runtime_dir=folder, listen_port=port)
            start.third_look = process.communicate
            start.run()
        finally:
            process.communicate()
    assert start.asked and start.looks >= 3 and not os.path.exists(socket_path(folder, "gpu", 0))


def test_a_start_that_waits_ends_with_its_parent(
    shm_dir: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loop does not turn meanwhile, nor while memory is faulted in."""
    name = name_of("gpu")
    make_suspended(name)
    reader = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(reader, stdin=subprocess.PIPE) as parent, ending_worker(shm_dir / name) as worker:
        folder = str(tmp_path_factory.mktemp("run"))
        start = Start(monkeypatch, runtime_dir=folder, end_with=parent.pid)
        going: list[bool] = []

        def end() -> None:
            going.append(start.server._faulted_in(0, 0, 1))
            parent.communicate()
            going.append(start.server._faulted_in(0, 0, 1))

        start.third_look = end
        start.run()
        assert going == [True, False] and not start.asked and worker.poll() is None and start.looks == 3


@pytest.mark.parametrize("warm", [True, False])
def test_issue_a_start_that_fails_before_its_workers_keeps_the_arenas(
    shm_dir: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, warm: bool
) -> None:
    """Only slots are cleaned up, and an arena was none yet: sealed data was lost, and a new arena stayed."""
    if warm:
        make_suspended(name_of("gpu"))
    start = Start(monkeypatch, runtime_dir=str(tmp_path_factory.mktemp("run")), group=os.getegid(), memory=8 * MIB)
    monkeypatch.setattr(DataServer, "_find_cluster", lambda _: CLUSTER)
    monkeypatch.setattr(start.server, "_goes_on", lambda: True)

    def fail(*_: object) -> None:
        raise OSError(12, "no memory")

    monkeypatch.setattr(WorkerSlot, "__init__", fail)
    with pytest.raises(OSError, match="no memory"):
        start.run()
    assert sorted(os.listdir(shm_dir)) == (files_of(name_of("gpu")) if warm else [])
    assert set(fit("gpu", 1)[0]) == ({0} if warm else set())


def test_a_server_has_its_start_extended_while_it_waits_for_a_worker(
    shm_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name_of("gpu")
    make_suspended(name)
    monkeypatch.setattr(ipc_segments, "LET_GO_S", 60.0)
    with (
        ending_worker(shm_dir / name) as process,
        NotifySocket(tmp_path / "n") as manager,
        contextlib.closing(Notifier(manager.address)) as notifier,
    ):
        server = DataServer(DataServerOptions("gpu", "", [0], warm=True), notifier)
        look, heard = shm.without_owner, list[str]()

        def looked(*arguments: object) -> list[str]:
            heard.extend(line for line in manager.waiting() if line.startswith("EXTEND_TIMEOUT_USEC="))
            if heard:
                server.loop.stop()  # as SIGTERM does
            return look(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(shm, "without_owner", looked)
        assert server.stock.undecided() == [] and heard and process.poll() is None
        server.loop.close()


def test_a_start_does_not_wait_for_ever_for_a_worker(shm_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor at all for one whose server lives, with another runtime folder."""
    name = name_of("gpu")
    make_suspended(name)
    with ending_worker(shm_dir / name), caplog.at_level(logging.INFO, "simm"):
        stock = ArenaStock(DataServerOptions("gpu", "", [0], warm=True), 99)
        assert stock.undecided() == [] and stock.take_over(CLUSTER) == {}
        assert caplog.text.count("still in use") == 1
    live = make_arena(name_of("gpu", 1))
    live.lock_writer()
    assert shm.without_owner("simm-") == [] and shm.is_locked(live.name)
    live.close()


def test_an_arena_from_before_clusters_had_ids_is_set_aside_for_its_layout(
    shm_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layout 2 has no cluster in its header. The log names the layout, and does not say that it held nothing."""
    name = name_of("gpu")
    make_suspended(name)
    spoil(shm_dir / name, header_word(Word.CLUSTER, lambda _: 0))
    spoil(shm_dir / name, header_word(Word.VERSION, lambda _: 2))
    with caplog.at_level(logging.WARNING, "simm"):
        assert ArenaStock(DataServerOptions("gpu", "", [0], warm=True), 99).take_over(CLUSTER) == {}
    assert "has arena layout 2" in caplog.text and "never had a shard" not in caplog.text
    assert os.listdir(shm_dir) == []


def test_every_socket_of_a_server_has_a_path_that_the_kernel_takes() -> None:
    """The admin socket's, too, which is the longest of a server with few workers."""
    for workers in (1, 1001):
        longest = {len(socket_path("/run", "gpu", workers - 1)), len(admin_path("/run", "gpu"))}
        room = SOCKET_PATH_BYTES_MAX - max(longest)
        check_socket_paths("/run" + "/" + "r" * (room - 1), "gpu", workers)
        with pytest.raises(ConfigError, match=rf"has {SOCKET_PATH_BYTES_MAX + 1} bytes, .* choose a shorter"):
            check_socket_paths("/run" + "/" + "r" * room, "gpu", workers)


def test_memory_that_another_cluster_has_is_named(shm_dir: Path) -> None:
    name = name_of("gpu")
    make_suspended(name, cluster=CLUSTER + 1)
    stock = ArenaStock(DataServerOptions("gpu", "", [0], memory=1 << 50), 99)
    assert stock.take_over(CLUSTER) == {}
    with pytest.raises(SegmentError, match=f"configure a smaller arena.*; .*{name}.* is kept for another cluster"):
        stock.new(stock.size(), [0], lambda *_: True)
    assert sorted(os.listdir(shm_dir)) == files_of(name)


def test_a_start_that_is_stopped_while_it_faults_in_leaves_nothing(shm_dir: Path) -> None:
    stock = ArenaStock(DataServerOptions("gpu", "", [0, 0], memory=16 * MIB), 99)
    assert stock.new(stock.size(), [0, 1], lambda *_: False) == {} and os.listdir(shm_dir) == []


def test_a_table_for_values_of_a_size(shm_dir: Path) -> None:
    """``--value-size`` counts as slots: for new arenas, and for whether one fits a warm start."""
    by_size = {}
    for value in (0, 1000, 4096, 1 << 20):
        options = DataServerOptions("gpu", "", [0], memory=64 * MIB, value_bytes=value)
        arena = ArenaStock(options, 99).new(options.memory, [0], lambda *_: True)[0]
        store = ArenaStock(options, 99).store_in(0, arena, Vault(), "lru", (50, 25, 10))
        by_size[value] = store.geometry.slots
        store.release()
        arena.unlink()
        arena.close()
    assert by_size[1000] > 3 * by_size[0] and by_size[1 << 20] == SLOTS_MIN
    assert 0.9 * by_size[0] < by_size[4096] <= by_size[0]
    name = name_of("gpu")
    make_suspended(name)
    for value, fits in ((0, True), (4096, False)):
        options = DataServerOptions("gpu", "", [0], memory=8 * MIB, value_bytes=value, warm=True)
        taken = ArenaStock(options, 99).take_over(CLUSTER)
        assert bool(taken) == fits
        for arena in taken.values():
            arena.close()
