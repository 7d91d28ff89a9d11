"""Nothing in ``simm/`` is there for tests alone: each function and method is named by something else.

Something else is: ``simm/`` itself, a document or an example, a benchmark, or the list of what engines and Python's
protocols call. The check goes by names, so it overlooks a method that shares its name with one in use.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from tests.support.sources import PACKAGE, parse, sources

ROOT: Final = PACKAGE.parent
#: Where a name counts as used.
TEXTS: Final = ("README.md", "docs/*.md", "deploy/**/*", "benchmarks/*.py", "setup.cfg", "scripts/*")
#: Named by nobody here, and why each is there.
ALLOWED: Final = {
    "connectors": "engines call what they load from there",
    "control.etcd._Timed.makefile": "http.client calls it",
    "control.etcd._TimedReader.readinto": "io.BufferedReader calls it",
    "schemes.sglang.event_hash": "public, for routers that read an engine's events",
    "schemes.vllm.event_hash": "public, for routers that read an engine's events",
    "sdk.ops.kv_memory.Block.as_ref": "of the API of simm.kv",
    "sdk.ops.kv_memory.BlockView.as_ref": "of the API of simm.kv",
    "sdk.ops.kv_memory.BlockView.from_tensor": "of the API of simm.kv",
    "sdk.calls.kv_pins.PinnedKeys.read_async": "the awaitable form of a documented method",
    "sdk.ops.pins.Pins.read_async": "the awaitable form of a documented method",
}


@functools.cache
def names_in(text: str) -> Counter[str]:
    """Return how often each name is used in a module. Definitions do not count, texts of one dotted name do."""
    names: Counter[str] = Counter()
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Name):
            names[node.id] += 1
        elif isinstance(node, ast.Attribute):
            names[node.attr] += 1
        elif isinstance(node, ast.alias):
            names[node.name.split(".")[-1]] += 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.:]+", node.value):
            names.update(re.split(r"[.:]", node.value))
    return names


def functions_of(text: str) -> Iterable[tuple[str, str]]:
    """Yield (dotted name, name) of each function and method of a module, but for those of other functions."""

    def walk(node: ast.AST, above: str) -> Iterable[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{above}{child.name}.")
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield above + child.name, child.name
            elif not isinstance(child, ast.expr):
                yield from walk(child, above)

    return walk(parse(text), "")


def unused(modules: Mapping[str, str], texts: Iterable[str], allowed: Iterable[str]) -> list[str]:
    """Return the functions of modules (name to text) which neither these nor other texts name, nor ``allowed``."""
    used: Counter[str] = Counter()
    for text in modules.values():
        used.update(names_in(text))
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    exempt = tuple(f"{name}." for name in allowed)
    return sorted(
        f"{module}.{function}" for module, text in modules.items() for function, name in functions_of(text)
        if not name.startswith("__") and not used[name] and name not in words
        and not f"{module}.{function}.".startswith(exempt)
    )  # fmt: skip


def outside() -> list[str]:
    """Return the texts of :data:`TEXTS`."""
    paths = [path for pattern in TEXTS for path in ROOT.glob(pattern)]
    return [path.read_text(errors="replace") for path in paths if path.is_file()]


def test_nothing_is_there_for_tests_alone() -> None:
    assert unused(sources(), outside(), ALLOWED) == []


def test_what_is_allowed_is_there_and_unused() -> None:
    found = unused(sources(), outside(), ())
    assert [name for name in ALLOWED if not any(f"{each}.".startswith(f"{name}.") for each in found)] == []


def test_an_injected_function_is_found() -> None:
    """The positive control: a function and a method that nobody names, and the same with one use of each kind."""
    module = "def never_named_f(): ...\nclass C:\n    def never_named_m(self): ...\n"
    assert unused({"m": module}, [], ()) == ["m.C.never_named_m", "m.never_named_f"]
    assert unused({"m": module, "n": "from m import never_named_f\nx.never_named_m()"}, [], ()) == []
    assert unused({"m": module}, ["`never_named_f` and never_named_m()"], ()) == []
    assert unused({"m": module}, [], ("m.C", "m.never_named_f")) == []
    assert unused({"m": module, "n": "getattr(c, 'never_named_m'), 'm:never_named_f'"}, [], ()) == []
