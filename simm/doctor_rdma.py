"""The checks of ``simm doctor`` on RDMA: devices, access to them, pyverbs, pinned memory, rails.

On a host without an RDMA device all of them are content: other hosts are then reached by TCP, and nothing has to be
installed. With a device each names what still keeps SiMM from using it, and the commands that change it.

How an interpreter comes to its pyverbs
---------------------------------------
pyverbs belongs to rdma-core and is built by the distribution for its own Python, as extension modules whose file names
carry that Python's version (``device.cpython-311-x86_64-linux-gnu.so``). What is on PyPI under that name must be built
against the installed rdma-core, version by version, and often cannot. So the distribution's package is the one to
take, by every Python of that version: its extension modules do not care whether that one lives in ``/usr`` or in a
virtual environment. A virtual environment does not look there, though. Giving it all of the distribution's packages
would mix two worlds (numpy above all); a folder with one link in it, named in a ``.pth`` file, gives it that one.

A Python of another version cannot load these modules at all. Then the environment must be made with the
system's Python.
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

from . import rails, topology
from .errors import ConfigError
from .fabric import Absence
from .findings import Finding, entries, gib, limit, text

#: Drivers of network devices, and the module that makes RDMA devices of them.
_RDMA_PARTS: Final = {
    "mlx4_core": "mlx4_ib", "mlx4_en": "mlx4_ib", "mlx5_core": "mlx5_ib", "bnxt_en": "bnxt_re", "ice": "irdma",
    "idpf": "irdma", "qede": "qedr", "hns3": "hns_roce_hw_v2", "mana": "mana_ib",
}  # fmt: skip
_CAP_IPC_LOCK: Final = 14
#: Where distributions keep Python packages, below the root.
_SYSTEM_FOLDERS: Final = ("usr/lib/python3/dist-packages", "usr/lib64/python3.*/site-packages",
                          "usr/lib/python3.*/site-packages")  # fmt: skip
#: Of the folder in a virtual environment that holds the link, and of the .pth file that names it.
LINK_FOLDER: Final = "simm-pyverbs"


def _devices(sys_root: str) -> list[str]:
    return entries(sys_root, "sys/class/infiniband")


# --------------------------------------------------------------------------------------------- devices


def _sleeping_drivers(sys_root: str) -> dict[str, str]:
    """Network devices that could do RDMA if a module were loaded: name -> module."""
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


def check_rdma_devices(sys_root: str = "/") -> Finding:
    """RDMA devices and the state of their ports."""
    name = "rdma-devices"
    known = rails.ports(sys_root)
    if not known:
        sleeping = _sleeping_drivers(sys_root)
        if sleeping:
            seen = ", ".join(f"{device} (wants {module})" for device, module in sleeping.items())
            return Finding(
                name,
                "warn",
                f"no RDMA device, but network devices that can be one: {seen}; other hosts are reached by TCP",
                f"modprobe {' '.join(sorted(set(sleeping.values())))} (and install rdma-core, which loads it at boot)",
            )
        detail = "no RDMA device; other hosts are reached by TCP"
        if _has_module(sys_root, "rdma_rxe"):
            detail += "; to try RDMA without hardware: modprobe rdma_rxe && rdma link add rxe0 type rxe netdev DEV"
        return Finding(name, "ok", detail)
    usable = [port.name for port in known if not port.trouble]
    others = [f"{port.name} ({port.trouble})" for port in known if port.trouble]
    detail = f"usable ports: {', '.join(usable) or 'none'}; others: {', '.join(others) or 'none'}"
    if usable:
        return Finding(name, "ok", detail)
    return Finding(
        name,
        "warn",
        detail,
        "bring a port up (ip link set DEV up, an address, cable, subnet manager for InfiniBand); then see: simm topo",
    )


def check_rdma_access(sys_root: str = "/") -> Finding:
    """Whether this user may open the devices: /dev/infiniband/uverbs*."""
    name = "rdma-access"
    devices = _devices(sys_root)
    if not devices:
        return Finding(name, "ok", "no RDMA device to open")
    nodes = {
        (text(sys_root, f"sys/class/infiniband_verbs/{node}/ibdev") or ""): node
        for node in entries(sys_root, "sys/class/infiniband_verbs")
        if node.startswith("uverbs")
    }
    bare = [device for device in devices if device not in nodes]
    if bare:
        return Finding(
            name, "warn", f"{', '.join(bare)}: no user-space access, the kernel's ib_uverbs is not loaded",
            "modprobe ib_uverbs (rdma-core loads it at boot)",
        )  # fmt: skip
    absent = [device for device in devices if not Path(sys_root, "dev/infiniband", nodes[device]).exists()]
    if absent:
        return Finding(
            name,
            "warn",
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
        return Finding(
            name,
            "warn",
            f"{', '.join(closed)}: uid {os.geteuid()} may not open /dev/infiniband/{nodes[closed[0]]}",
            "install rdma-core, whose udev rules give everyone access; or chmod 666 /dev/infiniband/uverbs*",
        )
    return Finding(name, "ok", f"{', '.join(devices)} can be opened")


# --------------------------------------------------------------------------------------------- pyverbs


def _package_command(sys_root: str) -> str:
    """How this distribution installs pyverbs."""
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
    """The folder of the distribution's pyverbs; None without."""
    for pattern in _SYSTEM_FOLDERS:
        for folder in sorted(Path(sys_root).glob(pattern), reverse=True):
            if (folder / "pyverbs" / "__init__.py").is_file():
                return folder / "pyverbs"
    return None


