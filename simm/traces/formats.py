"""Requests to an LLM service as its KV cache sees them, and the files that have them.

Two formats are read; the first line tells which one a file has.

*Mooncake's*, of the traces that https://github.com/kvcache-ai/Mooncake publishes (FAST25-release/traces): one JSON
object a line, one line a request.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, 2353]}

``timestamp`` is in milliseconds, ``input_length`` in tokens, and ``hash_ids`` has a number for each block of 512
tokens. Other fields are ignored.

*Plain*, into which a script of a few lines turns the log of any engine:

    # simm-trace 1
    # block-tokens 16
    # model small 1
    # model large 4
    0.0  1030  large  5f1c 77a0 90be
    12.5 2000  small  5f1c 3d02

A line is a request: its time in milliseconds, the tokens of its prompt, its model, and the blocks of its prompt in
order, separated by blanks. A block is any word, usually a hash of its tokens and all before them, so that equal words
mean equal prefixes. Blocks of different models are different. ``block-tokens`` is the number of tokens in a block.
``model`` declares a model and the size of its blocks in units, a whole number: blocks of a model with 4 are four times
as large as those with 1. Without declarations, the model ``-`` has blocks of one unit. The declarations come first.
Empty lines and other lines that begin with ``#`` are ignored.

In both, requests are replayed in order of their times; those of one time, in order of their lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import UsageError

#: Tokens in a block of Mooncake's traces.
MOONCAKE_BLOCK_TOKENS: Final = 512
#: First line of a plain trace.
PLAIN_HEADER: Final = "# simm-trace 1"
#: The model of requests that name none.
NO_MODEL: Final = "-"
#: Largest size of a block, in units.
UNITS_MAX: Final = 1024
_NUMBER_MAX: Final = 1 << 53


class Request(NamedTuple):
    """A request: when it comes, in milliseconds; its prompt's tokens and blocks in order; its model."""

    at_ms: float
    tokens: int
    blocks: tuple[int, ...]
    model: str = NO_MODEL


