"""Texts of engines' settings, which are the same in all processes and differ where settings do.

Most settings are plain values, and their text is what ``repr`` gives. Some have objects or functions in them, whose
``repr`` has an address and drops what they hold. So these are walked:

* of an object count the name of its class, what it holds in ``__dict__`` and slots, and its ``__call__``;
* a result that an object keeps counts as what it holds: nothing tells it from a value that was assigned;
* of a function count its name, bytecode, constants, defaults, attributes and closure, of a bound method its object;
* of a class count its name, and what its own body holds, of names with two underscores at both ends only the code;
* of an object that is not written in Python count its text, unless that has an address, and the objects that it holds;
* sets count in the order of their texts, and so do the items of what compares as a plain dict does.

What a function calls or reads from its module counts by its name alone. So do the bases of a class, and the class of an
object. What cannot be told, or goes beyond the bounds here, has a text that no other call returns: nothing is shared.
Bytecode differs between versions of Python: engines on different ones do not share what has code.
"""

from __future__ import annotations

import abc
import collections
import datetime
import enum
import functools
import gc
import hashlib
import json
import logging
import math
import operator
import os
import pathlib
import re
import secrets
import struct
import threading
import types
from collections.abc import Iterable, Iterator, Mapping, Set, ValuesView
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

#: What is walked of one value at most: levels, values, and characters and bytes of those that hold no others.
_DEPTH_MAX: Final = 50
_VALUES_MAX: Final = 200_000
_BYTES_MAX: Final = 64 << 20

#: What the text of a function, and of an object that has no text of its own, differs by in each process.
_ADDRESS: Final = re.compile(r"\b0x[0-9a-fA-F]{5,}")

#: Types whose ``repr`` says all there is. Of a subclass that of the base does, beside what its object holds.
_BASES: Final = (str, int, float, complex, bytes)
_PLAIN: Final = frozenset({*_BASES, bool, type(None), type(...)})
_HEAP_TYPE: Final = 1 << 9
_MANAGED_DICT: Final = 1 << 4
_POINTER: Final = struct.calcsize("P")
_LOCKS: Final = (type(threading.Lock()), type(threading.RLock()))
#: What counts of a class's body under names with two underscores at both ends. The rest of these is Python's own.
_CODE: Final = (
    types.FunctionType, staticmethod, classmethod, property, functools.partial, functools.partialmethod,
    functools._lru_cache_wrapper,
)  # fmt: skip
#: What makes room for a value in each object, and holds none.
_ROOM: Final = (types.MemberDescriptorType, types.GetSetDescriptorType)
#: Mappings that are equal whatever the order of their items.
_UNORDERED: Final = (dict, collections.defaultdict, collections.Counter)


class Described(NamedTuple):
    """A value's text, and what there is to say of it."""

    text: str
    #: Whether something counts by its name alone.
    code: bool
    #: Why the text is of this call only; empty if it is not.
    unknown: str


class _Unknown(Exception):
    """A value of which no text tells all."""


def described(value: Any) -> Described:
    """Return a value's text, equal in all processes. O(value), up to the bounds above.

    Never raises an Exception. The text is of this call alone for an iterator, for what raises when it is read, and for
    what is too much.
    """
    walk = _Walk()
    try:
        plain = type(value) in _PLAIN or _is_scalar(value)
        text = str(value) if plain else walk.text(value)
        # A fact that is a text counts as what it says, as numbers do that come as texts.
        if isinstance(value, str) and not isinstance(value, enum.Enum) and text == str.__repr__(value):
            text = str.__str__(value)
        return Described(text, walk.code, "")
    except _Unknown as exc:
        reason = str(exc)
    except Exception as exc:  # of the engine's own objects, in whatever they do when they are read
        reason = f"{type(exc).__name__} when it is read"
    return Described(f"unknown {secrets.token_hex(16)}", walk.code, reason)


@dataclass(frozen=True, repr=False)
class Hidden:
    """A setting that may hold secrets. It counts as any other one; its ``repr``, for logs, has a digest alone."""

    value: Any

    def __repr__(self) -> str:
        text = described(self.value).text
        return f"<digest {hashlib.blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=12).hexdigest()}>"


def _name(thing: Any) -> str:
    """Return the name of a class or function, with its module as far as it has one."""
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}"


