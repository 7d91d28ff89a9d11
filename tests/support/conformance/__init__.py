"""The promises of a client, which the real client and ``simm.testing.FakeClient`` both keep.

A promise is a function that asks a ``World`` (``world.py``) for clients and asserts. Next to each promise stands a fake
with an injected bug that breaks just this promise. ``tests/system/client/test_conformance.py`` runs each promise on the
real client by shared memory and by TCP, on the fake, and on the broken fake.
"""

import pytest

pytest.register_assert_rewrite(
    *(f"tests.support.conformance.{name}" for name in (
        "groups", "if_absent", "keep", "keys", "large", "lifetime", "parts", "pins", "prefetch", "values",
    ))
)  # fmt: skip
