"""A module imported over fakes of what it imports."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType


@contextlib.contextmanager
def imported_over(name: str, modules: Mapping[str, ModuleType]) -> Iterator[ModuleType]:
    """Import a module anew with these in place of others, and put back afterwards what was there."""
    before = {each: sys.modules.get(each) for each in (*modules, name)}
    sys.modules.update(modules)
    sys.modules.pop(name, None)
    try:
        yield importlib.import_module(name)
    finally:
        for each, module in before.items():
            if module is None:
                sys.modules.pop(each, None)
            else:
                sys.modules[each] = module
