"""Settings that an operator changes while a server runs, and how all its processes learn of it.

The values are in a page of anonymous memory that the server shares with the processes that it forks, and with nobody
else. The server stores a value and sends SIGHUP; each process then looks (:func:`~simm.config.logs.reopen_logs`). A
process that is forked later finds the values as they are, so a restart of a worker takes none back. A restart of the
server does: what is to last belongs into its settings.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..constants import POLICY_NAMES
from ..errors import ConfigError, UsageError
from .logs import on_reload
from .settings import MANAGER, SERVER, SETTINGS, format_value

LEVELS: Final = ("debug", "info", "warning", "error")
#: Settings whose values are words, which stand in the page by their places here.
_WORDS_OF: Final[Mapping[str, tuple[str, ...]]] = {"log_level": LEVELS, "policy": POLICY_NAMES}
_WORDS: Final = 512
#: What does without a restart what somebody wants who asks for one of these here.
_BY_COMMAND: Final[Mapping[str, str]] = {
    "trace": "`simm trace start --ratio 0.01` lets all clients of this host trace, --all those of the cluster",
    "memory": "`simm ctl grow --memory SIZE` adds memory to a data server that runs; what is to last belongs into "
              "SIMM_MEMORY as well",
}  # fmt: skip


class LiveSettings:
    """The settings of one server that may change. ``values``: those that it was started with, by name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._places = {name: place for place, name in enumerate(values)}
        self._started = dict(values)
        self._page = mmap.mmap(-1, _WORDS * 8)
        self._words = memoryview(self._page).cast("Q")
        for name, value in values.items():
            self._store(name, value)

    def __getitem__(self, name: str) -> Any:
        """Return the value now."""
        word, words = self._words[self._places[name]], _WORDS_OF.get(name)
        return word if words is None else words[word]

    def _store(self, name: str, value: Any) -> None:
        words = _WORDS_OF.get(name)
        self._words[self._places[name]] = value if words is None else words.index(value)

    def follow(self, name: str, take: Callable[[Any], object]) -> None:
        """Call ``take`` with the value, now and in this process, and in children forked later, when it has changed."""
        last = self[name]
        take(last)

        def look() -> None:
            nonlocal last
            value = self[name]
            if value != last:
                last = value
                take(value)

        on_reload(look)

    def set(self, name: str, text: str) -> Any:
        """Take a value as its setting's parser reads it, and return the one before. Raises UsageError."""
        if name not in self._places:
            raise UsageError(_why_not(name, list(self._places)))
        try:
            value = SETTINGS[name].parse(text)
        except ConfigError as exc:
            raise UsageError(f"{name}: {exc}") from None
        before = self[name]
        self._store(name, value)
        return before

    def rows(self) -> list[dict[str, Any]]:
        """Return name, value, the value that the server was started with, and what it is, of each setting."""
        return [
            {"name": name, "value": format_value(self[name]), "started_with": format_value(self._started[name]),
             "about": SETTINGS[name].help}
            for name in self._places
        ]  # fmt: skip


def _why_not(name: str, live: list[str]) -> str:
    """Return why a setting cannot be changed here, and what to do."""
    can = ", ".join(live)
    if name not in SETTINGS:
        return f"there is no setting {name!r}: {can} can be changed here" if name else f"name a setting: {can}"
    setting = SETTINGS[name]
    if name in _BY_COMMAND:
        return f"{name} cannot be changed here: {_BY_COMMAND[name]}; {can} can be changed here"
    if not set(setting.roles) & {MANAGER, SERVER}:
        return f"{name} is a setting of clients, which take it at their start: {setting.env}; {can} can be changed here"
    return (
        f"{name} is taken at the start and cannot be changed here: set {setting.env}, and start the server again "
        f"(a data server with --warm, and it keeps its values); {can} can be changed here"
    )


def set_level(level: str) -> None:
    """Let this process log at a level and above."""
    logging.getLogger("simm").setLevel(level.upper())


def level_now() -> str:
    """Return the level at which this process logs."""
    name = logging.getLevelName(logging.getLogger("simm").getEffectiveLevel()).lower()
    return name if name in LEVELS else "info"
