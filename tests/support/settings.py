"""Settings of engines that are no plain values, in pairs that differ in one thing, deep inside.

As a program, it prints the identity of each.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import datetime
import enum
import errno
import functools
import operator
import pathlib
import re
import types
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any, Optional

import numpy as np

from simm.connectors.keyspace import identity


class Held:
    """One without a text of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> Any:
        return self.value


@dataclasses.dataclass
class Data:
    """One whose text leaves something out."""

    shown: Any
    hidden: Any = dataclasses.field(default=None, repr=False)


class Slots:
    """One that has no ``__dict__``."""

    __slots__ = ("__value", "unset")

    def __init__(self, value: Any) -> None:
        self.__value = value


class Terse:
    """One whose text says nothing."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Terse()"


def closed_over(value: Any) -> Callable[[], Any]:
    """Return a function with a closure."""
    return lambda: value


def with_default(value: Any) -> Callable[..., Any]:
    """Return a function with defaults."""

    def function(one: Any = value, *, other: Any = value) -> Any:
        return one, other

    return function


def member(value: Any) -> Any:
    """Return a member of an enumeration of its own."""
    return enum.Enum("Member", {"ONE": value}).ONE  # type: ignore[attr-defined]


def in_class(value: Any) -> type:
    """Return a class with a value in its body."""
    return type("InClass", (), {"value": value})


def loop(value: Any) -> Any:
    """Return a mapping that holds itself, and an object that holds it."""
    made: dict[str, Any] = {"value": value}
    made["self"], made["held"] = made, Held(made)
    return made


def called(call: Any, base: type = object) -> Any:
    """Return an object whose class has something in the place of ``__call__``."""
    return type("Called", (base,), {"__call__": call})()


def assigned(value: Any) -> Any:
    """Return an object that was given what it would else work out."""

    class Config(Held):
        @functools.cached_property
        def size(self) -> int:
            return 2

    made = Config(1)
    made.size = value
    return made


def abstract(value: Any) -> type:
    """Return an abstract class that was asked for its instances, as classes in a class are."""

    class Abstract(abc.ABC):
        inner = in_class(value)

        @abc.abstractmethod
        def method(self) -> None: ...

    assert not isinstance(1, Abstract)
    return Abstract


def handled(covered: bool) -> Callable[..., Any]:
    """Return one of two functions whose bytecode is equal, but for what a handler covers."""

    def within(first: Any, second: Any) -> None:
        try:
            first()
            second()
        except ValueError:
            first()

    def beside(first: Any, second: Any) -> None:
        try:
            first()
        except ValueError:
            first()
        else:
            second()

    made = within if covered else beside
    made.__name__ = made.__qualname__ = "handled"
    return made


def caused(cause: Exception) -> Exception:
    """Return an exception that has a cause."""
    made = ValueError()
    made.__cause__ = cause
    return made


class Folder:
    """One that has a path beside other things."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __fspath__(self) -> str:
        return "/a"


