"""The manual page of the ``simm`` command, and the description of all commands that it and the completions share.

Both are made of what the commands themselves declare: their argument parsers, and the table of settings. So no flag is
missing there, and none is described that does not exist.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from ... import __version__
from ...config.settings import CONFIG_ENV, SETTINGS, Setting, format_value

Run = Callable[[Sequence[str], str], int]


@dataclass(frozen=True)
class Argument:
    """A flag of a command, or what stands alone. ``flags`` is empty for the latter.

    ``value``: what it takes, as FILE; empty for a switch. ``setting``: it is one, with a variable and a line in a file.
    ``many``: it takes any number of values.
    """

    flags: tuple[str, ...]
    value: str
    about: str
    choices: tuple[str, ...] = ()
    setting: Setting | None = None
    many: bool = False

    @property
    def is_file(self) -> bool:
        """Return True if its value is the name of a file."""
        return self.value == "FILE"

    @property
    def is_folder(self) -> bool:
        """Return True if its value is the name of a folder."""
        return self.value == "DIR"


@dataclass(frozen=True)
class CommandText:
    """A command: what it does in a line and in full, and its arguments."""

    name: str
    line: str
    about: str
    alone: list[Argument] = field(default_factory=list)
    flags: list[Argument] = field(default_factory=list)


class _Parsed(Exception):
    """A command has made its parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def _parser_of(run: Run, prog: str) -> argparse.ArgumentParser:
    """Return the parser that a command makes. The command itself does not run."""

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        raise _Parsed(parser)

    before = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_intermixed_args
    argparse.ArgumentParser.parse_args = stop  # type: ignore[assignment, method-assign]
    argparse.ArgumentParser.parse_intermixed_args = stop  # type: ignore[assignment, method-assign]
    try:
        run([], prog)
    except _Parsed as parsed:
        return parsed.parser
    finally:
        argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_intermixed_args = before  # type: ignore[method-assign]
    raise RuntimeError(f"{prog} parses no arguments")


def described(commands: Mapping[str, Run]) -> list[CommandText]:
    """Return the description of all commands, in their order."""
    found = []
    for name, run in commands.items():
        parser = _parser_of(run, f"simm {name}")
        made = CommandText(name, run.__doc__ or "", parser.description or "")
        for action in parser._actions:
            if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
                continue
            argument = _argument(parser, action)
            (made.flags if argument.flags else made.alone).append(argument)
        found.append(made)
    return found


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> Argument:
    flags = tuple(action.option_strings)
    setting = SETTINGS.get(action.dest) if flags else None
    choices = tuple(map(str, action.choices)) if action.choices else ()
    if setting is not None:
        choices = tuple(getattr(setting.parse, "choices", ()))
    metavar = action.metavar[0] if isinstance(action.metavar, tuple) else action.metavar
    value = "" if action.nargs == 0 else str(metavar or action.dest.upper())
    about = parser._get_formatter()._expand_help(action) if action.help else ""
    if setting is not None:  # the table says it, for all commands together
        about = re.sub(r" \(default: .*\)$", "", about)
    return Argument(flags, value, about, choices, setting, action.nargs in ("*", "+"))


def settings_of(texts: Iterable[CommandText]) -> dict[str, tuple[Argument, list[str]]]:
    """Return name -> (a setting's flag, the commands that take it), in the order of the table."""
    found: dict[str, tuple[Argument, list[str]]] = {}
    for text in texts:
        for argument in text.flags:
            if argument.setting is not None:
                found.setdefault(argument.setting.name, (argument, []))[1].append(text.name)
    return {name: found[name] for name in SETTINGS if name in found}


# --- the page -----------------------------------------------------------------------------------------

