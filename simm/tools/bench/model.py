"""``simm bench --model HOST``: what a larger host would reach, computed from what each process uses a key here.

A benchmark on two cores cannot show eight engines. But it shows what one caller's calls take, and how much of the
worker's processor time a put takes. From these follows the rate of more callers that share a few workers, as a closed
queueing network: each engine calls, waits, and calls again; a put is served by a worker, one after another. Mean value
analysis solves that exactly for service times of an exponential distribution. Three bounds hold on top: the memory's
bandwidth, the processor time that all cores have, and what the workers can do at most.

:data:`ASSUMPTIONS` says what is taken for granted. They are printed with the figures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ...config.parsers import parse_bytes
from ...errors import ConfigError, UsageError
from .report import GIB, Cell, size_text

#: Of copied values, a NUMA node, if the host's description does not say. A socket with eight channels of DDR5-4800
#: moves 286 GiB/s, and a copied byte is read and written, often after another read.
DEFAULT_BANDWIDTH: Final = 100 << 30
_COUNT_MAX: Final = 65_536
#: A bound that is not above this much of what all engines ask for limits them.
_NEARLY: Final = 0.95


@dataclass(frozen=True)
class Host:
    """A host to compute: ``cores=64,gpus=8,numa=2,bandwidth=100G``. Only the first two must be named."""

    cores: int
    gpus: int
    #: Workers: a data server has one for each NUMA node.
    numa: int = 1
    #: Bytes of values a second that can be copied in each NUMA node.
    bandwidth: int = DEFAULT_BANDWIDTH

    def __str__(self) -> str:
        return (
            f"{self.cores} cores, {self.gpus} GPUs, {self.numa} NUMA node(s) of {self.bandwidth / GIB:g} GiB/s of "
            "copied values"
        )

    @classmethod
    def parse(cls, text: str) -> Host:
        """Return the host that a text describes. Raises UsageError."""
        asked: dict[str, int] = {}
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            if name not in ("cores", "gpus", "numa", "bandwidth") or name in asked:
                raise UsageError(f"--model {text}: write it as cores=64,gpus=8,numa=2,bandwidth=100G")
            if name == "bandwidth":
                try:
                    asked[name] = parse_bytes(value)
                except ConfigError as exc:
                    raise UsageError(f"--model bandwidth: {exc}") from None
            else:
                asked[name] = int(value) if re.fullmatch("[0-9]{1,9}", value) else 0
            if asked[name] < 1 or (name != "bandwidth" and asked[name] > _COUNT_MAX):
                raise UsageError(f"--model {part.strip()}: a whole number from 1 to {_COUNT_MAX}, or bytes a second")
        if not {"cores", "gpus"} <= asked.keys():
            raise UsageError(f"--model {text}: name cores and gpus, as cores=64,gpus=8")
        return cls(**asked)


#: What the figures take for granted.
ASSUMPTIONS: Final = (
    "one engine process a GPU, with one thread that calls again as soon as a call has returned, as measured here",
    "one worker a NUMA node; keys are spread evenly over the workers",
    "cores, caches and memory as fast as here, for every engine and worker, and no other work on them",
    "engines on other nodes than the memory copy as fast",
    "a call takes its median time, and a put the worker's processor time, without polling, as here",
    "gets, views and questions take no worker's time",
    "a worker's times are spread exponentially, and a batch visits the workers one after another",
)


class Estimate(NamedTuple):
    """What a host would reach with one operation."""

    #: Keys a second of one engine alone, and of all.
    one: float
    all: float
    #: Share of the time that each worker is busy.
    busy: float
    #: engines, workers, cores or bandwidth.
    limit: str

    def gib_per_s(self, cell: Cell) -> float:
        """Return the rate of the values' bytes."""
        return self.all * cell.size / GIB


def rate_of_closed(customers: int, stations: int, think: float, service: float) -> float:
    """Return the visits a second of so many customers, each of which thinks and then visits every station.

    Exact mean value analysis: a station's queue as a customer finds it is that of one customer less. ``think`` and
    ``service``: seconds of a round, the latter at each station. O(customers).
    """
    queue = rate = 0.0
    for number in range(1, customers + 1):
        response = service * (1 + queue)
        rate = number / (think + stations * response)
        queue = rate * response
    return rate


def estimate(cell: Cell, host: Host) -> Estimate:
    """Return what a host reaches with a measured operation."""
    cycle = cell.own.us_per_key * cell.batch / 1e6  # seconds of one call: other work on this machine is not in it
    worker = min(cycle, (cell.worker_us or 0.0) * cell.batch / 1e6) if cell.kind == "put" else 0.0
    one = cell.batch / cycle
    calls = rate_of_closed(host.gpus, host.numa, cycle - worker, worker / host.numa)
    processor = min(cell.caller_us or cell.own.us_per_key, cell.own.us_per_key) / 1e6 + worker / cell.batch
    bounds = {"cores": host.cores / processor}
    if not cell.asks and cell.kind != "view":
        bounds["bandwidth"] = host.numa * host.bandwidth / cell.size
    reached = calls * cell.batch
    limit = "engines" if reached > _NEARLY * host.gpus * one else "workers"
    name = min(bounds, key=lambda each: bounds[each])
    if bounds[name] < reached:
        reached, limit = bounds[name], name
    return Estimate(one, reached, reached * worker / cell.batch / host.numa, limit)


def report(cells: Sequence[Cell], host: Host) -> list[str]:
    """Return the figures of a host as lines."""
    lines = [f"computed for {host}; assumed:", *(f"- {text}" for text in ASSUMPTIONS), ""]
    one, many = "1 engine/s", f"{host.gpus} engines/s"
    lines.append(f"{'op':<12}{'value':>7}{'keys':>6}{one:>14}{many:>16}{'GiB/s':>9}{'workers busy':>14}  limited by")
    for cell in cells:
        found = estimate(cell, host)
        value, rate = ("-", "-") if cell.asks else (size_text(cell.size), f"{found.gib_per_s(cell):.1f}")
        lines.append(
            f"{cell.op:<12}{value:>7}{cell.batch:>6}{found.one:>14,.0f}{found.all:>16,.0f}{rate:>9}"
            f"{found.busy:>13.0%}   {found.limit}"
        )
    return lines


def as_json(cells: Sequence[Cell], host: Host) -> dict[str, Any]:
    """Return the figures of a host for --json."""
    found = [(cell, estimate(cell, host)) for cell in cells]
    return {
        "host": {"cores": host.cores, "gpus": host.gpus, "numa": host.numa, "bandwidth_bytes_per_s": host.bandwidth},
        "assumptions": list(ASSUMPTIONS),
        "results": [
            {"op": cell.op, "value_bytes": cell.size, "keys_per_call": cell.batch,
             "one_engine_keys_per_s": round(each.one, 1), "keys_per_s": round(each.all, 1),
             "gib_per_s": None if cell.asks else round(each.gib_per_s(cell), 4),
             "workers_busy": round(each.busy, 4), "limited_by": each.limit}
            for cell, each in found
        ],
    }  # fmt: skip
