"""What is kept and what is a group, through a move, evictions and deaths, in every order of events.

Both workers are real stores (:class:`simm.arena.store.Store`), with the real shard words, marks, groups, evictions out
of full sets and recoveries; the mover's groups come together in a real :class:`simm.arena.marks.arrivals.Arrivals`. A
store cannot be copied, so a worker's state is known by what can be seen of it and by one history that leads there.
:class:`Worker` repeats that history for each event, once, and remembers what follows. Shards, maps and reads are the
subject of ``shard_move.py``. The model restates what the mover does in which order (``server/migration.py``).

There are two keys of one shard, and one move from worker 0 to worker 1. A state:

    now      seconds
    workers  by worker: the number of its state
    mover    stage, page, the mark of that page as it was read, groups that wait to be made, ``Arrivals`` so far
    kept     by key: what must hold: (class, until, where it was said)
    group    0: the keys need not be a group; ENDED: they are none; else 1 + the worker where they are one
    moved    worker 0 has given the shard up
    keeps, puts, deletes, evictions, deaths, groups: the events of each kind that are left

What must hold, after what the answers said:

* A hard kept value is not evicted before its time, and no death loses it. Its copy is so from its first moment on.
* The last word counts, whether it was said at the old owner or at the new one: what is kept is so for at least that
  long, and what is not kept any more is not kept again by a mark of before.
* Of a group, all members are there or none, once the move has ended. Until then it may fall apart.

The documented exceptions: what has not been copied is not kept at the new owner, and a death of the new
owner's worker ends the move, so that what was not carried then is not kept.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from simm.arena.marks.arrivals import Arrivals
from simm.arena.marks.awaited import AwaitedMarks
from simm.arena.marks.groups import Groups, members_of, number_of
from simm.arena.marks.keeping import Keeping
from simm.arena.marks.kept import HARD, SOFT, unpack
from simm.arena.marks.told import Told
from simm.arena.store import Store
from simm.constants import SHARD_COUNT
from simm.wire.messages import ABSENT, ShardRole, Status
from simm.wire.shard_set import FROZEN, MOVING

#: Two keys of shard 0. A table of two sets is used, so that each may be evicted for the other one.
KEYS: Final = tuple(bytes((0, 0, number, *bytes(13))) for number in (1, 2))
PAIR: Final = (0, 1)
NUMBER: Final = number_of(KEYS)
SLOTS: Final = 16
#: A client has deleted a member during the move: no mark of before makes these keys a group again.
ENDED: Final = -1
ARENA_BYTES: Final = 8 << 20
#: What is evicted makes room for this one, which is never stored.
OTHER: Final = bytes((0, 0, 9, *bytes(13)))

BUGS: Final = {
    "mark_wins": "a mover's mark counts whatever was said at the new owner",
    "mark_after_delete": "a mover's mark counts for a value that was deleted and put again at the new owner",
    "group_wins": "a mover's group is made although a member was deleted and put again at the new owner",
    "no_marks": "the mover carries no marks",
    "unheld": "eviction takes hard kept values as it takes others",
    "private": "what is kept is not stored in the slots",
    "replaced": "an overwrite ends the keeping",
    "half_marked": "a successor takes a group of which it finds some members for whole",
    "orphans_stay": "the others stay when a member leaves",
    "orphans_forgotten": "a successor does not drop what is left of a group",
    "no_groups": "the mover carries no groups",
    "early_finish": "the mover sends FINISH before the groups of the last page",
    "late_marks": "the mover sends the mark of a value after its copy",
    "not_awaited": "a mark that comes before its value is forgotten",
}

#: The smallest model that shows each bug.
SMALLEST: Final[dict[str, dict[str, Any]]] = {
    "mark_wins": {"keeps": 2, "puts": 1, "deletes": 0, "evictions": 0, "deaths": 0, "groups": 0},
    "mark_after_delete": {"keeps": 1, "puts": 1, "evictions": 0, "deaths": 0, "groups": 0},
    "group_wins": {"keeps": 0, "puts": 1, "evictions": 0, "deaths": 0},
    "no_marks": {"keeps": 1, "deletes": 0, "evictions": 0, "deaths": 0, "groups": 0},
    "unheld": {"keeps": 1, "deletes": 0, "deaths": 0, "groups": 0},
    "private": {"keeps": 1, "deletes": 0, "evictions": 0, "groups": 0},
    "replaced": {"keeps": 1, "puts": 1, "deletes": 0, "evictions": 0, "deaths": 0, "groups": 0},
    "half_marked": {"keeps": 0, "deletes": 1, "evictions": 0},
    "orphans_stay": {"keeps": 0, "deaths": 0},
    "orphans_forgotten": {"keeps": 0},
    "no_groups": {"keeps": 0, "evictions": 0, "deaths": 0},
    "early_finish": {"keeps": 0, "deletes": 0, "evictions": 0, "deaths": 0},
    "late_marks": {"keeps": 1, "deletes": 0, "deaths": 0, "groups": 0},
    "not_awaited": {"keeps": 1, "deletes": 0, "deaths": 0, "groups": 0},
}


class Died(BaseException):
    """A worker's process ends here."""


