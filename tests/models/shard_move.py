"""A shard that moves, in every order of events: manager, two or three workers, their movers, clients, readers.

The workers' shard words are the real ones (:class:`simm.arena.shard_words.ShardWords`). Each pair of a worker's shard
state and an event is applied to it once, and :class:`Worker` caches the result. The model restates what
``arena/store.py`` does around them: which mutation asks what, and when an entry is dropped. The other rules are the
manager's (``cluster/machine.py``), the mover's (``server/migration.py``) and the client's (``sdk/reads.py``).

There is one shard with one key. A state:

    maps     all maps so far, (owner, previous, since); a map's epoch is its place. A process may hold any of them
    heard    by worker: it has told the manager that it holds the map that made it owner, or a later one
    cut      by worker: the manager takes it for dead, or it is out of reach (see below)
    workers  (epoch of its map, shard word, role, since, fenced, remembered as dropped, value)
    movers   the state of each worker's mover: (its map's epoch, previous owner, stage, value in hand), or ()
    reader   of a read that was sent on to a previous owner: (that owner, values that are right for it), or ()
    current  value of the last put; 0 after a delete
    puts     the number of puts left

Events: the manager moves the shard, receives MOVED, loses the owner or the previous owner, takes a worker back; a
worker takes any newer map, dies and has a successor on the same arena, is fenced, loses all (a new instance); a mover
starts, freezes, cannot reach the previous owner, adopts, reads a value, commits it, finishes, dies; a put, a delete or
an eviction at any worker that allows it; a read at any worker, and at the worker to which that one sends it.

What must not happen: two workers that accept mutations, and a read that yields a value that was current at no moment of
the read (older than an answered put, or deleted). Nor an owner that is frozen by a map older than the one that made it
owner: until another map comes, nobody accepts mutations.

The documented exception: a server that is cut off from the manager goes on serving clients that are cut off with it.
Such a worker (``cut``) has no clients here. It is cut from the moment when the manager takes it for dead until it takes
the newest map. A worker that should have a map for seconds and does not is cut too: a previous owner that a mover could
not reach for two seconds, or one that is behind when the new owner is replaced or found dead.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from simm.arena.shard_words import ShardWords
from simm.constants import SHARD_COUNT
from simm.wire.messages import ShardRole, Status, status_name
from simm.wire.shard_set import EPOCH_MASK, FROZEN, MOVING

#: The one key; its shard is 0.
DIGEST: Final = bytes(16)

BUGS: Final = {
    "no_freeze": "the new owner adopts without having frozen the previous one",
    "no_absent": "a mover's copy is a put, not a put-if-absent",
    "no_memory": "a digest that leaves the table while its shard moves in is not remembered",
    "moving_survives": "a worker's successor goes on with the fall-back, though what was remembered is lost",
    "reads_frozen": "a reader takes a frozen value at the owner for a hit",
    "reads_by_own_map": "a reader that is told WRONG_OWNER looks at the previous owner that its own map names",
    "not_heard": "the manager names a previous owner that has not said that it holds the map that made it owner",
    "keeps_entries": "a shard that comes back after others owned it comes with its old entries",
    "no_mark": "FREEZE leaves no mark on a shard that is not here",
    "freezes_late": "FREEZE is compared with the word only, not with the map that gave the shard back",
}


#: The smallest model that shows each bug, and, for the real rules, a whole model that is not too large.
SMALLEST: Final[dict[str, dict[str, Any]]] = {
    "": {"epochs": 3},
    "no_freeze": {"epochs": 3, "losses": False},
    "no_absent": {"epochs": 3, "losses": False},
    "no_memory": {"epochs": 3, "losses": False},
    "moving_survives": {"epochs": 3, "losses": False},
    "reads_frozen": {"epochs": 3, "losses": False},
    "reads_by_own_map": {"puts": 1},
    "not_heard": {"puts": 1},
    "keeps_entries": {"puts": 1},
    "no_mark": {"puts": 1},
    "freezes_late": {"puts": 0},
}

#: A map that no worker will take any more.
_NOBODYS: Final = (-1, -1, 0)


class Local(NamedTuple):
    """One worker's shard."""

    epoch: int = 0
    word: int = 0
    role: int = 0
    since: int = 0
    fenced: bool = False
    dropped: bool = False
    value: int = 0
    #: The first map that lists this instance; older ones are about an earlier life.
    born: int = 1


