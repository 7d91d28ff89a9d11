"""The ``simm`` command.

Each subcommand is a function ``(arguments, prog) -> exit code`` that imports its modules when it runs. So
``simm version`` does not load numpy, and a broken module affects its own command only.

An error is one sentence on stderr that says what to do, never a traceback. ``tools/console.py`` has the exit codes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from . import __version__
from .config.logs import CLOSED, hold_standard_descriptors
from .errors import SimmError, TransportError, UsageError
from .tools.console import EXIT_NO, EXIT_OK, EXIT_USAGE, Parser, end_cleanly_on_signals, guarded, require_shown

if TYPE_CHECKING:
    from .client import Client
    from .config.settings import Settings

#: Default arena of ``simm local``. A trial must not take 80 % of a laptop's memory.
LOCAL_MEMORY: Final = "1G"


def _parser(prog: str, about: str, settings_of: str | None = None) -> Parser:
    parser = Parser(prog=prog, description=about)
    if settings_of is not None:
        from .config.settings import add_arguments

        add_arguments(parser, settings_of)
    return parser


def _settings(command: str, arguments: argparse.Namespace) -> Settings:
    from .tools.connect import command_settings

    return command_settings(command, arguments)


# --- values -----------------------------------------------------------------------------------------


def _client(settings: Settings) -> AbstractContextManager[Client]:
    from .tools.connect import reached_client

    return reached_client(settings)


def _require_reached(client: Client) -> None:
    from .tools.connect import require_reached

    require_reached(client)


def _put(argv: Sequence[str], prog: str) -> int:
    """store a file or stdin"""
    parser = _parser(prog, "Store the bytes of a file, or of stdin, under KEY.", "client")
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
            why = client.stats()["last_put_failure"]
            raise SimmError(f"{arguments.key!r} of {len(value):,} bytes was not stored: {why}; see `simm status`")
    print(f"stored {arguments.key} ({len(value):,} bytes)")
    return EXIT_OK


def _get(argv: Sequence[str], prog: str) -> int:
    """write a value to a file or stdout"""
    parser = _parser(prog, "Write the value of KEY to stdout or to a file. Exit 1 if it is not stored.", "client")
    parser.add_argument("key", metavar="KEY")
    parser.add_argument("file", metavar="FILE", nargs="?", help="file to write; - is stdout, even if it is a terminal")
    parser.add_argument("-o", "--output", metavar="FILE", help="the same, as an option")
    arguments = parser.parse_args(argv)
    if arguments.file is not None and arguments.output is not None:
        raise UsageError("two files to write to: give FILE or -o FILE")
    output = arguments.output if arguments.file is None else arguments.file
    if output in (None, "-") and "stdout" in CLOSED:  # the shell's >&-
        raise UsageError("stdout is closed: name a file")
    with _client(_settings("client", arguments)) as client:
        value = client.get(arguments.key)
        if value is None:
            _require_reached(client)
    if value is None:
        print(f"{prog}: {arguments.key!r} is not stored", file=sys.stderr)
        return EXIT_NO
    if output not in (None, "-"):
        _write_file(output, value)
        return EXIT_OK
    if output is None:
        require_shown(value, "name a file, or - to print it")
    sys.stdout.buffer.write(value)
    return EXIT_OK


def _write_file(path: str, value: bytes) -> None:
    """Write the whole value or nothing, so that a full disk leaves an old file unchanged. Raises OSError."""
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
    """check which keys are stored"""
    parser = _parser(prog, "Check which keys are stored. Exit 1 if one is not.", "client")
    parser.add_argument("keys", metavar="KEY", nargs="+")
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing; only set the exit code")
    return _each_key(parser.parse_args(argv), "exists_many", "yes", "no ")


def _delete(argv: Sequence[str], prog: str) -> int:
    """delete keys"""
    parser = _parser(prog, "Delete keys. Exit 1 if one was not stored.", "client")
    parser.add_argument("keys", metavar="KEY", nargs="+")
    return _each_key(parser.parse_args(argv), "delete_many", "deleted   ", "not stored")


def _each_key(arguments: argparse.Namespace, method: str, yes: str, no: str) -> int:
    """Call a method of the client with the keys, and print its answer for each of them."""
    with _client(_settings("client", arguments)) as client:
        answers = getattr(client, method)(arguments.keys)
        if not all(answers):
            _require_reached(client)
    if not getattr(arguments, "quiet", False):
        for key, answer in zip(arguments.keys, answers):
            print(f"{yes if answer else no}  {key}")
    return EXIT_OK if all(answers) else EXIT_NO


# --- servers ----------------------------------------------------------------------------------------


def _local(argv: Sequence[str], prog: str) -> int:
    """run a whole cluster on this machine until Ctrl-C"""
    about = f"Run a manager and a data server until Ctrl-C, with an arena of {LOCAL_MEMORY} without --memory."
    arguments = _parser(prog, about, "local").parse_args(argv)
    settings = _settings("local", arguments)
    if settings.origin("manager") == "--manager":
        raise UsageError(
            f"--manager {','.join(map(str, settings.manager))}: `{prog}` starts a manager of its own, whose address "
            "--listen gives; `simm dataserver --manager` joins another one's cluster"
        )
    flags = server_flags(settings)
    from .config.startup import say
    from .sdk.local_cluster import LocalCluster
    from .tools.connect import runtime_dir_named

    class Cluster(LocalCluster):
        """A local cluster with these flags after its own, as the last one counts."""

        def _start(self, module: str, *arguments: str) -> str:
            return super()._start(module, *arguments, *flags[module])

    name = "" if settings.origin("name").startswith("default") else settings.name
    others = bool(settings.token_file or settings.insecure or settings.allow_uid)
    with Cluster(
        memory=LOCAL_MEMORY, name=name, own_token=not others, runtime_dir=settings.runtime_dir,
        sockets=settings.runtime_dir if runtime_dir_named(settings) else None,
    ) as cluster:
        token_file = cluster.token_file or settings.token_file
        say(
            f"READY local {cluster.manager}{f' token-file={token_file}' if token_file else ''}",
            warn=lambda text: print(f"{prog}: {text}", file=sys.stderr),
        )
        if sys.stdout.isatty():
            if token_file:
                print("Programs of this user find the token. Where they do not:")
                print(f"  export SIMM_TOKEN_FILE={shlex.quote(str(token_file))}")
            print(f"  simm put KEY FILE --manager {cluster.manager}\n  simm status --manager {cluster.manager}")
            if settings.http is not None and settings.http.port:
                scheme = "https" if settings.tls_cert is not None else "http"
                print(f"  {scheme}://{settings.http}/ shows what clients do, in a browser")
            print("Ctrl-C stops it and drops the stored values.", flush=True)
        ended = _wait_for_any(cluster.pids)
        raise SimmError(f"the {ended} has ended: {cluster.how_ended(ended)}")


def server_flags(settings: Settings) -> dict[str, list[str]]:
    """Return the flags of a local cluster's manager and data server for all settings that are not defaults."""
    from .config.parsers import Address
    from .config.settings import MANAGER, SERVER, SETTINGS, format_value
    from .tools.connect import runtime_dir_named

    flags: dict[str, list[str]] = {MANAGER: [], SERVER: []}
    # A folder that the surroundings give is for all of this user's clusters, and this one has its own.
    own = {"listen", "manager"} if runtime_dir_named(settings) else {"listen", "manager", "runtime_dir"}
    for name, setting in SETTINGS.items():
        if settings.origin(name).startswith("default") or name in own:
            continue
        value = getattr(settings, name)
        if isinstance(value, os.PathLike):
            value = os.path.abspath(value)  # the children have a current folder of their own
        if setting.is_switch:
            flag = setting.flag if value else "--no-" + setting.flag.removeprefix("--")
        else:
            flag = f"{setting.flag}={'auto' if name == 'memory' and value is None else format_value(value)}"
        for role in flags:
            # Two processes cannot serve pages at one address, so the manager serves them.
            if role in setting.roles and not (name == "http" and role == SERVER):
                flags[role].append(flag)
    flags[MANAGER].append(f"--listen={settings.listen}")
    # A client that reaches the manager must reach the data server too.
    flags[SERVER].append(f"--listen={Address(settings.listen.host, 0)}")
    return flags


