"""deploy/helm: what helm makes of it is valid, says what the plain manifests say, and follows each of the values."""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from simm.config.parsers import parse_address
from simm.config.settings import SETTINGS, Setting, load, load_command
from simm.errors import ConfigError, SegmentError
from simm.host import memory
from simm.server.arena_stock import ArenaStock
from simm.server.options import DataServerOptions
from simm.tools import events
from simm.tools import index as index_command
from tests.support import chart
from tests.support.chart import CHART, HELM, environment, one, paths, pods, refusal, rendered
from tests.support.chart_values import CHANGES
from tests.support.child import ROOT
from tests.support.manifests import EXPLAINED, unexplained

needs_helm = pytest.mark.skipif(HELM is None, reason=chart.MISSING)
MIB: Final = 1 << 20
SET: Final = {"dataserver.kind": "StatefulSet"}
POD: Final = {"dataserver.sharedMemory": "pod"}
RDMA: Final = {"dataserver.rdma.enabled": True, "networkPolicy.nodeCidrs": ["10.0.0.0/16", "fd00::/64"]}
ETCD: Final = {"manager.coordinator.url": "etcds://a:2379,b:2379/simm", "manager.coordinator.existingSecret": "etcd"}
TLS: Final = {"tls.existingSecret": "certs"}
EVENTS: Final = {"events.enabled": True, "dataserver.settings": {"events": "4M"}}
INDEX: Final = {"index.enabled": True, "index.existingSecret": "routers"}
WATCHED: Final = {"serviceMonitor.enabled": True, "prometheusRule.enabled": True}
#: Renderings that many tests look at.
CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "as it is": {},
    "a StatefulSet of pods alone": {**SET, **POD},
    "a StatefulSet beside engines": {
        **SET,
        "dataserver.arena": "12Gi",
        "dataserver.numa": "0,1",
        "dataserver.warm": True,
        "dataserver.settings": {"value_size": "2M"},
    },
    "RDMA": {**RDMA, "dataserver.rdma.devices": "mlx5_0,mlx5_1:2", "dataserver.rdma.mode": "on"},
    "RDMA by virtual functions": {**RDMA, **POD, "dataserver.rdma.hostNetwork": False},
    "TLS": {**TLS, **WATCHED, "tls.clientCaKey": "clients.crt"},
    "three managers": {
        **ETCD,
        "manager.replicas": 3,
        "manager.coordinator.caKey": "ca",
        "manager.coordinator.certKey": "pem",
        "manager.coordinator.loginKey": "login",
    },
    "all that is free": {
        "manager.tolerations": [{"operator": "Exists"}],
        "dataserver.tolerations": [{"key": "gpu", "operator": "Exists"}],
        "dataserver.affinity": {"nodeAffinity": {}},
        "manager.affinity": {"podAffinity": {}},
        "image.pullSecrets": ["a", "b"],
        "manager.podAnnotations": {"a": "b"},
        "dataserver.podAnnotations": {"a": "b"},
        "manager.podLabels": {"a": "b"},
        "dataserver.podLabels": {"a": "b"},
        "dataserver.engineGroup": 4_000_000_000,
        "user": 2_000_000_000,
        "manager.settings": {"grace_ms": 100_000_000, "log_format": "json"},
        "dataserver.settings": {"slots": 1 << 30, "huge_pages": False, "policy": "sieve", "events": "4M"},
        "dataserver.priorityClassName": "high",
        "manager.priorityClassName": "high",
        **WATCHED,
    },
    "without extras": {"networkPolicy.enabled": False, "podDisruptionBudget.enabled": False, **SET},
}
#: For Kubernetes to fill in.
FILLED_IN: Final = {"$(POD_IP)": "10.0.0.7", "$(SERVER_NAME)": "node-1"}


def cases() -> list[Any]:
    return [pytest.param(values, id=name) for name, values in CASES.items()]


# -- what comes out ------------------------------------------------------------------------------------


