#!/usr/bin/env python3
"""A router component for NVIDIA Dynamo: a request goes to the worker that has most of its prompt, by ``simm index``.

    pip install ai-dynamo-runtime                    # 1.6.1 was run; or in the environment of the workers
    simm index --manager 10.0.0.1:30001
    python examples/dynamo_router.py --endpoint dynamo.backend.generate --model org/model --block-size 16

It stands where ``python -m dynamo.router`` stands, and serves the same three endpoints beside the workers':
``dynamo.router.generate`` sends a request on and streams the answer back, ``best_worker_id`` only tells the worker, and
``get_overlap_scores`` what each worker has. Dynamo's index knows what workers have in their own memory. This one also
has what the shared store has now, so a worker that has nothing may still be the best one, if it has nothing to do.

Workers register themselves at the index, as their numbers are new with each start. In a worker, beside serve_endpoint:

    from dynamo_router import keep_registered
    asyncio.create_task(keep_registered("127.0.0.1:8090", endpoint.connection_id(), "org/model", 16,
                                        "tcp://10.0.1.7:5557", "tcp://10.0.1.7:5558"))   # the engine's own events

Without an index, or while what it knows of a worker is stale, the worker with the least to do gets the request.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

#: Seconds after which the index forgets a worker that has not registered again.
LEASE_S = 30.0
Fields = dict[str, Any]


class OverlapScores(NamedTuple):
    """What Dynamo's ``KvIndexer`` returns: leading blocks by worker. Nobody counts how often blocks were used."""

    scores: dict[int, int]
    frequencies: list[int]


