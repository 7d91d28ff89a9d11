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


def sources() -> dict[str, str]:
    """Return module -> text, by dotted name below ``simm``; a package goes by its own name, ``simm`` itself by ""."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found
