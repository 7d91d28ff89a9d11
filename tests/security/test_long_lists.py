"""Requests with more items than a list may have: they cost their sender the connection, and nobody else anything."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from simm.config.tokens import TokenRole
from simm.constants import BATCH_KEYS_MAX
from simm.errors import TransportError
from simm.net.channel import Channel
from simm.rpc import CODECS
from simm.wire import messages as M
from simm.wire.access import LEAST
from tests.support.store_world import digest_of
from tests.support.waiting import wait_until
from tests.support.wire_samples import lists_of, long_frame
from tests.support.worker_thread import StreamThread, WorkerThread

#: All lists of what a client may send, after HELLO, found in the protocol's tables.
CLIENTS = [
    (CODECS[opcode].cls, field)
    for opcode, role in sorted(LEAST.items())
    if role == TokenRole.CLIENT and CODECS[opcode].cls is not M.Hello
    for field in lists_of(CODECS[opcode])
]  # fmt: skip
#: A frame has room for so many of each.
MANY = 20_000


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[WorkerThread, StreamThread]]:
    with WorkerThread() as worker, StreamThread(worker.path) as stream:
        yield worker, stream


def send(channel: Channel, cls: Any, field: str, count: int) -> Any:
    number = channel.next_id()
    channel.begin()
    channel.send_raw(long_frame(cls, field, count, number, random.Random(field)))
    return channel.result(channel.wait(number))


def test_the_requests_are_found() -> None:
    names = {cls.__name__ for cls, _ in CLIENTS}
    assert {"Exists", "Delete", "DeleteSized", "Keep", "Group", "Locate", "Unpin", "Commit", "Fetch", "Store"} <= names


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["worker", "stream"])
@pytest.mark.parametrize(("cls", "field"), CLIENTS, ids=[f"{cls.__name__}.{field}" for cls, field in CLIENTS])
def test_a_long_list_is_refused_before_anybody_looks_at_it(
    world: tuple[WorkerThread, StreamThread], kind: str, cls: Any, field: str
) -> None:
    worker, stream = world
    server: Any = worker if kind == "worker" else stream
    other = stream.channel()
    assert other.call(M.Exists([digest_of("k")])).statuses == [M.Status.NOT_FOUND]
    channel = worker.hello()[0] if kind == "worker" else stream.channel()
    errors = server.loop.protocol_errors
    with pytest.raises(TransportError):
        send(channel, cls, field, MANY)
    channel.close()
    wait_until(lambda: server.loop.protocol_errors == errors + 1, "it is counted")
    assert other.call(M.Exists([digest_of("k")])).statuses == [M.Status.NOT_FOUND], "others are served"
    other.close()


@pytest.mark.parametrize("kind", ["worker", "stream"])
def test_the_longest_lists_are_answered(world: tuple[WorkerThread, StreamThread], kind: str) -> None:
    """The control: of the same frames with as many keys as may be."""
    worker, stream = world
    channel = worker.hello()[0] if kind == "worker" else stream.channel()
    digests = [digest_of(f"k{number}") for number in range(BATCH_KEYS_MAX)]
    for msg in (M.Exists(digests), M.Delete(digests), M.DeleteSized([(digest, 1) for digest in digests])):
        assert channel.call(msg).statuses == [M.Status.NOT_FOUND] * BATCH_KEYS_MAX
    assert channel.call(M.Unpin([1 << 60] * BATCH_KEYS_MAX)).items == 0
    channel.close()
