"""No line above DEBUG has a user's key or a token in it: nothing of the kind is given to a logger, in any module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import simm
from simm.config.tokens import parse_tokens
from simm.errors import ConfigError
from tests.support.sources import parse

#: What keys, digests of keys, values and tokens are called. Their number is no secret.
SECRET: Final = frozenset((
    "digest", "digests", "key", "keys", "password", "proof", "secret", "secrets", "token", "tokens", "value", "values",
))  # fmt: skip
HARMLESS: Final = frozenset(("len", "sum", "type"))
#: Methods of loggers and of what limits them.
METHODS: Final = frozenset(("info", "warning", "error", "exception", "critical", "log", "noise", "_noise"))
#: Names that mean something else there.
ELSEWHERE: Final = frozenset((
    ("sdk/worker_path.py", "self.key[:2]"),  # of a worker: node and number
    ("server/migration.py", "mover.values"),  # their number
    ("config/settings.py", "key"),  # the name of a variable in the environment
))  # fmt: skip


def logged(text: str) -> Iterator[ast.expr]:
    """Yield the arguments of all calls that log above DEBUG. Only a text with such a method is parsed."""
    if not re.search(rf"\.\s*({'|'.join(sorted(METHODS))})\s*\(", text):
        return
    for node in ast.walk(parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in METHODS:
            continue
        if node.func.attr == "log" and "DEBUG" in ast.unparse(node.args[0]):
            continue
        for argument in node.args:
            yield argument.value if isinstance(argument, ast.Starred) else argument


def secrets_in(argument: ast.expr) -> Iterator[str]:
    """Yield the names of secrets in an argument, but for those of which only the number or the type is shown."""
    if isinstance(argument, ast.Call) and isinstance(argument.func, ast.Name) and argument.func.id in HARMLESS:
        return
    name = getattr(argument, "attr", getattr(argument, "id", ""))
    if name.strip("_") in SECRET:
        yield name
    for child in ast.iter_child_nodes(argument):
        if isinstance(child, ast.expr):
            yield from secrets_in(child)


def test_no_module_logs_a_secret() -> None:
    folder = Path(simm.__file__).parent
    found, calls = set(), 0
    for path in sorted(folder.rglob("*.py")):
        where = str(path.relative_to(folder))
        for argument in logged(path.read_text()):
            calls += 1
            if any(secrets_in(argument)):
                found.add((where, ast.unparse(argument)))
    assert calls > 200, "the calls are found"
    assert found == ELSEWHERE


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('log.warning("%r is gone", key)', ["key"]),
        ('self.loop.noise(logging.INFO, "refused: %s", peer.gate.token.secret)', ["secret", "token"]),
        ('log.info(f"put {self._keys[0]}")', ["_keys"]),
        ('log.error("%s", *values)', ["values"]),
        ('log.debug("%r", key)', []),
        ('log.log(logging.DEBUG, "%r", key)', []),
        ('log.info("%d keys", len(keys))', []),
        ('math.floor(key)', []),
    ],
)  # fmt: skip
def test_mutation_secrets_are_found(text: str, found: list[str]) -> None:
    assert sorted(name for argument in logged(text) for name in secrets_in(argument)) == sorted(found)


SECRETS: Final = ("T0ken-" + "x" * 20, "T0ken-" + "y" * 20)


@pytest.mark.parametrize(
    "text",
    [
        "{0} team-a client\nclient b {1}", "client {0}", "client {0} team-a", "client team-a {0} a/b=1X",
        "cliemt team-a {0}", "admin ops {0}\nclient team-a {0}", "admin ops {0} bound", "{0}\n{1}\n{0}",
        "client team-a {0} a=1G a=2G",
    ],
)  # fmt: skip
def test_a_token_file_that_cannot_be_used_is_described_without_its_tokens(text: str) -> None:
    """The description goes into the log when the file changes."""
    with pytest.raises(ConfigError) as caught:
        parse_tokens(text.format(*SECRETS), "the token file")
    assert "T0ken" not in str(caught.value)
