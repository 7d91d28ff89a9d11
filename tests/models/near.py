"""Near copies: values that are copied to hosts while they are deleted, evicted and put again, in every order.

Each process runs the real code: the thread that copies :meth:`simm.sdk.near.copies.Near._copy`, and a delete
:meth:`simm.sdk.near.copies.NearPuts.delete`. It is run from its beginning for each of its exchanges, with the answers
that it has got so far, up to the first one that has no answer yet, as in ``large.py``. The stores are restated: the
owner has the value or not, and each host its copy or not. The value of the key never changes, so a put stores what was
there before.

What must hold: when all have ended, and nobody has put the value since the last delete began, no host has a copy. A
process that copies may die. Its copy may then stay until its time has come (``NEAR_S``), as ``promotion.py`` says.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest import mock

from simm.sdk.batch import MISS
from simm.sdk.near.copies import Near, NearPuts
from simm.sdk.near.promotion import Promotion, near_digest
from simm.sdk.writes import Puts
from simm.wire.status import Status

KEY: Final = bytes(range(16))
VALUE: Final = b"value"
#: The shards of each host.
SHARDS: Final = ((100, 101), (200,))
#: By host the name of its copy.
COPIES: Final = tuple(near_digest(KEY, shards) for shards in SHARDS)

BUGS: Final = {
    "no_question": "who stores a copy does not ask the owner again",
    "asks_before": "it asks before it stores",
    "copies_first": "a delete drops the copies before the value",
    "own_host": "a delete drops the copy of one host only",
}
#: The smallest model that shows each bug.
SMALLEST: Final[dict[str, dict[str, int]]] = {
    "no_question": {"hosts": 1, "deletes": 1},
    "asks_before": {"hosts": 1, "deletes": 1},
    "copies_first": {"hosts": 1, "deletes": 1},
    "own_host": {"hosts": 2, "deletes": 1},
}


class Call(NamedTuple):
    """An exchange, or a look into an arena, with the names that it is about."""

    what: str
    names: tuple[bytes, ...] = (KEY,)


class _Pending(BaseException):
    """A process has come to an exchange that has no answer yet."""

    def __init__(self, call: Call) -> None:
        self.call = call


class State(NamedTuple):
    """A state. ``answers``: by process, None once it has ended. ``dead``: hosts on which one has died.

    ``deleted``: a delete has begun, and nobody has put the value since.
    """

    there: bool
    copies: frozenset[bytes]
    answers: tuple[tuple[Any, ...] | None, ...]
    dead: frozenset[int]
    deleted: bool
    puts: int
    evictions: int
    deaths: int


class NearModel:
    """The transition system.

    Args:
        hosts: hosts with a process that copies. ``both``: the first one has two of them.
        deletes, puts, evictions, deaths: how often each may happen.
    """

    def __init__(
        self, *, hosts: int = 1, both: bool = False, deletes: int = 0, puts: int = 0, evictions: int = 0,
        deaths: int = 0,
    ) -> None:  # fmt: skip
        self.hosts = [*range(hosts), *[0] * both]
        self.kinds = [*(f"copy to {host}" for host in self.hosts), *["delete"] * deletes]
        self.budget = puts, evictions, deaths
        self._next = lru_cache(maxsize=None)(self._run)

    def initial(self) -> State:
        return State(True, frozenset(), ((),) * len(self.kinds), frozenset(), False, *self.budget)

    def describe(self, state: State) -> str:
        steps = ("ended" if answers is None else len(answers) for answers in state.answers)
        ways = ", ".join(f"{kind}: {step}" for kind, step in zip(self.kinds, steps))
        return f"{'there' if state.there else 'gone'}, {len(state.copies)} copies | {ways}"

    def fault(self, state: State) -> str:
        if any(answers is not None for answers in state.answers) or not state.deleted:
            return ""
        left = state.copies - {COPIES[host] for host in state.dead}
        return "a copy is left of a value that was deleted" if left else ""

    def successors(self, state: State) -> Iterator[tuple[str, State, str]]:
        for at, answers in enumerate(state.answers):
            if answers is None:
                continue
            yield self._step(state, at, answers)
            if state.deaths and at < len(self.hosts):
                ended = (*state.answers[:at], None, *state.answers[at + 1 :])
                dead = state.dead | {self.hosts[at]}
                yield f"{self.kinds[at]}: dies", state._replace(answers=ended, dead=dead, deaths=state.deaths - 1), ""
        if state.puts:
            yield "the value is put", state._replace(there=True, deleted=False, puts=state.puts - 1), ""
        if state.evictions:
            less = state._replace(evictions=state.evictions - 1)
            if state.there:
                yield "the value is evicted", less._replace(there=False), ""
            for copy in state.copies:
                yield "a copy is evicted", less._replace(copies=state.copies - {copy}), ""

    # -- processes --------------------------------------------------------------------------------

    def _step(self, state: State, at: int, answers: tuple[Any, ...]) -> tuple[str, State, str]:
        call = self._next(at, answers)
        assert type(call) is Call, "it has ended"
        after, answer = self._act(state, call)
        got = (*answers, answer)
        ended = type(self._next(at, got)) is not Call
        ways = (*state.answers[:at], None if ended else got, *state.answers[at + 1 :])
        return f"{self.kinds[at]}: {call.what} -> {answer!r:.40}", after._replace(answers=ways), ""

    def _act(self, state: State, call: Call) -> tuple[State, Any]:
        """Return the state after an exchange, and the answer."""
        if call.what in ("read", "ask"):
            return state, state.there
        if call.what == "look":
            return state, call.names[0] in state.copies
        if call.what == "store":
            return state._replace(copies=state.copies | {*call.names}), True
        if call.what == "drop":
            return state._replace(copies=state.copies - {*call.names}), True
        assert call.what == "delete", call
        return state._replace(there=False, deleted=True), state.there

    def _run(self, at: int, answers: tuple[Any, ...]) -> Any:
        """Return the next exchange of a process, or its result."""
        left = iter(answers)

        def ask(call: Call) -> Any:
            for answer in left:
                return answer
            raise _Pending(call)

        host = self.hosts[at] if at < len(self.hosts) else 0
        near = _near(ask, host)
        try:
            if at < len(self.hosts):
                return near._copy([KEY], memoryview(bytearray(near._piece)))
            made: Any = NearPuts.__new__(NearPuts)
            made.near = near
            made._routes = SimpleNamespace(patience=nullcontext)

            def delete(_: Any, digests: Sequence[bytes], _sizes: Any = None) -> list[int]:
                return [Status.OK if ask(Call("delete")) else Status.NOT_FOUND for _ in digests]

            with mock.patch.object(Puts, "delete", delete):
                return made.delete([KEY])
        except _Pending as pending:
            return pending.call


def _near(ask: Any, host: int) -> Any:
    """Return the near copies of a client on a host, whose exchanges are made by ``ask``."""
    near: Any = Near.__new__(Near)
    near._lock, near._promotion, near._piece = threading.Lock(), Promotion(), 64

    def read_many(digests: Sequence[bytes], sinks: Sequence[memoryview]) -> list[int]:
        found = [ask(Call("read", (digest,))) for digest in digests]
        for sink in (sink for sink, there in zip(sinks, found) if there):
            sink[: len(VALUE)] = VALUE
        return [len(VALUE) if there else int(MISS) for there in found]

    def drop(digests: Sequence[bytes], _sizes: Any = None) -> list[int]:
        return [Status.OK if ask(Call("drop", (digest,))) else Status.NOT_FOUND for digest in digests]

    def target(digest: bytes) -> Any:
        if digest == KEY:
            return SimpleNamespace(reader=None)
        return SimpleNamespace(reader=SimpleNamespace(has_own=lambda name: ask(Call("look", (name,)))))

    near._plain = SimpleNamespace(
        read_many=read_many, stored_many=lambda digests: [ask(Call("ask", (digest,))) for digest in digests]
    )
    near._drops = SimpleNamespace(delete=drop)
    near._routes = SimpleNamespace(target=target)
    near._await_shards = lambda: SHARDS[host]
    near._store = lambda name, value: bytes(value) == VALUE and ask(Call("store", (name,)))
    near._copies_everywhere = lambda digests: [list(COPIES) for _ in digests]
    return near


def broken(name: str, patch: Any) -> NearModel:
    """Return the smallest model with a bug in the real code. ``patch`` is a ``pytest.MonkeyPatch``."""
    if name == "no_question":
        copy = Near._copy

        def trusting(self: Any, digests: Sequence[bytes], scratch: memoryview) -> int:
            self._plain.stored_many = lambda asked: [True] * len(asked)
            return copy(self, digests, scratch)

        patch.setattr(Near, "_copy", trusting)
    elif name == "asks_before":
        real = Near._copy

        def hasty(self: Any, digests: Sequence[bytes], scratch: memoryview) -> int:
            plain, answers = self._plain, []
            read, asked = plain.read_many, plain.stored_many

            def read_and_ask(wanted: Sequence[bytes], sinks: Sequence[memoryview]) -> list[int]:
                got: list[int] = read(wanted, sinks)
                answers.extend(asked(wanted))
                return got

            plain.read_many, plain.stored_many = read_and_ask, lambda wanted: answers[: len(wanted)]
            return real(self, digests, scratch)

        patch.setattr(Near, "_copy", hasty)
    elif name == "copies_first":

        def reverse(self: Any, digests: Sequence[bytes], sizes: Any = None) -> list[int]:
            self.near.delete(digests, sizes)
            return Puts.delete(self, digests, sizes)

        patch.setattr(NearPuts, "delete", reverse)
    else:
        everywhere = Near.delete

        def here(self: Any, digests: Sequence[bytes], sizes: Any) -> None:
            self._copies_everywhere = lambda wanted: [[COPIES[0]] for _ in wanted]
            everywhere(self, digests, sizes)

        patch.setattr(Near, "delete", here)
    return NearModel(**SMALLEST[name])