def _wait_for_any(pids: dict[str, int]) -> str:
    """Wait until a child process ends and return its name."""
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


# --- inspection -------------------------------------------------------------------------------------


def _status(argv: Sequence[str], prog: str) -> int:
    """show the cluster: servers, bytes, entries, paths"""
    parser = _parser(prog, "Show the cluster's state, and the path from this host to each worker.", "client")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    settings = _settings("client", arguments)
    from .tools import nodes

    try:
        with _client(settings) as client:
            found = nodes.collect(settings, client)
    except TransportError as exc:
        return _of_this_host("server", settings, exc, as_json=arguments.json)
    if arguments.json:
        _print_json(found)
    else:
        print(nodes.cluster_table(found))
    return EXIT_OK if nodes.healthy(found) else EXIT_NO


def _of_this_host(what: str, settings: Settings, why: TransportError, *, as_json: bool) -> int:
    """Show what this host knows of its servers or nodes, as no manager answers. Raises ``why`` if that is nothing."""
    from .tools.ctl.command import show_of_this_host

    return show_of_this_host(what, settings, why, as_json=as_json)


def _node(argv: Sequence[str], prog: str) -> int:
    """list data servers, drain one before it is stopped, or resume it"""
    about = (
        "list: all data servers. drain NAME: move its shards and their values to the others, and show the progress. "
        "resume NAME: let it take its share again. Exit 1 if a drain did not finish."
    )
    parser = _parser(prog, about, "client")
    parser.add_argument("what", choices=["list", "drain", "resume"], metavar="list|drain|resume")
    parser.add_argument("node", nargs="?", metavar="NAME", help="a data server's --name; for drain and resume")
    parser.add_argument("--no-wait", action="store_true", help="request the drain and return")
    parser.add_argument("--timeout", metavar="TIME", help="stop watching after this time, as 10m")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    if (arguments.node is None) != (arguments.what == "list"):
        parser.error("a NAME goes with drain and resume, and only with them")
    from .config.parsers import node_name, parse_duration
    from .tools import nodes
    from .tools.connect import manager_client

    timeout_s = parse_duration(arguments.timeout, "s") if arguments.timeout is not None else None
    if arguments.node is not None:
        node_name(arguments.node)  # before anything is sent
    settings = _settings("client", arguments)
    if arguments.what == "list":
        try:
            with manager_client(settings) as link:
                found = link.status()
        except TransportError as exc:
            return _of_this_host("node", settings, exc, as_json=arguments.json)
        if arguments.json:
            _print_json(found["nodes"])
        else:
            print(nodes.node_table(found))
        return EXIT_OK
    with manager_client(settings) as link:
        drain = arguments.what == "drain"
        out = sys.stderr if arguments.json else sys.stdout
        warning = nodes.room_text(link.status(), arguments.node) if drain else ""
        if warning:
            print(warning, file=out, flush=True)
        shards = nodes.request(link, arguments.node, drain)
        if drain and not arguments.no_wait:
            nodes.wait_drained(link, arguments.node, out, timeout_s)
        if arguments.json:
            _print_json({"node": arguments.node, "draining": drain, "shards": shards})
        elif not drain or arguments.no_wait:
            print(f"{arguments.node}: {'to be drained' if drain else 'takes its share'}, owns {shards:,} shards now")
    return EXIT_OK


