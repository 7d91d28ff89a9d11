#!/usr/bin/env python3
"""An inference server with SiMM: any number of them share what they have computed of their prompts.

    python examples/custom_server.py --port 8000 --manager 127.0.0.1:30001
    curl -d '{"prompt": "a text of more than 64 bytes ..."}' localhost:8000

The model is a stand-in, a recurrence over the prompt's bytes. Its state after each token stands for the keys and values
of an attention layer: without the states of the tokens before, a token cannot be computed. What an engine does with its
cache is in :meth:`Engine.answer`. Nothing there handles an outage: a cache that is down has no blocks, and that is all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import numpy.typing as npt

from simm.client import Client

#: Tokens of a block, and numbers of a token's state.
BLOCK, STATE = 16, 256
#: What a block's value depends on beside its tokens. Change it with the model, so that no old block is found.
MODEL = "recurrence-1"


class Engine:
    """A model and its cache."""

    def __init__(self, client: Client) -> None:
        self._client = client
        draw = np.random.default_rng(1)
        self._weights = draw.standard_normal((STATE, STATE), dtype=np.float32) / np.float32(STATE**0.5)
        self._embedding = draw.standard_normal((256, STATE), dtype=np.float32)

    def answer(self, prompt: bytes) -> dict[str, Any]:
        """Return the next token for a prompt of one byte or more, and how many tokens came out of the cache."""
        keys = block_keys(prompt)
        states = np.empty((-(-len(prompt) // BLOCK), BLOCK, STATE), np.float32)
        # How many leading blocks are stored now. The last token is always computed, so a prompt is never all cached.
        found = self._client.prefix(keys[: (len(prompt) - 1) // BLOCK]).keys
        # Straight into the model's memory. A block may be evicted since it was found: it ends the prefix.
        sizes = self._client.get_into_many(keys[:found], list(states[:found]))
        cached = next((number for number, size in enumerate(sizes) if size != states[0].nbytes), found)
        self._compute(prompt, states, cached * BLOCK)
        self._client.put_many(keys[cached:], list(states[cached : len(keys)]))
        last = states.reshape(-1, STATE)[len(prompt) - 1]
        return {"token": int(np.argmax(self._embedding @ last)), "cached": cached * BLOCK, "tokens": len(prompt)}

    def _compute(self, prompt: bytes, states: npt.NDArray[np.float32], start: int) -> None:
        flat = states.reshape(-1, STATE)
        state = flat[start - 1] if start else np.zeros(STATE, np.float32)
        for at in range(start, len(prompt)):
            state = flat[at] = np.tanh(self._weights @ state + self._embedding[prompt[at]])


def block_keys(prompt: bytes) -> list[str]:
    """Return a key for each full block. It stands for all tokens up to the block's end, as the block's states do."""
    keys, parent = [], b""
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        parent = hashlib.sha256(parent + prompt[start : start + BLOCK]).digest()
        keys.append(f"{MODEL}/{parent.hex()}")
    return keys


def handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    """Return what answers requests of ``POST {"prompt": TEXT}``."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = request["prompt"].encode()
            except (ValueError, KeyError, TypeError, AttributeError):
                prompt = b""
            if not prompt:
                self.send_error(400, 'expected {"prompt": TEXT}')
                return
            body = json.dumps(engine.answer(prompt)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Requests are not logged."""

    return Handler


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description="An inference server with SiMM.")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default 8000)")
    parser.add_argument("--manager", help="of a running cluster (default: a cluster of its own, with 256 MiB)")
    options = parser.parse_args()
    with Client(options.manager) if options.manager else Client.local("256M") as client:
        # Any thread may call any method of the client.
        server = ThreadingHTTPServer(("127.0.0.1", options.port), handler(Engine(client)))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
        print(f"listening on 127.0.0.1:{server.server_port}", flush=True)
        with server:
            server.serve_forever()


if __name__ == "__main__":
    main()
