"""``python -m tests.support.fake_host dataserver ARGUMENTS``: a server on a host with an RDMA device in software.

The device does not leave its process. So connections can be opened, granted to and closed, and nothing be transferred.
``FAKEHOST`` names a file: what it holds is why devices cannot be opened; without it, or while it is empty, they can.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from simm import verbs
from simm.rdma import ports
from simm.rdma.api import Absence, Fabric
from simm.server import rdma_devices, rdma_supervisor
from tests.support.fake_fabric import FakeNetwork

FILE = Path(os.environ["FAKEHOST"])


def fake_ports(_sys_root: str = "/") -> list[ports.Port]:
    return [ports.Port("fake0", 1, "ACTIVE", "Ethernet", 100.0, -1, ())]


def fake_open(names: str | None = None, **about: Any) -> Fabric | Absence:
    trouble = FILE.read_text() if FILE.exists() else ""
    if trouble == "crash":
        os.abort()
    return Absence(trouble, "mend it") if trouble else FakeNetwork().fabric([names or "fake0"])


if __name__ == "__main__":
    for module, name, value in (
        (ports, "ports", fake_ports), (verbs, "open_fabric", fake_open), (rdma_supervisor, "SILENT_S", 2.0),
        (rdma_devices, "REOPEN_S", 0.5),
    ):  # fmt: skip
        setattr(module, name, value)
    sys.exit(importlib.import_module(f"simm.{sys.argv[1]}").main(sys.argv[2:]))
