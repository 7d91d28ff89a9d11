"""Calls of a process that has no descriptor left: what they would load cannot be, and they miss or fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

import pytest

from simm.errors import Code

#: Each call is its module's first. The manager's port is nobody's, so nothing but misses and failures can be told.
_SCRIPT: Final = """
import json, resource, sys
from simm.client import Client, NoValue
from simm.kv import Store
from simm.sdk.batch import SplitView
from simm.wire.status import Status

LARGE = bytearray((64 << 20) + 1)
options = dict(lazy=True, namespace="n", deadline_s=1.0)
client, parted = Client("127.0.0.1:1", **options), Client("127.0.0.1:1", **options)
parted._counters["large"] = 1
parted._gets.read = lambda *_: NoValue.LARGE
parted._gets.read_many = lambda digests, _: [NoValue.LARGE for _ in digests]
parted._gets.view = lambda *_: SplitView.miss()
parted._puts.keep = lambda digests, *_: [Status.TOO_LARGE for _ in digests]
store = Store()
view = store.allocate(64).view()

class Gpu:
    __cuda_array_interface__ = {"shape": (8,), "typestr": "|u1", "data": (4096, False), "version": 3}

def awaited(call):
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits for a thread")

def pins(of):
    made = of.pin(["k"])
    return made.lengths, made.parted == set()

def pins_in_parts():
    find = parted._pinner._find
    parted._pinner._find = lambda pins, _: pins.parted.add(0)
    try:
        return parted.pin(["k"]).lengths
    finally:
        parted._pinner._find = find

CALLS = {
    "put": lambda: client.put("k", b"v"),
    "put if absent": lambda: client.put_many(["k"], [b"v"], if_absent=True)[0],
    "put_many if absent": lambda: client.put_many(["a", "b"], [b"v", b"w"], if_absent=True),
    "put large": lambda: client.put("k", LARGE),
    "put_many large": lambda: client.put_many(["a", "b"], [b"v", LARGE]),
    "put gpu": lambda: client.put("k", Gpu()),
    "get_into gpu": lambda: client.get_into("k", Gpu()),
    "get": lambda: client.get("k"),
    "get large": lambda: parted.get("k"),
    "get_into large": lambda: parted.get_into("k", bytearray(8)),
    "get_many large": lambda: parted.get_many(["k", "l"]),
    "get_ranges large": lambda: parted.get_ranges("k", [(0, 8, bytearray(8))]),
    "view large": lambda: len(parted.view("k")),
    "delete large": lambda: parted.delete("k"),
    "keep large": lambda: parted.keep(["k"], 3),
    "load_ms large": lambda: parted.load_ms(["k"]),
    "pin": lambda: pins(client),
    "pin large": pins_in_parts,
    "exists": lambda: client.exists("k"),
    "prefix": lambda: client.prefix(["k"]).keys,
    "register": lambda: client.register(bytearray(8)).size,
    "get_async": lambda: awaited(client.get_async("k")),
    "put_many_async": lambda: awaited(client.put_many_async(["k"], [b"v"])),
    "mput": lambda: store.mput(["k"], [view]),
    "mget": lambda: store.mget(["k"], [view]),
    "mpin": lambda: store.mpin(["k"]).lengths,
    "mget_async": lambda: awaited(store.mget_async(["k"], [view])),
    "mexists_async": lambda: awaited(store.mexists_async(["k"])),
    "mpin_async": lambda: awaited(store.mpin_async(["k"])).lengths,
    "stats": lambda: client.stats()["put_failures"] > 0 and store.stats()["rejected"] == 0,
    "counters": lambda: parted.counters["outages"] > 0,
    "close_async": lambda: awaited(client.close_async()),
    "get_async closed": lambda: awaited(client.get_async("k")),
}
resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
results = {}
for name, call in CALLS.items():
    try:
        results[name] = call()
    except Exception as exc:
        results[name] = type(exc).__name__
print(json.dumps(results))
"""

_OUT: Final = {int(Code.NO_ROUTE), int(Code.UNAVAILABLE), int(Code.GET_FAILED), int(Code.PUT_FAILED)}
_WANTED: Final[dict[str, Any]] = {
    "put": False, "put if absent": False, "put_many if absent": [False, False], "put large": False,
    "put_many large": [False, False], "put gpu": "UsageError", "get_into gpu": "UsageError", "get": None,
    "get large": None, "get_into large": None, "get_many large": [None, None], "get_ranges large": None,
    "view large": 0, "delete large": False, "keep large": [False], "load_ms large": 0.0, "pin": [[None], True],
    "pin large": [None], "exists": False, "prefix": 0, "register": 8, "get_async": None, "put_many_async": [False],
    "mexists_async": [False], "stats": True, "counters": True, "close_async": None, "get_async closed": "UsageError",
}  # fmt: skip


@pytest.mark.parametrize("if_absent", ["0", "1"])
def test_issue_no_call_raises_what_loading_a_module_does(if_absent: str) -> None:
    """Each raised OSError into the engine: asyncio forms, puts of what is absent, values in parts, pins, counters."""
    env = {**os.environ, "SIMM_PUT_IF_ABSENT": if_absent, "SIMM_CLUSTER_MANAGER": "127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=300, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    got: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    codes = {name: got.pop(name) for name in ("mput", "mget", "mpin", "mget_async", "mpin_async")}
    assert got == _WANTED, done.stderr
    assert all(type(code) is list and code[0] in _OUT for code in codes.values()), codes