class Seen(NamedTuple):
    """What can be seen of a worker's store. Two stores that look alike behave alike.

    ``entries``: by key, None without one: (class, until, other members of its group, mark in the slot).
    """

    word: int
    role: int
    entries: tuple[tuple[int, int, tuple[int, ...], int] | None, ...]
    dropped: tuple[bool, ...]
    kept_told: tuple[bool, ...]
    awaited: tuple[tuple[int, float] | None, ...]
    group_told: tuple[bool, ...]

    @property
    def there(self) -> tuple[bool, ...]:
        """By key: is it stored?"""
        return tuple(entry is not None for entry in self.entries)


class Worker:
    """Applies events to real stores: :meth:`play` takes and returns numbers of states, :attr:`seen` describes them."""

    def __init__(self, bugs: frozenset[str]) -> None:
        self.bugs = bugs
        self._memory = mmap.mmap(-1, ARENA_BYTES)
        self._numbers: dict[Seen, int] = {}
        self.seen: list[Seen] = []
        self._ways: list[tuple[tuple[Any, ...], ...]] = []
        self.play = lru_cache(maxsize=None)(self._play)

    def begin(self, role: int, epoch: int, stored: bool) -> int:
        """Return the state of a worker with a role by its first map, and with all values or none."""
        way: tuple[tuple[Any, ...], ...] = (("map", epoch, role),)
        if stored:
            way += tuple(("put", key) for key in PAIR)
        store = self._again(way)
        return self._number(store, way)

    def _number(self, store: Store, way: tuple[tuple[Any, ...], ...]) -> int:
        seen = _look(store)
        number = self._numbers.get(seen)
        if number is None:
            number = self._numbers[seen] = len(self.seen)
            self.seen.append(seen)
            self._ways.append(way)
        store.release()
        return number

    def _again(self, way: tuple[tuple[Any, ...], ...]) -> Store:
        whole = memoryview(self._memory)
        store = Store.create(self._memory, slots=SLOTS)
        whole[: store.geometry.data_offset] = bytes(store.geometry.data_offset)
        whole[store.geometry.data_end :] = bytes(len(whole) - store.geometry.data_end)
        store = Store.create(self._memory, slots=SLOTS)
        for event in way:
            store, _ = self._apply(store, event)
        return store

    def _play(self, number: int, *event: Any) -> tuple[int, Any]:
        """Return the state after an event, and its answer."""
        way = self._ways[number]
        store, answer = self._apply(self._again(way), event)
        return self._number(store, (*way, event)), answer

    def _apply(self, store: Store, event: tuple[Any, ...]) -> tuple[Store, Any]:
        """Apply an event to a store. Return the store, another one after a death, and what was answered."""
        name, *details = event
        answer: Any = None
        if name == "map":
            epoch, role = details
            sinces, roles = np.zeros(SHARD_COUNT, np.uint64), np.zeros(SHARD_COUNT, np.uint8)
            sinces[0], roles[0] = epoch if role else 0, role
            store.begin_shards(epoch, sinces.tobytes(), roles.tobytes())
            while store.drop_some():
                pass
        elif name == "freeze":
            answer = store.freeze(details[0], [0])
        elif name == "adopt":
            answer = store.shard_words.adopt(details[0], [0], [0])
        elif name == "finish":
            answer = store.shard_words.finish([0], details[0])
        elif name in ("put", "copy"):
            answer = self._put(store, details[0], copies=details[1] if name == "copy" else 0)
        elif name == "delete":
            (answer,) = store.delete([KEYS[details[0]]])
        elif name == "evict":
            answer = self._evict(store, details[0])
        elif name == "keep":
            key, how, seconds, now = details
            (answer,) = store.keep([KEYS[key]], how, seconds, now)
        elif name == "carry":
            key, how, seconds, now, epoch = details
            (answer,) = store.keep([KEYS[key]], how, seconds, now, epoch)
        elif name == "group":
            (answer,) = store.groups.mark_many([KEYS], *details)
        elif name == "expire":
            store.keeping.expire(details[0])
        else:
            assert name == "die"
            store = self._die(store, *details)
        store.apply_pending()
        return store, answer

    def _put(self, store: Store, key: int, copies: int) -> int:
        session = store.sessions.open(os.getpid(), 1, "model")
        session.copies = copies
        ((number, _offset, _chunk),) = store.sessions.grant(session, 64, 1)
        slot = store.table.lookup(KEYS[key])
        (status,) = store.commit(session, [(KEYS[key], number, 64, 0, 0, ABSENT if copies else 0)])
        store.apply_pending()
        store.sessions.end(session)
        if "replaced" in self.bugs and slot >= 0 and status == Status.OK:
            store.keeping.end(slot)
        return int(status)

    def _evict(self, store: Store, key: int) -> bool:
        """Evict a key for room in its sets, the others being younger. Return False if another one had to go."""
        slot = store.table.lookup(KEYS[key])
        live = [other for other in range(SLOTS) if store.table.offset(other)]
        store.table.candidates = lambda _digest: live  # type: ignore[assignment]  # full, but for what is held
        for other in range(SLOTS):
            store.visited[other] = other != slot
        if "unheld" in self.bugs:
            store.space.kept.end(slot)
        went = store._evict_from_sets(OTHER)
        return went and store.table.lookup(KEYS[key]) < 0

    def _die(self, store: Store, now: int, cut: str = "", key: int = 0) -> Store:
        """End a worker and begin another. ``cut``: in the middle of what it dies."""
        groups = store.groups
        if cut == "group":  # one member is marked
            marked = groups._set_number

            def mark(slot: int, number: int) -> None:
                marked(slot, number)
                raise Died

            groups._set_number = mark  # type: ignore[method-assign]
        elif cut == "delete":  # the others are not dropped yet
            groups.drop_orphans = _dies  # type: ignore[method-assign]
        try:
            if cut == "group":
                groups.mark_many([KEYS])
            elif cut == "delete":
                store.delete([KEYS[key]])
        except Died:
            pass
        if "private" in self.bugs:
            for slot in range(SLOTS):
                if store.table.offset(slot):
                    store.table.set_marks(slot, store.table.marks(slot) >> 32 << 32)
        roles, since = store.shard_words.roles.tobytes(), store.shard_words.since.tobytes()
        epoch = store.epoch
        found = Store.recover(self._memory, "model")
        found.keeping.begin(now)
        found.begin_shards(epoch, since, roles)
        while found.drop_some():
            pass
        return found


