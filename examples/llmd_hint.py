#!/usr/bin/env python3
"""A hint for llm-d's router: an Envoy filter that asks ``simm index`` which pod has a prompt, before the router picks.

    pip install grpcio xds-protos                    # Envoy's own messages
    simm index --manager 10.0.0.1:30001 --register publishers.json        # instance_id is the pod, as NAMESPACE/NAME
    python examples/llmd_hint.py --index 127.0.0.1:8090 --model org/model --block-size 16 --port 9004 \\
        --tokenize http://10.0.1.7:8000              # any vLLM server of the model, for prompts of text

llm-d's router is an *endpoint picker* that Envoy asks by its protocol ``ext_proc``. Its plug-ins are compiled in, and
none asks another index. So this is a second filter, in front of it (llmd_envoy.yaml). It names the pod that has most
of the prompt, in a header that the router's own ``session-affinity-scorer`` reads: x-session-token, the pod's name in
base64. The router is as it was released. Its configuration (llmd_epp.yaml) weighs the hint against its other scorers.
So a pod that is full, or gone, does not get the request just because of its cache.

There is no hint where it would say nothing: the index has no answer or a stale one, or every pod can load the prompt
from the shared store just as well. A token that the client sends itself then keeps its effect.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as service

HEADER = "x-session-token"
#: What has a prompt as text, or token ids; and what has messages.
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CALLS_MAX = 64
BODY_BYTES_MAX = 8 << 20


class Server:
    """Somebody who answers JSON by HTTP, asked by one open connection for each thread."""

    def __init__(self, address: str, seconds: float) -> None:
        self._address = address.removeprefix("http://").rstrip("/")
        self._seconds = seconds
        self._local = threading.local()

    def ask(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the answer. Raises OSError or ValueError."""
        body = json.dumps(fields).encode()
        try:
            try:
                return self._ask(path, body)
            except ConnectionError:  # it was idle for too long: once more by a new one
                self._local.connection = None
                return self._ask(path, body)
        except (OSError, http.client.HTTPException) as exc:
            self._local.connection = None
            raise OSError(f"{self._address}: {exc}") from exc

    def _ask(self, path: str, body: bytes) -> dict[str, Any]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            host, _, port = self._address.rpartition(":")
            connection = self._local.connection = http.client.HTTPConnection(host, int(port), timeout=self._seconds)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        raw = answer.read()
        found = json.loads(raw) if answer.status == 200 else None
        if not isinstance(found, dict):
            raise ValueError(f"{self._address} says {raw[:200]!r}")
        return found


class Hints(service.ExternalProcessorServicer):  # type: ignore[misc]
    """The filter. Any thread may call it."""

    def __init__(self, index: Server, tokenize: Server | None, model: str, block_size: int, least: float) -> None:
        self._index = index
        self._tokenize = tokenize
        self._model = model
        self._size = block_size
        self._least = least

    def Process(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Answer what Envoy tells of one request: its head, then its body."""
        path = ""
        for told in request_iterator:
            kind = told.WhichOneof("request")
            answer = ext_proc.ProcessingResponse()
            common = getattr(answer, kind)
            common.SetInParent()
            if kind == "request_headers":
                listed = told.request_headers.headers.headers
                heads = {each.key: each.raw_value.decode("latin-1") or each.value for each in listed}
                path = heads.get(":path", "").partition("?")[0]
            elif kind == "request_body":
                pod = self.pod(path, told.request_body.body)
                if pod:
                    value = base64.b64encode(pod.encode())
                    common.response.header_mutation.set_headers.add(
                        header=base_pb2.HeaderValue(key=HEADER, raw_value=value),
                        append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
                    )
            yield answer

    def pod(self, path: str, body: bytes) -> str:
        """Return the pod to name for a request; "" for none."""
        try:
            tokens = self._tokens(path, json.loads(body))
            if len(tokens) < self._size:
                return ""
            asked = {"model": self._model, "block_size": self._size, "token_ids": tokens}
            answer = self._index.ask("/score", asked)
            scores: dict[str, float] = answer["with_pool"]
            best = max(scores.values())
            if answer["stale"] or best - min(scores.values()) < self._least:
                return ""
            return random.choice([pod for pod, score in scores.items() if score == best])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return ""  # the request is the model server's to judge, and the router picks as without a hint

    def _tokens(self, path: str, fields: dict[str, Any]) -> list[int]:
        """Return a prompt's token ids; none for what has none. Raises OSError, ValueError."""
        if path == COMPLETIONS:
            prompt = fields["prompt"]
            if isinstance(prompt, list) and all(type(each) is int for each in prompt):
                return prompt
            asked = {"prompt": prompt} if isinstance(prompt, str) else None
        else:
            asked = {"messages": fields["messages"], "add_generation_prompt": True} if path == CHAT else None
        if asked is None or self._tokenize is None:
            return []
        tokens = self._tokenize.ask("/tokenize", {"model": fields.get("model", self._model), **asked})["tokens"]
        return tokens if isinstance(tokens, list) else []


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", default="127.0.0.1:8090", metavar="HOST:PORT")
    parser.add_argument("--model", required=True, help="as the engines' publishers are registered")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--tokenize", metavar="URL", help="a vLLM server of the model; without one text has no hint")
    parser.add_argument("--ask-s", type=float, default=0.1, help="seconds for the index, which takes few ms")
    parser.add_argument("--least", type=float, default=1.0, help="blocks that a pod must have more than another")
    parser.add_argument("--port", type=int, default=9004, help="where Envoy asks, on loopback: they share a pod")
    arguments = parser.parse_args()
    tokenize = Server(arguments.tokenize, 2.0) if arguments.tokenize else None
    hints = Hints(Server(arguments.index, arguments.ask_s), tokenize, arguments.model, arguments.block_size,
                  arguments.least)  # fmt: skip
    options = [("grpc.max_receive_message_length", BODY_BYTES_MAX + (64 << 10))]
    server = grpc.server(ThreadPoolExecutor(CALLS_MAX), options=options)
    service.add_ExternalProcessorServicer_to_server(hints, server)
    port = server.add_insecure_port(f"127.0.0.1:{arguments.port}")
    server.start()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    print(f"listening on 127.0.0.1:{port}", flush=True)
    ended.wait()
    server.stop(1.0).wait()


if __name__ == "__main__":
    main()
