"""What a client is told: one immutable value that all its parts read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from ..constants import DEFAULT_MANAGER_PORT, DEFAULT_NAMESPACE
from ..errors import ConfigError, UsageError
from .parsers import TlsOptions, default_runtime_dir, parse_addresses, paths, trace_ratio

if TYPE_CHECKING:
    from pathlib import Path

    from .settings import Settings

DEFAULT_DEADLINE_S: Final = 3.0
#: An hour: a call that may last longer is a mistake.
DEADLINE_S_MAX: Final = 3600.0
COPY_THREADS_MAX: Final = 256
TCP_STREAMS_MAX: Final = 8
_TLS: Final = ("tls_ca", "tls_cert", "tls_key")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The arguments of :class:`~simm.client.Client`, which explains them. Hashable: equal options can share a client.

    Raises UsageError for a value of a wrong type or out of range, ConfigError for a manager that is no address.
    """

    manager: str = f"127.0.0.1:{DEFAULT_MANAGER_PORT}"
    namespace: str = DEFAULT_NAMESPACE
    path: str = "auto"
    deadline_s: float = DEFAULT_DEADLINE_S
    checksum: bool = False
    copy_threads: int = 0
    token: str = field(default="", repr=False)
    ring: bool = True
    replicas: int = 1
    rdma_devices: str = ""
    lazy: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_name: str = ""
    server_uids: tuple[int, ...] = ()
    put_if_absent: bool = False
    tcp_streams: int = 4
    near_copies: bool = False
    trace: str = "off"
    slow_ms: float = 0
    trace_dir: str = field(default_factory=lambda: _trace_dir(default_runtime_dir(os.environ)[0]))

    def __post_init__(self) -> None:
        for name in ("manager", "namespace", "token", "rdma_devices", "tls_name", "trace_dir", *_TLS):
            if not isinstance(getattr(self, name), str):
                shown = "" if name == "token" else f", not {getattr(self, name)!r}"
                raise UsageError(f"{name} is text{', as 127.0.0.1:30001' if name == 'manager' else ''}{shown}")
        try:
            self.token.encode()
        except UnicodeEncodeError:
            raise UsageError("token is text that UTF-8 can hold") from None
        for name in ("checksum", "ring", "lazy", "put_if_absent", "near_copies"):
            if type(getattr(self, name)) is not bool:
                raise UsageError(f"{name} is True or False, not {getattr(self, name)!r}")
        try:
            object.__setattr__(self, "path", paths(self.path))
        except ConfigError as exc:
            raise UsageError(f"path: {exc}") from None
        if not _is_number(self.deadline_s) or not 0 < self.deadline_s <= DEADLINE_S_MAX:
            raise UsageError(
                f"deadline_s is a number of seconds above 0, {DEADLINE_S_MAX:.0f} at most, not {self.deadline_s!r}"
            )
        if type(self.copy_threads) is not int or not 0 <= self.copy_threads <= COPY_THREADS_MAX:
            raise UsageError(f"copy_threads is a whole number from 0 to {COPY_THREADS_MAX}, not {self.copy_threads!r}")
        if type(self.tcp_streams) is not int or not 1 <= self.tcp_streams <= TCP_STREAMS_MAX:
            raise UsageError(f"tcp_streams is a whole number from 1 to {TCP_STREAMS_MAX}, not {self.tcp_streams!r}")
        if type(self.replicas) is not int or self.replicas not in (1, 2):
            raise UsageError(f"replicas is 1 or 2, not {self.replicas!r}")
        if self.near_copies and self.replicas == 2:
            raise UsageError("near_copies go with one copy of each value: replicas=1")
        try:
            object.__setattr__(self, "trace", trace_ratio(self.trace))
        except ConfigError as exc:
            raise UsageError(f"trace: {exc}") from None
        if not _is_number(self.slow_ms) or not 0 <= self.slow_ms <= DEADLINE_S_MAX * 1000:
            raise UsageError(f"slow_ms is a number of milliseconds, 0 for none, not {self.slow_ms!r}")
        object.__setattr__(self, "server_uids", _uids(self.server_uids))
        parse_addresses(self.manager, DEFAULT_MANAGER_PORT)
        if (self.tls_key and not self.tls_cert) or (self.tls_cert and not self.tls_ca):
            raise UsageError("tls_key goes with tls_cert, and both with tls_ca, without which there is no TLS")
        if self.tls_name and not self.tls_ca:
            raise UsageError("tls_name goes with tls_ca (SIMM_TLS_CA), without which there is no TLS")
        for name in (*_TLS, "trace_dir"):
            if getattr(self, name):  # a program that changes its folder reads them again
                object.__setattr__(self, name, os.path.abspath(getattr(self, name)))

    @property
    def tls(self) -> TlsOptions | None:
        """What a connection by TLS needs; None to connect without."""
        if not self.tls_ca:
            return None
        return TlsOptions(self.tls_ca, self.tls_cert, self.tls_key, name=self.tls_name)

    @classmethod
    def resolve(cls, **given: Any) -> ClientOptions:
        """Return the options that are given and not None. The environment, the settings file and defaults, in this
        order, have the others. Raises ConfigError, UsageError.
        """
        given = {name: value for name, value in given.items() if value is not None}
        if given.keys() >= _SETTINGS:
            return cls(**given)
        from .settings import load  # the table of all settings, 10 ms: a program that only imports the client has none

        return cls.from_settings(load("client"), **given)

    @classmethod
    def from_settings(cls, settings: Settings, **given: Any) -> ClientOptions:
        """Return what the settings say, where ``given`` does not say otherwise.

        Reads the token file unless a token is given. Raises ConfigError, UsageError.
        """
        if "token" not in given:
            given["token"] = _token_of(settings, given.get("manager"), str(given.get("namespace", settings.namespace)))
        found: dict[str, Any] = {
            "manager": ",".join(map(str, settings.manager)), "namespace": settings.namespace, "path": settings.path,
            "deadline_s": settings.deadline_ms / 1000, "checksum": settings.checksum,
            "copy_threads": settings.copy_threads, "replicas": settings.replicas, "rdma_devices": settings.rdma_devices,
            **{name: str(getattr(settings, name) or "") for name in (*_TLS, "tls_name")},
            "server_uids": settings.server_uid, "put_if_absent": settings.put_if_absent,
            "tcp_streams": settings.tcp_streams, "near_copies": settings.near_copies, "trace": settings.trace,
            "slow_ms": settings.slow_ms, "trace_dir": str(settings.trace_dir or _trace_dir(settings.runtime_dir)),
        }  # fmt: skip
        if given.get("tls_ca") == "":  # a cluster without TLS, which the settings' name is not for
            found["tls_name"] = ""
        return cls(**{**found, **given})

    @property
    def managers(self) -> list[tuple[str, int]]:
        """(host, port) of each manager."""
        return [(address.host, address.port) for address in parse_addresses(self.manager, DEFAULT_MANAGER_PORT)]

    def with_tracing(self, trace: str, slow_ms: float) -> ClientOptions:
        """Return the same options with another wish for traces. Raises UsageError."""
        return replace(self, trace=trace, slow_ms=slow_ms)

    def allows(self, path: str) -> bool:
        """Return whether this data path (``shm``, ``rdma``, ``tcp``) may be used."""
        return self.path == "auto" or path in self.path.split(",")


