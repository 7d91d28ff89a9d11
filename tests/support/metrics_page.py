"""Makes docs/metrics.md of the declarations of all metrics: python -m tests.support.metrics_page > docs/metrics.md"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from simm.control import pages as manager
from simm.index import figures as index
from simm.index.publish import figures as publisher
from simm.net.metrics import OF_PROCESSES, Metric
from simm.server.operators import pages as server
from tests.support.metric_rules import LABELS

HEAD = """# Metrics

All metrics that SiMM's servers have at `/metrics`, as their HELP texts describe them. This page is made of the same
declarations: `python -m tests.support.metrics_page > docs/metrics.md`. A scraper that asks for OpenMetrics gets that
(`Accept: application/openmetrics-text`), any other one Prometheus' text format.

[operations.md](operations.md#monitor) says how to scrape them, which to watch, and what to do then.
"""


def page() -> str:
    """Return the whole page."""
    lines = [HEAD, "## Labels", "", "| label | its values |", "|---|---|"]
    lines += [f"| `{label}` | {about} |" for label, about in LABELS.items()]
    for head, about, metrics in (
        ("Manager", "Only the manager that leads knows the cluster; a standby shows an empty one.", manager.METRICS),
        ("Data server", "What is counted is counted since the start of the process that counts: a worker that is "
         "restarted begins anew, as `rate()` expects.", server.METRICS),
        ("Event index", "Of `simm index`, which is described in [index.md](index.md).", index.METRICS),
        ("Publisher of events", "Of `simm events --http`, see [index.md](index.md#the-stores-own-events).",
         publisher.METRICS),
    ):  # fmt: skip
        lines += ["", f"## {head}", "", about, "", *table(each for each in metrics if each not in OF_PROCESSES)]
    lines += ["", "## Both", "", "Of the manager, or of a data server's supervisor.", "", *table(OF_PROCESSES)]
    return "\n".join(lines) + "\n"


def table(metrics: Iterable[Metric]) -> Iterator[str]:
    """Yield the lines of a table of metrics."""
    yield from ("| metric | type | labels | |", "|---|---|---|---|")
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        yield f"| `{metric.name}` | {metric.kind} | {labels} | {metric.about} |"


if __name__ == "__main__":
    print(page(), end="")
