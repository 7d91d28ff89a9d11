"""The archive that the kernel boots from, made of what the cache has; no program but busybox, no tool but Python.

Two archives, one after the other, as the kernel allows: the first has busybox and the modules, is the same for every
boot of a kernel and is kept; the second has what one boot is about (its settings and its command). Both go to QEMU as
one file without a name, so that nothing of a boot is ever on disk.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.rdma_vm.errors import Unavailable
from tests.rdma_vm.kernel import Kernel, cache_folder, locked
from tests.rdma_vm.modules import Modules

GUEST: Final = Path(__file__).resolve().parent / "guest"
#: To see the host's files and to talk to us.
FIRST: Final = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay")
#: crc32_generic and not the one for processors with PCLMUL: rxe takes the best that is loaded, and emulated carry-less
#: multiplication is many times slower than a table.
THEN: Final = ("crc32_generic", "virtio_net", "veth", "ib_uverbs", "rdma_rxe")
BUSYBOX: Final = Path("/usr/bin/busybox")


class Entry(NamedTuple):
    """A file of the archive; ``mode`` as in stat, with the kind."""

    path: str
    mode: int
    data: bytes = b""


def folder(path: str) -> Entry:
    """An empty folder."""
    return Entry(path, stat.S_IFDIR | 0o755)


def file(path: str, data: bytes, mode: int = 0o755) -> Entry:
    """A file."""
    return Entry(path, stat.S_IFREG | mode, data)


def link(path: str, to: str) -> Entry:
    """A symbolic link."""
    return Entry(path, stat.S_IFLNK | 0o777, to.encode())


def _field(value: int) -> bytes:
    return b"%08x" % value


def cpio(entries: Iterable[Entry]) -> bytes:
    """An archive in cpio's "newc" form (Linux, Documentation/driver-api/early-userspace/buffer-format.rst).

    110 bytes of header: the magic and 13 numbers of 8 hexadecimal digits (inode, mode, uid, gid, links, mtime, size,
    device and special device by halves, length of the name with its NUL, checksum). The name and the data each begin
    at a multiple of 4, and so does what follows the archive.
    """
    pieces = bytearray()
    for inode, entry in enumerate((*entries, Entry("TRAILER!!!", 0)), 1):
        name = entry.path.encode() + b"\0"
        numbers = (inode, entry.mode, 0, 0, 1, 0, len(entry.data), 0, 0, 0, 0, len(name), 0)
        pieces += b"070701" + b"".join(map(_field, numbers)) + name
        pieces += bytes(-len(pieces) % 4)
        pieces += entry.data
        pieces += bytes(-len(pieces) % 4)
    return bytes(pieces)


def base(kernel: Kernel, more: Sequence[str] = ()) -> Path:
    """The first archive, from the cache; ``more`` modules are loaded after the usual ones. Raises Unavailable."""
    if not BUSYBOX.exists():
        raise Unavailable("no busybox: apt-get install busybox-static")
    init = (GUEST / "init").read_bytes()
    state = BUSYBOX.stat()
    about = repr((kernel.name, FIRST, THEN, tuple(more), state.st_size, state.st_mtime_ns)).encode()
    cache = cache_folder()
    kept = cache / f"initramfs-{hashlib.sha256(about + init).hexdigest()[:16]}.cpio"
    with locked(cache):
        if not kept.exists():
            unfinished = kept.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(_base(kernel, init, more))
            os.rename(unfinished, kept)
    return kept


def _base(kernel: Kernel, init: bytes, more: Sequence[str]) -> bytes:
    tree = Modules(kernel.modules)
    first = tree.order(FIRST)
    then = [name for name in tree.order((*FIRST, *THEN, *more)) if name not in first]
    return cpio(
        [
            *map(folder, ("bin", "dev", "proc", "sys", "modules", "host", "fresh", "root")),
            file("bin/busybox", BUSYBOX.read_bytes()),
            link("bin/sh", "busybox"),
            file("init", init),
            file("modules/first", " ".join(first).encode(), 0o644),
            file("modules/then", " ".join(then).encode(), 0o644),
            *(file(f"modules/{name}.ko", tree.read(name), 0o644) for name in (*first, *then)),
        ]
    )


def complete(kept: Path, about: Mapping[str, bytes]) -> int:
    """Descriptor of a nameless file with the kept archive and one of ``boot/NAME`` files; the caller closes it."""
    descriptor = os.memfd_create("initramfs")
    own = cpio([folder("boot"), *(file(f"boot/{name}", data) for name, data in sorted(about.items()))])
    for data in (kept.read_bytes(), own):
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    return descriptor
