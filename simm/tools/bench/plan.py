"""The command line of ``simm bench``, and the checked plan that it makes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from typing import Final

from ...config.parsers import parse_bytes, parse_duration
from ...config.settings import Settings, add_arguments
from ...constants import VALUE_BYTES_MAX
from ...errors import UsageError
from ..console import Parser
from .model import Host
from .report import CLIENT, FULL, KV, OPERATIONS, ROOM, Setup, size_text

OPS: Final = tuple(OPERATIONS)
DEFAULT_SIZES: Final = "4K,64K,1M,16M"
DEFAULT_BATCH: Final = 32
#: The size of engines' questions, and of the bar for them.
DEFAULT_ASKING_BATCH: Final = 128
DEFAULT_MEMORY: Final = "1G"
DEFAULT_WORKING_SET: Final = 256 << 20
#: Share of a mix's gets and questions that are for stored keys, percent.
DEFAULT_HITS: Final = 75.0
_NUMBER_MAX: Final = 4096
_RATIO_MAX: Final = 1000.0


@dataclass(frozen=True)
class Mix:
    """How ``--mixed`` draws operations: a weight for each kind, and the share of reads that are for stored keys."""

    weights: dict[str, float] = field(default_factory=lambda: {"put": 1.0, "get": 1.0, "ask": 1.0})
    hits: float = DEFAULT_HITS / 100

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {self.weights[kind]:g}" for name, kind in _KINDS.items())
        return f"{shown}, {100 * self.hits:g} % of the reads for stored keys"


#: Names of ``--ratios``, and the operations' kinds.
_KINDS: Final = {"put": "put", "get": "get", "exists": "ask"}


@dataclass(frozen=True)
class Plan:
    """The checked command line."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    #: Keys in a call, by operation; several are measured one after another.
    batches: dict[str, tuple[int, ...]]
    threads: int
    processes: int
    seconds: float
    verify: bool
    ring: bool
    working_set: int
    #: Arena of the benchmark's own cluster, bytes; 0 if the manager is given.
    memory: int
    state: str = ROOM
    api: str = CLIENT
    #: None where each operation is measured in a loop of its own.
    mix: Mix | None = None
    #: The host to compute the figures of, None for none.
    host: Host | None = None

    @property
    def setup(self) -> Setup:
        """What the bars depend on."""
        return Setup(self.state, self.api, self.mix is not None, self.ring, self.threads == self.processes == 1)

    def parts(self) -> list[Plan]:
        """Return the plans that have clusters of their own: in a full arena all values are of one size."""
        if self.state != FULL:
            return [self]
        parts = [replace(self, sizes=(size,), ops=self._ops_at(size)) for size in self.sizes]
        return [part for part in parts if part.ops]

    def _ops_at(self, size: int) -> tuple[str, ...]:
        """Return what is measured at a size: questions, which do not depend on it, at the smallest one, or in a mix."""
        ask = self.mix is not None or size == min(self.sizes)
        return tuple(op for op in self.ops if ask or OPERATIONS[op].kind != "ask")

    def groups(self, size: int, rows: int) -> list[tuple[tuple[str, ...], int]]:
        """Return what is measured at a size, in order: operations that are measured together, and keys in a call.

        ``rows``: keys of each thread. A batch has half of them at most.
        """
        ops = self._ops_at(size)
        most = max(1, rows // 2)
        if self.mix is None:
            return [
                ((op,), batch) for op in ops for batch in dict.fromkeys(min(each, most) for each in self.batches[op])
            ]
        groups = []
        for many in (False, True):
            together = tuple(op for op in ops if OPERATIONS[op].many is many)
            sizes = dict.fromkeys(min(each, most) for op in together for each in self.batches[op])
            groups += [(together, batch) for batch in sizes]
        return groups


def parser_for(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(
        prog=prog, description="Measure operations next to a bare memcpy or a bare socket.",
        epilog=f"To replay a trace of requests and measure hit ratios: `{prog} --trace FILE --room BLOCKS`; "
        f"see `{prog} --trace FILE --help`.",
    )  # fmt: skip
    parser.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(OPS)} (default: all)")
    parser.add_argument("--op", dest="more_ops", action="append", default=[], metavar="LIST", help="the same")
    parser.add_argument("--size", default=DEFAULT_SIZES, metavar="LIST", help=f"value sizes (default: {DEFAULT_SIZES})")
    parser.add_argument(
        "--batch", metavar="LIST",
        help=f"keys in a call of mput and mget ({DEFAULT_BATCH}) and mexists ({DEFAULT_ASKING_BATCH}); several sizes, "
        "by commas, are measured one after another",
    )  # fmt: skip
    parser.add_argument(
        "--state", choices=(ROOM, FULL), default=ROOM,
        help="of the arena: with room for all values, which puts replace (default), or full, so that every put is of a "
        "new key and evicts",
    )  # fmt: skip
    parser.add_argument(
        "--api", choices=(CLIENT, KV), default=CLIENT,
        help="call simm.client (default), or simm.kv as engines do, with registered memory",
    )  # fmt: skip
    parser.add_argument(
        "--mixed", action="store_true",
        help="call put, get and exists in random order, and mput, mget and mexists, instead of one operation at a time",
    )  # fmt: skip
    parser.add_argument(
        "--ratios", metavar="LIST", help="how often --mixed calls each (default: put=1,get=1,exists=1)"
    )
    parser.add_argument(
        "--hits", metavar="PERCENT",
        help=f"share of the reads of --mixed that are for stored keys (default: {DEFAULT_HITS:g})",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads a process (default: 1)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="load processes (default: 1)")
    parser.add_argument("--duration", default="1s", metavar="TIME", help="for each operation and size (default: 1s)")
    parser.add_argument("--verify", action="store_true", help="check every value that is read")
    parser.add_argument(
        "--ring", action=argparse.BooleanOptionalAction, default=True, help="commit through shared memory (default)"
    )
    parser.add_argument(
        "--memory", metavar="BYTES", help=f"arena of the cluster that is started without --manager ({DEFAULT_MEMORY})"
    )
    parser.add_argument(
        "--working-set", metavar="BYTES", help="bytes that keys rotate over (256M, at most a quarter of the arena)"
    )
    parser.add_argument(
        "--model", metavar="HOST",
        help="also compute what another host would reach, as cores=64,gpus=8,numa=2,bandwidth=100G (of copied values "
        "a NUMA node)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too; - is stdout")
    add_arguments(parser, "bench", without=("trace",))  # --trace names a trace to replay; SIMM_TRACE is that setting
    return parser


def plan_from(arguments: argparse.Namespace, settings: Settings) -> Plan:
    """Return the plan for a command line. Raises UsageError, ConfigError."""
    ops = _ops(arguments)
    sizes = tuple(dict.fromkeys(parse_bytes(part) for part in arguments.size.split(",") if part.strip()))
    for size in sizes:
        if not 0 < size <= VALUE_BYTES_MAX:
            raise UsageError(f"--size {size}: a value has 1 to {VALUE_BYTES_MAX} bytes")
    if not sizes:
        raise UsageError("--size names no size; write it as 4K,1M")
    for name in ("threads", "processes"):
        if not 1 <= getattr(arguments, name) <= _NUMBER_MAX:
            raise UsageError(f"--{name} {getattr(arguments, name)}: a number from 1 to {_NUMBER_MAX}")
    # A benchmark loads a cluster and evicts from it: a name in the environment or in a file does not ask for that.
    own = settings.origin("manager") != "--manager"
    if arguments.memory is not None and not own:
        raise UsageError(f"--memory is for a cluster that this command starts; omit it or {settings.origin('manager')}")
    if arguments.state == FULL and not own:
        raise UsageError("--state full evicts all that is stored: omit --manager, so that it is a cluster of its own")
    if arguments.api == KV and not arguments.ring:
        raise UsageError("--no-ring is for --api client: simm.kv always commits by the ring")
    memory = parse_bytes(arguments.memory or DEFAULT_MEMORY) if own else 0
    seconds = parse_duration(arguments.duration, "s")
    if not 0.01 <= seconds <= 86_400:
        raise UsageError(f"--duration {arguments.duration}: from 10ms to 24h")
    return Plan(
        ops=ops, sizes=sizes, batches=_batches(arguments, ops), threads=arguments.threads,
        processes=arguments.processes, seconds=seconds, verify=arguments.verify, ring=arguments.ring,
        working_set=_working_set(arguments, memory, max(sizes)), memory=memory, state=arguments.state,
        api=arguments.api, mix=_mix(arguments, ops), host=_host(arguments, settings, own),
    )  # fmt: skip


def _host(arguments: argparse.Namespace, settings: Settings, own: bool) -> Host | None:
    """Return the host to compute. It takes figures of one caller and of a worker that nobody else uses."""
    if arguments.model is None:
        return None
    if not own:
        raise UsageError("--model needs the worker's processor time: omit --manager to measure a cluster of its own")
    if arguments.processes * arguments.threads > 1:
        raise UsageError("--model computes several engines from one caller: omit --processes and --threads")
    if arguments.mixed:
        raise UsageError("--model needs each operation's own time: omit --mixed")
    if settings.path != "auto" and "shm" not in settings.path.split(","):
        raise UsageError(f"--model is for engines on the cache's own host, not for --path {settings.path}")
    return Host.parse(arguments.model)


def _ops(arguments: argparse.Namespace) -> tuple[str, ...]:
    named = tuple(dict.fromkeys(",".join([*arguments.ops, *arguments.more_ops]).replace(",", " ").split()))
    for op in named:
        if op not in OPS:
            raise UsageError(f"{op!r} is not an operation; choose from {', '.join(OPS)}")
    without = [option for option, given in (("--api kv", arguments.api == KV), ("--mixed", arguments.mixed)) if given]
    if without and "view" in named:
        raise UsageError(f"{without[0]} has no view: name other operations")
    return named or tuple(op for op in OPS if op != "view" or not without)


def _batches(arguments: argparse.Namespace, ops: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Return the keys in a call of each operation."""
    if arguments.batch is None:
        many = {op: DEFAULT_ASKING_BATCH if OPERATIONS[op].kind == "ask" and not arguments.mixed else DEFAULT_BATCH
                for op in ops if OPERATIONS[op].many}  # fmt: skip
        return {op: (many.get(op, 1),) for op in ops}
    given: list[int] = []
    for word in arguments.batch.split(","):
        try:
            given.append(int(word))
        except ValueError:
            raise UsageError(f"--batch {arguments.batch}: numbers of keys, by commas, as 32,128") from None
        if not 1 <= given[-1] <= _NUMBER_MAX:
            raise UsageError(f"--batch {given[-1]}: a number from 1 to {_NUMBER_MAX}")
    if not any(OPERATIONS[op].many for op in ops):
        raise UsageError("--batch is for mput, mget and mexists: name one of them, or omit it")
    return {op: tuple(dict.fromkeys(given)) if OPERATIONS[op].many else (1,) for op in ops}


def _working_set(arguments: argparse.Namespace, memory: int, largest: int) -> int:
    """Return the bytes that all threads together rotate over. ``memory``: of the own cluster's arena, or 0."""
    if arguments.working_set is not None:
        working_set = parse_bytes(arguments.working_set)
        # In a full arena the newest values are kept for certain, and some are replaced before all are read.
        share, text = (4, "a quarter") if arguments.state == FULL else (2, "half")
        if memory and working_set > memory // share:
            raise UsageError(
                f"--working-set {arguments.working_set} is more than {text} of the arena: raise --memory"
            )
    else:
        working_set = min(DEFAULT_WORKING_SET, memory // 4) if memory else DEFAULT_WORKING_SET
    if working_set // (arguments.threads * arguments.processes) < largest:
        raise UsageError(
            f"a working set of {working_set >> 20} MiB has no room for a value of {size_text(largest)} in each "
            "thread: raise --memory or --working-set"
        )
    return working_set


def _mix(arguments: argparse.Namespace, ops: tuple[str, ...]) -> Mix | None:
    """Return how operations are mixed, None if they are not."""
    if not arguments.mixed:
        for name in ("ratios", "hits"):
            if getattr(arguments, name) is not None:
                raise UsageError(f"--{name} is for --mixed: give both or none")
        return None
    weights = Mix().weights
    for part in (arguments.ratios or "").split(",") if arguments.ratios is not None else ():
        name, _, number = part.strip().partition("=")
        if name not in _KINDS:
            raise UsageError(f"--ratios {arguments.ratios}: write it as {','.join(f'{each}=1' for each in _KINDS)}")
        if not any(OPERATIONS[op].kind == _KINDS[name] for op in ops):
            raise UsageError(f"--ratios {part}: {name} is not among the operations that are mixed")
        weights[_KINDS[name]] = _number(f"--ratios {part}", number, 1 / _RATIO_MAX, _RATIO_MAX)
    hits = DEFAULT_HITS if arguments.hits is None else _number(f"--hits {arguments.hits}", arguments.hits, 0, 100)
    return Mix(weights, hits / 100)


def _number(what: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= most:  # nan is in no range
        raise UsageError(f"{what}: a number from {least:g} to {most:g}")
    return value
