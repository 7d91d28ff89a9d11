"""Read from a certificate's file how long it is valid: the standard library tells that of a peer's certificate only."""

from __future__ import annotations

import base64
import re
from datetime import datetime, timezone
from typing import Final

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
# Tags of ASN.1.
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18


def validity(pem: str) -> tuple[float, float]:
    """Return from when until when the first certificate is valid, seconds since 1970. Raises ValueError."""
    found = _PEM.search(pem)
    if found is None:
        raise ValueError("it holds no certificate")
    try:
        certificate = _parts(_parts(base64.b64decode(found[1]))[0][1])
        fields = _parts(certificate[0][1])
        # version (optional), serial number, algorithm, issuer, validity
        begins, ends = _parts(fields[4 if fields[0][0] == _VERSION else 3][1])
    except (IndexError, ValueError) as exc:
        raise ValueError("it holds no X.509 certificate, or a damaged one") from exc
    return _seconds(*begins), _seconds(*ends)


def _parts(data: bytes) -> list[tuple[int, bytes]]:
    """Return tag and content of each element of DER. Raises ValueError."""
    found = []
    at = 0
    while at < len(data):
        tag, size = data[at], data[at + 1] if at + 1 < len(data) else 0
        at += 2
        if size & 0x80:
            digits = size & 0x7F
            size = int.from_bytes(data[at : at + digits], "big")
            at += digits
        if at + size > len(data):
            raise ValueError("an element ends behind its end")
        found.append((tag, data[at : at + size]))
        at += size
    return found


def _seconds(tag: int, text: bytes) -> float:
    form = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}.get(tag)
    if form is None:
        raise ValueError("its validity has another form than that of X.509")
    # Years of two digits: strptime and X.509 take 69 to 99, and 50 to 99, for the last century.
    when = datetime.strptime(text.decode("ascii"), form).replace(tzinfo=timezone.utc)
    if tag == _UTC_TIME and when.year >= 2050:
        when = when.replace(year=when.year - 100)
    return when.timestamp()
