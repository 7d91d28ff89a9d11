"""``examples/dynamo_router.py`` and the index' answers in Dynamo's form, with Dynamo 1.6.1 itself.

Dynamo's runtime serves two workers and the component, and its own client asks them. Only the engines behind the workers
are stand-ins: they publish the events that a test wants. ``python -m dynamo.indexer`` is told the same as
``simm index``, and asked the same.
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")

import msgspec
import zmq

from tests.engines.engine_processes import ROOT, Unavailable, engine_python
from tests.support.child import Child, child_environment
from tests.support.http_page import ask_json
from tests.support.ports import reserve_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engines
HERE = Path(__file__).parent
SIZE = 16
WORKERS = "simm.backend.generate"
ASK_S = 60.0


@pytest.fixture(scope="module")
def python() -> str:
    try:
        return engine_python("routers")
    except Unavailable as why:
        pytest.skip(f"no environment of Dynamo: {why}")


@pytest.fixture
def index() -> Iterator[Child]:
    command = [sys.executable, "-m", "simm", "index", "--at", "127.0.0.1:0"]
    with Child(command, name="simm index") as process:
        yield process


def at_of(index: Child) -> str:
    return index.expect("READY index ").split()[2]


def test_requests_go_where_their_prompt_is(python: str, index: Child, tmp_path: Path) -> None:
    """By what workers have, by what they have to do, without an index, and when a worker has gone."""
    at = at_of(index)
    environment = child_environment(DYN_FILE_KV=str(tmp_path / "discovery"), DYN_LOG="error", TMPDIR=str(tmp_path))
    flags = ["--endpoint", WORKERS, "--index", at, "--model", "m", "--block-size", str(SIZE), "--ask-s", str(ASK_S),
             "--discovery", "file"]  # fmt: skip
    rng = random.Random(5)
    prompt, other = ([rng.randrange(50_000) for _ in range(8 * SIZE + 3)] for _ in range(2))

    def child(stack: ExitStack, *words: str, talks: bool = True) -> Child:
        log = tmp_path / f"{Path(words[0]).stem}.log"
        return stack.enter_context(
            Child([python, *words], name=words[0], talks=talks, log=log, environment=environment)
        )  # fmt: skip

    with ExitStack() as stack:
        workers = {}
        for _ in range(2):
            worker = child(stack, str(HERE / "dynamo_worker_driver.py"), at, WORKERS)
            workers[worker.answer()[0]] = worker
        router = child(stack, str(ROOT / "examples" / "dynamo_router.py"), *flags, talks=False)
        router.expect("serving simm.router")
        asker = child(stack, str(HERE / "dynamo_asker_driver.py"))
        first, second = sorted(workers, key=str)  # as the index orders equal ones

        def chosen(tokens: list[int]) -> int:
            (found,) = asker.ask(["simm.router.best_worker_id", {"token_ids": tokens}])
            assert isinstance(found, int)
            return found

        def store(worker: int, tokens: list[int], medium: str = "GPU") -> None:
            """Publish until the index has it: it may not have been connected."""

            def known() -> bool:
                workers[worker].tell(json.dumps({"store": tokens, "medium": medium}))
                found = ask_json(at, "/query", {"model": "m", "block_size": SIZE, "token_ids": tokens})["default"]
                return bool(found.get(str(worker), {}).get("longest_matched") == len(tokens) // SIZE * SIZE)

            stores = "the index knows what the worker stores"
            wait_until(known, lambda: f"{stores}: {ask_json(at, '/workers')}", pause_s=0.1)

        wait_until(lambda: len(ask_json(at, "/workers")) == 2, "both workers are registered")
        wait_until(lambda: asker.ask(["simm.router.get_overlap_scores", {"token_ids": prompt}]), "the router answers")
        assert chosen(prompt) == first, "nobody has it"
        store(second, prompt)
        store(first, other[: 2 * SIZE], "CPU")
        assert [chosen(each) for each in (prompt, prompt[: 3 * SIZE], other)] == [second, second, first]
        answer = asker.ask(["simm.router.generate", {"token_ids": prompt, "model": "m"}])
        assert answer == [{"token_ids": [token], "worker": second} for token in prompt[:2]], "its own stream, as it is"

        (scores,) = asker.ask(["simm.router.get_overlap_scores", {"token_ids": other}])
        assert scores["num_blocks"] == 8 and scores["shared_cache"] == {"hits": 0}
        rows = {row["worker_id"]: row for row in scores["workers"] if any(row[key] for key in row if "blocks" in key)}
        assert rows == {first: {"worker_id": first, "device_blocks": 0, "host_pinned_blocks": 2, "disk_blocks": 0,
                                "shared_beyond_blocks": 0}}  # fmt: skip

        workers[second].close_input()
        assert workers[second].wait() == 0
        wait_until(lambda: chosen(prompt) == first, "who has gone is not chosen, whatever the index knows of it")
        index.kill()
        assert chosen(prompt) == first, "without an index"
        assert asker.ask(["simm.router.generate", {"token_ids": other, "model": "m"}])[0]["worker"] == first


class Publisher:
    """An engine's publisher, whom two indexes hear."""

    def __init__(self) -> None:
        self.socket = zmq.Context.instance().socket(zmq.PUB)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.number = 0

    def tell(self, *events: dict[str, Any]) -> None:
        payload = msgspec.msgpack.encode([time.time(), list(events), 0])
        self.socket.send_multipart([b"", struct.pack(">Q", self.number), payload])
        self.number += 1


