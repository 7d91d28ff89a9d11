"""What every SiMM command does before its work: logging, tokens, and who may connect."""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .config import Settings
from .errors import ConfigError
from .quantities import Address

log = logging.getLogger("simm.startup")

TOKENS_MAX: Final = 2
TOKEN_BYTES_MIN: Final = 16
TOKEN_BYTES_MAX: Final = 1024
_FORMAT: Final = "%(asctime)s %(levelname).1s %(process)d %(name)s: %(message)s"


def set_up_logging(settings: Settings) -> None:
    """Log to the settings' file, or to stderr, and say so, where it cannot be opened."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    trouble = ""
    if settings.log_file is not None:
        try:
            settings.log_file.parent.mkdir(parents=True, exist_ok=True)
            handler = logging.FileHandler(settings.log_file)
        except OSError as exc:
            trouble = f"cannot log to {settings.log_file} ({exc.strerror or exc}): logging to stderr"
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger("simm")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(settings.log_level.upper())
    if trouble:
        root.warning("%s", trouble)


def check_exposure(address: Address, tokens: Sequence[str], insecure: bool, flag: str) -> None:
    """Refuse an address that others reach without a token. Raises ConfigError."""
    if address.loopback or tokens:
        return
    if not insecure:
        raise ConfigError(
            f"{flag} {address}: anyone who reaches this address could read and change the cluster. "
            "Give a --token-file, use 127.0.0.1, or say --insecure"
        )
    log.warning("listening on %s without a token (--insecure)", address)


def read_tokens(path: Path | None) -> tuple[str, ...]:
    """The tokens of a token file, one a line, two while they rotate. Raises ConfigError."""
    if path is None:
        return ()
    try:
        mode = os.stat(path).st_mode
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the token file {path}: {exc}") from exc
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"the token file {path} may be read by others: chmod 600 {path}")
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not 0 < len(tokens) <= TOKENS_MAX:
        raise ConfigError(f"the token file {path} has {len(tokens)} tokens, 1 or {TOKENS_MAX} are allowed")
    for token in tokens:
        if not TOKEN_BYTES_MIN <= len(token.encode()) <= TOKEN_BYTES_MAX:
            raise ConfigError(f"a token in {path} has not {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} bytes")
    return tokens
