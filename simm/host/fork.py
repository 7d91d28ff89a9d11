"""Fork hooks: what a forked child does before its own code runs, in one order for the whole process.

A child inherits sockets, locks and objects that only its parent may use. Each module and object that has some registers
a hook that gives them up. The order in a child:

1. Functions, in the order of registration. A module registers after those that it imports, so memory is dealt with
   before the drivers that use it, and drivers before the pools above them.
2. Methods of objects, newest object first. A part is made after its owner, so the part comes first.
3. A lock that is held across the fork is made anew (:func:`hold`).

A hook that fails, or that an interrupt ends, does not stop the others; its traceback goes to stderr.
Garbage collection is paused meanwhile: it could finalise an object of the parent whose hook has not run yet.

No hook may wait for a lock, as the thread that held it does not exist in the child. It makes a new lock instead.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import threading
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


def hold(lock: threading.RLock) -> None:
    """Hold a reentrant lock across each fork, so that a child finds whole what it guards.

    Only one that its holders never keep during I/O, as all forks of the process wait for it. What was registered by
    :func:`around` before runs with the lock held.

    An interrupt may end the wait for it. The fork then goes on without the lock: :func:`holds` says so. The release in
    the parent fails, which the interpreter prints, and changes nothing, as another thread has it.

    A child has none of the threads that may have it, so it makes the lock anew. That also ends what its own thread has:
    the handler of a signal may have forked while it did, and the child's other threads would wait for ever. If such a
    child returns from the handler, the release there raises RuntimeError.

    These are C functions: an interrupt cannot end those before they have begun, as it can a Python function.
    """
    renew = lock._at_fork_reinit  # type: ignore[attr-defined]  # as Python's own modules do
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=renew)


def holds(lock: threading.RLock) -> bool:
    """Return whether this thread has the lock."""
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return]


def around(before: Callable[[], Any], in_parent: Callable[[], Any]) -> None:
    """Call ``before`` in the parent before each fork, and ``in_parent`` there after it, also if the fork fails.

    An interrupt may end either of them.
    """
    os.register_at_fork(before=before, after_in_parent=in_parent)


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
        left = iter((*_FUNCTIONS, *methods))
        while True:
            try:
                for hook in left:
                    hook()
                break
            except BaseException:  # of a hook, or an interrupt between two: the others have their turn
                traceback.print_exc()
    finally:
        if collecting:
            gc.enable()


os.register_at_fork(after_in_child=_run)
