"""Metrics of a process, as text for Prometheus or as OpenMetrics.

A :class:`Metric` is declared once, with its labels and the sentence that HELP shows. ``docs/metrics.md`` is made of
these declarations. A page shows all that it declares, also what has no sample at the moment. So a rule or a dashboard
that names a metric can be checked against any server.

Labels mean the same everywhere: ``server`` a data server's name, ``worker`` its worker's number, ``numa`` the NUMA node
of that worker, ``process`` what a process does for a worker.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from .. import __version__
from ..arena.layout import LAYOUT_VERSION
from ..errors import printable
from ..host.processes import start_time, thread_count
from ..wire.messages import PROTOCOL_MAX

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Metric(NamedTuple):
    """A metric. ``kind`` info: its labels say what there is, its value is 1; histogram: its samples come by
    :meth:`Samples.add_histogram`."""

    name: str
    kind: Literal["gauge", "counter", "info", "histogram"]
    about: str
    labels: tuple[str, ...] = ()


BUILD: Final = Metric(
    "simm_build_info", "info", "Version of SiMM, of its wire protocol and arena layout, and of Python.",
    ("version", "protocol", "layout", "python"),
)  # fmt: skip
CERTIFICATE: Final = Metric(
    "simm_tls_certificate_expiry_timestamp_seconds", "gauge",
    "When the certificate ends that new connections by TLS are shown, seconds since 1970.",
)  # fmt: skip


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _memory_bytes(field: int) -> int:
    """Return a field of /proc/self/statm in bytes. Raises OSError."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[field]) * resource.getpagesize()


#: Not by psutil, whose Process needs /proc/stat up to version 7.0: a unit with ProcSubset=pid does not see that. Each
#: reads what the system tells of a process to itself, in any sandbox.
_PROCESS: Final[Mapping[Metric, Callable[[], float]]] = {
    Metric(
        "process_cpu_seconds_total", "counter", "Processor time of this process, user and system, seconds."
    ): _cpu_seconds,
    Metric(
        "process_resident_memory_bytes", "gauge", "Memory in use, with the shared memory that was touched."
    ): lambda: _memory_bytes(1),
    Metric("process_virtual_memory_bytes", "gauge", "Addresses in use."): lambda: _memory_bytes(0),
    Metric("process_start_time_seconds", "gauge", "Start of this process, seconds since 1970."): start_time,
    Metric("process_open_fds", "gauge", "Open file descriptors."): lambda: len(os.listdir("/proc/self/fd")),
    Metric(
        "process_max_fds", "gauge", "File descriptors that this process may open."
    ): lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    Metric("process_threads", "gauge", "Threads."): thread_count,
}  # fmt: skip
#: Of every process that has a page: the manager, and a data server's supervisor.
OF_PROCESSES: Final = (BUILD, CERTIFICATE, *_PROCESS)


class Samples:
    """The samples of one page, of declared metrics.

    Args:
        metrics: those of the page, in its order.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        #: By metric: end of the sample's name, labels, value.
        self._of: dict[Metric, list[tuple[str, tuple[str, ...], float]]] = {metric: [] for metric in metrics}

    def add(self, metric: Metric, value: float, *labels: object) -> None:
        """Add a sample, with values for the metric's labels in their order."""
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} has the labels {metric.labels}, not {labels}")
        self._of[metric].append(("", tuple(map(str, labels)), value))

    def add_histogram(
        self, metric: Metric, total: float, counts: Sequence[int], bounds: Sequence[float], *labels: object
    ) -> None:
        """Add a histogram: the sum of what was observed, and for each bucket its count and its greatest value.

        The last bound is infinity.
        """
        if len(labels) != len(metric.labels) or len(counts) != len(bounds) or bounds[-1] != math.inf:
            raise ValueError(f"{metric.name} with labels {labels}, {len(counts)} counts and {len(bounds)} bounds")
        values, samples, passed = tuple(map(str, labels)), self._of[metric], 0
        for count, bound in zip(counts, bounds):
            passed += count
            samples.append(("_bucket", (*values, _number(bound)), passed))
        samples.append(("_sum", values, total))
        samples.append(("_count", values, passed))

    def add_process(self, certificate_ends: float | None = None) -> None:
        """Add the usual metrics of this process, as far as the system tells them, and what was built.

        ``certificate_ends``: when its certificate ends, seconds since 1970; None for one without TLS.
        """
        if certificate_ends is not None:
            self.add(CERTIFICATE, certificate_ends)
        self.add(BUILD, 1, __version__, PROTOCOL_MAX, LAYOUT_VERSION, platform.python_version())
        for metric, value in _process_values().items():
            self.add(metric, value)

    def text(self, *, openmetrics: bool = False) -> str:
        """Return the page. O(samples)."""
        lines: list[str] = []
        shown = _Shown()
        for metric, samples in self._of.items():
            family, kind = metric.name, str(metric.kind)
            if openmetrics:
                family = family.removesuffix({"counter": "_total", "info": "_info"}.get(kind, ""))
            elif kind == "info":
                kind = "gauge"
            lines += [f"# HELP {family} {_escape(metric.about, openmetrics)}", f"# TYPE {family} {kind}"]
            names = (*metric.labels, "le")
            for end, values, value in samples:
                inner = ",".join([f'{name}="{shown[text]}"' for name, text in zip(names, values)])
                labels = f"{{{inner}}}" if inner else ""
                lines.append(f"{metric.name}{end}{labels} {_number(value)}")
        if openmetrics:
            lines.append("# EOF")
        return "\n".join(lines) + "\n"


class _Shown(dict[str, str]):
    """Values of labels as a page has them. Most are in hundreds of its samples."""

    def __missing__(self, text: str) -> str:
        found = self[text] = _escape(_visible(text))
        return found


def load() -> None:
    """Load psutil, by which a data server's page tells of its workers: it takes 10 ms, before the first scrape."""
    import psutil  # noqa: F401


def _process_values() -> dict[Metric, float]:
    """Return the values of ``_PROCESS``, without those that the system does not tell."""
    found = {}
    for metric, read in _PROCESS.items():
        with contextlib.suppress(OSError):
            found[metric] = read()
    return found


def _number(value: float) -> str:
    """Return a number as both formats have it: whole ones without a fraction."""
    if math.isfinite(value):
        return str(int(value)) if value == int(value) else repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escape(text: str, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _visible(text: str) -> str:
    """Return a label's value for a page that somebody may read in a terminal: peers name namespaces as they like."""
    return text if text.isprintable() else "\n".join(printable(line) for line in text.split("\n"))


def wants_openmetrics(accept: str) -> bool:
    """Return True if a header Accept prefers OpenMetrics to plain text."""
    found = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for part in accept.split(","):
        kind, *parameters = (word.strip() for word in part.split(";"))
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        if kind in found:
            found[kind] = max(found[kind], weight)
    return found["application/openmetrics-text"] > found["text/plain"]
