"""What deploy/monitoring asks of metrics: the expressions of rules and panels, and the metrics and labels in them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any, Final

import yaml

from tests.support.child import ROOT

FOLDER: Final = ROOT / "deploy" / "monitoring"
MISSING: Final = "no Prometheus in PATH (scripts/prometheus-server gets one)"
PROMTOOL: Final = shutil.which("promtool")
#: What Prometheus itself adds.
ADDED_METRICS: Final = frozenset(("up",))
ADDED_LABELS: Final = frozenset(("job", "instance", "le"))


def alerts() -> dict[str, dict[str, Any]]:
    """Return the alerts by their names."""
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    found = {rule["alert"]: rule for rule in rules}
    assert len(found) == len(rules), "names are given once"
    return found


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    board: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    return board


def panels() -> list[dict[str, Any]]:
    """Return the panels that show something."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def filled_in(expression: str) -> str:
    """Return a panel's expression with what Grafana puts in for its variables."""
    return expression.replace("$server", ".*").replace("$__rate_interval", "1m")


def expressions() -> Iterator[tuple[str, str]]:
    """Yield all expressions, each with the name of its rule or panel."""
    for name, rule in alerts().items():
        yield name, rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], filled_in(target["expr"])


def metrics_in(expression: str) -> set[str]:
    """Return the metrics in an expression."""
    plain = re.sub(r"\{[^}]*\}|\"[^\"]*\"|\b(by|on|without|ignoring|group_left)\s*\([^)]*\)|\[[^]]*\]", " ", expression)
    words = set(re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", plain))
    words -= {"and", "or", "unless", "bool", "by", "on", "offset"}
    return {_of_histogram(word) for word in words}


def _of_histogram(name: str) -> str:
    """Return a histogram's name by that of a part of it. No other metric's name ends so (``metric_rules``)."""
    return re.sub(r"_(bucket|sum|count)$", "", name) if name.startswith("simm_") else name


def labels_in(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the metrics with matchers, and the labels that they are matched by; and all labels of groupings for ""."""
    for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", expression):
        yield _of_histogram(name), set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
    for names in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression):
        yield "", {name.strip() for name in names.split(",")}
