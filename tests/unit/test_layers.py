"""Check the import rules of ``simm/`` on its source: packages, their rows, cycles, and what may be imported where.

The rules read the syntax trees, so imports inside functions and under ``TYPE_CHECKING`` count too. :func:`violations`
takes the sources as an argument; the tests below call it on the real tree and on trees with one injected import each.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import pytest

from tests.support.sources import PACKAGE, parse, sources, statements

ARCHITECTURE: Final = PACKAGE.parent / "docs" / "architecture.md"

LINES_MAX: Final = 600
#: Rows from the bottom up; each row lists units that must not import each other. A unit is a set of top-level modules
#: and packages that belong together. A module imports from its own unit and from lower rows.
ROWS: Final = (
    ("errors constants",),
    ("host shm", "config", "schemes"),
    ("wire rpc", "tracing"),
    ("arena slab table", "cluster"),
    ("net", "rdma verbs"),
    ("gpu",),
    ("ipc",),
    ("sdk", "control", "server"),
    ("client", "manager", "dataserver"),
    ("kv", "testing", "sim", "traces", "connectors", "index"),
    ("tools",),
    ("cli __main__",),
)
#: Top-level name -> (row, unit).
PLACE: Final = {
    name: (row, unit) for row, units in enumerate(ROWS) for unit in units for name in unit.split()
}  # fmt: skip
#: Violations that wait for their mend, word for word.
KNOWN: Final[frozenset[str]] = frozenset()
PACKAGES: Final = frozenset((
    "arena", "cluster", "config", "connectors", "control", "gpu", "host", "index", "ipc", "net", "rdma", "schemes",
    "sdk", "server", "sim", "testing", "tools", "traces", "tracing", "wire",
))  # fmt: skip
FILES_PER_PACKAGE_MAX: Final = 16

#: The first row whose modules may open sockets or wait in a selector.
IO_ROW: Final = PLACE["net"][0]
#: Exceptions: ``config`` asks for the host name.
SOCKET_ALSO: Final = frozenset(("config.settings",))
#: Servers and the same-host path load no GPU module: a data server must start without one.
NO_GPU: Final = frozenset(("ipc", "server"))

#: Structures over a buffer, and the cluster's decisions: no I/O, no clock, no threads.
PURE: Final = frozenset(("arena", "slab", "table", "cluster", "wire", "rpc", "schemes"))
IMPURE: Final = frozenset((
    "asyncio", "io", "logging", "os", "pathlib", "select", "selectors", "signal", "socket", "subprocess", "tempfile",
    "threading", "time",
))  # fmt: skip

BANNED: Final = frozenset(
    ("pickle", "cPickle", "marshal", "shelve", "yaml", "dill", "cloudpickle", "joblib", "torch")
)  # fmt: skip
BANNED_CALLS: Final = frozenset(("eval", "exec", "compile", "__import__"))
#: What a text has that has one of them, or the name of CUDA's library. Only such a one is searched.
LOOKS_LIKE_CALLS: Final = re.compile(rf"(?<![\w.])({'|'.join(sorted(BANNED_CALLS))})\b|libcuda")
RUNTIME: Final = frozenset(("numpy", "psutil"))
#: What an engine loads imports that engine, and nothing else does.
ENGINES: Final = {
    "connectors.sglang": "sglang", "connectors.lmcache": "lmcache", "connectors.lmcache_server": "lmcache",
    "connectors.vllm": "vllm", "connectors.vllm_connector": "vllm",
}  # fmt: skip
#: The one module that imports the libraries of an extra.
EXTRAS: Final = {
    "index.libraries": frozenset(("msgspec", "xxhash", "zmq")), "index.rpc.library": frozenset(("grpc",)),
    "index.lmcache.hash_library": frozenset(("blake3",)),
}  # fmt: skip


SOURCES: Final = sources()


@functools.cache
def imports(text: str, module: str, modules: frozenset[str]) -> frozenset[str]:
    """Return absolute names of all modules that a module imports, anywhere in it."""
    package = ["simm", *module.split(".")] if module else ["simm"]
    if module not in packages(modules):
        package.pop()
    found = set()
    for node in statements(text):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                whole = f"{start}.{alias.name}"
                found.add(whole if whole.startswith("simm.") and whole[5:] in modules else start)
    return frozenset(found)


@functools.cache
def packages(modules: frozenset[str]) -> frozenset[str]:
    """Return the modules that are packages: those with others below them, and ``simm`` itself."""
    return frozenset(module.rpartition(".")[0] for module in modules) | {""}


def unit(module: str) -> str:
    """Return the top-level name of a module."""
    return module.split(".")[0]


def cycles(graph: Mapping[str, set[str]]) -> Iterator[tuple[str, ...]]:
    """Yield one path for each strongly connected component that is a cycle. O(modules + imports), by Tarjan 1972."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> Iterator[tuple[str, ...]]:
        index[module] = low[module] = len(index)
        stack.append(module)
        for name in sorted(graph[module]):
            if name not in index:
                yield from visit(name)
                low[module] = min(low[module], low[name])
            elif name in stack:
                low[module] = min(low[module], index[name])
        if low[module] == index[module]:
            at = stack.index(module)
            component = tuple(stack[at:])
            del stack[at:]
            if len(component) > 1 or module in graph[module]:
                yield component

    for module in graph:
        if module not in index:
            yield from visit(module)


