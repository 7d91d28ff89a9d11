"""Keeping values by ``simm.kv``: codes in place of errors."""

from __future__ import annotations

import asyncio

from simm.errors import Code
from simm.kv import Store
from tests.support.kv_values import filled


def test_codes(store: Store) -> None:
    assert store.mput(["a", "b"], [filled(b"1"), filled(b"2")]) == [0, 0]
    assert store.mkeep(["a", "no", "b"], 5, "hard") == [0, Code.KEY_NOT_FOUND, 0]
    assert asyncio.run(store.mkeep_async(["a", "no"], 0.1)) == [0, Code.KEY_NOT_FOUND]
    before = store.rejected
    wrong = [store.mkeep(["a", "b"], 0), store.mkeep(["a", "b"], 5, "firm"), store.mkeep(["a", "b"], float("nan"))]
    assert wrong == [[Code.INVALID_ARGUMENT] * 2] * 3 and store.rejected == before + 6
    got = store.mkeep(["a", "", "b"], 5)
    assert got == [0, Code.INVALID_ARGUMENT, 0] and all(type(code) is int for code in got)
    store.close()
    assert store.mkeep(["a"], 5) == [Code.INVALID_ARGUMENT]


def test_keeping_ends(store: Store) -> None:
    page = filled(b"1" * (1 << 20))
    keys = [f"kept {number}" for number in range(100)]

    def keep_all() -> int:
        """Put and keep as much as may be; return how many values that is."""
        return [store.mput([key], [page])[0] or store.mkeep([key], 60, "hard")[0] for key in keys].count(0)

    most = keep_all()
    assert 0 < most < len(keys), "the quota of the namespace"
    assert store.mkeep(["late"], 60, "hard") == [Code.KEY_NOT_FOUND] and store.mput(["late"], [page]) == [0]
    assert store.mkeep(["late"], 60, "hard") == [Code.PUT_FAILED]
    before = store.rejected
    got = store.munkeep([keys[0], "no", "", keys[1]])
    assert got == [0, Code.KEY_NOT_FOUND, Code.INVALID_ARGUMENT, 0] and all(type(code) is int for code in got)
    assert store.rejected == before + 1
    assert store.mkeep(["late"], 60, "hard") == [0], "there is room again"
    assert asyncio.run(store.munkeep_async(keys[:most])) == [0] * most
    store.close()
    assert store.munkeep(["late"]) == [Code.INVALID_ARGUMENT]
