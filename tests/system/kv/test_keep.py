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