def violations(texts: Mapping[str, str]) -> list[str]:
    """Return one line for each broken rule."""
    modules = frozenset(texts)
    graph: dict[str, set[str]] = {}
    found = []
    for module, text in texts.items():
        names = imports(text, module, modules)
        own = {name[5:] for name in names if name.startswith("simm.")}
        graph[module] = own & modules
        if not module:
            # ``from simm import Client`` loads it at the first use; tests/system/test_packaging.py checks that.
            own -= {"client"}
            if own:
                found.append(f"simm/__init__ imports {sorted(own)}")
            continue
        if unit(module) not in PLACE:
            found.append(f"{module} has no row: add it to ROWS")
            continue
        found += _own_imports(module, own)
        found += _foreign_imports(module, {name for name in names if name != "simm" and not name.startswith("simm.")})
        found += _calls(module, text)
    found += ["cycle: " + ", ".join(component) for component in cycles(graph)]
    files = [module for module in texts if "." in module and module not in packages(modules)]
    counts = Counter(module.rpartition(".")[0] for module in files)
    found += [
        f"{name} has {count} modules, {FILES_PER_PACKAGE_MAX} at most" for name, count in counts.items()
        if count > FILES_PER_PACKAGE_MAX
    ]  # fmt: skip
    return found


def _own_imports(module: str, names: set[str]) -> Iterator[str]:
    row, mine = PLACE[unit(module)]
    for name in sorted(names):
        if unit(name) not in PLACE:
            yield f"{module} imports {name}, which has no row"
            continue
        other_row, other = PLACE[unit(name)]
        if other_row > row:
            yield f"{module} imports {name} from a higher row"
        elif other_row == row and other != mine:
            yield f"{module} imports its sibling {name}"
        if unit(name) == "gpu" and unit(module) in NO_GPU:
            yield f"{module} imports {name}: servers and the same-host path load no GPU module"


def _foreign_imports(module: str, names: set[str]) -> Iterator[str]:
    roots = {name.split(".")[0] for name in names}
    yield from (f"{module} imports {name}, which is banned" for name in sorted(roots & BANNED))
    if "pyverbs" in roots and module != "verbs":
        yield f"{module} imports pyverbs: only verbs may"
    unknown = roots - set(sys.stdlib_module_names) - RUNTIME - BANNED - {"pyverbs", ENGINES.get(module)}
    unknown -= EXTRAS.get(module, frozenset())
    yield from (f"{module} imports {name}, which setup.cfg does not name" for name in sorted(unknown))
    if PLACE[unit(module)][0] < IO_ROW and module not in SOCKET_ALSO:
        yield from (f"{module} imports {name}: only from net/ on" for name in sorted(roots & {"socket", "selectors"}))
    if unit(module) in PURE:
        yield from (f"{module} imports {name}, but is pure" for name in sorted(roots & IMPURE))


@functools.cache
def _calls(module: str, text: str) -> list[str]:
    """Return calls that turn data into code, and loads of CUDA's library outside of ``gpu.cuda``."""
    found = []
    strings = False
    loads = False
    if not LOOKS_LIKE_CALLS.search(text):
        return []
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if isinstance(node.func, ast.Name) and name in BANNED_CALLS:
                found.append(f"{module} calls {name}()")
            loads |= name in ("CDLL", "LoadLibrary", "dlopen")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings |= re.fullmatch(r"libcuda\.so[.0-9]*", node.value) is not None
    if loads and strings and module != "gpu.cuda":
        found.append(f"{module} loads CUDA's library: only gpu.cuda may")
    return found


# -- the real tree --------------------------------------------------------------------------------------


@pytest.mark.fault("F11", ci="all of simm/", whole="the same")
def test_the_tree_keeps_the_rules() -> None:
    assert set(violations(SOURCES)) == KNOWN


def test_every_package_is_known_and_says_what_it_is_for() -> None:
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/**/*.py")}
    assert folders == PACKAGES
    for package in sorted(packages(frozenset(SOURCES)) - {""}):
        assert len(ast.get_docstring(parse(SOURCES[package])) or "") > 30, f"{package}/__init__.py has no charter"


def test_modules_are_short() -> None:
    assert [name for name, text in SOURCES.items() if len(text.splitlines()) > LINES_MAX] == []