def stored(tokens: list[int], names: list[int], first: int, last: int, medium: str = "GPU") -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": names[first:last], "block_size": SIZE, "lora_id": None, "medium": medium,
        "parent_block_hash": names[first - 1] if first else None, "token_ids": tokens[first * SIZE : last * SIZE],
    }  # fmt: skip


def test_answers_are_those_of_dynamos_indexer(python: str, index: Child, tmp_path: Path) -> None:
    """The same requests to both, after the same events of three workers: equal fields, for each prompt."""
    at, port = at_of(index), reserve_port()
    log = tmp_path / "indexer.log"
    command = [python, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    rng = random.Random(11)
    prompts = [[rng.randrange(90_000) for _ in range(10 * SIZE + 5)] for _ in range(3)]
    prompts.append(prompts[0][: 4 * SIZE] + prompts[1][4 * SIZE :])  # of two that share four blocks
    publishers = [Publisher() for _ in range(3)]
    with Child(command, name="dynamo.indexer", log=log, environment={**os.environ, "DYN_LOG": "error"}):
        addresses = at, f"127.0.0.1:{port}"

        def healthy() -> bool:
            try:
                return bool(urllib.request.urlopen(f"http://{addresses[1]}/health", timeout=ASK_S))
            except OSError:
                return False

        wait_until(healthy, lambda: f"Dynamo's indexer listens: {log.read_text()[-1000:]}")
        for number, publisher in enumerate(publishers):
            for address in addresses:
                fields = {"instance_id": number, "endpoint": publisher.address, "model_name": "m",
                          "block_size": SIZE, "dp_rank": 0}  # fmt: skip
                ask_json(address, "/register", fields)

        def answers(tokens: list[int]) -> list[dict[str, Any]]:
            """What each says, without workers that have nothing."""
            body = {"model_name": "m", "token_ids": tokens, "block_size": SIZE}
            found = []
            for address in addresses:
                try:
                    answer = ask_json(address, "/query", body)
                except urllib.error.HTTPError:  # Dynamo's knows no such model before its first block
                    answer = {"instances": {}, "scores": {}, "frequencies": []}
                having = {name: each for name, each in answer["instances"].items() if each["longest_matched"]}
                scores = {name: {rank: count for rank, count in each.items() if count}
                          for name, each in answer["scores"].items()}  # fmt: skip
                found.append({
                    "instances": having, "scores": {name: each for name, each in scores.items() if each},
                    "frequencies": answer["frequencies"],
                })  # fmt: skip
            return found

        def heard(publisher: int) -> bool:
            """Whether both have heard a publisher: it says something until they have."""
            mark = [70_000 + publisher] * SIZE
            publishers[publisher].tell(stored(mark, [900 + publisher], 0, 1))
            return all(str(publisher) in each["instances"] for each in answers(mark))

        for number in range(3):
            wait_until(lambda number=number: heard(number), "both hear a publisher", pause_s=0.1)  # type: ignore[misc]
        names = [[1000 * (number + 1) + at for at in range(10)] for number in range(4)]
        names[3][:4] = names[0][:4]
        story = [
            (0, stored(prompts[0], names[0], 0, 10)), (1, stored(prompts[0], names[0], 0, 4)),
            (1, stored(prompts[3], names[3], 4, 7)), (2, stored(prompts[1], names[1], 0, 6)),
            (2, stored(prompts[1], names[1], 6, 9, "CPU")), (0, stored(prompts[2], names[2], 0, 3, "CPU")),
            (0, {"type": "BlockRemoved", "block_hashes": names[0][7:8], "medium": "GPU"}),
            (2, {"type": "BlockRemoved", "block_hashes": names[1][5:6], "medium": "GPU"}),
            (1, {"type": "BlockRemoved", "block_hashes": names[3][2:3], "medium": "GPU"}),
        ]
        seen = [list(map(answers, prompts))]
        for number, event in story:
            publishers[number].tell(event)

            def both() -> list[list[dict[str, Any]]] | None:
                """What both say, once they agree on something new: each event changes an answer."""
                found = list(map(answers, prompts))
                return found if found != seen[-1] and all(ours == theirs for ours, theirs in found) else None

            seen.append(wait_until(both, lambda: f"both say the same: {list(map(answers, prompts))}", pause_s=0.1))
        behind, last = (
            [each[0]["instances"] for each in seen[at]] for at in (5, -1)
        )  # fmt: skip
        assert behind[1]["2"]["cpu"] == 9 * SIZE > behind[1]["2"]["gpu"] == 6 * SIZE, "a tier behind another one"
        assert last[0]["0"]["longest_matched"] == 7 * SIZE and last[1]["2"]["gpu"] == 5 * SIZE
    for publisher in publishers:
        publisher.socket.close(0)
