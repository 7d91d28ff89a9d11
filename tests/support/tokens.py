"""Tokens of tests."""

from __future__ import annotations

from simm.config.tokens import Token, TokenRole


def old_tokens(*secrets: str) -> tuple[Token, ...]:
    """Return tokens without a role, each of which may do everything."""
    return tuple(Token(secret, TokenRole.ADMIN, f"line {n}", old=True) for n, secret in enumerate(secrets, 1))
