"""``simm ctl``, also ``simmctl``: see inside this host's data servers and the cluster, and change what may change."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...arena.hashing import check_namespace
from ...config.client_options import ClientOptions
from ...config.logs import hold_standard_descriptors
from ...config.parsers import node_name, parse_bytes, parse_duration
from ...config.settings import Settings, add_arguments
from ...errors import TransportError, UsageError, printable
from ...net.channel import Refused
from ..connect import command_settings, manager_client, on_host, token_of
from ..console import EXIT_NO, EXIT_OK, Parser, end_cleanly_on_signals, guarded
from ..nodes import bytes_text, cluster_lines, request, room_text, wait_drained
from . import cluster, entries, grow, tuning, upstream, why
from .tables import TABLES, Row, kept_text, namespace_rows, rates_text, table, worker_rows
from .whose import Meant
from .workers import Asked, ask_all, require_one

_ABOUT = (
    "Show what the data servers of this host and their clients do, also without a manager, and change what may "
    "change. workers: memory, shards, state. clients: who is connected by shared memory, and what each has done. "
    "sessions: all of them, also those of the server's own processes. namespaces: entries, bytes, hit ratio; "
    "namespaces flush NAME: make all its values unreadable on every host. slabs: values by size of chunk, and waste. "
    "keys [sample|hot|large|old|new] [NAMESPACE]: values by their digests. evict NAMESPACE: delete its values, see "
    "--older, --larger, --most, --dry-run; '*' is all. settings [list | get NAME | set NAME VALUE]: of this host's "
    "data servers, with --of of one anywhere, with --of '*' of all, with --of-manager of the manager; until the next "
    "start. grow --memory SIZE [--numa N]: add memory to this host's data server while it serves, with --of to one "
    "anywhere. cluster status, server status [NAME], node list|summary|drain NAME|resume NAME and shard list: of the "
    "cluster, or of this host if no manager answers. gflag, node set and kv are upstream's names for settings, node "
    "drain and resume, and for exists, get and delete of a key. why [NAMESPACE]: why clients find few values, "
    "or none. Counts are those of clients on this host since the worker began. Exit 1 if one of those asked does not "
    "answer or refuses, or if why has found a cause; 2 if nothing can be shown, or for wrong usage."
)
#: What is shown or done -> how many words may follow.
_SUBJECTS: Final = {
    "workers": 0, "clients": 0, "sessions": 0, "namespaces": 2, "slabs": 0, "keys": 2, "evict": 1, "settings": 3,
    "grow": 0, "cluster": 1, "server": 2, "node": 3, "shard": 1, "why": 1, "gflag": 3, "kv": 2,
}  # fmt: skip
#: Options that say of what something is shown or done -> what they are without being given.
_NARROWING: Final[dict[str, Any]] = {
    "server": None, "of_manager": False, "of": None, "memory": None, "numa": "", "older": None, "larger": None,
    "most": None, "dry_run": False, "no_wait": False, "timeout": None,
}  # fmt: skip
#: Those that a subject heeds, or one with its first word; the others look at this host's servers, or at one.
_HEEDS: Final[dict[str, frozenset[str]]] = {
    "keys": frozenset({"server", "most"}),
    "evict": frozenset({"server", "older", "larger", "most", "dry_run"}),
    "settings": frozenset({"server", "of_manager", "of"}),
    "gflag": frozenset({"server", "of_manager", "of"}),
    "grow": frozenset({"server", "of", "memory", "numa", "no_wait", "timeout"}),
    "kv": frozenset(),
    "node": frozenset(), "cluster": frozenset(), "shard": frozenset(),  # of the whole cluster
    "namespaces flush": frozenset({"timeout"}),
    "node drain": frozenset({"no_wait", "timeout"}),
    "node resume": frozenset(),
    "node set": frozenset({"no_wait"}),
}
#: Rows, their text, and whether all is well.
Shown = tuple[Any, str, bool]


def main(argv: Sequence[str] | None = None, prog: str = "simm ctl") -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog=prog, description=_ABOUT)
    add_arguments(parser, "client")
    parser.add_argument("what", choices=list(_SUBJECTS), metavar="WHAT", help="what to look at, or to do")
    parser.add_argument("words", nargs="*", metavar="WORD", default=[], help="what of it, see above")
    parser.add_argument("--server", metavar="NAME", help="only this data server's workers")
    parser.add_argument("--of-manager", action="store_true", help="settings: those of the manager, by an admin's token")
    parser.add_argument("--of", metavar="NAME", help="settings, grow: a data server anywhere; '*' is all")
    parser.add_argument("--memory", metavar="SIZE", help="grow: the memory to add, as 64G")
    parser.add_argument("--numa", metavar="N", default="", help="grow: the node to take it from")
    parser.add_argument("--older", metavar="TIME", help="evict: only values that were put longer ago, as 1h")
    parser.add_argument("--larger", metavar="SIZE", help="evict: only values of this size or more, as 1M")
    parser.add_argument("--most", metavar="N", type=int, help="keys: so many, 20 without; evict: of each worker")
    parser.add_argument("--dry-run", action="store_true", help="evict: only count the values")
    parser.add_argument("--no-wait", action="store_true", help="node drain, grow: request it and return")
    parser.add_argument("--timeout", metavar="TIME", help="node drain, grow, namespaces flush: wait no longer")
    parser.add_argument("--watch", metavar="TIME", help="show it again after this time, as 2s, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch a line each time")
    arguments = parser.parse_args(argv)
    if len(arguments.words) > _SUBJECTS[arguments.what]:
        parser.error(f"{arguments.what} takes {_SUBJECTS[arguments.what] or 'no'} words after it")
    _check_heeded(arguments)
    _check_named(arguments)
    if arguments.most is not None and arguments.most < 1:
        raise UsageError("--most is 1 at least")
    every_s = parse_duration(arguments.watch, "s") if arguments.watch is not None else 0.0
    if arguments.watch is not None and every_s < 0.1:
        raise UsageError("--watch is 0.1s at least")
    settings = on_host(command_settings("client", arguments))
    upstream.translate(settings, arguments)
    act = _ACTIONS.get((arguments.what, arguments.words[0] if arguments.words else ""))
    if act is None:
        act = {"evict": _evict, "kv": _kv}.get(arguments.what)
    if act is not None:
        if every_s:
            raise UsageError("--watch only looks: it goes with what changes nothing")
        return act(settings, arguments)
    meant = Meant(settings)
    return _show(lambda: _look(settings, arguments, meant), every_s, as_json=arguments.json, watch=bool(every_s))


def _check_heeded(arguments: argparse.Namespace) -> None:
    """Refuse options that would be ignored: a ``--dry-run`` of what knows none would do it. Raises UsageError."""
    subject = " ".join([arguments.what, *arguments.words[:1]])
    heeds = _HEEDS.get(subject, _HEEDS.get(arguments.what, frozenset({"server"})))
    for name, without in _NARROWING.items():
        if getattr(arguments, name) != without and name not in heeds:
            said = subject if subject in _HEEDS else arguments.what
            raise UsageError(f"{said} takes no --{name.replace('_', '-')}, so nothing was done; see `simm ctl --help`")


def _check_named(arguments: argparse.Namespace) -> None:
    """Refuse names that are empty or none: an unset variable of a script must not mean all. Raises UsageError."""
    for name in ("server", "of"):
        if getattr(arguments, name) == "":
            raise UsageError(f"--{name} has no name, so nothing was done: name a data server, or omit it for all")
        setattr(arguments, name, getattr(arguments, name) or "")
    namespaces = {"keys": arguments.words[1:], "why": arguments.words}.get(arguments.what, [])
    for word in namespaces:
        entries.check_name(word)


def _look(settings: Settings, arguments: argparse.Namespace, meant: Meant) -> Shown:
    """Return rows, their text, and whether all is well. Raises UsageError, TransportError."""
    what, words = arguments.what, arguments.words

    def asked() -> list[Asked]:
        return ask_all(settings.runtime_dir, arguments.server, settings.server_uid)

    if what == "settings":
        rows, failed = tuning.settings_rows(settings, words, arguments.server, **_whose(arguments))
        notes = [printable(each) for each in failed]
        for each in notes if arguments.json else ():
            print(each, file=sys.stderr, flush=True)
        return rows, "\n".join([table(what, rows), *notes]), not notes
    if what == "node":
        return _nodes(settings, words, asked)
    if what == "cluster":
        return _cluster(settings, words, asked)
    if what == "server":
        if words[:1] != ["status"]:
            raise UsageError("server takes status, or status NAME")
        if len(words) > 1 and arguments.server not in ("", words[1]):
            raise UsageError(f"server status {printable(words[1])} --server {printable(arguments.server)}: one of them")
        rows, trouble = cluster.server_rows(settings, (*words[1:], arguments.server)[0], asked)
        return rows, _noted(table(what, rows), trouble), not trouble
    if what == "shard":
        if words != ["list"]:
            raise UsageError("shard takes list")
        rows, trouble = cluster.shard_rows(settings, asked)
        return rows, _noted(table(what, rows), trouble), not trouble
    return _local(what, words, meant.to_look_at(asked()), arguments.most)


def _nodes(settings: Settings, words: Sequence[str], asked: Callable[[], list[Asked]]) -> Shown:
    if list(words) not in (["list"], ["summary"]):
        raise UsageError("node takes list, summary, drain NAME or resume NAME")
    rows, trouble = cluster.node_rows(settings, asked)
    if words[0] == "list":
        return rows, _noted(table("node", rows), trouble), not trouble
    found = cluster.summary(rows)
    states = ", ".join(f"{count} {state}" for state, count in sorted(found["states"].items())) or "none"
    text = (
        f"data servers: {states}\nmemory: {bytes_text(found['used_bytes'])} of {bytes_text(found['capacity_bytes'])}, "
        f"{found['entries']:,} values\nputs: {found['puts']:,}, evictions: {found['evictions']:,}\n"
        f"shards: {found['shards']:,}, {found['moving_in']:,} of them moving in"
    )
    return found, _noted(text, trouble), not trouble


def _cluster(settings: Settings, words: Sequence[str], asked: Callable[[], list[Asked]]) -> Shown:
    """Return the cluster as a whole and its data servers; those of this host if no manager answers."""
    if list(words) != ["status"]:
        raise UsageError("cluster takes status")
    try:
        found = cluster.status(settings)
    except TransportError:
        rows, trouble = cluster.node_rows(settings, asked)
        return {"trouble": trouble, "nodes": rows}, _noted(table("node", rows), trouble), not trouble
    rows = cluster.rows_of(found)
    text = "\n".join([*cluster_lines(found), "", table("node", rows)])
    whole = not found["shards_without_owner"] and not found["rebuilding"]
    return {**found, "trouble": "", "nodes": rows}, text, whole


def _noted(text: str, trouble: str) -> str:
    return f"{text}\n{printable(trouble)}; above is what this host knows" if trouble else text


def show_of_this_host(what: str, settings: Settings, why: TransportError, *, as_json: bool) -> int:
    """Show this host's data servers (``node``) or their workers (``server``), as the manager does not, and why.

    Return the exit code. Raises ``why`` if this user sees none, or the manager does answer.
    """
    if isinstance(why, Refused):
        raise why
    settings = on_host(settings)
    try:
        asked = ask_all(settings.runtime_dir, "", settings.server_uid)
    except UsageError:
        raise why from None
    find = cluster.local_workers if what == "server" else cluster.local_nodes
    rows = find(asked, str(why))
    shown = {"trouble": str(why), f"{what}s": rows}
    _print(shown, _noted(table(what, rows), str(why)), as_json=as_json)
    return EXIT_NO


#: What is counted in the arenas themselves.
_FROM_ARENAS: Final = ("keys", "namespaces", "slabs")


def _local(what: str, words: Sequence[str], asked: Sequence[Asked], most: int | None) -> Shown:
    """Look at what the workers of this host say, and at their arenas."""
    if what == "workers":
        rows = worker_rows(asked)
        return rows, table(what, rows), not any(row["reason"] for row in rows)
    require_one(asked)
    silent = "".join(f"\n{each.name} does not answer: {each.why}" for each in asked if not each.stats)
    if what == "why":
        findings = why.explain(worker_rows(asked), namespace_rows(asked), words[0] if words else "")
        return why.as_json(findings), why.text_of(findings), not any(each.bad for each in findings)
    if what == "keys":
        order = words[0] if words else "sample"
        rows = entries.key_rows(asked, order, words[1] if len(words) > 1 else None, most or 20)
    elif words:
        raise UsageError(f"{what} takes no {words[0]!r}")
    else:
        rows = TABLES[what][0](asked)
    left = sum(each.stats.get("clients_left_out", 0) for each in asked) if what in ("clients", "sessions") else 0
    unread = [each.name for each in asked if each.stats and each.reader is None] if what in _FROM_ARENAS else []
    silent += "".join(f"\n{name}: its arena cannot be read by this user, its values are not counted" for name in unread)
    more = f"\nand {left:,} sessions more" if left else ""
    kept = kept_text(asked) if what == "namespaces" else ""
    return rows, table(what, rows) + kept + more + silent, not silent


# -- what changes something --------------------------------------------------------------------------


def _evict(settings: Settings, arguments: argparse.Namespace) -> int:
    namespace = cluster.one_word(arguments.words, "evict NAMESPACE")
    if namespace != "*":
        entries.check_name(namespace)  # before anything is asked
    asked = Meant(settings).to_change(ask_all(settings.runtime_dir, arguments.server, settings.server_uid))
    require_one(asked)
    rows = entries.evict(
        asked, None if namespace == "*" else namespace,
        older_s=parse_duration(arguments.older, "s") if arguments.older is not None else 0.0,
        larger=parse_bytes(arguments.larger) if arguments.larger is not None else 0,
        most=arguments.most or 0, dry=arguments.dry_run,
    )  # fmt: skip
    _print(rows, table("evict", rows), as_json=arguments.json)
    return EXIT_NO if any(row["reason"] for row in rows) else EXIT_OK


def _kv(settings: Settings, arguments: argparse.Namespace) -> int:
    if arguments.json:
        raise UsageError("kv takes no --json: it answers as upstream's does")
    return upstream.values(settings, arguments.words)


def _flush(settings: Settings, arguments: argparse.Namespace) -> int:
    from ...sdk.ops.epochs import advance

    name = cluster.one_word(arguments.words[1:], "namespaces flush")
    check_namespace(name)  # before anything is asked
    timeout_s = parse_duration(arguments.timeout, "s") if arguments.timeout is not None else 60.0
    manager_client(settings).close()  # the absence of all is said at once: what follows waits for another one to lead
    epoch = advance(ClientOptions.from_settings(settings, token=token_of(settings)), name, timeout_s)
    text = f"nobody can read what was stored in {printable(repr(name))} before: its epoch is {epoch:,} now"
    _print({"namespace": name, "epoch": epoch}, text, as_json=arguments.json)
    return EXIT_OK


def _drain(settings: Settings, arguments: argparse.Namespace) -> int:
    drain = arguments.words[0] == "drain"
    name = node_name(cluster.one_word(arguments.words[1:], f"node {arguments.words[0]}"))
    timeout_s = parse_duration(arguments.timeout, "s") if arguments.timeout is not None else None
    with manager_client(settings) as link:
        warning = room_text(link.status(), name) if drain else ""
        if warning:
            print(warning, file=sys.stderr if arguments.json else sys.stdout, flush=True)
        shards = request(link, name, drain)
        if drain and not arguments.no_wait:
            wait_drained(link, name, sys.stderr if arguments.json else sys.stdout, timeout_s)
            if not arguments.json:
                return EXIT_OK
    told = f"{name}: {'to be drained' if drain else 'takes its share'}, owned {shards:,} shards when asked"
    _print({"node": name, "draining": drain, "shards": shards}, told, as_json=arguments.json)
    return EXIT_OK


def _grow(settings: Settings, arguments: argparse.Namespace) -> int:
    if arguments.memory is None:
        raise UsageError("grow --memory SIZE: say how much to add, as 64G")
    target = grow.Target(settings, arguments.server, arguments.of)
    found = target.begin(parse_bytes(arguments.memory), arguments.numa)
    if not arguments.no_wait:
        timeout_s = parse_duration(arguments.timeout, "s") if arguments.timeout is not None else None
        found = grow.follow(target, found, sys.stderr if arguments.json else sys.stdout, timeout_s)
    _print(found, grow.text_of(found), as_json=arguments.json)
    return EXIT_OK


def _whose(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return whose settings are meant, if not this host's."""
    if arguments.of and arguments.of_manager:
        raise UsageError("--of and --of-manager: one of them")
    return {"manager": arguments.of_manager, "node": arguments.of}


