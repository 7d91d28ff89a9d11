"""A worker of Dynamo with a stand-in for its engine: Dynamo's runtime serves it, and it publishes events as vLLM does.

Reads lines of JSON: ``{"store": token ids, "medium": ...}`` publishes the blocks of a prompt. Prints its number first.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
from dynamo.runtime import DistributedRuntime

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from dynamo_router import keep_registered

SIZE = 16


def publish(publisher: Any, number: int, told: dict[str, Any]) -> None:
    tokens = told["store"][: len(told["store"]) // SIZE * SIZE]
    names = [hash(tuple(tokens[: at + SIZE])) & (1 << 64) - 1 for at in range(0, len(tokens), SIZE)]
    event = {
        "type": "BlockStored", "block_hashes": names,
        "parent_block_hash": None, "token_ids": tokens, "block_size": SIZE, "lora_id": None, "medium": told["medium"],
    }  # fmt: skip
    payload = msgspec.msgpack.encode([time.time(), [event], 0])
    publisher.send_multipart([b"", struct.pack(">Q", number), payload])


async def main() -> None:
    index, endpoint_name = sys.argv[1:]
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint(endpoint_name)
    worker = endpoint.connection_id()
    publisher = zmq.Context().socket(zmq.PUB)
    events = f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}"

    async def generate(request: dict[str, Any]) -> Any:
        for token in request["token_ids"][:2]:
            yield {"token_ids": [token], "worker": worker}

    async def listen() -> None:
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        number = 0
        while line := await reader.readline():
            publish(publisher, number, json.loads(line))
            number += 1
        runtime.shutdown()

    tasks = [asyncio.create_task(keep_registered(index, worker, "m", SIZE, events)), asyncio.create_task(listen())]
    print(json.dumps([worker, events]), flush=True)
    await endpoint.serve_endpoint(generate, graceful_shutdown=False)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
