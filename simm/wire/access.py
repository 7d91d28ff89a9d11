"""The role of a token that each message takes, in one table. Each server asks it for every message after HELLO.

A *client* reads and writes values, and asks for what every client must know: the map and the state of the cluster. A
*server* also speaks for itself: it joins by a name, reports, leaves, and takes over by the manager's map what others
have had. An *admin* also decides about servers of others: DRAIN empties one. A data server needs no admin's token, nor
the line of one. So a host that falls into the wrong hands, and has none, orders nothing of the others. It can draw
nearly all shards to itself nevertheless, unless its token is bound to names and their room (``control/links.py``): by
JOIN a server says what room it has, and gets shards by that.

A message that is not in the table is for nobody: it is an answer, a push, or new. On a worker's UNIX socket no token is
asked for. There the kernel names the peer's uid: the worker's own and root are servers, others are clients.
"""

from __future__ import annotations

from typing import Final

from ..config.tokens import TokenRole
from ..rpc import CODECS, OPCODES
from . import admin_messages as A
from . import epoch_messages as E
from . import group_messages as G
from . import keep_messages as K
from . import messages as M
from . import rdma_messages as R
from . import report_messages as P
from . import trace_messages as T

_TAKES: Final[dict[TokenRole, tuple[type, ...]]] = {
    TokenRole.CLIENT: (
        M.Hello, M.Ping, M.Auth, M.Prove,
        M.Commit, M.Grant, M.ReturnGrants, M.Delete, M.DeleteSized, G.Group, M.Locate, M.Unpin,
        M.ReleaseSessions,
        M.DataAttach, M.RingAttach, M.Kick, M.Wake, M.Stats,
        M.Fetch, M.FetchPrevious, M.FetchRanges, M.FetchPinned, M.Pin, M.Store, M.Exists,
        R.RdmaOpen, R.RdmaConnect, R.RdmaDisconnect,
        M.MapGet, M.ClusterStatus, E.Advance, K.Keep, T.Traced,
    ),
    TokenRole.SERVER: (
        M.Shards, M.Freeze, M.Adopt, M.Finish, M.Namespace, E.ForNamespace, M.List,
        M.Join, M.Heartbeat, M.Leave, M.Moved, M.MapOffer, E.Epochs, E.EpochLease, P.Report,
        A.SettingsDone, K.Marks,
    ),
    TokenRole.ADMIN: (M.Drain, A.AskSettings, A.AskNodeSettings, T.AskTrace),
}  # fmt: skip

#: The least role that may send a request, by opcode.
LEAST: Final = {OPCODES[each]: role for role, requests in _TAKES.items() for each in requests}


def fault_of_role(opcode: int, role: TokenRole, who: str) -> str:
    """Return why a peer of this role may not send the message; empty if it may. ``who`` names its token."""
    least = LEAST.get(opcode)
    if least is not None and role >= least:
        return ""
    name = CODECS[opcode].cls.__name__ if opcode in CODECS else f"message {opcode:#x}"
    if least is None:
        return f"{name} is no request"
    return f"{name} takes a token with the role {least}; {who} has the role {role}"
