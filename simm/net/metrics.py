"""Metrics of a process, as text for Prometheus or as OpenMetrics.

A :class:`Metric` is declared once, with its labels and the sentence that HELP shows. ``docs/metrics.md`` is made of
these declarations. A page shows all that it declares, also what has no sample at the moment. So a rule or a dashboard
that names a metric can be checked against any server.

Labels mean the same everywhere: ``server`` a data server's name, ``worker`` its worker's number, ``numa`` the NUMA node
of that worker, ``process`` what a process does for a worker.
"""

from __future__ import annotations

import math
import platform
import resource
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from .. import __version__
from ..arena.layout import LAYOUT_VERSION
from ..errors import printable
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
_PROCESS: Final = (
    Metric("process_cpu_seconds_total", "counter", "Processor time of this process, user and system, seconds."),
    Metric("process_resident_memory_bytes", "gauge", "Memory in use, with the shared memory that was touched."),
    Metric("process_virtual_memory_bytes", "gauge", "Addresses in use."),
    Metric("process_start_time_seconds", "gauge", "Start of this process, seconds since 1970."),
    Metric("process_open_fds", "gauge", "Open file descriptors."),
    Metric("process_max_fds", "gauge", "File descriptors that this process may open."),
    Metric("process_threads", "gauge", "Threads."),
)
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
        for metric, value in zip(_PROCESS, _process_values()):
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
    """Load what a page needs, which takes 10 ms: before the first scrape, and in no process without a page."""
    import psutil  # noqa: F401


def _process_values() -> list[float]:
    """Return the values of ``_PROCESS``; none if the system does not tell."""
    import psutil  # see load()

    process = psutil.Process()
    try:
        with process.oneshot():
            times, memory, began = process.cpu_times(), process.memory_info(), process.create_time()
            files, threads = process.num_fds(), process.num_threads()
    except (psutil.Error, OSError):
        return []
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return [times.user + times.system, memory.rss, memory.vms, began, files, most, threads]


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