@needs_helm
def test_helm_finds_nothing_wrong_in_the_chart() -> None:
    assert HELM is not None
    done = subprocess.run([HELM, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@needs_helm
@pytest.mark.parametrize("version", chart.VERSIONS)
@pytest.mark.parametrize("values", cases())
def test_the_objects_are_valid(values: Mapping[str, Any], version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate")
    seen = 0
    for document in rendered(values):
        if not document["apiVersion"].startswith("monitoring.coreos.com/"):
            validator.validate(document, version, strict=True)
            seen += 1
            # Positive control: a field that there is not is found.
            with pytest.raises(validator.ValidationError):
                validator.validate({**document, "spec": {**document["spec"], "replica": 1}}, version, strict=True)
    assert seen >= 4


@needs_helm
@pytest.mark.parametrize("values", cases())
def test_no_pod_may_do_more_than_it_needs(values: Mapping[str, Any]) -> None:
    """The rules are those for the plain manifests. A pod that shares nothing with its node adds no capability."""
    alone = values.get("dataserver.sharedMemory") == "pod"
    explained = {**EXPLAINED, "dataserver": set()} if alone else EXPLAINED
    for _, pod in pods(rendered(values)):
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            assert unexplained(pod, container, explained) == []
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] == context["runAsGroup"] == context["fsGroup"]
        assert {each["secret"]["defaultMode"] for each in pod["volumes"] if "secret" in each} == {0o440}
        written = [each for each in pod["volumes"] if "secret" not in each]
        assert all("hostPath" not in each or each["name"] == "run" for each in written)
    if alone:
        assert not any(each in json.dumps(rendered(values)) for each in ("hostPath", "hostIPC", "hostPID", "CHOWN"))


@needs_helm
@pytest.mark.parametrize("values", cases())
def test_the_servers_take_their_settings(values: Mapping[str, Any]) -> None:
    """Each variable is a setting of the server that gets it, with a value that it takes."""
    for _, pod in pods(rendered(values)):
        (container,) = pod["containers"]
        (command,) = container["args"]
        variables = environment(container)
        for name, value in FILLED_IN.items():
            variables = {key: text.replace(name, value) for key, text in variables.items()}
        known = {setting.env for setting in SETTINGS.values() if command in setting.roles}
        assert set(variables) <= known
        settings = load(command, {}, variables)
        mounts = {each["mountPath"] for each in container["volumeMounts"]}
        for name in SETTINGS:
            value = getattr(settings, name)
            if SETTINGS[name].env in variables and isinstance(value, Path):
                assert mounts & {str(folder) for folder in (value, *value.parents)}, f"{name}: nothing is mounted there"
        assert settings.listen.port == next(
            each["containerPort"] for each in container["ports"] if each["name"] == "rpc"
        )
        assert settings.http is not None
        assert settings.http.port == next(
            each["containerPort"] for each in container["ports"] if each["name"] == "http"
        )
        secure = settings.tls_cert is not None
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            if probe in container or probe != "startupProbe":
                assert (container[probe]["httpGet"].get("scheme") == "HTTPS") == secure, probe


def test_every_variable_in_the_templates_is_a_setting() -> None:
    """Also without helm, and in branches that no case above takes."""
    text = "".join(path.read_text() for path in sorted(CHART.rglob("templates/*")))
    names = set(re.findall(r"\bSIMM_[A-Z_]+\b", text)) - {"SIMM_"}
    assert len(names) > 20 and names <= {setting.env for setting in SETTINGS.values()}


@needs_helm
def test_the_chart_says_what_the_plain_manifests_say() -> None:
    """What it says otherwise has a reason here: names of a release, and values for what is a comment there."""
    plain = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "simm.yaml").read_text()))
    ours = rendered()
    kinds = {"manager": ("Deployment", "StatefulSet"), "dataserver": ("DaemonSet", "DaemonSet")}
    # Managers are reached by their pods' names. Folder and variables are those of a release.
    otherwise = {"SIMM_MANAGER", "SIMM_RUNTIME_DIR", "SIMM_NAME"}
    for component, (there, here) in kinds.items():
        old = one(plain, there, component)["spec"]["template"]["spec"]
        new = one(ours, here, component)["spec"]["template"]["spec"]
        for field in old:
            if field not in ("containers", "initContainers", "volumes"):
                assert new[field] == old[field], field
        assert set(new) == set(old)
        for before, after in zip(
            old["containers"] + old.get("initContainers", []), new["containers"] + new.get("initContainers", [])
        ):
            for field in (
                "name",
                "args",
                "securityContext",
                "startupProbe",
                "livenessProbe",
                "readinessProbe",
                "resources",
            ):
                assert after.get(field) == before.get(field), field
            for name, value in environment(before).items() if "env" in before else ():
                assert name in otherwise or environment(after)[name] == value, name
        mounts = [{each["name"] for each in pod["containers"][0]["volumeMounts"]} for pod in (old, new)]
        assert mounts[0] == mounts[1]
        rules = [one(each, "NetworkPolicy", component)["spec"]["ingress"] for each in (plain, ours)]
        assert rules[0] == rules[1]


