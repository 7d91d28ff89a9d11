"""The examples in deploy/: that they are well-formed, name settings that exist, and give no pod more than it needs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from simm.config.settings import COMMANDS, add_arguments, load, load_command
from simm.server.slots.hang_watch import HANG_S
from tests.support.child import ROOT
from tests.support.manifests import unexplained

FOLDER = ROOT / "deploy" / "kubernetes"
#: Values of the variables that a manifest refers to.
KNOWN = {"$(POD_IP)": ("10.0.0.7", "fd00::7"), "$(NODE_NAME)": ("node-1", "node-2")}


def documents(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((FOLDER / name).read_text()) if document]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """The pods of simm.yaml, by the name of what makes them."""
    for document in documents("simm.yaml"):
        if document["kind"] in ("Deployment", "DaemonSet"):
            yield document["metadata"]["name"], document["spec"]["template"]["spec"]


def embedded() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The pod of engine-pod.yaml that has SiMM beside its engine, and both containers."""
    (pod,) = [each["spec"] for each in documents("engine-pod.yaml") if len(each["spec"]["containers"]) > 1]
    simm, engine = pod["containers"]
    assert (simm["name"], engine["name"]) == ("simm", "engine")
    return pod, simm, engine


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


@pytest.mark.parametrize(("pod", "container"), [*containers(), pytest.param(*embedded()[:2], id="beside an engine")])
def test_no_container_may_do_more_than_it_needs(pod: dict[str, Any], container: dict[str, Any]) -> None:
    assert unexplained(pod, container) == []
    # Positive control: each line that holds it back is missed.
    for field in ("allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities"):
        context = {key: value for key, value in container["securityContext"].items() if key != field}
        assert len(unexplained(pod, {**container, "securityContext": context})) == 1
    assert len(unexplained({"containers": pod["containers"]}, container)) >= 2
    bare = {key: value for key, value in container.items() if key != "securityContext"}
    assert len(unexplained({}, bare)) >= 5


def test_the_server_beside_an_engine_can_start_as_it_is_confined() -> None:
    """Its root filesystem is read-only, so each folder that it writes is a volume. The engine knows its user."""
    pod, simm, engine = embedded()
    command, *arguments = simm["args"]
    parser = argparse.ArgumentParser()
    add_arguments(parser, command)
    settings = load_command(command, parser.parse_args(arguments), {})
    volumes = {each["name"]: each["emptyDir"] for each in pod["volumes"]}
    written = [each for each in simm["volumeMounts"] if not each.get("readOnly")]
    mounts = {each["mountPath"] for each in written if each["name"] in volumes}
    # The folder of the sockets must be the server's own; a volume's top folder is root's.
    assert {"/dev/shm", "/tmp", str(settings.runtime_dir.parent)} <= mounts and str(settings.runtime_dir) not in mounts
    assert settings.http is not None and settings.http.loopback and settings.allow_uid
    assert not (pod.get("hostPID") or pod.get("hostIPC") or pod.get("hostNetwork")) and pod["shareProcessNamespace"]
    environment = {each["name"]: each["value"] for each in engine["env"]}
    assert environment["SIMM_SERVER_UID"] == str(simm["securityContext"]["runAsUser"])
    assert "/dev/shm" in {each["mountPath"] for each in engine["volumeMounts"]}
    for probe, path in (("startupProbe", "/readyz"), ("livenessProbe", "/healthz")):
        _python, _c, code = simm[probe]["exec"]["command"]
        assert f"'http://{settings.http}{path}'" in code
        compile(code, probe, "exec")


def test_the_data_servers_memory_holds_on_any_number_of_numa_nodes() -> None:
    """``auto`` shares the limit among the workers, one for each node. A size is each worker's: two did not fit."""
    (pod,) = [pod for name, pod in pods() if "dataserver" in name]
    (container,) = pod["containers"]
    (memory,) = [each["value"] for each in container["env"] if each["name"] == "SIMM_MEMORY"]
    assert load("dataserver", {}, {"SIMM_MEMORY": memory}).memory is None
    resources = container["resources"]
    assert resources["limits"]["memory"] == resources["requests"]["memory"]


def test_the_patch_adds_no_capability_that_the_servers_user_cannot_have() -> None:
    """Capabilities that Kubernetes adds are in force for root only, and the data server is not root."""
    (patch,) = documents("rdma-patch.yaml")
    for container in patch["spec"]["template"]["spec"]["containers"]:
        assert "capabilities" not in container.get("securityContext", {})


def test_the_manifest_says_why_it_shares_namespaces_of_the_node() -> None:
    """Each hostX that is on has a comment above it, and the one of hostPID rules out the two alternatives."""
    lines = (FOLDER / "simm.yaml").read_text().splitlines()
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in map(str.strip, lines):
        if line.startswith("#"):
            above.append(line)
        else:
            comments[line] = " ".join(above)
            above = []
    assert "metadata" in comments["hostIPC: true"] and "descriptor" in comments["hostIPC: true"]
    assert "pidfd" in comments["hostPID: true"] and "lease" in comments["hostPID: true"]


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
def test_the_probes_ask_where_it_is_served(name: str, pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    port = next(each["containerPort"] for each in container["ports"] if each["name"] == "http")
    environment = {each["name"]: each.get("value", "") for each in container["env"]}
    assert environment["SIMM_HTTP"].endswith(f":{port}")
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz"), ("startupProbe", "/readyz")):
        assert container.get(probe, {}).get("httpGet", {"path": path, "port": "http"}) == {"path": path, "port": "http"}
    assert {"livenessProbe", "readinessProbe"} <= set(container)
    if "dataserver" in name:  # a kubelet that ends it ends all values
        liveness = container["livenessProbe"]
        assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 2 * HANG_S, "its supervisor acts earlier"
        assert liveness["timeoutSeconds"] >= 5


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
