"""Checks of ``simm doctor`` on RDMA: devices, access to them, pyverbs, pinned memory, rails.

On a host without an RDMA device all of them pass: SiMM reaches other hosts by TCP, and nothing has to be installed.
With a device, each check names what keeps SiMM from using it, and the commands that change it.

How an interpreter gets pyverbs
-------------------------------
pyverbs is part of rdma-core. The distribution builds it for its own Python, as extension modules whose file names carry
that Python's version (``device.cpython-311-x86_64-linux-gnu.so``). The package of that name on PyPI must be built
against the installed rdma-core, and often cannot. So every Python of the same version should use the distribution's
package. Its modules load in ``/usr`` and in a virtual environment alike, but a virtual environment does not search
there. Access to all of the distribution's packages would mix two sets of them (numpy above all). A folder with one
link, named in a ``.pth`` file, adds pyverbs alone.

A Python of another version cannot load these modules. The environment must then be made with the system's Python.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import platform
import re
import resource
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..errors import ConfigError
from ..host import numa
from ..rdma import ports
from ..rdma.api import Absence
from .findings import Verdict, check, entries, gib, limit, ok, text, warn
from .topo import restriction

#: Drivers of network devices -> the module that adds RDMA to them.
_RDMA_PARTS: Final = {
    "mlx4_core": "mlx4_ib", "mlx4_en": "mlx4_ib", "mlx5_core": "mlx5_ib", "bnxt_en": "bnxt_re", "ice": "irdma",
    "idpf": "irdma", "qede": "qedr", "hns3": "hns_roce_hw_v2", "mana": "mana_ib",
}  # fmt: skip
_CAP_IPC_LOCK: Final = 14
#: Where distributions keep Python packages, below the root.
_SYSTEM_FOLDERS: Final = ("usr/lib/python3/dist-packages", "usr/lib64/python3.*/site-packages",
                          "usr/lib/python3.*/site-packages")  # fmt: skip
#: Name of the folder in a virtual environment that holds the link, and of the .pth file.
LINK_FOLDER: Final = "simm-pyverbs"


def _devices(sys_root: str) -> list[str]:
    return entries(sys_root, "sys/class/infiniband")


# --------------------------------------------------------------------------------------------- devices


def _missing_modules(sys_root: str) -> dict[str, str]:
    """Return network devices that could do RDMA if a module were loaded: name -> module."""
    found = {}
    for device in entries(sys_root, "sys/class/net"):
        try:
            driver = os.path.basename(os.readlink(Path(sys_root, "sys/class/net", device, "device/driver")))
        except OSError:
            continue
        module = _RDMA_PARTS.get(driver)
        if module is not None and not Path(sys_root, "sys/module", module).is_dir():
            found[device] = module
    return found


def _has_module(sys_root: str, module: str) -> bool:
    listed = text(sys_root, f"lib/modules/{platform.release()}/modules.dep") or ""
    return Path(sys_root, "sys/module", module).is_dir() or f"/{module}.ko" in listed


@check("rdma-devices")
def check_rdma_devices(sys_root: str) -> Verdict:
    """List RDMA devices and the state of their ports."""
    known = ports.ports(sys_root)
    if not known:
        missing = _missing_modules(sys_root)
        if missing:
            seen = ", ".join(f"{device} (wants {module})" for device, module in missing.items())
            return warn(
                f"no RDMA device, but network devices that can be one: {seen}; other hosts are reached by TCP",
                f"modprobe {' '.join(sorted(set(missing.values())))} (and install rdma-core, which loads it at boot)",
            )
        detail = "no RDMA device; other hosts are reached by TCP"
        if _has_module(sys_root, "rdma_rxe"):
            detail += "; to try RDMA without hardware: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev DEV"
        return ok(detail)
    usable = [port.name for port in known if not port.trouble]
    others = [f"{port.name} ({port.trouble})" for port in known if port.trouble]
    detail = f"usable ports: {', '.join(usable) or 'none'}; others: {', '.join(others) or 'none'}"
    if usable:
        return ok(detail)
    return warn(
        detail,
        "bring a port up (ip link set DEV up, an address, cable, subnet manager for InfiniBand); then see: simm topo",
    )


@check("rdma-access")
def check_rdma_access(sys_root: str) -> Verdict:
    """Check that this user may open the devices, /dev/infiniband/uverbs*."""
    devices = _devices(sys_root)
    if not devices:
        return ok("no RDMA device to open")
    nodes = {
        (text(sys_root, f"sys/class/infiniband_verbs/{node}/ibdev") or ""): node
        for node in entries(sys_root, "sys/class/infiniband_verbs")
        if node.startswith("uverbs")
    }
    bare = [device for device in devices if device not in nodes]
    if bare:
        return warn(f"{', '.join(bare)}: no user-space access, the kernel's ib_uverbs is not loaded",
            "modprobe ib_uverbs (rdma-core loads it at boot)",
        )  # fmt: skip
    absent = [device for device in devices if not Path(sys_root, "dev/infiniband", nodes[device]).exists()]
    if absent:
        return warn(
            f"{', '.join(absent)}: /dev/infiniband/{nodes[absent[0]]} is not there: a container without the device?",
            "docker: --device=/dev/infiniband; kubernetes: a resource of an RDMA device plugin "
            "(deploy/kubernetes); on a host: udevadm trigger",
        )
    closed = [
        device
        for device in devices
        if not os.access(Path(sys_root, "dev/infiniband", nodes[device]), os.R_OK | os.W_OK)
    ]
    if closed:
        return warn(
            f"{', '.join(closed)}: uid {os.geteuid()} may not open /dev/infiniband/{nodes[closed[0]]}",
            "install rdma-core, whose udev rules give everyone access; or chmod 666 /dev/infiniband/uverbs*",
        )
    return ok(f"{', '.join(devices)} can be opened")


# --------------------------------------------------------------------------------------------- pyverbs


def _package_command(sys_root: str) -> str:
    """Return the command that installs pyverbs on this distribution."""
    family = ""
    for line in (text(sys_root, "etc/os-release") or "").splitlines():
        key, _, value = line.partition("=")
        if key in ("ID", "ID_LIKE"):
            family += f" {value.strip(chr(34))} "
    if re.search(r"\b(debian|ubuntu)\b", family):
        return "apt-get install python3-pyverbs"
    if re.search(r"\b(fedora|rhel|centos)\b", family):
        return "dnf install python3-pyverbs"
    if re.search(r"\b(suse|opensuse)\b", family):
        return "zypper install python3-pyverbs"
    return "install your distribution's pyverbs (python3-pyverbs on Debian, Ubuntu, Fedora; part of rdma-core)"


def system_package(sys_root: str = "/") -> Path | None:
    """Return the folder of the distribution's pyverbs, None without one."""
    for pattern in _SYSTEM_FOLDERS:
        for folder in sorted(Path(sys_root).glob(pattern), reverse=True):
            if (folder / "pyverbs" / "__init__.py").is_file():
                return folder / "pyverbs"
    return None