def _config(argv: Sequence[str], prog: str) -> int:
    """show every setting's value and origin"""
    from .config.settings import COMMANDS, SETTINGS, load_command

    parser = _parser(prog, "Show every setting with its value and origin.", "config")
    parser.add_argument("what", choices=["show"], help="the only action")
    parser.add_argument("command", nargs="?", default="config", choices=list(COMMANDS), metavar="COMMAND",
                        help="as this command sees them: " + ", ".join(COMMANDS))  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
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
    """show NUMA nodes and RDMA ports, and which ones a worker would use"""
    parser = _parser(prog, "Show NUMA nodes and RDMA ports, and which ports a worker on each node would use, and why.")
    parser.add_argument("--rdma-devices", metavar="LIST",
                        help="only these, as mlx5_0,mlx5_1:2 (default: a data server's here)")  # fmt: skip
    parser.add_argument("--gids", action="store_true", help="show each port's whole GID table")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    from .rdma import ports
    from .tools import topo

    spec, origin = topo.restriction(arguments.rdma_devices)
    known = ports.ports()
    named = ports.parse_devices(spec, known) if spec else None
    found = topo.collect(named, limits=topo.ask_devices(known))
    if arguments.json:
        _print_json(found)
    else:
        print(topo.table(found, origin, gids=arguments.gids))
    return EXIT_OK


