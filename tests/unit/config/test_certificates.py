"""How long a certificate is valid, read from its file."""

from __future__ import annotations

import time

import pytest

from simm.config.certificates import validity
from tests.support.certificates import Authority, needs_openssl


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("validity"))


@needs_openssl
def test_validity(authority: Authority) -> None:
    """Also beyond 2049, from where on X.509 writes years of four digits."""
    for days in (3, 20_000):
        begins, ends = validity(authority.issue(f"valid{days}", days=days).read_text())
        assert abs(begins - time.time()) < 86_400 and ends - begins == days * 86_400


@needs_openssl
def test_what_is_no_certificate(authority: Authority) -> None:
    whole = authority.ca.read_text()
    for text in ("", "no PEM", whole[: len(whole) // 2], whole.replace("MII", "AAA", 1)):
        with pytest.raises(ValueError, match="certificate"):
            validity(text)


@needs_openssl
def test_a_file_with_key_and_chain(authority: Authority) -> None:
    """The first certificate is the server's own."""
    alone = authority.issue("alone", days=5)
    key = alone.read_text().partition("-----BEGIN PRIVATE KEY")
    chain = f"{key[1]}{key[2]}some text\n{key[0]}{authority.ca.read_text()}"
    assert validity(chain) == validity(alone.read_text()) != validity(authority.ca.read_text())
