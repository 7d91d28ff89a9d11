"""The source of ``simm/``, for tests that check rules on it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Final

import simm

PACKAGE: Final = Path(simm.__file__).parent

#: Parses a text once in a process.
parse: Final = functools.cache(ast.parse)


@functools.cache
def statements(text: str) -> list[ast.stmt]:
    """Return all statements of a module, nested ones too.

    Imports and functions are such. ``ast.walk`` yields expressions as well, and takes longer for these than the parser.
    """
    found: list[ast.stmt] = []
    left: list[ast.AST] = [parse(text)]
    while left:
        node = left.pop()
        if isinstance(node, ast.stmt):
            found.append(node)
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            left += getattr(node, name, ())
    return found


def forget() -> None:
    """Give up what was parsed: a million nodes, which the garbage collector would look at in each pass."""
    parse.cache_clear()
    statements.cache_clear()


def sources() -> dict[str, str]:
    """Return module -> text, by dotted name below ``simm``; a package goes by its own name, ``simm`` itself by ""."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found
