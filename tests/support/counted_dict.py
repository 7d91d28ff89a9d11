"""A dict that counts the looks at its entries, so that a test can tell how a cost grows without a clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class CountedDict(dict[Any, Any]):
    """Counts each look-up as one, and each look at all entries as their number."""

    def __init__(self, entries: Mapping[Any, Any], total: list[int] | None = None) -> None:
        super().__init__(entries)
        self._total = [0] if total is None else total

    @property
    def count(self) -> int:
        """Looks so far, with those at the dicts beside it."""
        return self._total[0]

    def beside(self, entries: Mapping[Any, Any]) -> CountedDict:
        """Return another dict that counts for this one, too."""
        return CountedDict(entries, self._total)

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self._total[0] += 1
            yield key

    def values(self) -> Any:
        self._total[0] += len(self)
        return super().values()

    def items(self) -> Any:
        self._total[0] += len(self)
        return super().items()

    def __contains__(self, key: object) -> bool:
        self._total[0] += 1
        return super().__contains__(key)

    def __getitem__(self, key: Any) -> Any:
        self._total[0] += 1
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._total[0] += 1
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._total[0] += 1
        return super().pop(key, *default)
