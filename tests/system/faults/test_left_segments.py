"""A data server that starts beside segments of every kind under its name: it takes none that is not its own."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from simm.arena.layout import State, Word
from simm.ipc.segments import ArenaName
from simm.shm import OwnedSegment, data_name
from simm.wire import messages as M
from tests.support.fleet import Fleet
from tests.support.left_arenas import MIB, header_word, make_arena, make_suspended, name_of, segments, spoil
from tests.support.segments import Peer
from tests.support.waiting import wait_until

NOBODY = 65534
#: It may be warm for its own cluster's server, so it stays.
OTHERS = "of another cluster"


def leave_all(server: str, cluster: int, first: int, rng: random.Random) -> dict[str, str]:
    """Make a segment of each kind that nobody has any longer; return what each is, by its name."""
    numbers = iter(range(first, first + 20))

    def name() -> str:
        return name_of(server, 0, next(numbers))

    made: dict[str, str] = {}
    for kind in (OTHERS, "same version", "other version", "truncated", "cut to nothing", "random header"):
        suspended = name()
        make_suspended(suspended, 20, cluster=cluster + (kind == OTHERS))
        made[suspended] = kind
        path = Path("/dev/shm", suspended)
        if kind == "other version":
            spoil(path, header_word(Word.VERSION, lambda version: version + 1))
        elif kind == "truncated":
            os.truncate(path, rng.randrange(1, MIB))
        elif kind == "cut to nothing":
            os.truncate(path, 0)
        elif kind == "random header":
            spoil(path, lambda raw: bytearray(rng.randbytes(4096)) + raw[4096:])
    killed = name()
    make_arena(killed, state=State.OPEN).close()
    made[killed] = "of a killed server"
    noise = name()
    Path("/dev/shm", noise).write_bytes(rng.randbytes(rng.randrange(1, 3 * MIB)))
    made[noise] = "random bytes"
    return made


@pytest.mark.fault("F18", ci=1, whole=100)
def test_a_start_beside_leftovers_of_every_kind(make_fleet: Callable[..., Fleet], amount: int) -> None:
    fleet = make_fleet(1, memory="32M", heartbeat_ms=200)
    server = fleet.servers[0]
    rng = random.Random(18)
    cluster = fleet.ask_manager(M.MapGet(0, 0)).cluster
    foreign: list[Path] = []
    living = name_of(server.name, 0, 0xF00)

    def live(peer: Peer) -> None:
        segment = OwnedSegment.create(living, 2 * MIB)
        peer.tell()
        peer.hear()
        segment.unlink()
        segment.close()

    holder = Peer(live)
    try:
        assert holder.hear() == b"."
        if not os.geteuid():  # of another uid by its name, and by its owner
            names = (str(ArenaName(NOBODY, server.name, 0, 1)), name_of(server.name, 0, 2))
            foreign = [Path("/dev/shm", name) for name in names]
            for path in foreign:
                path.write_bytes(rng.randbytes(MIB))
                os.chown(path, NOBODY, NOBODY)
        before = {path: path.read_bytes() for path in foreign}
        for number in range(amount):
            server.send_signal(signal.SIGKILL, family=True) if number % 2 else server.end()
            if number % 2:
                server.wait()
            left = leave_all(server.name, cluster, 100 + 20 * number, rng)
            assert set(left) <= segments(server.name), "the positive control: all are there"
            server.start()
            fleet.wait_settled()
            still = [name for name in left if name in segments(server.name)]
            assert [left[name] for name in still] == [OTHERS]
            assert f"{still[0]} (8 MiB) is suspended and of cluster" in fleet.logs()
            for name in (still[0], data_name(still[0])):
                Path("/dev/shm", name).unlink()
            assert Path("/dev/shm", living).exists(), "its process lives"
            assert {path: path.read_bytes() for path in foreign} == before
            fleet.assert_no_traceback()
        others = {living, *(path.name for path in foreign)}
        wait_until(lambda: len(segments(server.name) - others) == 1, lambda: f"one arena: {segments(server.name)}")
    finally:
        holder.end()
        for path in foreign:
            path.unlink(missing_ok=True)
