"""The chart of deploy/helm: what helm makes of it with some values, and where two renderings differ."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.child import ROOT

CHART: Final = ROOT / "deploy" / "helm" / "simm"
HELM: Final = shutil.which("helm")
MISSING: Final = "no helm in PATH (scripts/helm-client gets one)"
#: Of Kubernetes: the oldest that the chart is for, and a new one.
VERSIONS: Final = ("1.25", "1.37")


#: Ten times as fast, where there is libyaml.
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Refused(Exception):
    """helm does not take these values; the text says why."""


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    made: dict[str, Any] = {}
    for path, value in values.items():
        *folders, last = path.split(".")
        at = made
        for folder in folders:
            at = at.setdefault(folder, {})
        at[last] = value
    return made


def rendered(
    values: Mapping[str, Any] | None = None, *, release: str = "simm", namespace: str = "simm", chart: Path = CHART
) -> list[dict[str, Any]]:
    """Return the objects of a release. ``values``: by their paths. Raises Refused."""
    documents: list[dict[str, Any]] = json.loads(_rendered(json.dumps(nested(values or {})), release, namespace, chart))
    return documents


@functools.cache
def _rendered(values: str, release: str, namespace: str, chart: Path) -> str:
    assert HELM is not None
    words = [HELM, "template", release, str(chart), "--namespace", namespace, "--kube-version", f"{VERSIONS[0]}.0"]
    done = subprocess.run([*words, "--values", "-"], input=values, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Refused(done.stderr)
    return json.dumps([each for each in yaml.load_all(done.stdout, _LOADER) if each])


def with_notes(values: Mapping[str, Any], folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the objects of a release, and its notes. ``folder``: for a copy of the chart. Raises Refused."""
    copy = folder / "simm"
    shutil.copytree(CHART, copy)
    (copy / "templates" / "notes.yaml").write_text(
        'kind: Notes\nmetadata: {name: notes}\ntext: {{ include (print $.Template.BasePath "/NOTES.txt") . | quote }}\n'
    )
    documents = rendered(values, release="west", namespace="team", chart=copy)
    return documents, one(documents, "Notes")["text"]


def refusal(values: Mapping[str, Any]) -> str:
    """Return why helm refuses values; "" if it takes them."""
    try:
        rendered(values)
    except Refused as refused:
        return str(refused)
    return ""


def default_values() -> dict[str, Any]:
    """Return values.yaml."""
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return values


#: Maps in values.yaml whose keys are the user's.
FREE: Final = frozenset((
    "nodeSelector", "affinity", "podAnnotations", "podLabels", "resources", "settings", "labels",
))  # fmt: skip


def paths(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yield the paths of all values."""
    for name, value in values.items():
        if isinstance(value, dict) and name not in FREE:
            yield from paths(value, f"{before}{name}.")
        else:
            yield before + name


def lines(documents: list[dict[str, Any]]) -> set[str]:
    """Return a line for each leaf: ``KIND/NAME a.b.c=value``. Members of lists go by their names, if they have any."""
    found = set()
    for document in documents:
        found |= {f"{document['kind']}/{document['metadata']['name']} {line}" for line in _leaves(document, "")}
    return found


def _leaves(value: Any, at: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _leaves(each, f"{at}.{key}" if at else key)
    elif isinstance(value, list) and value:
        for number, each in enumerate(value):
            name = each.get("name", each.get("mountPath", number)) if isinstance(each, dict) else number
            yield from _leaves(each, f"{at}.{name}")
    else:
        yield f"{at}={json.dumps(value)}"


def pods(documents: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield what makes pods, each with the pod."""
    for document in documents:
        if document["kind"] in ("StatefulSet", "DaemonSet"):
            yield document, document["spec"]["template"]["spec"]


def one(documents: list[dict[str, Any]], kind: str, end: str = "") -> dict[str, Any]:
    """Return the one object of a kind whose name ends so."""
    (found,) = [each for each in documents if each["kind"] == kind and each["metadata"]["name"].endswith(end)]
    return found


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Return a container's variables that have a value."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}
