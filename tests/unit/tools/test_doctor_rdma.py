"""The RDMA checks of ``simm doctor``; the commands that it gives for pyverbs are carried out."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import platform
import resource
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simm.cli import main
from simm.rdma.api import Absence
from simm.tools import doctor_rdma
from simm.tools.doctor_rdma import check_memlock, check_pyverbs, check_rails, check_rdma_access, check_rdma_devices
from simm.tools.findings import Finding

V4 = "0000:0000:0000:0000:0000:ffff:0a00:0001"
LINK = "fe80:0000:0000:0000:0202:c9ff:fe00:0001"
OWN = importlib.machinery.EXTENSION_SUFFIXES[0]
OTHER = ".cpython-35m-x86_64-linux-gnu.so"
DEBIAN = 'NAME="Debian"\nID=debian\n'


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + "\n")


def device(
    root: Path, name: str, gid: str = V4, kind: str = "RoCE v2", *, number: int = 0, state: str = "4: ACTIVE",
    link: str = "Ethernet",
) -> None:  # fmt: skip
    """A device with one port, its uverbs node in sysfs and in /dev."""
    place = f"sys/class/infiniband/{name}/ports/1"
    write(root, f"{place}/state", state)
    write(root, f"{place}/link_layer", link)
    write(root, f"{place}/rate", "100 Gb/sec (4X EDR)")
    if gid:
        write(root, f"{place}/gids/0", gid)
        write(root, f"{place}/gid_attrs/types/0", kind)
    write(root, f"sys/class/infiniband_verbs/uverbs{number}/ibdev", name)
    write(root, f"dev/infiniband/uverbs{number}", "")


def judged(finding: Finding, status: str, *words: str) -> None:
    assert finding.status == status, finding
    for word in words:
        assert word in finding.detail + finding.remedy, (word, finding)
    assert bool(finding.remedy) == (status != "ok"), finding
    assert "\n" not in finding.detail + finding.remedy


@pytest.fixture(autouse=True)
def no_restriction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SICL_NET_DEVICES", raising=False)


# --------------------------------------------------------------------------------------------- devices


def test_rdma_devices(tmp_path: Path) -> None:
    judged(check_rdma_devices(str(tmp_path)), "ok", "no RDMA device")
    write(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    judged(check_rdma_devices(str(tmp_path)), "warn", "mlx5_0:1 (its state is DOWN)", "simm topo")
    write(tmp_path, "sys/class/infiniband/mlx5_1/ports/1/state", "4: ACTIVE")
    judged(check_rdma_devices(str(tmp_path)), "warn", "mlx5_1:1 (it has no GID", "simm topo")
    device(tmp_path, "mlx5_1")
    judged(check_rdma_devices(str(tmp_path)), "ok", "usable ports: mlx5_1:1", "mlx5_0:1 (its state")


def test_a_kernel_with_soft_roce_is_told_how_to_try_it(tmp_path: Path) -> None:
    assert "rxe" not in check_rdma_devices(str(tmp_path)).detail
    write(
        tmp_path,
        f"lib/modules/{platform.release()}/modules.dep",
        "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko: kernel/drivers/infiniband/core/ib_core.ko",
    )
    judged(check_rdma_devices(str(tmp_path)), "ok", "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev")


def test_a_card_whose_rdma_module_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "sys/class/net/eth0/device").mkdir(parents=True)
    (tmp_path / "sys/class/net/eth0/device/driver").symlink_to("../../../bus/pci/drivers/mlx5_core")
    (tmp_path / "sys/class/net/lo").mkdir()
    judged(check_rdma_devices(str(tmp_path)), "warn", "eth0 (wants mlx5_ib)", "modprobe mlx5_ib")
    (tmp_path / "sys/module/mlx5_ib").mkdir(parents=True)
    judged(check_rdma_devices(str(tmp_path)), "ok", "by TCP")


def test_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(check_rdma_access(str(tmp_path)), "ok", "no RDMA device")
    device(tmp_path, "mlx5_0")
    device(tmp_path, "mlx5_1", number=1)
    judged(check_rdma_access(str(tmp_path)), "ok", "mlx5_0, mlx5_1 can be opened")
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("uverbs1"))
    found = check_rdma_access(str(tmp_path))
    judged(found, "warn", "mlx5_1: uid", "/dev/infiniband/uverbs1", "udev")
    assert "mlx5_0" not in found.detail
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    judged(check_rdma_access(str(tmp_path)), "warn", "mlx5_0: /dev/infiniband/uverbs0 is not there", "--device")
    (tmp_path / "sys/class/infiniband_verbs/uverbs0/ibdev").unlink()
    judged(check_rdma_access(str(tmp_path)), "warn", "mlx5_0: no user-space access", "modprobe ib_uverbs")


# ---------------------------------------------------------------------------------------------- rails


def test_rails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(check_rails(str(tmp_path)), "ok", "no rails")
    device(tmp_path, "mlx5_0")
    device(tmp_path, "mlx5_1", state="1: DOWN")
    judged(check_rails(str(tmp_path)), "ok", "node 0: mlx5_0:1")
    monkeypatch.setenv("SICL_NET_DEVICES", "mlx5_1")
    judged(check_rails(str(tmp_path)), "warn", "node 0: none, TCP", "name another port in SICL_NET_DEVICES")
    monkeypatch.setenv("SICL_NET_DEVICES", "mlx5_7")
    judged(check_rails(str(tmp_path)), "warn", "ports here: mlx5_0:1, mlx5_1:1", "unset SICL_NET_DEVICES")
    monkeypatch.setenv("SICL_NET_DEVICES", "mlx5_0")
    judged(check_rails(str(tmp_path)), "ok", "restricted by SICL_NET_DEVICES")


def test_issue_devices_that_the_settings_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A data server takes its devices from there; doctor and topo asked the environment alone."""
    device(tmp_path, "mlx5_0")
    device(tmp_path, "mlx5_1")
    file = tmp_path / "simm.json"
    file.write_text('{"dataserver": {"rdma_devices": "mlx5_1"}, "client": {"rdma_devices": "mlx5_0"}}')
    monkeypatch.setenv("SIMM_CONFIG", str(file))
    monkeypatch.setenv("SICL_NET_DEVICES", "mlx5_0")
    judged(check_rails(str(tmp_path)), "ok", "node 0: mlx5_1:1 (restricted by file", "[dataserver])")
    assert main(["topo"]) == 2 and "'mlx5_1'" in capsys.readouterr().err, "there is none of that name here"
    monkeypatch.setenv("SIMM_RDMA_DEVICES", "mlx5_7")
    judged(check_rails(str(tmp_path)), "warn", "mlx5_7 of SIMM_RDMA_DEVICES", "correct or unset SIMM_RDMA_DEVICES")
    monkeypatch.setenv("SIMM_RDMA_DEVICES", "mlx5_0")
    file.write_text("{")  # as the check of settings says
    judged(check_rails(str(tmp_path)), "ok", "restricted by SIMM_RDMA_DEVICES")