class _Walk:
    """One walk through a value."""

    def __init__(self) -> None:
        self.code = False
        self._values = self._bytes = 0
        #: The values that hold the one which is looked at, by id: the level of each. They live for as long.
        self._above: dict[int, int] = {}

    def text(self, value: Any) -> str:
        """Return the text of a value within the one that is walked."""
        self._values += 1
        if self._values > _VALUES_MAX:
            raise _Unknown(f"more than {_VALUES_MAX} values")
        if type(value) in _PLAIN:
            return self._leaf(repr(value))
        level = self._above.get(id(value))
        if level is not None:
            return f"<the one at level {level}>"
        if len(self._above) >= _DEPTH_MAX:
            raise _Unknown(f"more than {_DEPTH_MAX} levels")
        self._above[id(value)] = len(self._above)
        try:
            found = self._of_values(value)
            if found is None:
                found = self._of_code(value)
            return self._of_object(value) if found is None else found
        finally:
            del self._above[id(value)]

    def _leaf(self, text: str) -> str:
        self._spend(len(text))
        return text

    def _spend(self, size: int) -> None:
        self._bytes += size
        if self._bytes > _BYTES_MAX:
            raise _Unknown(f"more than {_BYTES_MAX} bytes")

    def _of_values(self, value: Any) -> str | None:
        """Return the text of a value without code, or of one that holds others; None if it is neither."""
        kind = type(value)
        if isinstance(value, enum.Enum):
            parts = [f"{_name(kind)}.{value._name_}: {self.text(value._value_)}", *self._calls(kind)]
            more = {name: each for name, each in vars(value).items() if not (name[0] == name[-1] == "_")}
            return f"<{', '.join(parts + ([self.text(more)] if more else []))}>"
        for base in _BASES:
            if isinstance(value, base):
                return self._with_state(value, self._leaf(base.__repr__(value)), bare=True)
        if isinstance(value, Mapping):
            pairs = [(self.text(key), self.text(each)) for key, each in value.items()]
            if kind in _UNORDERED:
                pairs.sort()
            body = f"{{{', '.join(f'{key}: {each}' for key, each in pairs)}}}"
            if isinstance(value, collections.defaultdict):
                body += f", {self.text(value.default_factory)}"
            return body if kind is dict else self._with_state(value, body)
        if isinstance(value, list | tuple | collections.deque | ValuesView):
            texts = [self.text(each) for each in value]
            if kind is tuple:
                return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
            body = f"[{', '.join(texts)}]"
            if isinstance(value, collections.deque):
                body += f", {value.maxlen}"
            return body if kind is list else self._with_state(value, body)
        if isinstance(value, Set):
            body = f"{{{', '.join(sorted(self.text(each) for each in value))}}}" if value else "set()"
            return body if kind in (set, frozenset) else self._with_state(value, body)
        if isinstance(value, pathlib.PurePath):
            return self._with_state(value, self.text(pathlib.PurePath.__str__(value)))
        if isinstance(value, BaseException):  # whose arguments have no name of a file
            owners = kind.__mro__[: kind.__mro__.index(BaseException)]
            native = [vars(each).items() for each in owners if not each.__flags__ & _HEAP_TYPE]
            names = {name for items in native for name, slot in items if isinstance(slot, _ROOM)}
            more = {name: getattr(value, name, None) for name in names}
            return self._with_state(value, f"{self.text(value.args)}, {self.text(more)}, {self.text(value.__cause__)}")
        if isinstance(value, slice):
            return f"slice{self.text((value.start, value.stop, value.step))}"
        if isinstance(value, re.Pattern):
            return f"{_name(kind)}({self.text(value.pattern)}, {value.flags})"
        if isinstance(value, np.ndarray | np.void) and not value.dtype.hasobject:
            self._spend(value.nbytes)
            digest = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=16).hexdigest()
            return self._with_state(value, f"{value.dtype!r}, {value.shape}, {digest}")
        if _is_scalar(value):
            return self._leaf(repr(value))
        if isinstance(value, np.dtype):
            return self._leaf(str(value))
        if hasattr(kind, "tolist") and hasattr(kind, "shape") and hasattr(kind, "dtype"):  # a tensor
            if math.prod(value.shape) > _VALUES_MAX:
                raise _Unknown(f"a tensor of more than {_VALUES_MAX} values")
            return self._with_state(value, f"{value.dtype}, {tuple(value.shape)}, {self.text(value.tolist())}")
        return None

    def _of_code(self, value: Any) -> str | None:
        """Return the text of a function, a class or what wraps one; None if it is none."""
        if isinstance(value, functools.partial):
            parts = [self.text(each) for each in (value.func, value.args, value.keywords)]
            return self._with_state(value, ", ".join(parts))
        if isinstance(value, staticmethod | classmethod):
            return f"{type(value).__name__}({self.text(value.__func__)})"
        if isinstance(value, property):
            return self._with_state(value, ", ".join(map(self.text, (value.fget, value.fset, value.fdel))))
        if isinstance(value, types.GenericAlias):
            return self._with_state(value, f"{self.text(value.__origin__)}, {self.text(value.__args__)}")
        if isinstance(value, types.UnionType):
            return self._with_state(value, self.text(value.__args__))
        if isinstance(value, operator.attrgetter | operator.itemgetter | operator.methodcaller):
            self.code = True
            return self._with_state(value, self.text(value.__reduce__()[1:]))
        if isinstance(value, types.ModuleType | logging.Logger):
            self.code = True
            return f"{_name(type(value))}({getattr(value, '__name__', '') or getattr(value, 'name', '')})"
        if isinstance(value, types.FunctionType):
            self.code = True
            cells = [self._of_cell(cell) for cell in value.__closure__ or ()]
            parts = [self._of_bytecode(value.__code__), self.text(value.__defaults__), self.text(value.__kwdefaults__)]
            return f"{_name(value)}({', '.join([*parts, *cells, *self._state(value)])})"
        if isinstance(value, types.CodeType):
            self.code = True
            return self._of_bytecode(value)
        if isinstance(value, types.MethodType):
            self.code = True
            return f"{self.text(value.__func__)} of {self.text(value.__self__)}"
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            self.code = True
            owner = value.__self__
            return f"{_name(value)} of {'' if isinstance(owner, types.ModuleType) else self.text(owner)}"
        if isinstance(value, functools._lru_cache_wrapper):
            return self._with_state(value, "cached")  # whose __dict__ has the function
        if isinstance(value, type):
            self.code = True
            if not value.__flags__ & _HEAP_TYPE:
                return _name(value)
            bases = ", ".join(_name(base) for base in value.__bases__)
            body = [
                f"{name}={self.text(each)}" for name, each in sorted(vars(value).items())
                if not isinstance(each, _ROOM) and not _is_cache(value, name)
                and (isinstance(each, _CODE) or not (name.startswith("__") and name.endswith("__")))
            ]  # fmt: skip
            return f"{_name(value)}({bases}: {', '.join(body)})"
        return None

    def _of_cell(self, cell: types.CellType) -> str:
        try:
            return self.text(cell.cell_contents)
        except ValueError:
            return "<empty>"

    def _of_bytecode(self, code: types.CodeType) -> str:
        """Return a digest of what a function does, without file and lines."""
        self._spend(len(code.co_code))
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        table = getattr(code, "co_exceptiontable", b"").hex()  # says what a handler covers, where the code does not
        text = f"{code.co_code.hex()} {table} {names} {counts} {self.text(code.co_consts)}"
        return f"<code {hashlib.blake2b(text.encode('utf-8', 'surrogatepass'), digest_size=12).hexdigest()}>"

    def _of_object(self, value: Any) -> str:
        """Return the text of any other object. Raises _Unknown if it may hold what is not seen."""
        kind = type(value)
        if kind in _LOCKS:
            return _name(kind)
        owner, own = next((each, vars(each)["__repr__"]) for each in kind.__mro__ if _is_native_text(each))
        silent = next(each for each in kind.__mro__ if "__repr__" in vars(each)) is object
        self.code = self.code or silent
        if not _is_transparent(kind):
            text = "" if owner is object else self._leaf(own(value))
            # An iterator's text says where it stands at most, and an entry's in a folder not which folder.
            if not text or _ADDRESS.search(text) or isinstance(value, Iterator | os.DirEntry):
                raise _Unknown(f"{_name(kind)} does not say what it holds")
            return self._with_state(value, ", ".join([text, *self._beneath(value)]), bare=owner is kind)
        state, parts = self._state(value), self._calls(kind)
        if not state and not silent:
            text = self._leaf(repr(value))
            parts += [] if _ADDRESS.search(text) else [text]
        return f"{_name(kind)}({', '.join([*parts, *state])})"

    def _beneath(self, value: Any) -> list[str]:
        """Return the texts of what an object holds of which Python shows only a text, that its class may write."""
        if isinstance(value, datetime.datetime | datetime.time):  # which do not tell the collector
            return [] if value.tzinfo is None else [self.text(value.tzinfo)]
        named = _named(value)
        seen = {id(type(value)), id(named), *map(id, named.values())}
        return [self.text(each) for each in gc.get_referents(value) if id(each) not in seen]

    def _calls(self, kind: type) -> list[str]:
        """Return the text of what an object of a class does when it is called; none if that is Python's own."""
        call = next((vars(each)["__call__"] for each in kind.__mro__ if "__call__" in vars(each)), None)
        return [] if call is None or isinstance(call, types.WrapperDescriptorType) else [f"calls {self.text(call)}"]

    def _with_state(self, value: Any, body: str, *, bare: bool = False) -> str:
        """Return the text of an object that also has a body. ``bare``: it is the body if there is nothing else."""
        state = [*self._calls(type(value)), *self._state(value)]
        return body if bare and not state else f"{_name(type(value))}({', '.join([body, *state])})"

    def _state(self, value: Any) -> list[str]:
        """Return the texts of what an object holds under names."""
        kind, held = type(value), []
        for owner in kind.__mro__:
            # Paths keep their hash and parts in slots, once they were asked for them.
            if "__slots__" not in vars(owner) or owner.__module__.partition(".")[0] == "pathlib":
                continue
            for name, slot in vars(owner).items():
                if isinstance(slot, types.MemberDescriptorType):
                    try:
                        held.append((name, slot.__get__(value, kind)))
                    except AttributeError:
                        continue  # not set
        held += [(str(name), each) for name, each in _named(value).items()]
        return sorted(f"{name}={self.text(each)}" for name, each in held)


