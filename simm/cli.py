"""The ``simm`` command: everything a person does with SiMM from a shell.

Each subcommand is a function ``(arguments, prog) -> exit code`` that imports what it needs only when it runs, so that
``simm version`` costs no numpy and a broken corner breaks its own command alone.

Whatever goes wrong is one sentence on stderr that says what to do, never a traceback; ``console.py`` has the exit
codes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from . import __version__
from .console import EXIT_NO, EXIT_OK, EXIT_USAGE, Parser, end_cleanly_on_sigterm, guarded
from .errors import SimmError, TransportError, UsageError

if TYPE_CHECKING:
    from .client import Client
    from .config import Settings

#: Arena of ``simm local`` where no size is given: a trial must not take 80 % of somebody's laptop.
LOCAL_MEMORY: Final = "1G"


def _parser(prog: str, about: str, settings_of: str | None = None) -> Parser:
    parser = Parser(prog=prog, description=about)
    if settings_of is not None:
        from .config import add_arguments

        add_arguments(parser, settings_of)
    return parser


def _settings(command: str, arguments: argparse.Namespace) -> Settings:
    """Settings, with logging set up: errors only unless more was asked for."""
    from .config import load_command
    from .startup import set_up_logging

    settings = load_command(command, arguments)
    if settings.origin("log_level") == "default":
        settings = dataclasses.replace(settings, log_level="error")
    set_up_logging(settings)
    return settings


# --- values -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _client(settings: Settings) -> Iterator[Client]:
    from .client import Client
    from .connect import client_arguments, manager_client

    manager_client(settings).close()
    with Client(**client_arguments(settings)) as client:
        yield client


def _require_reached(client: Client) -> None:
    """After a No: was it an answer, or nobody there? Raises TransportError."""
    workers = client.stats()["workers"]
    if not workers:
        raise TransportError("no data server has joined this cluster: start one with `simm dataserver`")
    for each in workers:
        if each["path"] == "down" and each["why"] != "not connected yet":
            raise TransportError(
                f"data server {each['node']}/{each['worker']} cannot be reached: {each['why']}; see `simm status`"
            )


def _put(argv: Sequence[str], prog: str) -> int:
    """store a file or what comes down a pipe"""
    parser = _parser(prog, "Store a file's bytes, or stdin's, under KEY.", "client")
    parser.add_argument("key", metavar="KEY")
    parser.add_argument("file", metavar="FILE", help="file to store; - is stdin")
    arguments = parser.parse_args(argv)
    settings = _settings("client", arguments)
    from .constants import VALUE_BYTES_MAX

    if arguments.file == "-":
        value = sys.stdin.buffer.read(VALUE_BYTES_MAX + 1)
    else:
        with open(arguments.file, "rb") as source:
            value = source.read(VALUE_BYTES_MAX + 1)
    name = "stdin" if arguments.file == "-" else arguments.file
    if len(value) > VALUE_BYTES_MAX:
        raise UsageError(f"{name} is too large: a value has at most {VALUE_BYTES_MAX:,} bytes; split it")
    if not value:
        raise UsageError(f"{name} is empty: a value has at least one byte")
    with _client(settings) as client:
        if not client.put(arguments.key, value):
            _require_reached(client)
            raise SimmError(f"{arguments.key!r} was not stored: no room for {len(value):,} bytes; see `simm status`")
    print(f"stored {arguments.key} ({len(value):,} bytes)")
    return EXIT_OK


def _get(argv: Sequence[str], prog: str) -> int:
    """write a value to a file or stdout"""
    parser = _parser(prog, "Write the value of KEY to stdout, or to a file. Exit 1 when there is none.", "client")
    parser.add_argument("key", metavar="KEY")
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write; - is stdout, terminal or not")
    arguments = parser.parse_args(argv)
    with _client(_settings("client", arguments)) as client:
        value = client.get(arguments.key)
        if value is None:
            _require_reached(client)
    if value is None:
        print(f"{prog}: {arguments.key!r} is not stored", file=sys.stderr)
        return EXIT_NO
    if arguments.output not in (None, "-"):
        _write_file(arguments.output, value)
        return EXIT_OK
    if arguments.output is None and sys.stdout.isatty() and not _printable(value):
        raise UsageError("the value is binary, and stdout is a terminal: give -o FILE, or -o - if you mean it")
    sys.stdout.buffer.write(value)
    return EXIT_OK


def _printable(value: bytes) -> bool:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character in "\n\r\t" for character in text)


def _write_file(path: str, value: bytes) -> None:
    """The whole value or nothing: an old file stays as it was when the disk is full. Raises OSError."""
    if os.path.lexists(path) and not os.path.isfile(path):
        with open(path, "wb") as special:  # a device or a pipe cannot be replaced
            special.write(value)
        return
    path = os.path.realpath(path)
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name[:200]}.{os.getpid()}.part")
    try:
        with open(temporary, "xb") as target:
            if os.path.exists(path):
                os.fchmod(target.fileno(), os.stat(path).st_mode & 0o777)
            target.write(value)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _exists(argv: Sequence[str], prog: str) -> int:
    """say which keys are stored"""
    parser = _parser(prog, "Say which keys are stored. Exit 1 when one is not.", "client")
    parser.add_argument("keys", metavar="KEY", nargs="+")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing; the exit code says it")
    arguments = parser.parse_args(argv)
    with _client(_settings("client", arguments)) as client:
        found = client.exists_many(arguments.keys)
        if not all(found):
            _require_reached(client)
    if not arguments.quiet:
        for key, there in zip(arguments.keys, found):
            print(f"{'yes' if there else 'no '}  {key}")
    return EXIT_OK if all(found) else EXIT_NO


def _delete(argv: Sequence[str], prog: str) -> int:
    """drop keys"""
    parser = _parser(prog, "Drop keys. Exit 1 when one was not stored.", "client")
    parser.add_argument("keys", metavar="KEY", nargs="+")
    arguments = parser.parse_args(argv)
    with _client(_settings("client", arguments)) as client:
        gone = client.delete_many(arguments.keys)
        if not all(gone):
            _require_reached(client)
    for key, done in zip(arguments.keys, gone):
        print(f"{'deleted   ' if done else 'not stored'}  {key}")
    return EXIT_OK if all(gone) else EXIT_NO


# --- servers ----------------------------------------------------------------------------------------


def _manager(argv: Sequence[str], prog: str) -> int:
    """run a manager"""
    from .manager import main as run

    return run(argv, prog)


def _dataserver(argv: Sequence[str], prog: str) -> int:
    """run a data server"""
    from .dataserver import main as run

    return run(argv, prog)


def _local(argv: Sequence[str], prog: str) -> int:
    """run a whole cluster on this machine until Ctrl-C"""
    about = f"A manager and a data server until Ctrl-C, with an arena of {LOCAL_MEMORY} where --memory says nothing."
    arguments = _parser(prog, about, "local").parse_args(argv)
    settings = _settings("local", arguments)
    flags = server_flags(settings)
    from .local import LocalCluster

    class Cluster(LocalCluster):
        """With our flags after its own: the last one counts."""

        def _start(self, module: str, *arguments: str) -> str:
            return super()._start(module, *arguments, *flags[module])

    with Cluster(memory=LOCAL_MEMORY) as cluster:
        print(f"READY local {cluster.manager}", flush=True)
        if sys.stdout.isatty():
            print(f"  simm put KEY FILE --manager {cluster.manager}\n  simm status --manager {cluster.manager}")
            print("Ctrl-C ends it, and drops what is stored.", flush=True)
        ended = _wait_for_any(cluster.pids)
        raise SimmError(f"the {ended} has ended: {_last_line(cluster.folder, ended)}")


def server_flags(settings: Settings) -> dict[str, list[str]]:
    """Command-line flags of a local cluster's manager and data server, for all that was not left to its default."""
    from .config import MANAGER, SERVER, SETTINGS, format_value
    from .quantities import Address

    flags: dict[str, list[str]] = {MANAGER: [], SERVER: []}
    for name, setting in SETTINGS.items():
        if settings.origin(name).startswith("default") or name in ("listen", "manager"):
            continue
        value = getattr(settings, name)
        if setting.is_switch:
            flag = setting.flag if value else "--no-" + setting.flag.removeprefix("--")
        else:
            flag = f"{setting.flag}={'auto' if name == 'memory' and value is None else format_value(value)}"
        for role in flags:
            # Two processes cannot serve pages at one address; the manager has them then.
            if role in setting.roles and not (name == "http" and role == SERVER):
                flags[role].append(flag)
    flags[MANAGER].append(f"--listen={settings.listen}")
    # Whoever reaches the manager must reach the data server too.
    flags[SERVER].append(f"--listen={Address(settings.listen.host, 0)}")
    return flags


