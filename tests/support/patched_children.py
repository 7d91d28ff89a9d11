"""What a supervisor does to its children in tests: switches ``call=tests.support.patched_children:NAME``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

#: In the server's working folder: the supervisor closes its connection to the worker when it is there.
CUT: Final = "cut"
#: There as well: no recovery ends while it is there.
SLOW: Final = "slow"
#: And there: what recovers an arena ends at once while it is there, as where the system has no memory to spare.
SCARCE: Final = "scarce"


def cut() -> None:
    """Close the connection to the worker when it is sent something while ``CUT`` is there."""
    from simm.server.children import Supervised

    send = Supervised.send

    def send_and_cut(self: Supervised, *arguments: Any, **named: Any) -> None:
        send(self, *arguments, **named)
        if self.name.startswith("worker ") and os.path.exists(CUT):
            os.unlink(CUT)
            assert self.child is not None and self.child.peer is not None
            self.child.peer.abort("a test")

    Supervised.send = send_and_cut  # type: ignore[method-assign]


def slow() -> None:
    """A worker recovers its arena, and its heartbeat moves, for as long as ``SLOW`` is there."""
    from simm.table import Table

    recover = Table.recover

    def recover_slowly(self: Table, beat: Callable[[], None] = lambda: None) -> list[str]:
        while os.path.exists(SLOW):
            beat()
            time.sleep(0.05)
        return recover(self, beat)

    Table.recover = recover_slowly  # type: ignore[method-assign]


def scarce() -> None:
    """A worker that is to recover its arena ends as long as ``SCARCE`` is there."""
    from simm.table import Table

    recover = Table.recover

    def recover_or_end(self: Table, beat: Callable[[], None] = lambda: None) -> list[str]:
        if os.path.exists(SCARCE):
            os._exit(1)
        return recover(self, beat)

    Table.recover = recover_or_end  # type: ignore[method-assign]


def believing() -> None:
    """A worker takes its supervisor for dead as soon as the connection is closed, and nobody kills it."""
    from simm.server import children
    from simm.server.slots import opening

    vars(children).update(END_S=3600.0)
    vars(opening).update(_reparented=lambda _: True, ORPHAN_S=1.0)
