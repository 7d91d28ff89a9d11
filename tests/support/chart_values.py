"""For each value of the chart: another one, and the lines of the rendering (tests/support/chart.py) that it changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

_M: Final = "StatefulSet/simm-manager spec.template"
_S: Final = "DaemonSet/simm-dataserver spec.template"
_MC: Final = f"{_M}.spec.containers.manager"
_SC: Final = f"{_S}.spec.containers.dataserver"
_SET: Final = {"dataserver.kind": "StatefulSet"}
_TLS: Final = {"tls.existingSecret": "certs"}
_ETCD: Final = {"manager.coordinator.url": "etcds://a:1/x", "manager.coordinator.existingSecret": "etcd"}
_NODES: Final = {"networkPolicy.nodeCidrs": ["10.0.0.0/16"]}
_RDMA: Final = {"dataserver.rdma.enabled": True, **_NODES}
_WATCHED: Final = {"serviceMonitor.enabled": True}


@dataclasses.dataclass(frozen=True)
class Change:
    """Another value, what it changes, and values that it needs beside it.

    ``expected``: the lines that are new, with * for anything; with a - before them, those that are gone.
    """

    value: Any
    expected: list[str]
    beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _env(name: str, value: str, server: str = _SC) -> str:
    return f'{server}.env.{name}.value="{value}"'


def _image(value: str) -> list[str]:
    return [
        f'{_MC}.image="{value}"',
        f'{_SC}.image="{value}"',
        f'{_S}.spec.initContainers.runtime-folder.image="{value}"',
    ]


_EVENTS: Final = {"events.enabled": True, "dataserver.settings": {"events": "4M"}, **_WATCHED}
_EC: Final = f"{_S}.spec.containers.events"
_INDEX: Final = {"index.enabled": True, "index.existingSecret": "routers"}
_I: Final = "Deployment/simm-index spec.template"
_PUBLISHER: Final = {"instance_id": "a", "endpoint": "tcp://a:1", "modelname": "m"}

CHANGES: Final[Mapping[str, Change]] = {
    # Names are in nearly every line.
    "nameOverride": Change("kv", ["*/simm-kv*", "*simm-kv*", '*app.kubernetes.io/name="kv"']),
    "fullnameOverride": Change("kv", ["*/kv-*"]),
    "image.repository": Change("registry:5000/kv", _image("registry:5000/kv:0.1.0")),
    "image.tag": Change("1.2", _image("simm:1.2")),
    "image.digest": Change("sha256:" + "a" * 64, _image("simm@sha256:" + "a" * 64)),
    "image.pullPolicy": Change(
        "Always",
        [
            f'{_MC}.imagePullPolicy="Always"',
            f'{_SC}.imagePullPolicy="Always"',
            f'{_S}.spec.initContainers.runtime-folder.imagePullPolicy="Always"',
        ],
    ),
    "image.pullSecrets": Change(["pull"], [f'{each}.spec.imagePullSecrets.pull.name="pull"' for each in (_M, _S)]),
    "user": Change(
        70000,
        [
            *[
                f"{each}.spec.securityContext.{name}=70000"
                for each in (_M, _S)
                for name in ("runAsUser", "runAsGroup", "fsGroup")
            ],
            f'{_S}.spec.initContainers.runtime-folder.command.1="70000:70000"',
        ],
    ),
    "token.existingSecret": Change(
        "ours", [f'{each}.spec.volumes.token.secret.secretName="ours"' for each in (_M, _S)]
    ),
    "token.key": Change("file", [f'{each}.spec.volumes.token.secret.items.0.key="file"' for each in (_M, _S)]),
    "token.managerSecret": Change("admins", [f'{_M}.spec.volumes.token.secret.secretName="admins"']),
    "tls.existingSecret": Change(
        "certs",
        [
            *[f"{each}.spec.volumes.tls.*" for each in (_M, _S)],
            *[f"{each}.volumeMounts.tls.*" for each in (_MC, _SC)],
            *[f"{each}.env.SIMM_TLS_CERT.*" for each in (_MC, _SC)],
            *[f"{each}.env.SIMM_TLS_KEY.*" for each in (_MC, _SC)],
            f"{_SC}.env.SIMM_TLS_CA.*",
            f"{_SC}.env.SIMM_TLS_NAME.*",
            *[
                f'{each}.{probe}Probe.httpGet.scheme="HTTPS"'
                for each in (_MC, _SC)
                for probe in ("liveness", "readiness")
            ],
            f'{_SC}.startupProbe.httpGet.scheme="HTTPS"',
            'ServiceMonitor/* spec.endpoints.0.scheme="https"',
            'ServiceMonitor/* spec.endpoints.0.tlsConfig.serverName="simm"',
            "ServiceMonitor/* spec.endpoints.0.tlsConfig.ca.secret.*",
        ],
        _WATCHED,
    ),
    "tls.name": Change(
        "kv",
        [
            _env("SIMM_TLS_NAME", "kv"),
            'ServiceMonitor/* spec.endpoints.0.tlsConfig.serverName="kv"',
        ],
        {**_TLS, **_WATCHED},
    ),
    "tls.clientCaKey": Change(
        "clients",
        [
            f"{each}.env.SIMM_TLS_CLIENT_CA.{field}"
            for each in (_MC, _SC)
            for field in ('name="SIMM_TLS_CLIENT_CA"', 'value="/etc/simm-tls/clients"')
        ],
        _TLS,
    ),
    "manager.replicas": Change(
        3,
        [
            "StatefulSet/simm-manager spec.replicas=3",
            f"{_M}.spec.affinity.podAntiAffinity.*",
            "PodDisruptionBudget/simm-manager *",
            f'{_SC}.env.SIMM_MANAGER.value="simm-manager-0.simm-manager.simm:30001,simm-manager-1.*,simm-manager-2.*"',
        ],
        _ETCD,
    ),
    "manager.coordinator.url": Change("etcd://a:1/x", [f"{_MC}.env.SIMM_COORDINATOR.*"]),
    "manager.coordinator.existingSecret": Change(
        "etcd",
        [
            f"{_M}.spec.volumes.etcd.*",
            f"{_MC}.volumeMounts.etcd.*",
        ],
        {"manager.coordinator.url": "etcd://a:1/x"},
    ),
    "manager.coordinator.caKey": Change("ca", [f"{_MC}.env.SIMM_COORDINATOR_CA.*"], _ETCD),
    "manager.coordinator.certKey": Change("pem", [f"{_MC}.env.SIMM_COORDINATOR_CERT.*"], _ETCD),
    "manager.coordinator.loginKey": Change("login", [f"{_MC}.env.SIMM_COORDINATOR_LOGIN.*"], _ETCD),
    "manager.state.storageClass": Change(
        "fast",
        [
            'StatefulSet/simm-manager spec.volumeClaimTemplates.0.spec.storageClassName="fast"',
        ],
    ),
    "manager.state.size": Change(
        "5Gi",
        [
            'StatefulSet/simm-manager spec.volumeClaimTemplates.0.spec.resources.requests.storage="5Gi"',
        ],
    ),
    "manager.port": Change(
        31001,
        [
            _env("SIMM_LISTEN", "[$(POD_IP)]:31001", _MC),
            f"{_MC}.ports.rpc.containerPort=31001",
            "Service/simm-manager spec.ports.rpc.port=31001",
            "NetworkPolicy/simm-manager spec.ingress.0.ports.0.port=31001",
            _env("SIMM_MANAGER", "simm-manager-0.simm-manager.simm:31001"),
        ],
    ),
    "manager.httpPort": Change(
        31080,
        [
            _env("SIMM_HTTP", "[$(POD_IP)]:31080", _MC),
            f"{_MC}.ports.http.containerPort=31080",
            "Service/simm-manager spec.ports.http.port=31080",
            "NetworkPolicy/simm-manager spec.ingress.0.ports.1.port=31080",
        ],
    ),
    "manager.settings": Change(
        {"grace_ms": 2_000_000_000, "log_level": "debug"},
        [
            _env("SIMM_GRACE_MS", "2000000000", _MC),
            f"{_MC}.env.SIMM_GRACE_MS.name=*",
            _env("SIMM_LOG_LEVEL", "debug", _MC),
            f"{_MC}.env.SIMM_LOG_LEVEL.name=*",
        ],
    ),
    "manager.resources": Change({"limits": {"memory": "1Gi"}}, [f'{_MC}.resources.limits.memory="1Gi"']),
    "manager.nodeSelector": Change({"disk": "ssd"}, [f'{_M}.spec.nodeSelector.disk="ssd"']),
    "manager.tolerations": Change([{"operator": "Exists"}], [f'{_M}.spec.tolerations.0.operator="Exists"']),
    "manager.affinity": Change({"podAffinity": {}}, [f"{_M}.spec.affinity.podAffinity={{}}"]),
    "manager.priorityClassName": Change("high", [f'{_M}.spec.priorityClassName="high"']),
    "manager.podAnnotations": Change({"a": "b"}, [f'{_M}.metadata.annotations.a="b"']),
    "manager.podLabels": Change({"a": "b"}, [f'{_M}.metadata.labels.a="b"']),
    "dataserver.kind": Change(
        "StatefulSet", ["StatefulSet/simm-dataserver *", "PodDisruptionBudget/simm-dataserver *"]
    ),
    "dataserver.replicas": Change(7, ["StatefulSet/simm-dataserver spec.replicas=7"], _SET),
    "dataserver.sharedMemory": Change(
        "pod",
        [
            f"{_S}.spec.volumes.shm.*",
            f"{_SC}.volumeMounts.shm.*",
            f"{_S}.spec.volumes.run.emptyDir={{}}",
            f'{_SC}.volumeMounts.run.mountPath="/run/simm"',
            _env("SIMM_RUNTIME_DIR", "/run/simm/server"),
        ],
    ),
    "dataserver.runtimeDir": Change(
        "/run/kv",
        [
            _env("SIMM_RUNTIME_DIR", "/run/kv"),
            f'{_SC}.volumeMounts.run.mountPath="/run/kv"',
            f'{_S}.spec.volumes.run.hostPath.path="/run/kv"',
            f'{_S}.spec.initContainers.runtime-folder.command.2="/run/kv"',
            f'{_S}.spec.initContainers.runtime-folder.volumeMounts.run.mountPath="/run/kv"',
        ],
    ),
    "dataserver.engineGroup": Change(
        2_000_000_000,
        [
            _env("SIMM_GROUP", "2000000000"),
            f"{_SC}.env.SIMM_GROUP.name=*",
            f"{_S}.spec.securityContext.supplementalGroups.0=2000000000",
        ],
    ),
    "dataserver.memory": Change(
        "9Gi",
        [
            f'{_SC}.resources.requests.memory="9Gi"',
            f'{_SC}.resources.limits.memory="9Gi"',
            f'{_S}.spec.volumes.shm.emptyDir.sizeLimit="9Gi"',
        ],
        {"dataserver.sharedMemory": "pod"},
    ),
    "dataserver.arena": Change("64Gi", [_env("SIMM_MEMORY", "64G")], {"dataserver.numa": "0"}),
    "dataserver.numa": Change(0, [_env("SIMM_NUMA", "0")]),
    "dataserver.workers": Change(2, [_env("SIMM_WORKERS", "2")]),
    "dataserver.streams": Change(4, [_env("SIMM_STREAMS", "4")]),
    "dataserver.cpu": Change("500m", [f'{_SC}.resources.requests.cpu="500m"']),
    "dataserver.warm": Change(
        True,
        [
            _env("SIMM_WARM", "true"),
            _env("SIMM_RESTART_GRACE_MS", "120s", _MC),
            f"{_MC}.env.SIMM_RESTART_GRACE_MS.name=*",
        ],
    ),
    "dataserver.restartGraceSeconds": Change(
        300, [_env("SIMM_RESTART_GRACE_MS", "300s", _MC)], {"dataserver.warm": True}
    ),
    "dataserver.maxUnavailable": Change(
        2, ["DaemonSet/simm-dataserver spec.updateStrategy.rollingUpdate.maxUnavailable=2"]
    ),
    "dataserver.minReadySeconds": Change(30, ["DaemonSet/simm-dataserver spec.minReadySeconds=30"]),
    "dataserver.terminationGracePeriodSeconds": Change(90, [f"{_S}.spec.terminationGracePeriodSeconds=90"]),
    "dataserver.startSeconds": Change(601, [f"{_SC}.startupProbe.failureThreshold=61"]),
    "dataserver.port": Change(
        31010,
        [
            _env("SIMM_LISTEN", "[$(POD_IP)]:31010"),
            f"{_SC}.ports.rpc.containerPort=31010",
            "Service/simm-dataserver spec.ports.rpc.port=31010",
            "NetworkPolicy/simm-dataserver spec.ingress.0.ports.0.port=31010",
            "NetworkPolicy/simm-dataserver spec.ingress.0.ports.0.endPort=31073",
        ],
    ),
    "dataserver.httpPort": Change(
        31081,
        [
            _env("SIMM_HTTP", "[$(POD_IP)]:31081"),
            f"{_SC}.ports.http.containerPort=31081",
            "Service/simm-dataserver spec.ports.http.port=31081",
            "NetworkPolicy/simm-dataserver spec.ingress.0.ports.1.port=31081",
        ],
    ),
    "dataserver.rdma.enabled": Change(
        True,
        [
            _env("SIMM_RDMA", "auto"),
            f"{_S}.spec.hostNetwork=true",
            f'{_S}.spec.dnsPolicy="ClusterFirstWithHostNet"',
            f"{_SC}.resources.limits.rdma/hca_shared_devices_a=1",
            f"{_SC}.resources.requests.rdma/hca_shared_devices_a=1",
        ],
        _NODES,
    ),
    "dataserver.rdma.mode": Change("on", [_env("SIMM_RDMA", "on")], _RDMA),
    "dataserver.rdma.devices": Change(
        "mlx5_0", [_env("SIMM_RDMA_DEVICES", "mlx5_0"), f"{_SC}.env.SIMM_RDMA_DEVICES.name=*"], _RDMA
    ),
    "dataserver.rdma.resource": Change(
        "nic.example/rdma",
        [
            f"{_SC}.resources.limits.nic.example/rdma=1",
            f"{_SC}.resources.requests.nic.example/rdma=1",
        ],
        _RDMA,
    ),
    "dataserver.rdma.hostNetwork": Change(False, [f"-{_S}.spec.hostNetwork=true", f"-{_S}.spec.dnsPolicy=*"], _RDMA),
    "dataserver.settings": Change(
        {"policy": "sieve", "huge_pages": False, "slots": 2_000_000_000},
        [
            *[f"{_SC}.env.SIMM_{name}.name=*" for name in ("POLICY", "HUGE_PAGES", "SLOTS")],
            _env("SIMM_POLICY", "sieve"),
            _env("SIMM_HUGE_PAGES", "false"),
            _env("SIMM_SLOTS", "2000000000"),
        ],
    ),
    "dataserver.nodeSelector": Change({"pool": "gpu", "simm": None}, [f'{_S}.spec.nodeSelector.pool="gpu"']),
    "dataserver.tolerations": Change([{"operator": "Exists"}], [f'{_S}.spec.tolerations.0.operator="Exists"']),
    "dataserver.affinity": Change({"podAffinity": {}}, [f"{_S}.spec.affinity.podAffinity={{}}"]),
    "dataserver.priorityClassName": Change("high", [f'{_S}.spec.priorityClassName="high"']),
    "dataserver.podAnnotations": Change({"a": "b"}, [f'{_S}.metadata.annotations.a="b"']),
    "dataserver.podLabels": Change({"a": "b"}, [f'{_S}.metadata.labels.a="b"']),
    "events.enabled": Change(
        True,
        [
            f"{_EC}.*",
            "Service/simm-dataserver spec.ports.events*",
            *[f"NetworkPolicy/simm-dataserver spec.ingress.0.ports.{each}.*" for each in (2, 3)],
            "NetworkPolicy/simm-dataserver spec.ingress.1.ports.1.port=8091",
            "ServiceMonitor/simm-dataserver spec.endpoints.1.*",
        ],
        {"dataserver.settings": {"events": "4M"}, **_WATCHED},
    ),
    "events.port": Change(
        6000,
        [
            f'{_EC}.args.1="--rfc1527=tcp://[$(POD_IP)]:6000,tcp://[$(POD_IP)]:6001"',
            f"{_EC}.ports.events.containerPort=6000",
            f"{_EC}.ports.events-replay.containerPort=6001",
            "Service/simm-dataserver spec.ports.events.port=6000",
            "Service/simm-dataserver spec.ports.events-replay.port=6001",
            "NetworkPolicy/simm-dataserver spec.ingress.0.ports.2.port=6000",
            "NetworkPolicy/simm-dataserver spec.ingress.0.ports.2.endPort=6001",
        ],
        _EVENTS,
    ),
    "events.httpPort": Change(
        6000,
        [
            f'{_EC}.args.2="--http=[$(POD_IP)]:6000"',
            f"{_EC}.ports.events-http.containerPort=6000",
            "Service/simm-dataserver spec.ports.events-http.port=6000",
            "NetworkPolicy/simm-dataserver spec.ingress.0.ports.3.port=6000",
            "NetworkPolicy/simm-dataserver spec.ingress.1.ports.1.port=6000",
        ],
        _EVENTS,
    ),
    "events.memory": Change(
        "9Gi", [f'{_EC}.resources.{each}.memory="9Gi"' for each in ("requests", "limits")], _EVENTS
    ),
    "index.enabled": Change(
        True,
        [f"{kind}/simm-index *" for kind in ("ConfigMap", "Service", "Deployment", "NetworkPolicy")],
        {"index.existingSecret": "routers"},
    ),
    "index.existingSecret": Change(
        "askers",
        [
            f'{_I}.spec.volumes.token.secret.secretName="askers"',
            'ServiceMonitor/simm-index spec.endpoints.0.authorization.credentials.name="askers"',
        ],
        {**_INDEX, **_WATCHED},
    ),
    "index.key": Change(
        "askers",
        [
            f'{_I}.spec.volumes.token.secret.items.0.key="askers"',
            'ServiceMonitor/simm-index spec.endpoints.0.authorization.credentials.key="askers"',
        ],
        {**_INDEX, **_WATCHED},
    ),
    "index.port": Change(
        6000,
        [
            f'{_I}.spec.containers.index.args.2="[$(POD_IP)]:6000"',
            f"{_I}.spec.containers.index.ports.http.containerPort=6000",
            "Service/simm-index spec.ports.http.port=6000",
            "NetworkPolicy/simm-index spec.ingress.0.ports.0.port=6000",
        ],
        _INDEX,
    ),
    "index.publishers": Change(
        [_PUBLISHER], ["ConfigMap/simm-index data.publishers.json=*", f"{_I}.metadata.annotations.publishers=*"], _INDEX
    ),
    "index.memory": Change(
        "9Gi", [f'{_I}.spec.containers.index.resources.{each}.memory="9Gi"' for each in ("requests", "limits")], _INDEX
    ),
    "index.nodeSelector": Change({"pool": "cpu"}, [f'{_I}.spec.nodeSelector.pool="cpu"'], _INDEX),
    "index.tolerations": Change([{"operator": "Exists"}], [f'{_I}.spec.tolerations.0.operator="Exists"'], _INDEX),
    "index.priorityClassName": Change("high", [f'{_I}.spec.priorityClassName="high"'], _INDEX),
    "podDisruptionBudget.enabled": Change(False, ["-PodDisruptionBudget/simm-dataserver *"], _SET),
    "podDisruptionBudget.maxUnavailable": Change(
        2, ["PodDisruptionBudget/simm-dataserver spec.maxUnavailable=2"], _SET
    ),
    "networkPolicy.enabled": Change(False, ["-NetworkPolicy/simm-manager *", "-NetworkPolicy/simm-dataserver *"]),
    "networkPolicy.from": Change(
        [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        [
            f'NetworkPolicy/simm-{each} spec.ingress.0.from.1.ipBlock.cidr="10.0.0.0/8"'
            for each in ("manager", "dataserver")
        ],
    ),
    "networkPolicy.nodeCidrs": Change(
        ["10.0.0.0/16"],
        [
            "NetworkPolicy/simm-manager spec.ingress.1.ports.0.port=30001",
            "NetworkPolicy/simm-dataserver spec.ingress.1.ports.0.port=30010",
            "NetworkPolicy/simm-dataserver spec.ingress.1.ports.0.endPort=30073",
            *[
                f'NetworkPolicy/simm-{each} spec.ingress.1.from.0.ipBlock.cidr="10.0.0.0/16"'
                for each in ("manager", "dataserver")
            ],
        ],
    ),
    "networkPolicy.scrapeFrom": Change(
        [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
        [
            f"NetworkPolicy/simm-{each} spec.ingress.1.{line}"
            for each, port in (("manager", 30080), ("dataserver", 30081))
            for line in ('from.0.ipBlock.cidr="10.0.0.0/8"', f"ports.0.port={port}")
        ],
    ),
    "serviceMonitor.enabled": Change(
        True,
        [
            f"{line.replace('*', f'simm-{each}', 1)}"
            for each in ("manager", "dataserver")
            for line in ("ServiceMonitor/* *", "NetworkPolicy/* spec.ingress.1.*")
        ],
    ),
    "serviceMonitor.existingSecret": Change(
        "scraper",
        [
            'ServiceMonitor/* spec.endpoints.0.authorization.credentials.name="scraper"',
        ],
        _WATCHED,
    ),
    "serviceMonitor.key": Change(
        "bearer", ['ServiceMonitor/* spec.endpoints.0.authorization.credentials.key="bearer"'], _WATCHED
    ),
    "serviceMonitor.interval": Change("1m", ['ServiceMonitor/* spec.endpoints.0.interval="1m"'], _WATCHED),
    "serviceMonitor.labels": Change(
        {"team": "kv"},
        [f'ServiceMonitor/simm-{each} metadata.labels.team="kv"' for each in ("manager", "dataserver")],
        _WATCHED,
    ),
    "prometheusRule.enabled": Change(True, ["PrometheusRule/simm *"], _WATCHED),
    "prometheusRule.labels": Change(
        {"team": "kv"},
        ['PrometheusRule/simm metadata.labels.team="kv"'],
        {
            **_WATCHED,
            "prometheusRule.enabled": True,
        },
    ),
}
