"""A SiMM server on a host that has an RDMA device, in software: ``python fakehost.py dataserver ARGUMENTS...``.

The device does not leave its process. So lanes can be opened, granted to and closed, and nothing be transferred.
``FAKEHOST`` names a file: what it holds is why devices cannot be opened; without it, or while it is empty, they can.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from fakefabric import FakeNetwork

from simm import devices, endpoints, rails, verbs
from simm.fabric import Absence, Fabric

FILE = Path(os.environ["FAKEHOST"])


def fake_ports(_sys_root: str = "/") -> list[rails.Port]:
    return [rails.Port("fake0", 1, "ACTIVE", "Ethernet", 100.0, -1, ())]


def fake_open(names: str | None = None, **about: Any) -> Fabric | Absence:
    trouble = FILE.read_text() if FILE.exists() else ""
    if trouble == "crash":
        os.abort()
    return Absence(trouble, "mend it") if trouble else FakeNetwork().fabric([names or "fake0"])


if __name__ == "__main__":
    for module, name, value in (
        (rails, "ports", fake_ports), (verbs, "open_fabric", fake_open), (endpoints, "SILENT_S", 2.0),
        (devices, "REOPEN_S", 0.5),
    ):  # fmt: skip
        setattr(module, name, value)
    sys.exit(importlib.import_module(f"simm.{sys.argv[1]}").main(sys.argv[2:]))
