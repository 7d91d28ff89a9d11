"""The examples of the README, and of the pages in docs/ that explain one operation each: they run as they stand."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import simm
from simm import kv
from simm.client import Client
from simm.testing import FakeClient
from tests.support.kv_sizes import forget_clients

ROOT = Path(simm.__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = (
    "parts.md", "load.md", "routing.md", "pins.md", "epochs.md", "keep.md", "groups.md", "large.md", "tracing.md",
    "prefetch.md",
)  # fmt: skip
#: What the client of a page is made with.
OPTIONS: dict[str, dict[str, Any]] = {"prefetch.md": {"near_copies": True}}
#: The README's blocks, by a word that only one of them has.
CLIENT, TESTING, ENGINE = "Client.local(", "FakeStore(", "mget("
PAGE_BYTES = 64 << 10


def examples(page: str) -> list[str]:
    """Return the blocks of Python code on a page."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def example(word: str) -> str:
    """Return the block of the README with this word in it."""
    (code,) = [code for code in examples(str(README)) if word in code]
    return code


def execute(code: str, **scope: Any) -> dict[str, Any]:
    """Run a block of the README; its variables."""
    exec(compile(code, "README.md", "exec"), scope)
    return scope


class Caller:
    """What the README's client example takes for granted: memory, and what to do with a view."""

    def __init__(self) -> None:
        self.page = np.random.default_rng(1).bytes(PAGE_BYTES)
        self.buffer, self.half = bytearray(PAGE_BYTES), bytearray(4096)
        self.seen: list[bytes] = []
        self.keys, self.values = b"k" * 2048, b"v" * 2048

    def consume(self, data: memoryview) -> None:
        self.seen.append(bytes(data))

    def run(self, code: str) -> None:
        names = ("page", "buffer", "half", "consume", "keys", "values")
        execute(code, **{name: getattr(self, name) for name in names})


@pytest.fixture(params=["fake", "real"])
def client_example(request: pytest.FixtureRequest) -> str:
    """The README's client example, on a fake client, or on a cluster of its own that fits a test machine."""
    code = example(CLIENT).replace('"1G"', '"64M"')
    return code.replace("simm.client import Client", "simm.testing import FakeClient as Client") if (
        request.param == "fake"
    ) else code


def run(page: str, client: Client) -> None:
    """Run the examples of a page one after the other, with ``client`` in scope."""
    scope: dict[str, Any] = {"client": client}
    for code in examples(page):
        exec(compile(code, page, "exec"), scope)


@pytest.mark.quick
@pytest.mark.parametrize("page", PAGES)
def test_examples_on_the_fake(page: str) -> None:
    assert examples(page)
    run(page, FakeClient(**OPTIONS.get(page, {})))


@pytest.mark.parametrize("page", PAGES)
def test_examples_on_a_cluster(client: Client, page: str) -> None:
    with Client(**{**asdict(client._options), **OPTIONS.get(page, {})}) as its_own:
        run(page, its_own)


# -- the README --------------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_readme_has_the_examples_that_are_run() -> None:
    blocks = examples(str(README))
    assert sorted(blocks) == sorted(map(example, (CLIENT, TESTING, ENGINE)))


def test_the_readme_stores_and_reads(client_example: str) -> None:
    caller = Caller()
    caller.run(client_example)
    assert caller.seen == [caller.page] and caller.buffer == caller.page
    assert caller.half == caller.keys + caller.values


def test_the_readme_with_a_missing_key(client_example: str) -> None:
    """Without its puts every line of it is a miss, and none raises. The control: a view that raises, as it once did."""
    code, puts = re.subn(r"^    client\.put.*\n", "", client_example, flags=re.MULTILINE)
    assert puts == 3 and "client.view(" in code
    caller = Caller()
    caller.run(code)
    assert caller.seen == [] and not any(caller.buffer) and not any(caller.half)
    with pytest.raises(TypeError):
        caller.run(code.replace("client.view(", "(lambda key: None)("))


@pytest.mark.quick
def test_the_readme_on_the_fakes() -> None:
    """The outage and the planned failure of the README's example, which then starts a cluster."""
    code, _, cluster = example(TESTING).partition("with local_cluster")
    scope = execute(code)
    store, client = scope["store"], scope["client"]
    assert client.put("a", b"1") is False  # the outage
    store.unavailable = False
    assert [client.put(key, b"1") for key in "abcd"].count(False) == 1 and "manager, client" in cluster


def test_the_readme_starts_a_cluster() -> None:
    execute(example(TESTING).replace("    ...\n", "    assert client.put('k', b'v') and client.get('k') == b'v'\n"))


def test_the_readme_as_an_engine(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SIMM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SIMM_NAMESPACE", "readme")
    monkeypatch.setenv("SIMM_DEADLINE_MS", "30000")
    host, _, port = cluster.manager.rpartition(":")
    assert host == "127.0.0.1" and kv.set_flag("cm_primary_node_port", port)
    rng = np.random.default_rng(2)
    pool = rng.integers(0, 256, 4 * PAGE_BYTES, np.uint8)
    pages = [(pool.ctypes.data + n * PAGE_BYTES, PAGE_BYTES) for n in range(4)]
    # The lines print nothing, so their values are kept.
    code = re.sub(r"^store\.m", "results += store.m", example(ENGINE), flags=re.MULTILINE)
    results: list[Any] = []
    try:
        scope = execute(code, kv_pool=pool, pages=pages, keys=["0", "1", "2", "3"], results=results)
        assert results == [0] * 4 + [PAGE_BYTES] * 4 + [True] * 4
        # What came back is what was stored: the first page anew, into memory that has lost it.
        before = pool.copy()
        pool[:] = 0
        views = [kv.BlockView.from_buffer(address, size, scope["mr"]) for address, size in pages]
        assert scope["store"].mget(["0", "1", "2", "3"], views) == [PAGE_BYTES] * 4 and (pool == before).all()
    finally:
        forget_clients()
        for flag in ("cm_primary_node_ip", "cm_primary_node_port"):
            kv.set_flag(flag, "")
