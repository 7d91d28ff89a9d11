"""What a rank of vLLM has given to threads: copies to the staging memory, loads, and stores.

Each is over once, whether its thread ends it or none does, as where no thread can be started.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from ..vllm_plan import Block, Load

__all__ = ["Copy", "Loading", "Staged", "Store"]


class Copy:
    """A layer's blocks on their way to the staging memory. ``futures.wait`` would take locks of the threads.

    It has failed until it is done. The side's lock guards ``begun`` and ``over``.
    """

    __slots__ = ("begun", "failed", "job", "over")

    def __init__(self) -> None:
        self.begun = self.over = False
        self.failed = True
        #: None: no thread has taken it, or an interrupt has come before that was known.
        self.job: Future[Any] | None = None

    def begin(self) -> bool:
        """Return whether its thread is to do it: it has not been taken back. The lock is held."""
        self.begun = not self.over
        return self.begun

    def left(self) -> bool:
        """Return whether it is not over, and no thread ends it. The lock is held.

        A pool ends a job without its call where there is no memory.
        """
        if self.over:
            return False
        return self.job.done() if self.job is not None else not self.begun


class Loading(Copy):
    """A request's load. Nothing writes to its blocks when it is over, or to a layer of them that is not in ``todo``."""

    __slots__ = ("load", "todo")

    def __init__(self, load: Load, layers: Iterable[str]) -> None:
        super().__init__()
        self.load = load
        self.todo = list(layers)


class Staged:
    """A block on its way to the store: its place in the staging memory."""

    __slots__ = ("block", "generation", "row")

    def __init__(self, block: Block, generation: str, row: int) -> None:
        self.block, self.generation, self.row = block, generation, row


class Store(Copy):
    """Staged blocks on their way to the store. Their rows are free when it is over."""

    __slots__ = ("staged",)

    def __init__(self, staged: Sequence[Staged]) -> None:
        super().__init__()
        self.staged = staged
