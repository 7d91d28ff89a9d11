"""One client that puts and gets, and verifies what each call gave. See the package."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from simm.client import Client
from tests.support.values import count_in, value_of
from tests.support.waiting import WAIT_S, wait_until

KINDS: Final = ("get", "put", "delete")
GET, PUT, DELETE = range(3)
#: Outcomes. MISS: a get found nothing, a delete nothing to delete. FAILED: a put returned False. OUTAGE: a get or
#: delete missed because the server could not be asked. LOST: a miss where everything fits.
OK, MISS, FAILED, OUTAGE, WRONG, BACK, RAISED, LOST = range(8)
OUTCOMES: Final = ("ok", "miss", "failed", "outage", "wrong", "back", "raised", "lost")
#: What must not happen: the last four outcomes, a call that takes too long, and a write after a call has returned.
FAULTS: Final = ("wrong", "back", "raised", "lost", "written")
SIZES: Final = (2000, 4096, 5000, 16 << 10, 60_000, 200_000)
#: Operation -> weight.
MIX: Final[Mapping[str, float]] = {"get": 0.45, "put": 0.35, "put_many": 0.08, "get_into_many": 0.08, "delete": 0.04}
#: What a watched buffer holds while no call uses it.
POISON: Final = 0xEE
#: Views held at a time.
_VIEWS: Final = 2
#: Complaints kept in words.
_WORDS: Final = 20


def key_of(writer: int, number: int, prefix: str = "load") -> str:
    """Return a key that only this writer writes."""
    return f"{prefix}/{writer}/{number}"


class Buffer:
    """Memory to get into, registered with the client perhaps."""

    def __init__(self, client: Client, size: int, registered: bool) -> None:
        self.data = np.full(size, POISON, np.uint8)
        self.span: Any = client.register(self.data) if registered else None

    @property
    def target(self) -> Any:
        """The registered memory if there is some, otherwise the plain one."""
        return self.data if self.span is None else self.span


class Settings(NamedTuple):
    """What a load does.

    Attributes:
        seed: of all choices.
        prefix: of its keys.
        writers: the load gets the keys of so many writers; ``own_only``: only its own.
        keys: of each writer.
        sizes: lengths of values; ``batch_sizes`` of those of ``put_many``, if not the same.
        batch: keys of a batch.
        mix: operation -> weight; an operation is a method of :class:`Load`.
        deletes: False takes deletes out of the mix.
        complete: everything fits, so no acknowledged value may be missing.
        constant: each key has one value, which is put again and again.
        registered: get into memory that is registered with the client; single gets in turn with plain memory.
        watched: look for writes into that memory after the call.
        pause_s: mean pause between two calls.
    """

    seed: int = 0
    prefix: str = "load"
    writers: int = 1
    own_only: bool = False
    keys: int = 40
    sizes: Sequence[int] = SIZES
    batch_sizes: Sequence[int] = ()
    batch: int = 8
    mix: Mapping[str, float] = MIX
    deletes: bool = True
    complete: bool = False
    constant: bool = False
    registered: bool = False
    watched: bool = False
    pause_s: float = 0.002


class Load:
    """The load of one client, which this thread alone uses. ``number`` is that of its writer."""

    def __init__(self, client: Client, number: int, settings: Settings, *, keep_rows: bool = False) -> None:
        self.client = client
        self.number = number
        self.settings = settings
        self.rng = random.Random(f"load {settings.seed} {number}")
        #: Beyond those of any load before us, whose values may still be there.
        self.count = time.monotonic_ns() // 1000
        #: key -> least count that may be seen.
        self.floor: dict[str, int] = {}
        #: Own keys whose value was acknowledged and not deleted since.
        self.stored: set[str] = set()
        self.calls = 0
        #: (kind, outcome) -> keys.
        self.tally: Counter[tuple[int, int]] = Counter()
        self.faults: Counter[str] = Counter()
        #: Why puts failed, as the client says, and how many of them.
        self.refusals: Counter[str] = Counter()
        #: Complaints, the first few.
        self.said: list[str] = []
        #: Keys since the last one that failed, or could not be asked for.
        self.streak = 0
        self.slowest_s = 0.0
        #: Processor time of the last call.
        self.processor_s = 0.0
        self._processor_began = 0.0
        #: When the call in flight began, monotonic seconds; 0 between two.
        self.in_call_since = 0.0
        self.rows: list[tuple[float, float, int, int, int, int, float]] | None = [] if keep_rows else None
        count = settings.batch if any("into" in name for name in settings.mix) else 0
        self.buffers = deque(Buffer(client, max(settings.sizes), settings.registered) for _ in range(count))
        #: Those whose memory is registered.
        self.registered = [buffer for buffer in self.buffers if buffer.span is not None]
        self._constants: dict[str, bytes] = {}
        self._views: deque[tuple[str, Any, int]] = deque()
        mix = {name: weight for name, weight in settings.mix.items() if settings.deletes or name != "delete"}
        self._names = list(mix)
        self._weights = list(mix.values())

    # -- what is noted ------------------------------------------------------------------------------

    def fault(self, what: str, text: str) -> None:
        """Note what must not happen."""
        self.faults[what] += 1
        if len(self.said) < _WORDS:
            self.said.append(f"{what}: {text}")

    def _note_refused(self, count: int) -> None:
        if count:
            why: str = self.client.stats()["last_put_failure"]
            self.refusals[why if why in self.refusals or len(self.refusals) < _WORDS else "others"] += count

    def note(self, began: float, took: float, kind: int, outcome: int, number: int) -> None:
        """Note that a call, or one key of a batch, is done."""
        self.tally[kind, outcome] += 1
        self.streak = 0 if outcome in (FAILED, OUTAGE) else self.streak + 1
        if self.rows is not None:
            router = self.client._router
            epoch = router.epoch if router is not None else 0
            self.rows.append((began, took, kind, outcome, number, epoch, self.processor_s))

    def begin(self) -> float:
        """Begin a call, and return when."""
        self._processor_began = time.thread_time()
        self.in_call_since = began = time.monotonic()
        return began

    def took(self, began: float) -> float:
        """Return how long the call has taken, seconds."""
        took = time.monotonic() - began
        self.in_call_since = 0.0
        self.processor_s = time.thread_time() - self._processor_began
        self.slowest_s = max(self.slowest_s, took)
        return took

    @property
    def noted(self) -> int:
        """The number of keys of all calls so far."""
        return sum(self.tally.values())

    # -- keys and values --------------------------------------------------------------------------------

    def key(self, writer: int, number: int) -> str:
        """Return a key of this load's."""
        return key_of(writer, number, self.settings.prefix)

    def any_key(self) -> tuple[int, int]:
        """Return writer and number of a key to get."""
        writer = self.number if self.settings.own_only else self.rng.randrange(self.settings.writers)
        return writer, self.rng.randrange(self.settings.keys)

    def next_value(self, number: int, sizes: Sequence[int] = ()) -> tuple[int, bytes]:
        """Return the value to put under an own key, and its count."""
        key = self.key(self.number, number)
        if self.settings.constant:
            if key not in self._constants:
                length = self.settings.sizes[number % len(self.settings.sizes)]
                self._constants[key] = value_of(key, self.number, 1, length)
            return 1, self._constants[key]
        self.count += 1
        return self.count, value_of(key, self.number, self.count, self.rng.choice(sizes or self.settings.sizes))

    def acknowledge(self, key: str, count: int) -> None:
        """A put of ours has returned True."""
        self.floor[key] = count
        self.stored.add(key)

    def judge(self, key: str, data: bytes | memoryview) -> int:
        """Verify a hit, and return its outcome."""
        seen = count_in(key, data)
        least = self.floor.get(key, 0)
        if seen < 0:
            self.fault("wrong", f"{key}: {len(data)} bytes that are no value of it")
            return WRONG
        if seen < least:
            self.fault("back", f"{key}: count {seen}, seen or stored was {least}")
            return BACK
        self.floor[key] = seen
        return OK

    def miss(self, key: str, outage: bool) -> int:
        """Return the outcome of a get without a value."""
        if outage:
            return OUTAGE
        if self.settings.complete and key in self.stored:
            self.fault("lost", f"{key}: count {self.floor[key]} was acknowledged and is not there")
            return LOST
        return MISS

    # -- operations: methods that a mix names -------------------------------------------------------------

    def put(self, number: int | None = None) -> None:
        """Put a new value."""
        if number is None:
            number = self.rng.randrange(self.settings.keys)
        key = self.key(self.number, number)
        count, value = self.next_value(number)
        began = self.begin()
        stored = self.client.put(key, value)
        took = self.took(began)
        if stored:
            self.acknowledge(key, count)
        self._note_refused(not stored)
        self.note(began, took, PUT, OK if stored else FAILED, number)

    def put_many(self) -> None:
        """Put a batch of new values."""
        numbers = self.rng.sample(range(self.settings.keys), min(self.settings.batch, self.settings.keys))
        keys = [self.key(self.number, number) for number in numbers]
        fresh = [self.next_value(number, self.settings.batch_sizes) for number in numbers]
        began = self.begin()
        stored = self.client.put_many(keys, [value for _, value in fresh])
        took = self.took(began)
        self._note_refused(len(stored) - sum(stored))
        for key, number, (count, _), done in zip(keys, numbers, fresh, stored):
            if done:
                self.acknowledge(key, count)
            self.note(began, took, PUT, OK if done else FAILED, number)

    def delete(self) -> None:
        """Delete an own key."""
        number = self.rng.randrange(self.settings.keys)
        key = self.key(self.number, number)
        outages = self.client.counters["outages"]
        self.stored.discard(key)
        began = self.begin()
        gone = self.client.delete(key)
        took = self.took(began)
        outcome = OK if gone else OUTAGE if self.client.counters["outages"] > outages else MISS
        if outcome != OUTAGE:
            self.floor[key] = self.count + 1  # what was there must not come back
        self.note(began, took, DELETE, outcome, number)

    def get(self) -> None:
        """Get a value as bytes."""
        writer, number = self.any_key()
        key = self.key(writer, number)
        misses = self.client.counters["misses"]
        began = self.begin()
        data = self.client.get(key)
        took = self.took(began)
        if data is None:
            outcome = self.miss(key, self.client.counters["misses"] == misses)
        else:
            outcome = self.judge(key, data)
        self.note(began, took, GET, outcome, number)

    def get_into(self) -> None:
        """Get a value into a buffer."""
        writer, number = self.any_key()
        key = self.key(writer, number)
        (buffer,) = self.take_buffers(1)
        target = buffer.target if self.rng.random() < 0.5 else buffer.data
        misses = self.client.counters["misses"]
        began = self.begin()
        got = self.client.get_into(key, target)
        took = self.took(began)
        if got is None:
            outcome = self.miss(key, self.client.counters["misses"] == misses)
        else:
            outcome = self.judge(key, memoryview(buffer.data)[:got])
        self.release([buffer])
        self.note(began, took, GET, outcome, number)

    def get_into_many(self) -> None:
        """Get a batch into buffers. Which of its misses were outages is told from the counters, for all alike."""
        wanted = [self.any_key() for _ in range(self.settings.batch)]
        keys = [self.key(*each) for each in wanted]
        buffers = self.take_buffers(len(keys))
        outages = self.client.counters["outages"]
        began = self.begin()
        results = self.client.get_into_many(keys, [buffer.target for buffer in buffers])
        took = self.took(began)
        failed = self.client.counters["outages"] - outages
        for key, (_, number), buffer, got in zip(keys, wanted, buffers, results):
            if got is None:
                outcome = self.miss(key, failed > 0)
                failed -= 1
            else:
                outcome = self.judge(key, memoryview(buffer.data)[:got])
            self.note(began, took, GET, outcome, number)
        self.release(buffers)

    def exists_many(self) -> None:
        """Ask for a batch of keys. Any answer is right."""
        began = self.begin()
        self.client.exists_many([self.key(*self.any_key()) for _ in range(self.settings.batch)])
        self.took(began)

    def view(self) -> None:
        """Look at a value in place, and once more when a few other views have been taken."""
        writer, number = self.any_key()
        key = self.key(writer, number)
        misses = self.client.counters["misses"]
        began = self.begin()
        view = self.client.view(key)
        took = self.took(began)
        if not view:
            outcome = self.miss(key, self.client.counters["misses"] == misses)
        else:
            outcome = self.judge(key, view.data)
            self._views.append((key, view, count_in(key, view.data)))
        self.note(began, took, GET, outcome, number)

    def drop_views(self, keep: int) -> None:
        """Verify the oldest views once more and close them."""
        while len(self._views) > keep:
            key, view, seen = self._views.popleft()
            if count_in(key, view.data) != seen:
                self.fault("wrong", f"{key}: a view's bytes changed")
            view.close()

    # -- buffers --------------------------------------------------------------------------------------

    def take_buffers(self, count: int) -> list[Buffer]:
        """Take the buffers that were given back first; a watched one must be as it was then."""
        taken = [self.buffers.popleft() for _ in range(count)]
        for buffer in taken:
            self.look(buffer)
        return taken

    def release(self, buffers: Sequence[Buffer]) -> None:
        """From now on nothing may write into these."""
        for buffer in buffers:
            if self.settings.watched:
                buffer.data[:] = POISON
            self.buffers.append(buffer)

    def look(self, buffer: Buffer) -> None:
        """Note a write into a watched buffer after its call had returned."""
        if self.settings.watched and (buffer.data != POISON).any():
            self.fault("written", "a buffer was written after the call had returned")

    # -- all of it -------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Put all own keys once."""
        for number in range(self.settings.keys):
            self.put(number)

    def step(self) -> None:
        """Make one call, chosen by the seed. An exception is a fault."""
        (name,) = self.rng.choices(self._names, self._weights)
        call: Callable[[], None] = getattr(self, name)
        self.calls += 1
        began = time.monotonic()
        try:
            call()
            self.drop_views(_VIEWS)
        except Exception as exc:
            self.fault("raised", f"{name} at {began:.3f}: {type(exc).__name__}: {exc}")
            kind = DELETE if name == "delete" else PUT if name.startswith("put") else GET
            self.note(began, time.monotonic() - began, kind, RAISED, 0)

    def run(self, over: Callable[[], bool]) -> None:
        """Make calls until ``over`` returns True, and look at all that is still held."""
        pause_s = self.settings.pause_s
        while not over():
            self.step()
            if pause_s:
                time.sleep(pause_s * self.rng.uniform(0.5, 1.5))
        self.drop_views(0)
        for buffer in self.buffers:
            self.look(buffer)

    def figures(self) -> dict[str, int]:
        """Return what was counted: calls, keys by outcome, and each fault."""
        return {
            "ops": self.calls,
            "stored": self.tally[PUT, OK],
            "deleted": self.tally[DELETE, OK],
            "hits": self.tally[GET, OK],
            "outages": self.client.counters["outages"],
            **{name: self.faults[name] for name in FAULTS},
        }


