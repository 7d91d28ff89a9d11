"""Fork hooks: what a forked child does before its own code runs, in one order for the whole process.

A child inherits sockets, locks and objects that only its parent may use. Each module and object that has some registers
a hook that gives them up. The order in a child:

1. Functions, in the order of registration. A module registers after those that it imports, so memory is dealt with
   before the drivers that use it, and drivers before the pools above them.
2. Methods of objects, newest object first. A part is made after its owner, so the part comes first.
3. What holds a lock across the fork releases it (:func:`hold`, :func:`around`).

A hook that fails does not stop the others; its traceback goes to stderr.
Garbage collection is paused meanwhile: it could finalise an object of the parent whose hook has not run yet.

No hook may wait for a lock, as the thread that held it does not exist in the child. It makes a new lock instead.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import traceback
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, Final

_FUNCTIONS: Final[list[Callable[[], Any]]] = []
#: By number, in the order of registration. An entry goes with its object.
_METHODS: Final[dict[int, tuple[weakref.ref[Any], Callable[[Any], Any]]]] = {}
_numbers: Final = itertools.count()
#: By id; see :func:`keep_forever`.
_KEPT: Final[dict[int, Any]] = {}


def in_child(hook: Callable[[], Any]) -> None:
    """Call ``hook`` in every forked child. Takes no lock; O(1).

    A method is called while its object lives, which the registration does not prolong.
    """
    if isinstance(hook, MethodType):
        number = next(_numbers)
        # Not a WeakMethod: its callback fails, and the interpreter says so, for an object that dies at exit.
        reference = weakref.ref(hook.__self__, functools.partial(_forget, _METHODS, number))
        _METHODS[number] = reference, hook.__func__
    else:
        _FUNCTIONS.append(hook)


def _forget(methods: dict[int, Any], number: int, _: object) -> None:
    methods.pop(number, None)


def hold(acquire: Callable[[], Any], release: Callable[[], Any]) -> None:
    """Hold a lock across each fork, so that a child finds whole what it guards."""
    around(acquire, release, release)


def around(before: Callable[[], Any], in_parent: Callable[[], Any], in_child: Callable[[], Any]) -> None:
    """Call ``before`` in the parent before each fork, and the others after it; ``in_child`` after all hooks above.

    ``in_parent`` is also called if the fork fails.
    """
    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def keep_forever(obj: Any) -> bool:
    """Keep ``obj`` until the process ends, so that its finalizer never runs. Return False if it was kept already.

    For objects whose finalizer would free what this process does not own, or what a device may still use.
    """
    if id(obj) in _KEPT:
        return False
    _KEPT[id(obj)] = obj
    return True


def _run() -> None:
    collecting = gc.isenabled()
    gc.disable()
    try:
        methods: list[Callable[[], Any]] = [
            functools.partial(function, found)
            for reference, function in reversed(_METHODS.values()) if (found := reference()) is not None
        ]  # fmt: skip
        for hook in (*_FUNCTIONS, *methods):
            try:
                hook()
            except BaseException:
                traceback.print_exc()
    finally:
        if collecting:
            gc.enable()


os.register_at_fork(after_in_child=_run)
