"""A client of Dynamo's that asks a router component, as a frontend does. Reads lines of JSON: endpoint and request."""

from __future__ import annotations

import asyncio
import json
import sys

from dynamo.runtime import DistributedRuntime


async def main() -> None:
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    for line in iter(await asyncio.to_thread(lambda: sys.stdin.readline), ""):
        name, request = json.loads(line)
        client = await runtime.endpoint(name).client()
        await client.wait_for_instances()
        print(json.dumps([item async for item in await client.random(request, annotated=False)]), flush=True)
    runtime.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
