"""FOR_NAMESPACE at a worker: DELETE, DELETE_SIZED, KEEP and GROUP of clients that are bound to a namespace.

A stream could look whose the entries are. But another client may replace one before the request reaches the worker,
which would then delete, keep or group a value of another namespace. So the worker looks, in the turn that carries the
request out. What is not of the namespace is not there: the client hears of it what the shard's word alone says.
A value of an old epoch is the namespace's own, too. It is deleted: where only the lease has ended, it could be read
again. KEEP and GROUP refuse it by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ...arena.hashing import shard_of
from ...cluster.lookup import hidden_status
from ...errors import RemoteProtocolError
from ...rpc import OPCODES, Frame, decode
from ...wire import messages as M
from ...wire.epoch_messages import ForNamespace
from ...wire.group_messages import Group, groups_in, joined
from ...wire.keep_messages import Keep
from ...wire.messages import Status

if TYPE_CHECKING:
    from ...arena.sessions import Session
    from ...arena.store import Store

Handlers = Mapping[int, Callable[["Session", Any], tuple[Any, int]]]
#: What a client hears of such a key in a shard that is moving in. It may try KEEP and DELETE again until the move ends.
#: Nor does it delete what a previous owner may have: whose that is, nobody here knows.
_MOVING: Final[dict[int, int]] = {
    OPCODES[M.Delete]: Status.UNAVAILABLE, OPCODES[M.DeleteSized]: Status.UNAVAILABLE, OPCODES[Keep]: Status.PREVIOUS,
    OPCODES[Group]: Status.NOT_FOUND,
}  # fmt: skip


def handler(store: Store, handlers: Handlers) -> Callable[[Session, ForNamespace], tuple[Any, int]]:
    """Return what a worker does at FOR_NAMESPACE. Raises RemoteProtocolError for another request, or if malformed."""
    namespaces, lookup, entry = store.ledger.namespaces, store.table.lookup, store.table.entry

    def carry_out(session: Session, msg: ForNamespace) -> tuple[Any, int]:
        if not session.relays:
            raise RemoteProtocolError("FOR_NAMESPACE is for streams")
        if msg.opcode not in _MOVING:
            raise RemoteProtocolError(f"FOR_NAMESPACE with message {msg.opcode:#x}")
        number, words = namespaces.find(msg.name), store.shard_words.accepting

        def is_own(digest: bytes) -> bool:
            return (slot := lookup(digest)) >= 0 and entry(slot).namespace == number

        items, keys, request_for = _parts(decode(Frame(msg.opcode, 0, 0, 0, msg.body)))
        store.apply_pending()
        statuses = [hidden_status(words[shard_of(each[0])], _MOVING[msg.opcode]) for each in keys]
        mine = [at for at, each in enumerate(keys) if all(map(is_own, each))]
        answer, status = handlers[msg.opcode](session, request_for([items[at] for at in mine]))
        for at, each in zip(mine, answer.statuses):
            statuses[at] = each
        return M.Statuses(statuses), status

    return carry_out


def _parts(request: Any) -> tuple[list[Any], list[list[bytes]], Callable[[list[Any]], Any]]:
    """Return what gets a status each, their digests, and what makes a request for some of them."""
    if isinstance(request, Group):
        groups = groups_in(request)
        return groups, groups, joined
    if isinstance(request, M.DeleteSized):
        return request.entries, [[digest] for digest, _ in request.entries], M.DeleteSized
    made = partial(Keep, request.how, request.seconds) if isinstance(request, Keep) else M.Delete
    return request.digests, [[digest] for digest in request.digests], made
