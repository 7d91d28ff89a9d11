#!/usr/bin/env python3
"""Time to the first token of a real transformer over conversations of many turns, without a cache and with several.

    python benchmarks/ttft.py --size small --sizes 512,1024 --conversations 1           # a minute, to see it run
    python benchmarks/ttft.py --json ttft.json --chart docs/ttft.svg                    # half a billion parameters

    python benchmarks/ttft.py --device cuda --size gpu --block 256 --sizes 4096,8192,16384

It needs torch, for example SGLang's or LMCache's environment (``scripts/engine-env lmcache``). README.md in this folder
says how to get the stores. The model is in ``ttft_model.py``, the caches are in ``ttft_caches.py``.

At each measured turn a request has the whole conversation as its prompt. The time to its first token begins with the
tokens. It includes the keys of the blocks, the lookup, the load into the model's pool, the computation of what was not
there, and the choice of the token. Blocks are stored outside of it, as engines do.

- *All compute the same.* Prompts are computed block by block, so logits over a loaded prefix are equal to those without
  a cache bit by bit. This is checked for each first token. Pools are overwritten with NaN before each load.
- *The machine changes during the run.* At a turn, no cache comes first, as it also computes what the other caches are
  given of the turns that nobody measures. All others follow in each round, in an order that rotates. Ratios are of
  samples of one turn.
- *The first touch of memory.* A short conversation comes first and does not count.

The reference ``in-process`` copies nothing: its blocks stay in the pool. No store can be faster.

On a busy machine the times of the computation, which are the same for all caches, differ by more than what their loads
take. ``--loads N`` measures only the loads, N times at each size, with blocks of random bytes that are compared. It
takes a minute and needs no model. ``--paired N`` measures whole first tokens in N rounds of SiMM and another cache. It
says which of them is ahead, and how sure that is (``ttft_pairs.py``). With ``--add`` it goes on where ``--json`` ended:
many rounds may be several short runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

#: A waiting thread of torch must not keep a processor busy that a server, or other work, could use.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
HERE = Path(__file__).resolve().parent
for folder in (str(HERE), str(HERE.parent)):
    if folder not in sys.path:
        sys.path.insert(0, folder)

from conversations import Turn, conversation  # noqa: E402
from peers import ending_all, machine  # noqa: E402
from peers_stores import PeerError  # noqa: E402

PROMPTS = (1024, 2048, 4096, 8192)


class Bench:
    """A model and the caches that it is measured with."""

    def __init__(self, model: Any, caches: Sequence[Any], scratch: Any, rounds: int) -> None:
        self.model = model
        self.none, *self.caches = caches
        self.scratch = scratch
        self.rounds = rounds
        self.samples: list[Any] = []
        self._saved = 0
        self._turns = 0

    def start(self) -> None:
        """Begin a conversation of which no cache has a block."""
        for cache in self.caches:
            cache.clear()
        self._saved = 0

    def turn(self, number: int, turn: Turn, count: bool = True) -> list[Any]:
        """Measure one turn in all caches and return its samples. Raises PeerError if a cache does not store."""
        logits, first = self._ask(self.none, number, turn, 0, None)
        found = [first]
        history = turn.history // self.scratch.block
        for cache in self.caches:
            if cache.pool is not self.scratch:
                cache.pool.copy_from(self.scratch, self._saved, history)
            if self._saved < history:
                cache.save(turn.prompt, self._saved, history)
        self._saved = history
        for each in range(self.rounds):
            shift = self._turns % max(1, len(self.caches))
            self._turns += 1
            order = [*self.caches[shift:], *self.caches[:shift]]
            found += [self._ask(cache, number, turn, each, logits)[1] for cache in order]
        self.samples += found if count else []
        return found

    def _ask(self, cache: Any, number: int, turn: Turn, round: int, expected: Any) -> tuple[Any, Any]:
        """Return the logits of one request, and its sample. ``expected``: what the logits must be equal to."""
        from ttft_report import NONE, Sample

        most = (len(turn.prompt) - 1) // self.scratch.block
        cache.before()
        processor, began = time.process_time(), time.perf_counter()
        there = cache.load(turn.prompt, most)
        loaded = time.perf_counter()
        logits = self.model.prefill(turn.prompt, cache.pool, there, cache.ready)
        int(logits.argmax())
        ended, processor = time.perf_counter(), time.process_time() - processor
        equal = bool(logits.isfinite().all()) and (expected is None or bool((logits == expected).all()))
        wanted = 0 if cache.name == NONE else turn.history // self.scratch.block
        moved = 0 if cache.name in (NONE, "in-process") else there * cache.pool.block_bytes
        sample = Sample(
            number, len(turn.prompt), round, cache.name, ended - began, loaded - began, processor, there, wanted, moved,
            equal,
        )  # fmt: skip
        return logits, sample


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = "none, in-process, simm, simm-layers, simm-tcp, redis, mooncake-shm, lmcache"
    parser.add_argument("--size", default="full", help="of the model: tiny, small, medium, full, gpu (default: full)")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: model and pools in the first GPU's memory")
    parser.add_argument("--sizes", default=",".join(map(str, PROMPTS)), help="tokens of the measured prompts")
    parser.add_argument("--caches", default=known.replace(" ", ""), help=f"comma-separated: {known}")
    parser.add_argument("--conversations", type=int, default=3, metavar="N", help="(default 3)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="of all caches at a turn (default 2)")
    parser.add_argument("--block", type=int, default=128, metavar="N", help="tokens of a block (default 128)")
    parser.add_argument("--dtype", default="auto", help="fp32, bf16; auto: the faster one here")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch (default: torch's own)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of weights and conversations (default 1)")
    parser.add_argument("--loads", type=int, default=0, metavar="N", help="measure loads only, N times at each size")
    parser.add_argument("--paired", type=int, default=0, metavar="N", help="N rounds of SiMM and each other cache")
    parser.add_argument("--add", action="store_true", help="with --paired: to the rounds that the --json file has")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample here, after each turn")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw the medians here, as SVG")
    options = parser.parse_args(arguments)
    options.caches = options.caches.split(",")
    options.sizes = [int(word) for word in options.sizes.split(",")]
    unknown = set(options.caches) - set(known.split(", "))
    if unknown or options.dtype not in ("auto", "fp32", "bf16"):
        parser.error(f"unknown: {', '.join(sorted(unknown)) or options.dtype}")
    if options.device not in ("cpu", "cuda"):
        parser.error(f"--device {options.device}: cpu or cuda")
    if min(options.conversations, options.rounds, options.block, *options.sizes) < 1:
        parser.error("--conversations, --rounds, --block and --sizes must be positive")
    if options.paired and "simm" not in options.caches:
        parser.error("--paired compares SiMM with the others: name simm in --caches")
    if options.add and not (options.paired and options.json):
        parser.error("--add needs --paired and --json")
    options.caches = ["none", *(name for name in dict.fromkeys(options.caches) if name != "none")]
    return options


def bench(options: argparse.Namespace, home: Path) -> int:
    import torch
    from ttft_caches import LABELS, missing, opened
    from ttft_model import DTYPES, SIZES, Model, Pool, faster_dtype
    from ttft_report import drawn, load_table, table, targets, wrong

    if options.size not in SIZES:
        print(f"unknown size {options.size}: one of {', '.join(SIZES)}", file=sys.stderr)
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    shape = SIZES[options.size]
    try:
        talks = [conversation(options.seed, n, options.sizes, shape.vocabulary) for n in range(options.conversations)]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch finds no GPU here", file=sys.stderr)
        return 2
    name = options.dtype
    if name == "auto":
        name = "bf16" if options.device == "cuda" else faster_dtype(shape, options.block)
    dtype = DTYPES[name]
    blocks = -(-options.sizes[-1] // options.block)
    scratch = Pool(shape, blocks, options.block, dtype, device=options.device)
    where = machine() if options.device == "cpu" else f"{torch.cuda.get_device_name(0)}, {machine()}"
    about = (
        f"{where}, torch {torch.__version__}, {torch.get_num_threads()} threads; {shape.parameters / 1e6:,.1f} M "
        f"parameters, {name}, {shape.kv_bytes(dtype.itemsize) / 1024:.0f} KiB a token, blocks of {options.block} tokens"
    )
    print(f"{about}\n", flush=True)
    notes: dict[str, str] = {}
    failed: list[str] = []
    with ending_all() as servers:
        caches = []
        for each in options.caches:
            if (reason := missing(each, options.device)) is not None:
                notes[each] = f"left out: {reason}"
            else:
                try:
                    # Room for a conversation and half another, so that nothing is evicted.
                    cache = opened(each, shape, home, scratch, scratch.memory.nbytes * 3 // 2 + (64 << 20))
                except Exception as error:
                    notes[each] = f"failed: {type(error).__name__}: {str(error).strip().splitlines()[-1][-200:]}"
                    failed.append(f"{each}: {notes[each]}")
                else:
                    servers.callback(cache.close)
                    caches.append(cache)
                    notes[each] = cache.note
            print(f"- {LABELS[each]}: {notes[each] or 'every prompt is computed whole'}", flush=True)
        model = None if options.loads else Model(shape, options.seed, dtype, options.device)
        run = Bench(model, caches, scratch, options.rounds)
        if options.loads:
            loads = measure_loads(run, talks[0], options.loads)
            print("\n" + load_table(loads, LABELS))
            lost = [each for each in loads if not each.good]
            failed += [f"{LABELS[each.cache]}: other bytes at {each.tokens:,} tokens" for each in lost]
            if options.json is not None:
                result = {"about": about, "caches": notes, "loads": [asdict(each) for each in loads]}
                options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print("\n".join(f"FAILED {line}" for line in failed))
            return 1 if failed else 0
        # As engines do. SiMM's copies come after what is on the default stream, and would wait for the computation.
        beside = torch.cuda.stream(torch.cuda.Stream()) if options.device == "cuda" else contextlib.nullcontext()
        if options.paired:
            with beside:
                return measure_pairs(run, talks[0], options, about, notes, failed)
        with contextlib.suppress(KeyboardInterrupt), beside:
            run_all(run, talks, options, about, notes, failed)
    print("\n" + table(run.samples, LABELS) + "\n")
    for line in targets(run.samples, LABELS):
        print(line)
    failed += wrong(run.samples, LABELS)
    for line in failed:
        print(f"FAILED {line}")
    if options.chart is not None and run.samples:
        on = "a CPU" if options.device == "cpu" else torch.cuda.get_device_name(0)
        title = f"Time to first token, {shape.parameters / 1e6:,.0f} M parameters on {on}"
        options.chart.write_text(drawn(run.samples, LABELS, title), encoding="utf-8")
    return 1 if failed else 0


def measure_loads(run: Bench, turns: Sequence[Turn], rounds: int) -> list[Any]:
    """Return the times of lookups and loads of a conversation's history, in all caches but none and in-process."""
    from ttft_report import Load

    found = []
    source = run.scratch.twin()
    source.draw()
    caches = [cache for cache in run.caches if cache.name not in ("in-process", "simm-layers")]
    saved = 0
    for cache in caches:
        cache.clear()
    for turn in turns:
        history = turn.history // source.block
        for cache in caches:
            cache.pool.copy_from(source, saved, history)
            cache.save(turn.prompt, saved, history)
        saved = history
        for each in range(rounds + 1):
            shift = each % len(caches) if caches else 0
            for cache in [*caches[shift:], *caches[:shift]]:
                cache.before()
                began = time.perf_counter()
                there = cache.load(turn.prompt, history)
                spent = time.perf_counter() - began
                good = there == history and cache.pool.same(source, history)
                if each:  # the first one touches memory for the first time
                    moved = there * source.block_bytes
                    found.append(Load(len(turn.prompt), each, cache.name, spent, moved, good))
    return found


