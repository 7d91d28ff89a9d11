"""LMCache's released multi-process server, which stores by orders: its driver stands in for an engine with a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engines.engine_processes import DRIVER_S, HERE, ROOT, Engine, tail
from tests.engines.lmcache_processes import CHUNK
from tests.support.ports import reserve_port

#: Of the keys, and of the server.
MODEL = "org/model"
NAME = "vllm-0"


class StoringServer:
    """LMCache's server as a process."""

    def __init__(self, lmcache: Engine, folder: Path, index: str, l2: dict[str, Any] | None = None) -> None:
        self.log = folder / "lmcache.log"
        self.http = reserve_port()
        (folder / "l2").mkdir()
        adapter = l2 or {"type": "fs", "base_path": str(folder / "l2"), "shared": True}
        flags = [
            "--http-port", str(self.http), "--port", str(reserve_port()), "--instance-id", NAME, "--chunk-size",
            str(CHUNK), "--l1-size-gb", "0.1", "--eviction-policy", "LRU", "--coordinator-url", f"http://{index}",
            "--coordinator-advertise-ip", "127.0.0.1", "--coordinator-event-reporting",
            "--coordinator-event-flush-interval", "0.2", "--coordinator-heartbeat-interval", "0.5",
            "--l2-adapter", json.dumps(adapter),
        ]  # fmt: skip
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE / "shim"))), "HOME": str(folder),
            "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LMCACHE_TRACK_USAGE": "false",
        }  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [lmcache.python, str(HERE / "lmcache_server_driver.py"), *flags], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=folder,
            )  # fmt: skip
        assert self._answer() == {"ready": True}

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it has ended"}
        assert "error" not in answer, (answer["error"], tail(self.log))
        return answer

    def store(self, tokens: Sequence[int], **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        order = {"tokens": list(tokens), "model": MODEL, "world": 1, "ranks": [0], **order}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def delete(self, keys: list[dict[str, Any]], tier: str) -> None:
        data = json.dumps({"tier": tier, "keys": keys, "force": True}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}/cache/objects", data, {"Content-Type": "application/json"}, method="DELETE"
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert json.loads(answer.read())["ok"]

    def end(self, how: int) -> None:
        self.process.send_signal(how)
        self.process.wait(DRIVER_S)
        for each in (self.process.stdin, self.process.stdout):
            assert each is not None
            each.close()
