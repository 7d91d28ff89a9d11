"""Synthetic traces of known structure, each from a seed: the same seed gives the same trace on any machine.

Sessions of one or several sources arrive at random (Poisson) and send their requests. Blocks have 512 tokens. A prompt
may end with some tokens more, which no cache keeps.

    system      one-off questions behind one of a few system prompts; some prompts are much more popular than others
    chat        conversations: each turn's prompt has the whole conversation so far; users answer after a minute or so
    agents      tasks of 4 to 30 steps in quick succession behind a long prefix of tools; each step appends a tool's
                output, and now and then an agent returns to an earlier step and goes on from there
    documents   long documents, of 60 to 240 blocks; a reader asks one to eight questions about a document, and popular
                documents have several readers
    scans       ``system``, and batch jobs: runs of up to 60 long prompts that never come back
    mixed       all of these, for models with blocks of 1, 2 and 8 units
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from ..errors import UsageError
from .formats import NO_MODEL, Request, Trace

#: Tokens in a block.
BLOCK_TOKENS: Final = 512
#: Requests per second of all sessions together, on average.
REQUESTS_PER_S: Final = 3.3
SYSTEM_PROMPTS: Final = 12
TOOL_SETS: Final = 4
DOCUMENTS: Final = 150
#: Models of ``mixed``: units of a block, and share of the sessions.
MIXED_MODELS: Final = {"small": (1, 5), "medium": (2, 3), "large": (8, 1)}

#: A session: (milliseconds since the previous request, blocks of the prompt) of each request.
_Session = Iterator[tuple[float, tuple[int, ...]]]


class _World:
    """The random numbers of a trace, its next fresh block, and what the sessions of one model share."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self._next = 0
        self._shared: dict[tuple[str, str], list[tuple[int, ...]]] = {}

    def fresh(self, least: int, most: int) -> tuple[int, ...]:
        """Return ``least`` to ``most`` new blocks."""
        first = self._next
        self._next += self.draw.randint(least, most)
        return tuple(range(first, self._next))

    def popular(self, what: str, model: str, count: int, least: int, most: int) -> tuple[int, ...]:
        """Return one of ``count`` prefixes that all sessions of a model share; number n is drawn as often as 1/n."""
        prefixes = self._shared.setdefault((what, model), [])
        while len(prefixes) < count:
            prefixes.append(self.fresh(least, most))
        return self.draw.choices(prefixes, [1 / (rank + 1) for rank in range(count)])[0]


def _question(world: _World, model: str) -> _Session:
    yield 0.0, world.popular("system", model, SYSTEM_PROMPTS, 4, 24) + world.fresh(1, 6)


def _conversation(world: _World, model: str) -> _Session:
    blocks = world.popular("chat", model, 3, 1, 3) + world.fresh(1, 24)
    yield 0.0, blocks
    while world.draw.random() < 0.7:
        blocks += world.fresh(1, 6)
        yield 1000 * world.draw.lognormvariate(4.2, 0.8), blocks


def _task(world: _World, model: str) -> _Session:
    steps = [world.popular("tools", model, TOOL_SETS, 12, 40) + world.fresh(1, 8)]
    yield 0.0, steps[0]
    for _ in range(world.draw.randint(3, 29)):
        before = world.draw.choice(steps) if world.draw.random() < 0.1 else steps[-1]
        steps.append(before + world.fresh(1, 5))
        yield 1000 * (1 + world.draw.expovariate(0.25)), steps[-1]


def _reader(world: _World, model: str) -> _Session:
    document = world.popular("documents", model, DOCUMENTS, 60, 240)
    yield 0.0, document + world.fresh(1, 1)
    for _ in range(world.draw.randint(0, 7)):
        yield 1000 * world.draw.lognormvariate(3.4, 0.7), document + world.fresh(1, 2)


def _scan(world: _World, model: str) -> _Session:
    for number in range(world.draw.randint(20, 60)):
        yield 50.0 if number else 0.0, world.fresh(20, 80)


class _Source(NamedTuple):
    """A kind of session, and the requests that one sends on average."""

    play: Callable[[_World, str], _Session]
    requests: float


_QUESTION: Final = _Source(_question, 1.0)
_CONVERSATION: Final = _Source(_conversation, 3.3)
_TASK: Final = _Source(_task, 17.0)
_READER: Final = _Source(_reader, 4.5)
_SCAN: Final = _Source(_scan, 40.0)

#: Kind -> its sources, each with its share of the requests.
_KINDS: Final[dict[str, tuple[tuple[_Source, float], ...]]] = {
    "system": ((_QUESTION, 1.0),),
    "chat": ((_CONVERSATION, 1.0),),
    "agents": ((_TASK, 1.0),),
    "documents": ((_READER, 1.0),),
    "scans": ((_QUESTION, 0.8), (_SCAN, 0.2)),
    "mixed": ((_QUESTION, 0.25), (_CONVERSATION, 0.3), (_TASK, 0.3), (_READER, 0.05), (_SCAN, 0.1)),
}
KINDS: Final = tuple(_KINDS)


def generate(kind: str, seed: int, requests: int = 4000) -> Trace:
    """Return a trace of a kind with so many requests. O(blocks). Raises UsageError."""
    if kind not in _KINDS:
        raise UsageError(f"{kind!r} is no kind of trace; choose from {', '.join(KINDS)}")
    if requests < 1:
        raise UsageError(f"a trace of {requests} requests: 1 at least")
    world = _World(seed)
    models = MIXED_MODELS if kind == "mixed" else {NO_MODEL: (1, 1)}
    arrivals = _arrivals(world, kind, models)
    start, model, session = next(arrivals)
    # (time, order, model, blocks, session): the next request of each session that has begun.
    waiting: list[tuple[float, int, str, tuple[int, ...], _Session]] = []
    found: list[Request] = []
    order = 0
    while len(found) < requests:
        while not waiting or start <= waiting[0][0]:
            for wait, blocks in session:
                heapq.heappush(waiting, (start + wait, order, model, blocks, session))
                order += 1
                break
            start, model, session = next(arrivals)
        at, _, whose, blocks, playing = heapq.heappop(waiting)
        tokens = BLOCK_TOKENS * len(blocks) + world.draw.randrange(BLOCK_TOKENS)
        found.append(Request(round(at, 3), tokens, blocks, whose))
        for wait, more in playing:
            heapq.heappush(waiting, (at + wait, order, whose, more, playing))
            order += 1
            break
    units = {name: size for name, (size, _) in models.items()}
    return Trace(f"{kind}, seed {seed}", tuple(found), BLOCK_TOKENS, units)


def _arrivals(world: _World, kind: str, models: dict[str, tuple[int, int]]) -> Iterator[tuple[float, str, _Session]]:
    """Yield sessions without end: their time in milliseconds, their model, and their requests."""
    sources = [source for source, _ in _KINDS[kind]]
    rates = [REQUESTS_PER_S * share / source.requests for source, share in _KINDS[kind]]
    names = list(models)
    weights = [weight for _, weight in models.values()]
    at = 0.0
    while True:
        at += 1000 * world.draw.expovariate(sum(rates))
        source = world.draw.choices(sources, rates)[0]
        model = world.draw.choices(names, weights)[0]
        yield at, model, source.play(world, model)
