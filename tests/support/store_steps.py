"""Random steps of a world (``store_world.py``), for the store against its model and for what others see of it."""

from __future__ import annotations

import random

from simm.constants import SHARD_COUNT
from tests.support.store_world import ALL_SHARDS, World, digest_of

MIB = 1 << 20
KEYS = [digest_of(f"key {number}") for number in range(120)]
#: Not below 2 KiB: a slab of 64-byte chunks takes its check() 20 ms.
SIZES = [2001, 4000, 4096, 4096, 4096, 5000, 20_000, 70_000, 131_072, 131_073, 300_000, MIB, 2 * MIB + 1, 5 * MIB]
HALF = b"\x0f" * (SHARD_COUNT // 8)
OTHER = b"\xcc" * (SHARD_COUNT // 8)


def step(world: World, rng: random.Random) -> None:
    """One random thing."""
    players = [player for player in world.players if player.connected]
    if not players or rng.random() < 0.02:
        if len(world.players) < 12:
            world.join(rng.choice(["a", "b"]))
        return
    player = rng.choice(players)
    digest = rng.choice(KEYS)
    size = rng.choice(SIZES)
    what = rng.random()
    if what < 0.40:
        world.put(player, digest, size)
    elif what < 0.46:
        world.grant(player, size, rng.randint(1, 4))
    elif what < 0.50:
        world.want(player, size, rng.randint(1, 4), take=rng.random() < 0.7)
    elif what < 0.60 and player.grants:
        chosen = rng.sample(sorted(player.grants), rng.randint(1, len(player.grants)))
        items = [(number, rng.choice(KEYS), rng.randint(1, player.grants[number].chunk)) for number in chosen]
        world.commit_many(player, items + items[: rng.randint(0, 1)])  # the same id once more is stale
    elif what < 0.63 and player.grants:
        number, grant = rng.choice(list(player.grants.items()))
        world.commit(player, number, digest, rng.choice([0, grant.chunk + 1]))
    elif what < 0.66 and player.grants:
        world.return_grants(player, [*rng.sample(sorted(player.grants), 1), 12345])
    elif what < 0.72:
        world.delete(digest)
    elif what < 0.82:
        world.pin(player, digest)
    elif what < 0.90 and player.pins:
        world.unpin(player, [*rng.sample(sorted(player.pins), rng.randint(1, len(player.pins))), 12345])
    elif what < 0.92:
        world.set_shards(rng.choice([ALL_SHARDS, ALL_SHARDS, HALF, OTHER]))
    elif what < 0.94:
        world.disconnect(player)
    elif what < 0.97:
        world.exit(rng.choice(world.players))
    elif what < 0.99:
        world.die()
    else:
        world.reader.visited[rng.randrange(world.geometry.slots)] = rng.randrange(256)  # readers may
