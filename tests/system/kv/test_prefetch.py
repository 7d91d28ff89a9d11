"""Near copies by ``simm.kv``: codes in place of errors."""

from __future__ import annotations

import asyncio

import pytest

from simm.errors import Code
from simm.kv import Store
from tests.support.kv_values import filled


def test_without_the_setting_it_is_refused(store: Store) -> None:
    before = store.rejected
    assert store.mprefetch(["a", "b"]) == [Code.INVALID_ARGUMENT] * 2 and store.rejected == before + 2


def test_codes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMM_NEAR_COPIES", "1")
    with Store() as near:
        assert near.mput(["a", "b"], [filled(b"1"), filled(b"2")]) == [0, 0]
        got = near.mprefetch(["a", "", "not stored", "b"])
        assert got == [0, Code.INVALID_ARGUMENT, 0, 0] and all(type(code) is int for code in got)
        assert asyncio.run(near.mprefetch_async(["a"])) == [0] and near.mprefetch([]) == []
        assert near.stats()["near_copies"] == 0 and near.exists("a")
    assert near.mprefetch(["a"]) == [Code.INVALID_ARGUMENT]
