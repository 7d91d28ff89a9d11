"""Typed settings: one declaration for each, four sources, and the origin of every value.

    command line  >  environment (SIMM_*)  >  file (--config PATH)  >  default

The fields of :class:`Settings` are the table. A field declares type, default, parser, help text and roles. Flags,
environment names and file keys follow from its name (``deadline_ms``: ``--deadline-ms``, ``SIMM_DEADLINE_MS``,
``deadline_ms``).

* *Typos are reported.* An unknown flag or key in the file raises :class:`ConfigError`, which names the nearest known
  one. An unknown ``SIMM_*`` variable is a warning, once in a process: an image may have a ``SIMM_HOME`` of its own, and
  must be able to run an engine. For a Service called ``simm`` Kubernetes sets ``SIMM_SERVICE_HOST``,
  ``SIMM_PORT_30001_TCP`` and similar variables in every pod. Names of that form are ignored, and no setting may have
  one.
* *A command reads its own settings only.* A variable of a server, or its line in the file, does not concern a client,
  whatever its value.
* *Every value has an origin*, which :meth:`Settings.origin` returns.
* *Units.* Sizes take K, M, G, T (powers of 1024). A setting whose name ends in ``_ms`` or ``_us`` takes a number in
  that unit, or a number with an explicit unit (``1s``).
* *One file for all commands.* Top-level keys apply to every command. A table named after a command (``[dataserver]``)
  applies to that command only and overrides the top level.

The file is JSON, or TOML if Python has ``tomllib`` (3.11 and newer).
"""
# ruff: noqa: RUF009 -- _setting() is dataclasses.field() with metadata

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, Final

from ..constants import (
    DEFAULT_MANAGER_PORT,
    DEFAULT_NAMESPACE,
    DEFAULT_POLICY,
    KEEP_SHARE_MAX,
    KEEP_SHARES,
    NEAR_SHARE_MAX,
    POLICY_NAMES,
    SHARD_COUNT,
)
from ..errors import ConfigError
from . import parsers as q
from .parsers import Address, CoordinatorUrl

log = logging.getLogger("simm.config")

ENV_PREFIX: Final = "SIMM_"


# --- the table --------------------------------------------------------------------------------

