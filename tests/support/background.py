"""A thread that does something again and again beside a test, until the test is over."""

from __future__ import annotations

import threading
from typing import TypeVar

Self = TypeVar("Self", bound="Background")


class Background:
    """``with`` it the thread runs :meth:`run`, which ends soon after ``over`` is set."""

    def __init__(self, name: str) -> None:
        self.over = threading.Event()
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)

    def __enter__(self: Self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join()

    def run(self) -> None:
        """Work until ``over``."""
        raise NotImplementedError
