"""The promises of a client, which the real client and ``simm.testing.FakeClient`` both keep.

A promise is a function that asks a ``World`` (``world.py``) for clients and asserts. Next to each promise stands a fake
with an injected bug that breaks just this promise. ``tests/system/client/test_conformance.py`` runs each promise on the
real client by shared memory and by TCP, on the fake, and on the broken fake.
"""

import pytest

pytest.register_assert_rewrite(
    "tests.support.conformance.keys", "tests.support.conformance.lifetime", "tests.support.conformance.parts",
    "tests.support.conformance.if_absent", "tests.support.conformance.pins", "tests.support.conformance.values",
)
