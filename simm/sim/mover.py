"""A mover, as ``mover.py`` has it: freeze there, adopt here, list and copy what is lacking, finish, retry, give up.

One exchange after the other for each previous owner; a copy takes as long as its bytes take at ``move_bytes_s``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from ..hashing import shard_of
from ..messages import WorkerInfo
from ..shards import EPOCH_MASK, FROZEN
from .net import Process

if TYPE_CHECKING:
    from .server import Arena, Server, Worker

FREEZE_S: Final = 2.0
GIVE_UP_S: Final = 10.0
RETRY_S: Final = (0.02, 0.2)
REPLAN_S: Final = 1.0
GROUP_SHARDS: Final = 256
BATCH_KEYS: Final = 64
#: An exchange of a mover that nobody answers.
EXCHANGE_S: Final = 1.0


class Mover:
    """Brings what moved to one worker; see ``mover.py``."""

    def __init__(self, server: Server, worker: Worker) -> None:
        self.server = server
        self.worker = worker
        self.net = server.net
        self.process = Process(self.net, server.host, f"{server.name}/mover{worker.number}")
        self.process.start()
        self.taken: dict[int, int] = {}
        self._replanning = False

    def _still(self, since: dict[int, int]) -> list[int]:
        """Those that the newest map still gives us by the same epoch, and that are not here yet."""
        member = self.server.member
        if member.map is None:
            return []
        moving = set(member.moving(self.worker.number, self.worker.arena.words))
        known = member.map.since
        return [shard for shard, epoch in since.items() if shard in moving and known[shard] == epoch]

    def replan(self) -> None:
        """Start on what the map wants and nobody works on."""
        member = self.server.member
        if member.map is None or not self.process.running:
            return
        known = member.map.since
        moving = member.moving(self.worker.number, self.worker.arena.words)
        wanted = {shard: known[shard] for shard in moving}
        if not wanted:
            self.server.report()
            return
        for info, shards in member.tasks(self.worker.number):
            fresh = {
                shard: wanted[shard] for shard in shards if shard in wanted and self.taken.get(shard) != wanted[shard]
            }
            if fresh:
                self.taken.update(fresh)
                self._freeze(info, member.epoch, fresh, self.net.now + FREEZE_S)
        if not self._replanning:
            self._replanning = True
            self.process.later(REPLAN_S, self._again)

    def _again(self) -> None:
        self._replanning = False
        self.replan()

    def _call(
        self,
        target: Process | None,
        act: Callable[..., Any],
        details: tuple[Any, ...],
        done: Callable[[Any, bool], None],
    ) -> None:
        """An exchange: ``done(answer, True)``, or ``done(None, False)`` when there is none; once."""
        state = {"open": True}

        def finish(answer: Any, ok: bool) -> None:
            if state["open"]:
                state["open"] = False
                done(answer, ok)

        def there() -> None:
            answer = act(*details)
            if target is not None:
                self.net.send(target, self.process, finish, answer, True)

        if target is None or not self.net.send(self.process, target, there):
            self.process.later(0.01 if target is None or not target.running else EXCHANGE_S, finish, None, False)
            return
        self.process.later(EXCHANGE_S, finish, None, False)

    def _peer(self, info: WorkerInfo) -> Server | None:
        """The server that a map names, if it is still that instance."""
        server = self.server.world.servers.get(info.node)
        return server if server is not None and server.instance == info.instance and server.up else None

    def _freeze(self, info: WorkerInfo, epoch: int, since: dict[int, int], until: float) -> None:
        if not self._still(since):
            self._put_back(since)
            return
        peer = self._peer(info)
        worker = peer.workers[info.worker] if peer is not None else None

        def frozen(answer: list[int] | None, ok: bool) -> None:
            if ok and answer is None:
                self.net.say(f"{self.process.name}: {info.node} has a newer map than {epoch}")
                self._put_back(since)
            elif ok:
                assert answer is not None
                self._adopt(info, since, set(answer))
            elif self.net.now > until:
                self.net.say(f"{self.process.name}: {info.node} cannot be reached, {len(since)} shards without it")
                self._adopt(info, since, set())
            else:
                self.process.later(self.net.random.uniform(*RETRY_S), self._freeze, info, epoch, since, until)

        shards = list(since)
        if worker is None:
            self._call(None, _nothing, (), frozen)
        else:
            self._call(worker.process, worker.freeze, (epoch, shards), frozen)

    def _put_back(self, since: dict[int, int]) -> None:
        for shard, epoch in since.items():
            if self.taken.get(shard) == epoch:
                del self.taken[shard]

    def _adopt(self, info: WorkerInfo, since: dict[int, int], frozen: set[int]) -> None:
        here = self._still(since)
        behind = [shard for shard in here if shard in frozen]
        plain = [shard for shard in here if shard not in frozen]
        epoch = self.server.member.epoch

        def adopted(_answer: Any, ok: bool) -> None:
            if not ok:
                self._put_back(since)
                return
            self.net.say(f"{self.process.name}: adopts {len(here)} shards of {info.node}, {len(behind)} to be copied")
            words = self.worker.arena.words
            ours = {shard for shard in here if words[shard] & EPOCH_MASK == since[shard]}
            self._put_back({shard: since[shard] for shard in since if shard not in ours})
            self._finish(epoch, [shard for shard in plain if shard in ours])
            group = [shard for shard in behind if shard in ours]
            if group:
                self._list(info, epoch, {shard: since[shard] for shard in group}, self.net.now)

        self._call(self.worker.process, self.worker.adopt, (epoch, here, behind), adopted)

    def _finish(self, epoch: int, shards: list[int]) -> None:
        def finished(_answer: Any, _ok: bool) -> None:
            self.replan()

        self._call(self.worker.process, self.worker.finish, (epoch, shards), finished)

    def _give_up(self, info: WorkerInfo, epoch: int, since: dict[int, int]) -> None:
        self.net.say(f"{self.process.name}: what {info.node} still has is given up")
        self._finish(epoch, self._still(since))

    def _list(self, info: WorkerInfo, epoch: int, since: dict[int, int], progress: float) -> None:
        """All digests that the previous owner has of these shards, read off its arena by its stream."""
        if not self._still(since):
            self._put_back(since)
            return
        peer = self._peer(info)

        def listed(answer: list[bytes] | None, ok: bool) -> None:
            if ok and answer is not None:
                self._copy(info, epoch, since, answer, self.net.now)
            elif self.net.now > progress + GIVE_UP_S:
                self._give_up(info, epoch, since)
            else:
                self.process.later(self.net.random.uniform(*RETRY_S), self._list, info, epoch, since, progress)

        if peer is None:
            self._call(None, _nothing, (), listed)
        else:
            arena = peer.workers[info.worker].arena
            self._call(peer.stream, _list, (arena, frozenset(since)), listed)

    def _copy(self, info: WorkerInfo, epoch: int, since: dict[int, int], digests: list[bytes], progress: float) -> None:
        """Batch after batch, what is not here; then FINISH."""
        left = [digest for digest in digests if digest not in self.worker.arena.entries]
        still = set(self._still(since))
        left = [digest for digest in left if shard_of(digest) in still]
        if not left:
            self._finish(epoch, list(still))
            return
        batch, rest = left[:BATCH_KEYS], left[BATCH_KEYS:]
        peer = self._peer(info)
        options = self.server.world.options

        def fetched(values: list[tuple[bytes, int]] | None, ok: bool) -> None:
            if ok and values is not None:
                allowed = set(self._still(since))
                wanted = [value for value in values if shard_of(value[0]) in allowed]
                count = len(values) * options.value_bytes * options.sampling
                self.server.world.moved_bytes += count
                seconds = count / options.move_bytes_s

                def committed(_answer: Any, done: bool) -> None:
                    if done:
                        self.process.later(seconds, self._copy, info, epoch, since, rest, self.net.now)

                self._call(self.worker.process, self.worker.copy, (self.server.member.epoch, wanted), committed)
            elif self.net.now > progress + GIVE_UP_S:
                self._give_up(info, epoch, since)
            else:
                pause = self.net.random.uniform(*RETRY_S)
                self.process.later(pause, self._copy, info, epoch, since, left, progress)

        if peer is None:
            self._call(None, _nothing, (), fetched)
        else:
            self._call(peer.stream, _fetch, (peer.workers[info.worker].arena, batch), fetched)


def _list(arena: Arena, shards: frozenset[int]) -> list[bytes]:
    words = arena.words
    return [digest for digest in arena.entries if shard_of(digest) in shards and words[shard_of(digest)] >= FROZEN]


def _fetch(arena: Arena, digests: list[bytes]) -> list[tuple[bytes, int]]:
    found = [(digest, arena.hit(digest, frozen_too=True)) for digest in digests]
    return [(digest, version) for digest, version in found if version]


def _nothing() -> None:
    pass
