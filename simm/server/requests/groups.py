"""GROUP at a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...wire import messages as M
from ...wire.group_messages import Group, groups_in

if TYPE_CHECKING:
    from ...arena.store import Store


def group(store: Store, msg: Group, mover: int = 0) -> M.Statuses:
    """Carry GROUP out at a worker. Raise RemoteProtocolError for a malformed one.

    ``mover``: the epoch by which the sender copies, if it is a mover.
    """
    groups = groups_in(msg)
    store.apply_pending()
    return M.Statuses(store.groups.mark_many(groups, mover))