def _token_of(settings: Settings, manager: str | None, namespace: str) -> str:
    """Return the token of the settings' file for a client; without one, that of a local cluster which listens there."""
    if settings.token_file is not None:
        from .startup import read_tokens  # most clients have no token
        from .tokens import TokenRole, token_for

        own = token_for(read_tokens(settings.token_file), *TokenRole, namespace=namespace)
        return own.secret if own is not None else ""
    from .local_token import find

    try:
        managers = settings.manager if manager is None else parse_addresses(manager, DEFAULT_MANAGER_PORT)
    except (ConfigError, AttributeError):
        return ""  # the constructor says what is wrong with it
    return find(settings.runtime_dir, managers)


def _trace_dir(runtime_dir: Path) -> str:
    return os.path.abspath(runtime_dir / "trace")


def _uids(value: object) -> tuple[int, ...]:
    if isinstance(value, (list, tuple, set, frozenset)) and all(type(uid) is int and uid >= 0 for uid in value):
        return tuple(value)
    raise UsageError(f"server_uids is a list of users' numbers, not {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


#: Options that settings have too. The others are the program's own: ``ring`` is for tests, ``lazy`` for engines.
_SETTINGS: Final = frozenset(each.name for each in fields(ClientOptions)) - {"ring", "lazy"}
