"""The examples in deploy/: that they are well-formed, name settings that exist, and give no pod more than it needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from simm.config.settings import COMMANDS, load
from tests.support.child import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
#: Values of the variables that a manifest refers to.
KNOWN = {"$(POD_IP)": ("10.0.0.7", "fd00::7"), "$(NODE_NAME)": ("node-1", "node-2")}
#: Capabilities that a comment in the manifest explains.
EXPLAINED = {"manager": set(), "dataserver": {"SYS_NICE"}, "runtime-folder": {"CHOWN"}}


def documents(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((FOLDER / name).read_text()) if document]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """The pods of simm.yaml, by the name of what makes them."""
    for document in documents("simm.yaml"):
        if document["kind"] in ("Deployment", "DaemonSet"):
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def containers() -> list[Any]:
    return [
        pytest.param(pod, container, id=container["name"])
        for _, pod in pods()
        for container in [*pod.get("initContainers", ()), *pod["containers"]]
    ]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_are_well_formed(path: Path) -> None:
    for document in documents(path.name):
        assert "spec" in document
        assert "kind" in document or path.name == "rdma-patch.yaml"


@pytest.mark.parametrize(("pod", "container"), containers())
def test_no_container_may_do_more_than_it_needs(pod: dict[str, Any], container: dict[str, Any]) -> None:
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"]["drop"] == ["ALL"]
    assert set(context["capabilities"].get("add", ())) == EXPLAINED[container["name"]]
    assert not context.get("privileged")
    root = context.get("runAsUser", pod["securityContext"]["runAsUser"]) == 0
    assert root == (container["name"] == "runtime-folder")


@pytest.mark.parametrize(("name", "pod"), list(pods()), ids=lambda value: value if isinstance(value, str) else "")
def test_pods_run_without_root_and_read_their_token(name: str, pod: dict[str, Any]) -> None:
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    (token,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert token["defaultMode"] == 0o440 and context["fsGroup"] == context["runAsGroup"]


@pytest.mark.parametrize(("name", "pod"), list(pods()), ids=lambda value: value if isinstance(value, str) else "")
def test_the_probes_ask_healthz_where_it_is_served(name: str, pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    port = next(each["containerPort"] for each in container["ports"] if each["name"] == "http")
    environment = {each["name"]: each.get("value", "") for each in container["env"]}
    assert environment["SIMM_HTTP"].endswith(f":{port}")
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "http"}


@pytest.mark.parametrize("family", [0, 1], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize(("pod", "container"), containers())
def test_the_settings_exist(pod: dict[str, Any], container: dict[str, Any], family: int, tmp_path: Path) -> None:
    if "args" not in container:
        return
    environment = {}
    for each in container["env"]:
        value = each.get("value", "")
        for variable, values in KNOWN.items():
            value = value.replace(variable, values[family])
        if each["name"].startswith("SIMM_"):
            environment[each["name"]] = value
    (command,) = container["args"]
    assert command in COMMANDS
    settings = load(command, {}, environment)
    assert settings.listen.host == KNOWN["$(POD_IP)"][family]
    assert str(settings.listen).startswith("[") == bool(family)


def test_the_policies_admit_every_port_that_is_served() -> None:
    allowed: dict[str, set[int]] = {}
    for document in documents("simm.yaml"):
        if document["kind"] == "NetworkPolicy":
            spec = document["spec"]
            assert spec["policyTypes"] == ["Ingress"]
            ports = {
                port for rule in spec["ingress"] for each in rule["ports"]
                for port in range(each["port"], each.get("endPort", each["port"]) + 1)
            }  # fmt: skip
            allowed[spec["podSelector"]["matchLabels"]["app"]] = ports
    for name, pod in pods():
        environment = {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}
        for variable in ("SIMM_LISTEN", "SIMM_HTTP"):
            assert int(environment[variable].rpartition(":")[2]) in allowed[name]
