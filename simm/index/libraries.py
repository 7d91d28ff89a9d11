"""The libraries of the extra ``simm-store[index]``. Nothing else in SiMM imports them."""

from __future__ import annotations

from ..errors import UsageError

try:
    import msgspec
    import xxhash
    import zmq
except ImportError as missing:
    raise UsageError(
        f"the event index needs {missing.name}, which is not installed: pip install '.[index]' in SiMM's checkout"
    ) from missing

__all__ = ["msgspec", "xxhash", "zmq"]
