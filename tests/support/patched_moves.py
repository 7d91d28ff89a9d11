"""What servers meet in tests while shards move: switches ``call=tests.support.patched_moves:NAME`` of ``patched``."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any, Final

#: In the server's working folder, once its first mover has stopped.
STOPPED: Final = "a mover has stopped"


def first_stops() -> None:
    """The first mover stops when it has copied its first batch of values."""
    from simm.server.migration import Mover

    copy = Mover._copy_batch

    def copy_and_stop(self: Mover, *arguments: Any) -> None:
        copy(self, *arguments)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(STOPPED, os.O_CREAT | os.O_EXCL))
            os.kill(os.getpid(), signal.SIGSTOP)

    Mover._copy_batch = copy_and_stop  # type: ignore[method-assign]
