"""The options of a data server, and how they follow from settings."""

from __future__ import annotations

import grp
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ..config.parsers import Address
from ..config.settings import Settings
from ..config.startup import allowed_uids, check_exposure, ensure_runtime_dir, live_tokens, server_tls_options
from ..config.tokens import Token, TokenRole, token_for
from ..constants import DEFAULT_POLICY, KEEP_SHARES
from ..errors import AbsentError, ConfigError
from ..host import numa
from ..ipc.segments import WORKERS_MAX, check_server_name, check_socket_paths
from ..net.local_users import LocalUsers
from ..net.tls_peer import ServerTls, server_tls
from .membership import JOIN_TIMEOUT_S

MIB: Final = 1 << 20


@dataclass
class DataServerOptions:
    """The options of a data server. ``memory`` is bytes per worker, 0 for a share of the machine's."""

    name: str
    runtime_dir: str
    #: The NUMA node of each worker.
    nodes: list[int]
    memory: int = 0
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    managers: list[tuple[str, int]] = field(default_factory=list)
    policy: str = DEFAULT_POLICY
    #: What hard kept values may take of a worker's data, percent: in all, and those of one namespace.
    keep_shares: tuple[int, int, int] = KEEP_SHARES
    poll_us: int = 50
    streams: int = 1
    #: Slots of each worker's table, or the bytes of a value that it is made for; 0 for the default. Not both.
    slots: int = 0
    value_bytes: int = 0
    #: Bytes of each worker's ring of events; 0 for none.
    events: int = 0
    huge_pages: bool = True
    #: The data is in reserved huge pages; not with a group, nor warm.
    hugetlb: bool = False
    group: int | None = None
    warm: bool = False
    #: What clients and other servers may prove here.
    tokens: Sequence[Token] = ()
    #: None without TLS.
    tls: ServerTls | None = None
    #: Whose processes may connect without a token; None for all.
    users: LocalUsers | None = None
    #: Users besides this process's own and root whose managers and servers on this host are believed without a token.
    server_uids: tuple[int, ...] = ()
    join_timeout_s: float = JOIN_TIMEOUT_S
    advertise_host: str = ""
    #: The data server ends when the process with this id does; 0 for none.
    end_with: int = 0
    #: Address of /metrics and /healthz, or None.
    http: Address | None = None
    #: Limit of one worker's mover, bytes per second; 0 for none.
    move_bytes_per_s: int = 1024 * MIB
    #: auto, on or off; the devices ("" for those of the node); write chunks by memory windows.
    rdma: str = "auto"
    rdma_devices: str = ""
    rdma_windows: bool = True
    #: Log requests that take so long; 0 for none.
    slow_ms: int = 0

    def port_of(self, worker: int, *, rdma: bool = False) -> int:
        """Return the port of a worker's streams or of its endpoint; 0 for any. Those of added workers come last."""
        if not self.listen_port:
            return 0
        count = len(self.nodes)
        return self.listen_port + (worker + count * rdma if worker < count else 2 * worker + rdma)

    @property
    def page_tokens(self) -> Sequence[Token]:
        """What opens the pages; empty on loopback, where they need none."""
        open_to_all = self.http is None or self.http.loopback
        return () if open_to_all else self.tokens

    @property
    def own_token(self) -> str:
        """What this server proves to the manager and to other data servers; empty without tokens."""
        own = token_for(self.tokens, TokenRole.SERVER, TokenRole.ADMIN)
        return own.secret if own is not None else ""


def options_from(settings: Settings, *, end_with: int = 0, join_timeout_s: float = JOIN_TIMEOUT_S) -> DataServerOptions:
    """Return a data server's options. Raises ConfigError, AbsentError for a group that this host does not know."""
    host, port = settings.listen
    check_server_name(settings.name, end_with)
    tokens = live_tokens(settings.token_file)
    for flag, address in (("--listen", settings.listen), ("--http", settings.http)):
        if address is not None:
            check_exposure(address, tokens, settings.insecure, flag)
    uids = allowed_uids(settings, tokens)
    group = None
    if settings.group is not None:
        try:
            group = int(settings.group) if settings.group.isdecimal() else grp.getgrnam(settings.group).gr_gid
        except KeyError:
            raise AbsentError(f"--group {settings.group}: there is no such group") from None
    if settings.slots and settings.value_size:
        raise ConfigError(
            f"slots ({settings.slots}, {settings.origin('slots')}) and value_size ({settings.value_size}, "
            f"{settings.origin('value_size')}) both say how large the table is: give one of them"
        )
    for given, flag in ((settings.warm, "--warm"), (group is not None, "--group")):
        if settings.hugetlb and given:
            raise ConfigError(
                f"--hugetlb ({settings.origin('hugetlb')}) does not go with {flag}: reserved huge pages end with the "
                "server, and are for its own user; leave one of them out"
            )
    # In turns, so that a worker keeps its node, and a warm arena its memory, when their number changes.
    nodes = numa.parse_numa(settings.numa) * settings.workers
    if len(nodes) > WORKERS_MAX:
        raise ConfigError(
            f"a data server has at most {WORKERS_MAX} workers: {settings.workers} (workers, "
            f"{settings.origin('workers')}) on each of {len(nodes) // settings.workers} NUMA nodes (numa, "
            f"{settings.origin('numa')}) are {len(nodes)}"
        )
    check_socket_paths(str(settings.runtime_dir), settings.name, len(nodes))
    runtime_dir = ensure_runtime_dir(settings.runtime_dir, group)
    return DataServerOptions(
        name=settings.name,
        runtime_dir=str(runtime_dir),
        nodes=nodes,
        memory=settings.memory or 0,
        listen_host=host,
        listen_port=port,
        managers=[(address.host, address.port) for address in settings.manager],
        policy=settings.policy,
        keep_shares=(settings.keep_share, settings.keep_namespace_share, settings.near_share),
        poll_us=settings.poll_us,
        streams=settings.streams,
        slots=settings.slots,
        value_bytes=settings.value_size or 0,
        events=settings.events,
        huge_pages=settings.huge_pages,
        hugetlb=settings.hugetlb,
        group=group,
        warm=settings.warm,
        tokens=tokens,
        tls=server_tls(server_tls_options(settings, connects=True)),
        users=LocalUsers(uids) if uids is not None else None,
        server_uids=settings.server_uid,
        end_with=end_with,
        join_timeout_s=join_timeout_s,
        http=settings.http,
        move_bytes_per_s=settings.move_mib_s * MIB,
        rdma=settings.rdma,
        rdma_devices=settings.rdma_devices,
        rdma_windows=settings.rdma_windows,
        slow_ms=settings.slow_ms,
    )