def _named(value: Any) -> dict[Any, Any]:
    """Return an object's own ``__dict__``; empty if it has none."""
    try:
        named = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return named if type(named) is dict else dict(named)


def _is_scalar(value: Any) -> bool:
    """Return whether a value is one of numpy's whose ``repr`` says all: that of a record leaves out."""
    return isinstance(value, np.generic) and not isinstance(value, np.void) and not value.dtype.hasobject


def _is_cache(kind: type, name: str) -> bool:
    """Return whether a name in a class's body is that of what it was asked for: other in each process."""
    if isinstance(kind, enum.EnumMeta):
        return name == "_value2member_map_"
    return isinstance(kind, abc.ABCMeta) and name == "_abc_impl"


def _is_native_text(kind: type) -> bool:
    """Return whether a class has a ``__repr__`` that is not written in Python, which so shows what Python cannot."""
    return "__repr__" in vars(kind) and not isinstance(vars(kind)["__repr__"], types.FunctionType)


def _is_transparent(kind: type) -> bool:
    """Return whether all that an object of a class holds is under names: it has no room for more."""
    slots = sum(
        isinstance(each, types.MemberDescriptorType)
        for owner in kind.__mro__ if "__slots__" in vars(owner) for each in vars(owner).values()
    )  # fmt: skip
    slots += kind.__dictoffset__ != 0 and not kind.__flags__ & _MANAGED_DICT
    slots += kind.__weakrefoffset__ > 0
    return kind.__itemsize__ == 0 and kind.__basicsize__ <= object.__basicsize__ + slots * _POINTER


