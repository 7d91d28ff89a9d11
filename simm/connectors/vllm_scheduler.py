"""The scheduler's half of SiMM's connector for vLLM: what is stored of a prompt, and which blocks go where.

Nothing here waits for a server: lookups run in threads, and vLLM is told to ask again later. One that takes longer than
the deadline is a miss.

Generations
-----------
A lookup reads the generation (``keyspace.py``), and what is loaded or stored for its request goes under just that one.
So a reset while a request runs leaves what it still stores under the generation before, where no later request looks.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ..client import Client
from ..host import fork
from ..host.threads import Pool
from ..schemes.groups import first_needed, restorable
from ..schemes.vllm import connector_keys, merged
from .complaints import Complaints
from .keyspace import NOT_FLUSHED, Keyspace
from .vllm_plan import Block, Group, Load, Plan, Report, supplied

__all__ = ["SchedulerSide", "Stored"]

log = logging.getLogger("simm.connectors.vllm")

_THREADS: Final = 2
#: Blocks on their way to the store whose events are remembered.
_EVENTS_MAX: Final = 1 << 16
#: A generation that could not be read is read again after so long, seconds.
_READ_AGAIN_S: Final = 1.0


class Stored(NamedTuple):
    """What an event says of a block that was stored."""

    group: int
    hash: bytes
    parent: bytes | None
    tokens: list[int]
    lora: tuple[int, str] | None
    #: What its hash covers beside its tokens and its parent, as vLLM tells it.
    extras: list[Any] | None = None


class _Found(NamedTuple):
    """The answer to a lookup: the tokens that can be had, the generation, and whose memory each part of them is in."""

    tokens: int
    generation: str | None
    #: For each ``align`` tokens of them whether they are in this host's.
    here: Sequence[bool] = ()


@dataclass(eq=False)
class _Lookup:
    """A question to the store: of which tokens it is, and the answer, how many of them can be had."""

    computed: int
    most: int
    resets: int
    #: When it is late, monotonic seconds.
    until: float
    #: Those of the blocks, by group.
    hashes: Sequence[Sequence[bytes]]
    answer: _Found | None = None
    #: What was raised instead of an answer.
    error: Exception | None = None


class _Call:
    """A call of :meth:`SchedulerSide._look_all`."""

    #: None while it is given to a thread.
    job: Future[None] | None = None


@dataclass
class _Tracked:
    """What is known of a request."""

    request: Any
    generation: str | None = None
    here: Sequence[bool] = ()
    lookup: _Lookup | None = None
    #: A load of it has failed: vLLM asks again, and is told to compute.
    failed: bool = False
    #: Tokens whose blocks need no storing.
    saved: int | None = None
    hashes: dict[int, list[bytes]] = field(default_factory=dict)


class SchedulerSide:
    """Decides what is loaded and stored. vLLM's scheduler calls it in one thread.

    Args:
        client, keyspace: the store.
        groups: vLLM's KV cache groups.
        hash_tokens: tokens that one of a request's block hashes covers.
        align: a number of tokens that is a multiple of each group's block.
        layerwise: requests are run while they load.
        loads, saves: what this engine does with the store.
        events: remember what events need.
        extras: returns what the hash of a request's block covers beside tokens, for the tokens from one to another.
        tell: is told the generation that is used, at each step, and before whatever is stored or looked for under it.
    """

    def __init__(
        self, client: Client, keyspace: Keyspace, groups: Sequence[Group], hash_tokens: int, align: int, *,
        layerwise: bool = False, loads: bool = True, saves: bool = True, events: bool = False,
        extras: Callable[[Any, int, int], list[Any] | None] | None = None, tell: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self._client = client
        self._keyspace = keyspace
        self._groups = list(groups)
        self._hash_tokens = hash_tokens
        self._align = align
        self._layerwise = layerwise
        self._loads, self._saves = loads, saves
        self._extras = extras
        self._tell = tell
        self._complain = Complaints(log)
        self._threads = Pool(_THREADS, "simm-vllm-lookup")
        #: Of the ranks' memory, as far as it differs.
        self.identities: list[str] = []
        self._requests: dict[str, _Tracked] = {}
        #: Lookups that no thread has begun, oldest first. Those that nobody waits for any more are taken out.
        self._waiting: deque[_Lookup] = deque()
        #: Calls of :meth:`_look_all` that no thread has begun.
        self._calls: set[_Call] = set()
        #: Loads of the step that is being scheduled.
        self._due: list[Load] = []
        #: The last generation that was read.
        self._generation: str | None = None
        #: Who reads it, and when it is read again if that fails, monotonic seconds.
        self._reading: Future[str | None] | None = None
        self._read_again = 0.0
        self._resets = 0
        #: A reset has failed: what is stored may be of other weights.
        self._muted = False
        self._failures = 0
        #: Plans that count. Workers see from their numbers whether one was lost.
        self._plans = 0
        #: (group, hash): what an event will say, and how many ranks have not stored it yet. Oldest first.
        self._expected: OrderedDict[tuple[int, bytes], list[Any]] | None = OrderedDict() if events else None
        self._stored: list[Stored] = []
        self._gone: list[tuple[int, bytes]] = []
        self.counts: dict[str, float] = {}
        fork.in_child(self._after_fork)

    def use(self, identities: Sequence[str]) -> None:
        """Take what the workers say of their memory: the identity of each rank. Nothing is looked for before."""
        self.identities = list(dict.fromkeys(identities))
        self._read_soon(anew=True)

    def _after_fork(self) -> None:
        """Forget what runs in threads: only the parent has them."""
        self._reading = None
        self._calls.clear()
        self._waiting.clear()
        for tracked in self._requests.values():
            self._drop(tracked)

    def _count(self, name: str, number: float = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + number

    # -- lookups ----------------------------------------------------------------------------------

    def _hashes(self, tracked: _Tracked, position: int) -> list[bytes]:
        """Return the hashes of a request's full blocks in a group, a list that grows with it. O(new blocks)."""
        factor = self._groups[position].block_tokens // self._hash_tokens
        own = tracked.request.block_hashes
        known = tracked.hashes.setdefault(position, [])
        done = len(known) * factor
        # A session's next prompt takes the end of the one before away. A hash covers all those before it.
        if done and (len(own) < done or own[done - 1] != known[-1]):
            known.clear()
            done = 0
        known += map(bytes, merged(own[done:], factor))
        return known

    def _read_soon(self, *, anew: bool = False) -> None:
        """Have the generation read in a thread. Does not wait, never raises.

        Not while one reads it, nor within ``_READ_AGAIN_S``, unless it is ``anew``: what is read now may be outdated.
        Where it is not read, as without a thread or without servers, a later step has it read, or a lookup does.
        """
        now = time.monotonic()
        if anew or (now >= self._read_again and (self._reading is None or self._reading.done())):
            self._reading = self._threads.hand_over(self._read_generation)
            self._read_again = now + _READ_AGAIN_S

    def _read_generation(self) -> str | None:
        try:
            resets = self._resets
            generation = self._keyspace.generation()
        except Exception as exc:
            self._complain("generation", "the generation cannot be read: %s", str(exc), trace=True)
            return None
        if generation is not None and resets == self._resets:
            self._generation = generation
            self._say(generation)
        return generation

    def _say(self, generation: str | None) -> None:
        if self._tell is not None and generation is not None and self.identities:
            self._tell(generation)

    def _ask(self, lookup: _Lookup) -> bool:
        """Have a thread answer a lookup; return False if none can. Does not wait."""
        self._waiting.append(lookup)
        if len(self._calls) >= _THREADS:
            # A pool ends a job without its call where there is no memory.
            self._calls -= {call for call in list(self._calls) if call.job is not None and call.job.done()}
        if len(self._calls) >= _THREADS:  # they are to begin yet, and will come to this one
            return True
        call = _Call()
        try:
            self._calls.add(call)
            call.job = self._threads.hand_over(self._look_all, call)
            if call.job is not None:
                return True
        except BaseException:
            self._calls.discard(call)
            raise
        self._calls.discard(call)
        return not self._take_back(lookup)

    def _take_back(self, lookup: _Lookup) -> bool:
        """Return whether no thread had begun a lookup; none does then. O(lookups that wait)."""
        try:
            self._waiting.remove(lookup)
        except (ValueError, IndexError):  # IndexError: a thread has taken another one meanwhile
            return False
        return True

    def _drop(self, tracked: _Tracked) -> None:
        """Forget a request's lookup, which nobody waits for any more."""
        lookup, tracked.lookup = tracked.lookup, None
        if lookup is not None and lookup.answer is None and lookup.error is None:  # else a thread has taken it
            self._take_back(lookup)

    def _look_all(self, call: _Call) -> None:
        """Answer all lookups that wait. Runs in a thread."""
        self._calls.discard(call)  # before the first look: what comes from now on has a call of its own
        while True:
            try:
                lookup = self._waiting.popleft()
            except IndexError:
                return
            if time.monotonic() < lookup.until:  # else it is a miss already
                self._answer(lookup)

    def _answer(self, lookup: _Lookup) -> None:
        try:
            # None: it is late, which :meth:`_matched` counts.
            lookup.answer = self._look(lookup)
        except Exception as exc:
            lookup.error = exc

    def _look(self, lookup: _Lookup) -> _Found | None:
        """Return how many tokens can be had, and under which generation; None if it is late. Runs in a thread."""
        computed, most, hashes = lookup.computed, lookup.most, lookup.hashes
        generation = self._read_generation()
        if time.monotonic() >= lookup.until:
            return None
        if generation is None:
            return _Found(computed, generation)
        names = [
            name
            for identity in self.identities
            for group, each in enumerate(hashes)
            for name in connector_keys(each, identity, group=group)
        ]
        digests = self._keyspace.digests(generation, names)
        of_groups = _of_groups(self._client.exists_digests(digests), hashes)
        tokens = restorable(self._groups, of_groups, computed, most, self._align)
        if tokens <= computed:
            return _Found(tokens, generation)
        here = _of_groups(self._client.mapped(digests), hashes)
        return _Found(tokens, generation, supplied(self._groups, here, computed, tokens, self._align))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond those computed can be loaded, None for later; and whether without the engine.

        Never waits, never raises.
        """
        try:
            return self._matched(request, computed)
        except Exception as exc:
            self._complain("lookup", "lookup failed, vLLM goes on without it: %s", str(exc), trace=True)
            return 0, False

    def _matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        tracked = self._track(request)
        tokens = min(int(request.num_tokens) - 1, len(request.block_hashes) * self._hash_tokens)
        most = tokens // self._align * self._align
        computed = computed // self._align * self._align
        if tracked.failed or self._muted or not self._loads or not self.identities or most <= computed:
            return 0, False
        lookup = tracked.lookup
        if lookup is None or (lookup.computed, lookup.most, lookup.resets) != (computed, most, self._resets):
            self._drop(tracked)
            hashes = [
                self._hashes(tracked, at)[computed // group.block_tokens : most // group.block_tokens]
                for at, group in enumerate(self._groups)
            ]
            until = time.monotonic() + self._client.deadline_s
            lookup = _Lookup(computed, most, self._resets, until, hashes)
            if not self._ask(lookup):
                self._complain("lookup", "no lookup: closed, or no thread can be started")
                return 0, False
            tracked.lookup = lookup
            self._count("lookups")
        if (error := lookup.error) is not None:
            # A miss from now on: an exception that is raised at each step holds more frames each time.
            lookup.answer, lookup.error = _Found(computed, tracked.generation), None
            raise error
        if (found := lookup.answer) is None:
            if time.monotonic() < lookup.until:
                return None, False
            self._take_back(lookup)
            lookup.answer = _Found(computed, tracked.generation)
            self._count("lookups_late")
            self._complain("late", "a lookup took longer than %.1f s: a miss", self._client.deadline_s)
            return 0, False
        tokens, tracked.generation, tracked.here = found
        if tokens <= computed:
            return 0, False
        return tokens - computed, not self._layerwise

    def found_here(self, request: Any, tokens: int) -> int:
        """Return how many of the tokens that were found for a request are in this host's memory."""
        tracked = self._requests.get(request.request_id)
        return sum(tracked.here[: tokens // self._align]) * self._align if tracked is not None else 0

    # -- loads ------------------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external: int) -> None:
        """Take the blocks into which a request's ``external`` tokens go."""
        tracked = self._track(request)
        lookup = tracked.lookup
        self._drop(tracked)
        if external <= 0:
            return
        computed = lookup.computed if lookup is not None else 0
        tokens = computed + external
        blocks = []
        for at, group in enumerate(self._groups):
            hashes = self._hashes(tracked, at)
            first = max(first_needed(group, tokens), computed // group.block_tokens)
            numbers = range(first, tokens // group.block_tokens)
            # Block 0 is vLLM's empty one.
            blocks += [Block(at, int(block_ids[at][each]), hashes[each]) for each in numbers if block_ids[at][each]]
        current = lookup is not None and lookup.resets == self._resets
        self._due.append(Load(request.request_id, tracked.generation if current else None, blocks))
        self._count("tokens_found", external)

    # -- a step -----------------------------------------------------------------------------------

    def plan(self, output: Any) -> Plan:
        """Return what the workers do in a step."""
        plan = Plan(self._due, failures=self._failures, idle=not output.num_scheduled_tokens)
        self._plans += plan.counts
        plan.number = self._plans
        self._due = []
        self._say(self._generation)
        if not self._saves or not self.identities or self._muted:
            return plan
        scheduled = _scheduled(output)
        # Where nothing is loaded no lookup reads it, nor hears of others' resets.
        if scheduled and (self._generation is None or not self._loads):
            self._read_soon()
        for number, computed, anew in scheduled:
            tracked_or_none = self._requests.get(number)
            if tracked_or_none is not None:
                try:
                    self._save(plan, tracked_or_none, computed, anew, output)
                except Exception as exc:
                    self._complain("plan", "blocks are not stored: %s", str(exc), trace=True)
        return plan

    def _save(self, plan: Plan, tracked: _Tracked, computed: int, anew: bool, output: Any) -> None:
        """Add the blocks that a request fills in this step."""
        number = tracked.request.request_id
        if anew and tracked.generation is None:
            tracked.generation = self._generation
        generation = tracked.generation  # if none was known then, a reset may have come since: nothing is stored
        start = computed if anew or tracked.saved is None else min(tracked.saved, computed)
        known = len(tracked.request.block_hashes) * self._hash_tokens
        tracked.saved = end = max(start, min(computed + int(output.num_scheduled_tokens[number]), known))
        if generation is None or start // self._hash_tokens == end // self._hash_tokens:
            return
        block_ids = output.kv_connector_block_state.get_block_ids(number)
        for at, group in enumerate(self._groups):
            size = group.block_tokens
            hashes = self._hashes(tracked, at)
            for block in range(start // size, end // size):
                if block < len(block_ids[at]) and block_ids[at][block]:  # else out of the window already
                    plan.saves.setdefault(generation, []).append(Block(at, int(block_ids[at][block]), hashes[block]))
                    self._expect(tracked, at, block)

    # -- what the workers say -------------------------------------------------------------------------

    def heard(self, report: Report) -> None:
        """Take a report of the workers."""
        self._failures = max(self._failures, report.failures)
        if report.broken:  # of one rank: the others compute on what it has sent them
            self._saves = False
        for number in report.failed:
            if number in self._requests:
                self._requests[number].failed = True
        if self._expected is None:
            return
        for key in report.stored:
            expected = self._expected.get(key)
            if expected is not None:
                expected[1] -= 1
                if expected[1] <= 0:
                    del self._expected[key]
                    self._stored.append(expected[0])
        self._gone += report.gone

    def _expect(self, tracked: _Tracked, at: int, block: int) -> None:
        """Remember what the event of a block will say."""
        if self._expected is None:
            return
        size, hashes, request = self._groups[at].block_tokens, self._hashes(tracked, at), tracked.request
        lora = getattr(request, "lora_request", None)
        first, end = block * size, (block + 1) * size
        extras = None
        try:
            if self._extras is not None:
                extras = self._extras(request, first, end)
        except Exception as exc:  # without them it would be taken for a block of its tokens alone
            self._complain("events", "a block that is stored is in no event: %s", str(exc), trace=True)
            return
        told = Stored(
            at, hashes[block], hashes[block - 1] if block else None, list(request.all_token_ids[first:end]),
            (int(lora.lora_int_id), str(lora.lora_name)) if lora is not None else None, extras,
        )  # fmt: skip
        self._expected[at, hashes[block]] = [told, len(self.identities)]
        while len(self._expected) > _EVENTS_MAX:
            self._expected.popitem(last=False)

    def running(self) -> list[str]:
        """Return the numbers of all requests that have not ended."""
        return list(self._requests)

    def take_events(self) -> tuple[list[Stored], list[tuple[int, bytes]]]:
        """Return the blocks that were stored, and those that were found gone, since the last call."""
        stored, gone = self._stored, self._gone
        self._stored, self._gone = [], []
        return stored, gone

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        counts, self.counts = self.counts, {}
        return counts

    # -- the rest -----------------------------------------------------------------------------------

    def _track(self, request: Any) -> _Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            if tracked is not None:
                self._drop(tracked)
            tracked = self._requests[request.request_id] = _Tracked(request)
        return tracked

    def added(self, request: Any) -> None:
        """Begin with a request."""
        self._track(request)

    def finished(self, request: Any) -> None:
        """Forget a request."""
        tracked = self._requests.pop(request.request_id, None)
        if tracked is not None:
            self._drop(tracked)

    def reset(self) -> None:
        """Make what is stored a miss from now on. If that fails, nothing is looked for until a reset that does not.

        Where the store did not take it, this engine keeps to it, and a thread stores it when the store can be reached.
        """
        try:
            self._muted = True
            if not self._keyspace.flush_until_seen():
                log.warning("the reset has not reached other engines: %s", NOT_FLUSHED)
            self._muted = False
        except Exception as exc:
            self._complain("reset", "the reset failed, SiMM is not used until the next one: %s", str(exc), trace=True)
        finally:  # what lookups have read until now is forgotten
            self._resets += 1
            self._generation = None
            for tracked in self._requests.values():
                self._drop(tracked)
        self._read_soon(anew=True)

    def close(self) -> None:
        """End the lookups."""
        self._waiting.clear()
        self._keyspace.close()
        self._threads.shutdown(wait=True, cancel_futures=True)


def _of_groups(answers: Sequence[bool], hashes: Sequence[Sequence[bytes]]) -> list[list[bool]]:
    """Return by group and block what all ranks agree on. ``answers`` are by rank, group and block."""
    per = sum(map(len, hashes))
    found = [all(answers[at::per]) for at in range(per)]
    ends = list(itertools.accumulate(map(len, hashes)))
    return [found[end - len(each) : end] for end, each in zip(ends, hashes)]


def _scheduled(output: Any) -> list[tuple[str, int, bool]]:
    """Return the requests of a step: their number, the tokens computed before, and whether they begin or resume."""
    found = [(each.req_id, int(each.num_computed_tokens), True) for each in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    resumed = cached.resumed_req_ids
    found += [(each, int(done), each in resumed) for each, done in zip(cached.req_ids, cached.num_computed_tokens)]
    return found
