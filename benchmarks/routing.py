"""Simulate pods that share a store, and five routers, which differ only in what they know when they choose a pod.

    python benchmarks/routing.py [--pods 8] [--loads 0.3,0.5,0.7,0.8] [--charts docs]

Needs the extra ``index``. Four loads of 8 pods take two minutes of a processor, four loads of 200 pods with
``--requests 8000`` ten. The first third of the requests fills the caches and is not counted.

The pods
--------
A pod prefills one request after the other. Leading blocks that it has in GPU memory cost nothing. It loads those that
follow and are in the store, from its own host or another one, and computes the rest. Then it has all blocks of the
request, and so has the store. Both evict what was used longest ago. Decoding is left out, as is what two requests that
wait at one pod have in common. Every pod uses the store, whatever its router knows of it.

The figures are those of Qwen3-32B (64 layers, 8 KV heads of 128, bfloat16: 256 KiB a token) with assumed rates: 12,000
tokens a second of prefill, 20 GB/s from the own host's memory, 10 GB/s from another host's.

The requests
------------
Conversations begin at random times (Poisson). Each belongs to one of some groups with a long system prompt (Zipf), and
has some turns: a turn's prompt is the one before, its answer, and a new message. The next turn follows its answer after
a pause.

The routers
-----------
* *random*.
* *load*: the pod with the least work before it. All others know that too.
* *approximate*: remembers which blocks it has sent where, as if a pod kept its newest ones.
* *events*: the event index of ``simm index`` itself (``simm/index/blocks.py``), fed by the pods' events, which come
  some time later. It does not know of the store.
* *exact*: the same, and it asks the store what it has now (``Client.prefix``).

The last three choose the pod with the least expected time to the first token, by the rates above.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from svg import Line, chart, stacked

from simm.index.blocks import Blocks
from simm.index.events import Event, Removed, Stored, Where
from simm.index.keys import chain
from simm.index.scores import score
from simm.index.sources import Registration, Source, Space

#: Tokens of a block, and bytes of its keys and values.
BLOCK: Final = 64
BLOCK_BYTES: Final = BLOCK * (256 << 10)
#: Seconds for a block: computed, loaded from the own host, and from another.
PREFILL_S: Final = BLOCK / 12_000
OWN_S: Final = BLOCK_BYTES / 20e9
OTHER_S: Final = BLOCK_BYTES / 10e9
#: Blocks that a pod keeps in GPU memory, and the store for each pod.
GPU_BLOCKS: Final = 2_000
STORE_BLOCKS: Final = 12_000
PODS_OF_A_HOST: Final = 8
#: Blocks of a system prompt, and of what a turn adds; turns; seconds between an answer and the next turn.
SYSTEM_BLOCKS: Final = 64
TURN_BLOCKS: Final = (4, 16)
TURNS: Final = (2, 6)
PAUSE_S: Final = 20.0
#: Groups of conversations for each pod.
GROUPS: Final = 30
#: An event is with the router so many seconds after its block.
LATE_S: Final = 0.1

SPACE: Final = Space("m", "", "default", "", BLOCK)
_WHERE: Final = Where("gpu")
COLOURS: Final = {
    "random": "#999999", "load": "#cc7a00", "approximate": "#8e44ad", "events": "#1f77b4", "exact": "#2a9d3a"
}  # fmt: skip


class Cache:
    """Blocks, the one that was used longest ago first, and no more than fit."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def prefix(self, keys: Sequence[int], first: int = 0) -> int:
        """Return how many leading blocks it has, if it has the first ones."""
        blocks = self._blocks
        while first < len(keys) and keys[first] in blocks:
            first += 1
        return first

    def use(self, keys: Iterable[int]) -> tuple[list[int], list[int]]:
        """Take blocks, or note that they are used; return which are new, and which had to go."""
        blocks = self._blocks
        new = []
        for key in keys:
            if key not in blocks:
                new.append(key)
            blocks[key] = None
            blocks.move_to_end(key)
        return new, [blocks.popitem(last=False)[0] for _ in range(len(blocks) - self.most)]


@dataclass
class Request:
    """One turn: its tokens (4 bytes each), the keys of its blocks, when it came, and the turns that are left."""

    tokens: bytes
    keys: list[int]
    came: float
    left: int


@dataclass
class Pod:
    """A pod, its GPU memory, and the requests that wait."""

    number: int
    gpu: Cache
    source: Source
    waiting: deque[Request] = field(default_factory=deque)
    #: Until when it works on a request, the seconds of all that wait, as the router expects them, and of all its work.
    busy_until: float = 0.0
    expected: deque[float] = field(default_factory=deque)
    worked: float = 0.0


