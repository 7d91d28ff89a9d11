"""The processes of ``simm bench``: those that make the load, and the remote side of the raw socket."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

from ...config.settings import CLIENT as CLIENT_ROLE
from ...config.settings import SETTINGS, Settings, format_value
from ...errors import SimmError
from ...net.process import die_with_parent
from ...sdk.local_cluster import WITHOUT_TLS, LocalCluster
from .plan import Plan
from .report import FULL

#: For the rest of what load processes were at, and the deletion of their values, seconds.
WITHDRAW_S: Final = 30.0
_PIECE: Final = 1 << 16


def reach(client: dict[str, Any], settings: Settings, cluster: LocalCluster | None) -> dict[str, dict[str, Any]]:
    """Return how load processes reach the cluster: the arguments of a Client, and the environment of ``simm.kv``.

    ``cluster``: the command's own, None for the one that the settings name.
    """
    environment = {
        setting.env: format_value(getattr(settings, name))
        for name, setting in SETTINGS.items()
        if CLIENT_ROLE in setting.roles
    }
    if cluster is not None:
        client = {**client, "manager": cluster.manager, "token": cluster.token, **WITHOUT_TLS}
        environment |= {SETTINGS[name].env: "" for name in WITHOUT_TLS}
        environment |= {SETTINGS["manager"].env: cluster.manager, SETTINGS["token_file"].env: cluster.token_file}
    return {"client": client, "environment": environment}


class LoadProcesses:
    """The load processes, and the remote side of the raw socket if TCP may be measured. A context manager.

    ``reached``: what :func:`reach` returned.
    """

    def __init__(self, plan: Plan, reached: dict[str, dict[str, Any]]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._children: list[Any] = []
        self._loads: list[Any] = []
        self.paths: list[str] = []
        try:
            raw = self._far_side(context, plan) if reached["client"]["path"] != "shm" else None
            run = f"bench-{secrets.token_hex(6)}"
            for number in range(plan.processes):
                mine, theirs = context.Pipe()
                settings = {
                    **reached, "run": run, "threads": plan.threads, "first": number * plan.threads,
                    "all_threads": plan.processes * plan.threads, "working_set": plan.working_set,
                    "verify": plan.verify, "api": plan.api, "full": plan.state == FULL, "mix": plan.mix, "raw": raw,
                }  # fmt: skip
                # A child inherits the older pipes too, and would not see its own close if it kept them.
                others = [*self._pipes, mine]
                child = context.Process(target=_load_process, args=(theirs, settings, others), daemon=True)
                self._children.append(child)  # an interrupt from here on ends it
                self._loads.append(child)
                child.start()
                theirs.close()
                self._pipes.append(mine)
            for answer in self._answers():
                self.paths = sorted({*self.paths, *answer["paths"]})
        except BaseException:
            self.close()
            raise

    def _far_side(self, context: Any, plan: Plan) -> tuple[str, int]:
        listener = socket.create_server(("127.0.0.1", 0))
        share = plan.working_set // (plan.processes * plan.threads)
        child = context.Process(target=_far_process, args=(listener, share), daemon=True)
        self._children.append(child)
        child.start()
        host, port = listener.getsockname()
        listener.close()
        return host, port

    def __enter__(self) -> LoadProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        started = [child for child in self._children if child.pid is not None]
        for child in started:
            child.kill()  # they ignore other signals
        for pipe in self._pipes:
            pipe.close()
        for child in started:
            child.join()
        self._children = []
        self._loads = []
        self._pipes = []

    def withdraw(self, timeout_s: float = WITHDRAW_S) -> bool:
        """Let every load process delete its values and end; return whether all did so in time. One that died has not.

        For an error or an interrupt at any moment: an order may be unanswered, an answer half read. So nothing is made
        of what comes until the pipes' ends. No order can be asked afterwards. An interrupt ends it at once.
        """
        until = time.monotonic() + timeout_s
        poll = select.poll()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has ended
                pipe.send(("discard", {}))
                pipe.send(("end", {}))
            poll.register(pipe.fileno(), select.POLLIN)
        left = len(self._pipes)
        while left and (rest := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(rest * 1000):
                with contextlib.suppress(OSError):
                    if os.read(fd, _PIECE):
                        continue
                poll.unregister(fd)
                left -= 1
        for child in self._loads:
            child.join(max(0.0, until - time.monotonic()))
        return not left and all(child.exitcode == 0 for child in self._loads)

    def _answers(self) -> Iterator[dict[str, Any]]:
        for pipe in self._pipes:
            try:
                answer: dict[str, Any] = pipe.recv()
            except (EOFError, OSError):
                raise SimmError("a load process ended unexpectedly; look for an out-of-memory kill in dmesg") from None
            if "failed" in answer:
                raise SimmError(answer["failed"])
            yield answer

    def ask(self, what: str, **order: Any) -> list[dict[str, Any]]:
        """Send an order to every load process and return all answers. Raises SimmError if one fails."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # the answer gives the reason
                pipe.send((what, order))
        return list(self._answers())


def _as_child() -> None:
    """End with the parent, and leave to it what ends a command.

    A terminal, GNU timeout, Slurm and systemd send their signals to all processes of a command. The load processes must
    delete their values then.
    """
    die_with_parent(signal.SIGKILL)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)


def _load_process(pipe: Connection, settings: dict[str, Any], others: list[Connection]) -> None:
    _as_child()
    for other in others:
        other.close()
    from .load import serve_load  # here, to keep the command's process small and without threads

    with contextlib.suppress(EOFError, BrokenPipeError):
        serve_load(pipe, settings)


def _far_process(listener: socket.socket, share: int) -> None:
    _as_child()
    from .floor import serve_raw

    serve_raw(listener, share)
