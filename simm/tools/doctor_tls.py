"""The check of ``simm doctor`` on certificates."""

from __future__ import annotations

import re
import ssl
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from ..config.parsers import TlsOptions
from ..config.settings import load
from ..errors import ConfigError
from .findings import Verdict, check, fail, ok, warn

#: A certificate that ends sooner is reported, seconds.
SOON_S: Final = 14 * 86_400.0
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# Tags of ASN.1.
_VERSION: Final = 0xA0
_UTC_TIME: Final = 0x17
_GENERALIZED_TIME: Final = 0x18


@check("tls")
def check_tls(sys_root: str) -> Verdict:
    """Check the certificate, its key and the authorities that SIMM_TLS_* or the settings file name."""
    settings = load("config")
    texts = [str(path.absolute()) if path else "" for path in (
        settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_client_ca,
    )]  # fmt: skip
    options = TlsOptions(*texts)
    if not any(options):
        return ok("no certificate is configured (SIMM_TLS_CERT, SIMM_TLS_CA): connections are in plain text")
    from ..net import tls

    try:
        if options.ca:
            tls.for_channels(TlsOptions(options.ca))
        if not options.cert:
            return ok(f"connections are by TLS, with the authorities in {options.ca}")
        context = tls.for_ports(options)
        begins, ends = validity(Path(options.cert).read_text("latin-1"))
    except (ConfigError, OSError, ValueError) as exc:
        return fail(f"TLS cannot be used: {exc}", "correct the file, or the setting that names it")
    return _judge(options, context, begins, ends)


def _judge(options: TlsOptions, context: ssl.SSLContext, begins: float, ends: float) -> Verdict:
    now = time.time()
    day = datetime.fromtimestamp(ends, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    detail = f"{options.cert} is valid until {day}"
    renew = "put a new certificate in its place: servers read it within a second, without a restart"
    if now > ends:
        return fail(f"{options.cert} has expired: {day}", renew)
    if now < begins:
        return fail(f"{options.cert} is not valid yet", "set this host's clock, or wait")
    if options.ca and (fault := distrusted(context, options)):
        return warn(f"{detail}; {options.ca} does not accept it: {fault}", "let one of these authorities sign it")
    if ends - now < SOON_S:
        return warn(f"{detail}, {(ends - now) / 86_400:.0f} days more", renew)
    return ok(detail)


def distrusted(server: ssl.SSLContext, options: TlsOptions) -> str:
    """Return why a client with these authorities would not accept the certificate for any name; empty if it would."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(cafile=options.ca)
    server.sslsocket_class = ssl.SSLSocket
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    for _ in range(4):  # each turn carries one flight
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as exc:
                return exc.verify_message
            except ssl.SSLError as exc:
                return (exc.reason or "").replace("_", " ").lower()
    return ""


def validity(pem: str) -> tuple[float, float]:
    """Return from when until when the first certificate is valid, seconds since 1970. Raises ValueError.

    The standard library shows that of a peer's certificate only.
    """
    found = _PEM.search(pem)
    if found is None:
        raise ValueError("it holds no certificate")
    try:
        certificate = _parts(_parts(ssl.PEM_cert_to_DER_cert(found[0]))[0][1])
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
