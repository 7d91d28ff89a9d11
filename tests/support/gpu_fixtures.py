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


@pytest.fixture(params=["python", "compiled"])
def both(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "python":
        yield from installed(InPython())
        return
    library = request.getfixturevalue("shared_library")
    if isinstance(library, str):
        pytest.skip(library)
    yield from installed(Compiled(library))


#: Without a GPU there is no third parameter, instead of as many skipped tests.
@pytest.fixture(params=["python", "compiled", *([] if Real.missing() else ["real"])])
def devices(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The two drivers in software, and the machine's own where it has a GPU."""
    if request.param == "real":
        yield from installed(Real())
        return
    library = request.getfixturevalue("shared_library")
    if request.param == "compiled" and isinstance(library, str):
        pytest.skip(library)
    yield from installed(InPython() if request.param == "python" else Compiled(library))


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    for handle in installed(InPython()):
        yield handle.library