class LoadThread:
    """``with LoadThread(load): ...`` runs a load in a thread; :meth:`check` afterwards raises AssertionError."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self._end = threading.Event()
        self._thread = threading.Thread(target=load.run, args=(self._end.is_set,), name=load.settings.prefix)

    def __enter__(self) -> LoadThread:
        self.load.fill()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def wait_calls(self, more: int = 10, timeout_s: float = WAIT_S) -> None:
        """Wait until so many more calls have returned: it is not stuck."""
        wanted = self.load.noted + more

        def reached() -> bool:
            assert not self.load.faults, self.load.said
            return self.load.noted >= wanted

        wait_until(reached, lambda: f"calls of {self._thread.name} return, after {self.load.noted}", timeout_s)

    def check(self) -> None:
        """After the end: assert that there was no fault, and some hit. Deregister its memory."""
        assert not self.load.faults, self.load.said
        assert self.load.tally[GET, OK] > 0
        for buffer in self.load.registered:
            self.load.client.deregister(buffer.span)

    def __str__(self) -> str:
        tally = self.load.tally
        return (
            f"{self.load.noted} calls: {tally[GET, OK]} hits, {tally[GET, MISS] + tally[GET, OUTAGE]} misses, "
            f"{tally[PUT, OK]} stored, {tally[PUT, FAILED]} not; the slowest took {self.load.slowest_s:.2f} s"
        )
