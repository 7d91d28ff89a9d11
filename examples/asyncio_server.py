#!/usr/bin/env python3
"""A cache behind asyncio: small values at once, everything else by the awaitable calls.

    python examples/asyncio_server.py --port 8001 --manager 127.0.0.1:30001

Each request is a line, and PUT's is followed by the value:

    PUT KEY BYTES       answered by: stored, or: failed
    GET KEY             the length and then the value, or: miss
    EXISTS KEY          yes or no
    DELETE KEY          deleted, or: miss
    STATS               how many values were read inline

An awaitable call runs in a thread. That costs some 50 us, and is right for whatever may wait: for a server, or for a
large copy. A small value in shared memory takes a fraction of it, so the event loop reads it itself (:class:`Inline`).
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from functools import partial

from simm.client import Client
from simm.errors import UsageError

#: Values of up to so many bytes are copied in the event loop. A copy of 64 KiB takes some 10 us.
INLINE_BYTES = 64 << 10
VALUE_BYTES_MAX = 16 << 20


class Inline:
    """Reads of small values without a thread, where these are no more than a copy within this host."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._buffer = bytearray(INLINE_BYTES)
        self._local = False
        self.reads = 0

    async def watch(self) -> None:
        """Look once a second whether all servers are reached by shared memory. Runs until it is cancelled."""
        while True:
            paths = {worker["path"] for worker in self._client.stats()["workers"]}
            self._local = paths == {"shm"}
            await asyncio.sleep(1.0)

    def get(self, key: str) -> bytes | None:
        """Return a value of INLINE_BYTES at most; None for a larger one, a miss, and where another path is used.

        It waits for a server only while the value's shard moves, or when a path has just changed, and no longer than
        the client's deadline.
        """
        if not self._local:
            return None
        try:
            size = self._client.get_into(key, self._buffer)
        except UsageError:  # too large for the buffer: nothing was copied
            return None
        self.reads += size is not None
        return None if size is None else bytes(memoryview(self._buffer)[:size])


class Server:
    """Answers the connections of one event loop."""

    def __init__(self, client: Client, inline: Inline) -> None:
        self._client = client
        self._inline = inline

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection's requests in their order."""
        try:
            while line := await reader.readline():
                writer.writelines(await self._answer(line.decode().split(), reader))
                await writer.drain()
        except (UsageError, ValueError) as mistake:
            writer.write(f"error: {mistake}\n".encode())
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, words: list[str], reader: asyncio.StreamReader) -> list[bytes]:
        client = self._client
        match words:
            case ["GET", key]:
                value = self._inline.get(key)
                if value is None:
                    value = await client.get_async(key)
                return [b"miss\n"] if value is None else [f"{len(value)}\n".encode(), value]
            case ["PUT", key, size] if 0 < int(size) <= VALUE_BYTES_MAX:
                value = await reader.readexactly(int(size))
                return [b"stored\n" if await client.put_async(key, value) else b"failed\n"]
            case ["EXISTS", key]:
                return [b"yes\n" if await client.exists_async(key) else b"no\n"]
            case ["DELETE", key]:
                return [b"deleted\n" if await client.delete_async(key) else b"miss\n"]
            case ["STATS"]:
                return [f"{self._inline.reads} reads inline\n".encode()]
        raise ValueError("expected GET KEY, PUT KEY BYTES, EXISTS KEY, DELETE KEY or STATS")


async def serve(port: int, manager: str | None) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    make = partial(Client, manager) if manager else partial(Client.local, "256M")
    async with await asyncio.to_thread(make) as client:  # to connect may wait for servers, as every call may
        inline = Inline(client)
        watch = asyncio.create_task(inline.watch())
        server = await asyncio.start_server(Server(client, inline).connection, "127.0.0.1", port)
        print(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await stop.wait()
        server.close()
        watch.cancel()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="A cache behind asyncio.")
    parser.add_argument("--port", type=int, default=8001, help="0: any free one (default 8001)")
    parser.add_argument("--manager", help="of a running cluster (default: a cluster of its own, with 256 MiB)")
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.manager))


if __name__ == "__main__":
    main()