class Mover(NamedTuple):
    """A worker's mover. ``stage``: 0 to freeze, 1 to adopt with fall-back, 2 to adopt without, 3 copying."""

    epoch: int
    previous: int
    stage: int
    value: int = 0


class State(NamedTuple):
    """See the module's docstring."""

    maps: tuple[tuple[int, int, int], ...]
    heard: tuple[bool, ...]
    cut: tuple[bool, ...]
    workers: tuple[Local, ...]
    movers: tuple[Mover | None, ...]
    reader: tuple[int, frozenset[int]] | None
    current: int
    puts: int


class Worker:
    """Applies events to a real ShardWords: one object, which is set to the wanted state each time."""

    def __init__(self, bugs: frozenset[str]) -> None:
        self.bugs = bugs
        self.words = ShardWords(memoryview(bytearray(8 * SHARD_COUNT)).cast("Q"))
        self.play = lru_cache(maxsize=None)(self._play)

    def _set(self, local: Local) -> None:
        shard_words = self.words
        shard_words.words[0] = local.word
        shard_words.since = np.zeros(SHARD_COUNT, np.uint64)
        shard_words.roles = np.zeros(SHARD_COUNT, np.uint8)
        shard_words.since[0], shard_words.roles[0] = local.since, local.role
        shard_words.dropped = {DIGEST} if local.dropped else set()
        shard_words.moving = 0
        shard_words._recount()
        shard_words.accepting = shard_words.words
        if local.fenced:
            shard_words.fence()

    def _get(self, epoch: int, value: int, born: int) -> Local:
        shard_words = self.words
        shard_words.check()
        return Local(
            epoch, shard_words.words[0], int(shard_words.roles[0]), int(shard_words.since[0]), shard_words.fenced,
            bool(shard_words.dropped), value, born,
        )  # fmt: skip

    def _play(self, local: Local, event: str, *details: int) -> tuple[Local, object]:
        """Return the state after an event, and its answer."""
        self._set(local)
        words, value, epoch = self.words, local.value, local.epoch
        answer: object = None
        if event == "map":
            epoch, role, since = details
            sinces = np.zeros(SHARD_COUNT, np.uint64)
            roles = np.zeros(SHARD_COUNT, np.uint8)
            sinces[0], roles[0] = since, role
            if words.retire(epoch, sinces.tobytes(), roles.tobytes()) and "keeps_entries" not in self.bugs:
                value = 0
            words.take()
        elif event == "freeze":
            if "freezes_late" in self.bugs:
                words.roles = np.zeros(SHARD_COUNT, np.uint8)
            frozen = words.freeze(details[0], [0] if local.word or "no_mark" not in self.bugs else [], epoch)
            words.roles[0] = local.role
            answer = None if frozen is None else bool(frozen)
        elif event == "adopt":
            words.adopt(details[0], [0], [0] if details[1] else [])
            answer = words.accepts(0)
        elif event == "finish":
            words.finish([0], details[0])
        elif event == "put":
            answer = words.accepts(0)
            value = details[0] if answer else value
        elif event == "delete":
            answer = words.accepts(0)
            if answer and (value or (words.moving and words.status_of_miss(DIGEST) == Status.PREVIOUS)):
                self._leaves()
                value = 0
        elif event == "evict":
            if words.moving:
                self._leaves()
            value = 0
        elif event == "copy":
            answer = words.may_copy(DIGEST, details[0]) and (not value or "no_absent" in self.bugs)
            if "no_absent" in self.bugs and words.accepts(0):
                answer = True
            value = details[1] if answer else value
        elif event == "successor":
            if "moving_survives" not in self.bugs:
                words.recover()
            words.dropped = set()
            words.fence()
        elif event == "fence":
            words.fence()
        elif event == "miss":
            answer = words.status_of_miss(DIGEST)
        elif event == "accepts":
            answer = words.accepts(0)
        else:
            raise ValueError(event)
        return self._get(epoch, value, local.born), answer

    def _leaves(self) -> None:
        if "no_memory" not in self.bugs:
            self.words.note_dropped(DIGEST)