class Zone(datetime.tzinfo):
    """One whose text says nothing."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Zone()"

    def utcoffset(self, _: Any) -> datetime.timedelta:
        return datetime.timedelta(0)

    def tzname(self, _: Any) -> str:
        return ""

    def dst(self, _: Any) -> None:
        return None


class Mode(enum.Enum):
    """Two members."""

    ONE = 1
    OTHER = 2


def error(value: str) -> OSError:
    """Return an error of a file, whose arguments leave the file out."""
    return OSError(errno.ENOENT, "none", value)


def record(value: int) -> Any:
    """Return a record whose text leaves the middle out."""
    made = np.zeros(1, [("values", np.int64, 5000)])
    made["values"][0, 2500] = value
    return made[0]


def array(value: int) -> Any:
    """Return an array whose text leaves the middle out."""
    made = np.zeros(5000, np.int64)
    made[2500] = value
    return made


def _code(of: str) -> Callable[..., Any]:
    functions: dict[str, Callable[..., Any]] = {
        "constant": lambda config: 1, "other constant": lambda config: 2, "name": lambda config: config.a,
        "other name": lambda config: config.b, "set": lambda config: config in {"q", "k", "v"},
        "other set": lambda config: config in {"q", "k", "w"}, "nested": lambda config: lambda: 1,
        "other nested": lambda config: lambda: 2,
    }  # fmt: skip
    return functions[of]


#: Two values that differ, and have a set in them whose order a process chooses.
_ONE, _OTHER = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_proj", "k_proj", "v_proj", "x_proj"}
_MAKERS: dict[str, Callable[[Any], Any]] = {
    "set": lambda value: value, "list": lambda value: [value], "mapping": lambda value: {"modules": value},
    "key": lambda value: {frozenset(value): 1}, "object": Held, "object in object": lambda value: Held(Held(value)),
    "list in object": lambda value: Held([Held(value)]), "dataclass": Data,
    "dataclass of object": lambda v: Data(Held(v)), "bound method": lambda v: Held(v).method,
    "hidden field": lambda value: Data(1, value), "slots": Slots, "terse": Terse,
    "partial": lambda value: functools.partial(_code("constant"), value), "closure": closed_over,
    "partial of a method": lambda value: functools.partial(Held(value).method), "defaults": with_default,
    "wrapped": lambda value: functools.wraps(closed_over(value))(lambda: 1), "class": in_class, "loop": loop,
    "cached": lambda value: functools.lru_cache(closed_over(value)), "namespace": lambda v: SimpleNamespace(value=v),
    "proxy": lambda value: MappingProxyType({"value": value}), "queue": lambda value: collections.deque([Held(value)]),
    "member": member, "exception": lambda value: ValueError(value), "array of objects": lambda v: np.array([Held(v)]),
    "built-in method": lambda value: [sorted(value)].__len__, "values": lambda value: {"a": Held(value)}.values(),
    "text with more": lambda value: type("Text", (str,), {"__init__": lambda self, _: setattr(self, "v", value)})("x"),
    "call: static": lambda value: called(staticmethod(closed_over(value))),
    "call: partial": lambda value: called(functools.partial(closed_over(1), value)),
    "call: of a list": lambda value: called(closed_over(value), list), "assigned": assigned, "abstract class": abstract,
    "call: of a class": lambda value: type(called(staticmethod(closed_over(value)))),
    "object in a class": lambda value: in_class(Terse(value)), "class in a class": lambda v: in_class(in_class(v)),
    "method's caller": lambda v: operator.methodcaller("method", Terse(v)), "folder": Folder,
    "item's getter": lambda value: operator.itemgetter(Terse(value)),
    "alias": lambda value: types.GenericAlias(list, (Terse(value),)),
    "typing's alias": lambda value: Optional[in_class(value)],  # noqa: UP045
    "union": lambda value: in_class(value) | None, "cause": lambda value: caused(ValueError(value)),
    "time zone": lambda value: datetime.datetime(2020, 1, 1, tzinfo=Zone(value)),
}  # fmt: skip
#: Values of a class's body that are neither code nor plain.
_IN_CLASSES: list[tuple[Any, Any]] = [
    (Mode.ONE, Mode.OTHER), (np.float32(1), np.float32(2)), (np.dtype("f4"), np.dtype("f8")), (None, 0), (int, float),
    (np.zeros(1), np.ones(1)), (pathlib.PurePosixPath("/a"), pathlib.PurePosixPath("/b")), (len, max),
]  # fmt: skip
PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    **{name: lambda make=make: (make(_ONE), make(_OTHER)) for name, make in _MAKERS.items()},  # type: ignore[misc]
    **{f"code: {of}": lambda of=of: (_code(of), _code(f"other {of}"))  # type: ignore[misc]
       for of in ("constant", "name", "set", "nested")},
    **{f"in a class: {type(one).__name__}": lambda one=one, other=other: (in_class(one), in_class(other))  # type: ignore
       for one, other in _IN_CLASSES},
    "handler": lambda: (handled(True), handled(False)), "record": lambda: (record(1), record(2)),
    "length": lambda: (collections.deque([1], 3), collections.deque([1], 4)),
    "file of an error": lambda: (error("a"), error("b")),
    "attribute's getter": lambda: (operator.attrgetter("a"), operator.attrgetter("b")),
    "ordered": lambda: tuple(collections.OrderedDict.fromkeys(each) for each in ("ab", "ba")),  # type: ignore
    "array": lambda: (array(1), array(2)),
    "pattern": lambda: (re.compile("a" * 300 + "b"), re.compile("a" * 300 + "c")),
    "path": lambda: (pathlib.PurePosixPath("/a"), pathlib.PurePosixPath("/b")),
}  # fmt: skip


if __name__ == "__main__":
    for name, made in PAIRS.items():
        print(name, *(identity({"setting": each}) for each in made()))
