"""What the tests of ``simm.kv`` share: blocks with known bytes, the manager's address, other interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np

from simm.kv import Block, BlockView, set_flag
from tests.support.child import READY_S, ROOT

WAIT_S = 30.0
MIB = 1 << 20


def point_at(address: str) -> None:
    """As SGLang does it."""
    host, port = address.split(":")
    assert set_flag("cm_primary_node_ip", host) is True
    assert set_flag("cm_primary_node_port", port) is True


def filled(data: bytes) -> BlockView:
    block = Block(len(data))
    block.as_ref()[:] = as_like(block, data)
    return block.view()


def as_like(block: Block | BlockView, data: bytes) -> Any:
    """The bytes as what as_ref() gives: a torch tensor where torch is installed."""
    array_ = np.frombuffer(data, np.uint8).copy()
    reference = block.as_ref()
    return array_ if isinstance(reference, np.ndarray) else sys.modules["torch"].from_numpy(array_)


def content(view: BlockView | Block) -> bytes:
    return np.asarray(view.as_ref()).tobytes()


def run_python(code: str, namespace: str = "default", **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SIMM_NAMESPACE": namespace, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=READY_S, env=env, stdin=subprocess.DEVNULL
    )
