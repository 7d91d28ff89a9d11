"""Start of every SiMM command: token files, the runtime folder, and checks of the listening address."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import shlex
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, overload

from ..errors import ConfigError
from .parsers import Address, TlsOptions
from .settings import Settings
from .tokens import Token, TokenRole, parse_tokens, token_for

log = logging.getLogger("simm.config.startup")

#: A trouble with the token file that lasts is logged once in so many attempts.
AGAIN: Final = 60
_KEPT: Final = "the tokens that were read before stay in use: %s"


def say(line: str, warn: Callable[[str], object] = log.warning) -> None:
    """Print a line on stdout at once. A server does not fail if nobody can read it, but calls ``warn``.

    Its stdout is the null device from then on: what could not be written stays in Python's buffer, and the next flush,
    at the process's end, would fail by it again.
    """
    try:
        print(line, flush=True)
    except OSError as exc:
        warn(f"cannot print {line!r}: {exc.strerror or exc}")
        with contextlib.suppress(OSError, ValueError):
            fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.dup2(fd, sys.stdout.fileno())
            finally:
                os.close(fd)
            sys.stdout.flush()


def server_tls_options(settings: Settings, *, connects: bool) -> TlsOptions | None:
    """Return a server's files for TLS, None if it has none. ``connects``: it is a client of other servers too.

    Raises ConfigError for half a set: the operator takes for encrypted what would not be.
    """
    files = {
        "tls_ca": settings.tls_ca if connects else None, "tls_cert": settings.tls_cert, "tls_key": settings.tls_key,
        "tls_client_ca": settings.tls_client_ca,
    }  # fmt: skip
    found = {name: str(path.absolute()) for name, path in files.items() if path is not None}
    if not found and not (connects and settings.tls_name):
        return None
    tls = TlsOptions(*(found.get(f"tls_{each}", "") for each in ("ca", "cert", "key", "client_ca")))
    if not tls.cert:
        given = settings.origin(next(iter(found), "tls_name"))
        raise ConfigError(f"{given} goes with --tls-cert, without which the server would speak plain text")
    if connects and not tls.ca:
        raise ConfigError(
            f"{settings.origin('tls_cert')} goes with --tls-ca: this server connects to the manager and to other data "
            "servers, and must know which authority signed their certificates"
        )
    return tls._replace(name=settings.tls_name)


def check_exposure(address: Address, tokens: Sequence[object], insecure: bool, flag: str) -> None:
    """Raise ConfigError for an address beyond loopback without a token, unless ``insecure``."""
    if address.loopback or tokens:
        return
    if not insecure:
        raise ConfigError(
            f"{flag} {address}: anyone who reaches this address could read and change the cluster. "
            "Give a --token-file, use 127.0.0.1, or pass --insecure"
        )
    log.warning("listening on %s without a token (--insecure)", address)


def allowed_uids(settings: Settings, tokens: Sequence[object]) -> tuple[int, ...] | None:
    """Return the users besides its own and root whose processes a server lets in without a token; None for all.

    Raises ConfigError if users are named where nobody looks at them.
    """
    if not tokens and not settings.insecure:
        return settings.allow_uid
    if settings.allow_uid:
        other = "token_file" if tokens else "insecure"
        means = "everybody shows a token" if tokens else "everybody is let in"
        raise ConfigError(
            f"{settings.origin('allow_uid')} has no effect with {settings.origin(other)}, as {means}: drop one of them"
        )
    return None


def read_secret(path: Path, name: str, remedy: str = "") -> str:
    """Return the text of a secret file. Raises ConfigError, in which ``name`` and ``remedy`` appear.

    Its group may read it, as Kubernetes makes the files of a Secret readable for the pod's fsGroup. Nobody else may.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text("utf-8-sig")  # a mark of the byte order would hide the `#` of a comment
    except PermissionError as exc:
        raise ConfigError(f"cannot read {name}: {_denied(path)}{remedy}") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read {name}: {exc}{remedy}") from exc
    if stat.S_IMODE(mode) & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(f"{name} may be read by all users, or written by its group: chmod 600 {path}")
    return text


def _denied(path: Path) -> str:
    """Return why this process may not read a file: whose it is, who this process is, and what to do."""
    try:
        about = path.stat()
    except OSError:
        return _denied_to(path, os.geteuid(), os.getegid(), None)
    return _denied_to(path, os.geteuid(), os.getegid(), (about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode)))


@functools.lru_cache(maxsize=16)
def _denied_to(path: Path, uid: int, gid: int, about: tuple[int, int, int] | None) -> str:
    """Return the text. ``about``: owner, group and mode of the file; None if they cannot be seen.

    Event loops try to read such a file every second, and a directory service may take long to name a user.
    """
    import grp  # only here
    import pwd

    def name_of(look: Callable[[int], Any], number: int) -> str:
        with contextlib.suppress(KeyError, OverflowError):
            return str(look(number)[0])
        return str(number)

    user, group = name_of(pwd.getpwuid, uid), name_of(grp.getgrgid, gid)
    who = f"this process is user {user} (uid {uid}) of group {group}"
    if about is None:
        return f"{who}, which may not enter a folder above it"
    owner, mode = f"{name_of(pwd.getpwuid, about[0])}:{name_of(grp.getgrgid, about[1])}", about[2]
    quoted = shlex.quote(str(path))
    # A group of another name has other users as well, as a rule.
    remedy = f"chgrp {group} {quoted} && chmod 640 {quoted}" if group == user else f"chown {user} {quoted}"
    return f"it is of {owner}, mode {mode:04o}, and {who}: {remedy}"