@dataclass(frozen=True)
class Trace:
    """Requests in order of time. Equal blocks mean equal prefixes; a prompt names no block twice."""

    name: str
    requests: tuple[Request, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    #: Size of a block by its model.
    units: dict[str, int] = field(default_factory=lambda: {NO_MODEL: 1})

    @property
    def blocks(self) -> int:
        """Return the number of blocks of all prompts. O(requests)."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def distinct(self) -> int:
        """Return the number of different blocks. O(blocks)."""
        return len({block for request in self.requests for block in request.blocks})

    def unchained(self) -> int:
        """Return how many blocks follow another block than where they first came. O(blocks).

        It is 0 if equal blocks mean equal prefixes. A trace with others overstates what a cache can find.
        """
        before: dict[int, int] = {}
        bad = 0
        for request in self.requests:
            last = -1
            for block in request.blocks:
                bad += before.setdefault(block, last) != last
                last = block
        return bad

    def parts(self, share: float = 0.5) -> tuple[Trace, Trace]:
        """Return two traces: the first ``share`` of the requests, and the rest."""
        cut = round(len(self.requests) * share)
        return tuple(
            Trace(f"{self.name}, part {number}", requests, self.block_tokens, self.units)
            for number, requests in enumerate((self.requests[:cut], self.requests[cut:]), 1)
        )  # type: ignore[return-value]


def read_trace(path: Path) -> Trace:
    """Read a trace file in either format.

    Raises:
        UsageError: a line is no request; the text has its number and what is wrong with it.
        OSError: the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            numbered = enumerate(lines, 1)
            for number, line in numbered:
                if line.startswith(PLAIN_HEADER.rpartition(" ")[0]):
                    if line.rstrip() != PLAIN_HEADER:
                        raise _BadLine(number, f"{line.strip()!r} is another version than {PLAIN_HEADER!r}")
                    return _plain(path, numbered)
                if line.lstrip().startswith("{"):
                    return _mooncake(path, [(number, line)], numbered)
                if line.strip():
                    raise _BadLine(number, f"neither a JSON object nor {PLAIN_HEADER!r} begins this file")
    except _BadLine as exc:
        raise UsageError(f"{path}, line {exc.number}: {exc.text}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text file: a trace is UTF-8") from None
    raise UsageError(f"{path} is empty: a trace has at least one request")


class _BadLine(Exception):
    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number
        self.text = text


def _trace(path: Path, requests: list[Request], block_tokens: int, units: dict[str, int]) -> Trace:
    if not requests:
        raise UsageError(f"{path} is empty: a trace has at least one request")
    requests.sort(key=lambda request: request.at_ms)  # stable: those of one time stay in order of their lines
    return Trace(path.name, tuple(requests), block_tokens, units)


# --- Mooncake's format ------------------------------------------------------------------------------


def _mooncake(path: Path, first: list[tuple[int, str]], rest: Iterable[tuple[int, str]]) -> Trace:
    requests = [
        _mooncake_request(number, line) for lines in (first, rest) for number, line in lines if line.strip()
    ]  # fmt: skip
    return _trace(path, requests, MOONCAKE_BLOCK_TOKENS, {NO_MODEL: 1})


def _mooncake_request(number: int, line: str) -> Request:
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise _BadLine(number, f"no JSON: {exc}") from None
    if not isinstance(found, dict):
        raise _BadLine(number, "no JSON object")
    for name in ("timestamp", "input_length", "hash_ids"):
        if name not in found:
            raise _BadLine(number, f"{name!r} is missing")
    at = found["timestamp"]
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at <= _NUMBER_MAX:
        raise _BadLine(number, f"'timestamp' {at!r} is no number of milliseconds")
    tokens, blocks = found["input_length"], found["hash_ids"]
    if not _whole(tokens):
        raise _BadLine(number, f"'input_length' {tokens!r} is no number of tokens")
    if not isinstance(blocks, list) or not all(map(_whole, blocks)):
        raise _BadLine(number, "'hash_ids' is no list of whole numbers")
    return Request(float(at), tokens, _once(number, tuple(blocks)))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _NUMBER_MAX


def _once(number: int, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``blocks`` if each is named once: a block stands for all that is before it, and cannot follow itself."""
    if len(set(blocks)) != len(blocks):
        position = next(at for at, block in enumerate(blocks) if block in blocks[:at])
        raise _BadLine(number, f"block {position + 1} of the prompt is one of those before it, which no prefix is")
    return blocks


# --- the plain format -------------------------------------------------------------------------------


def _plain(path: Path, lines: Iterator[tuple[int, str]]) -> Trace:
    block_tokens = 0
    units: dict[str, int] = {}
    ids: dict[tuple[str, str], int] = {}
    requests: list[Request] = []
    for number, line in lines:
        words = line.split()
        if words[:1] == ["#"] and words[1:2] in (["block-tokens"], ["model"]):
            if requests:
                raise _BadLine(number, f"{words[1]!r} comes after the first request: declarations come first")
            if words[1] == "block-tokens":
                block_tokens = _number(number, words, 3, 2, "tokens in a block", _NUMBER_MAX)
            elif words[2:3] and words[2] in units:
                raise _BadLine(number, f"model {words[2]!r} is declared twice")
            else:
                size = _number(number, words, 4, 3, "units in a block", UNITS_MAX)
                units[words[2]] = size
        elif words and not words[0].startswith("#"):
            units = units or {NO_MODEL: 1}
            if not block_tokens:
                raise _BadLine(number, "'# block-tokens NUMBER' is missing before the first request")
            requests.append(_plain_request(number, words, units, ids))
    return _trace(path, requests, block_tokens, units)


def _number(number: int, words: list[str], length: int, at: int, what: str, most: int) -> int:
    """Return word ``at`` of a declaration of ``length`` words."""
    value = words[at] if len(words) == length else ""
    if not (value.isascii() and value.isdigit() and len(value) < 20 and 1 <= int(value) <= most):
        raise _BadLine(number, f"{' '.join(words)!r} does not say the {what}, 1 to {most}")
    return int(value)


def _plain_request(
    number: int, words: list[str], units: dict[str, int], ids: dict[tuple[str, str], int]
) -> Request:  # fmt: skip
    if len(words) < 3:
        raise _BadLine(number, "a request has a time, a number of tokens, a model and its blocks")
    try:
        at = float(words[0])
    except ValueError:
        at = math.nan
    if not 0 <= at <= _NUMBER_MAX:
        raise _BadLine(number, f"{words[0]!r} is no time in milliseconds")
    if not (words[1].isascii() and words[1].isdigit() and len(words[1]) < 16):
        raise _BadLine(number, f"{words[1]!r} is no number of tokens")
    model = words[2]
    if model not in units:
        raise _BadLine(number, f"model {model!r} is not declared; write '# model {model} UNITS' above")
    blocks = tuple(ids.setdefault((model, word), len(ids)) for word in words[3:])
    return Request(at, int(words[1]), _once(number, blocks), model)
