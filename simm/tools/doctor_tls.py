"""The checks of ``simm doctor`` on settings and certificates, as manager, data server and client read them here.

Each reads its own: a variable or a table of one does not concern another. Which of them this host is for, nobody says.
So TLS options that one of them takes are no failure for another, unless they are in that one's own table. What a
manager takes and a data server refuses is a warning.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from ..config.certificates import validity
from ..config.client_options import ClientOptions
from ..config.parsers import TlsOptions
from ..config.settings import Settings, load
from ..config.startup import server_tls_options
from ..errors import ConfigError, UsageError
from .findings import Verdict, check, fail, ok, warn

#: A certificate that ends sooner is reported, seconds.
SOON_S: Final = 14 * 86_400.0
#: Command -> what it is called.
_ROLES: Final[Mapping[str, str]] = {"manager": "manager", "dataserver": "data server", "client": "client"}
_SETTINGS: Final = ("tls_ca", "tls_cert", "tls_key", "tls_client_ca", "tls_name")


def _read() -> tuple[dict[str, Settings], dict[str, list[str]]]:
    """Return the settings of each command that can read its own, and by what is wrong the names of the others."""
    found: dict[str, Settings] = {}
    faults: dict[str, list[str]] = {}
    for command, name in _ROLES.items():
        try:
            found[command] = load(command)
        except ConfigError as exc:
            faults.setdefault(str(exc), []).append(name)
    return found, faults


@check("settings")
def check_settings(sys_root: str) -> Verdict:
    """Check that manager, data server and client can read the environment and the settings file."""
    _, faults = _read()
    if not faults:
        return ok("manager, data server and client can read their settings")
    shown = "; ".join(f"{fault} ({', '.join(names)})" for fault, names in faults.items())
    return fail(shown, "correct the setting that is named")


@check("tls")
def check_tls(sys_root: str) -> Verdict:
    """Check the certificates, their keys and the authorities that SIMM_TLS_* or the settings file name."""
    found: dict[str, TlsOptions] = {}
    refused: dict[str, str] = {}
    settings, unread = _read()
    for command, its in settings.items():
        try:
            options = _options(command, its)
        except (ConfigError, UsageError) as exc:
            if any(its.origin(name).endswith(f"[{command}]") for name in _SETTINGS):
                return _unusable(f"{exc} ({_ROLES[command]})")
            refused[command] = str(exc)
        else:
            if options is not None:
                found[command] = options
    names = [name for each in unread.values() for name in each]
    unknown = f"; not checked: {', '.join(names)}, see settings" if names else ""
    if not found:
        if refused:
            return _unusable(f"{next(iter(refused.values()))} ({', '.join(_ROLES[each] for each in refused)})")
        return ok(f"no certificate is configured (SIMM_TLS_CERT, SIMM_TLS_CA): connections are in plain text{unknown}")
    verdicts = {command: _judged(command, options) for command, options in found.items()}
    worst = min((status for status, _, _ in verdicts.values()), key=("fail", "warn", "ok").index)
    details: dict[str, list[str]] = {}
    for command, (status, detail, _) in verdicts.items():
        if status == worst:
            details.setdefault(detail, []).append(_ROLES[command])
    shown = "; ".join(f"{detail} ({', '.join(names)})" for detail, names in details.items())
    remedy = next(remedy for status, _, remedy in verdicts.values() if status == worst)
    if "manager" in found and "dataserver" in refused:
        # Right for a host of managers alone, so no failure.
        shown += f"; a data server would not start with this: {refused['dataserver']}"
        worst = "warn" if worst == "ok" else worst
        remedy = "; ".join(each for each in (remedy, "set SIMM_TLS_CA") if each)
    return worst, shown + unknown, remedy


def _options(command: str, settings: Settings) -> TlsOptions | None:
    """Return what a command makes of its settings; None without TLS. Raises ConfigError, UsageError for half a set."""
    if command != "client":
        return server_tls_options(settings, connects=command == "dataserver")
    ca, cert, key = (str(path or "") for path in (settings.tls_ca, settings.tls_cert, settings.tls_key))
    return ClientOptions(tls_ca=ca, tls_cert=cert, tls_key=key, tls_name=settings.tls_name).tls


def _unusable(what: str) -> Verdict:
    return fail(f"TLS cannot be used: {what}", "correct the file, or the setting that names it")


def _judged(command: str, options: TlsOptions) -> Verdict:
    """Return the verdict on one command's files, read as it reads them."""
    from ..net import tls

    try:
        if options.ca:
            tls.for_loops(options if command == "client" else TlsOptions(options.ca))
        if not options.cert:
            return ok(f"connections are by TLS, with the authorities in {options.ca}")
        context = tls.for_ports(options)
        begins, ends = validity(Path(options.cert).read_text("latin-1"))
    except (ConfigError, OSError, ValueError) as exc:
        return _unusable(str(exc))
    # Who accepts a client's certificate, its servers know.
    return _judge(options if command != "client" else options._replace(ca=""), context, begins, ends)


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