def _dies() -> None:
    raise Died


def _look(store: Store) -> Seen:
    words, table = store.shard_words, store.table
    words.check()
    entries: list[tuple[int, int, tuple[int, ...], int] | None] = []
    slots = [table.lookup(digest) for digest in KEYS]
    for slot in slots:
        if slot < 0:
            entries.append(None)
            continue
        kept = store.space.kept.get(slot)
        mark = table.marks(slot)
        how, until = (0, 0) if kept is None else (kept.how, kept.until)
        assert unpack(mark) == (how, until), "the slot says something else than the worker"
        mates = tuple(sorted(slots.index(mate) for mate in store.groups._ring(slot) if mate != slot))
        entries.append((how, until, mates, mark >> 32))
    word = words.words[0]

    def told(what: Told) -> tuple[bool, ...]:
        return tuple(bool(word) and what._told.get(digest) == word for digest in KEYS)

    marks = store.keeping.awaited.marks if word else {}
    awaited = tuple(marks[digest][:2] if digest in marks else None for digest in KEYS)
    return Seen(
        word, int(words.roles[0]), tuple(entries), tuple(digest in words.dropped for digest in KEYS),
        told(store.keeping.told), awaited, told(store.groups.told),
    )  # fmt: skip


class Mover(NamedTuple):
    """The mover. ``stage``: 0 freezes, 1 adopts, 2 reads a page's marks, 3 keeps, 4 copies, 5 groups, 6 finishes."""

    stage: int = 0
    page: int = 0
    #: The mark that was read: (class, seconds).
    mark: tuple[int, int] = (0, 0)
    group: int = 0
    #: The keys whose group's number has arrived.
    arrived: tuple[int, ...] = ()


