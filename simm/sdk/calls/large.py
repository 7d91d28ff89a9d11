"""What the client does about values above ``VALUE_BYTES_MAX``: see docs/large.md and ``sdk/large``.

The client's own methods call this for a value that is too large as it is, and for an entry that is a manifest. Both
show where sizes and flags are looked at in any case. Nothing of it is loaded before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ...constants import VALUE_BYTES_MAX
from ...errors import UsageError
from ...wire.status import Status
from ..batch import LARGE, UNLOADABLE, Mistake, NoValue, Result, View

if TYPE_CHECKING:
    from ...config.client_options import ClientOptions
    from ...host.buffers import Copier
    from ...ipc.tally import Tallies
    from ..large.values import Large
    from ..ops.replicas import Replicas
    from ..reads import Gets
    from ..routing import Routes
    from ..writes import Puts


class _NoLarge:
    """In place of :class:`~simm.sdk.large.values.Large` while the process has no descriptor left to load its modules.

    What it is asked for is a miss, or fails, and counts as an outage.
    """

    def __init__(self, counters: dict[str, int]) -> None:
        self._counters = counters

    def _out(self, count: int) -> list[int]:
        self._counters["outages"] += count
        return [Status.UNAVAILABLE] * count

    def put(
        self, digests: Sequence[bytes], sources: Sequence[Any],
        put_others: Callable[[Sequence[bytes], Sequence[Any]], list[int]], limit: int, _if_absent: bool,
    ) -> list[int]:  # fmt: skip
        """Store the values that need no parts."""
        statuses: list[int] = [Status.UNAVAILABLE] * len(digests)
        small = [at for at, source in enumerate(sources) if len(source) <= limit]
        self._out(len(digests) - len(small))
        if small:
            for at, status in zip(small, put_others([digests[at] for at in small], [sources[at] for at in small])):
                statuses[at] = status
        return statuses

    def read(self, _digest: bytes, _sink: Any) -> NoValue:
        """Return that there is no value."""
        self._out(1)
        return NoValue.UNAVAILABLE

    def resolve(self, _digests: Sequence[bytes], _sinks: Sequence[Any], results: list[Any]) -> None:
        """Replace what is in parts by a miss."""
        for at, got in enumerate(results):
            if got is LARGE:
                results[at] = self.read(b"", None)

    def view(self, _digest: bytes) -> View:
        """Return the view of a miss."""
        self._out(1)
        return View.miss()

    def delete(self, digests: Sequence[bytes], _sizes: Sequence[int] | None = None) -> list[int]:
        """Drop nothing: parts without their manifest would stay."""
        return self._out(len(digests))

    def keep(self, _digests: Sequence[bytes], statuses: list[int], _how: int, _seconds: int) -> None:
        """Keep none of those in parts."""
        for at, status in enumerate(statuses):
            if status == Status.TOO_LARGE:
                (statuses[at],) = self._out(1)

    def manifest(self, _digest: bytes) -> None:
        """Return that there is none."""
        self._out(1)

    def with_parts(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return the digests alone."""
        return [*digests]


