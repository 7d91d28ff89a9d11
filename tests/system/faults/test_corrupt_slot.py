"""A stray store into the table of a live arena: the worker restarts by itself, and puts go on."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np

from simm.arena.layout import SLOT_FIELDS, Geometry, Word
from simm.client import Client
from tests.support.fleet import Fleet
from tests.support.left_arenas import segments
from tests.support.waiting import wait_until


def test_issue_puts_go_on_after_a_corrupt_slot(make_fleet: Callable[..., Fleet]) -> None:
    """Every put that met the slot failed, for good, and /healthz said ok."""
    fleet = make_fleet(1, memory="32M")
    server = fleet.servers[0]
    values = {f"k{number}": os.urandom(4096) for number in range(200)}
    with Client(fleet.manager.address, deadline_s=20.0) as client:
        assert all(client.put_many(list(values), list(values.values())))
        before = server.worker_pid()
        (name,) = segments(server.name)
        with open(f"/dev/shm/{name}", "r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
            view = memoryview(arena)
            words = view[:4096].cast("Q")
            geometry = Geometry.read(words, words[Word.SIZE], name)
            slots = np.frombuffer(view, SLOT_FIELDS, geometry.slots, geometry.slots_offset)
            live = np.flatnonzero(slots["offset"])
            slots["offset"][live[:5]] += np.uint64(4096)  # another's chunk, or none
            spoilt = bytes(slots["low"][live[0]].tobytes() + slots["high"][live[0]].tobytes())
            del slots
            words.release()
            view.release()
        key = next(key for key in values if client.digest(key) == spoilt)
        client.delete(key)  # meets the slot
        wait_until(lambda: server.succeeded(before), "another worker")
        wait_until(lambda: client.put(key, values[key]), "a put of the same key")
        assert client.get(key) == values[key]
        found = client.get_many(list(values))
        assert all(value is None or value == values[each] for each, value in zip(values, found))
        assert sum(value is not None for value in found) >= len(values) - 10
    assert "names another chunk than its own" in fleet.logs()
    fleet.assert_no_traceback()