MANAGER, SERVER, CLIENT = "manager", "dataserver", "client"
#: Command -> roles whose settings it takes. Any other command is an error.
COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "manager": (MANAGER,),
    "dataserver": (SERVER,),
    "client": (CLIENT,),
    "bench": (CLIENT,),
    "local": (MANAGER, SERVER),
    "demo": (SERVER, CLIENT),
    "config": (MANAGER, SERVER, CLIENT),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How one field of :class:`Settings` is read."""

    name: str
    parse: Callable[[Any], Any]
    help: str
    roles: tuple[str, ...]
    metavar: str
    #: Computes a default and its origin from the environment.
    computed: Callable[[Mapping[str, str]], tuple[Any, str]] | None
    #: Defaults of some commands, which replace the field's, and so their parsers.
    by_command: Mapping[str, Any]
    parse_by_command: Mapping[str, Callable[[Any], Any]]
    #: Further names in the environment, which SIMM_<NAME> overrides.
    env_aliases: tuple[str, ...]
    default: Any

    @property
    def flag(self) -> str:
        """The command-line flag: ``--like-this``."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment variable: ``SIMM_LIKE_THIS``."""
        return ENV_PREFIX + self.name.upper()

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value (``--warm``, ``--no-warm``)."""
        return self.parse is q.boolean


def _default_name(env: Mapping[str, str]) -> tuple[str, str]:
    if env.get("POD_NAME"):
        return q.node_name(env["POD_NAME"]), "environment POD_NAME"
    return socket.gethostname() or "localhost", "default (host name)"


def _setting(
    parse: Callable[[Any], Any],
    help: str,
    *roles: str,
    default: Any = None,
    metavar: str = "",
    computed: Callable[[Mapping[str, str]], tuple[Any, str]] | None = None,
    by_command: Mapping[str, Any] | None = None,
    parse_by_command: Mapping[str, Callable[[Any], Any]] | None = None,
    env_aliases: tuple[str, ...] = (),
) -> Any:
    about = {
        "parse": parse, "help": help, "roles": roles, "metavar": metavar, "computed": computed,
        "by_command": by_command or {}, "parse_by_command": parse_by_command or {}, "env_aliases": env_aliases,
        "default": default,
    }
    if computed is not None:
        return dataclasses.field(default_factory=lambda: computed(os.environ)[0], metadata=about)
    return dataclasses.field(default=default, metadata=about)


_HOUR_MS: Final = 3_600_000
_MONTH_MS: Final = 30 * 24 * _HOUR_MS
_LOOPBACK_MANAGER: Final = Address("127.0.0.1", DEFAULT_MANAGER_PORT)
#: Commands that take an address to listen on as a manager does. ``config`` shows the settings of all at once.
_LIKE_MANAGER: Final = ("manager", "local", "config")


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings, typed. :func:`load` builds them; tests do it directly: ``Settings(poll_us=0)``."""

    manager: tuple[Address, ...] = _setting(
        q.managers, "where the manager listens; several, by commas, are tried in turn", SERVER, CLIENT,
        default=(_LOOPBACK_MANAGER,), metavar="HOST:PORT", env_aliases=("SIMM_CLUSTER_MANAGER",),
    )
    listen: Address = _setting(
        q.address_or(0), "address to listen on; port 0 is any free one", MANAGER, SERVER,
        default=Address("127.0.0.1", 0), metavar="HOST:PORT",
        by_command=dict.fromkeys(_LIKE_MANAGER, _LOOPBACK_MANAGER),
        parse_by_command=dict.fromkeys(_LIKE_MANAGER, q.address_or(DEFAULT_MANAGER_PORT)),
    )
    numa: str = _setting(
        q.string, "NUMA nodes that get a worker: 0, or 0,1, or all", SERVER, default="all", metavar="NODES",
    )
    workers: int = _setting(
        q.integer(1, 64), "workers of each NUMA node, each with its arena", SERVER, default=1, metavar="N",
    )
    memory: int | None = _setting(
        q.optional(q.arena_bytes, "auto"), "arena of each worker, as 8G; auto: 80 %% of what this machine allows",
        SERVER, metavar="BYTES",
    )
    name: str = _setting(
        q.node_name, "this node's name in the cluster; its shards follow the name",
        SERVER, metavar="NAME", computed=_default_name,
    )
    state_dir: Path | None = _setting(
        q.optional(q.path_of), "folder for the state that survives a restart; empty: none", MANAGER, metavar="DIR",
    )
    coordinator: CoordinatorUrl | None = _setting(
        q.optional(q.coordinator), "etcd in which several managers elect a leader and keep their state; empty: none",
        MANAGER, metavar="etcd://HOST:PORT/PREFIX",
    )
    coordinator_ttl_ms: int = _setting(
        q.duration_in("ms", 2000, _HOUR_MS),
        "time after which a leader that does not renew its lease is replaced; whole seconds",
        MANAGER, default=5000, metavar="MS",
    )
    coordinator_ca: Path | None = _setting(
        q.optional(q.path_of), "PEM file of the authority that signed etcd's certificate; empty: the system's",
        MANAGER, metavar="FILE",
    )
    coordinator_cert: Path | None = _setting(
        q.optional(q.path_of), "PEM file with the manager's certificate for etcd and its key", MANAGER, metavar="FILE",
    )
    coordinator_login: Path | None = _setting(
        q.optional(q.path_of), "file with USER:PASSWORD for etcd, mode 0600 or 0640", MANAGER, metavar="FILE",
    )
    runtime_dir: Path = _setting(
        q.path_of, "folder of the UNIX sockets", MANAGER, SERVER, CLIENT, metavar="DIR", computed=q.default_runtime_dir,
    )
    policy: str = _setting(
        q.choice(*POLICY_NAMES), f"eviction policy: {', '.join(POLICY_NAMES[:-1])} or {POLICY_NAMES[-1]}",
        SERVER, default=DEFAULT_POLICY, metavar="NAME",
    )
    keep_share: int = _setting(
        q.integer(0, KEEP_SHARE_MAX), "what hard kept values may take of a worker's memory, percent; 0: nothing",
        SERVER, default=KEEP_SHARES[0], metavar="PERCENT",
    )
    keep_namespace_share: int = _setting(
        q.integer(0, KEEP_SHARE_MAX), "what hard kept values of one namespace may take of a worker's memory, percent",
        SERVER, default=KEEP_SHARES[1], metavar="PERCENT",
    )
    near_share: int = _setting(
        q.integer(0, NEAR_SHARE_MAX), "what near copies may take of a worker's memory, percent; 0: nothing", SERVER,
        default=KEEP_SHARES[2], metavar="PERCENT",
    )
    poll_us: int = _setting(
        q.duration_in("us", 0, 1_000_000), "how long a worker polls its commit rings after its last work; 0: never",
        SERVER, CLIENT, default=50, metavar="US",
    )
    streams: int = _setting(q.integer(0, 256), "TCP bulk processes of each worker", SERVER, default=1, metavar="N")
    slots: int = _setting(
        q.integer(0, 1 << 31), "entries that a worker's table can hold; 0: by its memory",
        SERVER, default=0, metavar="N",
    )
    value_size: int | None = _setting(
        q.optional(q.value_bytes), "size of a value, as 64K, that the table is made for; empty: 4K",
        SERVER, metavar="BYTES",
    )
    events: int = _setting(
        q.events_bytes, "shared memory of each worker's ring of events, as 4M, for `simm events`; 0: none",
        SERVER, default=0, metavar="BYTES",
    )
    huge_pages: bool = _setting(q.boolean, "use huge pages where the system offers them", SERVER, default=True)
    hugetlb: bool = _setting(
        q.boolean, "hold values in reserved huge pages (vm.nr_hugepages); not with --warm or --group",
        SERVER, default=False,
    )
    group: str | None = _setting(
        q.optional(q.group),
        "group whose members may use the workers' sockets (0660) and map the arenas; empty: the owner only",
        SERVER, metavar="GROUP",
    )
    insecure: bool = _setting(q.boolean, "listen beyond this machine without a token", MANAGER, SERVER, default=False)
    token_file: Path | None = _setting(
        q.optional(q.path_of), "file of tokens, `ROLE LABEL TOKEN` in a line",
        MANAGER, SERVER, CLIENT, metavar="FILE",
    )
    tls_cert: Path | None = _setting(
        q.optional(q.path_of), "PEM file of this process's certificate; a server that has one takes TLS only",
        MANAGER, SERVER, CLIENT, metavar="FILE",
    )
    tls_key: Path | None = _setting(
        q.optional(q.path_of), "PEM file of its key, mode 0600 or 0640; empty: the key is in the certificate's file",
        MANAGER, SERVER, CLIENT, metavar="FILE",
    )
    tls_ca: Path | None = _setting(
        q.optional(q.path_of), "PEM file of the authorities that sign servers' certificates; connect by TLS only",
        SERVER, CLIENT, metavar="FILE",
    )
    tls_name: str = _setting(
        q.string, "name that all servers' certificates have; empty: each has the host of its address",
        SERVER, CLIENT, default="", metavar="NAME",
    )
    tls_client_ca: Path | None = _setting(
        q.optional(q.path_of), "PEM file of the authorities of clients' certificates; a client may show one, or none",
        MANAGER, SERVER, metavar="FILE",
    )
    allow_uid: tuple[int, ...] = _setting(
        q.users, "users, besides its own and root, whose processes a server without a token lets in on loopback",
        MANAGER, SERVER, default=(), metavar="USERS",
    )
    server_uid: tuple[int, ...] = _setting(
        q.users, "users, besides its own and root, whose servers on this host are believed without a token",
        MANAGER, SERVER, CLIENT, default=(), metavar="USERS",
    )
    heartbeat_ms: int = _setting(
        q.duration_in("ms", 10, 60_000), "between two heartbeats of a data server", MANAGER, default=1000, metavar="MS",
    )
    suspect_after: int = _setting(
        q.integer(1, 10_000), "missed heartbeats that make a node suspect", MANAGER, default=3, metavar="N",
    )
    dead_after: int = _setting(
        q.integer(1, 10_000), "missed heartbeats that make it dead", MANAGER, default=5, metavar="N",
    )
    grace_ms: int = _setting(
        q.duration_in("ms", 0, _MONTH_MS), "how long a dead node's shards wait for its return before others own them",
        MANAGER, default=0, metavar="MS",
    )
    restart_grace_ms: int = _setting(
        q.duration_in("ms", 0, _MONTH_MS),
        "how long the shards of a server that stopped with --warm wait for its return",
        MANAGER, default=30_000, metavar="MS",
    )
    epoch_lease_ms: int = _setting(
        q.duration_in("ms", 0, _HOUR_MS),
        "how long a server that reaches no manager lets values of namespaces with epochs be read; 0: for ever",
        MANAGER, default=30_000, metavar="MS",
    )
    moves_at_once: int = _setting(
        q.integer(1, SHARD_COUNT), "shards that move into one worker at a time", MANAGER, default=2048, metavar="N",
    )
    deadline_ms: int = _setting(
        q.duration_in("ms", 1, _HOUR_MS), "longest that one call may take", CLIENT, default=3000, metavar="MS",
    )
    namespace: str = _setting(
        q.namespace_name, "namespace of the keys", CLIENT, default=DEFAULT_NAMESPACE, metavar="NAME",
    )
    path: str = _setting(
        q.paths, "allowed data paths, of shm, rdma and tcp, separated by commas; auto: all of them, the best one first",
        CLIENT, default="auto", metavar="PATHS",
    )
    checksum: bool = _setting(q.boolean, "store and verify a crc32 of each value", CLIENT, default=False)
    replicas: int = _setting(
        q.integer(1, 2), "copies of each value, on different nodes; 2 makes the namespace put-once",
        CLIENT, default=1, metavar="N",
    )
    put_if_absent: bool = _setting(
        q.boolean, "puts leave a stored value alone, as keys are hashes of their values", CLIENT, default=False,
    )
    near_copies: bool = _setting(
        q.boolean, "copy other hosts' values to this one; promises that the value of a key never changes", CLIENT,
        default=False,
    )
    copy_threads: int = _setting(
        q.integer(0, 256), "threads that share large copies; 0: by the machine", CLIENT, default=0, metavar="N",
    )
    tcp_streams: int = _setting(
        q.integer(1, 8), "connections to a server that share a large batch by TCP", CLIENT, default=4, metavar="N",
    )
    trace: str = _setting(
        q.trace_ratio, "share of the calls to trace, 0 to 1; 0: only those in a caller's trace that is sampled; or off",
        CLIENT, default="off", metavar="RATIO",
    )
    trace_dir: Path | None = _setting(
        q.optional(q.path_of), "folder for what is traced, mode 0700; empty: trace in the runtime folder",
        CLIENT, metavar="DIR",
    )
    slow_ms: int = _setting(
        q.duration_in("ms", 0, _HOUR_MS),
        "log calls and requests that take so long, a client's with their segments; 0: none",
        SERVER, CLIENT, default=0, metavar="MS",
    )
    log_level: str = _setting(
        q.choice("debug", "info", "warning", "error"), "debug, info, warning or error",
        MANAGER, SERVER, CLIENT, default="info", metavar="LEVEL",
    )
    log_format: str = _setting(
        q.choice("text", "json"), "text for people, or json: an object a line", MANAGER, SERVER, CLIENT,
        default="text", metavar="FORMAT",
    )
    log_file: Path | None = _setting(
        q.optional(q.path_of), "file to log to; empty: stderr", MANAGER, SERVER, CLIENT, metavar="FILE",
    )
    warm: bool = _setting(q.boolean, "keep the arena over a clean stop and start on it again", SERVER, default=False)
    move_mib_s: int = _setting(
        q.integer(0, 1 << 20), "MiB per second that a worker may copy from previous owners of its shards; 0: no limit",
        SERVER, default=1024, metavar="MIB",
    )
    rdma: str = _setting(
        q.choice("auto", "on", "off"), "serve by RDMA: auto (where there are devices), on (or do not start) or off",
        SERVER, default="auto", metavar="WHEN",
    )
    rdma_devices: str = _setting(
        q.string, "RDMA devices to use, as mlx5_0,mlx5_1:2; empty: those of SICL_NET_DEVICES, else of the NUMA node",
        SERVER, CLIENT, default="", metavar="DEVICES",
    )
    rdma_windows: bool = _setting(
        q.boolean, "let RDMA clients write only into the chunks that they hold, where the devices have memory windows",
        SERVER, default=True,
    )
    http: Address | None = _setting(
        q.optional(q.address), "address of /metrics, /healthz and the status page; empty: none",
        MANAGER, SERVER, metavar="HOST:PORT",
    )
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.dead_after <= self.suspect_after:
            raise ConfigError(
                f"dead_after ({self.dead_after}, {self.origin('dead_after')}) must be larger than"
                f" suspect_after ({self.suspect_after}, {self.origin('suspect_after')})"
            )

    def origin(self, name: str) -> str:
        """Return a value's origin: ``--memory``, ``environment SIMM_MEMORY``, ``file PATH`` or ``default``."""
        return self.origins.get(name, "default")

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (name, value as text, origin) of every setting, for ``simm config show``."""
        return [(name, format_value(getattr(self, name)), self.origin(name)) for name in SETTINGS]


SETTINGS: Final[Mapping[str, Setting]] = {
    field.name: Setting(name=field.name, **field.metadata) for field in dataclasses.fields(Settings) if field.metadata
}

#: Variables that Kubernetes sets for Services called simm or simm-<anything>; never settings.
_KUBERNETES: Final = re.compile(r"SIMM_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
#: Switches of this project's own test and engine scripts.
_SCRIPTS: Final = re.compile(r"SIMM_(ENGINE|ENGINES|TEST)(_\w+)?")
CONFIG_ENV: Final = ENV_PREFIX + "CONFIG"
#: Unknown variables that have been logged.
_warned: set[str] = set()

assert not any(_KUBERNETES.fullmatch(setting.env) or _SCRIPTS.fullmatch(setting.env) for setting in SETTINGS.values())


def format_value(value: Any) -> str:
    """Return a value as text that its setting's parser accepts."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple) and not isinstance(value, Address):
        return ",".join(str(part) for part in value)
    return str(value)


