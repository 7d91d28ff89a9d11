"""F30: whatever of SiMM fails or hangs, a call of the engine's API ends as a miss or a failure, never as an exception.

The k-th exchange of a call fails, for each k: before anything is sent, after it has been sent, and by an answer of
another kind. And no server answers at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simm import kv
from simm.errors import Code
from simm.kv import Block, Store, set_flag
from simm.net.channel import Channel
from simm.wire import messages as M
from tests.support.kv_values import content, filled, point_at
from tests.support.silent_servers import Silent
from tests.support.waiting import wait_until

SIZE = 3000
KEYS = [f"k{number}" for number in range(12)]


def value_of(key: str) -> bytes:
    return (key.encode() * SIZE)[:SIZE]


def views(keys: list[str]) -> list[Any]:
    return [filled(value_of(key)) for key in keys]


def gets(store: Store, keys: list[str]) -> list[bool]:
    """Whether each value came; one that came is right."""
    blocks = [Block(SIZE) for _ in keys]
    codes = store.mget(keys, [block.view() for block in blocks])
    for key, code, block in zip(keys, codes, blocks):
        assert code < 0 or (code == SIZE and content(block) == value_of(key))
        assert isinstance(code, int)
    return [code >= 0 for code in codes]


def one_get(store: Store) -> list[bool]:
    block = Block(SIZE)
    code = store.get(KEYS[0], block.view())
    assert code < 0 or content(block) == value_of(KEYS[0])
    return [code >= 0]


#: What an engine calls, and whether it succeeded.
CALLS: dict[str, Callable[[Store], list[bool]]] = {
    "put": lambda store: [store.put(KEYS[0], filled(value_of(KEYS[0]))) == 0],
    "get": one_get,
    "exists": lambda store: [store.exists(KEYS[0])],
    "delete": lambda store: [store.delete(KEYS[0]) in (0, int(Code.KEY_NOT_FOUND))],
    "mput": lambda store: [code == 0 for code in store.mput(KEYS, views(KEYS))],
    "mget": lambda store: gets(store, KEYS),
    "mexists": lambda store: store.mexists(KEYS),
    "mdelete": lambda store: [code in (0, int(Code.KEY_NOT_FOUND)) for code in store.mdelete(KEYS)],
}


class Fault:
    """Lets the k-th use of a channel fail, in one of three ways."""

    def __init__(self, how: str, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.how, self.left, self.hit = how, at, False
        send, result = Channel.send_raw, Channel.result

        def send_raw(channel: Channel, data: bytes, fds: tuple[int, ...] = ()) -> None:
            if how == "before it is sent" and self._now():
                channel.fail("a fault of the test")
            send(channel, data, fds)
            if how == "after it was sent" and self._now():
                channel.fail("a fault of the test")

        def answer(channel: Channel, frame: Any) -> Any:
            if how == "another answer" and self._now():
                return M.Pong(7)
            return result(channel, frame)

        monkeypatch.setattr(Channel, "send_raw", send_raw)
        monkeypatch.setattr(Channel, "result", answer)

    def _now(self) -> bool:
        self.left -= 1
        if self.left == -1:
            self.hit = True
            return True
        return False


def well_again(store: Store) -> None:
    stored = lambda: not any(store.mput(KEYS, views(KEYS)))  # noqa: E731
    wait_until(lambda: stored() and all(gets(store, KEYS)), "it is well")


@pytest.mark.fault("F30", ci="each exchange", whole="each exchange")
@pytest.mark.parametrize("how", ["before it is sent", "after it was sent", "another answer"])
@pytest.mark.parametrize("path", ["auto", "tcp"])
def test_each_exchange_of_each_call_may_fail(
    cluster: Any, namespace: str, path: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMM_PATH", path)
    point_at(cluster.manager)
    met = 0
    with Store() as store:
        assert store._client is not None and store._client.wait_ready(60.0)
        for call in CALLS.values():
            well_again(store)
            for at in range(8):
                with monkeypatch.context() as patch:
                    if path == "auto":  # by socket, so that each exchange passes the channel
                        drop_ring_and_grants(store)
                    fault = Fault(how, at, patch)
                    answer = call(store)
                    assert answer and all(type(each) is bool for each in answer)
                if not fault.hit:
                    break
                met += 1
                well_again(store)
        assert store.rejected == 0
    assert met >= (4 if path == "tcp" else 2)


def drop_ring_and_grants(store: Store) -> None:
    """Leave the client no grants, so that a put asks for some."""
    client = store._client
    assert client is not None and client._router is not None
    for target in client._router.targets.values():
        session = target.session
        if session is not None:
            with contextlib.suppress(Exception):
                session.return_grants([grant[0] for grant in session.pool.drain()])


@pytest.fixture
def silent() -> Iterator[Silent]:
    with Silent(3) as servers:
        yield servers


def test_calls_to_servers_that_never_answer(silent: Silent, namespace: str) -> None:
    point_at("{}:{}".format(*silent.manager.address))
    assert set_flag("clnt_sync_req_timeout_ms", "200")
    with Store() as store:
        for name, call in CALLS.items():
            assert not any(call(store)), name
        assert store.rejected == 0
    assert not kv._clients


def test_calls_of_a_store_that_is_closed(cluster: Any, namespace: str) -> None:
    point_at(cluster.manager)
    with Store() as store:
        assert all(CALLS["mput"](store))
    for name, call in CALLS.items():
        assert not any(call(store)), name