@pytest.mark.parametrize(
    ("gid", "kind", "status", "word"),
    [(LINK, "RoCE v2", "warn", "link-local"), (V4, "IB/RoCE v1", "warn", "RoCE v1"), (V4, "RoCE v2", "ok", "mlx5_0:1")],
)
def test_rails_that_only_the_segment_reaches(tmp_path: Path, gid: str, kind: str, status: str, word: str) -> None:
    device(tmp_path, "mlx5_0", gid, kind)
    judged(check_rails(str(tmp_path)), status, word)


def test_infiniband_is_not_taken_for_link_local_but_does_not_mix(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0", LINK, link="InfiniBand")
    judged(check_rails(str(tmp_path)), "ok", "mlx5_0:1")
    device(tmp_path, "mlx5_1", number=1)
    judged(check_rails(str(tmp_path)), "warn", "cannot reach each other", "--rdma-devices")


def test_no_usable_port(tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0", gid="")
    judged(check_rails(str(tmp_path)), "warn", "none, TCP", "rdma-devices", "simm topo")


# --------------------------------------------------------------------------------------- pinned memory


def limit(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))


def test_memlock_matters_with_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 65536)
    judged(check_memlock(str(tmp_path)), "ok", "65,536")
    device(tmp_path, "mlx5_0")
    judged(check_memlock(str(tmp_path)), "warn", "65,536", "ulimit -l unlimited", "LimitMEMLOCK=infinity")
    limit(monkeypatch, resource.RLIM_INFINITY)
    judged(check_memlock(str(tmp_path)), "ok", "unlimited")