def built_for(package: Path) -> list[str]:
    """File-name endings of a package's extension modules, as ``.cpython-311-x86_64-linux-gnu.so``."""
    return sorted({entry.name[entry.name.index(".") :] for entry in package.glob("*.so")})


def fits(package: Path) -> bool:
    """Whether this Python can load a package's extension modules."""
    return bool(set(built_for(package)) & set(importlib.machinery.EXTENSION_SUFFIXES))


def system_version(sys_root: str = "/") -> str:
    """Of the Python that pyverbs is, or would be, built for: ``3.11``; empty when that cannot be told."""
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
    """Shell commands by which the environment at ``prefix`` sees ``package``, and nothing else of where that lies."""
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
    """Why this Python has no pyverbs, and the commands that give it one."""
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
    """What the module that uses pyverbs says; None when it has what it needs."""
    from . import verbs

    return verbs.available()


def check_pyverbs(sys_root: str = "/") -> Finding:
    """Whether this Python has a pyverbs that it can load."""
    name = "pyverbs"
    spec = importlib.util.find_spec("pyverbs")
    devices = _devices(sys_root)
    if spec is None:
        if not devices:
            return Finding(name, "ok", "pyverbs is not installed, and there is no RDMA device to use it with")
        why, remedy = pyverbs_advice(sys_root)
        return Finding(name, "warn", f"{', '.join(devices)} cannot be used: {why}", remedy)
    where = Path(next(iter(spec.submodule_search_locations or [""])))
    if not devices:
        return Finding(name, "ok", f"pyverbs is there ({where}), and no RDMA device to use it with")
    if not fits(where):
        _, remedy = pyverbs_advice(sys_root)
        built = ", ".join(built_for(where)) or "no extension modules"
        return Finding(name, "warn", f"{where} is of no use to Python {platform.python_version()}: {built}", remedy)
    absence = _loaded()
    if absence is not None:
        remedy = absence.remedy or f"{_package_command(sys_root)} (its version must be that of the installed rdma-core)"
        return Finding(name, "warn", f"{where}: {absence.why}", remedy)
    return Finding(name, "ok", f"pyverbs is installed ({where})")


# -------------------------------------------------------------------------------------- pinned memory, rails


def check_memlock(sys_root: str = "/") -> Finding:
    """RDMA pins what it registers, and pinned memory counts against RLIMIT_MEMLOCK."""
    name = "memlock"
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    detail = f"locked memory: {limit(soft)} bytes (hard limit {limit(hard)})"
    if soft == resource.RLIM_INFINITY:
        return Finding(name, "ok", detail)
    if not _devices(sys_root):
        return Finding(name, "ok", f"{detail}; matters only with RDMA, and there is no device")
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", text(sys_root, "proc/self/status") or "", re.M)
    if capabilities and int(capabilities.group(1), 16) >> _CAP_IPC_LOCK & 1:
        return Finding(name, "ok", f"{detail}; CAP_IPC_LOCK lifts it for this user (a server of another has the limit)")
    try:
        state = os.statvfs(Path(sys_root, "dev/shm"))
        room = state.f_blocks * state.f_frsize
    except OSError:
        room = 0
    if room and soft >= room:
        return Finding(name, "ok", f"{detail}: more than /dev/shm holds ({gib(room)})")
    return Finding(
        name,
        "warn",
        f"{detail}: RDMA cannot register an arena that is larger",
        "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1; kubernetes: IPC_LOCK)",
    )


def check_rails(sys_root: str = "/") -> Finding:
    """Which ports the workers of each node would use, and whether peers of other networks can reach them."""
    name = "rdma-rails"
    known = rails.ports(sys_root)
    if not known:
        return Finding(name, "ok", "no rails without an RDMA device")
    spec, origin = rails.restriction(None, os.environ)
    named: Sequence[rails.Port] | None = None
    if spec:
        try:
            named = rails.parse_devices(spec, known)
        except ConfigError as error:
            return Finding(name, "warn", f"{origin}={spec}: {error}", f"correct or unset {origin}; see: simm topo")
    used: dict[str, rails.Port] = {}
    parts = []
    for node in topology.nodes(sys_root):
        chosen = [verdict.port for verdict in rails.choose(node.id, known, named=named) if verdict.used]
        used.update((port.name, port) for port in chosen)
        parts.append(f"node {node.id}: {', '.join(port.name for port in chosen) or 'none, TCP'}")
    detail = "; ".join(parts) + (f" (restricted by {origin})" if origin else "")
    if not used:
        remedy = f"name another port in {origin}" if origin else "see rdma-devices above"
        return Finding(name, "warn", detail, f"{remedy}; why not: simm topo")
    if len({port.link_layer for port in used.values()}) > 1:
        return Finding(
            name, "warn", f"{detail}: InfiniBand and Ethernet ports, which cannot reach each other",
            "name those of one network in --rdma-devices or SICL_NET_DEVICES",
        )  # fmt: skip
    narrow = {}
    for port in used.values():
        gid = port.gid
        if gid is not None and gid.kind != "IB" and (gid.scope == "link-local" or gid.kind == "RoCE v1"):
            narrow[port.name] = f"{gid.kind}, {gid.scope}"
    if narrow:
        seen = ", ".join(f"{port} ({why})" for port, why in narrow.items())
        return Finding(
            name,
            "warn",
            f"{detail}: only peers on the same segment reach {seen}",
            "give the port's network device an IPv4 address (ip address add ADDRESS/PREFIX dev DEV), and RoCE v2",
        )
    return Finding(name, "ok", detail)
