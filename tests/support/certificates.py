"""Certificates for tests, by the ``openssl`` command: an authority, and what it signs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.support.waiting import WAIT_S

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl in PATH for certificates")
#: What certificates of tests name without a wish: the addresses that tests' servers have.
HERE: Final = "IP:127.0.0.1,DNS:localhost"
_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(folder: Path, *arguments: str) -> None:
    """Run the command there."""
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=WAIT_S)


class Authority:
    """Signs certificates. ``ca`` is the file that trusts it."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self.name = name
        self.ca = folder / f"{name}.pem"
        openssl(folder, "req", "-x509", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2",
                "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip

    def issue(self, name: str, names: str = HERE, *, days: int = 2) -> Path:
        """Return a file with a new certificate for ``names`` and its key. It has expired if ``days`` is negative."""
        request, signed, key = (self.folder / f"{name}.{kind}" for kind in ("csr", "crt", "key"))
        extensions = self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\nauthorityKeyIdentifier=keyid\n")
        openssl(self.folder, "req", *_KEY, "-keyout", str(key), "-out", str(request), "-subj", f"/CN={name}")
        openssl(
            self.folder, "x509", "-req", "-in", str(request), "-CA", str(self.ca), "-CAkey", f"{self.name}.key",
            "-set_serial", str(abs(hash(name)) % (1 << 60) + 1), "-days", str(days), "-extfile", str(extensions),
            "-out", str(signed),
        )  # fmt: skip
        both = self.folder / f"{name}.both"
        both.write_text("")
        both.chmod(0o600)
        both.write_text(signed.read_text() + key.read_text())
        return both
