"""The released, unmodified SGLang writes its KV pages into SiMM and gets them back, byte for byte.

Four processes: a manager and a data server (this interpreter), a writer that ends before the reader
starts, and a reader that has never seen the bytes and computes them from the seed. A third engine process
is the control: it must find the damage that was injected, or the two before it have proved nothing.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines import engine_content
from tests.engines.engine_processes import ROOT, Cluster, DriverRun, Engine

SEED = 20_260_501
#: Two full batches of SGLang's 128 pages and a short third one.
PAGES = 260
LAYOUTS = ("page_first", "page_first_direct")
POOLS = ("mha", "mla")

Step = dict[str, Any]


def case(command: str, prompt: str, pool: str, layout: str, **more: Any) -> Step:
    fields = {"prompt": prompt, "pool": pool, "layout": layout, "pages": PAGES, **more}
    return {"command": command, "case": fields}


def four(command: str, kind: str) -> list[Step]:
    """One step for each pool and layout, on prompts of their own."""
    return [case(command, f"{kind}/{pool}/{layout}", pool, layout) for pool in POOLS for layout in LAYOUTS]


#: Same tokens and so the same page hashes as the first MHA prompt, but rank 1 of 2, with bytes of its own.
RANK_1 = {"rank": 1, "ranks": 2, "content_rank": 1}
#: Page, part and byte: where the writer damages what it stores, and where the control damages what it read.
STORED_FLIP = [131, 1, 4097]
READ_FLIP = [7, 0, 0]

#: Pages of 216 KiB: beyond what a store keeps in slabs, as the pages of real models are.
LARGE = {"pages": 40, "layers": 12}
#: MLA pages are the same on every rank, and only rank 0 writes them: SGLang must not call us at all.
NOT_MINE = case("controller-write", "not-mine", "mla", "page_first", pages=40, rank=1, ranks=2)

WRITER = [
    *four("write", "direct"),
    *four("controller-write", "controller"),
    case("write", "ranks", "mha", "page_first", pages=40),
    case("write", "ranks", "mha", "page_first", pages=40, **RANK_1),
    case("write", "large", "mla", "page_first_direct", **LARGE),
    case("write", "damaged", "mha", "page_first", pages=140, flip=STORED_FLIP),
    NOT_MINE,
]
READER = [
    *four("read", "direct"),
    *four("controller-read", "controller"),
    case("read", "ranks", "mha", "page_first", pages=40),
    case("read", "ranks", "mha", "page_first", pages=40, **RANK_1),
    case("read", "large", "mla", "page_first_direct", **LARGE),
    # MLA pages belong to no rank: what rank 0 wrote, rank 1 reads.
    case("read", "direct/mla/page_first", "mla", "page_first", rank=1, ranks=2),
    {"command": "shipped-test"},
]
#: Two models: the same tokens and keys, with pages of 3 and of 4 layers.
NARROW = {"pages": 150, "layers": 3}
WIDE = {"pages": 150, "layers": 4}
#: One model at TP 2 and at TP 1: rank 0 has the same keys, with half of the heads and with all of them.
TP_2 = {"pages": 150, "heads": 1, "ranks": 2}
TP_1 = {"pages": 150, "heads": 2}
#: One model in two layouts of its pool. The pages have one size, and bytes of their own.
FIRST = {"layout": "page_first", "pages": 150, "content_rank": 0}
DIRECT = {"layout": "page_first_direct", "pages": 150, "content_rank": 1}


def apart(prompt: str, one: Step, other: Step) -> list[Step]:
    """Two that share their keys, each in a namespace of its own, as the warning says: both hit."""
    both = [({"layout": "page_first", **each}, f"{prompt}-{number}") for number, each in enumerate((one, other))]
    return [
        case(command, prompt, "mha", **fields, namespace=namespace)
        for command in ("write", "read")
        for fields, namespace in both
    ]


TWO_MODELS = [
    *(
        step
        for pool, layout, one, other in (
            ("mha", "page_first", NARROW, WIDE),
            ("mla", "page_first_direct", NARROW, WIDE),
            ("mha", "page_first_direct", TP_2, TP_1),
        )
        for step in (
            case("write", f"shared/{pool}/{layout}", pool, layout, **one),
            case("refused", f"shared/{pool}/{layout}", pool, layout, **other),
            case("write", f"shared/{pool}/{layout}", pool, layout, **other),
            case("read", f"shared/{pool}/{layout}", pool, layout, **other),
            case("refused", f"shared/{pool}/{layout}", pool, layout, **one),
        )
    ),
    *apart("models", NARROW, WIDE),
    *apart("widths", TP_2, TP_1),
    *apart("layouts", FIRST, DIRECT),
    case("write", "mixed", "mha", **FIRST),
]
CONTROL = [
    case("read", "damaged", "mha", "page_first", pages=140),
    case("read", "direct/mla/page_first_direct", "mla", "page_first_direct", flip=READ_FLIP),
    case("controller-read", "controller/mha/page_first_direct", "mha", "page_first_direct", flip=READ_FLIP),
    # The other layout in the same namespace: nothing but the namespace could tell.
    case("read", "mixed", "mha", **DIRECT),
]


def bytes_of(fields: Step) -> int:
    """Bytes of a case's pages: 16 tokens, 3 layers unless said, bf16; 2 heads of 64 for k and v, or 512 + 64."""
    width = 2 * int(fields.get("heads", 2)) * 64 if fields["pool"] == "mha" else 512 + 64
    return int(fields["pages"]) * 16 * int(fields.get("layers", 3)) * 2 * width


