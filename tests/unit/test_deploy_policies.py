"""The network policies of deploy/: whom they admit to which ports. What servers listen on is in the other tests."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from simm.server.options import DataServerOptions
from tests.support import chart
from tests.support.chart import HELM, environment, one, refusal, rendered
from tests.support.child import ROOT

needs_helm = pytest.mark.skipif(HELM is None, reason=chart.MISSING)
ALL: Final = {
    "serviceMonitor.enabled": True,
    "prometheusRule.enabled": True,
    "events.enabled": True,
    "dataserver.settings": {"events": "4M"},
    "index.enabled": True,
    "index.existingSecret": "routers",
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


#: RDMA by the nodes' network, in a cluster of IPv4 and IPv6.
NODES: Final = {"dataserver.rdma.enabled": True, "networkPolicy.nodeCidrs": ["10.1.0.0/16", "fd00:1::/64"]}


def ports_for(policy: Mapping[str, Any], address: str) -> list[dict[str, int]]:
    """Return the ports that a policy opens for an address that is no pod's."""
    where = ipaddress.ip_address(address)
    blocks = [(peer["ipBlock"]["cidr"], rule) for rule in policy["spec"]["ingress"] for peer in rule["from"]
              if "ipBlock" in peer]  # fmt: skip
    return [port for cidr, rule in blocks if where in ipaddress.ip_network(cidr) for port in rule["ports"]]


@needs_helm
@pytest.mark.parametrize("node", ["10.1.2.3", "fd00:1::7"])
def test_issue_nodes_reach_the_servers_whose_clients_use_their_network(node: str) -> None:
    """With hostNetwork a data server comes from its node's address: no rule for pods admitted it to the manager."""
    documents = rendered({**ALL, **NODES})
    pod = one(documents, "DaemonSet")["spec"]["template"]["spec"]
    assert pod["hostNetwork"] is True
    opened = {each: ports_for(one(documents, "NetworkPolicy", f"-{each}"), node) for each in ("manager", "index")}
    assert opened == {"manager": [{"port": 30001}], "index": [{"port": 8090}]}, "not the manager's pages"
    (manager,) = environment(pod["containers"][0])["SIMM_MANAGER"].split(",")
    assert manager.endswith(f":{opened['manager'][0]['port']}")
    for each in ("manager", "index", "dataserver"):
        policy = one(documents, "NetworkPolicy", f"-{each}")
        assert ports_for(policy, "10.2.0.1") == [] != ports_for(policy, node)
    alone = {"dataserver.rdma.enabled": True}
    assert "needs networkPolicy.nodeCidrs" in refusal(alone)
    # Those that are admitted to all ports of pods, pages too, need no other rule.
    pods = {"namespaceSelector": {"matchLabels": {"simm-client": "yes"}}}
    admitted = {**alone, "networkPolicy.from": [pods, {"ipBlock": {"cidr": "10.1.0.0/16"}}]}
    assert refusal(admitted) == ""
    policy = one(rendered(admitted), "NetworkPolicy", "-manager")
    assert {"port": 30001} in ports_for(policy, "10.1.2.3")
    assert "needs networkPolicy.nodeCidrs" in refusal({**alone, "networkPolicy.from": [pods]})
    for more in ({"networkPolicy.enabled": False}, {"dataserver.rdma.hostNetwork": False}):
        assert refusal({**alone, **more}) == ""


@needs_helm
@pytest.mark.parametrize(
    ("ports", "named"),
    [
        ({}, "dataserver.port, dataserver.httpPort"),
        ({"dataserver.port": 20010, "dataserver.httpPort": 20081}, ""),
        ({"dataserver.port": 29990, "dataserver.httpPort": 20081}, "dataserver.port"),
        ({"dataserver.port": 20010, "dataserver.httpPort": 20081, "events.port": 29999}, "events.port"),
        ({"dataserver.port": 20010, "dataserver.httpPort": 32767, "events.httpPort": 30000},
         "dataserver.httpPort, events.httpPort"),
        ({"dataserver.port": 32768, "dataserver.httpPort": 20081, "events.port": 40000}, ""),
    ],
)  # fmt: skip
def test_the_notes_name_the_ports_that_services_may_take(
    ports: Mapping[str, Any], named: str, tmp_path: Path
) -> None:
    """They named the data server's as the remedy whichever it was."""
    _, text = chart.with_notes({**ALL, **NODES, **ports}, tmp_path)
    assert (f"or choose other ports ({named})." if named else "use ports of their nodes") in text
    assert ("range for Services" in text) == bool(named)