def built_for(package: Path) -> list[str]:
    """Return the file-name suffixes of a package's extension modules, such as ``.cpython-311-x86_64-linux-gnu.so``."""
    return sorted({entry.name[entry.name.index(".") :] for entry in package.glob("*.so")})


def fits(package: Path) -> bool:
    """Return whether this Python can load a package's extension modules."""
    return bool(set(built_for(package)) & set(importlib.machinery.EXTENSION_SUFFIXES))


def system_version(sys_root: str = "/") -> str:
    """Return the version of the Python that pyverbs is built for, such as ``3.11``; empty if unknown."""
    package = system_package(sys_root)
    for ending in built_for(package) if package is not None else []:
        found = re.match(r"\.cpython-3(\d+)", ending)
        if found:
            return f"3.{found.group(1)}"
    try:
        target = os.readlink(Path(sys_root, "usr/bin/python3"))
    except OSError:
        return ""
    found = re.search(r"python(3\.\d+)$", target)
    return found.group(1) if found else ""


def link_commands(package: Path, prefix: str = sys.prefix, site_packages: str | None = None) -> str:
    """Return shell commands that make ``package``, and nothing else of its folder, visible to the environment."""
    folder = f"{prefix}/lib/{LINK_FOLDER}"
    into = site_packages or sysconfig.get_path("platlib")
    quoted = shlex.quote
    return (
        f"mkdir -p {quoted(folder)} && ln -sfn {quoted(str(package))} {quoted(folder + '/pyverbs')} && "
        f"echo {quoted(folder)} > {quoted(f'{into}/{LINK_FOLDER}.pth')}"
    )


def _is_system_python() -> bool:
    return sys.prefix == sys.base_prefix == "/usr"