def damage(result: Step) -> list[list[int]]:
    """Page, part, first bad byte and their number, for everything the comparison found wrong."""
    return [[w["page"], w["part"], w["first"], w["count"]] for w in result["wrong"]]


def only(run: DriverRun, step: Step) -> Step:
    """The result that belongs to exactly this step of the request."""
    found = [s for s in run.report["steps"] if s["command"] == step["command"] and s.get("case") == step.get("case")]
    assert len(found) == 1
    return dict(found[0])


def name_of(step: Step) -> str:
    fields = step.get("case")
    return f"{step['command']}:{fields['prompt']}:{fields.get('rank', 0)}" if fields else step["command"]


@pytest.fixture(scope="module")
def writer(engine: Engine, engine_cluster: Cluster, say: Any) -> DriverRun:
    run = engine.run(engine_cluster.address, SEED, WRITER)
    say(f"engines: SGLang {run.report['sglang']}, /sys/class/infiniband: {run.report['infiniband']}")
    return run


@pytest.fixture(scope="module")
def reader(engine: Engine, engine_cluster: Cluster, writer: DriverRun) -> DriverRun:
    return engine.run(engine_cluster.address, SEED, READER)


@pytest.fixture(scope="module")
def two_models(engine: Engine, engine_cluster: Cluster, writer: DriverRun) -> DriverRun:
    return engine.run(engine_cluster.address, SEED, TWO_MODELS)


@pytest.fixture(scope="module")
def control(engine: Engine, engine_cluster: Cluster, reader: DriverRun, two_models: DriverRun) -> DriverRun:
    # After the reader, so that damage done by a control could not be what the reader saw.
    return engine.run(engine_cluster.address, SEED, CONTROL)


@pytest.mark.engines
def test_the_wheel_is_the_released_one_and_the_store_is_ours(writer: DriverRun, reader: DriverRun) -> None:
    for run in (writer, reader):
        assert len(run.report["unmodified"]) == 8 and all(run.report["unmodified"].values())
        assert run.report["simm_kv"] == str(ROOT / "simm" / "kv.py")
    assert writer.report["pid"] != reader.report["pid"]


@pytest.mark.engines
@pytest.mark.parametrize("step", WRITER, ids=name_of)
def test_writer(writer: DriverRun, engine_cluster: Cluster, step: Step) -> None:
    result = only(writer, step)
    assert result["ok"], f"{result}\n{writer.said}\n{engine_cluster.logs()}"
    assert result["stored"] == (0 if step is NOT_MINE else step["case"]["pages"])


@pytest.mark.engines
@pytest.mark.parametrize("step", READER[:-1], ids=name_of)
def test_reader_in_another_process(reader: DriverRun, engine_cluster: Cluster, step: Step) -> None:
    result = only(reader, step)
    assert result["ok"], f"{result}\n{reader.said}\n{engine_cluster.logs()}"
    pages = step["case"]["pages"]
    assert result["hits"] == result["read"] == pages
    assert result["bytes"] == bytes_of(step["case"])
    assert result["wrong"] == [] and result["strayed"] == []


