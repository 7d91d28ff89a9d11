"""The client on a real server: large batches, pins of views, checksums. ``test_conformance.py`` has the rest."""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np
import pytest

from simm.client import Client
from simm.errors import UsageError
from simm.host.buffers import Span, address_of, view_of
from tests.support.client_values import pattern
from tests.support.waiting import wait_until

#: From 3.12 on CPython warns of every fork beside threads. Ours are the point of the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


# --- batches ----------------------------------------------------------------------------------


def test_batches_larger_than_any_exchange(client: Client) -> None:
    """Use more grants than a session keeps and more keys than a frame carries; answers stay in order."""
    keys = [f"k{number}" for number in range(9000)]
    values = [struct.pack("<Q", number) * 16 for number in range(len(keys))]
    assert all(client.put_many(keys, values))
    buffers = memoryview(bytearray(128 * len(keys)))
    got = client.get_into_many(keys, [buffers[at : at + 128] for at in range(0, len(buffers), 128)])
    assert got == [128] * len(keys)
    assert buffers == b"".join(values)
    hits = client.exists_many([*keys, *(f"absent{number}" for number in range(11_000))])
    assert hits == [True] * 9000 + [False] * 11_000
    assert {type(hit) for hit in hits} == {bool}
    assert all(client.delete_many(keys))


def test_issue_a_pool_overfull_with_grants(cluster: Any, namespace: str) -> None:
    """A first batch of many pages gets more than twice the grants that a session keeps.

    The next commit then asked for a negative count of grants, which cannot be packed.
    """
    with Client(cluster.manager, namespace=namespace, path="shm") as client:
        keys = [f"k{number}" for number in range(6000)]
        assert all(client.put_many(keys, [bytes(4096)] * len(keys)))
        assert all(client.exists_many(keys))
        assert all(client.delete_many(keys))


# --- views ------------------------------------------------------------------------------------


def test_slices_and_arrays_keep_the_pin(cluster: Any, namespace: str) -> None:
    with Client(cluster.manager, namespace=namespace, path="shm") as client:
        assert client.put("k", pattern(50_000))
        wait_until(lambda: cluster.worker_stats()["pins"] == 0, "pins of tests before this one go")
        view = client.view("k")
        assert view
        part = view.data[10:20]
        whole = np.frombuffer(view.data, np.uint8)[100:]
        assert cluster.worker_stats()["pins"] == 1
        view.close()
        del view
        # The background thread releases pins periodically, and exchanges are in order. So after one more pin has come
        # and gone, the first would be gone too, if it could.
        with client.view("k"):
            assert cluster.worker_stats()["pins"] == 2
        wait_until(lambda: cluster.worker_stats()["pins"] == 1, "the second pin goes")
        assert bytes(part) == pattern(50_000)[10:20]
        del part
        client.delete("k")
        assert whole.tobytes() == pattern(50_000)[100:]
        del whole
        wait_until(lambda: cluster.worker_stats()["pins"] == 0, "the first pin goes")


def test_many_views_at_once(client: Client, cluster: Any) -> None:
    values = [pattern(1000 + number, number) for number in range(100)]
    client.put_many([f"k{number}" for number in range(100)], values)
    views = [client.view(f"k{number}") for number in range(100)]
    assert [bytes(view.data) for view in views if view] == values
    for view in views:
        assert view
        view.close()
    wait_until(lambda: cluster.worker_stats()["pins"] == 0, "all pins go")


def test_a_view_outlives_its_client(cluster: Any, path: str, namespace: str) -> None:
    client = Client(cluster.manager, namespace=namespace, path=path)
    client.put("k", pattern(5000))
    view = client.view("k")
    assert view
    client.close()
    assert view.data == pattern(5000)
    view.close()
    del view
    # The session that held the pin is closed; the process's next session with that worker releases it.
    with Client(cluster.manager, namespace=namespace, path=path) as later:
        assert later.get("k") == pattern(5000)
        wait_until(lambda: cluster.worker_stats()["pins"] == 0, "the pin goes")


# --- checksums --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [100, 100_000])
def test_a_changed_byte_is_a_miss_for_who_checks(cluster: Any, path: str, namespace: str, size: int) -> None:
    arguments: dict[str, Any] = {"namespace": namespace, "deadline_s": 10.0}
    with (
        Client(cluster.manager, path=path, checksum=True, **arguments) as checks,
        Client(cluster.manager, path="shm", **arguments) as trusts,
    ):
        value = pattern(size)
        assert checks.put("k", value)
        assert checks.get("k") == value
        view = trusts.view("k")
        assert view
        at = address_of(view.data)
        Span(at + size // 2, 1).view()[0] ^= 1  # as a stray write of some process would
        view.close()
        buffer = bytearray(size)
        assert checks.get("k") is None
        assert checks.get_into("k", buffer) is None
        assert checks.get_into_many(["k"] * 20, [buffer] * 20) == [None] * 20
        assert not checks.view("k")
        assert checks.counters["crc_errors"] == 23
        assert trusts.get("k") != value
        assert len(trusts.get("k") or b"") == size
        assert checks.put("k", value)
        assert checks.get("k") == value


# --- arrays -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["datetime64[s]", "complex128", "float16", "bool", ">u4", "V6"])
def test_arrays_of_any_fixed_type_are_bytes(dtype: str) -> None:
    array = np.frombuffer(os.urandom(4800), np.uint8).view(dtype if dtype != "bool" else np.uint8)
    array = array.astype(bool) if dtype == "bool" else array
    assert bytes(view_of(array)) == array.tobytes()
    assert bytes(view_of(array.reshape(2, -1))) == array.tobytes()
    with pytest.raises(UsageError, match="contiguous"):
        view_of(array[::2])


def test_an_array_of_objects_is_refused() -> None:
    with pytest.raises(UsageError, match="objects"):
        view_of(np.array([object()]))