class Index:
    """Asks ``simm index`` by one open connection for each thread. Any thread may call it.

    ``block_size``, ``find_matches_for_request`` and ``find_matches`` are those of Dynamo's ``KvIndexer``.
    """

    def __init__(self, at: str, model: str, block_size: int, ask_s: float = 0.2) -> None:
        self._at = at
        self._model = model
        self._size = block_size
        self._ask_s = ask_s
        self._local = threading.local()

    def block_size(self) -> int:
        """Return the number of tokens of a block."""
        return self._size

    def find_matches_for_request(
        self, token_ids: Sequence[int], lora_name: str | None = None, is_eagle: bool | None = None
    ) -> OverlapScores:
        """Return the leading blocks that each worker has itself. Raises OSError without an index."""
        del is_eagle  # blocks that overlap have other keys: they are not found
        return self._overlaps("/query", {"token_ids": list(token_ids), "lora_name": lora_name})

    def find_matches(self, sequence: Sequence[int]) -> OverlapScores:
        """Do the same for the sequence hashes of blocks."""
        return self._overlaps("/query_by_hash", {"seq_hashes": list(sequence)})

    def _overlaps(self, path: str, asked: Fields) -> OverlapScores:
        answer = self.ask(path, {"model": self._model, "block_size": self._size, **asked})
        stale = set(answer["stale"])
        found = {
            int(name): matched["longest_matched"] // self._size
            for name, matched in answer["default"].items() if name.isdigit() and name not in stale
        }  # fmt: skip
        return OverlapScores({worker: blocks for worker, blocks in found.items() if blocks}, [])

    def best(self, token_ids: Sequence[int], loads: dict[int, int], lora_name: str | None = None) -> int | None:
        """Return the worker with the least cost: blocks that it must compute, and those that it has to do already.

        None where the index does not know one of them for sure. Raises OSError without an index.
        """
        asked = {
            "model": self._model, "block_size": self._size, "token_ids": list(token_ids), "lora_name": lora_name,
            "loads": {str(worker): load for worker, load in loads.items()},
        }  # fmt: skip
        answer = self.ask("/score", asked)
        best = answer.get("best", "")
        if not best.isdigit() or set(map(int, filter(str.isdigit, answer["stale"]))) & loads.keys():
            return None
        return int(best)

    def ask(self, path: str, fields: Fields) -> Fields:
        """Return the answer to a request. Raises OSError."""
        body = json.dumps({name: value for name, value in fields.items() if value is not None}).encode()
        for attempt in (1, 2):
            connection = getattr(self._local, "connection", None)
            if connection is None:
                host, _, port = self._at.rpartition(":")
                connection = self._local.connection = http.client.HTTPConnection(host, int(port), timeout=self._ask_s)
            try:
                connection.request("POST", path, body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                raw = answer.read()
                break
            except (OSError, http.client.HTTPException) as exc:
                self._local.connection = None
                if attempt == 2 or not isinstance(exc, ConnectionError):  # it was idle for too long: once more
                    raise OSError(f"the index at {self._at}: {exc}") from exc
        if answer.status != 200:
            raise OSError(f"the index at {self._at} says {raw[:200]!r}")
        found = json.loads(raw)
        assert isinstance(found, dict)
        return found


async def keep_registered(
    at: str, worker: int, model: str, block_size: int, events: str, replay: str = "", rank: int = 0
) -> None:
    """Let the index hear a worker's engine, until this is cancelled; ``events`` and ``replay`` are the engine's."""
    index = Index(at, model, block_size, ask_s=5.0)
    fields = {
        "instance_id": str(worker), "modelname": model, "block_size": block_size, "endpoint": events,
        "replay_endpoint": replay, "type": "vLLM", "dp_rank": rank, "lease_s": LEASE_S,
    }  # fmt: skip
    while True:
        try:
            await asyncio.to_thread(index.ask, "/register", fields)
        except OSError as exc:
            print(f"not registered: {exc}", flush=True)
        await asyncio.sleep(LEASE_S / 3)


class Router:
    """The component. ``client`` is Dynamo's for the workers' endpoint."""

    def __init__(self, client: Any, index: Index) -> None:
        self._client = client
        self._index = index
        self._load: Counter[int] = Counter()

    async def choose(self, token_ids: Sequence[int], lora_name: str | None = None) -> int:
        """Return the worker for a prompt."""
        workers = self._client.instance_ids() or await self._client.wait_for_instances()
        loads = {worker: self._load[worker] for worker in workers}
        try:
            best = await asyncio.to_thread(self._index.best, token_ids, loads, lora_name)
        except (OSError, KeyError, ValueError):
            best = None
        return best if best in loads else min(loads, key=lambda worker: (loads[worker], worker))

    async def generate(self, request: Fields) -> AsyncIterator[Any]:
        """Send a preprocessed request to its worker, and yield what it answers."""
        token_ids = request["token_ids"]
        worker = await self.choose(token_ids, (request.get("routing") or {}).get("lora_name"))
        blocks = len(token_ids) // self._index.block_size() + 1
        self._load[worker] += blocks
        try:
            async for item in await self._client.direct(request, worker, annotated=False):
                yield item
        finally:
            self._load[worker] -= blocks

    async def best_worker_id(self, request: Any) -> AsyncIterator[int]:
        """Yield the worker for a prompt, which is a list or a request with ``token_ids``."""
        token_ids = request["token_ids"] if isinstance(request, dict) else request
        yield await self.choose(token_ids)

    async def get_overlap_scores(self, request: Fields) -> AsyncIterator[Fields]:
        """Yield what each worker has of a prompt, and the store."""
        token_ids, size = request["token_ids"], self._index.block_size()
        asked = {"token_ids": token_ids, "lora_name": request.get("lora_name"), "block_size": size,
                 "model": self._index._model}  # fmt: skip
        answer = await asyncio.to_thread(self._index.ask, "/query", asked)
        shared = (answer.get("shared") or {}).get("tokens", 0) // size
        workers = [
            {"worker_id": int(name), "device_blocks": found["GPU"] // size, "host_pinned_blocks": found["CPU"] // size,
             "disk_blocks": found["DISK"] // size,
             "shared_beyond_blocks": max(0, shared - found["longest_matched"] // size)}
            for name, found in answer["default"].items() if name.isdigit()
        ]  # fmt: skip
        yield {"block_size": size, "num_blocks": len(token_ids) // size, "shared_cache": {"hits": shared},
               "workers": workers}  # fmt: skip


async def serve(arguments: argparse.Namespace) -> None:
    """Serve the component's endpoints until the runtime stops."""
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(
        asyncio.get_running_loop(), arguments.discovery, arguments.request_plane, event_plane="zmq"
    )
    client = await runtime.endpoint(arguments.endpoint).client()
    router = Router(client, Index(arguments.index, arguments.model, arguments.block_size, arguments.ask_s))
    mine = arguments.endpoint.partition(".")[0] + ".router"
    print(f"serving {mine}", flush=True)
    served = router.generate, router.best_worker_id, router.get_overlap_scores
    await asyncio.gather(*(runtime.endpoint(f"{mine}.{each.__name__}").serve_endpoint(each) for each in served))


def main() -> None:
    """Parse the flags, and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint", required=True, metavar="NAMESPACE.COMPONENT.ENDPOINT", help="of the workers")
    parser.add_argument("--index", default="127.0.0.1:8090", metavar="HOST:PORT")
    parser.add_argument("--model", required=True)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--ask-s", type=float, default=0.2, help="seconds for the index, which takes few ms")
    parser.add_argument("--discovery", default="etcd", help="Dynamo's discovery backend: etcd, kubernetes, file, mem")
    parser.add_argument("--request-plane", default="tcp")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
