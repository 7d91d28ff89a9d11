"""The programs in ``examples/``, run as a user would. tests/engines/test_examples.py runs the one that needs torch."""

from __future__ import annotations

import http.client
import json
import runpy
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import simm
from simm.testing import FakeClient, FakeStore
from tests.support.child import Child, child_environment
from tests.support.processes import Cluster
from tests.support.waiting import WAIT_S, wait_until

ROOT = Path(simm.__file__).parents[1]
EXAMPLES = ROOT / "examples"
#: Tokens of a block of custom_server.py.
BLOCK = 16


def run(name: str, *arguments: str) -> Child:
    # On a busy machine a call may take more than the 3 s of a client that is given no deadline.
    environment = child_environment(SIMM_DEADLINE_MS="30000")
    return Child([sys.executable, str(EXAMPLES / name), *arguments], name=name, environment=environment)


def port_of(server: Child) -> int:
    return int(server.expect("listening on 127.0.0.1:").rpartition(":")[2])


def asked(port: int, prompt: Any) -> tuple[int, Any]:
    """Return status and body of one request to custom_server.py."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request("POST", "/", json.dumps({"prompt": prompt}))
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, json.loads(body) if answer.status == 200 else None


@pytest.fixture
def uncached() -> Callable[[str], Any]:
    """Return the answer of custom_server.py's engine to a prompt, with a cache that has nothing."""
    module = runpy.run_path(str(EXAMPLES / "custom_server.py"))
    store = FakeStore("16M")
    store.unavailable = True
    engine = module["Engine"](FakeClient(store=store))
    return lambda prompt: engine.answer(prompt.encode())


@pytest.mark.quick
def test_servers_share_what_they_computed(cluster: Cluster, uncached: Callable[[str], Any]) -> None:
    """The second one finds the blocks that the first one computed, and answers as an engine without a cache does."""
    text = "a prompt that several users begin with: "
    prompts = [text, text + "and one goes on", text, text + "and others do not", "x", "0123456789abcdef", text[:32]]
    with run("custom_server.py", "--port", "0", "--manager", cluster.manager) as first:
        assert asked(port_of(first), text) == (200, uncached(text))
        assert first.end() == 0
    with run("custom_server.py", "--port", "0", "--manager", cluster.manager) as second:
        port = port_of(second)
        for prompt, cached in zip(prompts, [32, 32, 32, 32, 0, 0, 16]):
            assert asked(port, prompt) == (200, {**uncached(prompt), "cached": cached})
        assert [asked(port, prompt)[0] for prompt in ("", 7, None)] == [400] * 3
        assert second.end(signal.SIGINT) == 0


@pytest.mark.quick
def test_an_example_starts_its_own_cluster() -> None:
    with run("custom_server.py", "--port", "0") as server:
        port = port_of(server)
        assert [asked(port, "a prompt of more than one block")[1]["cached"] for _ in range(2)] == [0, BLOCK]
        assert server.end() == 0


def test_a_server_goes_on_without_its_cache(
    make_cluster: Callable[..., Cluster], uncached: Callable[[str], Any]
) -> None:
    lost = make_cluster(memory="64M")
    prompt = "a prompt of more than one block"
    with run("custom_server.py", "--port", "0", "--manager", lost.manager) as server:
        port = port_of(server)
        assert [asked(port, prompt)[1] for _ in range(2)] == [uncached(prompt), {**uncached(prompt), "cached": BLOCK}]
        lost.stop()
        wait_until(lambda: asked(port, prompt) == (200, uncached(prompt)), "the cache is gone")
        assert asked(port, "another prompt")[1] == uncached("another prompt")
        assert server.end() == 0


class Line:
    """A connection to asyncio_server.py."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self.file = self.socket.makefile("rwb")

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.socket.close()

    def ask(self, line: str, value: bytes = b"") -> str:
        self.file.write(f"{line}\n".encode() + value)
        self.file.flush()
        return self.file.readline().decode().strip()

    def get(self, key: str) -> bytes | None:
        answer = self.ask(f"GET {key}")
        return None if answer == "miss" else self.file.read(int(answer))

    def inline(self) -> int:
        return int(self.ask("STATS").split()[0])


def test_small_values_are_read_in_the_event_loop(cluster: Cluster) -> None:
    sizes = {"small": 4096, "edge": 64 << 10, "large": (64 << 10) + 1, "huge": 3 << 20}
    values = {key: key[:1].encode() * size for key, size in sizes.items()}
    with run("asyncio_server.py", "--port", "0", "--manager", cluster.manager) as server:
        port = port_of(server)
        with Line(port) as one, Line(port) as two:
            assert [one.ask(f"PUT ex-{key} {len(value)}", value) for key, value in values.items()] == ["stored"] * 4
            wait_until(lambda: two.get("ex-small") == values["small"] and two.inline(), "a read is inline")
            before = two.inline()
            assert {key: two.get(f"ex-{key}") for key in values} == values and two.get("ex-none") is None
            assert two.inline() == before + 2, "the small value and the one of 64 KiB"
            assert [one.ask(f"EXISTS ex-{key}") for key in ("small", "none")] == ["yes", "no"]
            assert [one.ask("DELETE ex-small") for _ in range(2)] == ["deleted", "miss"] and two.get("ex-small") is None
            assert one.ask(f"PUT {'k' * 300} 1", b"v").startswith("error: ") and one.file.read() == b""
            for words in ("GET", "PUT key 0", "PUT key -1", "PUT key x", "HELLO"):
                with Line(port) as other:
                    assert other.ask(words).startswith("error: ")
            assert two.ask("EXISTS ex-huge") == "yes"
        assert server.end() == 0


def test_no_read_is_inline_by_tcp(cluster: Cluster) -> None:
    command = [sys.executable, str(EXAMPLES / "asyncio_server.py"), "--port", "0", "--manager", cluster.manager]
    environment = child_environment(SIMM_PATH="tcp", SIMM_DEADLINE_MS="30000")
    with Child(command, name="by TCP", environment=environment) as server:
        with Line(port_of(server)) as line:
            assert line.ask("PUT tcp-key 5", b"value") == "stored" and line.get("tcp-key") == b"value"
            assert line.inline() == 0
        assert server.end() == 0


def test_the_page_of_examples_names_all() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"[{path.name}]({path.name})" in page for path in EXAMPLES.glob("*.py"))
    assert "examples/README.md" in (ROOT / "README.md").read_text()
