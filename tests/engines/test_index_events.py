"""Whole released engines publish their events into ``simm index``: what it says of a prompt is what they then report.

SGLang and vLLM, each with a small GPT-2 on a CPU, publish over ZMQ as docs/index.md says. ``simm index`` is a process
too. It knows each engine as two publishers: one that it was told of before the engine began, and one that it is told of
when prompts have been computed, which it must learn by a replay. Before each prompt the index is asked what the engine
has of it; then the engine computes it, and reports how many of its tokens it had. Nothing of the engines is replaced.

When is everything told that has happened? Events are published in their order. So the test waits until the index knows
the blocks of the last prompt, output included, and then asks for others.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

from tests.engines.engine_processes import Engine
from tests.support.child import Child
from tests.support.http_page import ask_json
from tests.support.ports import reserve_port
from tests.support.waiting import wait_until

#: Bounds for things that hang, seconds; none is a speed limit.
START_S = 600.0
#: Tokens of the engines' models, of what two prompts share (whole blocks of both engines), and of a whole prompt, whose
#: output ends in its last block: so an engine evicts nothing behind the last event that is waited for.
VOCABULARY, SHARED, PROMPT = 512, 320, 408
#: Tokens that an engine can hold: three prompts, so that the fourth one evicts.
CAPACITY = 1536
BOTH = ["early", "late"]

_dice = random.Random(20_261_127)


def tokens(count: int) -> list[int]:
    return [_dice.randrange(1, VOCABULARY) for _ in range(count)]


class Index:
    """``simm index``, which is asked over HTTP."""

    def __init__(self, at: str, block_size: int) -> None:
        self.at, self.block_size = at, block_size

    def _ask(self, path: str, body: Any = None) -> Any:
        return ask_json(self.at, path, body)

    def register(self, instance: str, kind: str, endpoint: str, replay: str) -> None:
        self._ask("/register", {
            "instance_id": instance, "type": kind, "modelname": "m", "block_size": self.block_size,
            "endpoint": endpoint, "replay_endpoint": replay,
        })  # fmt: skip

    def join(self, *publisher: str) -> None:
        """Register a publisher of which all is known once it has replayed. A busy one may answer too late."""

        def complete() -> bool:
            self.register(*publisher)
            worker = self.workers()[publisher[0]]
            if worker["stream"].get("failed replays"):
                self._ask("/unregister", {"instance_id": publisher[0]})
            return bool(worker["complete"] and worker["counted"])

        wait_until(complete, lambda: f"the replay: {self.workers()}", pause_s=0.1)

    def matched(self, prompt: list[int], salt: str | None = None) -> dict[str, int]:
        """Return how many tokens of a prompt each instance has, of those that have any."""
        question = {"model": "m", "token_ids": prompt, "block_size": self.block_size, "cache_salt": salt}
        found = self._ask("/query", question)["default"]
        for name, each in found.items():
            assert each["GPU"] == each["longest_matched"] == each["DP"]["0"], (name, each)
        return {name: each["longest_matched"] for name, each in found.items() if each["longest_matched"]}

    def workers(self) -> dict[str, Any]:
        return {each["instance_id"]: each for each in self._ask("/workers")}

    def whole(self, count: int) -> int:
        """Return how many tokens of so many are in whole blocks."""
        return count // self.block_size * self.block_size


class Conversation:
    """An engine and an index that knows it: each prompt is asked of both."""

    def __init__(self, driver: Child, index: Index) -> None:
        self.driver, self.index = driver, index
        self.known = BOTH[:1]

    def compute(self, prompt: list[int], salt: str | None = None, report: bool = False) -> int:
        """Let the engine compute a prompt. Return how much of it it had, which the index has known."""
        foretold = self.index.matched(prompt, salt)
        self.driver.tell(json.dumps({"generate": prompt, "salt": salt, "report": report}))
        answer = self.driver.answer(START_S)
        cached: int = answer["cached"]
        # An engine computes the last token of a prompt, which no cache has. Nobody has computed the last one of all.
        assert foretold == dict.fromkeys(self.known if cached else (), cached), (len(prompt), cached)
        everything = [*prompt, *answer["tokens"][:-1]]
        want = dict.fromkeys(self.known, self.index.whole(len(everything)))
        wait_until(
            lambda: self.index.matched(everything, salt) == want, lambda: f"{want}: {self.index.workers()}", pause_s=0.1
        )
        return cached

    def forget(self) -> None:
        """Reset the engine's cache."""
        self.driver.tell(json.dumps({"forget": True}))
        assert self.driver.answer(START_S) is True

    def settled(self) -> None:
        """Check that the index says that it knows all of the engine, and has refused nothing."""
        for name in self.known:
            worker = self.index.workers()[name]
            assert worker["complete"] and worker["counted"] and not worker["stale"], worker
            assert not worker["waiting"] and not worker["unknown_tiers"] and not worker["ignored"], worker
            assert not worker["stream"].get("refused"), worker


