"""Connected pairs of queue pairs for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.fake_pair import Pair


@pytest.fixture
def make() -> Iterator[Callable[..., Pair]]:
    """Yield a function that makes pairs; close them at the end and check that nothing is left."""
    made: list[Pair] = []

    def new(*args: int, **options: object) -> Pair:
        made.append(Pair(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield new
    for pair in made:
        pair.close()
