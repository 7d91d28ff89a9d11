"""Values in parts: puts, a get and a keep at the same time, evictions and a full store, in every order of exchanges.

Each process runs the real :class:`simm.sdk.large.values.Large`, with the real manifests. It is run from its beginning
for each of its exchanges, with the answers that it has got so far, up to the first one that has no answer yet. So the
state of a process is the answers that it has got. A process that is not run any more has died.

The store is restated: entries with their kind, bytes, and whether they are kept, which no eviction takes. A put of a
manifest ends the keeping of what it replaces (``arena/marks/kept.py``). One part goes in each exchange.

What must hold:

* What a get returns is what one put has stored, and not what was replaced before the get began.
* A put that fails leaves nothing.
* A keep that succeeds has kept manifest and parts of one value; one that fails, no part of any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest import mock

from simm.constants import KEEP_HARD
from simm.sdk.batch import LARGE, MISS
from simm.sdk.large import manifest as manifests
from simm.sdk.large import values
from simm.sdk.large.manifest import MANIFEST_BYTES, Manifest
from simm.sdk.large.values import Large
from simm.wire.status import Status

KEY: Final = bytes(range(16))
PART: Final = 2
#: By process: what it puts. The first one is there at the beginning.
VALUES: Final = (b"zzz", b"aaa", b"bbb")
OLD: Final = 0

BUGS: Final = {
    "no_version": "the digests of parts are without the version of their put",
    "missing_is_zero": "a part that is missing is taken for zeros",
    "no_drop": "a put that fails leaves its parts",
    "manifest_only": "a keep keeps the manifest alone",
    "keeps_some": "a keep that fails leaves kept what it could keep",
    "unchecked": "a keep does not look whether the value was replaced meanwhile",
    "mark_stays": "a put of a manifest leaves the keeping of what it replaces",
}

#: The smallest model that shows each bug.
SMALLEST: Final[dict[str, dict[str, Any]]] = {
    "no_version": {"writers": 1, "reads": True},
    "missing_is_zero": {"reads": True, "evictions": 1},
    "no_drop": {"writers": 1, "full": 1},
    "manifest_only": {"keeps": True},
    "keeps_some": {"keeps": True, "evictions": 1},
    "unchecked": {"keeps": True, "writers": 1},
    "mark_stays": {"keeps": True, "writers": 1},
}


class Entry(NamedTuple):
    """An entry of the store."""

    name: bytes
    manifest: bool
    data: bytes
    kept: bool


class Call(NamedTuple):
    """An exchange: what is asked, with which names, and the data or the class of a put or keep."""

    what: str
    names: tuple[bytes, ...]
    data: bytes = b""
    seconds: int = 0


class _Pending(BaseException):
    """A process has come to an exchange that has no answer yet."""

    def __init__(self, call: Call) -> None:
        self.call = call


class State(NamedTuple):
    """A state. ``answers``: by process, None once it has ended. ``banned``: values that the get may not return."""

    store: frozenset[Entry]
    answers: tuple[tuple[Any, ...] | None, ...]
    stored: tuple[int, ...]
    banned: frozenset[bytes]
    kept: bool
    evictions: int
    full: int


class LargeModel:
    """The transition system. ``writers``: how many put. ``reads``, ``keeps``: there is a get, a keep."""

    def __init__(
        self, bugs: tuple[str, ...] = (), *, writers: int = 0, reads: bool = False, keeps: bool = False,
        evictions: int = 0, full: int = 0,
    ) -> None:  # fmt: skip
        self.bugs = frozenset(bugs)
        self.evictions, self.full = evictions, full
        self.kinds = [*(f"put {number}" for number in range(1, writers + 1)), *["get"] * reads, *["keep"] * keeps]
        self._next = lru_cache(maxsize=None)(self._run)

    def initial(self) -> State:
        old = self._manifest(OLD)
        with self._limits(OLD):
            entries = {Entry(KEY, True, old.encode(KEY), False)}
            bounds = zip(old.digests(KEY), old.bounds())
            entries |= {Entry(name, False, VALUES[OLD][at : at + size], False) for name, (at, size) in bounds}
        answers: tuple[tuple[Any, ...] | None, ...] = ((),) * len(self.kinds)
        return State(frozenset(entries), answers, (), frozenset(), False, self.evictions, self.full)

    def fault(self, state: State) -> str:
        return ""

    def describe(self, state: State) -> str:
        steps = ("ended" if answers is None else len(answers) for answers in state.answers)
        ways = ", ".join(f"{kind}: {step}" for kind, step in zip(self.kinds, steps))
        return f"{len(state.store)} entries, {sum(entry.kept for entry in state.store)} kept | {ways}"

    def successors(self, state: State) -> Iterator[tuple[str, State, str]]:
        for at, answers in enumerate(state.answers):
            if answers is not None:
                yield from self._step(state, at, answers)
        if state.evictions:
            for entry in state.store:
                if not entry.kept:
                    what = "the manifest" if entry.manifest else "a part"
                    yield f"{what} is evicted", state._replace(
                        store=state.store - {entry}, evictions=state.evictions - 1
                    ), ""  # fmt: skip

    # -- processes --------------------------------------------------------------------------------

    def _manifest(self, process: int) -> Manifest:
        with self._limits(process):
            return Manifest.new(len(VALUES[process]), PART)

    def _limits(self, process: int) -> Any:
        return mock.patch("os.urandom", lambda count: bytes((process,)) * count)

    def _large(self, answers: Sequence[Any]) -> Large:
        """Return the real thing, whose exchanges get these answers, one after the other."""
        left = iter(answers)

        def ask(call: Call) -> Any:
            for answer in left:
                return answer
            raise _Pending(call)

        def read_manifests(names: Sequence[bytes], rooms: Sequence[memoryview]) -> list[int]:
            (raw,) = ask(Call("read manifest", tuple(names)))
            if raw:
                rooms[0][:] = raw
            return [len(raw) or int(MISS)]

        def put(what: str) -> Callable[[Sequence[bytes], Sequence[memoryview]], list[int]]:
            return lambda names, sources: list(ask(Call(what, tuple(names), bytes(sources[0]))))

        def keep(names: Sequence[bytes], _how: int, seconds: int) -> list[int]:
            return list(ask(Call("keep", tuple(names), seconds=seconds)))

        gets = SimpleNamespace(read_many=lambda names, _sinks: list(ask(Call("read", tuple(names)))))
        puts = SimpleNamespace(
            put=put("put"), store=put("put"), delete=lambda names: list(ask(Call("delete", tuple(names)))), keep=keep
        )
        made: Any = Large
        return made(  # type: ignore[no-any-return]
            gets, puts, None, SimpleNamespace(read_many=read_manifests), SimpleNamespace(put=put("put manifest")),
            None, {"large": 0, "present": 0, "put_failures": 0}, put_once=False, deadline_s=3600.0,
        )  # fmt: skip

    def _run(self, at: int, answers: tuple[Any, ...]) -> Any:
        """Return the next exchange of a process, or its result."""
        kind = self.kinds[at]
        process = int(kind[4:]) if kind.startswith("put") else OLD
        large = self._large(answers)
        with self._limits(process), mock.patch.object(manifests, "PART_BYTES", PART), mock.patch.object(
            values, "PARTS_TOGETHER", 1
        ):
            try:
                if kind == "get":
                    return large.read(KEY, None)
                if kind == "keep":
                    return large._keep_whole(KEY, KEEP_HARD, 9)
                return large.put([KEY], [memoryview(VALUES[process])], lambda *_: [], 1)[0]
            except _Pending as pending:
                return pending.call

    def _step(self, state: State, at: int, answers: tuple[Any, ...]) -> Iterator[tuple[str, State, str]]:
        kind, call = self.kinds[at], self._next(at, answers)
        assert type(call) is Call, "it has ended"
        banned = state.banned
        if kind == "get" and not answers and state.stored:
            banned = frozenset(VALUES[:1])  # a put has returned before the get began
        outcomes = [(self._act(state.store, call), state.full)]
        if call.what.startswith("put") and state.full:
            outcomes.append(((state.store, (Status.NO_SPACE,)), state.full - 1))
        for (store, answer), full in outcomes:
            got = (*answers, answer)
            following = self._next(at, got)
            ended = type(following) is not Call
            after = state._replace(
                store=store, answers=(*state.answers[:at], None if ended else got, *state.answers[at + 1 :]),
                banned=banned, full=full,
            )  # fmt: skip
            fault = ""
            if ended:
                after, fault = self._end(after, kind, following)
            yield f"{kind}: {call.what} -> {answer!r:.60}", after, fault

    def _act(self, store: frozenset[Entry], call: Call) -> tuple[frozenset[Entry], tuple[Any, ...]]:
        """Return the store after an exchange, and the answers."""
        there = {entry.name: entry for entry in store}
        found = [there.get(name) for name in call.names]
        if call.what == "read manifest":
            return store, tuple(entry.data if entry is not None and entry.manifest else b"" for entry in found)
        if call.what == "read":
            return store, tuple(MISS if entry is None else LARGE if entry.manifest else entry.data for entry in found)
        if call.what == "delete":
            gone = {entry for entry in found if entry is not None}
            return store - gone, tuple(Status.NOT_FOUND if entry is None else Status.OK for entry in found)
        if call.what == "keep":
            for entry in found:
                if entry is not None:
                    there[entry.name] = entry._replace(kept=bool(call.seconds))
            return frozenset(there.values()), tuple(Status.NOT_FOUND if each is None else Status.OK for each in found)
        (name,), manifest = call.names, call.what == "put manifest"
        before = there.get(name)
        stays = before is not None and before.kept and (not manifest or "mark_stays" in self.bugs)
        there[name] = Entry(name, manifest, call.data, stays)
        return frozenset(there.values()), (Status.OK,)

    # -- what must hold ---------------------------------------------------------------------------

    def _end(self, state: State, kind: str, result: Any) -> tuple[State, str]:
        if kind == "get":
            if type(result) is bytes and result not in VALUES:
                return state, f"a get returns {result!r}, which nobody has put"
            if result in state.banned:
                return state, f"a get returns {result!r}, which was replaced before it began"
            return state, self._kept_but_lost(state, result)
        if kind == "keep":
            return state._replace(kept=result == Status.OK), self._kept_wrong(state, result)
        if result == Status.OK:
            return state._replace(stored=(*state.stored, int(kind[4:]))), self._half_kept(state)
        names = set(self._manifest(int(kind[4:])).digests(KEY))
        left = [entry for entry in state.store if entry.name in names]
        return state, "a put that has failed leaves a part" if left else ""

    def _kept_but_lost(self, state: State, result: Any) -> str:
        alone = not any(kind.startswith("put") for kind in self.kinds)
        return "a kept value is a miss" if state.kept and alone and type(result) is not bytes else ""

    def _parts(self, state: State) -> list[Entry | None]:
        """Return the parts of the value that is there, None for a missing one."""
        there = {entry.name: entry for entry in state.store}
        raw = there.get(KEY)
        found = None if raw is None else Manifest.decode(KEY, raw.data)
        return [] if found is None else [there.get(name) for name in found.digests(KEY)]

    def _kept_wrong(self, state: State, status: int) -> str:
        if status != Status.OK:
            return "a keep that has failed leaves a part kept" if any(entry.kept for entry in state.store) else ""
        if any(each is None or not each.kept for each in self._parts(state)):
            return "a keep has succeeded, and a part of the value is not kept"
        return ""

    def _half_kept(self, state: State) -> str:
        """Return a fault if a put leaves a kept manifest, and nobody is about to keep or give up its parts."""
        if any(kind == "keep" and answers is not None for kind, answers in zip(self.kinds, state.answers)):
            return ""
        kept = any(entry.name == KEY and entry.kept for entry in state.store)
        half = kept and any(each is None or not each.kept for each in self._parts(state))
        return "a manifest is kept, and a part of its value is not" if half else ""


def broken(name: str, patch: Any) -> LargeModel:
    """Return the smallest model with a bug. ``patch`` is a ``pytest.MonkeyPatch``: most bugs are in the real code."""
    if name == "no_version":
        digest = Manifest.digest
        patch.setattr(Manifest, "digest", lambda self, key, at: digest(self._replace(version=bytes(16)), key, at))
    elif name == "missing_is_zero":
        read = Large._read_parts

        def filled(self: Large, key: bytes, manifest: Manifest, sink: Any) -> Any:
            plain = self._read_plain
            sizes = dict(zip(manifest.digests(key), (size for _, size in manifest.bounds())))

            def zeros(names: Sequence[bytes], sinks: Any) -> list[Any]:
                return [bytes(sizes[each]) if got == MISS else got for each, got in zip(names, plain(names, sinks))]

            self._read_plain = zeros
            return read(self, key, manifest, sink)

        patch.setattr(Large, "_read_parts", filled)
    elif name in ("no_drop", "manifest_only", "keeps_some"):
        real = Large.__init__

        def made(self: Large, *arguments: Any, **more: Any) -> None:
            real(self, *arguments, **more)
            keep = self._keep
            if name == "no_drop":
                self._delete = lambda names: [Status.OK] * len(names)
            elif name == "manifest_only":
                self._keep = lambda names, how, seconds: keep(names[-1:], how, seconds)
            else:
                self._keep = lambda names, how, seconds: keep(names, how, seconds) if seconds else []

        patch.setattr(Large, "__init__", made)
    elif name == "unchecked":

        def once(self: Large, digest: bytes, how: int, seconds: int) -> int:
            manifest = self.manifest(digest)
            names = [] if manifest is None else [*manifest.digests(digest), digest]
            answers = self._keep(names, how, seconds)
            return next((answer for answer in answers if answer != Status.OK), Status.OK)

        patch.setattr(Large, "_keep_whole", once)
    assert MANIFEST_BYTES == 64
    return LargeModel((name,), **SMALLEST[name])
