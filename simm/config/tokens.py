"""Token files: who proves what, and what each may do then.

    # role    label      token                                       namespaces it may use, with quotas
    admin     ops        1b0c...
    server    nodes      9a77...                                     gpu-1=200G  gpu-2=200G
    client    team-a     b2d0...                                     llama3-70b=200G  qwen3
    client    engines    77aa...

A role includes those before it: a client reads and writes values, a server also joins and takes shards over, an admin
also drains servers. After a server's token stand the data servers that may join by it, `*` for any, with the bytes for
values of each. Managers and data servers have the lines of all who may come. A client has its own
line, or its own token alone.

A file without any role is of the old kind: one or two tokens, each of which may do everything. A file with a role has
one in each line, so that a mistyped one admits nobody to everything.

Errors name lines and labels, and never show a token.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Final

from ..errors import ConfigError, printable
from .parsers import namespace_name, node_name, parse_bytes

#: Tokens of a file, and of one of the old kind.
TOKENS_MAX: Final = 1024
OLD_TOKENS_MAX: Final = 2
TOKEN_BYTES_MIN: Final = 16
TOKEN_BYTES_MAX: Final = 1024
NAMESPACES_MAX: Final = 64
NODES_MAX: Final = 1024
ID_BYTES: Final = 16
#: The most bytes that a quota or a data server's bound may be. No host has as many, so more is a mistake in the unit.
BOUND_BYTES_MAX: Final = 1 << 60
_LABEL: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}", re.ASCII)


class TokenRole(IntEnum):
    """What the holder of a token may do; each role includes those below it."""

    CLIENT = 1
    SERVER = 2
    ADMIN = 3

    def __str__(self) -> str:
        return self.name.lower()


_ROLES: Final = {str(role): role for role in TokenRole}


@dataclass(frozen=True)
class Token:
    """A token and its rights.

    Attributes:
        label: what logs and errors call it.
        namespaces: (name -> quota in bytes of each data server, None for none) of a token that is bound to
            namespaces. None for one that may use all.
        nodes: (name, or "*" for all others -> bytes for values, None for any) of the data servers that a server's token
            may join as. None for one that may join as all.
        old: it comes from a line without a role.
    """

    secret: str = field(repr=False)
    role: TokenRole
    label: str
    namespaces: Mapping[str, int | None] | None = None
    old: bool = False
    nodes: Mapping[str, int | None] | None = None
    #: Names the token in AUTH: see :func:`token_id`.
    id: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", token_id(self.secret))

    def __str__(self) -> str:
        return f"the token {self.label!r}"

    @property
    def rights(self) -> tuple[object, ...]:
        """What an open connection goes on with: two tokens that differ in quotas only have the same."""
        names = None if self.namespaces is None else frozenset(self.namespaces)
        nodes = None if self.nodes is None else frozenset(self.nodes.items())
        return self.secret, self.role, self.label, self.old, names, nodes


def token_id(secret: str) -> bytes:
    """Return what names a token to a server that has it. It proves nothing, and leads to no random token."""
    return hmac.digest(secret.encode(), b"simm token id", "sha256")[:ID_BYTES]


def parse_tokens(text: str, where: str) -> tuple[Token, ...]:
    """Return the tokens of a file's text. ``where`` names the file in errors. Raises ConfigError."""
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not lines:
        raise ConfigError(f"{where} has no token: write lines such as `client LABEL TOKEN`")
    for number, line in lines:
        _check_spelling(f"line {number} of {where}", line.split()[0])
    if any(line.split()[0] in _ROLES for _, line in lines):
        found = tuple(_parse_line(f"line {number} of {where}", line) for number, line in lines)
        most = TOKENS_MAX
    else:
        for number, line in lines:
            _check_comment(f"line {number} of {where}", line.split()[1:])
        found = tuple(Token(line, TokenRole.ADMIN, f"line {number}", old=True) for number, line in lines)
        most = OLD_TOKENS_MAX
    if len(found) > most:
        more = "" if most > OLD_TOKENS_MAX else ": give each line a role, as in `client LABEL TOKEN`, for more"
        raise ConfigError(f"{where} has {len(found)} tokens, 1 to {most} are allowed{more}")
    seen: dict[str, int] = {}
    for (number, _), token in zip(lines, found):
        if not TOKEN_BYTES_MIN <= len(token.secret.encode()) <= TOKEN_BYTES_MAX:
            raise ConfigError(
                f"line {number} of {where}: a token does not have {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} bytes; "
                "`openssl rand -hex 32` makes one"
            )
        if token.secret in seen:
            raise ConfigError(f"lines {seen[token.secret]} and {number} of {where} have the same token: drop one")
        seen[token.secret] = number
    return found


