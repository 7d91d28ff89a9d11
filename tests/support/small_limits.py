"""Values in parts without 64 MiB of them: the limit of an ordinary value, lowered for this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

#: Where the limit is looked at on the way to a decision about parts.
_MODULES = (
    "simm.sdk.batch", "simm.sdk.ops.parts", "simm.sdk.ops.pins", "simm.sdk.ops.kv_memory", "simm.sdk.large.values",
    "simm.sdk.calls.large", "simm.kv",
)  # fmt: skip

MOST = 1000
PART = 256


@contextlib.contextmanager
def small_limits(most: int = MOST, part: int = PART) -> Iterator[None]:
    """Let clients store values above ``most`` bytes in parts of ``part`` bytes."""
    with contextlib.ExitStack() as stack:
        for module in _MODULES:
            stack.enter_context(mock.patch(f"{module}.VALUE_BYTES_MAX", most))
        stack.enter_context(mock.patch("simm.sdk.large.manifest.PART_BYTES", part))
        yield
