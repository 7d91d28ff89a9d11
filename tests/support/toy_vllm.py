"""An engine as small as vLLM's scheduler and worker allow, for SiMM's connector without vLLM.

What it computes for a block depends on the block's hash, the layer and, in a group with full attention, on what is in
memory of the block before: so what is computed on a block that was not loaded is wrong, as in a model.
"""

from __future__ import annotations

import hashlib
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from simm.connectors.keyspace import Keyspace
from simm.connectors.vllm_plan import Group, Layer, Plan, block_layout
from simm.connectors.vllm_scheduler import SchedulerSide
from simm.connectors.vllm_worker import WorkerSide
from simm.host.buffers import Span
from simm.schemes.groups import first_needed
from simm.schemes.vllm import block_hashes

#: Tokens of a block of the first group; the second one's blocks are larger, and it has a window.
FULL = Group(("full.0", "full.1", "full.2"), 4)
WINDOWED = Group(("window.0", "window.1"), 8, 9)
BLOCKS = 64
#: (blocks, heads, tokens, bytes) in memory as (blocks, tokens, heads, bytes), with a gap behind each token.
SHAPE, GAP = (BLOCKS, 2, 4, 8), 3
NEW_TOKENS = 6
WAIT_S = 120.0


class Engine:
    """Runs prompts, one after the other."""

    def __init__(
        self, client: Any, groups: tuple[Group, ...] = (FULL,), *, layerwise: bool = False, identity: str = "rank",
        staging_bytes: int = 1 << 16, events: bool = False, share: tuple[int, int] = (0, 1), ends: bool = True,
    ) -> None:  # fmt: skip
        self.groups = groups
        self.align = max(each.block_tokens for each in groups)
        self.layerwise = layerwise
        keyspace = Keyspace(client, "toy")
        self.scheduler = SchedulerSide(
            client, keyspace, groups, min(each.block_tokens for each in groups), self.align, layerwise=layerwise,
            events=events,
        )  # fmt: skip
        self.worker = WorkerSide(
            client, Keyspace(client, "toy"), groups, layerwise=layerwise, staging_bytes=staging_bytes, share=share,
            ends=ends,
        )  # fmt: skip
        self.memory: dict[str, Any] = {}
        spans = []
        layers = {}
        for name in (name for group in groups for name in group.layers):
            blocks, heads, tokens, size = SHAPE
            raw = np.zeros((blocks, tokens, heads, size + GAP), np.uint8)
            view = raw.transpose(0, 2, 1, 3)[..., :size]
            self.memory[name] = view
            address = int(raw.__array_interface__["data"][0])
            spans.append(Span(address, raw.nbytes, keep=raw))
            layers[name] = Layer(address, block_layout(view.shape, view.strides, 1, BLOCKS))
        self.worker.register(layers, spans, identity)
        self.scheduler.use([identity])
        self.requests = 0
        self.free = list(range(BLOCKS - 1, 0, -1))
        #: Tokens that came from the store, by request.
        self.external: list[int] = []

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()

    # -- what a model does ------------------------------------------------------------------------

    def compute(self, name: str, ids: list[int], hashes: list[bytes], first: int) -> None:
        """Fill a layer's blocks from number ``first`` on."""
        group = next(each for each in self.groups if name in each.layers)
        cache = self.memory[name]
        for at in range(first, len(hashes)):
            if ids[at]:
                before = b"" if group.window or not at else cache[ids[at - 1]].tobytes()
                seed = hashlib.blake2b(hashes[at] + name.encode() + before, digest_size=32).digest()
                content = np.frombuffer(seed * 2, np.uint8).reshape(SHAPE[1:])
                cache[ids[at]] = content

    def expected(self, tokens: list[int]) -> bytes:
        """Return what an engine without a cache has in memory, of what the next token attends to."""
        return b"".join(self.outputs(tokens, None))

    def outputs(self, tokens: list[int], block_ids: list[list[int]] | None) -> list[bytes]:
        found = []
        for at, group in enumerate(self.groups):
            hashes = block_hashes(tokens, group.block_tokens)
            if self.groups[0].block_tokens != group.block_tokens:
                hashes = block_hashes(tokens, self.groups[0].block_tokens)
                factor = group.block_tokens // self.groups[0].block_tokens
                hashes = hashes[factor - 1 :: factor]
            ids = block_ids[at] if block_ids is not None else list(range(1, len(hashes) + 1))
            if block_ids is None:
                for name in group.layers:
                    self.compute(name, ids, hashes, 0)
            needed = range(first_needed(group, len(tokens)), len(hashes))
            found += [self.memory[name][ids[each]].tobytes() for name in group.layers for each in needed]
        return found

    # -- what vLLM does ---------------------------------------------------------------------------

    def step(self, output: Any, work: Any = None) -> None:
        """Run a step by the scheduler's plan; ``work`` computes a layer."""
        plan: Plan = self.scheduler.plan(output)
        self.worker.begin(plan)
        self.worker.load(plan)
        for name in self.memory if work is not None else ():
            self.worker.wait_layer(name)
            work(name)
            if not name.endswith("1"):  # vLLM does not name all layers
                self.worker.save_layer(name)
        self.worker.end()
        report = self.worker.take_report()
        if report is not None:
            self.scheduler.heard(report)

    def run(self, prompt: list[int]) -> bytes:
        """Return what is in memory behind a prompt and a few more tokens."""
        self.requests += 1
        number = f"request-{self.requests}"
        tokens = list(prompt)
        request = SimpleNamespace(
            request_id=number, all_token_ids=tokens, num_tokens=len(tokens), lora_request=None,
            block_hashes=block_hashes(tokens, self.groups[0].block_tokens),
        )  # fmt: skip
        self.scheduler.added(request)
        total = len(tokens) + NEW_TOKENS
        mine = [[self.free.pop() for _ in range(total // each.block_tokens + 1)] for each in self.groups]
        taken = [list(each) for each in mine]
        for each in (view for view in self.memory.values()):
            each[[block for ids in mine for block in ids]] = 0xEE
        computed, wait = self.begin(request, mine)
        self.external.append(computed)
        anew = True
        if wait:
            computed = self.wait_for(number, mine, computed)
            if computed == 0:
                again, _ = self.begin(request, mine)
                assert again == 0, "what has failed is not loaded again"
        while computed < total:
            scheduled = min(len(tokens), total) - computed
            output = self.output(request, computed, scheduled, anew, mine)

            def work(name: str, first: int = computed) -> None:
                at = next(at for at, group in enumerate(self.groups) if name in group.layers)
                group, hashes = self.groups[at], self.scheduler._hashes(self.scheduler._requests[number], at)
                self.compute(name, mine[at], hashes, first // group.block_tokens)

            self.step(output, work)
            anew = False
            bad = self.worker.bad_blocks()
            if bad:
                first = min(mine[0].index(each) for each in bad)
                computed = first * self.groups[0].block_tokens
                continue
            computed += scheduled
            if len(tokens) < total:
                tokens.append(7 + len(tokens))
                request.num_tokens = len(tokens)
                request.block_hashes = block_hashes(tokens, self.groups[0].block_tokens)
            elif computed >= len(tokens):
                break
        self.scheduler.finished(request)
        found = b"".join(self.outputs(tokens, mine))
        for ids in taken:
            self.free += ids
        assert self.worker.wait_saved(WAIT_S)
        return found

    def whole(self, prompt: list[int]) -> list[int]:
        """Return the tokens behind which :meth:`run` looks."""
        return prompt + [7 + at for at in range(len(prompt), len(prompt) + NEW_TOKENS)]

    def begin(self, request: Any, mine: list[list[int]]) -> tuple[int, bool]:
        """Ask what can be loaded, until it is known; return how much, and whether to wait for it."""
        until = time.monotonic() + WAIT_S
        while True:
            found, wait = self.scheduler.matched(request, 0)
            if found is not None:
                break
            assert time.monotonic() < until
            self.step(self.output())
            time.sleep(0.0005)
        assert 0 <= found < request.num_tokens and not found % self.align and not (wait and not found)
        for at, group in enumerate(self.groups):
            for block in range(min(first_needed(group, found), len(mine[at]))):
                mine[at][block] = 0
        self.scheduler.allocated(request, mine, found)
        assert 0 <= self.scheduler.found_here(request, found) <= found
        return found, wait

    def wait_for(self, number: str, mine: list[list[int]], computed: int) -> int:
        """Run empty steps until a load has ended; return how many tokens are there."""
        until = time.monotonic() + WAIT_S
        bad: set[int] = set()
        while True:
            assert time.monotonic() < until
            self.step(self.output())
            loaded, failed = self.worker.finished()
            bad |= self.worker.bad_blocks()
            if number in loaded:
                break
            time.sleep(0.0005)
        if len(self.groups) > 1 and failed:
            assert bad
            return 0
        return min((mine[0].index(each) * self.groups[0].block_tokens for each in bad), default=computed)

    def output(self, request: Any = None, computed: int = 0, scheduled: int = 0, anew: bool = False,
               mine: list[list[int]] | None = None) -> Any:  # fmt: skip
        """Return a SchedulerOutput."""
        cached = SimpleNamespace(req_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        new = []
        numbers = {}
        if request is not None:
            numbers[request.request_id] = scheduled
            if anew:
                new.append(SimpleNamespace(req_id=request.request_id, num_computed_tokens=computed))
            else:
                cached.req_ids.append(request.request_id)
                cached.num_computed_tokens.append(computed)
        state = SimpleNamespace(get_block_ids=lambda number: tuple(mine or ()))
        return SimpleNamespace(
            scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=numbers,
            kv_connector_block_state=state,
        )  # fmt: skip
