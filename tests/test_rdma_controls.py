"""A real store's own stores under a client's READs, one by one; and the same with one safety check taken away.

``rdmaplay.py`` has the film and the screen. With the code as it is thousands of reads of many seeds see nothing but
values that were current; each control removes one check and must see harm, within a bounded number of reads. What
stands against writes that come late has its controls elsewhere: ``test_endpoint.py`` (windows, links, copies under
way) and ``test_rdma_faults.py`` (buffers that are given back).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from rdmaplay import EVERYTHING, OVERWRITES, SHARDS, Film, Harm, Screen

from simm import rdmaget
from simm.fabric import READ
from simm.remote_arena import Place, confirmed
from simm.shards import FROZEN

STORES = 1500
#: Reads of one seed; a control may take so many seeds.
READS = 400
SEEDS = 12


@pytest.fixture(scope="module")
def films() -> Iterator[Callable[[Sequence[str]], Film]]:
    """A film of each kind, made when it is first asked for."""
    made: dict[Sequence[str], Film] = {}

    def film(does: Sequence[str]) -> Film:
        if does not in made:
            made[does] = Film(1, STORES, does)
        return made[does]

    yield film
    for each in made.values():
        each.close()


Films = Callable[[Sequence[str]], Film]


@pytest.mark.parametrize(
    ("does", "jumps", "rails", "reads"),
    [(EVERYTHING, False, 1, 500), (EVERYTHING, False, 2, 200), (OVERWRITES, True, 1, 200), (SHARDS, False, 1, 300)],
)
def test_all_is_well(
    films: Films, does: Sequence[str], jumps: bool, rails: int, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Screen(films(does), 1, monkeypatch, rails=rails, jumps=jumps) as screen:
        for _ in range(reads):
            screen.read()
    assert screen.hits > reads // 20 and screen.hits + screen.misses + screen.left == reads
    print(f"{screen.hits} hits, {screen.misses} misses, {screen.left} for TCP, {screen.get.counters}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("does", [EVERYTHING, OVERWRITES, SHARDS])
def test_all_is_well_for_longer(films: Films, does: Sequence[str], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Screen(films(does), seed, monkeypatch, rails=1 + seed % 2, jumps=seed % 3 == 0) as screen:
        for _ in range(3000):
            screen.read()


def harm(film: Film, monkeypatch: pytest.MonkeyPatch, *, jumps: bool = False, seeds: int = SEEDS) -> str:
    """What the reads came to."""
    for seed in range(1, seeds + 1):
        with Screen(film, seed, monkeypatch, jumps=jumps) as screen:
            try:
                for _ in range(READS):
                    screen.read()
            except Harm as exc:
                print(f"seed {seed}: {exc}")
                return str(exc)
    return ""


def plain(word: int) -> bool:
    return 0 < word < FROZEN


def no_second_look(place: Place, between: bytes, now: bytes, word: int) -> bool:
    return plain(word)


def seq_alone(place: Place, between: bytes, now: bytes, word: int) -> bool:
    return now[:8] == place.image[:8] and plain(word)


def two_images(place: Place, between: bytes, now: bytes, word: int) -> bool:
    return now == place.image and plain(word)


def no_word(place: Place, between: bytes, now: bytes, word: int) -> bool:
    return confirmed(place, between, now, 1)


@pytest.mark.parametrize(("rule", "does"), [(no_second_look, OVERWRITES), (seq_alone, OVERWRITES), (no_word, SHARDS)])
def test_control_a_weaker_rule(
    films: Films, rule: Callable[[Place, bytes, bytes, int], bool], does: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(rdmaget, "confirmed", rule)
    assert harm(films(does), monkeypatch)


def test_control_no_fence(films: Films, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdmaget, "FENCED_READ", READ)
    assert harm(films(OVERWRITES), monkeypatch) == "a torn value"


def test_control_no_image_between(films: Films, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rare: both images must be the same mixture. About one read in three hundred, where time goes by leaps."""
    monkeypatch.setattr(rdmaget, "confirmed", two_images)
    assert harm(films(OVERWRITES), monkeypatch, jumps=True, seeds=40)
