"""Load processes: each has a client, and runs until its stdin is closed.

A process says ``ready`` once it is connected, and has stored all its keys if it is to. It answers each line on stdin
with the number of its calls and of those since the last one that failed, and says a line of JSON at its end. Into the
file ``out``, if there is one, goes a numpy array of one row a call (:data:`.records.ROW`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from simm.client import Client
from tests.support.child import READY_S, THIS_HOST, Child, Place, module_command
from tests.support.waiting import wait_until

from .generator import Load, Settings
from .records import ROW, Records

#: The deadline of a load in which no call may fail, seconds: a busy machine alone never makes a call take that long.
#: Moving a shard takes four messages between three processes, so with a short one a failure would say nothing of SiMM.
PATIENT_S: Final = 20.0
#: Bound for a client's connection, seconds.
_CONNECT_S: Final = 60.0
#: Bound for the end of a process in an emulator, seconds.
_END_S: Final = 300.0
#: The last so many of the client's log lines are reported.
_LINES: Final = 12


# -- in the process --------------------------------------------------------------------------------


def main(text: str) -> int:
    """Be the process. ``text``: the settings (:class:`LoadProcess`) as JSON."""
    asked: dict[str, Any] = json.loads(text)
    out, fill, need_path, number = (asked.pop(name) for name in ("out", "fill", "need_path", "number"))
    client_asked = asked.pop("client")
    lines: deque[str] = deque(maxlen=_LINES)
    logging.getLogger("simm").addHandler(_Collecting(lines))
    with Client(asked.pop("manager"), **client_asked) as client:
        load = Load(client, number, Settings(**asked), keep_rows=bool(out))
        if not client.wait_ready(_CONNECT_S):
            load.said.append(f"not ready: {client.stats()}")
        if need_path:
            wait_until(lambda: _all_by(client, need_path), lambda: f"{need_path}: {client.stats()}", READY_S)
        with _watched(load, client_asked["deadline_s"] / 2, lines):
            if fill:
                load.fill()
            print("ready", flush=True)
            load.run(lambda: _told(load))
        if out:
            np.save(out, np.array(load.rows, ROW))
        report = {"said": load.said, "stats": client.stats(), "count": load.count, "figures": load.figures(),
                  "longest": load.slowest_s, "refusals": load.refusals, "lines": list(lines)}  # fmt: skip
    print(json.dumps(report), flush=True)
    return 0


class _Collecting(logging.Handler):
    """Keeps what the client logs, with the time that the calls' rows have."""

    def __init__(self, lines: deque[str]) -> None:
        super().__init__(logging.INFO)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{time.monotonic():.2f} {record.levelname} {record.getMessage()}")


@contextlib.contextmanager
def _watched(load: Load, seconds: float, lines: deque[str]) -> Iterator[None]:
    """Note where each thread is when a call has taken so long, once for each such call."""
    over = threading.Event()

    def watch() -> None:
        seen = 0.0
        while not over.wait(seconds / 4):
            began = load.in_call_since
            if began and began != seen and time.monotonic() - began > seconds:
                seen = began
                for number, frame in sys._current_frames().items():
                    if number != threading.get_ident():
                        where = traceback.extract_stack(frame)[-8:]
                        lines.append(" < ".join(f"{at.name}:{at.lineno}" for at in reversed(where)))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _all_by(client: Client, path: str) -> bool:
    paths = [worker["path"] for worker in client.stats()["workers"]]
    return bool(paths) and set(paths) == {path}


def _told(load: Load) -> bool:
    """Answer a line from stdin; return True at its end."""
    if not select.select([0], [], [], 0)[0]:
        return False
    if not os.read(0, 1):
        return True
    print(load.noted, load.streak, flush=True)
    return False


# -- seen by the test ------------------------------------------------------------------------------------


