"""``simm bench --trace``: replay a trace of LLM requests on a real cluster, next to simulated eviction policies.

    simm bench --trace conversation_trace.jsonl --room 11200                    as fast as it goes
    simm bench --trace conversation_trace.jsonl --room 11200 --policy fifo --speed 10
    simm bench --generate chat --seed 7 --room 2000 --simulate lru,min

The cluster is always one of this command's own. Each request does what an engine does: it asks which leading blocks of
its prompt are stored (`exists_many`), reads them (`get_many`), and stores the rest (`put_many`). A block counts as
found if it was read, and all before it. Every value read is checked.

After a `put_many` that answered ok, the whole prompt should be there. The command looks for it in the arena, without
marking it as used, and reports the prompts that are not whole: a usable prefix was lost at once.

The room is rounded to what whole slabs hold, and the simulated policies get the room that the arena really has. A
client keeps some chunks for its next puts, so a little less is stored at any time.

``simm/traces/formats.py`` describes the formats of traces, ``simm/traces/generate.py`` the kinds of generated ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...arena.layout import Geometry
from ...arena.reader import ArenaReader
from ...client import Client
from ...config.parsers import parse_bytes
from ...constants import ARENA_BYTES_MIN, DEFAULT_POLICY, PAGE_BYTES, POLICY_NAMES, SLAB_BYTES, VALUE_BYTES_MAX
from ...errors import SimmError, UsageError
from ...ipc.segments import is_arena_of, metadata_of
from ...sdk.local_cluster import WITHOUT_TLS, LocalCluster
from ...shm import SHM_DIR
from ...slab import CHUNK_SIZES, CHUNKS_PER_SLAB, LARGE_GROUP, chunk_bytes_for, class_of
from ...traces.formats import Trace, read_trace
from ...traces.generate import KINDS, generate
from ...traces.simulate import REFERENCES, Outcome, known_policies, simulate
from ..console import Parser
from .report import Progress

#: Without --value-size, one of the classes from here on is taken whose slabs hold nearest to the room.
_SMALLEST: Final = 2048
#: Classes up to this size are used for any room, larger ones for rooms of few blocks.
_LARGEST: Final = 8192
_SLOTS_MIN: Final = 4096
#: The smallest arena's data region.
_DATA_MIN: Final = Geometry.plan(ARENA_BYTES_MIN, _SLOTS_MIN).data_bytes
_SLABS_MIN: Final = _DATA_MIN // SLAB_BYTES
_READY_S: Final = 60.0


# --- the room -----------------------------------------------------------------------------------------


class Room(NamedTuple):
    """An arena for a number of blocks: bytes of a value of one unit, blocks that fit, bytes of the arena, slots."""

    value_bytes: int
    blocks: int
    arena_bytes: int
    slots: int


def blocks_in(data_bytes: int, value_bytes: int) -> int:
    """Return how many values of one size a data region holds."""
    group = class_of(value_bytes)
    if group == LARGE_GROUP:
        return data_bytes // chunk_bytes_for(value_bytes)
    return data_bytes // SLAB_BYTES * CHUNKS_PER_SLAB[group]


def _slabs_for(room: int, value_bytes: int) -> int:
    """Return the number of slabs whose room is nearest."""
    fewer = max(_SLABS_MIN, room * chunk_bytes_for(value_bytes) // SLAB_BYTES)
    return min(
        range(max(_SLABS_MIN, fewer - 1), fewer + max(3, fewer // 8)),
        key=lambda slabs: abs(blocks_in(slabs * SLAB_BYTES, value_bytes) - room),
    )


def _sizes_for(room: int) -> list[int]:
    """Return value sizes of which one suits the room: small ones, so that a replay is quick."""
    share = _DATA_MIN // room
    if share // PAGE_BYTES * PAGE_BYTES > CHUNK_SIZES[-1]:
        return [share // PAGE_BYTES * PAGE_BYTES]  # the smallest arena holds so many, as large values have no slabs
    return [size for size in CHUNK_SIZES if _SMALLEST <= size <= max(_LARGEST, share)]


def room_for(room: int, value_bytes: int = 0) -> Room:
    """Return the arena nearest to ``room`` blocks, with a value size that suits it if none is given. O(arena's slabs).

    Raises UsageError.
    """
    if room < 1:
        raise UsageError(f"--room {room}: 1 at least")
    sizes = [value_bytes] if value_bytes else _sizes_for(room)
    found = {size: _slabs_for(room, size) for size in sizes}
    # Of equally near ones, that with the smallest arena.
    best = min(
        sizes, key=lambda size: (abs(blocks_in(found[size] * SLAB_BYTES, size) - room), found[size], size)
    )  # fmt: skip
    data_bytes = found[best] * SLAB_BYTES
    blocks = blocks_in(data_bytes, best)
    # Twice as many slots as blocks: no set of the table overflows, so only the data region evicts.
    slots = max(_SLOTS_MIN, 2 * blocks)
    size = max(ARENA_BYTES_MIN, data_bytes)
    while True:
        try:
            if Geometry.plan(size, slots).data_bytes >= data_bytes:
                break
        except UsageError:
            pass  # too small for the tables
        size += SLAB_BYTES
    return Room(best, blocks_in(Geometry.plan(size, slots).data_bytes, best), size, slots)


# --- the replay ---------------------------------------------------------------------------------------


@dataclass
class Found:
    """What a replay on a cluster found."""

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    #: Blocks that were found by the lookup, and gone when they were read.
    gone: int = 0
    #: Values with other bytes than were stored.
    wrong: int = 0
    #: Blocks that put_many did not store.
    refused: int = 0
    #: Requests with something to put that was all stored, and those of them whose prompt was not whole after it.
    put: int = 0
    not_whole: int = 0
    #: Blocks of those prompts from the first missing one on.
    lost_blocks: int = 0
    #: Seconds of the replay, and by how many the latest request was late.
    seconds: float = 0.0
    late: float = 0.0
    #: Blocks that are stored at the end.
    stored: int = 0

    @property
    def ratio(self) -> float:
        """Return the share of blocks that were found."""
        return self.hit_blocks / max(1, self.blocks)

    @property
    def token_ratio(self) -> float:
        """Return the share of prompt tokens that were found."""
        return self.hit_tokens / max(1, self.tokens)


def value_of(block: int, size: int) -> bytes:
    """Return the value of a block: its number over and over."""
    word = block.to_bytes(8, "little")
    return (word * (size // 8 + 1))[:size]


class Replay:
    """A client that plays requests on a cluster, and a reader that looks at what is stored without using it."""

    def __init__(self, trace: Trace, client: Client, reader: ArenaReader, value_bytes: int) -> None:
        self.trace = trace
        self.found = Found()
        self._client = client
        self._reader = reader
        self._sizes = {model: units * value_bytes for model, units in trace.units.items()}

    def run(self, counted_from: int, speed: float, progress: Progress) -> Found:
        """Replay all requests, at ``speed`` times their pace or, with 0, one after the other at once.

        Those from number ``counted_from`` on count. Raises SimmError.
        """
        requests = self.trace.requests
        began = told = time.monotonic()
        for number, request in enumerate(requests):
            now = time.monotonic()
            if speed:
                due = began + (request.at_ms - requests[0].at_ms) / 1000 / speed
                if now < due:
                    time.sleep(due - now)
                self.found.late = max(self.found.late, now - due)
            if now - told > 0.5:
                told = now
                progress(f"request {number:,} of {len(requests):,}, {self.found.ratio:.3f} of the blocks found")
            self._request(number, number >= counted_from)
        self.found.seconds = time.monotonic() - began
        distinct = {_key(request.model, block) for request in requests for block in request.blocks}
        self.found.stored = sum(self._stored(sorted(distinct)))
        return self.found

    def _request(self, number: int, counted: bool) -> None:
        request, found, client = self.trace.requests[number], self.found, self._client
        size = self._sizes[request.model]
        keys = [_key(request.model, block) for block in request.blocks]
        run = _leading(client.exists_many(keys)) if keys else 0
        read = client.get_many(keys[:run]) if run else []
        hits = _leading(value is not None for value in read)
        found.gone += run - hits
        found.wrong += sum(
            value is not None and value != value_of(block, size) for block, value in zip(request.blocks, read)
        )
        rest = keys[hits:]
        if rest:
            stored = client.put_many(rest, [value_of(block, size) for block in request.blocks[hits:]])
            found.refused += stored.count(False)
            if all(stored):
                whole = _leading(self._stored(keys))
                found.put += 1
                found.not_whole += whole < len(keys)
                found.lost_blocks += len(keys) - whole
        if counted:
            found.requests += 1
            found.blocks += len(keys)
            found.hit_blocks += hits
            found.tokens += request.tokens
            found.hit_tokens += min(request.tokens, hits * self.trace.block_tokens)

    def _stored(self, keys: Sequence[str]) -> list[bool]:
        """Return which keys are in the table. Does not mark them as used, as a lookup would."""
        if not keys:
            return []
        return [slot >= 0 for slot in self._reader.slots_of_many([self._client.digest(key) for key in keys])]


def _key(model: str, block: int) -> str:
    return f"{model}/{block:x}"


def _leading(answers: Iterable[bool]) -> int:
    """Return the number of leading True."""
    count = 0
    for answer in answers:
        if not answer:
            break
        count += 1
    return count


def arena_of(cluster: LocalCluster) -> ArenaReader:
    """Return a reader of the only arena of a cluster. Raises SimmError."""
    names = {metadata_of(name) for name in os.listdir(SHM_DIR) if is_arena_of(cluster.name, name)}
    if len(names) != 1:
        raise SimmError(f"the cluster has {len(names)} arenas, not 1: the replay needs all blocks in one")
    return ArenaReader(names.pop())


# --- the command --------------------------------------------------------------------------------------


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = Parser(prog=prog, description="Replay a trace on a cluster of its own, next to simulated policies.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's format, or the plain one of simm.traces")
    what.add_argument("--generate", metavar="KIND", help=f"a synthetic trace instead: {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of --generate (%(default)s)")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N (of --generate: 4000)")
    parser.add_argument("--room", type=int, required=True, metavar="BLOCKS", help="blocks of one unit that fit")
    parser.add_argument("--value-size", metavar="BYTES", help="of a block of one unit (what suits the room, 2K to 8K)")
    parser.add_argument("--policy", default=DEFAULT_POLICY, metavar="NAME",
                        help=f"the cluster's: {', '.join(POLICY_NAMES)} (%(default)s)")  # fmt: skip
    parser.add_argument("--speed", type=float, default=0.0, metavar="X",
                        help="X times as fast as recorded; default: as fast as it goes")  # fmt: skip
    parser.add_argument("--count-from", type=float, default=0.0, metavar="SHARE",
                        help="count only what comes after this share of the requests (%(default)s)")  # fmt: skip
    parser.add_argument("--simulate", metavar="LIST", help=f"of {', '.join(REFERENCES)}, simm-* (all but simm-*), none")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too; - is stdout")
    return parser


def asks_for_replay(argv: Sequence[str]) -> bool:
    """Return True if a command line of ``simm bench`` has a trace."""
    return any(word.split("=")[0] in ("--trace", "--generate") for word in argv)


def _trace_of(arguments: argparse.Namespace) -> Trace:
    if arguments.requests is not None and arguments.requests < 1:
        raise UsageError(f"--requests {arguments.requests}: 1 at least")
    if arguments.generate is not None:
        return generate(arguments.generate, arguments.seed, arguments.requests or 4000)
    trace = read_trace(arguments.trace)
    return Trace(trace.name, trace.requests[: arguments.requests], trace.block_tokens, trace.units)


def _check(arguments: argparse.Namespace, trace: Trace) -> tuple[Room, tuple[str, ...], int]:
    """Return room, simulated policies and the first request that counts. Raises UsageError."""
    if arguments.policy not in POLICY_NAMES:
        raise UsageError(f"--policy {arguments.policy}: {', '.join(POLICY_NAMES)}")
    if not 0 <= arguments.speed < 1e9 or not 0 <= arguments.count_from < 1:
        raise UsageError("--speed is positive, and --count-from a share from 0 to less than 1")
    value_bytes = parse_bytes(arguments.value_size) if arguments.value_size else 0
    if arguments.value_size and not 8 <= value_bytes * max(trace.units.values()) <= VALUE_BYTES_MAX:
        raise UsageError(f"--value-size {arguments.value_size}: a value has 8 to {VALUE_BYTES_MAX} bytes")
    named = arguments.simulate
    names = () if named == "none" else known_policies(named.split(",")) if named else REFERENCES
    return room_for(arguments.room, value_bytes), names, int(arguments.count_from * len(trace.requests))


def lines_of(
    trace: Trace, room: Room, asked: int, policy: str, found: Found, simulated: Iterable[Outcome]
) -> Iterator[str]:  # fmt: skip
    """Yield the report, the simulated policies as they come."""
    blocks = trace.blocks
    yield (f"{trace.name}: {len(trace.requests):,} requests, {blocks:,} blocks of {trace.block_tokens} tokens, "
           f"{trace.distinct:,} distinct")  # fmt: skip
    unchained = trace.unchained()
    if unchained:
        yield f"{unchained:,} blocks follow another block than before: equal blocks do not mean equal prefixes here"
    asked_for = "" if asked == room.blocks else f" ({asked:,} asked for)"
    yield (f"a cluster of its own, room for {room.blocks:,} blocks{asked_for} of {room.value_bytes:,} bytes; "
           f"{found.stored:,} stored at the end; {found.seconds:.1f} s")  # fmt: skip
    if found.requests < len(trace.requests):
        yield f"counted: the last {found.requests:,} requests"
    yield ""
    yield f"{'policy':<22}{'blocks':>8}{'tokens':>8}"
    yield f"{'SiMM, ' + policy:<22}{found.ratio:8.4f}{found.token_ratio:8.4f}"
    for outcome in simulated:
        yield f"{'  ' + outcome.policy:<22}{outcome.ratio:8.4f}{outcome.token_ratio:8.4f}"
    yield ""
    yield (f"prompts not whole after a put that was ok: {found.not_whole:,} of {found.put:,} "
           f"({found.lost_blocks:,} blocks)")  # fmt: skip
    yield f"blocks refused {found.refused:,}, gone before they were read {found.gone:,}, wrong {found.wrong:,}"


def main(argv: Sequence[str], prog: str = "simm bench") -> int:
    """Replay, print and return the exit code: 1 if a value was wrong, else 0. Raises SimmError, OSError."""
    arguments = _parser(prog).parse_args(argv)
    trace = _trace_of(arguments)
    room, names, counted_from = _check(arguments, trace)
    out = sys.stderr if arguments.json == "-" else sys.stdout
    progress = Progress(sys.stderr)
    try:
        progress("starting a cluster")
        options = ("--policy", arguments.policy, "--slots", str(room.slots))
        with LocalCluster(memory=room.arena_bytes, arguments=options) as cluster:
            with Client(cluster.manager, token=cluster.token, **WITHOUT_TLS) as client:
                if not client.wait_ready(_READY_S):
                    raise SimmError(f"the cluster was not ready within {_READY_S:.0f} s: see `simm doctor`")
                found = Replay(trace, client, arena_of(cluster), room.value_bytes).run(
                    counted_from, arguments.speed, progress
                )
        simulated: list[Outcome] = []

        def outcomes() -> Iterator[Outcome]:
            for name in names:
                progress(f"simulating {name}")
                for outcome in simulate(trace, room.blocks, [name], counted_from):
                    simulated.append(outcome)
                    yield outcome

        for line in lines_of(trace, room, arguments.room, arguments.policy, found, outcomes()):
            progress("")
            print(line, file=out, flush=True)
    finally:
        progress("")
    if arguments.json is not None:
        _write(arguments.json, _as_json(trace, room, arguments, found, simulated))
    return 1 if found.wrong else 0


def _as_json(
    trace: Trace, room: Room, arguments: argparse.Namespace, found: Found, simulated: list[Outcome]
) -> dict[str, Any]:  # fmt: skip
    return {
        "trace": {"name": trace.name, "requests": len(trace.requests), "blocks": trace.blocks,
                  "distinct": trace.distinct, "block_tokens": trace.block_tokens},
        "room": {"asked": arguments.room, **room._asdict()},
        "policy": arguments.policy,
        "found": {**vars(found), "ratio": found.ratio, "token_ratio": found.token_ratio},
        "simulated": {
            outcome.policy: {"ratio": outcome.ratio, "token_ratio": outcome.token_ratio} for outcome in simulated
        },
    }  # fmt: skip


def _write(path: str, report: dict[str, Any]) -> None:
    text = json.dumps(report, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
