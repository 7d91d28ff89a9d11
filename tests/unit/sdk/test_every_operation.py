"""Each operation exists in each form, and is tested by each path: read from the classes and the tests themselves.

An operation that is added to ``Client`` fails here until it has an asyncio form, a name in ``simm.kv`` or a reason for
none, and promises that clients keep by shared memory and TCP (``tests/support/conformance``), and by RDMA
(``test_rdma_conformance.py``). What touches the protocol names the model or the part of the simulator that searches it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from simm.client import Client
from simm.kv import Store
from simm.sdk.calls.kv_pins import PinnedKeys
from simm.sdk.ops.pins import Pins
from simm.testing import FakeClient
from tests.support.child import ROOT
from tests.support.client_values import PATHS

CONFORMANCE: Final = ROOT / "tests" / "support" / "conformance"


class Operation(NamedTuple):
    """What an operation is called in ``simm.kv``, and what searches its protocol: module and name."""

    kv: tuple[str, ...]
    searched: str


_SLOT = "tests.models.slot_reader"
#: Of ``Client``. A name that is empty: engines ask for many keys, or for memory, in another way.
OPERATIONS: Final[dict[str, Operation]] = {
    "put": Operation(("put",), "simm.sim.client:Client.mutate"),
    "put_many": Operation(("mput",), "simm.sim.client:Client.mutate"),
    "get": Operation((), "simm.sim.client:Client.get"),
    "get_into": Operation(("get",), "simm.sim.client:Client.get"),
    "get_many": Operation((), "simm.sim.client:Client.get"),
    "get_into_many": Operation(("mget",), "simm.sim.client:Client.get"),
    "view": Operation((), _SLOT),
    "exists": Operation(("exists",), "simm.sim.client:Client.exists"),
    "exists_many": Operation(("mexists",), "simm.sim.client:Client.exists"),
    "delete": Operation(("delete",), "simm.sim.client:Client.mutate"),
    "delete_many": Operation(("mdelete",), "simm.sim.client:Client.mutate"),
    "get_ranges": Operation(("get_ranges",), "simm.sim.pins:get_ranges"),
    "get_ranges_many": Operation(("mget_ranges",), "simm.sim.pins:get_ranges"),
    "put_gather": Operation(("put_gather",), "simm.sim.client:Client.mutate"),
    "put_gather_many": Operation(("mput_gather",), "simm.sim.client:Client.mutate"),
    "pin": Operation(("mpin",), "simm.sim.pins:pin"),
    "advance": Operation(("advance",), "simm.sim.epochs:EpochLoad"),
    "keep": Operation(("mkeep",), "simm.sim.worker:Worker.keep"),
    "unkeep": Operation(("munkeep",), "simm.sim.worker:Worker.keep"),
    "put_group": Operation(("put_group",), "simm.sim.whole:put_group"),
    "put_groups": Operation(("mput_groups",), "simm.sim.whole:put_group"),
    "exists_groups": Operation(("exists_group", "mexists_groups"), "simm.sim.whole:exists_group"),
    "prefetch": Operation(("mprefetch",), "tests.models.near"),
    # They ask what is stored, and how long it is. No answer is a promise.
    "load_ms": Operation(("load_ms",), ""),
    "prefix": Operation(("prefix",), ""),
    "close": Operation(("close",), ""),
}
#: What is no operation on keys: it asks no server, or has digests in place of keys, for adapters.
OTHERS: Final = {
    "begin", "deregister", "digest", "in_thread", "local", "mapped", "owned", "prepare_ranges", "register", "stats",
    "trace", "wait_ready",
    "delete_digests", "delete_sized", "exists_digest", "exists_digests", "get_digest", "get_digests", "get_mixed",
    "get_digest_at_owner", "get_into_many_at_owner",
    "keep_digests", "load_ms_digests", "prefetch_digests", "put_digest", "put_digests", "put_mixed",
}  # fmt: skip
#: No promise by this path, and why: ``advance`` asks the manager alone, and near copies are made on the reader's host.
ELSEWHERE: Final = {
    "advance": "tests/unit/sdk/test_pinned_epochs.py", "prefetch": "tests/unit/sdk/near/test_rdma.py",
    "close": "tests/unit/sdk/test_rdma_path.py",
}  # fmt: skip


def public(kind: type) -> set[str]:
    """Return the names of a class's public methods without an asyncio form's suffix."""
    return {
        name for name in dir(kind)
        if not name.startswith("_") and not name.endswith("_async") and callable(getattr(kind, name))
    }  # fmt: skip


def called(*files: Path) -> set[str]:
    """Return the names of all attributes that some files look up."""
    trees = [ast.parse(path.read_text()) for path in files]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_all_operations_are_in_the_table() -> None:
    assert public(Client) == OPERATIONS.keys() | OTHERS
    assert not OPERATIONS.keys() & OTHERS


@pytest.mark.parametrize("name", OPERATIONS)
def test_it_has_all_forms(name: str) -> None:
    for kind in (Client, FakeClient):
        assert callable(getattr(kind, name))
        assert inspect.iscoroutinefunction(getattr(kind, f"{name}_async")), f"{kind.__name__}.{name}_async"
    for other in OPERATIONS[name].kv:
        assert callable(getattr(Store, other)), f"Store.{other}"
        assert inspect.iscoroutinefunction(getattr(Store, f"{other}_async")), f"Store.{other}_async"


def test_no_operation_is_in_the_store_alone() -> None:
    named = {name for operation in OPERATIONS.values() for name in operation.kv}
    assert public(Store) == named | {"allocate", "in_thread", "prepare_ranges", "stats"}


def test_pinned_values_have_both_forms() -> None:
    for kind, names in ((Pins, ("get_ranges", "get_ranges_many", "read")),
                        (PinnedKeys, ("get_ranges", "mget_ranges", "read"))):  # fmt: skip
        for name in names:
            assert callable(getattr(kind, name))
            assert inspect.iscoroutinefunction(getattr(kind, f"{name}_async")), f"{kind.__name__}.{name}_async"


def test_each_is_promised_by_each_path() -> None:
    """Also its asyncio form. What is no promise by RDMA is tested where it says."""
    assert set(PATHS) == {"shm", "tcp"}
    promised = called(*CONFORMANCE.glob("*.py"))
    by_rdma = ast.parse(Path(__file__).with_name("test_rdma_conformance.py").read_text())
    rdma = called(*[
        CONFORMANCE / f"{each.name}.py" for node in by_rdma.body
        if isinstance(node, ast.ImportFrom) and node.module == "tests.support.conformance" for each in node.names
    ])  # fmt: skip
    assert rdma
    for name in OPERATIONS:
        assert name in promised, name
        assert name in rdma or name in called(ROOT / ELSEWHERE[name]), name
    system = called(*(ROOT / "tests" / "system").rglob("*.py"))
    assert not {f"{name}_async" for name in OPERATIONS} - promised - system


def test_each_name_of_the_store_is_tested() -> None:
    tested = called(*(ROOT / "tests" / "system" / "kv").rglob("*.py"))
    names = {name for operation in OPERATIONS.values() for name in operation.kv}
    assert not (names | {f"{name}_async" for name in names}) - tested


def test_the_page_has_the_table() -> None:
    """docs/promises.md says the same as this file, so that neither is read alone."""
    text = (ROOT / "docs" / "promises.md").read_text()
    for name, operation in OPERATIONS.items():
        kv = ", ".join(f"`{other}`" for other in operation.kv) or "-"
        searched = f"`{operation.searched}`" if operation.searched else "-"
        elsewhere = f"`{ELSEWHERE[name]}`" if name in ELSEWHERE else "promises"
        assert f"| `{name}` | {kv} | {elsewhere} | {searched} |\n" in text, name


@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if operation.searched])
def test_its_protocol_is_searched(name: str) -> None:
    module, _, path = OPERATIONS[name].searched.partition(":")
    found: Any = importlib.import_module(module)
    for part in filter(None, path.split(".")):
        found = getattr(found, part)
    assert found is not None