def test_memlock_is_enough_for_all_of_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(tmp_path, "mlx5_0")
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=1 << 18, f_frsize=4096))
    limit(monkeypatch, 1 << 30)
    judged(check_memlock(str(tmp_path)), "ok", "more than /dev/shm holds")
    limit(monkeypatch, (1 << 30) - 1)
    judged(check_memlock(str(tmp_path)), "warn", "IPC_LOCK for a container that runs as root")


@pytest.mark.parametrize(("mask", "status"), [("0000000000004000", "ok"), ("00000000a80425fb", "warn")])
def test_the_capability_lifts_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: str, status: str
) -> None:
    device(tmp_path, "mlx5_0")
    limit(monkeypatch, 65536)
    write(tmp_path, "proc/self/status", f"Name:\tpython\nCapPrm:\tffffffffffffffff\nCapEff:\t{mask}")
    judged(check_memlock(str(tmp_path)), status)


# --------------------------------------------------------------------------------------------- pyverbs


def package(root: Path, ending: str, folder: str = "usr/lib/python3/dist-packages") -> Path:
    """A package that has pyverbs' looks: a folder of extension modules with an __init__."""
    place = root / folder / "pyverbs"
    write(place, "__init__.py", "WHERE = __file__")
    write(place, f"device{ending}", "")
    write(place.parent, "numpy/__init__.py", "raise ImportError('the distribution\\'s numpy')")
    return place


def found_at(place: Path | None) -> Any:
    if place is None:
        return lambda name: None
    return lambda name: SimpleNamespace(submodule_search_locations=[str(place)])


def test_pyverbs_where_there_is_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", found_at(None))
    judged(check_pyverbs(str(tmp_path)), "ok", "not installed")
    monkeypatch.setattr(importlib.util, "find_spec", found_at(package(tmp_path, OWN)))
    judged(check_pyverbs(str(tmp_path)), "ok", "no RDMA device")


def test_pyverbs_that_is_there_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(tmp_path, "mlx5_0")
    monkeypatch.setattr(importlib.util, "find_spec", found_at(package(tmp_path, OWN)))
    monkeypatch.setattr(doctor_rdma, "_loaded", lambda: None)
    judged(check_pyverbs(str(tmp_path)), "ok", "is installed")
    monkeypatch.setattr(doctor_rdma, "_loaded", lambda: Absence("pyverbs does not load", "mend it"))
    judged(check_pyverbs(str(tmp_path)), "warn", "does not load", "mend it")


def test_pyverbs_of_another_python_is_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(tmp_path, "mlx5_0")
    monkeypatch.setattr(importlib.util, "find_spec", found_at(package(tmp_path, OTHER)))
    judged(check_pyverbs(str(tmp_path)), "warn", "of no use to Python", ".cpython-35m-", "/usr/bin/python3 -m venv")


