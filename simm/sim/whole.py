"""Run the product's own code for groups and for values in parts in a simulated client.

That code is written for threads: it asks, and waits for the answer. Here it is run from its beginning for each of its
exchanges, with the answers that it has got so far, up to the first exchange that has none yet. So it must do the same
with the same answers, and what is random in it comes from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

from ..arena.hashing import Hasher
from ..config.client_options import ClientOptions
from ..sdk.batch import LARGE, MISS
from ..sdk.calls.groups import GroupCalls
from ..sdk.large.manifest import MANIFEST_BYTES, Manifest
from ..sdk.large.values import Large
from ..wire.messages import Status
from .client import Client, Steps

#: Bytes of a part: the version of its put.
PART_BYTES: Final = 8
#: Values have one to so many parts. Those of one are ordinary values.
PARTS_MOST: Final = 4

#: Makes an exchange, given as a function that returns its steps, and returns its result.
Ask = Callable[[Callable[[], Steps]], Any]


class _Unanswered(BaseException):
    """The code has come to an exchange that has no answer yet."""

    def __init__(self, steps: Callable[[], Steps]) -> None:
        self.steps = steps


def replayed(code: Callable[[Ask], Any]) -> Steps:
    """Run code that waits for its exchanges as steps that yield; return its result. O(exchanges squared)."""
    answers: list[Any] = []
    while True:
        left = iter(answers)

        def ask(steps: Callable[[], Steps], left: Any = left) -> Any:
            for answer in left:
                return answer
            raise _Unanswered(steps)

        try:
            return code(ask)
        except _Unanswered as unanswered:
            steps = unanswered.steps
        answers.append((yield from steps()))


def value_bytes(version: int) -> int:
    """Return how many bytes the put of a version stores."""
    return PART_BYTES * (1 + version % PARTS_MOST)


def value_of(version: int) -> bytes:
    """Return what the put of a version stores: the version, over and over."""
    return version.to_bytes(PART_BYTES, "little") * (value_bytes(version) // PART_BYTES)


def _status(answer: Any) -> int:
    """Return the status of a mutation, of which there may be no answer."""
    return Status.UNAVAILABLE if answer is None else answer


# --- groups ---------------------------------------------------------------------------------------------


class Groups(GroupCalls):
    """``sdk/calls/groups.py`` over a simulated client. A value is a version of its key, a delete the next."""

    def __init__(self, client: Client, ask: Ask, hasher: Hasher) -> None:
        self._hasher = hasher
        self._options = ClientOptions()
        self._client = client
        self._ask = ask
        self._puts: Any = self
        self._versions: dict[bytes, int] = {}
        #: What was answered to each delete.
        self.deletes: dict[bytes, int] = {}

    def put_digests(self, digests: Sequence[bytes], sources: Sequence[Any], if_absent: bool | None = None) -> list[int]:
        """Store versions."""
        self._versions = {each: int.from_bytes(source, "little") for each, source in zip(digests, sources)}
        return [self._mutate("put", each, self._versions[each]) for each in digests]

    def group(self, groups: Sequence[Sequence[bytes]]) -> list[int]:
        """Make groups."""
        return [self._mutate("group", each[0], 0, tuple(each)) for each in groups]

    def delete_digests(self, digests: Sequence[bytes]) -> list[int]:
        """Drop what a failed put has left."""
        for digest in digests:
            self.deletes[digest] = self._mutate("delete", digest, self._versions[digest] + 1)
        return [*self.deletes.values()]

    def exists_digests(self, digests: Sequence[bytes]) -> list[bool]:
        """Ask for the keys of one group."""
        found: list[bool] = self._ask(lambda: self._client.exists(digests))
        return found

    def _mutate(self, kind: str, digest: bytes, version: int, digests: tuple[bytes, ...] = ()) -> int:
        return _status(self._ask(lambda: self._client.mutate(kind, digest, version, digests)))


def put_group(client: Client, hasher: Hasher, names: list[str], versions: list[int]) -> Steps:
    """Put a group; return whether it is stored, and else whether all of its keys were deleted."""

    def code(ask: Ask) -> tuple[bool, bool]:
        calls = Groups(client, ask, hasher)
        done = calls.put_group(names, [version.to_bytes(PART_BYTES, "little") for version in versions])
        return done, len(calls.deletes) == len(names) and set(calls.deletes.values()) == {Status.OK}

    return (yield from replayed(code))


def exists_group(client: Client, hasher: Hasher, names: list[str]) -> Steps:
    """Ask whether a group is there."""
    return (yield from replayed(lambda ask: Groups(client, ask, hasher).exists_groups([names])[0]))


# --- values in parts --------------------------------------------------------------------------------------


class SimLarge(Large):
    """``sdk/large`` over a simulated client, with a version that the caller has drawn."""

    def __init__(self, client: Client, ask: Ask, version: bytes = b"") -> None:
        self._client = client
        self._ask = ask
        self._version = version
        #: Where the last entry of a key was found.
        self.node = ""
        gets = SimpleNamespace(read_many=self._read_values)
        puts = SimpleNamespace(put=self._store, store=self._store, delete=self._drop_many, keep=None)
        made: Any = super().__init__
        made(
            gets, puts, None, SimpleNamespace(read_many=self._read_raw), SimpleNamespace(put=self._store_raw), None,
            {"large": 0, "present": 0, "put_failures": 0}, put_once=False, deadline_s=3600.0,
        )  # fmt: skip

    def _new_manifest(self, total: int) -> Manifest:
        return Manifest(total, PART_BYTES, self._version)

    def _look(self, digest: bytes) -> int:
        found, node = self._ask(lambda: self._client.get(digest))
        self.node = node or self.node
        return int(found)

    def _read_values(self, digests: Sequence[bytes], _sinks: Sequence[Any]) -> list[Any]:
        found = [self._look(digest) for digest in digests]
        return [LARGE if each < 0 else each.to_bytes(PART_BYTES, "little") if each else MISS for each in found]

    def _read_raw(self, digests: Sequence[bytes], rooms: Sequence[memoryview]) -> list[int]:
        lengths = []
        for digest, room in zip(digests, rooms):
            found = self._look(digest)
            if found < 0:
                room[:] = self._client.world.manifests[-1 - found]
            lengths.append(MANIFEST_BYTES if found < 0 else int(LARGE if found else MISS))
        return lengths

    def _mutate(self, kind: str, digest: bytes, version: int) -> int:
        return _status(self._ask(lambda: self._client.mutate(kind, digest, version)))

    def _store(self, digests: Sequence[bytes], sources: Sequence[Any]) -> list[int]:
        return [self._mutate("put", each, int.from_bytes(source, "little")) for each, source in zip(digests, sources)]

    def _store_raw(self, digests: Sequence[bytes], sources: Sequence[memoryview]) -> list[int]:
        statuses = []
        for digest, source in zip(digests, sources):

            def put(digest: bytes = digest, raw: bytes = bytes(source)) -> Steps:
                manifests = self._client.world.manifests
                manifests.append(raw)
                return self._client.mutate("put", digest, -len(manifests))

            statuses.append(_status(self._ask(put)))
        return statuses

    def _drop_many(self, digests: Sequence[bytes], _sizes: Sequence[int] | None = None) -> list[int]:
        return [self._mutate("delete", digest, 0) for digest in digests]


def put_large(client: Client, digest: bytes, version: int, random: bytes) -> Steps:
    """Put the value of a version; return the status."""

    def code(ask: Ask) -> int:
        large = SimLarge(client, ask, random)
        return large.put([digest], [memoryview(value_of(version))], large._store, PART_BYTES)[0]

    return (yield from replayed(code))


def delete_large(client: Client, digest: bytes) -> Steps:
    """Delete a value and its parts; return the status."""
    return (yield from replayed(lambda ask: SimLarge(client, ask).delete([digest])[0]))


def get_large(client: Client, digest: bytes) -> Steps:
    """Read a value; return its bytes, empty for a miss, and where its entry was found."""

    def code(ask: Ask) -> tuple[bytes, str]:
        large = SimLarge(client, ask)
        results: list[Any] = large._read_values([digest], [None])
        large.resolve([digest], [None], results)
        return (results[0] if type(results[0]) is bytes else b""), large.node

    return (yield from replayed(code))
