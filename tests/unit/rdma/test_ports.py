"""simm.rdma.ports on fake trees of real machines' shapes, and ``simm topo`` on top of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simm import verbs
from simm.errors import ConfigError
from simm.host import numa
from simm.rdma import ports as rdma_ports
from simm.rdma import registration
from simm.rdma.api import Absence, Limits
from simm.tools import topo

V4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
GLOBAL = "2001:0db8:0000:0000:0000:0000:0000:0001"
LINK = "fe80:0000:0000:0000:0202:c9ff:fe00:0001"
IB = "fe80:0000:0000:0000:0002:c903:0000:0001"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
V1, V2 = "IB/RoCE v1", "RoCE v2"


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n")


def device(
    root: Path, name: str, gids: list[tuple[str, str]], *, state: str = "4: ACTIVE", link: str = "Ethernet",
    rate: str = "100 Gb/sec (4X EDR)", numa: int | None = None, parent: str = "", port: int = 1,
) -> None:  # fmt: skip
    base = f"sys/class/infiniband/{name}"
    place = f"{base}/ports/{port}"
    write(root, f"{place}/state", state)
    write(root, f"{place}/link_layer", link)
    write(root, f"{place}/rate", rate)
    for index, (gid, kind) in enumerate(gids):
        write(root, f"{place}/gids/{index}", gid)
        if kind:
            write(root, f"{place}/gid_attrs/types/{index}", kind)
    if numa is not None:
        write(root, f"{base}/device/numa_node", str(numa))
    if parent:
        write(root, f"{base}/parent", parent)


def two_nodes(root: Path) -> None:
    write(root, "sys/devices/system/node/online", "0-1")
    for node in (0, 1):
        write(root, f"sys/devices/system/node/node{node}/cpulist", f"{node * 4}-{node * 4 + 3}")
        write(root, f"sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal: 1048576 kB")
    write(root, "proc/meminfo", "MemTotal: 2097152 kB")


def test_a_host_without_rdma(tmp_path: Path) -> None:
    assert rdma_ports.ports(str(tmp_path)) == [] and rdma_ports.choose(0, []) == []
    with pytest.raises(ConfigError, match=r"no RDMA device 'mlx5_0'.*ports here: none"):
        rdma_ports.parse_devices("mlx5_0", [])


@pytest.mark.parametrize(
    ("gids", "chosen"),
    [
        ([(LINK, V1), (LINK, V2), (V4, V1), (V4, V2)], 3),
        ([(LINK, V1), (LINK, V2), (GLOBAL, V1), (GLOBAL, V2), (V4, V1)], 3),
        ([(LINK, V1), (LINK, V2), (V4, V1)], 2),
        ([(LINK, V1), (GLOBAL, V1)], 1),
        ([(LINK, V1), (LINK, V2)], 1),
        ([(LINK, V1)], 0),
        ([(V4, V2), (V4, V2)], 0),
        ([(ZERO, V2), (V4, V2)], 1),
        ([("garbage", V2), (V4, V2)], 1),
        ([(V4, "RoCE v7"), (LINK, V2)], 1),
        ([(V4, "")], None),
        ([(ZERO, V2)], None),
        ([], None),
    ],
)
def test_choice_of_gid(tmp_path: Path, gids: list[tuple[str, str]], chosen: int | None) -> None:
    device(tmp_path, "mlx5_0", gids, numa=0)
    (port,) = rdma_ports.ports(str(tmp_path))
    assert (port.gid.index if port.gid is not None else None) == chosen
    assert bool(port.trouble) == (chosen is None)


def test_gid_choice_does_not_depend_on_the_tables_order() -> None:
    kinds = [rdma_ports.Gid(at, gid, kind) for at, (gid, kind) in enumerate([
        (V4, V2), (GLOBAL, V2), (V4, "RoCE v1"), (GLOBAL, "RoCE v1"), (LINK, V2), (LINK, "RoCE v1"),
    ])]  # fmt: skip
    for first, better in enumerate(kinds):
        for worse in kinds[first + 1 :]:
            for gids in ((better, worse), (worse, better)):
                assert rdma_ports.Port("d", 1, "ACTIVE", "Ethernet", 100.0, 0, gids).gid == better


def test_infiniband_uses_its_own_gid(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0", [(IB, ""), ("fe80:0000:0000:0000:0000:0000:0000:0000", "")], link="InfiniBand", numa=0)
    (port,) = rdma_ports.ports(str(tmp_path))
    assert [gid.kind for gid in port.gids] == ["IB"] and port.gid is not None and port.gid.index == 0
    (verdict,) = rdma_ports.choose(0, [port])
    assert verdict.used and "link-local" not in verdict.why


def test_software_devices_take_their_network_devices_node(tmp_path: Path) -> None:
    write(tmp_path, "sys/class/net/eth0/device/numa_node", "1")
    device(tmp_path, "rxe0", [(V4, V2)], parent="eth0")
    device(tmp_path, "rxe1", [(V4, V2)], parent="veth0")
    device(tmp_path, "rxe2", [(V4, V2)], numa=-1)
    device(tmp_path, "rxe3", [(V4, V2)], parent="../../etc")
    write(tmp_path, "sys/devices/pci0/virtio0/vendor", "0x1af4")
    write(tmp_path, "sys/devices/pci0/numa_node", "1")
    (tmp_path / "sys/class/net/eth1").mkdir()
    (tmp_path / "sys/class/net/eth1/device").symlink_to(tmp_path / "sys/devices/pci0/virtio0")
    device(tmp_path, "rxe4", [(V4, V2)], parent="eth1")
    assert [port.numa for port in rdma_ports.ports(str(tmp_path))] == [1, -1, -1, -1, 1]


def test_rails_of_a_node(tmp_path: Path) -> None:
    root = str(tmp_path)
    device(tmp_path, "mlx5_0", [(V4, V2)], numa=0)
    device(tmp_path, "mlx5_1", [(V4, V2)], numa=0)
    device(tmp_path, "mlx5_2", [(V4, V2)], numa=1)
    device(tmp_path, "mlx5_3", [(V4, V2)], numa=0, state="1: DOWN")
    device(tmp_path, "mlx5_4", [(V4, V2)], numa=0, rate="10 Gb/sec (1X QDR)")
    known = rdma_ports.ports(root)

    def used(node: int, named: str = "") -> list[str]:
        chosen = rdma_ports.parse_devices(named, known) if named else None
        return [verdict.port.name for verdict in rdma_ports.choose(node, known, named=chosen) if verdict.used]

    assert used(0) == ["mlx5_0:1", "mlx5_1:1"]
    assert used(1) == ["mlx5_2:1"]
    assert used(2) == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1"]  # none of its own: everyone's, but the slow one
    assert used(0, "mlx5_4") == ["mlx5_4:1"]  # slow, and named
    assert used(0, "mlx5_2:1") == ["mlx5_2:1"]  # far, and named
    assert used(0, "mlx5_3") == []  # down is down
    assert used(-1) == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1"]
    assert next(verdict.why for verdict in rdma_ports.choose(-1, known)).startswith("of all nodes, RoCE v2 GID 0")
    why = {verdict.port.device: verdict.why for verdict in rdma_ports.choose(0, known)}
    assert "on node 0" in why["mlx5_0"] and "10.0.0.1" in why["mlx5_0"]
    assert why["mlx5_2"] == "on node 1" and "DOWN" in why["mlx5_3"] and "10 Gbit/s beside 100" in why["mlx5_4"]


def test_rails_near_to_no_node_come_before_those_of_others(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0", [(V4, V2)], numa=1)
    device(tmp_path, "rxe0", [(V4, V2)], rate="2.5 Gb/sec (1X SDR)")
    known = rdma_ports.ports(str(tmp_path))
    assert [verdict.port.device for verdict in rdma_ports.choose(0, known) if verdict.used] == ["rxe0"]
    assert [verdict.port.device for verdict in rdma_ports.choose(1, known) if verdict.used] == ["mlx5_0"]
    why = {verdict.port.device: verdict.why for verdict in rdma_ports.choose(-1, known)}
    assert why["mlx5_0"] == "on node 1" and why["rxe0"].startswith("near to no node in particular, ")


def test_devices_by_name(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0", [(V4, V2)])
    device(tmp_path, "mlx5_0", [(V4, V2)], port=2)
    device(tmp_path, "mlx5_1", [(V4, V2)])
    known = rdma_ports.ports(str(tmp_path))

    def names(spec: str) -> list[str]:
        return [port.name for port in rdma_ports.parse_devices(spec, known)]

    assert names("mlx5_0") == ["mlx5_0:1", "mlx5_0:2"]
    assert names(" mlx5_1 , mlx5_0:2,mlx5_1") == ["mlx5_1:1", "mlx5_0:2"]
    for wrong in ("mlx5_7", "mlx5_0:3", "mlx5_0,mlx4_0"):
        with pytest.raises(ConfigError, match="ports here: mlx5_0:1, mlx5_0:2, mlx5_1:1"):
            names(wrong)
    with pytest.raises(ConfigError, match="names no RDMA device"):
        names(" , ")


def test_the_option_goes_before_the_engines_variable() -> None:
    assert rdma_ports.restriction("a", {"SICL_NET_DEVICES": "b"}) == ("a", "--rdma-devices")
    assert rdma_ports.restriction(None, {"SICL_NET_DEVICES": "b"}) == ("b", "SICL_NET_DEVICES")
    both = {"SICL_NET_DEVICES": "b", "SIMM_RDMA_DEVICES": "c"}
    assert rdma_ports.restriction(None, both) == ("c", "SIMM_RDMA_DEVICES")
    assert rdma_ports.restriction("", {"SICL_NET_DEVICES": " ", "SIMM_RDMA_DEVICES": ""}) == ("", "")


def test_topo_shows_the_choice_and_the_reason(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    device(tmp_path, "mlx5_0", [(V4, V2)], numa=0)
    device(tmp_path, "mlx5_1", [], numa=1)
    found = topo.collect(None, str(tmp_path))
    assert json.loads(json.dumps(found)) == found
    text = topo.table(found, "SICL_NET_DEVICES")
    assert "node 0: CPUs 0-3, 1G of memory" in text and "restricted by SICL_NET_DEVICES" in text
    assert "a worker on node 0 uses mlx5_0:1\n  + mlx5_0:1: on node 0, RoCE v2 GID 0 10.0.0.1" in text
    assert "a worker on node 1 uses mlx5_0:1" in text and "- mlx5_1:1: it has no GID" in text


def test_topo_tells_what_a_client_would_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_nodes(tmp_path)
    device(tmp_path, "mlx5_0", [(V4, V2)], numa=0)
    device(tmp_path, "mlx5_1", [(V4, V2)], numa=1)
    for cpus, node, ports in (({4, 5}, 1, ["mlx5_1:1"]), ({3, 4}, -1, ["mlx5_0:1", "mlx5_1:1"])):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cpus=cpus: cpus)
        found = topo.collect(None, str(tmp_path))
        assert (found["client"]["node"], found["client"]["rails"]) == (node, ports)
    assert (
        topo.table(found).splitlines()[-1] == "a client started here (bound to no single node) uses mlx5_0:1, mlx5_1:1"
    )


@pytest.mark.parametrize("cards", [(0, 1), (0, 0), (0, -1)])
@pytest.mark.parametrize("cpus", [{0}, {4, 5}, {3, 4}])
def test_issue_a_client_uses_the_rails_that_topo_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: set[int], cards: tuple[int, int]
) -> None:
    """Those of the node that it is bound to, as far as that has any."""
    two_nodes(tmp_path)
    for number, node in enumerate(cards):
        device(tmp_path, f"mlx5_{number}", [(V4, V2)], numa=node)
    root, nodes = str(tmp_path), numa.nodes
    monkeypatch.setattr(numa, "nodes", lambda _root="/": nodes(root))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)
    opened: list[str] = []

    def open_fabric(devices: str | None = None, *, numa: int = -1) -> Absence:
        found = rdma_ports.usable(devices, numa, {}, root)
        assert not isinstance(found, Absence)
        opened.extend(port.name for port in found[0])
        return Absence("not here", "elsewhere")

    monkeypatch.setattr(verbs, "open_fabric", open_fabric)
    assert isinstance(registration._open(""), Absence)
    assert opened == topo.collect(None, root)["client"]["rails"]
    if cards == (0, 1):
        assert opened == {0: ["mlx5_0:1"], 1: ["mlx5_1:1"], -1: ["mlx5_0:1", "mlx5_1:1"]}[numa.own_node()]
    assert opened, "without a card of its own a node uses another one's"


def test_topo_shows_every_gid_and_marks_the_one_in_use(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    device(tmp_path, "mlx5_0", [(LINK, V1), (LINK, V2), (V4, V1), (V4, V2)], numa=0)
    write(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/3", "eth0")
    device(tmp_path, "mlx5_1", [], numa=0)
    found = topo.collect(None, str(tmp_path))
    port = found["ports"][0]
    assert [gid["index"] for gid in port["gids"]] == [0, 1, 2, 3] and port["gid"]["index"] == 3
    lines = topo.table(found, gids=True).splitlines()
    at = lines.index("GIDs of mlx5_0:1")
    assert lines[at + 1 : at + 5] == [
        "    0: fe80::202:c9ff:fe00:1 (RoCE v1)",
        "    1: fe80::202:c9ff:fe00:1 (RoCE v2)",
        "    2: 10.0.0.1 (RoCE v1)",
        "  + 3: 10.0.0.1 (RoCE v2) eth0",
    ]
    assert lines[lines.index("GIDs of mlx5_1:1") + 1] == "    none"


def test_topo_shows_what_the_devices_say_of_themselves(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    device(tmp_path, "mlx5_0", [(V4, V2)], numa=0)
    device(tmp_path, "mlx5_1", [], numa=0)
    found = topo.collect(None, str(tmp_path), {"mlx5_0:1": Limits(1 << 36, 4096, 16, 1024)})
    assert (found["ports"][0]["max_mr_bytes"], found["ports"][0]["memory_windows"]) == (1 << 36, 4096)
    rows = [line.split() for line in topo.table(found).splitlines() if line.startswith("mlx5_")]
    assert rows[0][4:7] == ["0", "64G", "4096"] and rows[1][4:7] == ["0", "?", "?"]
    found = topo.collect(None, str(tmp_path), Absence("no pyverbs", "install it"))
    assert json.loads(json.dumps(found))["verbs"] == "no pyverbs: install it"
    assert "were not asked for their limits: no pyverbs: install it" in topo.table(found)


def test_topo_asks_every_usable_port_and_closes_what_it_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(tmp_path, "mlx5_0", [(V4, V2)], numa=0)
    device(tmp_path, "mlx5_1", [(V4, V2)], numa=1)
    device(tmp_path, "mlx5_2", [(V4, V2)], state="1: DOWN")
    limits, closed = Limits(1 << 40, 16, 16, 256), []

    def open_fabric(name: str) -> Any:
        if name in broken:
            return Absence(f"{name} does not open")
        return SimpleNamespace(rails=[SimpleNamespace(name=name, limits=limits)], close=lambda: closed.append(name))

    monkeypatch.setattr(verbs, "open_fabric", open_fabric)
    known = rdma_ports.ports(str(tmp_path))
    broken: set[str] = set()
    assert topo.ask_devices(known) == {"mlx5_0:1": limits, "mlx5_1:1": limits} and closed == ["mlx5_0:1", "mlx5_1:1"]
    broken = {"mlx5_1:1"}
    assert topo.ask_devices(known) == {"mlx5_0:1": limits}
    broken = {"mlx5_0:1", "mlx5_1:1"}
    assert topo.ask_devices(known) == Absence("mlx5_1:1 does not open")
    assert topo.ask_devices([]) is None


def test_topo_without_rdma(tmp_path: Path) -> None:
    two_nodes(tmp_path)
    assert "no RDMA device: other hosts are reached by TCP" in topo.table(topo.collect(None, str(tmp_path)))
