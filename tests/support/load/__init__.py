"""The verifying load generator: clients that put and get without end and verify every byte.

:class:`Load` is one client with one thread. Its values state what they are at every byte (``tests.support.values``) and
count: each key has one writer. What it verifies:

* *Wrong bytes.* A hit is a complete value of its key.
* *Going back.* No reader sees a lower count than one it saw before, and the writer none below the last one that was
  acknowledged. A deleted value never comes back.
* *Losing*, if everything fits: what was acknowledged is there until it is deleted.
* *Exceptions.* No call raises.
* *Time*, if given a bound: each call returns within it.
* *Late writes*, if asked: the memory of a get is not written after the call has returned.

``python -m tests.support.load SETTINGS`` is a load process (:mod:`.process`): :func:`load` starts some, and
:class:`Records` is what they did, call by call. :class:`LoadThread` runs a load in a thread of the test. Scenarios are
settings: see ``system/stress``, ``system/faults``, ``system/partitions`` and ``rdma_vm/load.py``.
"""

from __future__ import annotations

from .generator import (
    BACK,
    DELETE,
    FAILED,
    FAULTS,
    GET,
    LOST,
    MISS,
    MIX,
    OK,
    OUTAGE,
    PUT,
    RAISED,
    WRONG,
    Load,
    LoadThread,
    key_of,
)
from .process import PATIENT_S, Clients, LoadProcess, load, total
from .records import Records

__all__ = [
    "BACK",
    "DELETE",
    "FAILED",
    "FAULTS",
    "GET",
    "LOST",
    "MISS",
    "MIX",
    "OK",
    "OUTAGE",
    "PATIENT_S",
    "PUT",
    "RAISED",
    "WRONG",
    "Clients",
    "Load",
    "LoadProcess",
    "LoadThread",
    "Records",
    "key_of",
    "load",
    "total",
]