@dataclass
class Result:
    """What a run gave: times to the first token, processor time of choices, seconds; blocks by where they came from."""

    ttft: list[float] = field(default_factory=list)
    decisions: list[float] = field(default_factory=list)
    gpu: int = 0
    store: int = 0
    computed: int = 0
    worked: list[float] = field(default_factory=list)

    def quantile(self, part: float) -> float:
        """Return a quantile of the times to the first token, seconds."""
        return sorted(self.ttft)[int(part * (len(self.ttft) - 1))]


class World:
    """Pods, their store, and one router."""

    def __init__(self, router: str, pods: int, load: float, requests: int, seed: int) -> None:
        self.rng = random.Random(f"{seed}/{load}")
        self.choice = random.Random(seed)
        self.router = router
        self.index = Blocks()
        self.pods = [
            Pod(number, Cache(GPU_BLOCKS), self.index.register(Registration(f"pod-{number}", "m", block_size=BLOCK)))
            for number in range(pods)
        ]
        self.hosts = -(-pods // PODS_OF_A_HOST)
        self.store = Cache(STORE_BLOCKS * pods)
        self.sent = [Cache(GPU_BLOCKS) for _ in self.pods]
        self.requests = requests
        self.now = 0.0
        self.result = Result()
        self._order = itertools.count()
        self._todo: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        groups = GROUPS * pods
        self._systems = [self._blocks(SYSTEM_BLOCKS) for _ in range(groups)]
        self._weights = [1 / (rank + 1) for rank in range(groups)]
        # The load is a share of what the pods could do if they had all blocks in GPU memory but those of the new turn.
        self._pause_s = sum(TURNS) / 2 * sum(TURN_BLOCKS) / 2 * PREFILL_S / load / pods

    def _blocks(self, count: int) -> bytes:
        return self.rng.randbytes(count * BLOCK * 4)

    def at(self, when: float, act: Any, *arguments: Any) -> None:
        """Do something at a time."""
        heapq.heappush(self._todo, (when, next(self._order), act, arguments))

    def run(self) -> Result:
        """Run until all requests have their first token."""
        self.at(0.0, self.begin)
        for most in (self.requests // 3, self.requests - self.requests // 3):
            self.result = Result()
            for pod in self.pods:
                pod.worked = 0.0
            while len(self.result.ttft) < most:
                self.now, _, act, arguments = heapq.heappop(self._todo)
                act(*arguments)
        self.result.worked = [pod.worked for pod in self.pods]
        return self.result

    def begin(self) -> None:
        """Begin a conversation, and plan the next one."""
        system = self.rng.choices(self._systems, self._weights)[0]
        self.ask(system, chain(memoryview(system), BLOCK), self.rng.randint(*TURNS))
        self.at(self.now + self.rng.expovariate(1 / self._pause_s), self.begin)

    def ask(self, tokens: bytes, keys: list[int], left: int) -> None:
        """Send the next turn of a conversation, whose tokens so far these are, to a pod."""
        more = self._blocks(self.rng.randint(*TURN_BLOCKS))
        keys = keys + chain(memoryview(more), BLOCK, parent=keys[-1])
        request = Request(tokens + more, keys, self.now, left - 1)
        began = time.thread_time()
        number, expected = self.choose(request.keys)
        self.result.decisions.append(time.thread_time() - began)
        pod = self.pods[number]
        self.sent[number].use(reversed(keys))
        pod.waiting.append(request)
        pod.expected.append(expected)
        if self.now >= pod.busy_until:
            self.start(pod)

    # -- routers ----------------------------------------------------------------------------------

    def choose(self, keys: list[int]) -> tuple[int, float]:
        """Return the pod of a request, and what the router expects that the pod spends on it, seconds."""
        count = len(keys)
        if self.router == "random":
            return self.choice.randrange(len(self.pods)), 0.0
        queues = [max(0.0, pod.busy_until - self.now) + sum(pod.expected) for pod in self.pods]
        had = [0] * len(self.pods)
        stored = 0
        if self.router == "approximate":
            had = [sent.prefix(keys) for sent in self.sent]
        elif self.router in ("events", "exact"):
            for name, match in score(self.index, SPACE, keys, now=self.now).matches.items():
                had[int(name.removeprefix("pod-"))] = match.blocks
            if self.router == "exact":
                stored = self.store.prefix(keys)
        work = [max(0, stored - mine) * OTHER_S + (count - max(stored, mine)) * PREFILL_S for mine in had]
        if self.router == "load":
            work = [count * PREFILL_S] * len(self.pods)
        best = min(range(len(self.pods)), key=lambda at: (queues[at] + work[at], self.choice.random()))
        return best, work[best]

    # -- pods ---------------------------------------------------------------------------------------

    def start(self, pod: Pod) -> None:
        """Begin with the pod's next request."""
        request = pod.waiting.popleft()
        pod.expected.popleft()
        keys = request.keys
        mine = pod.gpu.prefix(keys)
        stored = self.store.prefix(keys, mine)
        host = pod.number // PODS_OF_A_HOST
        spent = (len(keys) - stored) * PREFILL_S
        for key in keys[mine:stored]:
            spent += OWN_S if key % self.hosts == host else OTHER_S
        self.result.gpu += mine
        self.result.store += stored - mine
        self.result.computed += len(keys) - stored
        pod.worked += spent
        pod.busy_until = self.now + spent
        self.at(pod.busy_until, self.end, pod, request)

    def end(self, pod: Pod, request: Request) -> None:
        """Answer a request: the pod and the store have its blocks, the router hears of it, and the next one begins."""
        self.result.ttft.append(self.now - request.came)
        # A prompt's last block is the oldest: without those before it it is of no use.
        new, gone = pod.gpu.use(reversed(request.keys))
        self.store.use(reversed(request.keys))
        if self.router in ("events", "exact"):
            self.at(self.now + LATE_S, self.index.apply, pod.source, list(self.told(request, new, gone)))
        if request.left:
            pause = self.rng.expovariate(1 / PAUSE_S)
            self.at(self.now + pause, self.ask, request.tokens, request.keys, request.left)
        if pod.waiting:
            self.start(pod)

    @staticmethod
    def told(request: Request, new: Sequence[int], gone: list[int]) -> Iterable[Event]:
        """Yield the events of a pod: runs of blocks that are new, and blocks that are gone."""
        fresh = set(new)
        keys = request.keys
        for is_new, run in itertools.groupby(range(len(keys)), lambda at: keys[at] in fresh):
            places = list(run)
            if is_new:
                first, last = places[0], places[-1] + 1
                tokens = memoryview(request.tokens)[first * BLOCK * 4 : last * BLOCK * 4]
                yield Stored(keys[first:last], keys[first - 1] if first else None, tokens, BLOCK, _WHERE)
        if gone:
            yield Removed(gone, _WHERE)


def table(results: dict[str, Result]) -> str:
    """Return a row for each router."""
    rows = [f"{'router':<12} {'TTFT p50':>9} {'p90':>8} {'p99':>8} {'mean':>8}  {'gpu':>5} {'store':>5} {'comp.':>5}  "
            f"{'busiest/mean':>12} {'us a choice':>11}"]  # fmt: skip
    for name, found in results.items():
        blocks = found.gpu + found.store + found.computed
        shares = [f"{100 * part / blocks:4.0f}%" for part in (found.gpu, found.store, found.computed)]
        waited = *map(found.quantile, (0.5, 0.9, 0.99)), statistics.fmean(found.ttft)
        times = [f"{1e3 * each:6.0f}ms" for each in waited]
        rows.append(
            f"{name:<12}  {' '.join(times)}  {' '.join(shares)}  {_busiest(found):12.2f} "
            f"{1e6 * statistics.median(found.decisions):11.0f}"
        )
    return "\n".join(rows)


def _busiest(found: Result) -> float:
    """Return how much more than the mean pod the busiest one works."""
    return max(found.worked) / statistics.fmean(found.worked)


def drawn(pods: int, found: dict[float, dict[str, Result]]) -> str:
    """Return the charts of a run: the time to the first token and the busiest pod's work, by load."""
    figures: list[tuple[str, str, Callable[[Result], float]]] = [
        ("median time to the first token", "ms", lambda each: 1e3 * each.quantile(0.5)),
        ("p90 of the time to the first token", "ms", lambda each: 1e3 * each.quantile(0.9)),
        ("work of the busiest pod", "times the mean", _busiest),
    ]
    charts = []
    for title, unit, figure in figures:
        lines = [
            Line(name, colour, "", 2.0, [(load, figure(results[name])) for load, results in found.items()])
            for name, colour in COLOURS.items()
        ]
        log_y = unit == "ms"
        charts.append(chart(f"{pods} pods and a shared store: {title}", "load", unit, lines, log_y=log_y))
    return stacked(charts)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pods", type=int, default=8)
    parser.add_argument("--loads", default="0.3,0.5,0.7,0.8", help="shares of what pods can do that lose nothing")
    parser.add_argument("--requests", type=int, default=0, help="of each run (default: 600 for each pod)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--charts", type=Path, metavar="FOLDER", help="write routing-PODS.svg there")
    arguments = parser.parse_args()
    found: dict[float, dict[str, Result]] = {}
    requests = arguments.requests or 600 * arguments.pods
    for load in map(float, arguments.loads.split(",")):
        found[load] = {
            name: World(name, arguments.pods, load, requests, arguments.seed).run() for name in COLOURS
        }  # fmt: skip
        print(f"\n{arguments.pods} pods, load {load:g}, {requests} requests\n{table(found[load])}", flush=True)
        if arguments.charts is not None:  # also of a run that is ended before all of its loads
            path = arguments.charts / f"routing-{arguments.pods}.svg"
            path.write_text(drawn(arguments.pods, found), encoding="utf-8")


if __name__ == "__main__":
    main()
