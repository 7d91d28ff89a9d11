"""Sets that are used by somebody else in the middle of what a test calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.support.waiting import WAIT_S


class AddedTo(set[Any]):
    """A set during whose next iteration, or after whose next copy, another thread does ``add`` once."""

    _add: Callable[[], object] | None = None

    def __init__(self, items: Iterable[Any], add: Callable[[], object]) -> None:
        super().__init__(items)
        self._add = add

    def _meanwhile(self) -> None:
        add, self._add = self._add, None
        if add is not None:
            thread = threading.Thread(target=add, daemon=True)
            thread.start()
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def __iter__(self) -> Iterator[Any]:
        items = super().__iter__()
        yield next(items)
        self._meanwhile()
        yield from items

    def copy(self) -> set[Any]:
        made = set(super().copy())
        self._meanwhile()
        return made


class Interrupting(set[Any]):
    """A set in the middle of whose next ``add`` the same thread does something else, as in a signal's handler."""

    def __init__(self, items: Iterable[Any], act: Callable[[], object]) -> None:
        super().__init__(items)
        self._act: Callable[[], object] | None = act

    def add(self, item: Any) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()
        super().add(item)


def ends(call: Callable[[], object]) -> bool:
    """Run a call in a thread, and return whether it ends."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return not thread.is_alive()