def contents_of(path: str) -> str:
    """Return a digest of a file's contents; the path itself if it cannot be read.

    Two hosts may have other files under one path, or the same file under two.
    """
    try:
        return hashlib.blake2b(pathlib.Path(path).read_bytes(), digest_size=12).hexdigest()
    except OSError:
        return path


def of_environment(names: Iterable[str]) -> dict[str, str]:
    """Return what these variables of the environment say, without those that are not set, or empty.

    Of a variable that names a file the file's contents count.
    """
    return {name: contents_of(text) for name in names if (text := os.environ.get(name, ""))}


#: Settings of engines' loaders by which the same weights come faster, or are checked: threads and readers, who reads
#: for whom, and bounds of memory, files and time. Others may name adapters that are merged in, or folders with other
#: weights.
_LOADERS_SPEED: Final = frozenset((
    "enable_multithread_load", "num_threads", "enable_weights_track", "enable_gds", "concurrency", "memory_limit",
    "distributed", "max_file_bytes", "hash_num_threads", "verify_on_load", "num_readers", "verify_hash",
    "connect_timeout_s", "state_timeout_s",
))  # fmt: skip


#: Settings by which the same weights are read and decrypted. They are secrets, or name them, and change in time. What
#: another key decrypts is refused.
_LOADERS_ACCESS: Final = frozenset(("s3_access_key_id", "s3_secret_access_key", "encryption_keyfile", "encryption"))
#: Settings that do not count with these values: how a process gets weights of another one, by a socket. Which socket it
#: is counts, as the two compare no more of weights than their names and shapes.
_LOADERS_WAYS: Final = {"mode": ("zero_copy", "copy"), "fallback": (True, False)}


def of_loader(settings: Any) -> Hidden | None:
    """Return what decides weights of a loader's own settings, a mapping or its JSON; None for nothing. O(settings).

    It is hidden in logs: a loader that is not the engine's own may have secrets under any name. What is neither a
    mapping nor JSON counts as it is.
    """
    left = _of_weights(settings)
    return None if left is None else Hidden(left)


def _of_weights(settings: Any) -> Any:
    if isinstance(settings, str):
        try:
            settings = json.loads(settings)
        except ValueError:
            return settings
    if not isinstance(settings, Mapping):
        return settings
    left = {
        name: _of_weights(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name not in _LOADERS_SPEED and name not in _LOADERS_ACCESS and value not in _LOADERS_WAYS.get(name, ())
    }  # fmt: skip
    return {name: value for name, value in left.items() if value is not None} or None