class State(NamedTuple):
    """See the module's docstring. ``mover``: None before the move and after it."""

    now: int
    workers: tuple[int, int]
    mover: Mover | None
    kept: tuple[tuple[int, int, int], ...]
    group: int
    moved: bool
    keeps: int
    puts: int
    deletes: int
    evictions: int
    deaths: int
    groups: int


class MarksModel:
    """The transition system.

    Args:
        bugs: names out of :data:`BUGS`.
        keeps, puts, deletes, evictions, deaths, groups, ticks: how many events of each kind there are at most.
    """

    def __init__(
        self, bugs: tuple[str, ...] = (), *, keeps: int = 1, puts: int = 0, deletes: int = 1, evictions: int = 1,
        deaths: int = 1, groups: int = 1, ticks: int = 1,
    ) -> None:  # fmt: skip
        self.bugs = frozenset(bugs)
        if self.bugs - BUGS.keys():
            raise ValueError(f"no such bug: {self.bugs - BUGS.keys()}")
        self.ticks = ticks
        self.left = {
            "keeps": keeps, "puts": puts, "deletes": deletes, "evictions": evictions, "deaths": deaths, "groups": groups
        }  # fmt: skip
        self.worker = Worker(self.bugs)

    def initial(self) -> State:
        """Return the first state: worker 0 owns the shard and has both values."""
        workers = self.worker.begin(ShardRole.OWNER, 1, True), self.worker.begin(ShardRole.INCOMING, 2, False)
        return State(0, workers, None, ((0, 0, 0),) * len(KEYS), 0, False, **self.left)

    def seen(self, state: State, at: int) -> Seen:
        return self.worker.seen[state.workers[at]]

    # -- what must hold ---------------------------------------------------------------------------

    def fault(self, state: State) -> str:
        """Return what is wrong with a state, or ""."""
        for at in range(2):
            seen = self.seen(state, at)
            for key, (how, until, where) in enumerate(state.kept):
                entry = seen.entries[key]
                if where != at or entry is None:
                    continue
                if how and until > state.now and (entry[0] != how or entry[1] < until):
                    return f"key {key} at {at} is kept {entry[:2]}, not {how} until {until}"
                if not how and entry[0]:
                    return f"key {key} at {at} is kept {entry[:2]}, though that was ended"
            mates = any(entry is not None and entry[2] for entry in seen.entries)
            if state.group == ENDED and at and mates:
                return "a group is made again though a member was deleted"
            if state.group == at + 1:
                there = seen.there
                if any(there) != all(there):
                    return f"of the group at {at} there is one member alone"
                if all(there) and any(entry is not None and not entry[2] for entry in seen.entries):
                    return f"the keys at {at} are no group any more"
        return ""

    def successors(self, state: State) -> Iterator[tuple[str, State, str]]:
        """Yield (event, state after it, fault of the event or "") for everything that can happen next."""
        if state.now < self.ticks:
            now = state.now + 1
            first, second = (self.worker.play(number, "expire", now)[0] for number in state.workers)
            kept = tuple(each if each[1] > now or not each[0] else (SOFT, 0, each[2]) for each in state.kept)
            yield "a second passes", state._replace(now=now, workers=(first, second), kept=kept), ""
        for at in range(2):
            yield from self._clients(state, at)
            yield from self._faults(state, at)
        yield from self._move(state)

    def _with(self, state: State, at: int, number: int, **changes: Any) -> State:
        workers = (number, state.workers[1]) if not at else (state.workers[0], number)
        return state._replace(workers=workers, **changes)

    def _said(self, state: State, at: int, key: int, how: int, until: int) -> tuple[tuple[int, int, int], ...]:
        return (*state.kept[:key], (how, until, at), *state.kept[key + 1 :])

    def _moving(self, state: State) -> bool:
        """Return True from the map that moves the shard until the move has ended."""
        target = self.seen(state, 1)
        return state.moved and (not target.word or bool(target.word & MOVING))

    def _gone(self, state: State, at: int, before: Seen, after: Seen) -> dict[str, Any]:
        """Return what must hold once values have left a worker.

        Nothing of a value that has left its owner. While the shard moves, a mark that was not carried yet is lost with
        either copy of its value, or may still come; and a group that lacks a member is none any more.
        """
        moving = self._moving(state)
        kept = list(state.kept)
        for key, (_, _, where) in enumerate(state.kept):
            if before.there[key] and not after.there[key] and (where == at or (moving and at == 1)):
                kept[key] = (SOFT, 0, at) if moving and where == at == 0 else (0, 0, at)
        changed = after.there != before.there
        stay = [entry for entry in after.entries if entry is not None]
        over = changed and (moving or all(entry[0] == HARD for entry in stay))  # hard kept members stay
        return {"kept": tuple(kept), "group": min(0, state.group) if over else state.group}

    # -- clients ----------------------------------------------------------------------------------

    def _clients(self, state: State, at: int) -> Iterator[tuple[str, State, str]]:
        number, before = state.workers[at], self.seen(state, at)
        if not 0 < before.word < FROZEN:
            return
        play = self.worker.play
        for key in PAIR:
            if state.keeps:
                for how, seconds in ((HARD, 0), (HARD, 2), (SOFT, 2)):
                    after, status = play(number, "keep", key, how, seconds, state.now)
                    if status == Status.OK:
                        until = state.now + seconds if seconds else 0
                        kept = self._said(state, at, key, how if seconds else 0, until)
                        after_it = self._with(state, at, after, kept=kept, keeps=state.keeps - 1)
                        yield f"keep({key}, {how}, {seconds}) at {at}", after_it, ""
            if state.puts:
                after, _ = play(number, "put", key)
                yield f"put({key}) at {at}", self._with(state, at, after, puts=state.puts - 1), ""
            if state.deletes:
                after, status = play(number, "delete", key)
                if status == Status.OK:
                    seen = self.worker.seen[after]
                    what = self._gone(state, at, before, seen)
                    what["kept"] = (*what["kept"][:key], (0, 0, at), *what["kept"][key + 1 :])
                    if self._moving(state) and state.group:
                        what["group"] = ENDED
                    deleted = self._with(state, at, after, deletes=state.deletes - 1, **what)
                    yield f"delete({key}) at {at}", deleted, self._torn(state, at, seen)
        if state.groups:
            after, status = play(number, "group")
            if status == Status.OK:
                yield f"group at {at}", self._with(state, at, after, group=at + 1, groups=state.groups - 1), ""

    def _torn(self, state: State, at: int, seen: Seen) -> str:
        """Return a fault if a member stays that is not hard kept."""
        if "orphans_stay" in self.bugs or state.group != at + 1:
            return ""
        stays = [entry for entry in seen.entries if entry is not None and entry[0] != HARD]
        return "a member stays when another one leaves" if stays and not self._moving(state) else ""

    # -- what happens to a worker -------------------------------------------------------------------

    def _faults(self, state: State, at: int) -> Iterator[tuple[str, State, str]]:
        number, before = state.workers[at], self.seen(state, at)
        play = self.worker.play
        if state.evictions:
            for key in PAIR:
                if not before.there[key]:
                    continue
                after, went = play(number, "evict", key)
                if went:
                    how, until, where = state.kept[key]
                    hard = how == HARD and until > state.now and where == at
                    what = self._gone(state, at, before, self.worker.seen[after])
                    evicted = self._with(state, at, after, evictions=state.evictions - 1, **what)
                    fault = f"hard kept key {key} is evicted before its time" if hard else ""
                    yield f"eviction of {key} at {at}", evicted, fault or self._torn(state, at, self.worker.seen[after])
        if state.deaths and before.word:
            cuts: list[tuple[Any, ...]] = [()]
            if 0 < before.word < FROZEN:
                if all(before.there) and state.groups and not state.group:
                    cuts.append(("group",))
                if state.deletes:
                    cuts += [("delete", key) for key in PAIR if before.there[key]]
            for cut in cuts:
                yield self._death(state, at, cut)

    def _death(self, state: State, at: int, cut: tuple[Any, ...]) -> tuple[str, State, str]:
        before = self.seen(state, at)
        after, _ = self.worker.play(state.workers[at], "die", state.now, *cut)
        seen = self.worker.seen[after]
        what = self._gone(state, at, before, seen)
        fault = ""
        for key, (how, until, where) in enumerate(state.kept):
            lost = before.there[key] and not seen.there[key]
            if lost and not cut and how == HARD and until > state.now and where == at:
                fault = f"a death loses the hard kept key {key}"
            if cut[:1] == ("delete",) and lost and cut[1] == key:
                what["kept"] = (*what["kept"][:key], (0, 0, at), *what["kept"][key + 1 :])
        if cut[:1] == ("group",) and seen.there != before.there and any(seen.there):
            fault = "of a group that was never made some members are dropped, others not" if _marked(seen) else ""
        changes: dict[str, Any] = {"deaths": state.deaths - 1, **what}
        if at and state.mover is not None:  # the mover ends with its worker, and the move with its fall-back
            changes["mover"] = None
            if before.word & MOVING:
                changes["kept"] = tuple(each if each[2] else (SOFT, 0, 1) for each in changes["kept"])
                changes["group"] = min(0, changes["group"])
        dead = self._with(state, at, after, **changes)
        return f"worker {at} dies" + (f" during {cut}" if cut else ""), dead, fault

    # -- the move ---------------------------------------------------------------------------------

    def _move(self, state: State) -> Iterator[tuple[str, State, str]]:
        mover, play = state.mover, self.worker.play
        source, target = self.seen(state, 0), self.seen(state, 1)

        def becomes(to: Mover | None, at: int = 1, number: int = -1, **changes: Any) -> State:
            return self._with(state, at, number if number >= 0 else state.workers[at], mover=to, **changes)

        if mover is None:
            if not state.moved and source.role == ShardRole.OWNER:
                after, _ = play(state.workers[0], "map", 2, int(ShardRole.OUTGOING))
                yield "worker 0 takes map 2", self._with(state, 0, after, moved=True, mover=Mover()), ""
            elif target.role == ShardRole.INCOMING and (not target.word or target.word & MOVING):
                yield "another mover starts", becomes(Mover()), ""
            return
        if state.deaths:
            yield "the mover dies", becomes(None, deaths=state.deaths - 1), ""
        if mover.stage == 0:
            after, _ = play(state.workers[0], "freeze", 2)
            yield "mover: freezes", becomes(mover._replace(stage=1), 0, after), ""
        elif mover.stage == 1:
            after, _ = play(state.workers[1], "adopt", 2)
            yield "mover: adopts", becomes(mover._replace(stage=2), 1, after), ""
        elif mover.stage == 2:
            entry = source.entries[mover.page]
            how, until, _, number = entry if entry is not None else (0, 0, (), 0)
            mark = (how, until - state.now) if how and until > state.now and "no_marks" not in self.bugs else (0, 0)
            group = number if "no_groups" not in self.bugs else 0
            read = mover._replace(stage=3, mark=mark, group=group)
            yield f"mover: reads the mark of {mover.page}: {mark}", becomes(read), ""
        elif mover.stage == 3:
            after, counts = state.workers[1], False
            if mover.mark[0] and "late_marks" not in self.bugs:
                after, status = play(after, "carry", mover.page, *mover.mark, state.now, 2)
                counts = status in (Status.OK, Status.PREVIOUS)
            sent = mover._replace(stage=4, mark=mover.mark if counts or "late_marks" in self.bugs else (0, 0))
            yield f"mover: keeps {mover.page}", becomes(sent, 1, after), ""
        elif mover.stage == 4:
            yield self._copy(state, mover)
        elif mover.stage == 5:
            arrived, whole = self._arrive(mover)
            after = state.workers[1]
            changes: dict[str, Any] = {}
            if "late_marks" in self.bugs and mover.mark[0]:
                after, _ = play(after, "carry", mover.page, *mover.mark, state.now, 2)
            if whole:
                after, status = play(after, "group", 2)
                # It is one at the new owner from now on, unless a member has gone meanwhile.
                if state.group == 1:
                    changes["group"] = 2 if status == Status.OK else 0
            last = mover.page == len(KEYS) - 1
            following = Mover(6) if last else Mover(2, mover.page + 1, arrived=arrived)
            yield f"mover: groups ({whole})", becomes(following, 1, after, **changes), ""
        else:
            after, _ = play(state.workers[1], "finish", 2)
            yield "mover: finishes", self._finished(becomes(None, 1, after)), ""

    def _copy(self, state: State, mover: Mover) -> tuple[str, State, str]:
        """Copy the value of a page, unless it is there. What the old owner has promised of it holds from now on."""
        page, after = mover.page, state.workers[1]
        changes: dict[str, Any] = {}
        copied = False
        if self.seen(state, 0).there[page] and not self.seen(state, 1).there[page]:
            after, status = self.worker.play(after, "copy", page, 2)
            copied = status == Status.OK
        how, until, where = state.kept[page]
        if copied and mover.mark[0] and not where:
            changes["kept"] = (*state.kept[:page], (how, until, 1), *state.kept[page + 1 :])
        copies = self._with(state, 1, after, mover=mover._replace(stage=5), **changes)
        if "early_finish" in self.bugs and page == len(KEYS) - 1:
            after, _ = self.worker.play(after, "finish", 2)
            return "mover: (fault) finishes", self._finished(self._with(copies, 1, after)), ""
        return f"mover: copies {page}", copies, ""

    def _arrive(self, mover: Mover) -> tuple[tuple[int, ...], bool]:
        """Ask a real ``Arrivals`` whether the group is whole with this page."""
        arrivals = Arrivals()
        assert not arrivals.add([(KEYS[key], NUMBER) for key in mover.arrived])
        whole = arrivals.add([(KEYS[mover.page], mover.group)])
        arrived = (*mover.arrived, mover.page) if mover.group and members_of(mover.group) > 1 else mover.arrived
        return arrived, bool(whole)

    def _finished(self, state: State) -> State:
        """Return the state in which the promises hold at the new owner. A value that has not come is not promised."""
        there = self.seen(state, 1).there
        kept = tuple(
            each if each[2] else (each[0], each[1], 1) if there[key] else (0, 0, 1)
            for key, each in enumerate(state.kept)
        )
        group = state.group if state.group < 1 else 2 if all(there) else 0
        return state._replace(kept=kept, group=group)

    def describe(self, state: State) -> str:
        """Return one line for people."""
        parts = [f"{state.now} s"]
        for at in range(2):
            seen = self.seen(state, at)
            word = seen.word & ~(FROZEN | MOVING)
            flag = "frozen " if seen.word & FROZEN else "moving " if seen.word & MOVING else ""
            entries = ", ".join("-" if entry is None else f"{entry[:3]}" for entry in seen.entries)
            parts.append(f"{at}: {flag}{word} [{entries}]")
        return " | ".join([*parts, f"promised {state.kept}, group {state.group}"])