def _set(settings: Settings, arguments: argparse.Namespace) -> int:
    rows, _ = tuning.settings_rows(settings, arguments.words, arguments.server, **_whose(arguments))
    _print(rows, table("settings", rows), as_json=arguments.json)
    return EXIT_OK


_ACTIONS: Final[dict[tuple[str, str], Callable[[Settings, argparse.Namespace], int]]] = {
    ("namespaces", "flush"): _flush, ("grow", ""): _grow,
    ("node", "drain"): _drain, ("node", "resume"): _drain, ("settings", "set"): _set,
}  # fmt: skip


def _print(rows: Any, text: str, *, as_json: bool) -> None:
    print(json.dumps(rows, indent=2) if as_json else text, flush=True)


def _show(
    look: Callable[[], Shown], every_s: float, *, as_json: bool, watch: bool,
    sleep: Callable[[float], object] = time.sleep,
) -> int:  # fmt: skip
    """Show what ``look`` returns, once or again and again, and return the exit code."""
    before: tuple[float, list[Row]] | None = None
    while True:
        rows, text, well = look()
        if watch and rows and isinstance(rows, list):
            now = time.monotonic()
            text += rates_text(rows, before[1], now - before[0]) if before is not None else ""
            before = now, rows
        if as_json:
            print(json.dumps(rows, indent=None if watch else 2), flush=True)
        else:
            clear = "\x1b[H\x1b[J" if watch and sys.stdout.isatty() else ""
            print(f"{clear}{text}", flush=True)
        if not watch:
            return EXIT_OK if well else EXIT_NO
        sleep(every_s)


def simmctl() -> int:
    """Run ``simmctl``, which is ``simm ctl``."""
    hold_standard_descriptors()
    end_cleanly_on_signals()
    return guarded(lambda: main(sys.argv[1:], "simmctl"), "simmctl")