# --- sources ----------------------------------------------------------------------------------


def _unknown(what: str, name: str, known: Mapping[str, Any] | list[str]) -> ConfigError:
    return ConfigError(f"unknown {what} {name!r}; the nearest known one is {_nearest(name, known)!r}")


def _nearest(name: str, known: Mapping[str, Any] | list[str]) -> str:
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]  # cutoff 0 finds even a distant one


def _roles(command: str) -> tuple[str, ...]:
    if command not in COMMANDS:
        raise _unknown("command", command, COMMANDS)
    return COMMANDS[command]


def add_arguments(parser: argparse.ArgumentParser, command: str, without: Container[str] = ()) -> None:
    """Add the flags of ``command`` and ``--config`` to ``parser``, but for the settings ``without``.

    Values stay text, and absent flags leave no attribute. :func:`load` does all parsing, so the error for a bad value
    is the same for every source.
    """
    roles = _roles(command)
    group = parser.add_argument_group("settings", "each also as SIMM_<NAME> in the environment or in the --config file")
    group.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="JSON or TOML file of settings")
    for setting in SETTINGS.values():
        if not set(setting.roles) & set(roles) or setting.name in without:
            continue
        if setting.is_switch:
            group.add_argument(
                setting.flag, dest=setting.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS,
                help=setting.help,
            )
        else:
            default = format_value(setting.by_command.get(command, setting.default))
            text = f"{setting.help} (default: {default})" if default else setting.help
            group.add_argument(
                setting.flag, dest=setting.name, metavar=setting.metavar, default=argparse.SUPPRESS, help=text
            )