def _marked(seen: Seen) -> bool:
    return any(entry is not None and entry[3] for entry in seen.entries)


def broken(name: str, patch: Any) -> MarksModel:
    """Return the smallest model with a bug. ``patch`` is a ``pytest.MonkeyPatch``: some bugs are in the real code."""
    if name in ("mark_wins", "mark_after_delete", "group_wins"):
        real = Told.takes_mark

        def takes(self: Told, digest: bytes, epoch: int) -> bool:
            if name == "mark_wins":
                self._told.clear()
                return real(self, digest, epoch)
            word = self._words.words[0]
            return bool(MOVING < word < FROZEN) and self._told.get(digest) != word

        patch.setattr(Told, "takes_mark", takes)
    elif name == "half_marked":
        patch.setattr("simm.arena.marks.groups._COUNT_MASK", 0)
    elif name == "orphans_stay":
        patch.setattr(Groups, "drop_orphans", lambda self: self.orphans.clear())
    elif name == "orphans_forgotten":
        restore = Groups.restore

        def takes_all(self: Groups) -> list[str]:
            with patch.context() as inner:
                inner.setattr(Groups, "drop_orphans", lambda self: self.orphans.clear())
                return restore(self)

        patch.setattr(Groups, "restore", takes_all)
    elif name == "not_awaited":
        patch.setattr(AwaitedMarks, "add", lambda *_: None)
    elif name == "private":
        patch.setattr(Keeping, "recover", lambda *_: None)
    return MarksModel((name,), **SMALLEST[name])