@pytest.mark.engines
@pytest.mark.parametrize("step", TWO_MODELS, ids=str)
def test_two_models_under_the_same_keys(two_models: DriverRun, engine_cluster: Cluster, step: Step) -> None:
    result = only(two_models, step)
    assert result["ok"], f"{result}\n{two_models.said}\n{engine_cluster.logs()}"
    if step["command"] == "read":
        assert result["hits"] == result["read"] == 150
    elif step["command"] == "refused":
        assert (result["before"], result["read"], result["written"], result["after"]) == (150, 0, [], 0)


@pytest.mark.engines
def test_single_operation_as_shipped_in_the_wheel(reader: DriverRun) -> None:
    result = only(reader, READER[-1])
    assert result["ok"], result
    assert Path(result["file"]).name == "test_simm.py"


@pytest.mark.engines
def test_exit_status_agrees_with_the_report(writer: DriverRun, reader: DriverRun) -> None:
    assert (writer.status, writer.report["ok"]) == (0, True)
    assert (reader.status, reader.report["ok"]) == (0, True)


@pytest.mark.engines
def test_mutation_finds_the_bit_that_was_stored_wrong(control: DriverRun) -> None:
    assert control.status == 1
    result = only(control, CONTROL[0])
    assert not result["ok"]
    assert result["hits"] == result["read"] == 140
    assert damage(result) == [[*STORED_FLIP, 1]]


@pytest.mark.engines
def test_control_without_a_namespace_the_other_layouts_pages_are_taken_for_hits(control: DriverRun) -> None:
    result = only(control, CONTROL[-1])
    assert result["read"] == 150 and not result["ok"]
    assert {part["page"] for part in result["wrong"]} == set(range(150))


@pytest.mark.engines
@pytest.mark.parametrize("step", CONTROL[1:-1], ids=name_of)
def test_mutation_finds_the_bit_that_was_flipped_after_reading(control: DriverRun, step: Step) -> None:
    result = only(control, step)
    assert not result["ok"]
    assert damage(result) == [[*READ_FLIP, 1]]


# What follows needs no engine: the comparison itself, in this process.


def filled(parts: int, pages: int, size: int, rows: list[int], seed: int) -> engine_content.Bytes:
    raw = np.full((parts, pages, size), engine_content.CANARY, dtype=np.uint8)
    engine_content.fill(raw, rows, seed, "p", 0)
    return raw


@pytest.mark.parametrize("seed", range(8))
def test_comparison_names_exactly_the_damage(seed: int) -> None:
    dice = random.Random(seed)
    parts, pages, size = dice.choice([1, 2]), dice.randrange(2, 9), dice.randrange(1, 300)
    rows = dice.sample(range(pages), dice.randrange(1, pages))
    raw = filled(parts, pages, size, rows, seed)
    clean = engine_content.compare(raw, rows, seed, "p", 0)
    assert clean.wrong == () and clean.bytes_compared == parts * len(rows) * size
    assert engine_content.strayed(raw, rows) == []

    page, part, byte = dice.randrange(len(rows)), dice.randrange(parts), dice.randrange(size)
    engine_content.flip(raw, rows[page], part, byte)
    assert engine_content.compare(raw, rows, seed, "p", 0).wrong == (engine_content.Wrong(page, part, byte, 1),)
    outside = next(row for row in range(pages) if row not in rows)
    engine_content.flip(raw, outside, part, byte)
    assert engine_content.strayed(raw, rows) == [outside]


@pytest.mark.parametrize("seed", range(4))
def test_no_two_page_parts_hold_the_same_bytes(seed: int) -> None:
    parts = [
        engine_content.page_part(s, prompt, rank, page, part, 24).tobytes()
        for s in (seed, seed + 1)
        for prompt in ("p", "q")
        for rank in (0, 1)
        for page in range(4)
        for part in (0, 1)
    ]
    assert len(set(parts)) == len(parts)
    assert all(set(p) != {engine_content.CANARY} for p in parts)


def test_a_page_that_never_arrived_is_wrong() -> None:
    raw = filled(2, 3, 64, [2], 1)
    wrong = engine_content.compare(raw, [2, 0], 1, "p", 0).wrong
    assert [(w.page, w.part, w.first) for w in wrong] == [(1, 0, 0), (1, 1, 0)]


def test_a_longer_prompt_begins_with_the_shorter_one() -> None:
    assert engine_content.tokens(3, "p", 64)[:40] == engine_content.tokens(3, "p", 40)
    assert engine_content.tokens(3, "p", 40) != engine_content.tokens(3, "q", 40)
