"""What a data server is started with, and how that follows from settings."""

from __future__ import annotations

import grp
from dataclasses import dataclass, field
from typing import Final

from . import topology
from .config import Settings, ensure_runtime_dir
from .errors import ConfigError
from .membership import JOIN_TIMEOUT_S
from .quantities import Address
from .startup import check_exposure, read_tokens

MIB: Final = 1 << 20


@dataclass
class DataServerOptions:
    """What a data server is started with. ``memory`` is bytes per worker, 0 for what the machine allows."""

    name: str
    runtime_dir: str
    nodes: list[int]
    memory: int = 0
    listen_host: str = "127.0.0.1"
    listen_port: int = 0
    managers: list[tuple[str, int]] = field(default_factory=list)
    policy: str = "sieve"
    poll_us: int = 50
    streams: int = 1
    slots: int = 0
    huge_pages: bool = True
    group: int | None = None
    warm: bool = False
    tokens: tuple[str, ...] = ()
    join_timeout_s: float = JOIN_TIMEOUT_S
    advertise_host: str = ""
    #: End when this process does (0: do not care).
    end_with: int = 0
    #: Address of /metrics and /healthz, or None.
    http: Address | None = None
    #: Cap on what one worker's mover copies, bytes a second; 0 for none.
    move_bytes_per_s: int = 1024 * MIB
    #: auto, on or off; which devices ("" for those of the node); chunks written by memory windows.
    rdma: str = "auto"
    rdma_devices: str = ""
    rdma_windows: bool = True


def options_from(settings: Settings, *, end_with: int = 0) -> DataServerOptions:
    """A data server's options from settings. Raises ConfigError."""
    host, port = settings.listen
    tokens = read_tokens(settings.token_file)
    for flag, address in (("--listen", settings.listen), ("--http", settings.http)):
        if address is not None:
            check_exposure(address, tokens, settings.insecure, flag)
    group = None
    if settings.group is not None:
        try:
            group = int(settings.group) if settings.group.isdigit() else grp.getgrnam(settings.group).gr_gid
        except KeyError:
            raise ConfigError(f"--group {settings.group}: there is no such group") from None
    runtime_dir = ensure_runtime_dir(settings.runtime_dir, group)
    return DataServerOptions(
        name=settings.name,
        runtime_dir=str(runtime_dir),
        nodes=topology.parse_numa(settings.numa),
        memory=settings.memory or 0,
        listen_host=host,
        listen_port=port,
        managers=[(address.host, address.port) for address in settings.manager],
        policy=settings.policy,
        poll_us=settings.poll_us,
        streams=settings.streams,
        slots=settings.slots,
        huge_pages=settings.huge_pages,
        group=group,
        warm=settings.warm,
        tokens=tokens,
        end_with=end_with,
        http=settings.http,
        move_bytes_per_s=settings.move_mib_s * MIB,
        rdma=settings.rdma,
        rdma_devices=settings.rdma_devices,
        rdma_windows=settings.rdma_windows,
    )