@pytest.mark.parametrize(
    ("release", "command"),
    [
        (DEBIAN, "apt-get install python3-pyverbs"),
        ('ID=pop\nID_LIKE="ubuntu debian"\n', "apt-get install python3-pyverbs"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "dnf install python3-pyverbs"),
        ("ID=opensuse-leap\nID_LIKE='suse opensuse'\n".replace("'", '"'), "zypper install python3-pyverbs"),
        ("ID=arch\n", "your distribution's pyverbs"),
    ],
)
def test_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, command: str) -> None:
    device(tmp_path, "mlx5_0")
    write(tmp_path, "etc/os-release", release)
    monkeypatch.setattr(importlib.util, "find_spec", found_at(None))
    judged(check_pyverbs(str(tmp_path)), "warn", "mlx5_0 cannot be used", command)


def test_the_systems_python_needs_the_package_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "etc/os-release", DEBIAN)
    monkeypatch.setattr(sys, "prefix", "/usr")
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    why, remedy = doctor_rdma.pyverbs_advice(str(tmp_path))
    assert "for the system's Python" in why and remedy == "apt-get install python3-pyverbs"


def test_before_the_package_is_there_its_python_is_known_by_the_link(tmp_path: Path) -> None:
    write(tmp_path, "etc/os-release", DEBIAN)
    (tmp_path / "usr/bin").mkdir(parents=True)
    link = tmp_path / "usr/bin/python3"
    link.symlink_to("python3.5")
    why, remedy = doctor_rdma.pyverbs_advice(str(tmp_path))
    assert "alone" in why and "3.5" in why and "/usr/bin/python3 -m venv" in remedy and "apt-get" in remedy
    link.unlink()
    link.symlink_to(f"python3.{sys.version_info[1]}")
    why, remedy = doctor_rdma.pyverbs_advice(str(tmp_path))
    assert why == "pyverbs is not installed" and remedy.startswith("apt-get install python3-pyverbs && mkdir -p")


def test_another_python_is_told_to_use_the_systems(tmp_path: Path) -> None:
    package(tmp_path, OTHER, "usr/lib64/python3.5/site-packages")
    why, remedy = doctor_rdma.pyverbs_advice(str(tmp_path))
    assert f"this is Python 3.{sys.version_info[1]}" in why and "/usr/bin/python3 -m venv" in remedy
    assert "install python3-pyverbs" not in remedy  # it is there


# ------------------------------------------------------------------------------- the commands themselves


def environment(folder: Path) -> Path:
    """A virtual environment of the Python that runs the tests; its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def ask(python: Path, code: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, env=clean)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PLATLIB = "import sysconfig; print(sysconfig.get_path('platlib'))"


def test_the_commands_give_an_environment_that_package_and_no_other(tmp_path: Path) -> None:
    """What the remedy says, carried out by a shell; twice, as people do. A folder with a space in its name."""
    place = package(tmp_path / "root", OWN)
    python = environment(tmp_path / "an environment")
    assert ask(python, "import importlib.util as u; print(u.find_spec('pyverbs'), u.find_spec('numpy'))") == "None None"
    commands = doctor_rdma.link_commands(place, str(tmp_path / "an environment"), ask(python, PLATLIB))
    for _ in range(2):
        subprocess.run(commands, shell=True, check=True, timeout=60)
    seen = "import pyverbs, importlib.util as u; print(pyverbs.WHERE, u.find_spec('numpy'))"
    where, numpy = ask(python, seen).rsplit(" ", 1)
    assert numpy == "None"
    assert os.path.realpath(where) == os.path.realpath(place / "__init__.py")


def test_the_systems_package_loads_in_an_environment_by_these_commands(tmp_path: Path) -> None:
    """The real one: its extension modules, not only its name."""
    place = doctor_rdma.system_package()
    if place is None or not doctor_rdma.fits(place):
        pytest.skip(f"the system's pyverbs is for Python {doctor_rdma.system_version() or '(none)'}")
    python = environment(tmp_path / "environment")
    commands = doctor_rdma.link_commands(place, str(tmp_path / "environment"), ask(python, PLATLIB))
    subprocess.run(commands, shell=True, check=True, timeout=60)
    assert ask(python, "from pyverbs.device import get_device_list; print(type(get_device_list).__name__)")
    assert doctor_rdma.system_version() == f"3.{sys.version_info[1]}"
