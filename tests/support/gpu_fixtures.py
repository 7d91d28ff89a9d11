"""Fixtures of the GPU tests: CUDA drivers, in Python, compiled, and the machine's own. A conftest imports them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import fake_cuda
from tests.support.fake_cuda import FakeCuda
from tests.support.gpu import Compiled, InPython, Real, installed


@pytest.fixture(scope="session")
def shared_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL | str:
    return fake_cuda.compiled(tmp_path_factory.mktemp("fakecuda"))


def _driver(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The driver that a fixture's parameter names, for the test."""
    if request.param == "python":
        handle: Any = InPython()
    elif request.param == "real":
        handle = Real()
    else:
        library = request.getfixturevalue("shared_library")
        if isinstance(library, str):
            pytest.skip(library)
        handle = Compiled(library)
    yield from installed(handle)


@pytest.fixture(params=["python", "compiled"])
def both(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The two drivers in software."""
    yield from _driver(request)


#: Without a GPU there is no third parameter, instead of as many skipped tests.
@pytest.fixture(params=["python", "compiled", *([] if Real.missing() else ["real"])])
def devices(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The two drivers in software, and the machine's own where it has a GPU."""
    yield from _driver(request)


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    for handle in installed(InPython()):
        yield handle.library
