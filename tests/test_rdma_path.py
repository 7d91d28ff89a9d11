"""The RDMA path of a client end to end, against a real worker, stream and endpoint, on a network in software."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from rdmatown import RdmaTown

from simm import session as session_module

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_buried() -> Iterator[None]:
    session_module._BURIED.clear()
    yield
    session_module._BURIED.clear()


def bytes_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


SIZES = [1, 7, 8, 9, 63, 64, 65, 4095, 4096, 4097, 65_536, MIB - 1, MIB, MIB + 1, 3 * MIB + 5]


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("rails", [1, 2])
def test_all_sizes_there_and_back(monkeypatch: pytest.MonkeyPatch, windows: bool, rails: int) -> None:
    names = [f"r{number}" for number in range(rails)]
    with RdmaTown(monkeypatch, rails=names, mine=names, size=64 * MIB, windows=windows) as town:
        client = town.rdma()
        for size in SIZES:
            value = bytes_of(size, size)
            source = client.register(bytearray(value))
            assert client.put(f"r{size}", source)
            assert client.put(f"u{size}", value)
            sink = client.register(np.zeros(size + 3, np.uint8))
            plain = bytearray(size + 3)
            for key in (f"r{size}", f"u{size}"):
                for _ in range(2):  # by its sets, then by its place
                    assert client.get(key) == value
                    sink.view()[:] = bytes(size + 3)
                    assert client.get_into(key, sink) == size
                    assert bytes(sink.view()) == value + bytes(3)
                    assert client.get_into(key, plain) == size
                    assert plain[:size] == value
        stats = client.stats()
        assert stats["rdma_puts"] == 2 * len(SIZES) == stats["puts"]
        assert stats["rdma_gets"] == 12 * len(SIZES) == stats["hits"]
        assert stats["rdma_fallbacks"] == 0
