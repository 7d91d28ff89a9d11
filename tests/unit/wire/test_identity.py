"""Instances are made of secrets."""

from __future__ import annotations

from simm.wire.identity import SECRET_BYTES, instance_of, is_instance, new_secret


def test_an_instance_fits_its_secret_and_its_name_only() -> None:
    secret, other = new_secret(), new_secret()
    made = instance_of("gpu-1", secret)
    assert is_instance("gpu-1", made, secret) and 0 < made < 1 << 63
    assert instance_of("gpu-1", secret) == made and secret != other and len(secret) == SECRET_BYTES
    for name, instance, given in (
        ("gpu-1", made, other), ("gpu", made, secret), ("gpu-1", made ^ 2, secret), ("gpu-1", 0, secret),
        ("gpu-1", (1 << 64) - 1, secret), ("gpu-1", made, b""), ("gpu-1", made, secret[:-1]),
        ("gpu-1", made, secret * 2),
    ):  # fmt: skip
        assert not is_instance(name, instance, given)
