"""``simm.verbs`` on real verbs: memory windows."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from simm.errors import UsageError
from simm.rdma import work_requests
from simm.rdma.api import (
    READ,
    WRITE,
    Access,
    Binding,
    FabricError,
)
from tests.rdma_vm.verbs_pair import MIB, THEIRS, Both, Here, refused, run
from tests.rdma_vm.verbs_peer import ALL, Peer

# --- windows ------------------------------------------------------------------------------------


def test_a_window_allows_what_it_says_until_it_ends(peer: Peer, here: Here) -> None:
    region = peer.ask("register", "bindable", 0, MIB, int(Access.LOCAL_WRITE | Access.REMOTE_READ | Access.WINDOWS))
    qp, number = peer.join(here.rail)
    peer.memory.bytes[: 4 * 4096] = bytes(4 * 4096)
    here.memory.bytes[:4096] = data = os.urandom(4096)
    keys = peer.ask("bind", number, "bindable", [[4096, 4096], [8192, 100]])
    run(qp, here.op(WRITE, peer, 0, 4096, 4096, keys[0]), here.op(WRITE, peer, 0, 100, 8192, keys[1]))
    run(qp, here.op(READ, peer, 5000, 8, 4096, region[1]))
    assert peer.memory.bytes[4096 : 8192 + 100] == data + data[:100]
    peer.ask("invalidate", number, 2)
    assert refused(qp, here.op(WRITE, peer, 8, 8, 4096, keys[0])) == "REM_ACCESS_ERR"
    assert peer.memory.bytes[4096:4104] == data[:8]
    qp.close()
    peer.ask("close_queue_pair", number)

    # The device checks a window's bounds, and soft-RoCE checks the region's only (kernel 6.1). So this checks only that
    # nothing outside of the region is written.
    qp, number = peer.join(here.rail)
    keys = peer.ask("bind", number, "bindable", [[4096, 4096], [8192, 100]])
    assert refused(qp, here.op(WRITE, peer, 0, 8, MIB - 4, keys[1])) == "REM_ACCESS_ERR"
    qp.close()
    peer.ask("close_queue_pair", number)  # with windows bound
    for there in (8192 + 93, 8191, 0):
        qp, number = peer.join(here.rail)
        keys = peer.ask("bind", number, "bindable", [[4096, 4096], [8192, 100]])
        if THEIRS.startswith("rxe"):
            run(qp, here.op(WRITE, peer, 0, 8, there, keys[1]))  # fails once soft-RoCE checks
        else:
            assert refused(qp, here.op(WRITE, peer, 0, 8, there, keys[1])) == "REM_ACCESS_ERR"
        qp.close()
        peer.ask("close_queue_pair", number)
    peer.ask("deregister", "bindable")


def test_a_windows_key_is_of_no_use_on_another_link(peer: Peer, here: Here) -> None:
    (mine, number), (stranger, _) = peer.join(here.rail), peer.join(here.rail)
    (key,) = peer.ask("bind", number, "all", [[0, 4096]])
    run(mine, here.op(WRITE, peer, 0, 8, 0, key))
    assert refused(stranger, here.op(WRITE, peer, 0, 8, 0, key)) == "REM_ACCESS_ERR"
    peer.ask("invalidate", number, 1)
    mine.close()
    stranger.close()


@pytest.fixture
def both() -> Iterator[Both]:
    made = Both()
    yield made
    made.close()


@pytest.mark.parametrize("tagged", [True, False], ids=["in place", "made anew"])
def test_windows_bound_again_and_again(both: Both, monkeypatch: pytest.MonkeyPatch, tagged: bool) -> None:
    """Bind more often than a key's low byte has values; also if the key's word is not found."""
    if not tagged:
        monkeypatch.setattr(work_requests.Tag, "of", classmethod(lambda cls, *arguments: None))
    far, near = both.pair()
    windows = [both.server.window() for _ in range(3)]
    before: list[int] = []
    for turn in range(300 if tagged else 40):
        at = turn % 64 * 4096
        far.bind([Binding(window, both.region, both.region.address + at, 64) for window in windows])
        keys = [window.rkey for window in windows]
        assert len({*keys, *before}) == len(keys) + len(before), "a key is good for one binding"
        both.memory.bytes[MIB // 2 : MIB // 2 + 8] = text = b"%08d" % turn
        run(near, *[both.write(key, at + 8 * number) for number, key in enumerate(keys)])
        assert both.memory.bytes[at : at + 24] == text * 3
        far.invalidate(windows)
        before = keys
    assert (windows[0].tag is not None) is tagged  # type: ignore[attr-defined]
    assert refused(near, both.write(before[0])) == "REM_ACCESS_ERR"


def test_windows_used_wrongly(both: Both) -> None:
    far, _ = both.pair()
    other, _ = both.pair()
    window, region = both.server.window(), both.region
    good = Binding(window, region, region.address, 4096)
    for wrong in (
        [good._replace(length=0)],
        [good._replace(length=region.length + 1)],
        [good._replace(address=region.address - 1)],
        [good, good],
        [good._replace(region=both.local)],
        [good._replace(window=both.client.window())],
    ):
        with pytest.raises(UsageError):
            far.bind(wrong)
    with pytest.raises(UsageError):
        far.invalidate([window])
    far.bind([good])
    for call in (lambda: far.bind([good]), lambda: other.bind([good]), lambda: other.invalidate([window])):
        with pytest.raises(UsageError):
            call()
    assert not far.broken and not other.broken
    # The window can be bound to another queue pair when its own is gone, and when its region is gone.
    far.close()
    other.bind([good])
    region.close()
    again = both.server.register(region.address, region.length, ALL)
    other.bind([good._replace(region=again)])
    window.close()
    window.close()
    with pytest.raises(UsageError):
        other.bind([good])


def test_a_bind_that_the_device_refuses_breaks_the_link(both: Both) -> None:
    far, _ = both.pair()
    plain = both.server.register(both.region.address, 4096, Access.LOCAL_WRITE)  # no windows on it
    with pytest.raises(FabricError) as caught:
        far.bind([Binding(both.server.window(), plain, plain.address, 8)])
    assert caught.value.status == "MW_BIND_ERR" and far.broken