_EXITS: Final = (
    ("0", "success; for exists: every key is stored"),
    ("1", "a key was not found or not stored; a check failed; a server could not start"),
    ("2", "wrong usage, wrong settings, or the cluster cannot be reached"),
    ("130", "Ctrl-C (143 for SIGTERM, 129 for SIGHUP), after all started processes have ended"),
    ("141", "the reader of stdout closed it early"),
)
_ABOUT: Final = (
    "SiMM is a distributed in-memory store for the KV cache of LLM inference. All engines of a host map one "
    "shared-memory arena, and other hosts read it by RDMA or TCP. A manager keeps the map of who owns what.",
    "Run a manager and a data server on each host, or both on this one by `simm local`. The other commands look at the "
    "cluster of --manager.",
)
_SOURCES: Final = (
    "Each setting is a flag, a variable SIMM_NAME in the environment, and a key in the file that --config or "
    f"{CONFIG_ENV} names (JSON, or TOML from Python 3.11 on). The command line counts before the environment, the "
    "environment before the file, the file before the default. `simm config show COMMAND` prints each value and where "
    "it came from."
)  # fmt: skip


def man_page(texts: Sequence[CommandText]) -> str:
    """Return the page simm(1), in the macros of man(7)."""
    settings = settings_of(texts)
    lines = [
        f'.TH SIMM 1 "" "SiMM {__version__}" "User Commands"', ".nh", ".ad l", ".SH NAME",
        _roff("simm - distributed in-memory store for the KV cache of LLM inference"), ".SH SYNOPSIS",
        ".B simm", ".I COMMAND", _roff("[ARGUMENTS]"), ".SH DESCRIPTION",
    ]  # fmt: skip
    for paragraph in _ABOUT:
        lines += [_roff(paragraph), ".PP"]
    lines.append(".SH COMMANDS")
    for text in texts:
        alone = " ".join(argument.value for argument in text.alone)
        lines += [f'.SS "simm {text.name}{" " if alone else ""}{_roff(alone)}"', _roff(text.about or text.line)]
        for argument in (*text.alone, *text.flags):
            if argument.setting is None and argument.flags != ("--config",):  # described once, with the settings
                lines += _item(argument)
        names = [argument.setting.flag for argument in text.flags if argument.setting is not None]
        if names:
            lines += [".PP", _roff(f"Settings: {', '.join(names)}.")]
    lines += [".SH SETTINGS", _roff(_SOURCES)]
    for argument, commands in settings.values():
        lines += _item(argument, commands)
    lines.append(".SH EXIT STATUS")
    for code, about in _EXITS:
        lines += [".TP", f".B {code}", _roff(about)]
    lines += [
        ".SH SIGNALS", ".TP", ".B SIGTERM, SIGINT", _roff("End a server cleanly."), ".TP", ".B SIGHUP",
        _roff("A server opens its log files anew; it ends if the terminal that it was started from was closed."),
        ".SH SEE ALSO", _roff("docs/operations.md, docs/metrics.md and SECURITY.md in the sources of SiMM."),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _item(argument: Argument, commands: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of a flag: how it is written, what it does, its variable, default and commands."""
    value = f" \\fI{_roff(argument.value)}\\fR" if argument.value and argument.flags else ""
    heads = [f"\\fB{_roff(flag)}\\fR{value}" for flag in argument.flags] or [f"\\fI{_roff(argument.value)}\\fR"]
    yield from (".TP", ", ".join(heads), _roff(argument.about) or "\\&")
    setting = argument.setting
    if setting is None:
        if argument.choices:
            yield _roff(f"One of {', '.join(argument.choices)}.")
        return
    default = format_value(setting.default)
    by_command = [f"{format_value(value)} for {command}" for command, value in setting.by_command.items()]
    parts = [setting.env, *setting.env_aliases, f"commands {', '.join(commands)}" if commands else ""]
    if default or by_command:
        parts.append(f"default {'; '.join(filter(None, (default, *by_command)))}")
    yield from (".br", _roff(f"({'; '.join(filter(None, parts))})"))


def _roff(text: str) -> str:
    """Return text as it stands for itself on a page."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text
