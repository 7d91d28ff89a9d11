"""Fixtures that tests of several modules of a data server share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fake_manager import Manager


@pytest.fixture
def manager() -> Iterator[Manager]:
    made = Manager()
    yield made
    made.close()
