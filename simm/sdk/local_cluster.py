"""A cluster of one manager and one data server as child processes, for embedding, tests and demos.

The children end with this process, whatever ends it: they hold a pidfd of it (``--end-with``).
:meth:`LocalCluster.close` ends them and removes their temporary folder and arena. That also happens when the cluster is
collected or the interpreter exits. After a SIGKILL the data server removes its arena; the next cluster of this user
removes the folder, as it finds the lock in it free.

Every user of the host can connect to the servers' ports. So a cluster draws a token, which only its own user and root
can read: in the cluster's folder, and where this user's clients look for it (``config/local_token.py``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..arena.layout import State
from ..config.local_token import PublishedToken, line_of
from ..config.parsers import arena_bytes, parse_address
from ..config.settings import load
from ..config.startup import ensure_runtime_dir
from ..errors import ConfigError, SimmError
from ..host.file_locks import LockFile
from ..ipc.segments import embedded_server_name, is_arena_of, metadata_of, state_of, store_closed
from ..shm import SHM_DIR, remove_leftovers

#: A starting server is given up when it has neither said READY nor got on (:func:`_progress`) for so long.
START_S: Final = 60.0
#: How long a data server waits for the manager: it is here, and we see whether it lives.
_JOIN: Final = "24h"
STOP_S: Final = 5.0
#: Between two looks at a server that starts.
_LOOK_S: Final = 1.0
_FOLDER: Final = "simm-local-"
_LOCK: Final = "owner.lock"
_TOKEN: Final = "token"
_SOCKETS: Final = "run"
#: Arguments of a client of such a cluster: what the environment says of TLS is for the cluster that it names.
WITHOUT_TLS: Final[Mapping[str, Any]] = dict.fromkeys(("tls_ca", "tls_cert", "tls_key", "tls_name"), "")


def child_environment() -> dict[str, str]:
    """Return the environment of a child process: no SIMM_* settings, and the same simm package as in this process.

    Nor what a service manager gave this process: its state is its own to report (``net/sd_notify.py``).
    """
    ours = ("SIMM_", "NOTIFY_SOCKET", "WATCHDOG_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    root = str(Path(__file__).resolve().parents[2])
    # An empty entry of PYTHONPATH, as in ``PYTHONPATH=$MINE:``, is the current folder.
    searched = [root, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, searched))
    return environment


class LocalCluster:
    """Start a cluster at construction, end it at :meth:`close`. ``manager`` is the address for clients.

    Args:
        memory: bytes of each worker's arena, or text such as ``"2G"``.
        arguments: further command-line arguments of the data server. Paths in them are absolute.
        name: the data server's; one that is used once by default. Of a name that is given, a suspended arena
            (``--warm``) is left for the next one.
        own_token: draw a token; without one ``arguments`` say who may connect.
        runtime_dir: a folder in which to publish the token and where the sockets are, besides that of this user's
            settings.
        sockets: the data server's runtime folder; None for one of its own.

    Raises ConfigError for a size that no arena has, SimmError with the reason if a server does not start. Nothing is
    left then.
    """

    def __init__(
        self, memory: int | str = 1 << 30, *, arguments: tuple[str, ...] = (), name: str = "", own_token: bool = True,
        runtime_dir: Path | None = None, sockets: Path | None = None,
    ) -> None:  # fmt: skip
        self._pid = os.getpid()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.name = name or embedded_server_name(self._pid)
        self.folder = ""
        #: What clients of this cluster need, and the file that has it; empty without a token of its own.
        self.token = secrets.token_urlsafe() if own_token else ""
        self.token_file = ""
        #: Of the servers, which are their leaders. A server's children are in it, also once they are orphans.
        self._sessions: list[int] = []
        self._undo = contextlib.ExitStack()
        # Not with ``self``, which would then never be collected.
        self._finalizer = weakref.finalize(self, _close_in, self._pid, self._undo)
        try:
            self.folder = _make_folder(self._undo)
            self.sockets = Path(self.folder, _SOCKETS) if sockets is None else sockets.absolute()
            self._undo.callback(_remove_arenas, self.name, self._sessions, keep_suspended=bool(name))
            self._write_token()
            state = os.path.join(self.folder, "state")
            ready = self._start("manager", "--listen", "127.0.0.1:0", "--state-dir", state, *self._token_flags)
            self.manager = ready.split()[2]
            self._publish(runtime_dir)  # a client that comes before the data server hears that there is none yet
            self._start(
                "dataserver", "--listen", "127.0.0.1:0", "--manager", self.manager, *self._token_flags,
                "--memory", str(arena_bytes(memory)), "--numa", "0", "--name", self.name,
                "--runtime-dir", str(self.sockets), "--join-timeout", _JOIN, *arguments,
            )  # fmt: skip
        except OSError as exc:
            self.close()
            raise SimmError(f"no cluster can be started on this machine: {exc}") from exc
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<LocalCluster {getattr(self, 'manager', 'starting')}>"

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the manager and of the data server's supervisor."""
        return {module: process.pid for module, process in self._processes.items()}

    @property
    def _token_flags(self) -> tuple[str, ...]:
        return ("--token-file", self.token_file) if self.token_file else ()

    def _write_token(self) -> None:
        if self.token:
            self.token_file = os.path.join(self.folder, _TOKEN)
            fd = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(fd, "w", encoding="utf-8") as file:
                file.write(line_of(self.token))

    def _publish(self, folder: Path | None) -> None:
        """Put the token, if there is one, and the folder of the sockets where clients and commands look for them.

        Where that cannot be, they need SIMM_TOKEN_FILE and ``--runtime-dir``. Also beside the data server's sockets,
        for commands that are told of that folder. Without a token of its own, too: commands would act on the data
        server of another cluster.
        """
        folders = [self.sockets] if folder is None else [self.sockets, folder]
        with contextlib.suppress(ConfigError):
            folders.append(load("client").runtime_dir)
        for each in dict.fromkeys(folders):
            with contextlib.suppress(ConfigError, OSError):
                where = _to_publish_in(each, own=each == self.sockets)
                made = PublishedToken(where, parse_address(self.manager), self.token, self.sockets)
                self._undo.callback(made.close)

    def _start(self, module: str, *arguments: str) -> str:
        """Start a server, wait for its READY line, and return it."""
        with open(self._log(module), "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"simm.{module}", "--end-with", str(self._pid), *arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                env=child_environment(),
                # ``python -m`` finds modules in the current folder first, and others may be able to write the caller's.
                cwd=self.folder,
                start_new_session=True,  # a Ctrl-C is for this process, which ends them in order
            )  # fmt: skip
        self._undo.callback(_end, process)
        self._processes[module] = process
        self._sessions.append(process.pid)
        assert process.stdout is not None

        most = 0

        def progress() -> object:
            nonlocal most
            for before, its in self._processes.items():
                if before != module and its.poll() is not None:
                    raise SimmError(f"the {module} did not start, as the {before} has ended: {self.how_ended(before)}")
            mapped, arenas, steps = _progress(self.name, process.pid, self._log(module))
            most = max(most, mapped)  # children that end and are started again and again get nowhere
            return most, arenas, steps

        line = _first_line(process.stdout.fileno(), START_S, progress)
        if line is not None and line.startswith("READY "):
            return line
        if line is None:
            idle = f"nothing has happened for {START_S:.0f} s"
            raise SimmError(f"the {module} did not start: {idle}; {self._said(module)}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)  # its output ends a moment before it does
        raise SimmError(f"the {module} did not start: {self.how_ended(module)}")

    def how_ended(self, module: str) -> str:
        """Return why a server has ended: the signal that killed it, else the last line of its log."""
        code = self._processes[module].poll()
        if code is None or code >= 0:
            return self._said(module)
        try:
            number = f"signal {-code} ({signal.Signals(-code).name})"
        except ValueError:
            number = f"signal {-code}"
        hint = "; the kernel does that when memory runs out, see dmesg" if -code == signal.SIGKILL else ""
        return f"it was killed by {number}{hint}"

    def _log(self, module: str) -> str:
        return os.path.join(self.folder, f"{module}.log")

    def _said(self, module: str) -> str:
        """Return the last line of a server's log."""
        with contextlib.suppress(OSError), open(self._log(module), encoding="utf-8", errors="replace") as log:
            lines = log.read().strip().splitlines()
            if lines:
                return lines[-1]
        return "it logged nothing"

    def close(self) -> None:
        """End both processes, remove their arena and folder. Does nothing the second time, or in a forked child."""
        self._finalizer()
        self._processes.clear()


def _close_in(pid: int, undo: contextlib.ExitStack) -> None:
    """Undo what the process ``pid`` has done, if this is that process and not a forked child."""
    if os.getpid() == pid:
        undo.close()


def _to_publish_in(folder: Path, *, own: bool) -> Path:
    """Return a runtime folder, made if it is missing. Raises ConfigError, OSError if others could change what is in it.

    One that is there keeps its mode and ACLs: another data server may have its sockets in it, which its group reaches
    by them. ``own``: this cluster's data server has its sockets there, and takes others' right to write away.
    """
    try:
        about = folder.lstat()
    except FileNotFoundError:
        return ensure_runtime_dir(folder)
    private = not stat.S_IMODE(about.st_mode) & 0o022  # those of the group are an ACL's mask, too
    if own and not private:
        return ensure_runtime_dir(folder)
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or not private:
        raise ConfigError(f"{folder} is not a folder that this user alone may write")
    return folder


def _make_folder(undo: contextlib.ExitStack) -> str:
    """Make a cluster's folder, with a lock while this process lives, and remove those of processes that were killed."""
    parent = tempfile.gettempdir()
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(parent)):
            lock = os.path.join(entry.path, _LOCK)
            if entry.name.startswith(_FOLDER) and entry.is_dir(follow_symlinks=False) and os.path.isfile(lock):
                with contextlib.suppress(OSError, SimmError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        _remove_folder(entry.path, LockFile.take(lock))
    while True:
        folder = tempfile.mkdtemp(prefix=_FOLDER, dir=parent)
        lock_file = None
        with contextlib.suppress(FileNotFoundError):  # the folder has gone between two looks at it
            lock_file = LockFile.take(os.path.join(folder, _LOCK))
        if lock_file is not None:
            undo.callback(_remove_folder, folder, lock_file)
            return folder
        # A process that looked for folders without an owner was faster, and removes it.


def _remove_folder(folder: str, lock: LockFile | None) -> None:
    """Remove a cluster's folder. No effect without its lock."""
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _remove_arenas(server: str, sessions: Sequence[int], *, keep_suspended: bool) -> None:
    """Remove what a killed data server has left in shared memory. Its workers may take a moment to end.

    ``sessions``: those of this cluster's servers. Once nobody is left in them, arenas that are in use are those of
    another data server of this name, with another folder.
    """

    def ours(name: str) -> bool:
        if not is_arena_of(server, name):
            return False
        with contextlib.suppress(SimmError):
            return not (keep_suspended and state_of(metadata_of(name)) == State.SUSPENDED)
        return True

    until = time.monotonic() + STOP_S
    with contextlib.suppress(OSError):
        while any(map(ours, os.listdir(SHM_DIR))):
            ended = not _in_sessions(sessions)  # before the removal: who ends after it has been waited for
            with contextlib.suppress(SimmError):
                remove_leftovers("simm-", only=ours, before_unlink=store_closed)
            if ended or time.monotonic() > until:
                return  # the next data server removes what is left
            time.sleep(0.005)


def _in_sessions(sessions: Sequence[int]) -> bool:
    """Return True if a process is in one of these sessions, or if that cannot be told. O(processes)."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return True
    for pid in map(int, filter(str.isdecimal, names)):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) in sessions:
                return True
    return False


def _progress(server: str, pid: int, log: str) -> tuple[int, int, int]:
    """Return what changes while a server's process ``pid`` gets on: mapped bytes, the arenas' bytes, steps in its log.

    The mapped bytes are those of its process and its children: libraries that they import, and memory that an endpoint
    registers. With ``--group`` the arenas' data has no name in ``SHM_DIR``, and only the mapped pages tell of it. Steps
    are the different lines of the log without their numbers, hexadecimal or not, as a line may come again and again.
    """
    import psutil  # 10 ms, for who starts a cluster

    mapped = arenas = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(OSError, psutil.Error):
                mapped += each.memory_info().shared
    with contextlib.suppress(OSError):
        for entry in os.scandir(SHM_DIR):
            if is_arena_of(server, entry.name):
                with contextlib.suppress(OSError):
                    arenas += entry.stat(follow_symlinks=False).st_blocks * 512
    steps: set[bytes] = set()
    with contextlib.suppress(OSError), open(log, "rb") as lines:
        steps.update(line.translate(None, b"0123456789abcdef") for line in lines)
    return mapped, arenas, len(steps)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and wait for it. Kill it if that takes too long."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _first_line(fd: int, seconds: float, progress: Callable[[], object]) -> str | None:
    """Return the first line from a pipe, or what there is when it closes.

    Return None when for so many seconds nothing has come, and ``progress()`` has not changed.
    """
    data = b""
    before, until = progress(), time.monotonic() + seconds
    poll = select.poll()  # select() takes no descriptors from 1024 on, which engines have
    poll.register(fd, select.POLLIN)
    while b"\n" not in data:
        left = until - time.monotonic()
        if left <= 0:
            return None
        if poll.poll(min(left, _LOOK_S) * 1000):
            piece = os.read(fd, 4096)
            if not piece:
                break
            data += piece
        elif (now := progress()) != before:
            before, until = now, time.monotonic() + seconds
    return data.split(b"\n")[0].decode(errors="replace")
