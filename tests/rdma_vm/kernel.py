"""A kernel to boot: Debian's or Ubuntu's package, downloaded and unpacked into the cache, never installed.

What is kept of it is what a boot needs: the uncompressed kernel, which QEMU starts at its PVH entry without the seconds
that unpacking takes in an emulator, and the modules. Downloading needs no root, only lists of packages that are there;
those are fetched when they are not and we are root, as ``scripts/etcd-server`` does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.rdma_vm.errors import Unavailable
from tests.rdma_vm.modules import decompressed

#: Debian's, then Ubuntu's. SIMM_TEST_KERNEL names another one.
PACKAGES: Final = ("linux-image-amd64", "linux-image-generic")
#: A change of what is kept makes old folders of no use.
_FORM: Final = 1
#: Drivers of hardware that no virtual machine has are most of a package, and stay out of the cache.
_USEFUL: Final = (
    "arch", "crypto", "drivers/block", "drivers/char", "drivers/infiniband", "drivers/net", "drivers/virtio", "fs",
    "lib", "net",
)  # fmt: skip
_CARDS: Final = shutil.ignore_patterns("ethernet", "wireless", "usb", "hw")
# Linux, Documentation/arch/x86/boot.rst: the setup header, and where the payload lies.
_HEADER_MAGIC_AT, _SETUP_SECTS_AT, _PAYLOAD_AT = 0x202, 0x1F1, 0x248


@dataclass(frozen=True)
class Kernel:
    """An unpacked kernel. ``name`` is the package's with its version."""

    name: str
    image: Path
    modules: Path


def cache_folder() -> Path:
    """Where kernels are kept: ~/.cache/simm/vm, or what SIMM_TEST_VM_CACHE names."""
    named = os.environ.get("SIMM_TEST_VM_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "simm" / "vm"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time makes things in there."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def unpacked_image(image: bytes) -> bytes:
    """The ELF kernel within a bzImage. Raises Unavailable when it is packed in a way that we do not know."""
    if image[_HEADER_MAGIC_AT : _HEADER_MAGIC_AT + 4] != b"HdrS":
        raise Unavailable("the package's kernel is not a bzImage")
    sectors = image[_SETUP_SECTS_AT] or 4
    offset, length = struct.unpack_from("<II", image, _PAYLOAD_AT)
    start = (sectors + 1) * 512 + offset
    payload = image[start : start + length]
    if payload[:4] == b"\x28\xb5\x2f\xfd":
        payload = payload[:-4]  # after a zstd stream the build appends its unpacked size
    elf = decompressed(payload)
    if elf[:4] != b"\x7fELF":
        raise Unavailable("the kernel is compressed in a way that is not known here")
    return elf


def _apt(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(
        words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _parts(package: str) -> list[str]:
    """The packages that have the files: a meta package's ``linux-*`` dependencies, and theirs."""
    found: list[str] = []
    queue = [package]
    while queue:
        name = queue.pop(0)
        said = _apt("apt-cache", "depends", "--important", name)
        if said.returncode or not said.stdout:
            continue
        found.append(name)
        for line in said.stdout.splitlines():
            kind, _, other = line.strip().partition(": ")
            if kind == "Depends" and other.startswith(("linux-image-", "linux-modules-")) and other not in found:
                queue.append(other)
    return found


def _download(package: str, folder: Path) -> list[Path]:
    parts = _parts(package)
    said = _apt("apt-get", "download", *parts, folder=folder) if parts else None
    if said is None or said.returncode:
        return []
    return sorted(folder.glob("*.deb"))


def _fetch(package: str, folder: Path) -> list[Path]:
    """Download a kernel package into a folder. Raises Unavailable."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise Unavailable("kernels come as Debian packages, and there is no apt-get here")
    folder.chmod(0o755)  # apt's own user may want to write here, and may not: it says so and goes on as root
    packages = _download(package, folder)
    if not packages and os.geteuid() == 0:
        _apt("apt-get", "update")
        packages = _download(package, folder)
    if not packages:
        raise Unavailable(f"cannot download {package}: apt-get update, then apt-get download {package}")
    return packages


def _choose() -> str:
    named = os.environ.get("SIMM_TEST_KERNEL")
    if named:
        return named
    release = Path("/etc/os-release")
    ubuntu = release.exists() and "ubuntu" in release.read_text().lower()
    return PACKAGES[ubuntu]


def find(package: str = "") -> Kernel:
    """A kernel from the cache; fetched (about 10 s) when it is not there. Raises Unavailable."""
    package = package or _choose()
    cache = cache_folder()
    kept = cache / f"{package}.{_FORM}"
    with locked(cache):
        if not (kept / "name").exists():
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as scratch:
                _unpack(_fetch(package, Path(scratch)), Path(scratch))
                shutil.rmtree(kept, ignore_errors=True)
                os.rename(Path(scratch) / "kept", kept)
    return Kernel((kept / "name").read_text().strip(), kept / "vmlinux", kept / "modules")


def _unpack(packages: list[Path], scratch: Path) -> None:
    """Make ``scratch/kept`` of the packages: vmlinux, modules, name."""
    for package in packages:
        subprocess.run(["dpkg-deb", "-x", str(package), str(scratch / "all")], check=True)
        package.unlink()
    images = sorted((scratch / "all/boot").glob("vmlinuz-*"))
    trees = [path for base in ("lib/modules", "usr/lib/modules") for path in (scratch / "all" / base).glob("*")]
    if not images or not trees:
        raise Unavailable(f"no kernel in {', '.join(package.name for package in packages)}")
    kept = scratch / "kept"
    kept.mkdir()
    (kept / "vmlinux").write_bytes(unpacked_image(images[-1].read_bytes()))
    for useful in _USEFUL:
        if (trees[0] / "kernel" / useful).exists():
            shutil.copytree(trees[0] / "kernel" / useful, kept / "modules" / useful, ignore=_CARDS)
    shutil.copy(trees[0] / "modules.builtin", kept / "modules")
    named = [package.name for package in packages if not package.name.startswith("linux-image-amd64")]
    (kept / "name").write_text(f"{(named or [packages[0].name])[0]}\n")
