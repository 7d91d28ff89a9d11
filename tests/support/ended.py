"""Calls that may hang, in threads of their own: a test then fails, and does not hang itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.support.waiting import WAIT_S


def ended(call: Callable[[], object]) -> bool:
    """Make a call in a thread; return whether it has ended."""
    thread = threading.Thread(target=call, name="test-ended", daemon=True)
    thread.start()
    thread.join(WAIT_S)
    return not thread.is_alive()