def _wait_for_any(pids: dict[str, int]) -> str:
    """Wait until one of our children ends; its name."""
    import select

    poll = select.poll()
    names = {}
    try:
        for name, pid in pids.items():
            fd = os.pidfd_open(pid)
            names[fd] = name
            poll.register(fd, select.POLLIN)
        return names[poll.poll()[0][0]]
    finally:
        for fd in names:
            os.close(fd)


def _last_line(folder: str, module: str) -> str:
    """The last a server said."""
    with contextlib.suppress(OSError):
        with open(os.path.join(folder, f"{module}.log"), encoding="utf-8", errors="replace") as log:
            lines = log.read().strip().splitlines()
        if lines:
            return lines[-1]
    return "it said nothing"


# --- looking ----------------------------------------------------------------------------------------


def _status(argv: Sequence[str], prog: str) -> int:
    """show the cluster: servers, bytes, entries, paths"""
    parser = _parser(prog, "Show the cluster as its manager sees it, and how it is reached from here.", "client")
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args(argv)
    settings = _settings("client", arguments)
    from . import status

    with _client(settings) as client:
        found = status.collect(settings, client)
    if arguments.json:
        _print_json(found)
    else:
        print(status.table(found))
    return EXIT_OK if status.healthy(found) else EXIT_NO