def measure_pairs(
    run: Bench, turns: Sequence[Turn], options: argparse.Namespace, about: str, notes: dict[str, str],
    failed: list[str],
) -> int:  # fmt: skip
    """Measure and report rounds of SiMM and each other cache; return the exit code."""
    from ttft_caches import LABELS
    from ttft_pairs import NEW, bad, kept, measure, pair_table, written

    settings = {**settings_of(options), "new": NEW}
    pairs = kept(options.json, settings) if options.add else []
    source = run.scratch.twin()
    source.draw_normal(options.seed)
    begin = 1 + max((each.round for each in pairs), default=-1)
    try:
        for pair in measure(
            lambda cache, turn, number, expected: run._ask(cache, 0, turn, number, expected), run.caches, turns,
            source, options.paired, begin,
        ):  # fmt: skip
            pairs.append(pair)
            print(f"{pair.cache}: {pair.simm:.3f}, {pair.other:.3f}", file=sys.stderr, flush=True)
            if options.json is not None:
                written(options.json, about, notes, settings, pairs)
    except (PeerError, OSError, TimeoutError) as error:
        failed.append(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        print("interrupted: these are the rounds until then", file=sys.stderr)
    failed += bad(pairs, LABELS)
    print("\n" + pair_table(pairs, LABELS))
    print("\n".join(f"FAILED {line}" for line in failed))
    return 1 if failed else 0


def run_all(
    run: Bench, talks: Sequence[Sequence[Turn]], options: argparse.Namespace, about: str, notes: dict[str, str],
    failed: list[str],
) -> None:  # fmt: skip
    """Measure all conversations, one after the other."""
    block = run.scratch.block
    short = Turn(talks[0][0].prompt[: 2 * block + 1], 2 * block)
    try:
        if len(short.prompt) > short.history:
            run.start()
            run.turn(-1, short, count=False)
        for number, turns in enumerate(talks):
            run.start()
            for turn in turns:
                found = run.turn(number, turn)
                print(", ".join(f"{each.cache} {each.ttft:.2f}" for each in found), file=sys.stderr, flush=True)
                if options.json is not None:
                    result = {"about": about, "caches": notes, "settings": settings_of(options)}
                    result["samples"] = [asdict(sample) for sample in run.samples]
                    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except (PeerError, OSError, TimeoutError) as error:
        failed.append(f"{type(error).__name__}: {error}")


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    kept = ("device", "size", "sizes", "conversations", "rounds", "block", "dtype", "threads", "seed")
    return {name: getattr(options, name) for name in kept}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = parse(arguments)
    try:
        import torch  # noqa: F401
    except ImportError:
        print("ttft.py needs torch: `$(scripts/engine-env lmcache)` is a Python that has it", file=sys.stderr)
        return 2
    home = Path(tempfile.mkdtemp(prefix="simm-ttft-"))
    try:
        return bench(options, home)
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
