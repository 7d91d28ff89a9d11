"""Check the layout of ``tests/``: what each folder may have, who imports whom, and how long a file is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.sources import statements

TESTS: Final = Path(__file__).resolve().parents[1]
ROOT: Final = TESTS.parent
LINES_MAX: Final = 700
#: Names that start servers; tests/unit imports none of them, and takes no fixture that does.
SERVERS: Final = frozenset((
    "tests.support.processes.Cluster", "tests.support.fleet.Fleet", "simm.sdk.local_cluster.LocalCluster",
    "simm.testing.LocalCluster", "tests.support.etcd_server.EtcdServer", "tests.support.server_process.ServerProcess",
))  # fmt: skip
FIXTURES: Final = frozenset(("cluster", "make_cluster", "make_fleet", "fleet", "real_fleet"))

TAKES: Final = re.compile(rf"\bdef\s+test_\w+\s*\([^)]*\b({'|'.join(sorted(FIXTURES))})\b")


def modules() -> list[Path]:
    """Return all Python files of tests/, by path from there."""
    return sorted(path.relative_to(TESTS) for path in TESTS.rglob("*.py"))


def imported(text: str) -> Iterator[str]:
    """Yield the absolute names of what a module imports: modules, and names out of modules."""
    for node in statements(text):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def imports_tests(text: str) -> bool:
    """Return True if a module imports a test module, or something out of one.

    Only a text that may do so is parsed, as the parser takes seconds for all of tests/.
    """
    if not re.search(r"\btests[\w.]*\.test_|\bfrom\s+tests[\w.]*\s+import\s[^()\n]*(\([^)]*)?\btest_", joined(text)):
        return False
    return any(re.search(r"^tests(\.\w+)*\.test_\w+", name) for name in imported(text))


def joined(text: str) -> str:
    """Return a text without comments, in which each line goes on after a backslash at its end."""
    return re.sub(r"#[^\n]*", "", text.replace("\\\n", " "))


def starts_servers(text: str) -> list[str]:
    """Return what starts servers in a unit test: imported names and fixtures of other modules.

    Only a text with a word of each is parsed.
    """
    if not any(name.rpartition(".")[0] in text for name in SERVERS) and not TAKES.search(text):
        return []
    found = sorted(SERVERS & set(imported(text)))
    functions = [node for node in statements(text) if isinstance(node, ast.FunctionDef)]
    fixtures = FIXTURES - {function.name for function in functions}
    for function in functions:
        if function.name.startswith("test_"):
            found += sorted(fixtures & {argument.arg for argument in function.args.args})
    return found


def test_files_are_short() -> None:
    assert [str(path) for path in modules() if len((TESTS / path).read_text().splitlines()) > LINES_MAX] == []


def test_no_test_module_imports_another() -> None:
    assert [str(path) for path in modules() if imports_tests((TESTS / path).read_text())] == []


def test_a_unit_test_starts_no_server() -> None:
    units = [path for path in modules() if path.parts[0] == "unit"]
    assert [str(path) for path in units if starts_servers((TESTS / path).read_text())] == []


def test_every_folder_is_a_package() -> None:
    """Base names repeat, and pytest tells two modules of one name apart by their packages."""
    folders = {path.parent for path in modules()} - {Path("engines/shim"), Path("engines/plugin")}
    assert [str(folder) for folder in sorted(folders) if not (TESTS / folder / "__init__.py").exists()] == []


def test_support_is_imported_and_never_collected() -> None:
    support = [path for path in modules() if path.parts[0] == "support"]
    assert [path for path in support if path.name.startswith(("test_", "conftest"))] == []


def test_unit_mirrors_the_package() -> None:
    """A folder of tests/unit is a package of simm/, one of its modules, or ``support``."""
    folders = {path.parts[1] for path in modules() if path.parts[0] == "unit" and len(path.parts) > 2}
    there = {path.stem for path in (ROOT / "simm").iterdir()}
    assert folders - there == {"support"}


def test_paths_in_the_documentation_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for name in re.findall(r"tests/[\w/.]*\w", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize(
    ("text", "tests", "servers"),
    [
        ("from tests.unit.arena import test_slab", True, []),
        ("import tests.models.test_slot", True, []),
        ("def f():\n    from tests.unit.test_rpc import sample", True, []),
        ("from tests.models import large, \\\n    test_slot", True, []),
        ("from tests.models import (\n    large,  # (1)\n    test_slot,\n)", True, []),
        ("from tests.support import child\n\n\ndef test_x(): pass", False, []),
        ("from tests.support.processes import wait_until", False, []),
        ("from tests.support.processes import Cluster", False, ["tests.support.processes.Cluster"]),
        ("def test_x(make_cluster): pass", False, ["make_cluster"]),
        ("from simm.testing import (\n    LocalCluster as L,\n)", False, ["simm.testing.LocalCluster"]),
        ("def test_x(\n    seed: int, fleet: Fleet\n): pass", False, ["fleet"]),
        ("def helper(cluster): pass", False, []),
    ],
)
def test_self_test(text: str, tests: bool, servers: list[str]) -> None:
    """The checks above find what is injected."""
    assert imports_tests(text) is tests and starts_servers(text) == servers
