"""Rules for the names of metrics: those of ``promtool check metrics``, of Prometheus' page on naming, and our own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

#: Units that a name must not have, and the base unit to use in their place.
OTHER_UNITS: Final = {
    **dict.fromkeys(("milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "weeks"), "seconds"),
    **dict.fromkeys(("kilobytes", "megabytes", "gigabytes", "kibibytes", "mebibytes", "gibibytes", "bits"), "bytes"),
    **dict.fromkeys(("percent", "percentage"), "ratio"),
}
#: What promtool takes for abbreviated units.
ABBREVIATIONS: Final = frozenset((
    "s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d", "kib", "mib", "gib",
))  # fmt: skip
TYPES: Final = frozenset(("counter", "gauge", "histogram", "summary", "untyped"))
#: Label -> what its values are. One meaning each, on all pages.
LABELS: Final = {
    "server": "a data server's name", "worker": "number of one of its workers", "numa": "NUMA node of that worker",
    "process": "what a process does for a worker", "namespace": "a namespace of keys",
    "path": "by which values go: shm, rdma or tcp", "op": "what a client asks for",
    "state": "of a data server",
    "reason": "of an eviction or a miss, why there is no RDMA, or why an event does not count",
    "cause": "of a failed put or keep", "class": "how a value is kept: soft or hard, or near for a near copy",
    "chunk": "bytes of a chunk, or large",
    "endpoint": "an engine or store whose events are read", "tenant": "the tenant it is registered for",
    "rank": "its data-parallel rank", "kind": "what came of it", "request": "an HTTP request's path",
    "form": "of published events: rfc1527 or vllm", "socket": "of those: stream or replay",
    "version": "of SiMM", "protocol": "of the wire", "layout": "of an arena", "python": "its version",
}  # fmt: skip
#: Prefixes of names: SiMM's, and those that every exporter has.
PREFIXES: Final = ("simm_", "process_")


def faults(name: str, kind: str, about: str, labels: Iterable[str]) -> list[str]:
    """Return what is wrong with a metric's declaration."""
    found = []
    words = name.split("_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        found.append("is not snake_case")
    if not name.startswith(PREFIXES):
        found.append("has no prefix")
    if (kind == "counter") != name.endswith("_total"):
        found.append("a counter ends in _total, and nothing else does")
    if (kind == "info") != name.endswith("_info"):
        found.append("an info ends in _info, and nothing else does")
    if words[-1] in ("count", "sum", "bucket"):
        found.append("ends like a part of a histogram")
    found += [f"has the unit {word}: use {OTHER_UNITS[word]}" for word in words if word in OTHER_UNITS]
    found += [f"has the abbreviation {word}" for word in words if word in ABBREVIATIONS]
    found += [f"has its type {word} in its name" for word in words if word in TYPES]
    for unit in ("seconds", "bytes"):
        ends = (unit, f"{unit}_total", f"{unit}_per_second") if unit == "bytes" else (unit, f"{unit}_total")
        if unit in words and not name.endswith(ends):
            found.append(f"has {unit} elsewhere than at its end")
    if not about:
        found.append("has no HELP")
    elif not (about[0].isupper() or about[0].isdigit()) or not about.endswith((".", "?")):
        found.append("its HELP is no sentence")
    for label in labels:
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", label) or label in ("le", "quantile"):
            found.append(f"has the label {label}")
        elif label not in LABELS:
            found.append(f"has the label {label}, whose meaning nobody has written down")
        elif f"_by_{label}" in name:
            found.append(f"has its label {label} in its name")
    return [f"{name} {each}" for each in found]