def _doctor(argv: Sequence[str], prog: str) -> int:
    """check this machine and print remedies"""
    parser = _parser(prog, "Check what on this machine would make SiMM fail or slow. Exit 1 if a check fails.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    from .tools.doctor import run_checks

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


def _completions(argv: Sequence[str], prog: str) -> int:
    """print completions for bash, zsh or fish"""
    from .tools.shell import completions, manual

    about = "Print a script that completes `simm` in a shell; its first lines say where it goes."
    parser = _parser(prog, about)
    parser.add_argument("shell", choices=list(completions.SHELLS), help="the shell")
    arguments = parser.parse_args(argv)
    print(completions.SHELLS[arguments.shell](manual.described(COMMANDS)), end="")
    return EXIT_OK


def _man(argv: Sequence[str], prog: str) -> int:
    """print the manual page"""
    about = f"Print the manual page, as for `{prog} | man -l -` or a file simm.1 in a folder man1."
    _parser(prog, about).parse_args(argv)
    from .tools.shell import manual

    print(manual.man_page(manual.described(COMMANDS)), end="")
    return EXIT_OK


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2))


# --- dispatch -----------------------------------------------------------------------------------------

Command = Callable[[Sequence[str], str], int]


def _main_of(module: str, about: str) -> Command:
    """Return a command that is the ``main`` of a module of SiMM."""

    def run(argv: Sequence[str], prog: str) -> int:
        code: int = importlib.import_module(f"simm.{module}").main(argv, prog)
        return code

    run.__doc__ = about
    return run


COMMANDS: Final[dict[str, Command]] = {
    "demo": _main_of("tools.demo", "run a demonstration: two engines share the KV cache of some prompts"),
    "local": _local,
    "manager": _main_of("manager", "run a manager"),
    "dataserver": _main_of("dataserver", "run a data server"),
    "put": _put,
    "get": _get,
    "exists": _exists,
    "delete": _delete,
    "engine": _main_of("tools.engine", "print the flags with which an engine uses SiMM"),
    "bench": _main_of("tools.bench.command", "measure operations next to a bare memcpy or a bare socket"),
    "status": _status,
    "node": _node,
    "ctl": _main_of("tools.ctl.command", "see this host's clients, namespaces and hit ratios, and why gets miss"),
    "top": _main_of("tools.ctl.top", "watch rates, hit ratio, latencies, data servers and namespaces live"),
    "trace": _main_of("tools.trace", "record what calls of this host's clients spend their time on, for Perfetto"),
    "index": _main_of("tools.index", "tell routers which engine has a prompt's prefix, by the engines' events"),
    "events": _main_of("tools.events", "publish what this host's data servers store and drop, for such an index"),
    "config": _config,
    "topo": _topo,
    "doctor": _doctor,
    "simulate": _main_of("tools.simulate", "simulate a cluster of any size, with faults, from a seed"),
    "completions": _completions,
    "man": _man,
    "version": _version,
}

#: Those that run until they are ended, and that units start again.
_SERVERS: Final = frozenset(("local", "manager", "dataserver", "index", "events"))


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.__doc__ or ''}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: simm COMMAND [ARGUMENTS]",
            "",
            "A distributed in-memory store for the KV cache of LLM inference.",
            "",
            *lines,
            "",
            "See `simm COMMAND --help`. Settings come from flags, SIMM_* in the environment, or --config FILE.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script and return the exit code."""
    hold_standard_descriptors()
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
        end_cleanly_on_signals()  # servers install their own handlers
    return guarded(lambda: command(rest, prog), prog, serves=name in _SERVERS)