def _node(argv: Sequence[str], prog: str) -> int:
    """list data servers, empty one before it is stopped, take it back"""
    about = (
        "list: all data servers. drain NAME: move its shards and their values to the others, and show how that goes "
        "on. resume NAME: let it take its share again. Exit 1 when a drain did not come to its end."
    )
    parser = _parser(prog, about, "client")
    parser.add_argument("what", choices=["list", "drain", "resume"], metavar="list|drain|resume")
    parser.add_argument("node", nargs="?", metavar="NAME", help="a data server's --name; for drain and resume")
    parser.add_argument("--no-wait", action="store_true", help="only ask for the drain")
    parser.add_argument("--timeout", metavar="TIME", help="end the watching of a drain, as 10m; the drain goes on")
    parser.add_argument("--json", action="store_true", help="list for programs")
    arguments = parser.parse_args(argv)
    if (arguments.node is None) != (arguments.what == "list"):
        parser.error("a NAME goes with drain and resume, and only with them")
    from . import nodes
    from .connect import manager_client
    from .quantities import parse_duration

    timeout_s = parse_duration(arguments.timeout, "s") if arguments.timeout is not None else None
    settings = _settings("client", arguments)
    with manager_client(settings) as link:
        if arguments.what == "list":
            found = link.status()
            if arguments.json:
                _print_json(found["nodes"])
            else:
                print(nodes.table(found))
            return EXIT_OK
        drain = arguments.what == "drain"
        shards = nodes.request(link, arguments.node, drain)
        if drain and not arguments.no_wait:
            nodes.wait_drained(link, arguments.node, sys.stdout, timeout_s)
        else:
            print(f"{arguments.node}: {'to be drained' if drain else 'takes its share'}, owns {shards:,} shards now")
    return EXIT_OK


def _config(argv: Sequence[str], prog: str) -> int:
    """show every setting's value and where it came from"""
    from .config import COMMANDS, SETTINGS, load_command

    parser = _parser(prog, "Every setting, its value, and where it came from.", "config")
    parser.add_argument("what", choices=["show"], help="the only thing to do, so far")
    parser.add_argument("command", nargs="?", default="config", choices=list(COMMANDS), metavar="COMMAND",
                        help="as this command sees them: " + ", ".join(COMMANDS))  # fmt: skip
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args(argv)
    settings = load_command(arguments.command, arguments)
    roles = set(COMMANDS[arguments.command])
    found = [row for row in settings.rows() if roles & set(SETTINGS[row[0]].roles)]
    if arguments.json:
        _print_json({name: {"value": value, "origin": origin} for name, value, origin in found})
        return EXIT_OK
    names = max(len(name) for name, _, _ in found)
    values = min(40, max(len(value) for _, value, _ in found))
    for name, value, origin in found:
        print(f"{name:{names}}  {value or '-':{values}}  {origin}")
    return EXIT_OK


