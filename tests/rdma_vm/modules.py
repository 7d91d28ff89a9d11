"""Kernel modules of an unpacked kernel package: where they are, and what must be loaded before what.

A package comes without ``modules.dep``: that is written when it is installed. So each module's own ``.modinfo`` section
is read, which is what ``depmod`` reads too: NUL-terminated ``name=value`` strings.
"""

from __future__ import annotations

import gzip
import lzma
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tests.rdma_vm.errors import Unavailable

_SUFFIXES: Final = (".ko", ".ko.xz", ".ko.gz", ".ko.zst")
#: ELF64, little endian: e_shoff, then e_shentsize, e_shnum, e_shstrndx at the header's end.
_SHOFF, _SHTAIL = 0x28, 0x3A
_SECTION: Final = struct.Struct("<IIQQQQIIQQ")


def decompressed(data: bytes) -> bytes:
    """Undo whatever compression the first bytes tell of. Raises Unavailable for zstd without its program."""
    if data.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMADecompressor().decompress(data)
    if data.startswith(b"\x1f\x8b"):
        return gzip.decompress(data)
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        try:
            return subprocess.run(["zstd", "-dc"], input=data, stdout=subprocess.PIPE, check=True).stdout
        except FileNotFoundError:
            raise Unavailable("this kernel is compressed by zstd: apt-get install zstd") from None
    return data


def section(elf: bytes, wanted: str) -> bytes:
    """A section of an ELF64 file; empty if it has none of that name. Raises ValueError for another kind of file."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not an ELF64 file")
    (offset,) = struct.unpack_from("<Q", elf, _SHOFF)
    size, count, names_at = struct.unpack_from("<HHH", elf, _SHTAIL)
    headers = [_SECTION.unpack_from(elf, offset + number * size) for number in range(count)]
    names = headers[names_at][4]
    for header in headers:
        start = names + header[0]
        if elf[start : elf.index(b"\0", start)].decode() == wanted:
            return elf[header[4] : header[4] + header[5]]
    return b""


def plain(name: str) -> str:
    """A module's name as the kernel writes it, from a file's name or another spelling."""
    return name.rpartition("/")[2].split(".ko")[0].replace("-", "_")


class Modules:
    """``Modules(folder)``: the modules below ``lib/modules/VERSION``."""

    def __init__(self, folder: Path) -> None:
        self._files = {plain(path.name): path for path in folder.rglob("*.ko*") if path.name.endswith(_SUFFIXES)}
        listed = folder / "modules.builtin"
        self._builtin = set(map(plain, listed.read_text().split())) if listed.exists() else set()

    def read(self, name: str) -> bytes:
        """A module's ELF file. Raises Unavailable when there is no such module."""
        try:
            return decompressed(self._files[plain(name)].read_bytes())
        except KeyError:
            raise Unavailable(f"this kernel has no module {name}") from None

    def needs(self, name: str) -> list[str]:
        """What a module wants loaded before it; the soft wishes that this kernel cannot fulfil are left out."""
        found: list[str] = []
        for entry in section(self.read(name), ".modinfo").split(b"\0"):
            key, _, value = entry.decode(errors="replace").partition("=")
            if key == "depends":
                found += filter(None, map(plain, value.split(",")))
            elif key == "softdep" and "pre:" in value:
                wishes = value.partition("pre:")[2].partition("post:")[0].split()
                found += [plain(wish) for wish in wishes if plain(wish) in self._files]
        return found

    def order(self, wanted: Iterable[str]) -> list[str]:
        """The wanted modules and all they need, each after what it needs; what is built in is left out.

        Raises Unavailable when one is neither there nor built in.
        """
        done: dict[str, None] = {}
        under_way: set[str] = set()

        def add(name: str) -> None:
            if name in done or name in self._builtin or name in under_way:
                return
            under_way.add(name)
            for need in self.needs(name):
                add(need)
            done[name] = None

        for name in wanted:
            add(plain(name))
        return list(done)
