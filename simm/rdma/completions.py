"""A queue pair's completion queue: poll it, and sleep until it has something.

The queue itself can fail: it overruns, its device goes, its descriptor reports an error. pyverbs raises an error of its
own then (``Library.Error``), and completions are lost. Nothing is known of the operations in flight after that, so the
queue pair breaks. A queue that only says nothing any more is given up at the deadline of the call that waits for it.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any, Final

from .work_requests import Library, Stack, make_channel

#: Completions that are taken at a time.
POLL_MANY: Final = 16


class Completions:
    """A completion queue with a channel of its own, both on ``stack``. For one thread at a time.

    Args:
        size: completions that it has room for.
        vector: the device's interrupt that it uses.

    Raises FabricError if they cannot be made. Each method raises the library's errors if the queue has failed.
    """

    def __init__(self, library: Library, context: Any, stack: Stack, size: int, vector: int) -> None:
        self._channel, fd = make_channel(library, context, stack)
        self.queue = stack.make("a completion queue", lambda: library.CQ(context, size, None, self._channel, vector))
        self._events = select.poll()
        self._events.register(fd, select.POLLIN)
        self._armed = False

    def take(self) -> Sequence[Any]:
        """Return the completions that are there, POLL_MANY at most."""
        found: Sequence[Any] = self.queue.poll(POLL_MANY)[1]
        return found

    def arm(self) -> None:
        """Let completions after this call raise an event; :meth:`take` finds earlier ones."""
        if not self._armed:
            self.queue.req_notify()
            self._armed = True

    def sleep(self, seconds: float) -> None:
        """Wait for an event."""
        if self._events.poll(seconds * 1000 + 1):
            self._channel.get_cq_event(self.queue)
            self.queue.ack_events(1)
            self._armed = False
