"""LMCache's command line, released and unmodified, with SiMM as the L2 store of its server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from simm.tools.engine import LMCACHE_SERVER
from tests.engines.engine_processes import DRIVER_S, HERE, PATIENT_MS, ROOT, Engine
from tests.support.child import Child
from tests.support.ports import reserve_port
from tests.support.waiting import wait_until

#: Tokens of a chunk.
CHUNK = 64
#: For LMCache in an engine's process too. It phones home otherwise.
ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}


class Server(NamedTuple):
    port: int
    http: int
    child: Child


def adapter(manager: str, deadline_ms: int = PATIENT_MS) -> str:
    """Return what `simm engine lmcache-server` prints for --l2-adapter, with a deadline."""
    parameters = {"manager_address": manager, "deadline_ms": deadline_ms}
    return json.dumps({**LMCACHE_SERVER, "adapter_params": parameters})


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE / "shim"))),
        "HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1",
        "COLUMNS": "200",
    }  # fmt: skip


def run(lmcache: Engine, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `lmcache` to its end; stderr is in its stdout."""
    return subprocess.run(
        [lmcache.python, "-m", "lmcache.cli.main", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", timeout=DRIVER_S, env=environment(lmcache.folder),
        cwd=lmcache.folder,
    )  # fmt: skip


@contextmanager
def server(lmcache: Engine, folder: Path, l2: str, more: Sequence[str] = ()) -> Iterator[Server]:
    """`lmcache server`, which keeps nothing of what it has stored in L2: all is read from there."""
    port, http = reserve_port(), reserve_port()
    command: list[Any] = [
        lmcache.python, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", port, "--http-host",
        "127.0.0.1", "--http-port", http, "--chunk-size", CHUNK, "--l1-size-gb", "0.25", "--no-l1-use-lazy",
        "--shm-name", f"simm-t{os.getpid()}-{port}", "--supported-transfer-mode", "auto", "--eviction-policy", "LRU",
        "--l2-store-policy", "skip_l1", "--l2-adapter", l2, *more,
    ]  # fmt: skip
    with Child(
        [str(word) for word in command], name="lmcache server", log=folder / "lmcache-server.log",
        environment=environment(lmcache.folder), folder=folder,
    ) as child:  # fmt: skip
        wait_until(lambda: answers(http) or not child.running, "LMCache's server", DRIVER_S)
        assert child.running, child.said()
        yield Server(port, http, child)


def blake3_of(lmcache: Engine, folder: Path) -> Path:
    """Return a folder in which our Python finds LMCache's BLAKE3. Skips the test where the two have other versions."""
    ask = "import blake3, sys; print(list(blake3.__path__)[0]); print(*sys.version_info[:2])"
    said = subprocess.run([lmcache.python, "-c", ask], capture_output=True, text=True, check=True, timeout=DRIVER_S)
    package, version = said.stdout.splitlines()
    if version.split() != sysconfig.get_python_version().split("."):
        pytest.skip(f"LMCache's environment has Python {version}, and so its blake3")
    libraries = folder / "libraries"
    libraries.mkdir()
    (libraries / "blake3").symlink_to(package)
    return libraries


def answers(port: int) -> bool:
    """Return whether a server accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