def read_tokens(path: Path | None) -> tuple[Token, ...]:
    """Return the tokens of a token file, none without a path. Raises ConfigError."""
    if path is None:
        return ()
    where = f"the token file {path}"
    return parse_tokens(read_secret(path, where), where)


def server_tokens(path: Path | None) -> tuple[Token, ...]:
    """Return the tokens that a manager or a data server asks its peers for. Raises ConfigError.

    Warns of tokens of the old kind. One of the tokens must be a server's, or no data server could join.
    """
    tokens = read_tokens(path)
    if tokens and token_for(tokens, TokenRole.SERVER, TokenRole.ADMIN) is None:
        raise ConfigError(f"the token file {path} has no server's token: no data server can join without a line "
                          "`server LABEL TOKEN`, the same one for manager and data servers")  # fmt: skip
    if any(token.old for token in tokens):
        log.warning(
            "the tokens in %s have no role, so everybody who has one may do everything: write lines such as "
            "`client LABEL TOKEN`, with the roles client, server and admin", path,
        )  # fmt: skip
    return tokens


class TokenFile(Sequence[Token]):
    """The tokens of a server's file, which :meth:`refresh` reads anew when it has changed. Raises ConfigError.

    A file that cannot be used changes nothing: the tokens before stay in use. So no mistake in it opens a server, and
    none closes it. One that cannot be read at the moment (no descriptor is left, its file system does not answer) is
    tried again each time, as a token may have been removed from it.

    Args:
        read: what reads the file, and says what it has to have.
    """

    def __init__(self, path: Path, read: Callable[[Path], tuple[Token, ...]] = server_tokens) -> None:
        self._path = path.absolute()
        self._read = read
        self._seen = _signature(self._path)  # before it is read: a change in between is seen later
        self._changing: tuple[int, ...] | None = None
        #: What it could not be read by, and how often in a row; each trouble is logged once in ``AGAIN`` times.
        self._trouble, self._failed = "", 0
        self._tokens = read(self._path)

    @overload
    def __getitem__(self, at: int) -> Token: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Token]: ...

    def __getitem__(self, at: int | slice) -> Token | Sequence[Token]:
        return self._tokens[at]

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, token: object) -> bool:
        return token in self._tokens

    def refresh(self) -> bool:
        """Read the file if it has changed since, and stood still between two calls. Return True for other tokens."""
        now = _signature(self._path)
        if now == self._seen:
            self._changing, self._trouble = None, ""
            return False
        if now != self._changing:  # another program may be writing it
            self._changing = now
            return False
        try:
            tokens = self._read(self._path)
        except ConfigError as exc:
            if isinstance(exc.__cause__, OSError):
                self._not_read(str(exc))
            else:
                self._seen, self._changing, self._trouble = now, None, ""
                log.error(_KEPT, exc)
            return False
        self._seen, self._changing, self._trouble = now, None, ""
        if tokens == self._tokens:
            return False
        self._tokens = tokens
        log.info("the token file %s has changed: %d tokens", self._path, len(tokens))
        return True

    def _not_read(self, why: str) -> None:
        """Note that the system failed to read the file, which is to be tried again."""
        self._failed = self._failed + 1 if why == self._trouble else 0
        self._trouble = why
        if self._failed % AGAIN == 0:
            log.error(_KEPT, why)


def _signature(path: Path) -> tuple[int, ...]:
    """Return what differs when a file was changed or replaced; nothing if there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev, found.st_size, found.st_mode


def live_tokens(
    path: Path | None, read: Callable[[Path], tuple[Token, ...]] = server_tokens
) -> Sequence[Token]:
    """Return tokens that follow the file, as ``read`` reads it; none without a path. Raises ConfigError."""
    return TokenFile(path, read) if path is not None else ()


def ensure_runtime_dir(path: Path, gid: int | None = None) -> Path:
    """Create the folder of the UNIX sockets, or check the existing one, and return it.

    Its mode is 0700, or 0710 for members of group ``gid``. Raises ConfigError if another user owns it or could put
    sockets into it, as any user can create the name in /tmp first.
    """
    remedy = "choose another folder with --runtime-dir"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        about = path.lstat()
    except OSError as exc:
        raise ConfigError(f"cannot create the runtime folder {path}: {exc.strerror or exc}; {remedy}") from exc
    if not stat.S_ISDIR(about.st_mode):
        raise ConfigError(f"the runtime folder {path} is not a folder (links are not followed); {remedy}")
    if about.st_uid != os.getuid():
        raise ConfigError(f"the runtime folder {path} belongs to uid {about.st_uid}, not to {os.getuid()}; {remedy}")
    try:
        if gid is None:
            if stat.S_IMODE(about.st_mode) & 0o077:
                path.chmod(0o700)
        else:
            os.chown(path, -1, gid)
            path.chmod(0o710)
        _drop_acls(path)
    except OSError as exc:
        raise ConfigError(f"cannot set the mode of the runtime folder {path}: {exc.strerror or exc}; {remedy}") from exc
    return path


def _drop_acls(folder: Path) -> None:
    """Let a folder's mode say all, and those of sockets in it. Raises OSError."""
    for name in ("system.posix_acl_access", "system.posix_acl_default"):
        try:
            os.removexattr(folder, name)
        except OSError as exc:
            if exc.errno not in (errno.ENODATA, errno.ENOTSUP):
                raise
