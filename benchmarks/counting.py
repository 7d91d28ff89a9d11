"""What counting costs a call: the same client with the lines that count, and without them, in one process.

    python benchmarks/counting.py                     # two minutes; --seconds 300, --size 65536, --only get_into,put
    python benchmarks/counting.py --what tracing      # the same for tracing, switched off, and a client that has none
    python benchmarks/counting.py --write FOLDER      # a checkout without counting, for benchmarks/compare.py FOLDER .

Two builds in two processes differ by some percent whatever their code does, as their memory lies elsewhere. So here one
client changes its class between bursts, as one does that begins to trace. The classes are made from SiMM's own sources:
``as it is`` from what they say, and ``without`` from that less each statement that counts (:func:`without_counts`).
Where a class lies in memory makes a difference too. So ``BUILDS`` classes are made of each kind.

A figure is the processor time of the calling thread for a call, in a burst of ``CALLS``; bursts of all classes follow
each other in an order that changes. What a class takes is the least of its bursts. What a kind takes is the mean of
its classes. ``spread`` is that mean of one half of the classes of ``as it is`` less that of the other half: what the
method cannot tell apart. The worker adds the counts up meanwhile.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import random
import shutil
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

#: Of calls with a single key: twice as many as until a log is full and a call is timed, so each burst has its share.
CALLS: Final = 320
#: Calls before a burst.
WARM: Final = 64
BUILDS: Final = 8
BATCH: Final = 32
#: The modules of the calls that are measured, and the parts of a client whose classes are in them.
MODULES: Final = {
    "simm.sdk.reads": ("Gets", "_gets"), "simm.sdk.writes": ("Puts", "_puts"), "simm.client": ("Client", ""),
}  # fmt: skip
#: What is stored to counts; and the names of what is only needed for that.
_WORDS: Final = ("counts", "words")
_HOLDERS: Final = ("counts",)
_FREE: Final = ("free",)
_CALLS: Final = ("observe", "count_puts", "count_moved", "count_more", "missed")
_FLAGS: Final = ("SAMPLE_BATCHES", "MISSES_MASK", "attempts")


class _Remover(ast.NodeTransformer):
    """Takes out statements that count. ``removed``: how many."""

    def __init__(self) -> None:
        self.removed = 0

    def _is_count(self, target: ast.expr) -> bool:
        """Return whether something is a word of ``counts``, or of an object's."""
        if not isinstance(target, ast.Subscript):
            return False
        holder = target.value
        return (holder.id if isinstance(holder, ast.Name) else getattr(holder, "attr", "")) in _WORDS

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | None:
        if any(self._is_count(target) for target in node.targets):
            self.removed += 1
            return None
        target, value = node.targets[0], node.value
        if isinstance(value, ast.Attribute) and value.attr in _HOLDERS:
            self.removed += 1
            return None
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            kept = [
                pair for pair in zip(target.elts, value.elts)
                if not (isinstance(pair[1], ast.Attribute) and pair[1].attr in _HOLDERS)
            ]  # fmt: skip
            if len(kept) == 1:
                self.removed += 1
                return ast.copy_location(ast.Assign([kept[0][0]], kept[0][1]), node)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt | None:
        if self._is_count(node.target):
            self.removed += 1
            return None
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.stmt | None:
        called = node.value.func if isinstance(node.value, ast.Call) else None
        if getattr(called, "id", getattr(called, "attr", "")) in _CALLS:
            self.removed += 1
            return None
        return node

    def visit_For(self, node: ast.For) -> Any:
        iterated = node.iter
        if getattr(iterated, "id", getattr(iterated, "attr", "")) in _FREE:  # a call is counted: what follows is left
            self.removed += 1
            return [self.visit(statement) for statement in node.body[1:]]
        if isinstance(iterated, ast.Attribute) and iterated.attr == "attempts":
            self.removed += 1
            node.iter = ast.copy_location(ast.Name("EACH_ATTEMPT", ast.Load()), iterated)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> Any:
        names = {getattr(each, "id", getattr(each, "attr", "")) for each in ast.walk(node.test)}
        if names.intersection(_FLAGS):
            self.removed += 1
            return None
        return self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        before = {name: bool(getattr(node, name, None)) for name in ("body", "finalbody")}
        super().generic_visit(node)
        for name, had in before.items():
            if had and not getattr(node, name):
                setattr(node, name, [ast.Pass()])
        return node


def without_counts(tree: ast.Module) -> int:
    """Take each statement that counts out of a module; return how many."""
    remover = _Remover()
    remover.visit(tree)
    ast.fix_missing_locations(tree)
    return remover.removed


class _Untraced(ast.NodeTransformer):
    """Takes out all that has to do with tracing: bases, methods and statements. ``removed``: how many."""

    def __init__(self) -> None:
        self.removed = 0

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.ClassDef):
            kept = [base for base in node.bases if "trac" not in ast.unparse(base).lower()]
            self.removed += len(node.bases) - len(kept)
            node.bases = kept
        said = getattr(node, "test", node) if isinstance(node, ast.Expr | ast.If) else None
        if said is not None and not isinstance(getattr(node, "value", None), ast.Constant):
            if "trac" not in ast.unparse(said).lower():
                return super().visit(node)
            self.removed += 1
            return None
        return super().visit(node)


def without_tracing(tree: ast.Module) -> int:
    """Take tracing out of a module; return how many statements and bases that were."""
    remover = _Untraced()
    remover.visit(tree)
    ast.fix_missing_locations(tree)
    return remover.removed


#: What can be taken out.
WHAT: Final = {"counting": without_counts, "tracing": without_tracing}


