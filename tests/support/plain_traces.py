"""Traces in the plain format, as a recorder of an engine writes them."""

from __future__ import annotations

from pathlib import Path

from simm.traces.formats import PLAIN_HEADER, Trace


def write_plain(trace: Trace, path: Path) -> None:
    """Write a trace in the plain format. Raises OSError."""
    with path.open("w", encoding="utf-8") as out:
        print(PLAIN_HEADER, f"# block-tokens {trace.block_tokens}", sep="\n", file=out)
        for model, units in trace.units.items():
            print(f"# model {model} {units}", file=out)
        for request in trace.requests:
            words = " ".join(f"{block:x}" for block in request.blocks)
            print(f"{request.at_ms!r} {request.tokens} {request.model} {words}".rstrip(), file=out)
