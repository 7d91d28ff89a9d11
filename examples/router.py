#!/usr/bin/env python3
"""A router before SGLang's workers, or others that take token ids: a request goes where most of its prompt is.

    simm index --register publishers.json            # the workers' events; instance_id is a worker's address, as below
    python examples/router.py --index 127.0.0.1:8090 --model org/model --block-size 64 \\
        --port 8000 http://10.0.1.7:30000 http://10.0.1.8:30000
    curl -d '{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 16}}' localhost:8000/generate

The index weighs what a worker has of the prompt against what it has to do already. Both are numbers of blocks. Without
an index, or while what it knows of a worker is stale, the worker with the least to do gets the request: an index that
is down costs time, and no request.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import threading
import urllib.error
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: Seconds for an answer of a worker.
WORK_S = 600.0
PATHS = ("/generate", "/v1/completions")


class Router:
    """Knows the workers' load, and asks the index. Any thread may call it."""

    def __init__(self, index: str, model: str, block_size: int, workers: list[str], ask_s: float) -> None:
        self._index = index
        self._ask_s = ask_s
        self._model = model
        self._size = block_size
        self._lock = threading.Lock()
        self._load = Counter(dict.fromkeys(workers, 0))
        self._local = threading.local()

    def begin(self, tokens: list[int]) -> tuple[str, int]:
        """Return the worker for a prompt, and the load that it has until ``end``."""
        blocks = len(tokens) // self._size + 1
        with self._lock:
            loads = dict(self._load)
        worker = self._best(tokens, loads) or min(loads, key=lambda name: (loads[name], name))
        with self._lock:
            self._load[worker] += blocks
        return worker, blocks

    def end(self, worker: str, blocks: int) -> None:
        """Count a request as done."""
        with self._lock:
            self._load[worker] -= blocks

    def _best(self, tokens: list[int], loads: dict[str, int]) -> str | None:
        """Return what the index says; None if it says nothing."""
        # In this order: the index remembers the text up to the first token id that is new, so what changes is behind.
        question = {"model": self._model, "block_size": self._size, "token_ids": tokens, "loads": loads}
        body = json.dumps(question).encode()
        try:
            try:
                answer = self._ask(body)
            except ConnectionError:  # it was idle for too long: once more by a new one
                self._local.connection = None
                answer = self._ask(body)
        except (OSError, http.client.HTTPException, ValueError):
            self._local.connection = None
            return None
        if not isinstance(answer, dict) or set(answer.get("stale", ())) & loads.keys():
            return None
        best = answer.get("best")
        return best if best in loads else None

    def _ask(self, body: bytes) -> Any:
        connection = getattr(self._local, "connection", None)
        if connection is None:  # one for each thread, which stays open
            host, _, port = self._index.rpartition(":")
            connection = self._local.connection = http.client.HTTPConnection(host, int(port), timeout=self._ask_s)
        connection.request("POST", "/score", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        raw = answer.read()
        return json.loads(raw) if answer.status == 200 else None


def handler(router: Router) -> type[BaseHTTPRequestHandler]:
    """Return what answers requests."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                fields = json.loads(body)
                tokens = fields.get("input_ids", fields.get("prompt"))
                if self.path not in PATHS or not all(type(each) is int for each in tokens):
                    raise ValueError
            except (ValueError, AttributeError, TypeError):
                error = "POST token ids as input_ids or prompt to " + " or ".join(PATHS)
                self.answer(400, json.dumps({"error": error}).encode())
                return
            worker, blocks = router.begin(tokens)
            try:
                request = urllib.request.Request(worker + self.path, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=WORK_S) as found:
                    self.answer(found.status, found.read(), worker)
            except urllib.error.HTTPError as exc:
                self.answer(exc.code, exc.read(), worker)
            except OSError as exc:
                self.answer(502, json.dumps({"error": f"{worker}: {exc}"}).encode(), worker)
            finally:
                router.end(worker, blocks)

        def answer(self, status: int, body: bytes, worker: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if worker:
                self.send_header("X-Worker", worker)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of each request."""

    return Handler


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", default="127.0.0.1:8090", metavar="HOST:PORT")
    parser.add_argument("--model", required=True)
    parser.add_argument("--block-size", type=int, default=64, help="SGLang's --page-size")
    parser.add_argument("--ask-s", type=float, default=0.2, help="seconds for the index, which takes few ms")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("workers", nargs="+", metavar="URL")
    arguments = parser.parse_args()
    router = Router(arguments.index, arguments.model, arguments.block_size, arguments.workers, arguments.ask_s)
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), handler(router))
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"listening on 127.0.0.1:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    server.server_close()


if __name__ == "__main__":
    main()
