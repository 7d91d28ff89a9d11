"""Measure the event index: blocks taken in on one core, questions by HTTP and by a call, bytes of a block.

    python benchmarks/index.py [--blocks 200000] [--pods 8]

Needs the extra ``index``. Times of ingest and of calls are processor time, so a busy machine changes them little;
requests over HTTP are wall time of a client, the server is a process of its own. Nothing is written.
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import multiprocessing
import random
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np

from simm.index.blocks import Blocks
from simm.index.events import decode
from simm.index.keys import request_keys
from simm.index.libraries import msgspec
from simm.index.places import Places
from simm.index.publish.claims import Delta
from simm.index.publish.messages import snapshot
from simm.index.publishers import TURN
from simm.index.scores import score
from simm.index.service import BODY_BYTES_MAX, Service
from simm.index.sources import Registration, Source, Space
from simm.net.http import Web
from simm.net.local_users import LocalUsers
from simm.net.loop import Loop

SIZE = 16
SPACE = Space("m", "", "default", "", SIZE)


def messages(blocks: int, per_event: int, rng: random.Random) -> list[bytes]:
    """Return messages of 16 events each, as vLLM's: new prompts of ``per_event`` blocks."""
    found = []
    for first in range(0, blocks, 16 * per_event):
        events = [
            {"type": "BlockStored", "block_hashes": [rng.getrandbits(64) for _ in range(per_event)],
             "parent_block_hash": None, "token_ids": [rng.randrange(150_000) for _ in range(SIZE * per_event)],
             "block_size": SIZE, "lora_id": None, "medium": "GPU", "lora_name": None}
            for _ in range(16)
        ]  # fmt: skip
        found.append(msgspec.msgpack.encode([float(first), events, 0]))
    return found


def ingest(blocks: int, per_event: int) -> tuple[float, float]:
    """Return blocks taken in for each second of processor time, and bytes of a block."""
    index = Blocks()
    source = index.register(Registration("a", "m", block_size=SIZE))
    told = messages(blocks, per_event, random.Random(1))
    began = time.process_time()
    for number, payload in enumerate(told):
        batch = decode(payload)
        index.apply(source, batch.events, batch.rank, more=number % TURN != 0)  # as what has queued is read
    index.flush()
    return index.entries / (time.process_time() - began), index.nbytes / index.entries


def removals(blocks: int, per_event: int) -> float:
    """Return blocks taken out for each second of processor time."""
    index = Blocks()
    source = index.register(Registration("a", "m", block_size=SIZE))
    names: list[list[int]] = []
    for payload in messages(blocks, per_event, random.Random(2)):
        batch = decode(payload)
        index.apply(source, batch.events, batch.rank)
        names += [event.hashes.tolist() for event in batch.events]  # type: ignore[union-attr]
    told = [msgspec.msgpack.encode([0.0, [{"type": "BlockRemoved", "block_hashes": each}], 0]) for each in names]
    count = index.entries
    began = time.process_time()
    for payload in told:
        batch = decode(payload)
        index.apply(source, batch.events, batch.rank)
    assert not index.entries
    return count / (time.process_time() - began)


def snapshot_of_store(blocks: int) -> tuple[float, float, int]:
    """Return processor seconds to write a store's snapshot, and to take it in, and the snapshot's bytes."""
    names = np.random.default_rng(4).integers(0, 1 << 63, blocks, dtype=np.uint64)
    began = time.process_time()
    told = snapshot("rfc1527", [Delta(True, "default", names)], "node")
    written = time.process_time()
    index = Blocks()
    source = index.register(Registration("a", "m", "simm", block_size=SIZE))
    for payload in told:
        batch = decode(payload)
        index.apply(source, batch.events, batch.rank)
    ended = time.process_time()
    assert index.entries == blocks
    return written - began, ended - written, sum(map(len, told))