@contextmanager
def running_index(folder: Path, block_size: int) -> Iterator[Index]:
    command = [sys.executable, "-m", "simm", "index", "--at", "127.0.0.1:0"]
    with Child(command, name="simm index", log=folder / "index.log") as process:
        yield Index(process.expect("READY index ").split()[2], block_size)
        assert process.end() == 0


@pytest.fixture(params=["SGLang", "vLLM"])
def publisher(request: pytest.FixtureRequest) -> tuple[str, Engine, str]:
    """An engine's name, its environment, and what else it needs on PYTHONPATH."""
    if request.param == "vLLM":
        return "vLLM", request.getfixturevalue("vllm"), ""
    return "SGLang", request.getfixturevalue("engine"), request.getfixturevalue("whole_packages")


#: Of an engine: tokens in a block; its publisher's configuration beyond addresses; and how much it can hold.
BLOCK = {"SGLang": 16, "vLLM": 32}
EVENTS: dict[str, dict[str, Any]] = {"SGLang": {}, "vLLM": {"enable_kv_cache_events": True}}
SMALL: dict[str, dict[str, Any]] = {
    "SGLang": {"max_total_tokens": CAPACITY, "max_running_requests": 2},
    "vLLM": {"num_gpu_blocks_override": CAPACITY // 32},
}


@pytest.mark.engines
def test_the_index_says_what_the_engine_then_reports(
    publisher: tuple[str, Engine, str], tmp_path: Path, say: Callable[[str], None]
) -> None:
    name, engine, packages = publisher
    port = reserve_port()
    endpoint, replay = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
    events = {
        "publisher": "zmq", "endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{port + 1}",
        "topic": "kv@engine@m", **EVENTS[name],
    }  # fmt: skip
    with running_index(tmp_path, BLOCK[name]) as index:
        index.register("early", name, endpoint, replay)
        with engine.start_publisher(packages, engine=name.lower(), events=events, options=SMALL[name]) as driver:
            version = driver.answer(START_S)["version"]
            talk = Conversation(driver, index)
            shared = tokens(SHARED)
            first, second = ([*shared, *tokens(PROMPT - SHARED)] for _ in range(2))
            assert talk.compute(first) == 0
            talk.settled()

            # A publisher that is joined late has everything by a replay.
            index.join("late", name, endpoint, replay)
            whole = index.whole(PROMPT)
            assert index.matched(first) == dict.fromkeys(BOTH, whole)
            talk.known = BOTH

            assert talk.compute(second) == SHARED
            assert talk.compute(tokens(PROMPT)) == 0, "an unrelated prompt"
            for _ in range(2):  # told by vLLM as if it were stored again
                assert talk.compute(first, report=True) == whole, "what the engine has of its first prompt"
            talk.settled()

            # Blocks with a salt are others.
            assert talk.compute(second[:SHARED], "tenant") == 0
            assert talk.compute(second, "tenant") == SHARED and talk.compute(second[: SHARED + 1]) == SHARED

            # More than the engine can hold: what it has evicted, the index has not.
            for _ in range(3):
                assert talk.compute(tokens(PROMPT)) == 0
            assert talk.compute(first) < whole and talk.compute(second) < whole
            talk.settled()

            talk.forget()
            if name == "vLLM":  # which publishes when its scheduler takes a step
                talk.compute(tokens(PROMPT))
            wait_until(lambda: index.matched(first) == index.matched(second) == {}, "the flush", pause_s=0.1)
            assert talk.compute(second) == 0
            talk.settled()

            workers = index.workers()
            assert workers["early"]["blocks"] == workers["late"]["blocks"] > 0
            say(f"engines: {name} {version} as a whole, GPT-2 on a CPU, publishes its events to simm index")
            driver.rest(START_S)
        wait_until(lambda: all(each["stale"] for each in index.workers().values()), "the engine's end", pause_s=0.1)
        assert index.matched(second) == {} and [each["blocks"] for each in index.workers().values()] == [0, 0]
