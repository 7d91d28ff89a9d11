"""deploy/helm: an upgrade that Kubernetes would take in part is refused before it changes anything."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support import chart
from tests.support.chart import CHART, HELM, one, rendered

needs_helm = pytest.mark.skipif(HELM is None, reason=chart.MISSING)
#: How the chart asks the cluster. ``helm template`` asks none, so a value takes its place here.
LOOKUP: Final = 'lookup "apps/v1" "StatefulSet" .Release.Namespace $name'
ETCD: Final = {"manager.coordinator.url": "etcd://a:1/x"}
COMMAND: Final = "kubectl -n team delete --ignore-not-found statefulset/west-simm-manager pvc/state-west-simm-manager-0"


def upgraded(before: Mapping[str, Any], after: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the objects of an upgrade of a release. ``folder``: for a copy of the chart. Raises Refused."""
    there = one(rendered(before, release="west", namespace="team"), "StatefulSet", "-manager")
    copy = folder / "simm"
    shutil.copytree(CHART, copy)
    helpers = copy / "templates" / "_helpers.tpl"
    text = helpers.read_text()
    assert text.count(LOOKUP) == 1
    helpers.write_text(text.replace(LOOKUP, ".Values.global.there"))
    return rendered({**after, "global": {"there": there}}, release="west", namespace="team", chart=copy)


@needs_helm
@pytest.mark.parametrize(
    ("before", "after"),
    [({}, ETCD), (ETCD, {}), ({}, {"manager.state.size": "2Gi"}), ({}, {"manager.state.storageClass": "fast"})],
    ids=["to an etcd", "from an etcd", "size", "class"],
)
def test_issue_other_volumes_of_the_manager_are_refused_before_anything_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], tmp_path: Path
) -> None:
    """Kubernetes refused the StatefulSet alone, and the data servers restarted for managers that did not come."""
    with pytest.raises(chart.Refused) as refused:
        upgraded(before, after, tmp_path)
    assert COMMAND in str(refused.value)


@needs_helm
@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {"dataserver.warm": True, "manager.state.size": "1024Mi"}), (ETCD, {**ETCD, "manager.replicas": 2})],
    ids=["the same size", "more managers"],
)
def test_other_upgrades_are_taken(before: Mapping[str, Any], after: Mapping[str, Any], tmp_path: Path) -> None:
    assert one(upgraded(before, after, tmp_path), "StatefulSet", "-manager")["spec"]["serviceName"]


def test_the_command_is_the_one_in_the_operators_page() -> None:
    page = (CHART.parents[2] / "docs" / "operations.md").read_text()
    assert COMMAND.replace("-n team", "-n NS").replace("west-simm", "FULLNAME") in page