def classes(change: Callable[[ast.Module], int]) -> tuple[dict[str, type], int]:
    """Return the classes of a client and its parts, made anew from their changed sources, and what ``change`` returns.
    """
    made: dict[str, type] = {}
    total = 0
    for name, (kind, part) in MODULES.items():
        real = importlib.import_module(name)
        tree = ast.parse(Path(str(real.__file__)).read_text())
        total += change(tree)
        module = types.ModuleType(name)
        module.__dict__.update(__file__=real.__file__, __package__=real.__package__)
        # dataclasses and others look a class's module up by its name.
        sys.modules[name] = module
        try:
            exec(compile(tree, str(real.__file__), "exec"), module.__dict__)
        finally:
            sys.modules[name] = real
        made[part] = module.__dict__[kind]
    return made, total


def write(change: Callable[[ast.Module], int], folder: Path) -> None:
    """Write this checkout's ``simm`` with the changed modules into a folder, for ``simm bench`` from there."""
    source = Path(__file__).resolve().parents[1] / "simm"
    shutil.copytree(source, folder / "simm", ignore=shutil.ignore_patterns("__pycache__"))
    for name in MODULES:
        place = Path(*name.split(".")).with_suffix(".py")
        tree = ast.parse((source.parent / place).read_text())
        change(tree)
        (folder / place).write_text(ast.unparse(tree))


def operations(client: Any, size: int) -> dict[str, Callable[[], Any]]:
    """Return the calls that are measured."""
    value, sink = bytes(size), bytearray(size)
    keys = [f"k{number}" for number in range(BATCH)]
    sinks, values = [bytearray(size) for _ in keys], [value] * BATCH
    if not all(client.put_many(keys, values)):
        raise SystemExit("counting: the cluster takes no values")
    return {
        "get_into": lambda: client.get_into("k0", sink),
        "put": lambda: client.put("k0", value),
        "exists": lambda: client.exists("k0"),
        "get_into_miss": lambda: client.get_into("none", sink),
        f"get_into_many of {BATCH}": lambda: client.get_into_many(keys, sinks),
        f"put_many of {BATCH}": lambda: client.put_many(keys, values),
    }


def burst(call: Callable[[], Any], calls: int) -> float:
    """Return the processor time of a call, ns, after others that warm up: the interpreter adapts to the class."""
    for _ in range(calls * WARM // CALLS):
        call()
    began = time.thread_time_ns()
    for _ in range(calls):
        call()
    return (time.thread_time_ns() - began) / calls


def measure(client: Any, kinds: dict[str, list[dict[str, type]]], size: int, seconds: float, only: str) -> list[str]:
    """Return the table's lines."""
    calls = {name: call for name, call in operations(client, size).items() if not only or name in only.split(",")}
    if not calls:
        raise SystemExit(f"counting: there is no call of these: {only}")
    builds = [(kind, number) for kind, made in kinds.items() for number in range(len(made))]
    least: dict[tuple[str, str, int], float] = {(call, *build): float("inf") for call in calls for build in builds}
    until, rounds = time.monotonic() + seconds, 0
    while rounds < 3 or time.monotonic() < until:
        rounds += 1
        for call in calls:
            for kind, number in random.sample(builds, len(builds)):
                for part, made in kinds[kind][number].items():
                    (getattr(client, part) if part else client).__class__ = made
                took = burst(calls[call], 4 if "many" in call else CALLS)
                least[call, kind, number] = min(least[call, kind, number], took)
    lines = [f"{size:,} bytes, {rounds} bursts of each class, processor ns of a call",
             f"{'':22}{'as it is':>10}{'without':>10}{'cost':>10}{'of it':>8}{'spread':>8}"]  # fmt: skip
    for call in calls:
        counted, plain = ([least[call, kind, number] for number in range(BUILDS)] for kind in kinds)
        cost = statistics.mean(counted) - statistics.mean(plain)
        halves = statistics.mean(counted[::2]) - statistics.mean(counted[1::2])
        lines.append(
            f"{call:22}{statistics.mean(counted):10,.0f}{statistics.mean(plain):10,.0f}{cost:10,.0f}"
            f"{cost / statistics.mean(counted):8.1%}{abs(halves):8,.0f}"
        )
    return lines


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="to measure for; three rounds at least")
    parser.add_argument("--size", type=int, default=4096, help="bytes of a value")
    parser.add_argument("--only", default="", help="these calls, with commas between them, as get_into,put")
    parser.add_argument("--what", choices=WHAT, default="counting", help="what the other classes are without")
    parser.add_argument("--write", metavar="FOLDER", help="write a simm without it into FOLDER/simm instead")
    arguments = parser.parse_args()
    if arguments.write:
        write(WHAT[arguments.what], Path(arguments.write))
        return
    from simm.client import Client

    kinds: dict[str, list[dict[str, type]]] = {"as it is": [], "without": []}
    for _ in range(BUILDS):
        kinds["as it is"].append(classes(lambda _: 0)[0])
        without, removed = classes(WHAT[arguments.what])
        kinds["without"].append(without)
        if not removed:
            raise SystemExit(f"counting: nothing of {arguments.what} is in these sources")
    with Client.local("256M", path="shm") as client:
        if not client.wait_ready():
            raise SystemExit("counting: the cluster does not come up")
        if arguments.what == "tracing":  # the client's own thread asks its class for it
            client._router._tick = lambda: None
        own = {part: type(getattr(client, part) if part else client) for _, part in MODULES.values()}
        try:
            lines = measure(client, kinds, arguments.size, arguments.seconds, arguments.only)
        finally:
            for part, kind in own.items():
                (getattr(client, part) if part else client).__class__ = kind
    print("\n".join(lines))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of this checkout, whatever is installed
    main()