class LoadProcess(Child):
    """One load process.

    Args:
        manager: the manager's address; ``number``: that of the writer.
        path: the client's, as ``deadline_s`` and ``client``, further arguments of it.
        need_path: wait until all workers are reached by this path.
        fill: begin with a put of each key.
        out: the file for its calls; "" to keep none.
        place: where it runs.
        patches: switches of ``tests.support.patched``.
        settings: fields of :class:`.generator.Settings`.
    """

    def __init__(
        self, manager: str, number: int, *, path: str = "auto", deadline_s: float = 2.0, need_path: str = "",
        fill: bool = True, out: str = "", client: Mapping[str, Any] | None = None, place: Place = THIS_HOST,
        patches: Sequence[str] = (), **settings: Any,
    ) -> None:  # fmt: skip
        self.out = Path(out) if out else None
        asked = {
            "manager": manager, "number": number, "need_path": need_path, "fill": fill, "out": out,
            "client": {"path": path, "deadline_s": deadline_s, **(client or {})}, **settings,
        }  # fmt: skip
        words = module_command("tests.support.load", json.dumps(asked), patches=patches)
        super().__init__(words, name=f"load process {number}", place=place, talks=True)

    def wait_ready(self) -> None:
        """Wait until it is connected, and has stored its keys."""
        self.expect("ready\n")

    def progress(self) -> tuple[int, int]:
        """Ask the process for the number of its calls, and of those since the last one that failed."""
        self.tell("")
        calls, streak = map(int, self.read_line().split())
        return calls, streak

    def wait_streak(self, least: int, what: str, seconds: float) -> None:
        """Wait until it has made ``least`` calls from now on, the last ``least`` of them without a failure."""
        before, _ = self.progress()

        def reached() -> bool:
            calls, streak = self.progress()
            return calls >= before + least and streak >= least

        wait_until(reached, what, seconds)

    def report(self) -> dict[str, Any]:
        """End it, and return its report."""
        said = self.rest(_END_S)
        assert self.process.returncode == 0, "a client failed: a cache problem went through to the engine"
        report: dict[str, Any] = json.loads(said.splitlines()[-1])
        return report

    def end_now(self) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        """End it, and return its rows and its report."""
        report = self.report()
        assert self.out is not None
        return np.load(self.out), report

    def kill(self) -> None:
        """Kill it, and remove its file."""
        super().kill()
        if self.out is not None:
            self.out.unlink(missing_ok=True)


def total(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of the figures of some reports, and ``said``, all their complaints."""
    sums: dict[str, Any] = {"said": [words for report in reports for words in report["said"]]}
    for report in reports:
        for name, value in report["figures"].items():
            sums[name] = sums.get(name, 0) + value
    return sums


class Clients:
    """Some load processes; ``records()`` or ``reports()`` ends them and returns what they saw."""

    def __init__(self, clients: Sequence[LoadProcess]) -> None:
        self.clients = clients
        #: From now on all keys are there.
        self.ready_at = time.monotonic()
        self.reports: list[dict[str, Any]] = []

    def end(self) -> list[dict[str, Any]]:
        """End all at once, and return their reports."""
        for client in self.clients:
            client.close_input()
        self.reports = [client.report() for client in self.clients]
        return self.reports

    def records(self) -> Records:
        """End all, and merge their rows, which must have been kept."""
        said = [words for report in self.end() for words in report["said"]]
        rows = np.concatenate([np.load(client.out) for client in self.clients if client.out is not None])
        why = [f"{report['refusals']} {report['lines']}" for report in self.reports if report["refusals"]]
        return Records(rows[np.argsort(rows["began"], kind="stable")], said, why)


@contextlib.contextmanager
def load(
    manager: str, folder: Path | None, count: int = 2, *, paths: Sequence[str] = ("auto", "tcp"),
    places: Sequence[Place] = (), deadlines_s: Sequence[float] = (), each: Sequence[Mapping[str, Any]] = (),
    **settings: Any,
) -> Iterator[Clients]:  # fmt: skip
    """Run ``count`` clients, each with keys of its own, that read all keys; kill what is left at the end.

    ``paths``, ``places`` and ``deadlines_s`` are assigned in turn. ``each``: further arguments of each
    :class:`LoadProcess`, whose number this is; ``settings`` are of all. Rows are kept in ``folder`` if there is one.
    """
    with contextlib.ExitStack() as stack:
        started = []
        for number in range(len(each) or count):
            one: dict[str, Any] = {"number": number, "writers": count, "path": paths[number % len(paths)], **settings}
            if folder is not None:
                one["out"] = str(folder / f"load{os.getpid()}-{number}.npy")
            if deadlines_s:
                one["deadline_s"] = deadlines_s[number % len(deadlines_s)]
            if places:
                one["place"] = places[number % len(places)]
            if each:
                one.update(each[number])
            started.append(stack.enter_context(LoadProcess(manager, **one)))
        for client in started:
            client.wait_ready()
        yield Clients(started)
