"""Completions of the ``simm`` command for bash, zsh and fish, made of the commands' own arguments."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Final

from .manual import Argument, CommandText

_SETTINGS: Final = (
    "log_level", "poll_us", "move_mib_s", "slow_ms", "policy", "keep_share", "keep_namespace_share", "near_share",
)  # fmt: skip
#: Words that may follow others, which the commands' arguments do not say.
FOLLOWING: Final[dict[str, tuple[str, ...]]] = {
    "ctl namespaces": ("flush",), "ctl keys": ("sample", "hot", "large", "old", "new"),
    "ctl settings": ("list", "get", "set"), "ctl settings get": _SETTINGS, "ctl settings set": _SETTINGS,
    "ctl gflag": ("list", "get", "set"), "ctl gflag get": _SETTINGS, "ctl gflag set": _SETTINGS,
    "ctl cluster": ("status",), "ctl server": ("status",), "ctl shard": ("list",), "ctl kv": ("exist", "get", "del"),
    "ctl node": ("list", "summary", "drain", "resume", "set"),
}  # fmt: skip


def bash(texts: Sequence[CommandText]) -> str:
    """Return a script for bash."""
    after: dict[str, list[str]] = {}
    for text in texts:
        for argument in text.flags:
            if argument.value:
                after.setdefault(_bash_values(argument), []).extend(f'"{text.name} {flag}"' for flag in argument.flags)
    lines = [
        "# Completions of simm for bash: eval \"$(simm completions bash)\"",
        "_simm() {",
        '    local -a given=("${COMP_WORDS[@]:0:COMP_CWORD}")',
        "    [[ ${given[0]##*/} != simmctl ]] || given=(simm ctl \"${given[@]:1}\")",
        "    local current=${COMP_WORDS[COMP_CWORD]} before=${given[-1]} what=-W words= word said",
        "    if ((${#given[@]} == 1)); then",
        f'        words="{" ".join(text.name for text in texts)}"',
        "    else",
        "        said=${given[1]}",
        '        for word in "${given[@]:2}"; do [[ $word == -* ]] || said+=" $word"; done',
        '        case "${given[1]} $before" in',
        *(f"            {' | '.join(patterns)})\n                {values} ;;" for values, patterns in after.items()),
        "            *)",
        "                if [[ $current == -* ]]; then",
        "                    case ${given[1]} in",
    ]
    for text in texts:
        flags = " ".join(flag for argument in text.flags for flag in argument.flags)
        lines.append(f'                        {text.name}) words="{flags}" ;;')
    lines += ["                    esac", "                else", "                    case $said in"]
    for text in texts:
        if choices := " ".join(choice for argument in text.alone for choice in argument.choices):
            lines.append(f'                        {text.name}) words="{choices}" ;;')
        if any(argument.is_file for argument in text.alone):
            lines.append(f'                        {text.name} | "{text.name} "*) what=-f ;;')
    lines += [f'                        "{said}") words="{" ".join(words)}" ;;' for said, words in FOLLOWING.items()]
    return "\n".join([
        *lines, "                    esac", "                fi ;;", "        esac", "    fi",
        "    if [[ $what == -W ]]; then",
        '        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")',
        "    else",
        "        compopt -o filenames 2>/dev/null",
        '        mapfile -t COMPREPLY < <(compgen "$what" -- "$current")',
        "    fi",
        "}",
        "complete -F _simm simm simmctl",
        "",
    ])  # fmt: skip


def _bash_values(argument: Argument) -> str:
    """Return what sets the words, or the kind of words, that complete an argument's value."""
    if argument.is_file or argument.is_folder:
        return "what=-d" if argument.is_folder else "what=-f"
    return f'words="{" ".join(argument.choices)}"'


