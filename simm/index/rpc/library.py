"""The library of the extra ``simm-store[grpc]``. Nothing else in SiMM imports it."""

from __future__ import annotations

from ...errors import UsageError

try:
    import grpc
except ImportError as missing:
    raise UsageError(
        "--grpc needs grpcio, which is not installed: pip install '.[index,grpc]' in SiMM's checkout"
    ) from missing

__all__ = ["grpc"]