def test_the_picture_has_all_rows() -> None:
    """The rows in docs/architecture.md are those that the imports are checked against, from the top down."""
    picture = ARCHITECTURE.read_text().partition("### Modules")[2].split("```")[1]
    drawn = [re.split(r" {3,}", line)[0] for line in picture.strip().splitlines()]
    rows = [{name for unit in units for name in unit.split()} - {"__main__"} for units in reversed(ROWS)]
    assert [set(re.findall(r"\w+", line)) for line in drawn] == rows


def test_the_module_map_is_the_tree() -> None:
    """The map in docs/architecture.md names each package and each of its modules, and nothing else."""
    lines = re.findall(r"^\| `simm/([a-z_/]*)` \|.*\| ([^|]*) \|$", ARCHITECTURE.read_text(), re.MULTILINE)
    named = {
        (folder.strip("/").replace("/", ".") + "." + name).strip(".")
        for folder, files in lines
        for name in re.findall(r"`([a-z_]+)`", files)
    }
    real = {module for module in SOURCES if module not in packages(frozenset(SOURCES))}
    assert named == real


# -- injected bugs: each rule finds an import injected against it -------------------------------------------


@pytest.mark.parametrize(
    "module, line, rule",
    [
        ("table", "import simm.client", "higher row"),
        ("table", "def f():\n    import simm.kv", "higher row"),
        ("arena.reader", "from simm.server.worker import Worker", "higher row"),
        ("sdk.reads", "import simm.server.worker", "sibling"),
        ("server.worker", "from simm.sdk.routing import Routing", "sibling"),
        ("manager", "from . import client", "sibling"),
        ("net.loop", "import simm.rdma.api", "sibling"),
        ("cluster.machine", "import typing\nif typing.TYPE_CHECKING:\n    import simm.arena.store", "sibling"),
        ("host.pages", "import simm.config.settings", "sibling"),
        ("sim.world", "from simm.tools.simulate import main", "higher row"),
        ("schemes.vllm", "import simm.arena.hashing", "higher row"),
        ("schemes.registry", "from ..config import settings", "sibling"),
        ("schemes.vllm", "import pickle", "banned"),
        ("schemes.lmcache", "import blake3", "setup.cfg does not name"),
        ("testing.store", "from .. import kv", "sibling"),
        ("errors", "from . import constants, shm", "higher row"),
        ("", "from . import errors", "simm/__init__ imports"),
        ("arena.layout", "import simm.arena.store", "cycle"),
        ("sim.net", "from .world import World", "cycle"),
        ("tools.bench.floor", "import simm.tools.bench.command", "cycle"),
        ("net.loop", "import pyverbs.qp", "only verbs may"),
        ("verbs", "import ctypes\nctypes.CDLL('libcuda.so.1')", "only gpu.cuda may"),
        ("ipc.session", "import simm.gpu.cuda", "no GPU module"),
        ("server.stream", "def f():\n    from simm.gpu.copy import fill", "no GPU module"),
        ("host.pages", "import selectors", "only from net/ on"),
        ("config.parsers", "import socket", "only from net/ on"),
        ("wire.messages", "import time", "is pure"),
        ("cluster.machine", "import logging", "is pure"),
        ("arena.store", "import pickle", "banned"),
        ("sdk.reads", "import torch", "banned"),
        ("net.loop", "import requests", "setup.cfg does not name"),
        ("connectors.keyspace", "import sglang", "setup.cfg does not name"),
        ("connectors.lmcache_values", "import lmcache", "setup.cfg does not name"),
        ("index.blocks", "import zmq", "setup.cfg does not name"),
        ("index.rpc.rpcs", "import grpc", "setup.cfg does not name"),
        ("kv", "from .connectors import keyspace", "sibling"),
        ("index.blocks", "from ..connectors import keyspace", "sibling"),
        ("wire.messages", "eval('1')", "calls eval"),
        ("newcomer", "import os", "has no row"),
    ],
)  # fmt: skip
def test_an_injected_import_is_found(module: str, line: str, rule: str) -> None:
    assert module == "newcomer" or module in SOURCES, "the injected bug needs a module that exists"
    injected = {**SOURCES, module: SOURCES.get(module, "") + f"\n{line}\n"}
    new = set(violations(injected)) - KNOWN
    assert any(rule in line for line in new), new


def test_too_many_files_are_found() -> None:
    injected = {**SOURCES, **{f"sim.more_{number}": "" for number in range(FILES_PER_PACKAGE_MAX)}}
    assert any("modules, 16 at most" in line for line in violations(injected))


def test_imports_of_every_spelling_are_seen() -> None:
    modules = frozenset(("", "a", "b", "p", "p.c", "p.d"))
    text = "import simm.a\nfrom . import d\nfrom .. import a\nfrom ..b import X\nfrom simm.p import d as e\nimport os"
    assert imports(text, "p.c", modules) == {"simm.a", "simm.b", "simm.p.d", "os"}
    assert imports("from .c import X\nfrom . import d", "p", modules) == {"simm.p.c", "simm.p.d"}