def _check_spelling(where: str, word: str) -> None:
    """Raise ConfigError if a line begins with what is almost a role."""
    if word in _ROLES:
        return
    import difflib  # 5 ms

    near = difflib.get_close_matches(word.lower(), _ROLES, 1, 0.75)
    if near:
        raise ConfigError(f"{where} begins with {printable(word)!r}, which is no role: write {near[0]}")


def _check_comment(where: str, behind: Sequence[str]) -> None:
    """Raise ConfigError if there is a comment behind a token.

    Its words would be names that the token may use, or belong to a token of the old kind, which may have spaces.
    """
    if any(word.startswith("#") for word in behind):
        raise ConfigError(f"{where}: a comment has a line of its own, with # in front")


def _parse_line(where: str, line: str) -> Token:
    words = line.split()
    role = _ROLES.get(words[0])
    if role is None:
        raise ConfigError(f"{where} has no role: begin it with {', '.join(_ROLES)}, as other lines do")
    if len(words) < 3:
        more = {TokenRole.CLIENT: " [NAMESPACE[=QUOTA] ...]", TokenRole.SERVER: " [NAME[=BYTES] ...]"}.get(role, "")
        raise ConfigError(f"{where} is incomplete: a line is `{role} LABEL TOKEN{more}`")
    label, secret, bound = words[1], words[2], words[3:]
    if not _LABEL.fullmatch(label):  # not shown, as it may be the token
        raise ConfigError(f"{where}: a label has 1 to 64 letters, digits and ._@-, and stands before the token")
    if len(label) >= len(secret):  # the token would be public, and what stands in its place easy to guess
        raise ConfigError(f"{where}: a label is shorter than its token: are the two swapped, or is the label missing?")
    _check_comment(where, bound)
    if not bound:
        return Token(secret, role, label)
    if role is TokenRole.CLIENT:
        spelling = "a namespace is written NAME or NAME=QUOTA, as llama3=200G"
        names = _parse_bounds(where, bound, NAMESPACES_MAX, "namespace", namespace_name, spelling)
        return Token(secret, role, label, names)
    if role is TokenRole.SERVER:
        spelling = "a data server is written NAME or NAME=BYTES, as gpu-1=200G, or * for any name"
        names = _parse_bounds(where, bound, NODES_MAX, "data server", _node_or_any, spelling)
        return Token(secret, role, label, nodes=names)
    raise ConfigError(
        f"{where}: {label!r} has the role {role}; a client's token is bound to namespaces, a server's to data servers"
    )


def _node_or_any(name: str) -> str:
    return name if name == "*" else node_name(name)


def _bound_bytes(text: str) -> int:
    size = parse_bytes(text)
    if size > BOUND_BYTES_MAX:
        raise ConfigError(f"{text!r} is more than any data server has: {BOUND_BYTES_MAX >> 40}T is the most")
    return size


def _parse_bounds(
    where: str, words: Sequence[str], most: int, what: str, parse_name: Callable[[str], str], spelling: str
) -> Mapping[str, int | None]:
    """Return the names that a token is bound to, with their bytes; None for no bound."""
    if len(words) > most:
        raise ConfigError(f"{where} names {len(words)} {what}s, {most} are allowed")
    found: dict[str, int | None] = {}
    for word in words:
        name, equals, size = word.partition("=")
        try:
            name = parse_name(name)
            quota = _bound_bytes(size) if equals else None
        except ConfigError as exc:
            raise ConfigError(f"{where}: {spelling}: {exc}") from None
        if name in found:
            raise ConfigError(f"{where} names the {what} {name!r} twice")
        found[name] = quota
    return MappingProxyType(found)


def token_for(tokens: Sequence[Token], *roles: TokenRole, namespace: str = "") -> Token | None:
    """Return the first token of the first of these roles that has one.

    With a ``namespace``, tokens that may not use it come last.
    """
    found = [token for role in roles for token in tokens if token.role is role]
    fitting = [token for token in found if not namespace or token.namespaces is None or namespace in token.namespaces]
    return next(iter(fitting or found), None)


def namespaces_of(tokens: Sequence[Token]) -> list[str]:
    """Return the namespaces that tokens are bound to, each once."""
    return list(dict.fromkeys(name for token in tokens for name in token.namespaces or ()))


def quotas_of(tokens: Sequence[Token], part: int = 1, whole: int = 1) -> dict[str, int]:
    """Return the quota of each namespace that has one, bytes; the least where several tokens name one.

    ``part``, ``whole``: the memory of one worker, and of all. Shards are dealt by it, and so is a quota.
    """
    quotas: dict[str, int] = {}
    for token in tokens:
        for name, quota in (token.namespaces or {}).items():
            if quota is not None:
                quotas[name] = min(quota, quotas.get(name, quota))
    return {name: quota * part // whole for name, quota in quotas.items()}