def _topo(argv: Sequence[str], prog: str) -> int:
    """show NUMA nodes and RDMA ports, and which a worker would use"""
    parser = _parser(prog, "NUMA nodes, RDMA ports, which of them a worker on each node would use, and why.")
    parser.add_argument("--rdma-devices", metavar="LIST",
                        help="only these, as mlx5_0,mlx5_1:2 (default: SICL_NET_DEVICES, else all)")  # fmt: skip
    parser.add_argument("--gids", action="store_true", help="with each port's whole GID table")
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args(argv)
    from . import rails, topo

    spec, origin = rails.restriction(arguments.rdma_devices, os.environ)
    known = rails.ports()
    named = rails.parse_devices(spec, known) if spec else None
    found = topo.collect(named, limits=topo.ask_devices(known))
    if arguments.json:
        _print_json(found)
    else:
        print(topo.table(found, origin, gids=arguments.gids))
    return EXIT_OK


def _doctor(argv: Sequence[str], prog: str) -> int:
    """say what on this machine would hurt, and what to do about it"""
    parser = _parser(prog, "What on this machine would make SiMM fail or slow. Exit 1 when a check fails.")
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args(argv)
    from .doctor import run_checks

    findings = run_checks()
    bad = any(finding.status == "fail" for finding in findings)
    if arguments.json:
        _print_json([dataclasses.asdict(finding) for finding in findings])
        return EXIT_NO if bad else EXIT_OK
    names = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.status:4}  {finding.name:{names}}  {finding.detail}")
        if finding.remedy:
            print(f"{'':4}  {'':{names}}  -> {finding.remedy}")
    counts = {status: sum(finding.status == status for finding in findings) for status in ("ok", "warn", "fail")}
    print(f"\n{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} that keep a data server from running")
    return EXIT_NO if bad else EXIT_OK


def _version(argv: Sequence[str], prog: str) -> int:
    """print the version"""
    _parser(prog, "Print the version.").parse_args(argv)
    print(f"simm {__version__}")
    return EXIT_OK


def _bench(argv: Sequence[str], prog: str) -> int:
    """measure, beside a bare memcpy or a bare socket"""
    from .bench import main as run

    return run(argv, prog)


def _demo(argv: Sequence[str], prog: str) -> int:
    """show it at work: two engines share the KV cache of some prompts"""
    from .demo import main as run

    return run(argv, prog)


def _simulate(argv: Sequence[str], prog: str) -> int:
    """simulate a cluster of any size, with faults, from a seed"""
    from .simulate import main as run

    return run(argv, prog)


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2))


# --- dispatch -----------------------------------------------------------------------------------------

Command = Callable[[Sequence[str], str], int]

COMMANDS: Final[dict[str, Command]] = {
    "demo": _demo,
    "local": _local,
    "manager": _manager,
    "dataserver": _dataserver,
    "put": _put,
    "get": _get,
    "exists": _exists,
    "delete": _delete,
    "bench": _bench,
    "status": _status,
    "node": _node,
    "config": _config,
    "topo": _topo,
    "doctor": _doctor,
    "simulate": _simulate,
    "version": _version,
}


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.__doc__ or ''}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: simm COMMAND [ARGUMENTS]",
            "",
            "A store for the KV cache of LLM inference, in memory that all engines share.",
            "",
            *lines,
            "",
            "`simm COMMAND --help` says more. Settings come from flags, SIMM_* in the environment, or --config FILE.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The console script; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        if len(arguments) > 1 and arguments[1] in COMMANDS:
            arguments = [arguments[1], "--help"]
        else:
            return guarded(lambda: print(_help(), file=sys.stdout if arguments else sys.stderr) or 0, "simm") or (
                EXIT_OK if arguments else EXIT_USAGE
            )
    if arguments[0] in ("-V", "--version"):
        arguments[0] = "version"
    name, rest = arguments[0], arguments[1:]
    command = COMMANDS.get(name)
    if command is None:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `simm {close[0]}`?" if close else "`simm --help` lists them"
        print(f"simm: there is no command {name!r}; {hint}", file=sys.stderr)
        return EXIT_USAGE
    prog = f"simm {name}"
    if name not in ("manager", "dataserver"):
        end_cleanly_on_sigterm()  # servers have handlers of their own
    return guarded(lambda: command(rest, prog), prog)
