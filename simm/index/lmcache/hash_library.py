"""The library of the extra ``lmcache``, which hashes as LMCache's servers do. Nothing else in SiMM imports it."""

from __future__ import annotations

from ...errors import UsageError

try:
    import blake3
except ImportError as missing:
    raise UsageError(
        "LMCache's default hash needs blake3, which is not installed: pip install '.[index,lmcache]' in SiMM's checkout"
    ) from missing

__all__ = ["blake3"]
