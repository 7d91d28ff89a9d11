"""What a build ships: the modules of this checkout and no others, all files in the source distribution, metadata."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.child import ROOT

pytest.importorskip("setuptools")

_USE = """
import sys, simm
assert not any(name.startswith("simm.") for name in sys.modules), "it loads nothing"
assert "Client" in dir(simm)
from simm import Client
import simm.client
assert Client is simm.client.Client is simm.Client
try:
    simm.Klient
except AttributeError as exc:
    assert "Klient" in str(exc)
else:
    raise AssertionError("no such name")
"""


def tracked() -> list[str]:
    """Return the repository's files, relative to its root."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no git checkout")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository to build in."""
    folder = tmp_path_factory.mktemp("packaging") / "simm"
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def setup(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_build_has_no_module_of_a_build_before(copy: Path) -> None:
    """A module that was deleted or moved stayed in build/, and went into every later wheel."""
    stale = copy / "build" / "lib" / "simm" / "deleted_long_ago.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    setup(copy, "build")
    built = {str(path.relative_to(copy / "build" / "lib")) for path in (copy / "build" / "lib").rglob("*.*")}
    sources = {name for name in tracked() if name.startswith("simm/")}
    assert built == sources
    assert "simm/py.typed" in built


def test_the_source_distribution_is_whole(copy: Path) -> None:
    setup(copy, "sdist")
    (archive,) = (copy / "dist").glob("simm*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
        prefix = archive.name.removesuffix(".tar.gz")
        info = tar.extractfile(f"{prefix}/PKG-INFO")
        assert info is not None
        metadata = info.read().decode()
    assert set(tracked()) <= names, sorted(set(tracked()) - names)
    assert not [name for name in names if name.endswith(".pyc") or "__pycache__" in name]
    # Another project has the name of the import package.
    for line in (
        "Name: simm-store\n", "Classifier: Typing :: Typed", "Author: SiMM", "Project-URL: ", "License: Apache-2.0",
    ):  # fmt: skip
        assert line in metadata, line


@pytest.mark.quick
def test_the_client_is_a_name_of_the_package() -> None:
    done = subprocess.run([sys.executable, "-c", _USE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