def quartiles(
    call: Callable[[], object], times: int, clock: Callable[[], float] = time.thread_time
) -> tuple[float, float, float]:
    """Return the quartiles of a call's time, ms: processor time of this thread, unless ``clock`` is another."""
    spent = []
    for _ in range(times):
        began = clock()
        call()
        spent.append(1000 * (clock() - began))
    first, middle, third = statistics.quantiles(spent, n=4)
    return first, middle, third


def body_of(tokens: list[int], head: str = "") -> bytes:
    """Return the body of a question."""
    fields = {"model": "m", "token_ids": tokens, "block_size": SIZE}
    return json.dumps({"id": head, **fields} if head else fields).encode()


class Asker:
    """A client that keeps its connection and does nothing else, as a router in a fast language."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = socket.create_connection(address, 60)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, body: bytes) -> bytes:
        """Return the body of the answer."""
        head = b"POST /query HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self.sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        found = b""
        while True:
            found += self.sock.recv(1 << 16)
            head, gap, rest = found.partition(b"\r\n\r\n")
            if gap and len(rest) == int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0]):
                return rest


def bare(listener: socket.socket, answer: bytes) -> None:
    """Answer each request of one connection at once: what a question costs that nobody has to think about."""
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer
    while data := sock.recv(1 << 16):
        head, _, rest = data.partition(b"\r\n\r\n")
        left = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0]) - len(rest)
        while left > 0:
            left -= len(sock.recv(1 << 16))
        sock.sendall(whole)


def others(index: Blocks, rng: random.Random) -> Callable[[], None]:
    """Return what takes in a message of a pod: 8 blocks of other prompts come, and those of 16 messages ago go."""
    sources = list(index.sources.values())
    held: collections.deque[tuple[Source, list[int]]] = collections.deque()

    def event() -> None:
        source, names = rng.choice(sources), [rng.getrandbits(64) for _ in range(8)]
        held.append((source, names))
        tokens = [rng.randrange(150_000) for _ in range(8 * SIZE)]
        stored = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None, "token_ids": tokens,
                  "block_size": SIZE}  # fmt: skip
        index.apply(source, decode(msgspec.msgpack.encode([0.0, [stored], 0])).events)
        if len(held) > 16:
            source, names = held.popleft()
            removed = {"type": "BlockRemoved", "block_hashes": names}
            index.apply(source, decode(msgspec.msgpack.encode([0.0, [removed], 0])).events)

    return event


def questions(pods: int, tokens: int, times: int) -> list[tuple[str, tuple[float, float, float]]]:
    """Return quartiles of a question: every pod has the first quarter of the prompt, and one has all of it."""
    index = Blocks()
    rng = random.Random(3)
    prompt = [rng.randrange(150_000) for _ in range(tokens)]
    for pod in range(pods):
        source: Source = index.register(Registration(f"pod-{pod}", "m", block_size=SIZE))
        mine = prompt[: tokens if pod == 0 else tokens // 4]
        payload = msgspec.msgpack.encode([0.0, [
            {"type": "BlockStored", "block_hashes": list(range(len(mine) // SIZE)), "parent_block_hash": None,
             "token_ids": mine, "block_size": SIZE}
        ], 0])  # fmt: skip
        batch = decode(payload)
        index.apply(source, batch.events, batch.rank)
    found = [("call, keys and scores", quartiles(lambda: score(index, SPACE, request_keys(prompt, SIZE)), times))]
    service = Service(index)
    body = body_of(prompt)
    # Its last 128 token ids are new each time. For one that was never seen all text is, and the index has its blocks.
    usual = [body_of(prompt[:-128] + [rng.randrange(150_000) for _ in range(128)]) for _ in range(times)]
    unseen = [body_of(prompt, str(number)) for number in range(2 * times)]
    hashes = json.dumps({"model": "m", "seq_hashes": request_keys(prompt, SIZE), "block_size": SIZE}).encode()
    query = service.posts["/query"]
    query(body)
    for name, bodies in (("known, new tail", usual), ("known", [body] * times), ("never seen", unseen[:times])):
        each = iter(bodies)
        told = quartiles(lambda each=each: query(next(each)), times)  # type: ignore[misc]
        found.append((f"POST body without HTTP, {name}", told))
    event = others(index, rng)
    spent = []
    for each in usual:
        event()  # its time is not counted
        began = time.thread_time()
        query(each)
        spent.append(1000 * (time.thread_time() - began))
    first, middle, third = statistics.quantiles(spent, n=4)
    found.append(("POST body without HTTP, known, new tail, an event before each", (first, middle, third)))
    index._places, places = Places(0), index._places
    each = iter(usual)
    found.append(("the same without remembered places", quartiles(lambda: query(next(each)), times)))
    index._places = places
    found.append(("by hash, without HTTP", quartiles(lambda: service.posts["/query_by_hash"](hashes), times)))

    listener, plain = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    address = listener.getsockname()

    def serve() -> None:
        loop = Loop()
        server = Service(index)
        Web(loop, listener, server.routes, posts=server.posts, body_max=BODY_BYTES_MAX, keep_s=60.0, users=LocalUsers())
        loop.run()

    answer = query(body).body.encode()
    fork = multiprocessing.get_context("fork")
    processes = fork.Process(target=serve, daemon=True), fork.Process(target=bare, args=(plain, answer), daemon=True)
    for started in processes:
        started.start()
    asker, baseline = Asker(address), Asker(plain.getsockname())
    kept = http.client.HTTPConnection(*address, timeout=60)

    def by(connection: http.client.HTTPConnection) -> None:
        connection.request("POST", "/query", body, {"Content-Type": "application/json"})
        assert json.loads(connection.getresponse().read())["default"]["pod-0"]["longest_matched"] == tokens

    def anew() -> None:
        connection = http.client.HTTPConnection(*address, timeout=60)
        by(connection)
        connection.close()

    try:
        assert json.loads(asker.ask(body))["default"]["pod-0"]["longest_matched"] == tokens
        for name, bodies in (("known, new tail", usual), ("never seen", unseen[times:])):
            each = iter(bodies)
            told = quartiles(lambda each=each: asker.ask(next(each)), times, time.perf_counter)  # type: ignore[misc]
            found.append((f"POST /query, persistent connection, {name}, wall time", told))
        each = iter(usual)
        told = quartiles(lambda: baseline.ask(next(each)), times, time.perf_counter)
        found.append(("the same bytes to and from a bare socket, wall time", told))
        for name, call in (("persistent", lambda: by(kept)), ("new", anew)):
            told = quartiles(call, times, time.perf_counter)
            found.append((f"POST /query, {name} connection of http.client, known, wall time", told))
    finally:
        for started in processes:
            started.terminate()
            started.join()
    return found


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=200_000)
    parser.add_argument("--pods", type=int, default=8)
    parser.add_argument("--times", type=int, default=200)
    arguments = parser.parse_args()
    for per_event in (1, 4, 32, 512):
        rate, size = ingest(max(arguments.blocks, 16 * per_event), per_event)
        gone = removals(max(arguments.blocks // 4, 16 * per_event), per_event)
        print(
            f"events of {per_event:4} blocks: {rate:9,.0f} stored/s, {gone:9,.0f} removed/s, {size:.1f} bytes a block"
        )
    written, taken, size = snapshot_of_store(1_000_000)
    print(f"snapshot of a store, 1,000,000 blocks: {written:.2f} s to write, {taken:.2f} s to take in, {size:,} bytes")
    for tokens in (2048, 8192):
        for name, (first, middle, third) in questions(arguments.pods, tokens, arguments.times):
            print(f"{tokens} tokens, {arguments.pods} pods, {name}: {middle:.2f} ms ({first:.2f} to {third:.2f})")


if __name__ == "__main__":
    main()