@needs_helm
@pytest.mark.parametrize("named", ["", "scraper"])
def test_issue_the_index_has_a_secret_of_its_own(named: str) -> None:
    """It had the servers' one, and any tenant's token opened it. Prometheus shows a token that it knows."""
    documents = rendered({**ALL, "serviceMonitor.existingSecret": named, "index.key": "askers"})
    volumes = {
        name: next(each["secret"] for each in one(documents, kind, name)["spec"]["template"]["spec"]["volumes"]
                   if each["name"] == "token")
        for kind, name in (("StatefulSet", "-manager"), ("DaemonSet", "-dataserver"), ("Deployment", "-index"))
    }  # fmt: skip
    assert volumes["-index"]["secretName"] == "routers" and volumes["-index"]["items"][0]["key"] == "askers"
    assert volumes["-manager"]["secretName"] == volumes["-dataserver"]["secretName"] == "simm-token"
    shown = {
        name: one(documents, "ServiceMonitor", name)["spec"]["endpoints"][0]["authorization"]["credentials"]
        for name in ("-manager", "-index")
    }
    assert shown["-index"] == ({"name": named, "key": "token"} if named else {"name": "routers", "key": "askers"})
    assert shown["-manager"] == {"name": named or "simm-token", "key": "token"}
    assert "index.existingSecret" in refusal({"index.enabled": True})


@needs_helm
def test_issue_values_of_a_release_before_the_index_had_a_key(tmp_path: Path) -> None:
    """``helm upgrade --reuse-values`` has no index.key then: "error calling eq: incompatible types for comparison"."""
    left = {"index.key": None, "networkPolicy.nodeCidrs": None}
    assert rendered({**left, "serviceMonitor.enabled": True}) == rendered({"serviceMonitor.enabled": True})
    assert rendered({**ALL, **left}) == rendered(ALL)
    assert "key token of the Secret simm-token:" in refusal({**ALL, **left, "index.existingSecret": "simm-token"})
    _, text = chart.with_notes({**ALL, **left}, tmp_path)
    assert "one made for the index alone, which managers and data servers also have." in text


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
    # The same for nodes, whose network rdma-patch.yaml uses.
    assert not any(ports_for(each, "10.0.0.7") for each in plain)
    assert [ports_for(each, "10.0.0.7") for each in with_rules] == [[{"port": 30001}], []]


@needs_helm
@pytest.mark.parametrize(("numa", "workers", "rdma"), [("0", 32, True), ("0,1,2", 10, True), ("0,1", 32, False)])
def test_the_policies_open_all_ports_of_a_server(numa: str, workers: int, rdma: bool) -> None:
    """As many workers as the chart takes, with their endpoints; and none has the page's port."""
    values = {
        **ALL, "dataserver.port": 65472, "dataserver.numa": numa, "dataserver.workers": workers,
        "dataserver.rdma.enabled": rdma, "dataserver.rdma.hostNetwork": False,
    }  # fmt: skip
    first = one(rendered(values), "NetworkPolicy", "-dataserver")["spec"]["ingress"][0]["ports"][0]
    opened = range(first["port"], first["endPort"] + 1)
    options = DataServerOptions("a", "/run/simm", [0] * workers * len(numa.split(",")), listen_port=first["port"])
    used = {options.port_of(number, rdma=kind) for number in range(len(options.nodes)) for kind in {False, rdma}}
    assert used <= set(opened) and opened.stop <= 1 << 16
    for port in (opened[0], opened[-1]):
        assert "one of the 64 ports" in refusal({**values, "dataserver.httpPort": port})