class MoveModel:
    """The rules: successors and faults of a :class:`State`.

    Args:
        bugs: names out of :data:`BUGS`.
        workers, epochs, puts: the bounds of the model.
        losses: owners may be lost, and workers may lose all.
    """

    def __init__(
        self, bugs: tuple[str, ...] = (), *, workers: int = 2, epochs: int = 4, puts: int = 2, losses: bool = True
    ) -> None:
        self.bugs = frozenset(bugs)
        if self.bugs - BUGS.keys():
            raise ValueError(f"no such bug: {self.bugs - BUGS.keys()}")
        self.count = workers
        self.epochs = epochs
        self.puts = puts
        self.losses = losses
        self.worker = Worker(self.bugs)

    def initial(self) -> State:
        """Return the first state: worker 0 owns the shard since map 1 and has said so."""
        nothing = tuple(Local() for _ in range(self.count))
        first, _ = self.worker.play(Local(), "map", 1, ShardRole.OWNER, 1)
        return State(
            ((0, -1, 1),), (True,) + (False,) * (self.count - 1), (False,) * self.count, (first, *nothing[1:]),
            (None,) * self.count, None, 0, self.puts,
        )  # fmt: skip

    def accepts(self, local: Local) -> bool:
        return bool(self.worker.play(local, "accepts")[1])

    def canonical(self, state: State) -> State:
        """Return one state for all that differ in what can have no effect.

        That is: maps that no worker will take any more, and ``heard`` of workers that do not own the shard (once they
        do, it is too old).
        """
        oldest = min(max(local.epoch, local.born) for local in state.workers)
        maps = tuple(_NOBODYS if at + 1 < oldest else each for at, each in enumerate(state.maps))
        owner = state.maps[-1][0]
        heard = tuple(at == owner and told for at, told in enumerate(state.heard))
        return state._replace(maps=maps, heard=heard)

    def fault(self, state: State) -> str:
        """Return a text if two workers accept mutations, or the owner is frozen by an older map, else ""."""
        accepting = [
            at for at, local in enumerate(state.workers) if not state.cut[at] and local.word and self.accepts(local)
        ]
        if len(accepting) > 1:
            return f"workers {accepting} accept mutations at once"
        for at, local in enumerate(state.workers):
            owns = local.role in (ShardRole.OWNER, ShardRole.INCOMING)
            if owns and local.word >= FROZEN and local.word & EPOCH_MASK < local.since:
                return f"worker {at} owns the shard since map {local.since}, and is frozen by an older one"
        return ""

    def successors(self, state: State) -> Iterator[tuple[str, State, str]]:
        """Yield (event, canonical state, fault) for everything that can happen next."""
        for event, after, fault in self._events(state):
            if after.maps is not state.maps or after.workers is not state.workers:
                after = self.canonical(after)
            yield event, after, fault

    def _events(self, state: State) -> Iterator[tuple[str, State, str]]:
        yield from self._manager(state)
        for at in range(self.count):
            yield from self._supervisor(state, at)
            yield from self._mover(state, at)
            if not state.cut[at]:
                yield from self._clients(state, at)
        if state.reader is not None:
            yield from self._second_look(state, *state.reader)

    # -- the manager ------------------------------------------------------------------------------

    def _mapped(self, state: State, owner: int, previous: int, since: int) -> State:
        return state._replace(maps=(*state.maps, (owner, previous, since)))

    def _manager(self, state: State) -> Iterator[tuple[str, State, str]]:
        epoch = len(state.maps)
        owner, previous, since = state.maps[-1]
        for at in range(self.count):
            if at == owner and not state.heard[at] and state.workers[at].epoch >= since and not state.cut[at]:
                told = state._replace(heard=_with(state.heard, at, True))
                yield f"worker {at} tells the manager its epoch", told, ""
        if epoch >= self.epochs:
            return
        if previous < 0:
            for at in range(self.count):
                known = state.heard[owner] or "not_heard" in self.bugs
                if at != owner and known and not state.cut[at] and not state.cut[owner]:
                    yield f"manager: moves to {at}", self._mapped(state, at, owner, epoch + 1), ""
        else:
            local = state.workers[owner]
            finished = local.role == ShardRole.INCOMING and local.word == local.since == since
            if finished and not state.cut[owner]:
                yield "manager: hears MOVED", self._mapped(state, owner, -1, since), ""
            if self.losses:
                lost = self._lose(state, previous)
                yield f"manager: loses the previous owner {previous}", self._mapped(lost, owner, -1, since), ""
        if self.losses and not state.cut[owner]:
            for at in range(self.count):
                if at != owner and not state.cut[at]:
                    lost = self._late(self._lose(state, owner))
                    yield f"manager: loses {owner}, {at} owns it", self._mapped(lost, at, -1, epoch + 1), ""
        if self.losses:
            for at in range(self.count):
                if state.workers[at].epoch:
                    yield f"worker {at} is a new instance, cold", self._cold(state, at), ""

    def _cold(self, state: State, at: int) -> State:
        """Return the state after an empty instance has joined: it keeps its shards, and no previous owner stays."""
        owner, previous, since = state.maps[-1]
        if at == owner:
            # Its values are lost. So is what a previous owner has for it, as that may be older.
            state = self._mapped(state, owner, -1, since)
        elif at == previous:
            state = self._mapped(state, owner, -1, since)
        state = self._late(state)
        return state._replace(
            workers=_with(state.workers, at, Local(born=len(state.maps))), heard=_with(state.heard, at, False),
            movers=_with(state.movers, at, None), cut=_with(state.cut, at, False),
        )  # fmt: skip

    def _late(self, state: State) -> State:
        """Let seconds pass: a worker without the map that made the owner owner does not reach the manager."""
        owner, _, since = state.maps[-1]
        late = (
            cut or (at != owner and local.epoch < since)
            for at, (cut, local) in enumerate(zip(state.cut, state.workers))
        )
        return state._replace(cut=tuple(late))

    def _lose(self, state: State, at: int) -> State:
        return state._replace(cut=_with(state.cut, at, True), heard=_with(state.heard, at, False))

    # -- a server: its supervisor and its mover ------------------------------------------------------

    def _supervisor(self, state: State, at: int) -> Iterator[tuple[str, State, str]]:
        local = state.workers[at]
        for epoch in range(max(local.epoch, local.born), len(state.maps) + 1):
            if epoch == local.epoch and not local.fenced:
                continue
            owner, previous, since = state.maps[epoch - 1]
            role = ShardRole.NONE
            if owner == at:
                role = ShardRole.OWNER if previous < 0 else ShardRole.INCOMING
            elif previous == at:
                role = ShardRole.OUTGOING
            after, _ = self.worker.play(local, "map", epoch, int(role), since if role else 0)
            # A worker that takes the newest map reaches the manager again.
            cut = state.cut[at] and epoch < len(state.maps)
            taken = state._replace(workers=_with(state.workers, at, after), cut=_with(state.cut, at, cut))
            yield f"worker {at} takes map {epoch}", taken, ""
        if local.word:
            after, _ = self.worker.play(local, "successor")
            gone = state._replace(workers=_with(state.workers, at, after), movers=_with(state.movers, at, None))
            yield f"worker {at} dies, and has a successor", gone, ""
            if not local.fenced:
                after, _ = self.worker.play(local, "fence")
                yield f"worker {at} is fenced", state._replace(workers=_with(state.workers, at, after)), ""

    def _mover(self, state: State, at: int) -> Iterator[tuple[str, State, str]]:
        local, mover = state.workers[at], state.movers[at]

        def becomes(mover: Mover | None, **changes: object) -> State:
            return state._replace(movers=_with(state.movers, at, mover), **changes)  # type: ignore[arg-type]

        if mover is None:
            waits = not local.word or local.word & MOVING
            if local.role == ShardRole.INCOMING and waits and local.word < FROZEN:
                previous = state.maps[local.epoch - 1][1]
                yield f"worker {at} starts a mover", becomes(Mover(local.epoch, previous, 0)), ""
            return
        yield f"mover {at} dies", becomes(None), ""
        there = state.workers[mover.previous]
        if mover.stage == 0:
            if "no_freeze" in self.bugs:
                yield f"mover {at}: (fault) does not freeze", becomes(mover._replace(stage=1)), ""
                return
            after, frozen = self.worker.play(there, "freeze", mover.epoch)
            stage = None if frozen is None else mover._replace(stage=1 if frozen else 2)
            changed = _with(state.workers, mover.previous, after)
            yield f"mover {at}: freezes at {mover.previous} ({frozen})", becomes(stage, workers=changed), ""
            if self.losses:
                behind = there.epoch < mover.epoch
                cut = _with(state.cut, mover.previous, state.cut[mover.previous] or behind)
                unreached = becomes(mover._replace(stage=2), cut=cut)
                yield f"mover {at}: cannot reach {mover.previous} for two seconds", unreached, ""
        elif mover.stage in (1, 2):
            after, _ = self.worker.play(local, "adopt", mover.epoch, int(mover.stage == 1))
            changed = _with(state.workers, at, after)
            then = mover._replace(stage=3) if mover.stage == 1 else None
            yield f"mover {at}: adopts", becomes(then, workers=changed), ""
        elif mover.value:
            after, done = self.worker.play(local, "copy", mover.epoch, mover.value)
            changed = _with(state.workers, at, after)
            yield f"mover {at}: commits v{mover.value} ({bool(done)})", becomes(None, workers=changed), ""
        else:
            if there.word and there.value:
                yield f"mover {at}: reads v{there.value}", becomes(mover._replace(value=there.value)), ""
            after, _ = self.worker.play(local, "finish", mover.epoch)
            yield f"mover {at}: finishes", becomes(None, workers=_with(state.workers, at, after)), ""

    # -- clients ------------------------------------------------------------------------------------

    def _clients(self, state: State, at: int) -> Iterator[tuple[str, State, str]]:
        local = state.workers[at]
        accepts = local.word and self.accepts(local)
        if accepts and state.puts:
            value = self.puts - state.puts + 1
            after, _ = self.worker.play(local, "put", value)
            stored = self._current(state, value)._replace(workers=_with(state.workers, at, after), puts=state.puts - 1)
            yield f"put of v{value} at {at}", stored, ""
        if accepts and (local.value or state.current):
            after, _ = self.worker.play(local, "delete")
            yield f"delete at {at}", self._current(state, 0)._replace(workers=_with(state.workers, at, after)), ""
        if local.value and not local.word >= FROZEN:
            after, _ = self.worker.play(local, "evict")
            yield f"eviction at {at}", state._replace(workers=_with(state.workers, at, after)), ""
        # A read. The first look is one moment: a hit must be the current value.
        readable = 0 < local.word < FROZEN or ("reads_frozen" in self.bugs and local.word)
        if local.value and readable:
            if local.value != state.current:
                yield f"read at {at}: v{local.value}", state, f"a read at {at} yields v{local.value}: not current"
            return
        if state.reader is not None:
            return
        answer = self.worker.play(local, "miss")[1]
        if answer == Status.PREVIOUS or ("reads_by_own_map" in self.bugs and answer == Status.WRONG_OWNER):
            # A client goes by a map that names the same move as the worker's: it compares epochs (gets.py).
            previous = 1 - at if answer == Status.WRONG_OWNER else state.maps[local.epoch - 1][1]
            sent = state._replace(reader=(previous, frozenset((state.current,))))
            yield f"read at {at}: {status_name(answer)}, on to {previous}", sent, ""

    def _current(self, state: State, value: int) -> State:
        """Change the current value, which is right for reads in flight."""
        reader = state.reader and (state.reader[0], state.reader[1] | {value})
        return state._replace(current=value, reader=reader)

    def _second_look(self, state: State, at: int, right: frozenset[int]) -> Iterator[tuple[str, State, str]]:
        local = state.workers[at]
        done = state._replace(reader=None)
        if local.word and local.value and not state.cut[at]:
            bad = "" if local.value in right else f"a read, sent on to {at}, yields v{local.value}: not current"
            yield f"read at {at}, as the previous owner: v{local.value}", done, bad
        else:
            yield f"read at {at}, as the previous owner: a miss", done, ""

    # -- for people -----------------------------------------------------------------------------------

    def describe(self, state: State) -> str:
        """Return one line for people."""
        owner, previous, since = state.maps[-1]
        parts = [f"map {len(state.maps)}: {owner} since {since}" + (f", before {previous}" if previous >= 0 else "")]
        for at, local in enumerate(state.workers):
            word = local.word & ~(FROZEN | MOVING)
            flag = "frozen " if local.word & FROZEN else "moving " if local.word & MOVING else ""
            state_of = f"{flag}{word}" if local.word else "0"
            extra = " fenced" * local.fenced + " remembers" * local.dropped + " cut" * state.cut[at]
            parts.append(f"{at}: map {local.epoch} word {state_of} v{local.value}{extra}")
        parts.append(f"current v{state.current}")
        return " | ".join(parts)


def _with(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])
