"""Where adapters call SiMM's client, read out of their source, and which of that a test has not reached.

A client and its pins go by the names of ``NAMES`` in adapters, and their methods are called where they are named: what
does not keep to that is reported as a place that no test reaches. So a call that is added to an adapter fails its test
until the test makes the call, and ``faulty_client.py`` makes it fail then.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import simm.connectors
from simm.client import Client
from tests.support.faulty_client import LOCAL

#: What a client, or pins, may be called.
NAMES = frozenset(("client", "_client", "pins"))
#: Fields and properties of both.
FIELDS = frozenset(("checksum", "counters", "deadline_s", "lengths"))
#: Names of a client's methods that other objects have, too.
COMMON = frozenset(("begin", "close", "delete", "exists", "get", "keep", "local", "put", "register", "view"))
#: Functions that make a client. What they meet stops an engine's start, with a sentence.
MAKING = frozenset(("connect", "_connect"))

FOLDER = Path(simm.connectors.__file__).parent


class Site(NamedTuple):
    """A place in a module of ``simm/connectors``: its lines, and the call, or what is wrong with it."""

    module: str
    first: int
    last: int
    call: str
    wrong: str = ""


def _named(node: ast.AST) -> bool:
    """Return whether an expression is a client, or pins, by its name."""
    return (isinstance(node, ast.Name) and node.id in NAMES) or (isinstance(node, ast.Attribute) and node.attr in NAMES)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


#: Methods that only clients have.
_DISTINCT = {name for name in dir(Client) if not name.startswith("_")} - COMMON - LOCAL - FIELDS


class _Visitor(ast.NodeVisitor):
    def __init__(self, module: str) -> None:
        self.module = module
        self.found: list[Site] = []

    def _add(self, node: Any, call: str, wrong: str = "") -> None:
        self.found.append(Site(self.module, node.lineno, node.end_lineno, call, wrong))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name not in MAKING:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        method = node.func
        if isinstance(method, ast.Attribute) and _named(method.value) and not method.attr.startswith("_"):
            if method.attr not in LOCAL:
                self._add(node, method.attr)
            self.visit(method.value)
            for each in (*node.args, *node.keywords):
                self.visit(each)
            return
        if isinstance(method, ast.Attribute) and method.attr in _DISTINCT and not _is_self(method.value):
            self._add(node, method.attr, "a call of a client that has another name")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        known = node.attr.startswith("_") or node.attr in LOCAL | FIELDS | NAMES
        if _named(node.value) and isinstance(node.ctx, ast.Load) and not known:
            self._add(node, node.attr, "a method that is called elsewhere")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            pairs: Iterable[tuple[ast.AST, ast.AST]] = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts)
            for left, right in pairs:
                if _named(right) and not _named(left):
                    self._add(node, ast.unparse(left), "another name for a client")
        self.generic_visit(node)


def sites(*modules: str, source: str | None = None) -> list[Site]:
    """Return where modules of ``simm/connectors`` call a client; ``source`` instead of what the first one has."""
    found = []
    for module in modules:
        visitor = _Visitor(module)
        visitor.visit(ast.parse((FOLDER / f"{module}.py").read_text() if source is None else source))
        found += visitor.found
    return found


def unreached(wanted: Iterable[Site], reached: Iterable[tuple[str, str, int]]) -> list[Site]:
    """Return the sites of which no call was made: ``reached`` has names, modules and lines."""
    made = set(reached)
    return [
        site for site in wanted
        if site.wrong or not any(
            name == site.call and module == site.module and site.first <= line <= site.last
            for name, module, line in made
        )
    ]  # fmt: skip


def methods(adapter: type) -> set[str]:
    """Return what an engine can call of an adapter: the public methods that its class itself has."""
    return {name for name, each in vars(adapter).items() if inspect.isfunction(each) and not name.startswith("_")}


@contextmanager
def watched(adapter: type) -> Iterator[set[str]]:
    """Yield the names of those methods of a class that were called, as they are."""
    called: set[str] = set()
    originals = {name: vars(adapter)[name] for name in methods(adapter)}

    def noting(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def run(*given: Any, **named: Any) -> Any:
            called.add(name)
            return original(*given, **named)

        return run

    for name, original in originals.items():
        setattr(adapter, name, noting(name, original))
    try:
        yield called
    finally:
        for name, original in originals.items():
            setattr(adapter, name, original)
