"""The network policies of deploy/: whom they admit to which ports. What servers listen on is in the other tests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import pytest
import yaml

from tests.support import chart
from tests.support.chart import HELM, one, rendered
from tests.support.child import ROOT

needs_helm = pytest.mark.skipif(HELM is None, reason=chart.MISSING)
ALL: Final = {
    "serviceMonitor.enabled": True,
    "prometheusRule.enabled": True,
    "events.enabled": True,
    "dataserver.settings": {"events": "4M"},
    "index.enabled": True,
}


def admits(rule: Mapping[str, Any], namespace: Mapping[str, str], pod: Mapping[str, str]) -> bool:
    """Whether a rule admits a pod of another namespace, by the labels of both."""
    for peer in rule["from"]:
        if "namespaceSelector" in peer:
            wanted = [(peer["namespaceSelector"], namespace), (peer.get("podSelector", {}), pod)]
            if all(selector.get("matchLabels", {}).items() <= labels.items() for selector, labels in wanted):
                return True
    return False


#: Labels that the Prometheus operator gives, and those of a stranger's pod.
SCRAPER: Final = {"app.kubernetes.io/name": "prometheus", "app.kubernetes.io/managed-by": "prometheus-operator"}
STRANGER: Final = {"app.kubernetes.io/name": "other"}


@needs_helm
@pytest.mark.parametrize(
    "scraped", [{}, {"networkPolicy.scrapeFrom": [{"namespaceSelector": {}}]}], ids=["by default", "named"]
)
def test_issue_the_policies_admit_the_prometheus_that_the_monitors_are_for(scraped: Mapping[str, Any]) -> None:
    """From the namespace ``monitoring`` to each port that a monitor names, and to no other; nobody else."""
    values = {**ALL, **scraped}
    documents = rendered(values)
    monitors = {each["metadata"]["name"]: each["spec"]["endpoints"] for each in documents
                if each["kind"] == "ServiceMonitor"}  # fmt: skip
    assert len(monitors) == 3
    for name, endpoints in monitors.items():
        named = [each for each in documents if each["metadata"]["name"] == name]
        (template,) = [each["spec"]["template"] for each in named if "template" in each.get("spec", ())]
        containers = template["spec"]["containers"]
        ports = {each["name"]: each["containerPort"] for container in containers for each in container["ports"]}
        rules = one(documents, "NetworkPolicy", name)["spec"]["ingress"]
        for pod in (SCRAPER, {**SCRAPER, "app.kubernetes.io/name": "prometheus-agent"}):
            admitted = [each for rule in rules if admits(rule, {"name": "monitoring"}, pod) for each in rule["ports"]]
            assert admitted == [{"port": ports[endpoint["port"]]} for endpoint in endpoints], name
        strange = [rule for rule in rules if admits(rule, {"name": "monitoring"}, STRANGER)]
        assert len(strange) == ("networkPolicy.scrapeFrom" in scraped), name
        assert any(admits(rule, {"simm-client": "yes"}, STRANGER) for rule in rules), "positive control"
    for more in ({"networkPolicy.enabled": False}, {"serviceMonitor.enabled": False, "prometheusRule.enabled": False}):
        policies = [each for each in rendered({**values, **more}) if each["kind"] == "NetworkPolicy"]
        assert all(len(each["spec"]["ingress"]) == 1 + bool(scraped) for each in policies)


def test_the_plain_manifest_has_a_rule_for_a_scraper() -> None:
    """It is a comment, as nobody knows where the Prometheus is."""
    text = (ROOT / "deploy" / "kubernetes" / "simm.yaml").read_text()
    uncommented = re.sub(r"^(    )# (- from:|  )", r"\1\2", text, flags=re.MULTILINE)
    plain, with_rules = (
        [each for each in yaml.safe_load_all(found) if each["kind"] == "NetworkPolicy"] for found in (text, uncommented)
    )
    monitoring = {"kubernetes.io/metadata.name": "monitoring"}
    assert len(plain) == len(with_rules) == 2
    for before, after, port in zip(plain, with_rules, (30080, 30081)):
        assert not any(admits(rule, monitoring, SCRAPER) for rule in before["spec"]["ingress"])
        found = [rule for rule in after["spec"]["ingress"] if admits(rule, monitoring, SCRAPER)]
        assert [rule["ports"] for rule in found] == [[{"port": port}]]
