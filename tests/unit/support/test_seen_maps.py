"""The comparison of shard maps sees what it must: two maps of one epoch, two owners of one ownership, a way back."""

from __future__ import annotations

from array import array

import pytest

from simm.cluster.shard_map import pack_since
from simm.constants import NO_OWNER, SHARD_COUNT
from simm.rpc import Connection, Frame, encode
from simm.wire.messages import MapReply, WorkerInfo
from tests.support.seen_maps import SeenMaps, different

WORKERS = [WorkerInfo(0, 0, 1, number, 1 << 30, f"n{number}", "", "127.0.0.1", 1) for number in range(3)]


def frame(epoch: int, since: int, owner: int, workers: list[WorkerInfo] = WORKERS) -> Frame:
    """A map in which a worker has all shards since an epoch."""
    owners = array("H", [owner]) * SHARD_COUNT
    conn = Connection()
    reply = MapReply(epoch, 9, workers, owners.tobytes(), (), pack_since(array("Q", [since]) * SHARD_COUNT))
    conn.receive_data(encode(reply))
    found = conn.next_frame()
    assert found is not None
    return found


def test_maps_that_follow_each_other_are_right() -> None:
    seen = SeenMaps()
    for each in (
        frame(1, 0, NO_OWNER), frame(3, 3, 0), frame(3, 3, 0), frame(4, 3, 0),
        frame(5, 3, 1, WORKERS[::-1][1:]),  # the same worker at another position
        frame(6, 6, 2), frame(4, 3, 0),
        frame(7, 6, NO_OWNER), frame(8, 8, 1),
    ):  # fmt: skip
        assert seen.see(each) == int.from_bytes(each.body[:8], "little")
    assert not seen.faults and sorted(seen.sums) == [1, 3, 4, 5, 6, 7, 8]
    assert not different([seen.sums, {"3": seen.sums[3], "9": 1}])


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (frame(3, 3, 0), frame(3, 3, 1), "two maps of epoch 3"),
        (frame(3, 3, 0), frame(4, 3, 1), "two owners since one epoch"),
        (frame(3, 3, 0), frame(4, 2, 1), "a later since"),
        (frame(3, 3, 0), frame(4, 5, 1), "an epoch to come"),
    ],
)
def test_each_fault_is_seen(before: Frame, after: Frame, text: str) -> None:
    seen = SeenMaps()
    seen.see(before)
    seen.see(after)
    assert len(seen.faults) == 1 and text in seen.faults[0]


def test_two_processes_with_different_maps_are_seen() -> None:
    assert different([{3: 7, 4: 8}, {"3": 7, "4": 9}]) == ["4"]