@needs_helm
def test_services_reach_every_pod_and_nothing_else() -> None:
    for values in CASES.values():
        documents = rendered(values)
        makers = [each for each, _ in pods(documents)]
        services = [each for each in documents if each["kind"] == "Service"]
        assert len(services) == len(makers) == 2
        for service in services:
            assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
            chosen = [each for each in makers if matches(service["spec"]["selector"], each)]
            assert [each["metadata"]["name"] for each in chosen] == [service["metadata"]["name"]]
            named = {each["name"] for each in chosen[0]["spec"]["template"]["spec"]["containers"][0]["ports"]}
            assert {each["targetPort"] for each in service["spec"]["ports"]} <= named
        for document in documents:
            if document["kind"] in (
                "NetworkPolicy",
                "PodDisruptionBudget",
                "ServiceMonitor",
                "StatefulSet",
                "DaemonSet",
            ):
                spec = document["spec"]
                selector = spec["podSelector" if "podSelector" in spec else "selector"]["matchLabels"]
                watched = services if document["kind"] == "ServiceMonitor" else makers
                labelled = [each for each in watched if matches(selector, each)]
                assert [each["metadata"]["name"] for each in labelled] == [document["metadata"]["name"]]


def matches(selector: Mapping[str, str], document: Mapping[str, Any]) -> bool:
    """Whether a selector chooses the pods that an object makes, or a Service."""
    made = document["spec"].get("template", document)["metadata"]["labels"]
    return selector.items() <= made.items()


@needs_helm
@pytest.mark.parametrize("more", [{}, POD, {**SET, **POD}, TLS], ids=["host", "pod", "set", "TLS"])
def test_the_index_and_the_publisher_of_events(more: Mapping[str, Any]) -> None:
    """Both start with the flags that they get, where the data server's rings are, and hold no rights."""
    publishers = [{"instance_id": "vllm-0", "endpoint": "tcp://10.0.0.9:5557", "modelname": "m", "block_size": 16}]
    values = {**EVENTS, **WATCHED, **INDEX, "index.publishers": publishers, **more}
    documents = rendered(values)
    validator = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate")
    for document in documents:
        if not document["apiVersion"].startswith("monitoring.coreos.com/"):
            validator.validate(document, chart.VERSIONS[0], strict=True)
    (server,) = [pod for maker, pod in pods(documents) if maker["metadata"]["name"].endswith("-dataserver")]
    index = one(documents, "Deployment", "-index")["spec"]["template"]["spec"]
    dataserver, publisher = server["containers"]
    for pod, container, command in ((server, publisher, events), (index, index["containers"][0], index_command)):
        assert unexplained(pod, container, EXPLAINED) == []
        variables = {**environment(container), "POD_IP": "10.0.0.7", "SERVER_NAME": "node-1"}
        words = container["args"][1:]
        for name, value in variables.items():
            words = [word.replace(f"$({name})", value) for word in words]
        arguments = command._parser("simm").parse_args(words)
        load_command("client", arguments, {k: v for k, v in variables.items() if k.startswith("SIMM_")})
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        if command is events:
            wanted = [f"tcp://[10.0.0.7]:{ports[name]}" for name in ("events", "events-replay")]
            assert list(events._pair("--rfc1527", arguments.rfc1527)) == wanted
            assert parse_address(arguments.http).port == ports["events-http"] and arguments.server == "node-1"
        else:
            assert parse_address(arguments.at).port == ports["http"]
        assert variables["SIMM_TOKEN_FILE"] == "/etc/simm/token", "its page is beyond loopback"
    assert environment(dataserver)["SIMM_EVENTS"] == "4M"
    shared = [{each["mountPath"] for each in container["volumeMounts"]} for container in (dataserver, publisher)]
    assert ("/dev/shm" in shared[0]) == ("/dev/shm" in shared[1]) == ("dataserver.sharedMemory" in more)
    assert json.loads(one(documents, "ConfigMap", "-index")["data"]["publishers.json"]) == publishers
    monitors = [each for each in documents if each["kind"] == "ServiceMonitor"]
    jobs = [
        each["replacement"] for monitor in monitors for endpoint in monitor["spec"]["endpoints"]
        for each in endpoint["relabelings"] if each["targetLabel"] == "job"
    ]  # fmt: skip
    assert sorted(jobs) == ["simm-dataserver", "simm-events", "simm-index", "simm-manager"]
    admitted = one(documents, "NetworkPolicy", "-dataserver")["spec"]["ingress"][0]["ports"]
    assert {"port": 5567, "endPort": 5568} in admitted and {"port": 8091} in admitted


