"""GROUP at a worker, and at a stream for clients by TCP."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...wire import messages as M
from ...wire.group_messages import Group, groups_in, joined
from ...wire.messages import Status

if TYPE_CHECKING:
    from ...arena.store import Store


def group(store: Store, msg: Group, mover: int = 0) -> M.Statuses:
    """Carry GROUP out at a worker. Raise RemoteProtocolError for a malformed one.

    ``mover``: the epoch by which the sender copies, if it is a mover.
    """
    groups = groups_in(msg)
    store.apply_pending()
    return M.Statuses(store.groups.mark_many(groups, mover))


def group_for(
    msg: Group, are_own: Callable[[Sequence[bytes]], list[bool]] | None, missed: Callable[[bytes], int],
    ask: Callable[[Group], list[int]],
) -> M.Statuses:  # fmt: skip
    """Carry GROUP out for a client of a stream. Raise RemoteProtocolError for a malformed one.

    Args:
        msg: the request.
        are_own: returns for each digest whether it is stored and of the client's namespace; None for a client of any.
            What is not is not there for it.
        missed: returns the status of a group that begins with a digest, if it has a value that is not there.
        ask: asks the worker.
    """
    groups = groups_in(msg)
    statuses: list[int] = [Status.NOT_FOUND] * len(groups)
    mine = list(range(len(groups)))
    if are_own is not None:
        statuses = [missed(digests[0]) for digests in groups]
        own = are_own([digest for digests in groups for digest in digests])
        ends = list(itertools.accumulate(map(len, groups)))
        mine = [at for at, end in enumerate(ends) if all(own[end - len(groups[at]) : end])]
    if mine:
        for at, status in zip(mine, ask(joined([groups[at] for at in mine]))):
            statuses[at] = status
    return M.Statuses(statuses)
