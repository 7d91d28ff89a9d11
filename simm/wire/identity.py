"""Prove which data server a peer is: the instance that everybody knows is made of a secret that only the server has.

A map tells every client each server's name and instance, so these authenticate nobody. A data server draws a secret at
its start, and its instance is a one-way function of the secret and the name (:func:`instance_of`). JOIN shows the
secret. A manager can check it without having seen the server before: after a restart, as the successor of another
manager, or without its state, when it knows the instance from a map alone.

The instance has 62 bits that count. Each guess at a secret costs ``_ROUNDS`` rounds, so a forger needs about 2**71
hashes while the server lives. A check takes a fraction of a millisecond.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

SECRET_BYTES: Final = 32
_ROUNDS: Final = 256
_MASK: Final = (1 << 63) - 1


def new_secret() -> bytes:
    """Return the secret of a starting data server."""
    return secrets.token_bytes(SECRET_BYTES)


def instance_of(name: str, secret: bytes) -> int:
    """Return the instance of the data server ``name`` with this secret; never 0, below 2**63."""
    digest = hashlib.pbkdf2_hmac("sha256", secret, b"simm instance " + name.encode(), _ROUNDS, 8)
    return int.from_bytes(digest, "little") & _MASK | 1


def is_instance(name: str, instance: int, secret: bytes) -> bool:
    """Return True if ``secret`` is the one that this instance of the data server was made of."""
    if len(secret) != SECRET_BYTES:
        return False
    made = instance_of(name, secret)
    return hmac.compare_digest(made.to_bytes(8, "little"), instance.to_bytes(8, "little"))