def zsh(texts: Sequence[CommandText]) -> str:
    """Return a function for zsh, for a file _simm in a folder of $fpath."""
    lines = [
        "#compdef simm simmctl",
        "# Completions of simm for zsh: simm completions zsh >FOLDER/_simm, with FOLDER in $fpath before compinit",
        "_simm_words() {",
        '    local -a said=("${(@)words[1,CURRENT-1]:#-*}")',
        '    case "$said" in',
        *(f'        "{said}") compadd -- {" ".join(words)} ;;' for said, words in FOLLOWING.items()),
        "    esac",
        "}",
        "_simm() {",
        "    local -a commands",
        "    if [[ $service == simmctl ]]; then",
        '        words=(simm ctl "${(@)words[2,-1]}")',
        "        ((CURRENT++))",
        "    fi",
        "    if ((CURRENT == 2)); then",
        "        commands=(",
        *(f"            {shlex.quote(f'{text.name}:{text.line}')}" for text in texts),
        "        )",
        "        _describe command commands",
        "        return",
        "    fi",
        "    local command=${words[2]}",
        "    shift words",
        "    ((CURRENT--))",
        "    case $command in",
    ]
    for text in texts:
        given = [_zsh_flag(argument, flag) for argument in text.flags for flag in argument.flags]
        given += [
            f"{'*' * argument.many}:{argument.value}:{_zsh_words(text, argument)}" for argument in text.alone
        ]  # fmt: skip
        joined = "".join(f" \\\n                {shlex.quote(each)}" for each in given)
        lines.append(f"        {text.name})\n            _arguments{joined}\n            ;;")
    return "\n".join([*lines, "    esac", "}", '_simm "$@"', ""])


def _zsh_flag(argument: Argument, flag: str) -> str:
    about = argument.about.replace("\\", "\\\\").replace("[", "(").replace("]", ")").replace(":", "\\:")
    value = f":{argument.value}:{_zsh_values(argument)}" if argument.value else ""
    return f"{flag}[{about}]{value}"


def _zsh_words(text: CommandText, argument: Argument) -> str:
    followed = argument.many and any(said.startswith(f"{text.name} ") for said in FOLLOWING)
    return "_simm_words" if followed else _zsh_values(argument)


def _zsh_values(argument: Argument) -> str:
    if argument.choices:
        return f"({' '.join(argument.choices)})"
    return "_files -/" if argument.is_folder else "_files" if argument.is_file else " "


def fish(texts: Sequence[CommandText]) -> str:
    """Return a script for fish."""
    lines = [
        "# Completions of simm for fish: simm completions fish >~/.config/fish/completions/simm.fish",
        "function __simm_words -d 'the words before the cursor that are no flags, after simm'",
        "    string match -v -- '-*' (commandline -opc)[2..-1]",
        "end",
        "function __simm_is -d 'whether this is the command'",
        "    set -l words (__simm_words)",
        "    test (count $words) -gt 0; and test $words[1] = $argv[1]",
        "end",
        "function __simm_said -d 'whether these words were said, and nothing else'",
        "    set -l words (__simm_words)",
        "    test \"$words\" = \"$argv\"",
        "end",
        "complete -c simm -f",
        "complete -c simmctl -f -w 'simm ctl'",
    ]
    for text in texts:
        lines.append(f"complete -c simm -n __fish_use_subcommand -a {text.name} -d {_quoted(text.line)}")
        seen = f"complete -c simm -n '__simm_is {text.name}'"
        for argument in text.alone:
            if argument.choices:
                lines.append(_fish_words(text.name, argument.choices))
            elif argument.is_file:
                lines.append(f"{seen} -F")
        for argument in text.flags:
            names = "".join(f" -l {flag[2:]}" if flag[:2] == "--" else f" -s {flag[1:]}" for flag in argument.flags)
            lines.append(f"{seen}{names} -d {_quoted(argument.about)}{_fish_values(argument)}")
    lines += [_fish_words(said, words) for said, words in FOLLOWING.items()]
    return "\n".join([*lines, ""])


def _fish_words(said: str, words: Sequence[str]) -> str:
    return f"complete -c simm -n '__simm_said {said}' -a {_quoted(' '.join(words))}"


def _fish_values(argument: Argument) -> str:
    if not argument.value:
        return ""
    if argument.choices:
        return f" -x -a {_quoted(' '.join(argument.choices))}"
    return " -r -F" if argument.is_file else " -x -a '(__fish_complete_directories)'" if argument.is_folder else " -x"


def _quoted(text: str) -> str:
    """Return text as one word of fish."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SHELLS: Final[dict[str, Callable[[Sequence[CommandText]], str]]] = {"bash": bash, "zsh": zsh, "fish": fish}