def argv_values(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the settings among a parsed command line's attributes."""
    return {name: value for name, value in vars(namespace).items() if name in SETTINGS}


def load_command(
    command: str, namespace: argparse.Namespace, env: Mapping[str, str] = os.environ, **fixed: Any
) -> Settings:
    """Load the settings for a command line of :func:`add_arguments`. ``fixed`` values count as part of it."""
    return load(command, {**argv_values(namespace), **fixed}, env, getattr(namespace, "config", None))


def load(
    command: str,
    argv_values: Mapping[str, Any] | None = None,
    env: Mapping[str, str] = os.environ,
    file: str | os.PathLike[str] | None = None,
) -> Settings:
    """Return the settings of ``command`` from all sources.

    ``argv_values`` has text or parsed values by setting name. Without ``file``, SIMM_CONFIG may name a file. Raises
    ConfigError, whose text names the source and, if there is one, the remedy.
    """
    roles = set(_roles(command))
    argv_values = argv_values or {}
    for name in argv_values:
        if name not in SETTINGS:
            raise _unknown("setting", name, SETTINGS)
    _check_env(env)
    if file is None and env.get(CONFIG_ENV):
        file = env[CONFIG_ENV]
    from_file = _read_file(Path(file), command) if file is not None else {}

    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, setting in SETTINGS.items():
        reads = not roles.isdisjoint(setting.roles)
        variable = next((key for key in (setting.env, *setting.env_aliases) if reads and key in env), None)
        raw: Any
        if name in argv_values:
            raw, origin = argv_values[name], setting.flag
        elif variable is not None:
            raw, origin = env[variable], f"environment {variable}"
        elif reads and name in from_file:
            raw, origin = from_file[name]
        elif setting.computed is not None:
            # What this command does not use is no reason to end it: the environment may be of another one.
            values[name], origins[name] = setting.computed(env if reads else {})
            continue
        else:
            values[name], origins[name] = setting.by_command.get(command, setting.default), "default"
            continue
        values[name], origins[name] = _parse(setting, raw, origin, command), origin
    return Settings(**values, origins=origins)


def _parse(setting: Setting, raw: Any, origin: str, command: str) -> Any:
    # Python callers may pass parsed values (Address, Path). Text and plain types are parsed here.
    if not isinstance(raw, (str, int, float, list, type(None))):
        return raw
    try:
        return setting.parse_by_command.get(command, setting.parse)(raw)
    except ConfigError as exc:
        raise type(exc)(f"{setting.name} (from {origin}): {exc}") from None


def _check_env(env: Mapping[str, str]) -> None:
    known = [CONFIG_ENV]
    for setting in SETTINGS.values():
        known += [setting.env, *setting.env_aliases]
    for key in env:
        if key.startswith(ENV_PREFIX) and key not in known:
            if _KUBERNETES.fullmatch(key) or _SCRIPTS.fullmatch(key):
                continue
            if key not in _warned:
                _warned.add(key)
                near = _nearest(key, known)
                log.warning("ignoring the environment variable %s: the nearest setting is %s", key, near)


def _read_file(path: Path, command: str) -> dict[str, tuple[Any, str]]:
    """Return setting name -> (raw value, origin). The command's table overrides the top level."""
    found: dict[str, tuple[Any, str]] = {}
    top = _parse_file(path)
    tables = {key: value for key, value in top.items() if key in COMMANDS and isinstance(value, dict)}
    for table_name, table in [("", top), *tables.items()]:
        # All tables are checked, so the first command that starts finds a typo for another one.
        for key, value in table.items():
            if not table_name and key in tables:
                continue
            name = key.replace("-", "_")
            where = f"{path} [{table_name}]" if table_name else str(path)
            if name not in SETTINGS or isinstance(value, dict):
                known = [*SETTINGS, *COMMANDS] if not table_name else list(SETTINGS)
                raise _unknown(f"{'table' if isinstance(value, dict) else 'setting'} in {where}:", key, known)
            if not isinstance(value, (str, int, float, list, type(None))):  # :func:`_parse` lets others pass
                raise ConfigError(f"{key} in {where} is a date or a time, {value}: write text in quotes")
            if table_name in ("", command):
                found[name] = (value, f"file {path}" + (f" [{table_name}]" if table_name else ""))
    return found


def _parse_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot read the settings file {path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"the settings file {path} is not UTF-8: {exc}") from None
    if path.suffix.lower() == ".toml":
        try:
            tomllib = importlib.import_module("tomllib")
        except ImportError:
            raise ConfigError(
                f"{path} is TOML, which this Python cannot read (3.11 and newer can): write the same settings as JSON"
            ) from None
        try:
            table: dict[str, Any] = tomllib.loads(text)
        except ValueError as exc:
            raise ConfigError(f"{path} is not valid TOML: {exc}") from None
        return table
    try:
        top = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{path} is not valid JSON: {exc} (a TOML file must end in .toml)") from None
    if not isinstance(top, dict):
        raise ConfigError(f"{path} must hold one JSON object of settings")
    return top


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key occurs twice")
    return table


# --- folders ----------------------------------------------------------------------------------
