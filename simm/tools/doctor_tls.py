"""The check of ``simm doctor`` on certificates."""

from __future__ import annotations

import ssl
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from ..config.certificates import validity
from ..config.parsers import TlsOptions
from ..config.settings import load
from ..errors import ConfigError
from .findings import Verdict, check, fail, ok, warn

#: A certificate that ends sooner is reported, seconds.
SOON_S: Final = 14 * 86_400.0


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
