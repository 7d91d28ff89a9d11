"""A progress line instead of dots, for ``scripts/test``: ``pytest -p tests.support.progress``.

On a terminal one line is rewritten; elsewhere a line is printed at each twentieth of the tests. A failure is named at
once. It works in one process and with pytest-xdist.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Final

import pytest

#: How often a terminal's line is rewritten.
_EVERY_S: Final = 0.5
_BAR: Final = 24


class Progress:
    """Counts finished tests and prints how far the run is."""

    def __init__(self, terminal: Any, rewrite: bool) -> None:
        self.terminal = terminal
        self.rewrite = rewrite
        self.total = 0
        self.done = 0
        self.failed = 0
        self.began = time.monotonic()
        self._printed_at = 0.0
        self._printed = -1

    def line(self) -> str:
        """Return the progress as text: bar, tests, failures, minutes."""
        share = min(1.0, self.done / self.total) if self.total else 0.0
        seconds = int(time.monotonic() - self.began)
        full = int(share * _BAR)
        return (
            f"[{'#' * full}{'.' * (_BAR - full)}] {int(share * 100):3d} %  {self.done} of {self.total} tests, "
            f"{self.failed} failed, {seconds // 60}:{seconds % 60:02d}"
        )

    def step(self) -> None:
        """Count one finished test."""
        self.done += 1
        now = time.monotonic()
        twentieth = self.done * 20 // max(1, self.total)
        if self.rewrite:
            if now - self._printed_at >= _EVERY_S or self.done == self.total:
                self._printed_at = now
                self.terminal.rewrite(self.line(), erase=True)
        elif twentieth != self._printed:
            self._printed = twentieth
            self.terminal.write_line(self.line())

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Return the category without a letter to print, for the plain outcomes."""
        if hasattr(report, "wasxfail"):
            return None
        if report.failed:
            return "failed" if report.when == "call" else "error", "", ""
        if report.skipped:
            return "skipped", "", ""
        return ("passed", "", "") if report.when == "call" else None

    def pytest_collection_finish(self, session: Any) -> None:
        """Without pytest-xdist: the tests are known."""
        self.total = self.total or len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """With it: a worker process knows them."""
        self.total = len(ids)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Name a failure; count a test when it is torn down."""
        if report.failed:
            self.failed += 1
            self.terminal.ensure_newline()
            self.terminal.write_line(f"{'FAILED' if report.when == 'call' else 'ERROR'} {report.nodeid}", red=True)
        if report.when == "teardown":
            self.step()

    def pytest_sessionfinish(self) -> None:
        """Leave the line as it is."""
        self.terminal.ensure_newline()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Only the process that prints shows progress."""
    terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or hasattr(config, "workerinput"):
        return
    # File names and letters would break the line.
    terminal.showfspath = False
    rewrite = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    config.pluginmanager.register(Progress(terminal, rewrite), "simm-progress")
