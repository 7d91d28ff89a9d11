"""``simm index`` as a process: an engine's events, a router's question, and what the store itself has of the prompt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
zmq = pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from simm import Client  # noqa: E402
from simm.schemes import registry  # noqa: E402
from simm.schemes.scheme import Scheme  # noqa: E402
from tests.support.child import child_environment  # noqa: E402
from tests.support.http_page import ask_json  # noqa: E402
from tests.support.indexer_messages import messages  # noqa: E402
from tests.support.processes import Cluster  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

TOKENS = list(range(1000, 1064))


def test_a_router_asks_by_grpc(tmp_path: Path) -> None:
    grpc = pytest.importorskip("grpc", reason="the extra simm-store[grpc] is not installed")
    pytest.importorskip("google.protobuf", reason="no protobuf")
    request, response = messages()
    context = zmq.Context()
    pub = context.socket(zmq.PUB)
    pub.bind(f"ipc://{tmp_path}/events")
    publishers = [{"endpoint": f"ipc://{tmp_path}/events", "instance_id": "vllm-0", "modelname": "m", "block_size": 16}]
    (tmp_path / "publishers.json").write_text(json.dumps(publishers))
    flags = ["--at", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--register", str(tmp_path / "publishers.json")]
    process = subprocess.Popen(
        [sys.executable, "-m", "simm", "index", *flags], stdout=subprocess.PIPE, text=True,
        env=child_environment() | {"SIMM_RUNTIME_DIR": os.environ.get("SIMM_RUNTIME_DIR", "")},
    )  # fmt: skip
    channel = None
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        assert ready[:2] == ["READY", "index"] and ready[3].startswith("grpc=127.0.0.1:"), ready
        channel = grpc.insecure_channel(ready[3].removeprefix("grpc="))
        call = channel.unary_unary(
            "/indexer.v1.IndexerService/GetPodScores", request.SerializeToString, response.FromString
        )
        event = {"type": "BlockStored", "block_hashes": [1, 2, 3], "parent_block_hash": None,
                 "token_ids": TOKENS[:48], "block_size": 16, "medium": "GPU"}  # fmt: skip
        number = 0

        def told() -> list[tuple[str, float]]:
            nonlocal number
            message = msgspec.msgpack.encode([0.0, [event], 0])
            pub.send_multipart([b"kv@vllm-0@m", number.to_bytes(8, "big"), message])
            number += 1
            found = call(request(model_name="m", token_ids=TOKENS, block_size=16), timeout=30)
            return [(each.pod, each.score) for each in found.scores]

        wait_until(lambda: told() == [("vllm-0", 3.0)], "the event", pause_s=0.1)
    finally:
        if channel is not None:
            channel.close()
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        process.stdout.close()  # type: ignore[union-attr]
        context.destroy(0)
    assert code == 0


def test_a_router_asks_for_a_prompt(cluster: Cluster, tmp_path: Path) -> None:
    context = zmq.Context()
    pub = context.socket(zmq.PUB)
    pub.bind(f"ipc://{tmp_path}/events")
    publishers = [{"endpoint": f"ipc://{tmp_path}/events", "instance_id": "vllm-0", "modelname": "m", "block_size": 16}]
    (tmp_path / "publishers.json").write_text(json.dumps(publishers))
    flags = ["--at", "127.0.0.1:0", "--register", str(tmp_path / "publishers.json"), "--manager", cluster.manager]
    process = subprocess.Popen(
        [sys.executable, "-m", "simm", "index", *flags], stdout=subprocess.PIPE, text=True,
        env=child_environment() | {"SIMM_RUNTIME_DIR": os.environ.get("SIMM_RUNTIME_DIR", "")},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        assert ready[:2] == ["READY", "index"], ready
        at = ready[2]
        question = {"model": "m", "token_ids": TOKENS, "block_size": 16}
        event = {"type": "BlockStored", "block_hashes": [1, 2, 3], "parent_block_hash": None,
                 "token_ids": TOKENS[:48], "block_size": 16, "medium": "GPU"}  # fmt: skip
        number = 0

        def told() -> bool:
            nonlocal number
            message = msgspec.msgpack.encode([0.0, [event], 0])
            pub.send_multipart([b"kv@vllm-0@m", number.to_bytes(8, "big"), message])
            number += 1
            return bool(ask_json(at, "/query", question)["default"])

        wait_until(told, "the event", pause_s=0.1)
        with Client(cluster.manager, deadline_s=30.0) as client:
            scheme = Scheme("m", "sglang-simm", page=16)
            assert registry.register(client, scheme)
            keys, _ = scheme.keys(TOKENS)
            assert all(client.put_many(keys[:4], [b"v"] * 4))

            def answered() -> Any:
                """The answer, with what the store has: on a busy machine the store may once not answer in time."""
                found = ask_json(at, "/query", question)
                return found if found["shared"] else None

            found = wait_until(answered, "the store's answer", pause_s=0.5)
        assert found["default"]["vllm-0"]["longest_matched"] == 48
        assert found["shared"]["tokens"] == 32 and found["shared"]["by_host"]
        assert ask_json(at, "/workers")[0]["blocks"] == 3
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        process.stdout.close()  # type: ignore[union-attr]
        context.destroy(0)
    assert code == 0
