"""A data server's admin socket: ``NAME.admin.sock`` in the runtime folder, for its own user and root.

The socket has the mode 0600 whatever the segment's group, and the kernel names the user of each peer as well. It needs
no manager. A bug of a peer closes its connection; no request is answered for others, and none waits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any, Final

from ...arena.marks.kept import Shares
from ...arena.space import Space
from ...config.live import LiveSettings, level_now, set_level
from ...config.logs import reopen_logs
from ...errors import RemoteProtocolError, SimmError, printable
from ...ipc.segments import admin_path
from ...net.listeners import NamedSocket
from ...net.loop import Loop
from ...net.peer import Peer, Service
from ...net.peer_uid import credentials
from ...net.process import Child
from ...rpc import Frame, decode
from ...wire import messages as M
from ...wire.admin_messages import GROW, AskSettings, OrderSettings, SettingsDone
from ...wire.messages import Status
from ..membership import Membership
from ..options import DataServerOptions
from ..requests import slow
from ..worker import Worker

log = logging.getLogger("simm.server.admin")

#: Entries that one turn of a worker moves when the policy has changed, and seconds between two such turns.
SETTLED_AT_ONCE: Final = 256
SETTLE_S: Final = 0.005


class Admin(Service):
    """Answers operators. ``changed``: called when a setting has a new value, to tell the other processes.

    ``grow``: carries out an order to grow, and returns how far that is.
    """

    hello_first = True

    def __init__(
        self, live: LiveSettings, changed: Callable[[], object], grow: Callable[[str], dict[str, Any]]
    ) -> None:
        self.live = live
        self._changed = changed
        self._grow = grow

    def on_connect(self, peer: Peer) -> None:
        peer.context = credentials(peer.sock)[1] in (os.geteuid(), 0)

    def on_frame(self, peer: Peer, frame: Frame) -> None:
        if not peer.context:
            peer.refuse(frame.request_id, f"only uid {os.geteuid()} and root may do that")
            return
        peer.admit()
        msg = decode(frame)
        if isinstance(msg, M.Ping):
            peer.send_message(M.Pong(msg.cookie), frame.request_id)
        elif isinstance(msg, AskSettings):
            try:
                found = self._take(msg)
            except (SimmError, OSError) as exc:
                peer.send_error(frame.request_id, Status.BAD_REQUEST, printable(str(exc)))
            else:
                peer.send_message(M.StatsReply(json.dumps(found).encode()), frame.request_id)
        else:
            raise RemoteProtocolError(f"{type(msg).__name__} is not for an admin socket")

    def carry_out(self, msg: OrderSettings) -> SettingsDone:
        """Carry out what an admin asks of the manager, and return the answer."""
        try:
            found = self._take(AskSettings(msg.name, msg.value))
        except (SimmError, OSError) as exc:
            return SettingsDone(msg.order, Status.BAD_REQUEST, printable(str(exc)).encode())
        return SettingsDone(msg.order, Status.OK, json.dumps(found).encode())

    def _take(self, msg: AskSettings) -> Any:
        """Change the setting that an operator names, or grow. Return the answer. Raises SimmError, OSError."""
        if msg.name == GROW:
            return self._grow(msg.value)
        if msg.name:
            before = self.live.set(msg.name, msg.value)
            log.warning("an operator has set %s to %s, from %s", msg.name, self.live[msg.name], before)
            self._changed()
        return self.live.rows()


def open_admin(
    loop: Loop, options: DataServerOptions, processes: Callable[[], Iterable[Child]], membership: Membership,
    grow: Callable[[str], dict[str, Any]],
) -> tuple[LiveSettings, list[NamedSocket]]:
    """Return the settings of a data server that may change, and the sockets that serve them: one, or none.

    ``processes``: returns those to tell of a change. ``grow``: as for :class:`Admin`. A path that is too long costs the
    socket only.
    """
    live = LiveSettings({
        "log_level": level_now(), "poll_us": options.poll_us, "move_mib_s": options.move_bytes_per_s >> 20,
        "slow_ms": options.slow_ms, "policy": options.policy, "keep_share": options.keep_shares[0],
        "keep_namespace_share": options.keep_shares[1], "near_share": options.keep_shares[2],
    })  # fmt: skip

    live.follow("log_level", set_level)

    def tell() -> None:
        reopen_logs()
        for child in processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGHUP)

    admin = Admin(live, tell, grow)
    membership.on_order = admin.carry_out
    try:
        unix = NamedSocket(admin_path(options.runtime_dir, options.name))
    except OSError as exc:
        log.warning("settings cannot be changed at run time, nor memory added: %s", exc)
        return live, []
    loop.listen(unix.listener, admin)
    return live, [unix]


def follow_settings(live: LiveSettings, worker: Worker) -> None:
    """Let a worker follow the settings that are its own. Call it in the worker's process."""

    def poll_us(value: int) -> None:
        worker.settings.poll_us = value
        worker.rings.set_poll_us(value)

    def shares(_value: int) -> None:
        worker.store.near.bound_by(keep_shares(live))

    live.follow("poll_us", poll_us)
    live.follow("policy", PolicyChange(worker.store.space, worker.loop).take)
    for name in ("keep_share", "keep_namespace_share", "near_share"):
        live.follow(name, shares)
    live.follow("slow_ms", slow.watch_worker(worker))


def keep_shares(live: LiveSettings) -> Shares:
    """Return what hard kept values and near copies may take of a worker's data now."""
    return live["keep_share"], live["keep_namespace_share"], live["near_share"]


class PolicyChange:
    """Changes the eviction policy of a space, a slice of its entries in each turn of the loop."""

    def __init__(self, space: Space, loop: Loop) -> None:
        self._space = space
        self._loop = loop
        #: What brings the next slice into order; None if all of them are.
        self._settle: Callable[[int], bool] | None = None

    def take(self, name: str) -> None:
        """Evict by this policy from now on. Nothing if it is the policy already."""
        if name == self._space.policy_name:
            return
        going_on = self._settle is not None
        self._settle = self._space.change_policy(name)
        if not going_on:
            self._slice()

    def _slice(self) -> None:
        if self._settle is not None and self._settle(SETTLED_AT_ONCE):
            self._loop.call_later(SETTLE_S, self._slice)
        else:
            self._settle = None


def follow_in_stream(live: LiveSettings) -> None:
    """Let a stream follow the settings that are its own. Call it in the stream's process."""
    live.follow("slow_ms", slow.watch_stream)
