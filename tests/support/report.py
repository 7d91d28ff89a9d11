"""Lines that tests have printed at pytest's end: what was measured, what stood in for what.

Where pytest-xdist runs the tests in several processes (``scripts/test`` does) the lines of all of them come together
in the one that prints.
"""

from __future__ import annotations

from typing import Any, Final

_WORKER_OUTPUT: Final = "simm_notes"
#: By title; "" is printed without one.
_notes: dict[str, list[str]] = {}


def note(line: str, title: str = "") -> None:
    """Print this line at the end, once."""
    lines = _notes.setdefault(title, [])
    if line not in lines:
        lines.append(line)


def hand_over(config: Any) -> None:
    """At the end of a process that ran tests for another one."""
    output = getattr(config, "workeroutput", None)
    if output is not None:
        output[_WORKER_OUTPUT] = dict(_notes)


def take_over(node: Any) -> None:
    """In that other one, for each such process; those that crashed bring nothing."""
    for title, lines in (getattr(node, "workeroutput", None) or {}).get(_WORKER_OUTPUT, {}).items():
        for line in lines:
            note(line, title)


def report(terminal: Any) -> None:
    """Print all of them."""
    for title, lines in sorted(_notes.items()):
        if title:
            terminal.section(title)
        for line in lines:
            terminal.write_line(line)
    _notes.clear()