# -- several releases ----------------------------------------------------------------------------------


@needs_helm
@pytest.mark.parametrize(
    "releases", [("simm", "x"), ("x", "x-simm"), ("a" * 52, "a" * 53), ("b", "b-simm-manager"), ("simm", "simm-simm")]
)
def test_releases_in_a_namespace_have_nothing_in_common(releases: tuple[str, str]) -> None:
    both = [rendered({**WATCHED, **SET, "manager.replicas": 2, **ETCD}, release=release) for release in releases]
    names = [{(each["kind"], each["metadata"]["name"]) for each in documents} for documents in both]
    assert len(names[0]) == len(both[0]) and not names[0] & names[1]
    assert all(len(name) <= 52 for _, name in names[0] | names[1]), "a StatefulSet's names get 11 more"
    for ours, theirs in (both, both[::-1]):
        for document in ours:
            if document["kind"] == "Service":
                assert not any(matches(document["spec"]["selector"], each) for each, _ in pods(theirs))
    for name in ("SIMM_MANAGER", "SIMM_RUNTIME_DIR"):
        values = [
            environment(one(each, "StatefulSet", "-dataserver")["spec"]["template"]["spec"]["containers"][0])[name]
            for each in both
        ]
        assert values[0] != values[1]
    secrets = [
        {
            each["secret"]["secretName"]
            for _, pod in pods(documents)
            for each in pod["volumes"]
            if each["name"] == "token"
        }
        for documents in both
    ]
    assert not secrets[0] & secrets[1]


@needs_helm
def test_namespaces_have_folders_of_their_own_on_a_node() -> None:
    """Also with long names, of which a path of a socket has no room."""
    folders = []
    for namespace in ("team-a", "team-b", "n" * 62 + "a", "n" * 62 + "b"):
        (pod,) = [pod for maker, pod in pods(rendered(namespace=namespace)) if maker["kind"] == "DaemonSet"]
        (volume,) = [each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each]
        assert environment(pod["containers"][0])["SIMM_RUNTIME_DIR"] == volume
        assert len(f"{volume}/{'n' * 63}.63.sock") <= 107
        folders.append(volume)
    assert len(set(folders)) == 4 and folders[0] == "/run/simm/team-a.simm"


# -- memory ----------------------------------------------------------------------------------------------


