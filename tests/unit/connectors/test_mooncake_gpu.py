"""Mooncake's API and a GPU's memory: it is refused with a sentence, as the CPU, which copies, dies at its address.

The calls are made in a process of their own that has loaded a CUDA driver in software as ``libcuda.so.1``.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.connectors import mooncake_types
from simm.connectors.mooncake_types import DeviceMemory, HostMemory, cuda_driver
from simm.errors import UsageError
from simm.gpu import cuda
from simm.host.buffers import Span
from tests.support import fake_cuda
from tests.support.child import READY_S, ROOT, child_environment
from tests.support.fake_cuda import ILLEGAL_ADDRESS, FakeCuda
from tests.support.gpu import InPython, installed

CHILD = """
import ctypes, json, logging, sys
from simm.connectors import mooncake_types
from simm.connectors.mooncake import MooncakeDistributedStore
from simm.testing import FakeClient

class Lines(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

def devices():
    return library.cuDeviceGetCount(ctypes.byref(ctypes.c_int()))

said, found = [], {}
log = logging.getLogger("simm.connectors.mooncake")
log.addHandler(Lines())
log.propagate = False
store = MooncakeDistributedStore()
store.use(FakeClient())
host = (ctypes.c_ubyte * 256)(*range(256))
at = ctypes.addressof(host)
found["no driver"] = [store.batch_put_from(["a"], [at], [64]), "simm.gpu.copy" in sys.modules]
library = ctypes.CDLL(sys.argv[1])
found["not initialised"] = [store.batch_put_from(["b"], [at], [64]), store.register_buffer(at, 16), devices() != 0]
store.unregister_buffer(at)
assert library.cuInit(0) == devices() == 0
library.fake_alloc.restype = ctypes.c_uint64
gpu = library.fake_alloc(ctypes.c_int(1), ctypes.c_size_t(4096))
if sys.argv[2] == "control":
    mooncake_types.cuda_driver = lambda: None
    store.batch_put_from(["g"], [gpu], [64])
    raise SystemExit("the CPU can read that memory")
said.clear()
found["register"] = [store.register_buffer(gpu, 4096), store.register_buffer(at, 128)]
found["log of register"] = list(said)
said.clear()
found["put"] = [store.put_from("g", gpu, 64), store.batch_put_from(["g", "c"], [gpu, at + 200], [32, 32])]
found["gather"] = store.batch_put_from_multi_buffers(["g", "d"], [[at, gpu], [at, at + 200]], [[8, 8], [8, 8]])
found["stored"] = store.batch_is_exist(["g", "c", "d"])
found["log of put"] = list(said)
said.clear()
found["get"] = [store.get_into("c", gpu, 64), store.batch_get_into(["c", "c"], [gpu, at + 200], [32, 32])]
found["scatter"] = store.batch_get_into_multi_buffers(["d", "d"], [[at, gpu], [at, at + 200]], [[8, 8], [8, 8]])
assert store.batch_get_session_start(["c", "d"]) == [0, 0]
found["ranges"] = store.batch_get_into_multi_buffer_ranges(["c", "d"], [[gpu], [at]], [[8], [8]], [[0], [8]])
found["value"] = list(host[:8])
found["log of get"] = list(said)
store.close()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = fake_cuda.built(tmp_path_factory.mktemp("cuda"), cuda.LIBRARY)
    if built is None:
        pytest.skip("there is no C compiler")
    return built


def run(library: Path, how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(library), how]
    return subprocess.run(
        command, env=child_environment(), cwd=ROOT, capture_output=True, text=True, timeout=READY_S, check=False
    )


@pytest.fixture(scope="module")
def found(library: Path) -> dict[str, Any]:
    ran = run(library, "refused")
    assert ran.returncode == 0, (ran.returncode, ran.stderr[-2000:])
    answers: dict[str, Any] = json.loads(ran.stdout)
    return answers


def test_a_gpus_memory_is_refused_where_it_is_registered(found: dict[str, Any]) -> None:
    assert found["register"] == [-600, 0]
    (line,) = found["log of register"]
    assert "memory of GPU 1" in line and "SiMM's own connector" in line and "host memory" in line


def test_a_key_with_a_gpus_memory_fails_alone(found: dict[str, Any]) -> None:
    assert found["put"] == [-600, [-600, 0]] and found["gather"] == [-600, 0] and found["stored"] == [0, 1, 1]
    assert found["get"] == [-600, [-600, 32]] and found["scatter"] == [-600, 16]
    assert found["ranges"] == [-600, 8] and found["value"] == list(range(200, 208))


def test_it_is_not_logged_for_each_key(found: dict[str, Any]) -> None:
    """Of all these calls there is one line in ten seconds."""
    assert len([*found["log of put"], *found["log of get"]]) == 1
    assert "memory of GPU 1" in found["log of put"][0]


def test_where_no_gpu_is_used_nothing_of_cuda_is(found: dict[str, Any]) -> None:
    """A process that forks later must not have initialised the driver."""
    assert found["no driver"] == [[0], False]
    assert found["not initialised"] == [[0], 0, True]


def test_control_who_does_not_ask_dies(library: Path) -> None:
    ran = run(library, "control")
    assert ran.returncode == -signal.SIGSEGV, (ran.returncode, ran.stderr[-2000:])


# -- which memory that is ------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A driver that this process uses."""
    for handle in installed(InPython()):
        monkeypatch.setattr(mooncake_types, "_cuda_begun", True)
        yield handle.library


def refused(address: int) -> str:
    """Return why memory is refused, an empty text if it is not."""
    try:
        HostMemory({})(address, 8)
    except DeviceMemory as exc:
        return str(exc)
    return ""


def test_memory_that_the_cpu_may_use_is_taken(fake: FakeCuda) -> None:
    host = (ctypes.c_ubyte * 8192)()
    address = ctypes.addressof(host)
    page = -(-address // 4096) * 4096
    assert refused(address) == "", "unknown to the driver"
    driver = cuda.load()
    driver.push(0)
    driver.host_register(page, 4096)
    assert refused(page) == "", "pinned"
    driver.host_unregister(page)
    driver.pop()
    gpu = fake.alloc(0, 4096)
    assert "memory of GPU 0" in refused(gpu) and "memory of GPU 0" in refused(gpu + 4000)
    fake._find(gpu)[0].managed = True
    assert refused(gpu) == "", "managed memory has an address that is good for both"
    for wrong in (0, -1, None, "x"):
        with pytest.raises(UsageError):
            HostMemory({})(wrong, 8)  # type: ignore[arg-type]


def test_what_a_broken_driver_does_not_know_is_refused(fake: FakeCuda) -> None:
    host = (ctypes.c_ubyte * 64)()
    fake.sticky = ILLEGAL_ADDRESS
    assert "does not say whose memory" in refused(ctypes.addressof(host))
    fake.sticky = 0
    assert refused(ctypes.addressof(host)) == ""


def test_registered_memory_is_not_asked_about_again(fake: FakeCuda) -> None:
    host = (ctypes.c_ubyte * 64)()
    address = ctypes.addressof(host)
    memory = HostMemory({address: Span(address, 64)})
    fake.calls.clear()
    assert [memory(address + at, 8).address - address for at in (0, 8, 56)] == [0, 8, 56]
    assert fake.calls == []
    memory(address + 32, 64)
    assert "cuPointerGetAttribute" in fake.calls, "the control: it ends outside"


def test_a_driver_that_cannot_be_used_after_a_fork_is_none(fake: FakeCuda) -> None:
    assert cuda_driver() is cuda.load()
    cuda.load().forked = True
    try:
        assert cuda_driver() is None and refused(fake.alloc(0, 4096)) == ""
    finally:
        assert cuda._driver is not None
        cuda._driver.forked = False
