"""Settings of engines that are no plain values, in pairs that differ in one thing, deep inside.

As a program, it prints the identity of each.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import pathlib
import re
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

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
}  # fmt: skip
PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    **{name: lambda make=make: (make(_ONE), make(_OTHER)) for name, make in _MAKERS.items()},  # type: ignore[misc]
    **{f"code: {of}": lambda of=of: (_code(of), _code(f"other {of}"))  # type: ignore[misc]
       for of in ("constant", "name", "set", "nested")},
    "array": lambda: (array(1), array(2)),
    "pattern": lambda: (re.compile("a" * 300 + "b"), re.compile("a" * 300 + "c")),
    "path": lambda: (pathlib.PurePosixPath("/a"), pathlib.PurePosixPath("/b")),
}  # fmt: skip


if __name__ == "__main__":
    for name, made in PAIRS.items():
        print(name, *(identity({"setting": each}) for each in made()))
