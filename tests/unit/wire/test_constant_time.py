"""Secrets are compared in constant time, by structure: no ``==`` or ``in`` of ``simm/`` compares one.

How long a comparison takes cannot be tested on a busy machine. So the rule reads the source: what has the name of a
secret, is computed from one, or is assigned from such a value, is compared by ``hmac.compare_digest`` only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import simm
from tests.support.sources import parse

PACKAGE: Final = Path(simm.__file__).parent
SECRET: Final = re.compile(r"(^|_)(secret|secrets|proof|proofs|token|tokens|password|given|mac)(_|$)")
#: The same in a text: a part of a word.
NAMED: Final = re.compile(r"(?<![^\W_])(secret|secrets|proof|proofs|token|tokens|password|given|mac)(?![^\W_])")
#: Calls whose result tells nothing of the argument's bytes.
TELLS_NOTHING: Final = frozenset(("len", "isinstance", "type", "bool"))
#: Methods that end at the first byte that differs.
EARLY: Final = frozenset(("__eq__", "__ne__", "startswith", "endswith", "index", "find", "count", "match", "fullmatch"))
#: What looks like it, and why it is none.
KNOWN: Final = {
    ("config/tokens.py", "token.secret in seen"): "lines of one file, compared with each other",
    ("config/startup.py", "token in self._tokens"): "a token of the file before, with those of the file",
    ("config/startup.py", "tokens == self._tokens"): "the file before, with the file",
    ("wire/auth.py", "token in self._tokens"): "the token that AUTH's id has named, with those of the file",
    ("wire/auth.py", "token.id == msg.token"): "an id is no secret",
    ("connectors/vllm_scheduler.py", "start // self._hash_tokens == end // self._hash_tokens"):
        "numbers of a prompt's tokens",
}


def is_secret(node: ast.expr, tainted: frozenset[str]) -> bool:
    """Return True if an expression is a secret, a part of one, or is computed from one."""
    if isinstance(node, ast.Name):
        return node.id in tainted or bool(SECRET.search(node.id))
    if isinstance(node, ast.Attribute):
        return bool(SECRET.search(node.attr))
    if isinstance(node, (ast.Subscript, ast.Starred)):
        return is_secret(node.value, tainted)
    if isinstance(node, ast.BinOp):
        return is_secret(node.left, tainted) or is_secret(node.right, tainted)
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in TELLS_NOTHING:
            return False
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        return is_secret(node.func, tainted) or any(is_secret(each, tainted) for each in (of, *node.args) if each)
    return False


def tainted_in(function: ast.AST) -> frozenset[str]:
    """Return the names that a function assigns secrets to."""
    found: frozenset[str] = frozenset()
    while True:
        more = {
            target.id
            for node in ast.walk(function) if isinstance(node, ast.Assign) and is_secret(node.value, found)
            for target in node.targets if isinstance(target, ast.Name)
        }  # fmt: skip
        if more <= found:
            return found
        found |= more


def compared(node: ast.AST) -> list[ast.expr]:
    """Return what an expression compares byte by byte, up to the first that differs; nothing if it does not."""
    if isinstance(node, ast.Compare) and any(isinstance(op, (ast.Eq, ast.NotEq, ast.In, ast.NotIn)) for op in node.ops):
        sides = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in EARLY:
        sides = [node.func.value, *node.args]
    else:
        return []
    # What is compared with a literal of the source, or with a length, is no secret.
    return [] if any(isinstance(each, (ast.Constant, ast.Tuple)) or is_length(each) for each in sides) else sides


def is_length(node: ast.expr) -> bool:
    """Return True for ``len(...)``: the number of tokens of a page is compared with such."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


def hasty(text: str) -> Iterator[str]:
    """Yield each comparison of a secret that may end at its first byte that differs.

    A function without a name of a secret has none: all that is tainted is so from such a name on.
    """
    if not NAMED.search(text):
        return
    lines = text.splitlines()
    for function in ast.walk(parse(text)):
        if isinstance(function, ast.FunctionDef):
            if not NAMED.search("\n".join(lines[function.lineno - 1 : function.end_lineno])):
                continue
            tainted = tainted_in(function)
            for node in ast.walk(function):
                if any(is_secret(each, tainted) for each in compared(node)):
                    yield ast.unparse(node)


def sources() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.fault("F26", ci="all of simm/", whole="the same")
def test_secrets_are_compared_in_constant_time() -> None:
    assert {(name, found) for name, text in sources().items() for found in hasty(text)} == set(KNOWN)


class Hasty(ast.NodeTransformer):
    """The bug to find: one of the comparisons in constant time becomes an ordinary one."""

    def __init__(self, number: int, operator: type[ast.cmpop]) -> None:
        self.left = number
        self.operator = operator

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "compare_digest":
            self.left -= 1
            if self.left == -1:
                return ast.Compare(node.args[0], [self.operator()], [node.args[1]])
        return node


@pytest.mark.parametrize("operator", [ast.Eq, ast.NotEq])
def test_control_each_of_them_replaced_is_found(operator: type[ast.cmpop]) -> None:
    replaced = 0
    for name, text in sources().items():
        for number in range(text.count("hmac.compare_digest(")):
            made = ast.fix_missing_locations(Hasty(number, operator).visit(ast.parse(text)))
            assert len(list(hasty(ast.unparse(made)))) == len(list(hasty(text))) + 1, (name, number)
            replaced += 1
    assert replaced >= 4, "in the handshake on both sides, for pages, for the secrets of data servers"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("expected = _proof(token, nonce)\n    return expected == other", True),
        ("return given.encode() != mine", True), ("return msg.proof[:4] == b[:4]", True),
        ("return token.secret in known", True), ("return known.index(secret)", True),
        ("return secret.startswith(other)", True), ("return len(secret) == SIZE", False),
        ("return len(rows) != pages * page_tokens", False), ("return rows != page_tokens", True),
        ("return role == token.role", False), ("return token == 's'", False), ("return one == other", False),
    ],
)  # fmt: skip
def test_the_rule(body: str, found: bool) -> None:
    assert bool(list(hasty(f"def f():\n    {body}\n"))) == found