def pyverbs_advice(sys_root: str = "/") -> tuple[str, str]:
    """Return why this Python has no pyverbs, and the commands that add it."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    install = _package_command(sys_root)
    package = system_package(sys_root)
    theirs = system_version(sys_root)
    if not fits(package) if package is not None else theirs not in ("", own):
        return (
            f"this is Python {own}, and the system's pyverbs is built for Python {theirs or 'another one'} alone",
            f"make SiMM's environment with the system's Python: "
            f"{'' if package else install + ' && '}/usr/bin/python3 -m venv DIR, and SiMM into it; "
            f"there, simm doctor says how it comes to its pyverbs",
        )
    if package is not None:
        why = f"the system's pyverbs ({package}) fits Python {own}, but {sys.prefix} does not look there"
        return why, link_commands(package)
    if _is_system_python():
        return f"pyverbs is not installed for the system's Python {own}", install
    expected = Path(sys_root, "usr/lib/python3/dist-packages/pyverbs")
    if install.startswith("apt-get"):
        return "pyverbs is not installed", f"{install} && {link_commands(expected)}"
    return "pyverbs is not installed", f"{install}; then simm doctor says how {sys.prefix} comes to it"


def _loaded() -> Absence | None:
    """Return why ``verbs.py`` cannot use pyverbs, None if it can."""
    from .. import verbs

    return verbs.available()


@check("pyverbs")
def check_pyverbs(sys_root: str) -> Verdict:
    """Check that this Python has a pyverbs that it can load."""
    spec = importlib.util.find_spec("pyverbs")
    devices = _devices(sys_root)
    if spec is None:
        if not devices:
            return ok("pyverbs is not installed, and there is no RDMA device to use it with")
        why, remedy = pyverbs_advice(sys_root)
        return warn(f"{', '.join(devices)} cannot be used: {why}", remedy)
    where = Path(next(iter(spec.submodule_search_locations or [""])))
    if not devices:
        return ok(f"pyverbs is there ({where}), and no RDMA device to use it with")
    if not fits(where):
        _, remedy = pyverbs_advice(sys_root)
        built = ", ".join(built_for(where)) or "no extension modules"
        return warn(f"{where} is of no use to Python {platform.python_version()}: {built}", remedy)
    absence = _loaded()
    if absence is not None:
        remedy = absence.remedy or f"{_package_command(sys_root)} (its version must be that of the installed rdma-core)"
        return warn(f"{where}: {absence.why}", remedy)
    return ok(f"pyverbs is installed ({where})")


# -------------------------------------------------------------------------------------- pinned memory, rails


@check("memlock")
def check_memlock(sys_root: str) -> Verdict:
    """Check RLIMIT_MEMLOCK, against which registered memory counts, as RDMA pins it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    detail = f"locked memory: {limit(soft)} bytes (hard limit {limit(hard)})"
    if soft == resource.RLIM_INFINITY:
        return ok(detail)
    if not _devices(sys_root):
        return ok(f"{detail}; matters only with RDMA, and there is no device")
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", text(sys_root, "proc/self/status") or "", re.M)
    if capabilities and int(capabilities.group(1), 16) >> _CAP_IPC_LOCK & 1:
        return ok(f"{detail}; CAP_IPC_LOCK lifts it for this user (a server of another has the limit)")
    try:
        state = os.statvfs(Path(sys_root, "dev/shm"))
        room = state.f_blocks * state.f_frsize
    except OSError:
        room = 0
    if room and soft >= room:
        return ok(f"{detail}: more than /dev/shm holds ({gib(room)})")
    return warn(
        f"{detail}: RDMA cannot register an arena that is larger",
        "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1; kubernetes: the same "
        "in the container runtime's unit, or IPC_LOCK for a container that runs as root)",
    )


@check("rdma-rails")
def check_rails(sys_root: str) -> Verdict:
    """Check which ports the workers of each node would use, and whether peers in other networks can reach them."""
    known = ports.ports(sys_root)
    if not known:
        return ok("no rails without an RDMA device")
    spec, origin = restriction()
    named: Sequence[ports.Port] | None = None
    if spec:
        try:
            named = ports.parse_devices(spec, known)
        except ConfigError as error:
            return warn(f"{spec} of {origin}: {error}", f"correct or unset {origin}; see: simm topo")
    used: dict[str, ports.Port] = {}
    parts = []
    for node in numa.nodes(sys_root):
        chosen = [verdict.port for verdict in ports.choose(node.id, known, named=named) if verdict.used]
        used.update((port.name, port) for port in chosen)
        parts.append(f"node {node.id}: {', '.join(port.name for port in chosen) or 'none, TCP'}")
    detail = "; ".join(parts) + (f" (restricted by {origin})" if origin else "")
    if not used:
        remedy = f"name another port in {origin}" if origin else "see rdma-devices above"
        return warn(detail, f"{remedy}; why not: simm topo")
    if len({port.link_layer for port in used.values()}) > 1:
        return warn(f"{detail}: InfiniBand and Ethernet ports, which cannot reach each other",
            "name those of one network in --rdma-devices or SICL_NET_DEVICES",
        )  # fmt: skip
    narrow = {}
    for port in used.values():
        gid = port.gid
        if gid is not None and gid.kind != "IB" and (gid.scope == "link-local" or gid.kind == "RoCE v1"):
            narrow[port.name] = f"{gid.kind}, {gid.scope}"
    if narrow:
        seen = ", ".join(f"{port} ({why})" for port, why in narrow.items())
        return warn(
            f"{detail}: only peers on the same segment reach {seen}",
            "give the port's network device an IPv4 address (ip address add ADDRESS/PREFIX dev DEV), and RoCE v2",
        )
    return ok(detail)
