"""Who may connect on loopback to a server without a token: its own user, root, and users that ``--allow-uid`` names.

Every user of a host reaches its loopback addresses. So a server without tokens takes the uid of each connection's other
end (``net/peer_uid.py``) in their place. It is looked up when the server accepts the connection, and a refusal answers
the first request, so that the client reads the reason.

Members of the data server's ``--group`` are not let in for that: of a TCP connection the kernel tells the user only,
and to ask a directory service for the user's groups could stop the server. Besides, by TCP a client moves shards and
drains servers; the worker's socket, which the group may use, takes no such request of it.

``simm index`` asks the same on loopback (``net/http.py``, ``index/rpc/rpcs.py``): its requests change what it tells,
and ask the store.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable

from ..host.users import is_certain, trusts
from ..rpc import Frame
from .peer import Peer, Service
from .peer_uid import HasClosed, UnknownUser, credentials, tcp_uid, uid_of_peer


class LocalUsers:
    """Decides by the user of a connection's other end. ``named``: uids besides this process's own and root's."""

    def __init__(self, named: Iterable[int] = ()) -> None:
        self.named = frozenset(named)

    def __repr__(self) -> str:
        return f"<LocalUsers {sorted({os.geteuid(), 0, *self.named})}>"

    def fault(self, sock: socket.socket, *, tokens: bool = False) -> str:
        """Return why a connection is not accepted; empty if it is. Raises HasClosed for one whose peer has gone.

        ``tokens``: this server has some, and none was shown.
        """
        return self._fault(lambda: credentials(sock)[1] if sock.family == socket.AF_UNIX else tcp_uid(sock), tokens)

    def fault_of(self, there: tuple[str, int], here: tuple[str, int], *, tokens: bool = False) -> str:
        """Do :meth:`fault` for a TCP connection between two addresses, whose socket a library has."""
        return self._fault(lambda: uid_of_peer(there, here), tokens)

    def _fault(self, find: Callable[[], int], tokens: bool) -> str:
        taken = ", ".join(f"uid {uid}" for uid in sorted({os.geteuid(), 0, *self.named}))
        if tokens:
            rule = f"without a token of its --token-file this server takes connections of {taken} only"
            remedy = "show a token of its --token-file"
        else:
            rule = f"a server without --token-file takes connections of {taken} only"
            remedy = "give both sides a --token-file"
        try:
            uid = find()
        except HasClosed:
            raise
        except UnknownUser as exc:
            return f"{rule}, and the user of this one cannot be told ({exc}): {remedy}"
        if trusts(uid, self.named):
            return ""
        if not is_certain(uid):
            return f"{rule}, and this user has no number in the server's user namespace: {remedy}"
        start = f"start it with --allow-uid {uid}"
        both = f"{remedy}, or {start}" if tokens else f"{start}, or {remedy}"
        return f"{rule}, and this one is of uid {uid}: {both}"

    def check(self, peer: Peer, on_refused: Callable[[], None] = lambda: None) -> None:
        """Let a new connection be, or have its first request refused and nothing of it decoded."""
        try:
            fault = self.fault(peer.sock)
        except HasClosed:
            peer.service = _Gone()
            return
        if fault:
            peer.service = _Refusing(fault, on_refused)


class _Refusing(Service):
    """Answers the first request of a peer with the reason, and closes the connection."""

    def __init__(self, text: str, on_refused: Callable[[], None]) -> None:
        self._text = text
        self._on_refused = on_refused

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        self._on_refused()
        peer.refuse(frame.request_id, self._text)


class _Gone(Service):
    """Takes no request of a peer that had closed before it was accepted. A busy server has many, and refuses nobody."""

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        peer.close("it closed before its user could be told")
