"""Imports point down only, and some things are imported nowhere: asserted on the source, so lazy imports count too."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import simm

PACKAGE = Path(simm.__file__).parent

#: From the bottom up. A module imports from its own layer (without a circle) and from those above it in this list.
LAYERS: dict[str, set[str]] = {
    "leaves": {"", "errors", "constants"},
    "system and vocabulary": {
        "codec", "messages", "layout", "config", "quantities", "startup", "topology", "hashing", "pages", "shm",
        "buffers", "console", "statefile", "greeting", "rails", "fabric", "cuda", "neighbours",
    },
    "structures": {
        "slab", "sizes", "evict", "space", "table", "ledger", "shards", "store", "grants", "reader", "listing",
        "shardmap", "deal", "members", "arenas", "clusterstate", "clusterstatus", "placement",
    },
    "frames and loops": {"rpc", "channel", "ring", "loop", "web", "process", "pace", "metrics", "trace"},
    "paths": {
        "session", "shmput", "tcppath", "stream", "streamput", "upstream", "worker", "verbs", "admin", "cluster",
        "verbs_link", "verbs_wr",
        "endpoint", "windows", "lane", "bounce", "registry", "rdmapath", "rdmaget", "rdmaput", "remote_arena", "gpu",
        "manager_link", "routing", "connect", "local", "member", "mover", "ownworker", "previous", "membership",
        "batch", "breaker",
        "server_pages", "server_options", "worker_slot", "manager_pages", "target", "view", "replicas", "gets", "puts",
        "subscription", "etcd", "coordinator", "pinned", "gpurdma", "gpudirect",
        "arena_regions", "devices", "lane_end", "endpoints", "children",
    },
    "processes and the SDK": {"client", "manager", "dataserver"},
    "faces": {
        "kv", "blocks", "connectors", "cli", "__main__", "doctor", "doctor_rdma", "findings", "status", "demo", "bench",
        "bench_floor", "bench_load", "bench_report", "simulate", "sim", "nodes", "topo",
    },
}  # fmt: skip
LEVEL = {module: level for level, modules in enumerate(LAYERS.values()) for module in modules}

#: Structures over a buffer, and the cluster's state machine: no I/O, no clock, no threads.
PURE = {"codec", "slab", "sizes", "evict", "space", "table", "ledger", "store", "rpc", "cluster", "layout", "shards",
        "grants", "shardmap", "member", "deal", "members", "clusterstate", "clusterstatus",
        "placement", "fabric", "remote_arena", "batch"}
IMPURE = {"asyncio", "io", "logging", "os", "pathlib", "select", "selectors", "signal", "socket", "subprocess",
          "tempfile", "threading", "time"}  # fmt: skip

BANNED = {"pickle", "cPickle", "marshal", "shelve", "yaml", "dill", "cloudpickle", "joblib", "torch"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
#: Adapters run inside of engines that have torch.
TORCH_ALLOWED = {"connectors"}
RUNTIME = {"numpy", "psutil"}


def sources() -> dict[str, ast.Module]:
    """Module -> syntax tree; a subpackage's modules go by its name."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


SOURCES = sources()


def unit(module: str) -> str:
    """What the table calls a module."""
    head = module.split(".")[0]
    return "" if head == "__init__" else head


def imports(tree: ast.Module, module: str) -> set[str]:
    """Absolute names of all that a module imports, anywhere in it."""
    found = set()
    package = ["simm", *module.split(".")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join(base + ([node.module] if node.module else []))
            if start == "simm":
                found.update(f"simm.{alias.name}" for alias in node.names)
            else:
                found.add(start)
    return found


IMPORTS = {module: imports(tree, module) for module, tree in SOURCES.items()}


def own(module: str) -> set[str]:
    """SiMM's modules that a module imports, as the table calls them; a name in ``__init__`` is that."""
    names = {name[5:].split(".")[0] for name in IMPORTS[module] if name.startswith("simm.")}
    known = {unit(each) for each in SOURCES}
    return {name if name in known else "" for name in names}


def test_every_module_has_a_layer() -> None:
    assert not {unit(module) for module in SOURCES} - LEVEL.keys(), "say in LAYERS where it belongs"


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_down(module: str) -> None:
    level = LEVEL[unit(module)]
    up = {name for name in own(module) if LEVEL[name] > level}
    assert not up, f"{module} imports {up} from above"


def test_no_circles() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for name in sorted(own(module)):
                if name in SOURCES:
                    visit(name, (*path, module))
            done.add(module)

    for module in SOURCES:
        visit(module, ())


@pytest.mark.parametrize("module", SOURCES)
def test_nothing_banned_and_nothing_undeclared(module: str) -> None:
    roots = {name.split(".")[0] for name in IMPORTS[module]}
    banned = roots & BANNED - ({"torch"} if unit(module) in TORCH_ALLOWED else set())
    assert not banned
    allowed = set(sys.stdlib_module_names) | RUNTIME | {"simm"}
    if module == "verbs":
        allowed.add("pyverbs")
    if unit(module) in TORCH_ALLOWED:
        return  # what engines bring
    assert not roots - allowed, "a runtime dependency that setup.cfg does not name"


@pytest.mark.parametrize("module", SOURCES)
def test_no_code_from_data(module: str) -> None:
    calls = (node.func for node in ast.walk(SOURCES[module]) if isinstance(node, ast.Call))
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    assert not called & BANNED_CALLS


@pytest.mark.parametrize("module", sorted(PURE))
def test_structures_do_no_io(module: str) -> None:
    assert not {name.split(".")[0] for name in IMPORTS[module]} & IMPURE


def test_the_table_itself_can_fail() -> None:
    """A lazy import from above, and one by another spelling, would be seen."""
    tree = ast.parse("def f():\n    from . import client\n    import simm.kv\n    from simm.worker import Worker")
    assert imports(tree, "table") == {"simm.client", "simm.kv", "simm.worker"}
    assert all(LEVEL[name[5:]] > LEVEL["table"] for name in imports(tree, "table"))
    assert imports(ast.parse("from ..errors import X\nfrom .b import Y"), "connectors.a") == {
        "simm.errors",
        "simm.connectors.b",
    }
