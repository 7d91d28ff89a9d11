"""LMCache's released multi-process server with `simm index` for its coordinator: what it stores and drops, and its end.

No engine with a GPU is here, so ``lmcache_server_driver.py`` stores in its place. All else is the server's own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from tests.engines.engine_processes import ROOT, Engine
from tests.engines.lmcache_processes import CHUNK, blake3_of
from tests.engines.lmcache_storing import MODEL, NAME, StoringServer
from tests.support.child import child_environment
from tests.support.http_page import ask_json
from tests.support.waiting import wait_until

POOL = "pool:lmcache:fs:1"
PROMPT = list(range(1000, 1000 + 4 * CHUNK))
OTHER = [*PROMPT[: 2 * CHUNK], *range(9000, 9000 + 2 * CHUNK)]


class Index:
    """`simm index` as a process."""

    def __init__(self, folder: Path, libraries: Path) -> None:
        environment = child_environment()
        environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(libraries)))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "simm", "index", "--at", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True,
            env=environment | {"SIMM_RUNTIME_DIR": str(folder)},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.at = self.process.stdout.readline().split()[-1]

    def ask(self, path: str, sent: Any = None) -> Any:
        return ask_json(self.at, path, sent)

    def has(self, tokens: Sequence[int], name: str = NAME) -> dict[str, int]:
        """Return what a server or pool has of a prompt, in chunks."""
        asked = {"model": MODEL, "token_ids": list(tokens), "block_size": CHUNK}
        found = self.ask("/query", asked)["default"].get(name, {})
        return {tier: found.get(tier, 0) // CHUNK for tier in ("longest_matched", "CPU", "STORAGE")}

    def worker(self) -> dict[str, Any]:
        return next((each for each in self.ask("/workers") if each["instance_id"] == NAME), {})

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def index(lmcache: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    folder = tmp_path_factory.mktemp("lmcache-index")
    running = Index(folder, blake3_of(lmcache, folder))
    with contextlib.closing(running):
        yield running


@pytest.mark.engines
def test_a_server_tells_the_index_what_it_holds(lmcache: Engine, index: Index, tmp_path: Path, say: Any) -> None:
    server = StoringServer(lmcache, tmp_path, index.at)
    try:
        wait_until(lambda: index.worker().get("complete", False), "its declaration of what it has")
        stored = server.store(PROMPT)
        assert stored["stored"] == 4
        wait_until(lambda: index.has(PROMPT)["CPU"] == 4, "the events of a prompt")
        assert index.has(OTHER)["longest_matched"] == 2 and index.has(PROMPT[1:])["longest_matched"] == 0
        names = [int(each[-16:], 16) for each in stored["chunks"]]
        by_hash = index.ask("/query_by_hash", {"model": MODEL, "seq_hashes": names, "block_size": CHUNK})
        assert by_hash["default"][NAME]["CPU"] == 4 * CHUNK

        server.delete(stored["keys"][2:3], "l1")
        wait_until(lambda: index.has(PROMPT)["CPU"] == 2, "the event of a deletion")

        half = server.store(OTHER, world=2, ranks=[0], salt="")
        assert half["stored"] == 4
        one = server.store([*range(4 * CHUNK, 5 * CHUNK)])
        wait_until(lambda: index.has(range(4 * CHUNK, 5 * CHUNK))["CPU"] == 1, "what came behind half of a prompt")
        assert index.has(OTHER)["longest_matched"] == 2, "of two ranks one has the rest"
        server.store(OTHER, world=2, ranks=[1])
        wait_until(lambda: index.has(OTHER)["CPU"] == 4, "the other rank's half")

        # Each is a request at least, and the last one is stored after three of them.
        for number in range(4):
            last = list(range(7000 + CHUNK * number, 7000 + CHUNK * (number + 1)))
            told = server.store(last)
            wait_until(lambda last=last: index.has(last)["CPU"] == 1, "a request")
        wait_until(lambda: index.has(last, POOL)["STORAGE"] == 1, "what is in the backend that servers share")
        server.delete(told["keys"], "l2")
        wait_until(lambda: index.has(last, POOL)["STORAGE"] == 0, "its deletion")
        worker = index.worker()
        assert (worker["stale"], worker["stream"].get("gaps", 0), worker["stream"].get("refused", 0)) == (False, 0, 0)
        assert worker["ignored"].keys() <= {"a shared backend: too early"} and one["stored"] == 1
    finally:
        server.end(signal.SIGTERM)
    assert index.worker() == {}, "it has said that it ends, and what it told after that is not believed"
    say(f"engines: LMCache's server told simm index of {worker['stream']['events']} keys")
