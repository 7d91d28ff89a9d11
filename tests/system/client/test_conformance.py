"""The real client and the fake client of ``simm.testing`` keep one set of promises, so that neither drifts."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from simm.client import Client
from simm.testing import FakeClient
from tests.support.child import ROOT
from tests.support.client_values import PATHS
from tests.support.conformance import groups, if_absent, keep, keys, large, lifetime, parts, pins, prefetch, values
from tests.support.conformance.world import APART, BROKEN, PROMISES, fake, ordered, real

#: From 3.12 on CPython warns of every fork beside threads. Ours are the point of the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

#: By an order that depends on no import.
FAKES = sorted(BROKEN, key=lambda each: (each[0], each[1].__name__))
#: The modules that make the promises; importing them fills PROMISES, APART and BROKEN.
MODULES = (values, keys, lifetime, parts, pins, if_absent, keep, groups, large, prefetch)


# --- the suite --------------------------------------------------------------------------------

#: A real cluster keeps these in the quick run too.
QUICK = (
    "values_come_back", "a_batch_answers_each_key", "ranges_of_a_value_come_back", "pinned_values_stay_as_they_were",
    "large_values_come_back", "a_manifest_is_no_value_and_a_value_no_manifest",
)  # fmt: skip


def clients(names: Iterable[str]) -> list[Any]:
    """Return the parameters (client, name): each promise, on the client by each path and on the fake."""
    return [
        pytest.param(kind, name, marks=[pytest.mark.quick] * (kind == "fake" or name in QUICK))
        for name in names for kind in (*PATHS, "fake")
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), clients(ordered(PROMISES)))
def test_a_client_keeps_its_promises(request: pytest.FixtureRequest, namespace: str, kind: str, name: str) -> None:
    with fake() if kind == "fake" else real(request.getfixturevalue("cluster"), kind, namespace) as world:
        PROMISES[name](world)


@pytest.mark.parametrize(("kind", "name"), clients(ordered(APART)))
def test_a_cluster_of_its_own_keeps_them(
    request: pytest.FixtureRequest, namespace: str, kind: str, name: str
) -> None:
    if kind == "fake":
        world = fake(capacity="64M")
    else:
        cluster = request.getfixturevalue("make_cluster")(memory="64M", heartbeat_ms=200)
        world = real(cluster, kind, namespace)
    with world:
        APART[name](world)


@pytest.mark.quick
@pytest.mark.parametrize(("name", "kind"), FAKES, ids=[kind.__name__ for _, kind in FAKES])
def test_a_fake_that_breaks_a_promise_is_found_out(name: str, kind: type[FakeClient]) -> None:
    """An assertion finds each injected bug; the fake does not fail in another way."""
    check = {**PROMISES, **APART}[name]
    with fake(kind, "64M" if name in APART else None) as world:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check(world)


@pytest.mark.quick
def test_every_promise_has_been_broken() -> None:
    assert {name for name, _ in BROKEN} == PROMISES.keys() | APART.keys()


# --- signatures, imports --------------------------------------------------------------------------


def public(kind: type) -> dict[str, Any]:
    return {name: inspect.getattr_static(kind, name) for name in dir(kind) if not name.startswith("_")}


def signature(kind: type, name: str) -> tuple[list[Any], str]:
    found = inspect.signature(getattr(kind, name))
    parameters = [parameter for parameter in found.parameters.values() if parameter.name != "store"]
    return parameters, str(found.return_annotation).replace(FakeClient.__name__, Client.__name__)


def test_signatures_are_the_same() -> None:
    assert public(FakeClient).keys() == public(Client).keys()
    for name, mine in public(Client).items():
        theirs = public(FakeClient)[name]
        assert type(mine) is type(theirs), name
        if callable(getattr(Client, name)):
            assert signature(FakeClient, name) == signature(Client, name)
            assert inspect.iscoroutinefunction(mine) == inspect.iscoroutinefunction(theirs), name
    for name in ("__init__", "__enter__", "__exit__"):
        assert signature(FakeClient, name) == signature(Client, name)
    (more,) = set(inspect.signature(FakeClient).parameters) - set(inspect.signature(Client).parameters)
    assert inspect.signature(FakeClient).parameters[more].default is None


def test_attributes_are_the_same(cluster: Any) -> None:
    def attributes(client: Client) -> set[str]:
        return {name for name in vars(client) if not name.startswith("_")}

    with Client(cluster.manager) as client, FakeClient() as other:
        assert attributes(other) == attributes(client) | {"store"}
        assert other.counters.keys() == client.counters.keys()
        assert isinstance(other, Client)


class ForgotAnArgument(FakeClient):
    def get(self, key: str, default: Any = None) -> bytes | None:
        return super().get(key)


def test_another_signature_would_be_seen() -> None:
    assert signature(ForgotAnArgument, "get") != signature(Client, "get")
    assert signature(ForgotAnArgument, "put") == signature(Client, "put")


def test_it_imports_no_module_of_simm_that_the_first_client_does_not() -> None:
    code = """if True:
        import sys, simm.client
        from simm.ipc import put, tally
        from simm.sdk import reads, routing, writes
        from simm.sdk.ops import counting, epochs, load_time, parts, pinner, prefix
        before = set(sys.modules)
        import simm.testing
        print(sorted(name for name in set(sys.modules) - before if name.startswith("simm")))
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    own = [f"simm.testing{name}" for name in ("", ".client", ".paths", ".store")]
    assert ran.stdout.strip() == str(own)