def largest_arena(limit_mib: int, workers: int, streams: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the largest arena, in MiB, that a data server starts with under a limit, by its own code."""
    bounds = [memory.Bound(1 << 60, "in /dev/shm", ""), memory.Bound(limit_mib * MIB, "the limit", "")]
    monkeypatch.setattr(memory, "segment_bounds", lambda _folder: bounds)
    low, high = 0, limit_mib
    while low < high:
        middle = (low + high + 1) // 2
        options = DataServerOptions("node-1", "/run/simm", [0] * workers, middle * MIB, streams=streams)
        try:
            ArenaStock(options, 1).size()
            low = middle
        except SegmentError:
            high = middle - 1
    return low


@needs_helm
@pytest.mark.parametrize(
    ("limit", "workers", "numa", "streams"),
    [
        ("1Gi", 1, "0", 1),
        ("80Gi", 1, "0,1", 1),
        ("80Gi", 2, "0,1", 4),
        ("2Ti", 8, "0", 0),
        ("10240Mi", 3, "0,1,2,3", 2),
    ],
)
def test_arenas_and_processes_stay_below_the_limit(
    limit: str, workers: int, numa: str, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chart takes exactly what the data server takes: its largest arena, and not one that is 1 MiB larger."""
    mib = int(limit[:-2]) * {"Mi": 1, "Gi": 1 << 10, "Ti": 1 << 20}[limit[-2:]]
    total = workers * len(numa.split(","))
    most = largest_arena(mib, total, streams, monkeypatch)
    assert 0 < most * total < mib
    values = {"dataserver.memory": limit, "dataserver.workers": workers, "dataserver.numa": numa}
    values |= {"dataserver.streams": streams}
    (pod,) = [
        pod
        for maker, pod in pods(rendered({**values, "dataserver.arena": f"{most}Mi"}))
        if maker["kind"] == "DaemonSet"
    ]
    (container,) = pod["containers"]
    settings = load("dataserver", {}, {k: v for k, v in environment(container).items() if "$" not in v})
    assert settings.memory == most * MIB and (settings.workers, settings.streams) == (workers, streams)
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"] == limit
    assert "do not fit into dataserver.memory" in refusal({**values, "dataserver.arena": f"{most + 1}Mi"})


@needs_helm
def test_a_pods_shared_memory_is_as_large_as_its_limit() -> None:
    """``auto`` then leaves room for the processes, as the limit binds and not /dev/shm."""
    (pod,) = [pod for maker, pod in pods(rendered({**POD, "dataserver.memory": "7Gi"})) if maker["kind"] == "DaemonSet"]
    (volume,) = [each["emptyDir"] for each in pod["volumes"] if each["name"] == "shm"]
    assert volume == {"medium": "Memory", "sizeLimit": "7Gi"}
    assert {"/dev/shm", "/run/simm"} <= {each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}


# -- what people read -----------------------------------------------------------------------------------


@needs_helm
@pytest.mark.parametrize("values", cases())
def test_the_notes_name_what_there_is(values: Mapping[str, Any], tmp_path: Path) -> None:
    documents, text = chart.with_notes(values, tmp_path)
    makers = {maker["metadata"]["name"].rpartition("-")[2]: (maker, pod) for maker, pod in pods(documents)}
    manager, server = makers["manager"], makers["dataserver"]
    variables = environment(server[1]["containers"][0])
    assert f"SIMM_MANAGER={variables['SIMM_MANAGER']}\n" in text
    assert f"exec {manager[0]['metadata']['name']}-0 --" in text and f"as a {server[0]['kind']}" in text
    (secret,) = [each["secret"]["secretName"] for each in server[1]["volumes"] if each["name"] == "token"]
    assert f"create secret generic {secret} " in text
    shared = bool(server[1].get("hostIPC"))
    assert ("pod-security.kubernetes.io/enforce=privileged" in text) == shared
    assert (f"SIMM_SERVER_UID={server[1]['securityContext']['runAsUser']}\n" in text) == shared
    assert (f"node's {variables['SIMM_RUNTIME_DIR']} mounted" in text) == shared
    assert ("SIMM_TLS_NAME=" in text) == ("SIMM_TLS_NAME" in variables)
    assert ("dataserver.warm=false" in text) == (variables["SIMM_WARM"] == "true")
    assert ("Prometheus is admitted" in text) == ("serviceMonitor.enabled" in values)
    hosts = bool(server[1].get("hostNetwork"))
    for said in ("use ports of their nodes: 30010 to 30073, 30081.", "range for Services"):
        assert (said in text) == hosts, said
    assert ("a node of 10.0.0.0/16" in text) == ("networkPolicy.nodeCidrs" in values)
    assert set(re.findall(r"\bSIMM_[A-Z_]+", text)) <= {setting.env for setting in SETTINGS.values()}


@needs_helm
def test_managers_are_named_to_all_by_their_pods_names() -> None:
    documents = rendered({**ETCD, "manager.replicas": 3}, namespace="team")
    service = one(documents, "StatefulSet", "-manager")["spec"]["serviceName"]
    variables = environment(one(documents, "DaemonSet")["spec"]["template"]["spec"]["containers"][0])
    names = [str(each) for each in load("dataserver", {}, {"SIMM_MANAGER": variables["SIMM_MANAGER"]}).manager]
    assert names == [f"{service}-{number}.{service}.team:30001" for number in range(3)]


# -- the schema -------------------------------------------------------------------------------------------


def schema_at(path: str) -> dict[str, Any]:
    """Return the schema of a value."""
    found: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    for name in filter(None, path.split(".")):
        found = found["properties"][name]
    return found


def folders() -> Iterator[str]:
    """Yield the paths of all maps whose keys are not free."""
    yield from sorted({path.rpartition(".")[0] for path in paths(chart.default_values())})


def test_the_schema_knows_the_values_and_no_others() -> None:
    for folder in folders():
        here = chart.default_values()
        for name in filter(None, folder.split(".")):
            here = here[name]
        schema = schema_at(folder)
        assert schema["additionalProperties"] is False, folder
        assert set(here) == set(schema["properties"]) - {"global"}, folder


#: Settings of servers that values of their own stand for, or that make no sense in a pod.
OWN: Final = frozenset((
    "manager", "listen", "http", "state_dir", "token_file", "coordinator", "coordinator_ca", "coordinator_cert",
    "coordinator_login", "restart_grace_ms", "name", "memory", "numa", "workers", "streams", "warm", "rdma",
    "rdma_devices", "runtime_dir", "group", "tls_cert", "tls_key", "tls_ca", "tls_name", "tls_client_ca",
))  # fmt: skip
NOT_IN_A_POD: Final = frozenset((
    "insecure", "allow_uid", "server_uid",  # there is a token
    "log_file",  # the root filesystem is read-only
    "hugetlb",  # the chart asks for no limit of hugepages-2Mi, and shares values with engines by a group or warm
))  # fmt: skip


@pytest.mark.parametrize("role", ["manager", "dataserver"])
def test_the_schema_takes_the_further_settings_that_a_server_takes(role: str) -> None:
    """All of them, by their names, with the bounds of the settings' own parsers."""
    known = schema_at(f"{role}.settings")["properties"]
    assert set(known) == {name for name, each in SETTINGS.items() if role in each.roles} - OWN - NOT_IN_A_POD
    for name, schema in known.items():
        setting = SETTINGS[name]
        for value in schema.get("enum", ()):
            setting.parse(value)
        assert not schema.get("enum") or refuses(setting, "other")
        if schema.get("type") == "integer":
            # As text: so it is in the environment.
            setting.parse(str(schema["minimum"])), setting.parse(str(schema["maximum"]))
            assert refuses(setting, str(schema["maximum"] + 1)) and refuses(setting, str(schema["minimum"] - 1)), name


def refuses(setting: Setting, value: str) -> bool:
    try:
        setting.parse(value)
    except (ConfigError, ValueError):
        return True
    return False


#: Values that cannot be, each by what is wrong with it. helm names the path of what its schema refuses.
IMPOSSIBLE: Final[list[Mapping[str, Any]]] = [
    {"user": 0},
    {"user": "simm"},
    {"image.tag": "a b"},
    {"image.digest": "sha256:12"},
    {"image.pullPolicy": "Sometimes"},
    {"image.pullSecrets": [""]},
    {"manager.replicas": 0},
    {"manager.port": 70000},
    {"manager.port": 80},
    {"manager.coordinator.url": "http://a:2379/x"},
    {"manager.settings": {"heartbeat_ms": 1}},
    {"manager.state.size": "1"},
    {"manager.settings": {"policy": "lru"}},
    {"manager.settings": {"coordinator_ttl_ms": 2500}},
    {"dataserver.kind": "Deployment"},
    {"dataserver.replicas": 0},
    {"dataserver.sharedMemory": "none"},
    {"dataserver.runtimeDir": "run/simm"},
    {"dataserver.memory": "80G"},
    {"dataserver.memory": 80},
    {"dataserver.arena": "64GB"},
    {"dataserver.arena": "0Gi"},
    {"dataserver.numa": "0,"},
    {"dataserver.numa": -1},
    {"dataserver.workers": 65},
    {"dataserver.streams": -1},
    {"dataserver.warm": "yes"},
    {"dataserver.rdma.mode": "off"},
    {"dataserver.rdma.resource": "hca"},
    {"dataserver.settings": {"policy": "random"}},
    {"dataserver.settings": {"polcy": "lru"}},
    {"dataserver.settings": {"memory": "8G"}},
    {"dataserver.port": 65473},
    {"dataserver.engineGroup": 0},
    {"events.port": 65535},
    {"events.enabled": "yes"},
    {"index.port": 80},
    {"index.existingSecret": "A"},
    {"index.key": ""},
    {"index.publishers": {}},
    {"index.memory": "4G"},
    {"serviceMonitor.interval": "15"},
    {"tls.name": ""},
    {"token.key": ""},
    {"fullnameOverride": "a" * 41},
    {"dataserver.maxUnavailable": 0},
    {"dataserver.terminationGracePeriodSeconds": 1},
    {"networkPolicy.from": {}},
    {"networkPolicy.scrapeFrom": {}},
    {"networkPolicy.nodeCidrs": ["10.0.0.0"]},
]
WARM_GROUP: Final[Mapping[str, Any]] = {"dataserver.warm": True, "dataserver.engineGroup": 7}
#: What 2 GiB need to be copied twice.
GRACE: Final = {
    "dataserver.terminationGracePeriodSeconds": 32, "dataserver.startSeconds": 32, "dataserver.restartGraceSeconds": 64,
}  # fmt: skip
#: What single values allow and together are wrong -> what helm says.
TOGETHER: Final = {
    "an etcd": {"manager.replicas": 2},
    "those of existingSecret": {"manager.coordinator.url": "etcds://a:1/x", "manager.coordinator.caKey": "ca"},
    "loginKey need a url": {**ETCD, "manager.coordinator.url": "etcd://a:1/x", "manager.coordinator.loginKey": "user"},
    "dead_after (5 unless given) has": {"manager.settings": {"suspect_after": 5}},
    "slots and value_size": {"dataserver.settings": {"slots": 1000, "value_size": "2M"}},
    "make 66 workers": {"dataserver.numa": "0,1", "dataserver.workers": 33},
    "make 33 workers": {**RDMA, "dataserver.workers": 33},
    "ends with the pod": {**POD, "dataserver.warm": True},
    "no engine sees": {**POD, "dataserver.engineGroup": 7},
    "needs serviceMonitor": {"prometheusRule.enabled": True},
    "name them in dataserver.numa": {"dataserver.arena": "1Gi"},
    "do not fit": {"dataserver.arena": "80Gi", "dataserver.numa": "0"},
    "needs dataserver.settings.events": {"events.enabled": True},
    "the data server has the port 30011": {**EVENTS, "events.port": 30010, "dataserver.port": 30011},
    "events.httpPort is one of": {**EVENTS, "events.port": 8090},
    "httpPort are one": {"manager.port": 30080},
    "one of the 64 ports": {"dataserver.httpPort": 30073},
    "needs networkPolicy.nodeCidrs": {"dataserver.rdma.enabled": True},
    "needs index.existingSecret": {"index.enabled": True},
    "key token of the Secret simm-token:": {**INDEX, "index.existingSecret": "simm-token"},
    "key b of the Secret all:": {
        "index.enabled": True, "index.key": "b", "token.key": "b", "index.existingSecret": "all",
        "token.existingSecret": "all",
    },
    "key token of the Secret admins:": {
        "index.enabled": True, "index.existingSecret": "admins", "token.managerSecret": "admins",
    },
    "PeriodSeconds to 94 or more, startSeconds to 94, and restartGraceSeconds to 188": WARM_GROUP,
    "startSeconds to 1669, and restartGraceSeconds to 3338": {
        **WARM_GROUP, "dataserver.memory": "2Ti", "dataserver.terminationGracePeriodSeconds": 1669,
        "dataserver.restartGraceSeconds": 3338,
    },
    "copies 1025Mi of": {**WARM_GROUP, **GRACE, "dataserver.memory": "1281Mi", "dataserver.restartGraceSeconds": 63},
    "copies 820Mi of": {**WARM_GROUP, "dataserver.memory": "1Gi", "dataserver.restartGraceSeconds": 62},
    "copies 2049Mi of": {
        **WARM_GROUP, **GRACE, "dataserver.arena": "683Mi", "dataserver.numa": "0,1,2", "dataserver.memory": "80Gi",
    },
    "more than 35 characters": {"dataserver.runtimeDir": "/run/" + "a" * 31},
}


@pytest.mark.full
@needs_helm
@pytest.mark.parametrize("values", IMPOSSIBLE, ids=str)
def test_impossible_values_are_refused(values: Mapping[str, Any]) -> None:
    (path,) = values
    said = refusal(values)
    assert "meet the specifications of the schema" in said and f"- {path}" in said, said


@needs_helm
@pytest.mark.parametrize("said", TOGETHER)
def test_values_that_contradict_each_other_are_refused(said: str) -> None:
    assert said in refusal(TOGETHER[said])


@needs_helm
def test_a_warm_server_with_a_group_has_time_to_copy_its_data() -> None:
    """As much as is refused above without a second of it; and without a group, or warm, nothing is copied.

    What is copied is the arenas, not the rest of the pod's memory.
    """
    for memory_size in ("2560Mi", "1281Mi"):
        assert refusal({**WARM_GROUP, **GRACE, "dataserver.memory": memory_size}) == ""
    short = {**WARM_GROUP, **GRACE, "dataserver.memory": "2560Mi", "dataserver.startSeconds": 31}
    assert "startSeconds to 32," in refusal(short)
    small = {"dataserver.arena": "512Mi", "dataserver.numa": "0,1", "dataserver.workers": 2}
    assert refusal({**WARM_GROUP, **GRACE, **small}) == ""  # of 80Gi
    # The servers' Secret is the index's, too, by another key.
    assert refusal({"index.enabled": True, "index.existingSecret": "simm-token", "index.key": "routers"}) == ""
    for name in WARM_GROUP:
        assert refusal({name: WARM_GROUP[name]}) == ""


@needs_helm
def test_a_misspelled_value_is_refused_at_every_level() -> None:
    """Each name with a letter too many; helm reports them all at once."""
    wrong = [f"{path}x" for path in paths(chart.default_values())]
    said = refusal(dict.fromkeys(wrong, 1))
    for path in wrong:
        assert f"Additional property {path.rpartition('.')[2]} is not allowed" in said, path


@pytest.mark.full
@needs_helm
def test_random_values_that_the_schema_takes_are_rendered_and_valid() -> None:
    """Values of the table below in random company: whatever helm takes gives valid objects."""
    validator = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate")
    chance = random.Random(16)
    taken = 0
    for _ in range(12):
        values: dict[str, Any] = {}
        for path, change in chance.sample(sorted(CHANGES.items()), 12):
            values |= {**change.beside, path: change.value}
        try:
            documents = rendered(values)
        except chart.Refused as refused:
            assert any(said in str(refused) for said in TOGETHER), refused
            continue
        taken += 1
        for document in documents:
            if not document["apiVersion"].startswith("monitoring.coreos.com/"):
                validator.validate(document, chart.VERSIONS[0], strict=True)
    assert taken >= 2


# -- each value -------------------------------------------------------------------------------------------


def test_the_table_of_changes_has_every_value() -> None:
    assert sorted(CHANGES) == sorted(paths(chart.default_values()))


def as_pattern(line: str) -> Callable[[str], bool]:
    pattern = re.compile(".*".join(map(re.escape, line.split("*"))))
    return lambda found: pattern.fullmatch(found) is not None


def unlike(expected: list[str], changed: set[str]) -> list[str]:
    """Return the lines that changed and should not have, and those that should have and did not."""
    tests = [as_pattern(line) for line in expected]
    found = [f"unexpected: {line}" for line in sorted(changed) if not any(test(line) for test in tests)]
    return found + [f"missing: {line}" for line, test in zip(expected, tests) if not any(map(test, changed))]


@pytest.mark.full
@needs_helm
@pytest.mark.parametrize("path", sorted(paths(chart.default_values())))
def test_each_value_changes_what_it_should_and_nothing_else(path: str) -> None:
    change = CHANGES[path]
    before = chart.lines(rendered(change.beside))
    after = chart.lines(rendered({**change.beside, path: change.value}))
    changed = after - before if change.expected[0][0] != "-" else {f"-{line}" for line in before - after}
    assert unlike(change.expected, changed) == []
    # Positive controls: a change that is missing, or one too many, is found.
    assert unlike([*change.expected, "DaemonSet/other *"], changed) and unlike([], changed)
