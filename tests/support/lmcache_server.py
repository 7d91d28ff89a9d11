"""LMCache's multi-process servers as a naive model: what each holds, and what it tells its coordinator of that.

A server keeps what happened until its next request, and sends one request after the other. One that fails is dropped,
and its numbers with it. That is what ``lmcache/v1/mp_coordinator/cache_events.py`` of LMCache 0.5.6 does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simm.schemes.lmcache import server_chunk_hashes

SIZE = 4


class Part(NamedTuple):
    """What one rank has of a chunk: of a prompt, counted from its first."""

    prompt: int
    chunk: int
    model: str
    salt: str
    world: int
    rank: int


#: By prompt: the tokens, and LMCache's hashes of their chunks. The second one begins as the first does.
PROMPTS = [list(range(100, 112)), [*range(100, 104), *range(300, 308)], list(range(500, 512))]
HASHES = [server_chunk_hashes(tokens, SIZE) for tokens in PROMPTS]
WORLDS = (1, 2)


def key(part: Part) -> dict[str, Any]:
    """Return a key as LMCache writes it."""
    rank = part.world << 24 | part.rank << 16 | part.world << 8 | part.rank
    return {"chunk_hash_hex": HASHES[part.prompt][part.chunk].hex(), "model_name": part.model, "kv_rank": rank,
            "object_group_id": 0, "cache_salt": part.salt}  # fmt: skip


def entry(part: Part, *, tokens: bool = True) -> dict[str, Any]:
    """Return an entry of a batch that stores."""
    start = SIZE * part.chunk
    ids = PROMPTS[part.prompt][start : start + SIZE] if tokens else []
    return {"key": key(part), "size_bytes": 64, "token_ids": ids, "token_offset": start if tokens else -1}


def batch(instance: str, seq: int, kind: str, entries: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return a batch as LMCache writes it."""
    return {"instance_id": instance, "incarnation": 1, "seq": seq, "event_type": kind, "tier": "l1", "backend": "dram",
            "entries": list(entries), "shared": False, "ts": 1.5, "capacity_bytes": 0, "capacity_revision": 0,
            **fields}  # fmt: skip


def body(*batches: dict[str, Any]) -> bytes:
    """Return the body of POST /events."""
    return json.dumps({"batches": batches}).encode()


def canonical(part: Part) -> tuple[bytes, str, str, int, int]:
    """Return what LMCache knows a part by: not the prompt, but the hash of all tokens up to its end."""
    return HASHES[part.prompt][part.chunk], part.model, part.salt, part.world, part.rank


@dataclass(eq=False)
class Model:
    """One server. ``shared`` is a backend of all of them."""

    name: str
    rng: random.Random
    shared: set[Any]
    memory: set[Any] = field(default_factory=set)
    disk: set[Any] = field(default_factory=set)
    incarnation: int = 0
    seq: int = 0
    pending: list[dict[str, Any]] = field(default_factory=list)
    #: A request that has left and is not there yet.
    flight: bytes | None = None
    #: Something has happened that the index cannot know before it hears more.
    missed: bool = False

    def begin(self, *, heard: bool) -> None:
        """Begin a new process: its memory is empty, and nothing is told of what the one before had not told."""
        self.incarnation += 1
        self.seq, self.pending, self.flight, self.missed = 0, [], None, not heard
        self.memory.clear()

    @property
    def heard(self) -> bool:
        """True if the index can know all that has happened."""
        return not self.pending and self.flight is None and not self.missed

    def note(self, kind: str, tier: str, backend: str, entries: list[dict[str, Any]], shared: bool = False) -> None:
        self.pending.append({"event_type": kind, "tier": tier, "backend": backend, "entries": entries,
                             "shared": shared})  # fmt: skip

    def act(self) -> None:
        """Do something that is told."""
        prompt, world = self.rng.randrange(len(PROMPTS)), self.rng.choice(WORLDS)
        chunks = self.rng.sample(range(3), self.rng.choice((1, 3, 3)))
        ranks = range(world) if self.rng.random() < 0.8 else [self.rng.randrange(world)]
        salt = self.rng.choice(("", "", "s"))
        parts = [Part(prompt, chunk, "m", salt, world, rank) for rank in ranks for chunk in chunks]
        places = {"l1": self.memory, "l2": self.disk, "pool": self.shared}
        place = self.rng.choice(("l1", "l1", "l2", "pool"))
        held = places[place]
        tier, backend = ("l1", "dram") if place == "l1" else ("l2", "fs" if place == "l2" else "s3")
        if self.rng.random() < 0.15:
            self.note("access", tier, "", [{"key": key(part)} for part in parts])
        elif self.rng.random() < 0.55:
            held.update(map(canonical, parts))
            told = self.rng.random() < 0.9
            self.note("store", tier, backend, [entry(part, tokens=told) for part in parts], place == "pool")
        else:
            held.difference_update(map(canonical, parts))
            self.note("delete", tier, backend, [{"key": key(part)} for part in parts], place == "pool")

    def flush(self) -> None:
        """Let a request leave with all that has happened, if the last one is done."""
        if self.flight is not None or not self.pending:
            return
        batches = []
        for each in self.pending:
            self.seq += 1
            batches.append(batch(self.name, self.seq, **each_as(each), incarnation=self.incarnation))
        self.pending = []
        self.flight = body(*batches)

    def whole(self, prompt: int, world: int, salt: str, *held: set[Any]) -> int:
        """Return the leading chunks of a prompt of which all ranks' parts are in one of these."""
        for chunk in range(3):
            parts = [canonical(Part(prompt, chunk, "m", salt, world, rank)) for rank in range(world)]
            if not all(any(part in each for each in held) for part in parts):
                return chunk
        return 3


def each_as(pending: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of :func:`batch`."""
    return {"kind": pending["event_type"], **{name: value for name, value in pending.items() if name != "event_type"}}