class LargeCalls:
    """A part of :class:`simm.client.Client`."""

    checksum: bool
    _routes: Routes
    _copier: Copier
    _options: ClientOptions
    _counters: dict[str, int]
    _tallies: Tallies
    _gets: Gets
    _puts: Puts
    _replicas: Replicas | None
    _made_large: Large | None = None

    if TYPE_CHECKING:

        def put_digests(
            self, digests: Sequence[bytes], sources: Sequence[Any], if_absent: bool | None = None
        ) -> list[int]:
            """Store values; return a Status for each."""

        def get_digests(self, digests: Sequence[bytes], sinks: Sequence[Any]) -> list[Result]:
            """Copy values out; return each value's length, or why there is none."""

    @property
    def _large(self) -> Large:
        """What reads and puts values in parts. Two threads may make one each, which is harmless."""
        if self._made_large is None:
            try:
                from ..large.values import Large

                gets, puts, replicas = self._manifest_paths()
                look = self._manifest_look(puts)
            except UNLOADABLE:
                return cast("Large", _NoLarge(self._counters))
            self._made_large = Large(
                self._gets, self._puts, self._replicas, gets, puts, replicas, self._counters,
                put_once=self._options.replicas == 2, deadline_s=self._options.deadline_s, look=look,
            )  # fmt: skip
        return self._made_large

    def _manifest_paths(self) -> tuple[Gets, Puts, Replicas | None]:
        """Return what reads and puts manifests."""
        from ..large.kinds import ManifestGets, ManifestPuts, ShmManifestPut

        gets = ManifestGets(self._routes, self._copier, self.checksum, self._counters, None, self._tallies)
        shm = ShmManifestPut(self._copier, self.checksum)
        puts = ManifestPuts(self._routes, shm, self._copier, self._options, self._counters, self._tallies)
        if self._replicas is None:
            return gets, puts, None
        from ..ops.replicas import Replicas

        return gets, puts, Replicas(self._routes, gets, puts, self._counters)

    def _manifest_look(self, puts: Puts) -> Callable[[Sequence[bytes], Sequence[Any]], list[Any]] | None:
        """Return what reads manifests that nobody has asked a value of. Nobody sees what it counts."""
        from ...ipc.tally import Tallies
        from ..large.kinds import ManifestLooks

        own = dict.fromkeys(self._counters, 0)
        gets = ManifestLooks(self._routes, self._copier, self.checksum, own, None, Tallies())
        if self._replicas is None:
            return gets.read_many
        from ..ops.replicas import Replicas

        return Replicas(self._routes, gets, puts, own).read

    def put_mixed(self, digests: Sequence[bytes], sources: Sequence[Any], if_absent: bool | None = None) -> list[int]:
        """Do ``put_digests`` for values of which some must be stored in parts."""
        absent = self._options.put_if_absent if if_absent is None else if_absent

        def put_others(names: Sequence[bytes], values: Sequence[Any]) -> list[int]:
            return self.put_digests(names, values, if_absent)

        return self._large.put(digests, sources, put_others, VALUE_BYTES_MAX, absent)

    def _read_large(self, digests: Sequence[bytes], sinks: Sequence[Any]) -> list[Any]:
        """Do ``get_digests`` for values of which some may be in parts, within one deadline."""
        from ...net.allowance import ALLOWANCE

        read = self._gets.read_many if self._replicas is None else self._replicas.read
        if self._routes.all_mapped():
            # Most often the parts, if there are any, are all that may cost time, but a shard may have begun to move.
            # Copies may take long, too, and cost nothing by that: parts in mapped arenas are read whatever is left.
            deadline_s = self._options.deadline_s
            began = time.monotonic()
            results = read(digests, sinks)
            took_s = time.monotonic() - began
            if took_s <= deadline_s / 10 or ALLOWANCE.seconds != math.inf:  # a call around this one counts by itself
                self._large.resolve(digests, sinks, results)
                return results
            patience = self._routes.patience()
            patience.take_off(min(took_s, deadline_s))
            with patience:
                self._large.resolve(digests, sinks, results)
            return results
        with self._routes.patience():
            results = read(digests, sinks)
            self._large.resolve(digests, sinks, results)
        return results

    def get_mixed(self, digests: Sequence[bytes], sinks: Sequence[Any]) -> list[Result]:
        """Do ``get_digests`` for ranges of which some only a value in parts can have. A mistake costs its own key."""
        from ..ops.parts import is_wide  # the client has loaded it

        with self._routes.patience():
            return self._get_mixed(digests, sinks, [at for at, sink in enumerate(sinks) if not is_wide(sink)])

    def _get_mixed(self, digests: Sequence[bytes], sinks: Sequence[Any], near: Sequence[int]) -> list[Result]:
        results: list[Any] = [LARGE] * len(digests)
        if near:
            got = self.get_digests([digests[at] for at in near], [sinks[at] for at in near])
            for at, result in zip(near, got):
                results[at] = result
        for at, result in enumerate(results):
            if result is LARGE:
                try:
                    results[at] = self._large.read(digests[at], sinks[at])
                except UsageError as exc:
                    results[at] = Mistake.of(str(exc))
        return results
