"""The released, unmodified LMCache over SiMM, by both of its seats, against a manager and two data servers.

Processes that write end before those that read start, and these compute from the seed what they must get. The keys that
LMCache wrote are those that ``simm.schemes`` makes. tests/unit/connectors has the values' form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from simm.client import Client
from simm.schemes import lmcache as scheme
from tests.engines import engine_content, engine_processes
from tests.engines.engine_processes import PATIENT_MS, Cluster, DriverRun, Engine

SEED = 20_261_125
CHUNK = 64
CHUNKS = 6
BYTES = 2 * 2 * CHUNK * 4 * 16 * 2
#: Bounds a call on stopped servers. Its deadline is 0.4 s; what hangs never ends.
STOPPED_S = 20.0

Step = dict[str, Any]


def step(command: str, prompt: str, **case: Any) -> Step:
    return {"command": command, "case": {"prompt": prompt, "deadline_ms": PATIENT_MS, **case}}


#: Prompts that are stored, and must be found whole.
WHOLE: dict[str, Step] = {
    "remote/plugin": {}, "remote/address": {"seat": "url"}, "remote/short": {"last": 17},
    "remote/rank": {"world": 2, "worker": 1}, "remote/half": {"dtype": "float16"},
    "remote/weights": {"weights": "2"}, "remote/address weights": {"seat": "url", "weights": "2", "own_salt": "s"},
}  # fmt: skip
#: Stored and found by LMCache's connector for Mooncake, over SiMM: chunks alone, and with LMCache's metadata.
MOONCAKE = {"mooncake": {"seat": "mooncakestore"}, "mooncake+meta": {"seat": "mooncakestore+meta"}}
OBJECTS: dict[str, Step] = {
    "l2/plain": {}, "l2/salted": {"salt": "tenant-1"}, "l2/rank": {"world": 2, "worker": 1},
}  # fmt: skip
#: The same with SiMM's own options. Their keys are not those of ``simm.schemes`` alone.
VERSIONS: dict[str, Step] = {"l2/weights": {"weights": "2"}, "l2/own salt": {"own_salt": "s"}}
FLIP = 4097
#: Engines that make the same hashes of a prompt, and must share nothing: the writer, the reader.
APART: dict[str, tuple[Step, Step]] = {
    "models of one shape": ({"model": "org/a"}, {"model": "org/b"}),
    "data types": ({"dtype": "bfloat16"}, {"dtype": "float16"}),
    "TP 2 and TP 1": ({"world": 2}, {"world": 1}),
    "ranks": ({"world": 2}, {"world": 2, "worker": 1}),
    "layouts of one size": ({"layers": 2, "heads": 4}, {"layers": 4, "heads": 2}),
    "chunk sizes": ({}, {"chunk": CHUNK // 2, "last": CHUNK // 2}),
    "weights": ({"weights": "1"}, {"weights": "2"}),
    "weights that nobody names": ({"weights": "1"}, {}),
    "SiMM's salts": ({"own_salt": "a"}, {"own_salt": "b"}),
    "salts": ({"salt": "a"}, {"salt": "b"}),
}
#: A salt of LMCache's is the server's.
REMOTE_APART = [name for name in APART if name != "salts"]
#: Keys of ``lmcache server`` have no data type, and none has a layout: these are found, but their load is a miss.
FOUND_ALL_THE_SAME = ("data types", "layouts of one size")

ABSENT = step("absent-manager", "absent", deadline_ms=3000)
WRITER = [
    *(step("remote-write", name, **case) for name, case in MOONCAKE.items()),
    *(step("remote-write", name, **case) for name, case in WHOLE.items()),
    *(step("l2-write", name, **case) for name, case in {**OBJECTS, **VERSIONS}.items()),
    *(step("remote-write", f"apart/{name}", **APART[name][0]) for name in REMOTE_APART),
    *(step("l2-write", f"apart/{name}", **one) for name, (one, _) in APART.items()),
    step("remote-write", "remote/damaged", flip=FLIP),
    step("l2-write", "l2/damaged", flip=FLIP),
]
READER = [
    *(step("remote-read", name, **case) for name, case in MOONCAKE.items()),
    *(step("remote-read", name, model="org/other", **case) for name, case in MOONCAKE.items()),
    step("mooncake-lookup", "mooncake", **MOONCAKE["mooncake"]),
    step("mooncake-lookup", "mooncake", model="org/other", **MOONCAKE["mooncake"]),
    step("mooncake-server", "mooncake"),
    *(step("remote-read", name, **case) for name, case in WHOLE.items()),
    *(step("l2-read", name, **case) for name, case in {**OBJECTS, **VERSIONS}.items()),
    *(step("remote-read", f"apart/{name}", **APART[name][1]) for name in REMOTE_APART),
    *(step("l2-read", f"apart/{name}", **other) for name, (_, other) in APART.items()),
    step("remote-read", "remote/damaged"),
    step("l2-read", "l2/damaged"),
    step("l2-lock", "l2/lock"),
    step("remote-remove", "remote/half", dtype="float16"),
    {**step("basic", ""), "mode": "test_remote"},
    {**step("basic", ""), "mode": "test_l2_adapter"},
    step("failing", "failing"),
    ABSENT,
]
#: What was dropped as another layout's can be stored, and is found then.
AGAIN = [
    step("remote-write", "apart/layouts of one size", layers=4, heads=2),
    step("remote-read", "apart/layouts of one size", layers=4, heads=2),
    step("l2-write", "apart/data types", dtype="float16"),
    step("l2-read", "apart/data types", dtype="float16"),
]


@pytest.fixture(scope="module")
def two_servers(lmcache: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with engine_processes.cluster(tmp_path_factory.mktemp("lmcache-cluster"), "256M", servers=2) as running:
        yield running


@pytest.fixture(scope="module")
def run(lmcache: Engine, two_servers: Cluster, say: Any) -> DriverRun:
    """All steps: the writer's process, the reader's, and the one whose servers are stopped."""
    servers = [each.pid for each in two_servers.servers]
    stopped = {**step("stopped", "stopped", deadline_ms=400), "servers": servers}
    new = {"command": "new-process"}
    ran = lmcache.run(
        two_servers.address, SEED, [*WRITER, new, *READER, *AGAIN, new, stopped], driver="lmcache_driver.py",
        as_expected=False, module="simm.connectors.mooncake",
    )  # fmt: skip
    say(f"engines: LMCache {ran.report['lmcache']} with simm.connectors.lmcache and lmcache_server")
    return ran


@pytest.fixture
def of(run: DriverRun, two_servers: Cluster) -> Any:
    """Return the result of a step of one of the three lists."""

    def find(steps: list[Step], wanted: Step) -> Step:
        before = {id(WRITER): 0, id(READER): len(WRITER), id(AGAIN): len(WRITER) + len(READER)}[id(steps)]
        result: Step = run.report["steps"][before + steps.index(wanted)]
        assert "error" not in result, f"{result}\n{run.stderr[-2000:]}\n{two_servers.logs()}"
        return result

    return find


def tokens_of(prompt: str, case: Step) -> list[int]:
    return engine_content.tokens(SEED, prompt, (CHUNKS - 1) * CHUNK + case.get("last", CHUNK))


@pytest.mark.engines
@pytest.mark.parametrize("prompt", WHOLE)
def test_chunks_of_another_process(of: Any, prompt: str) -> None:
    case = WHOLE[prompt]
    assert of(WRITER, step("remote-write", prompt, **case))["used"] == 0
    read = of(READER, step("remote-read", prompt, **case))
    assert read["one"] and read["sync"] and read["hits"] == CHUNKS and read["found"] == [CHUNKS] * 3
    assert read["wrong"] == [[], [], []] and read["last"] == [[2, 2, case.get("last", CHUNK), 64]]
    assert read["used"] == 0 and read["ping"] == 0


@pytest.mark.engines
@pytest.mark.parametrize("name", MOONCAKE)
def test_lmcaches_connector_for_mooncake(of: Any, name: str) -> None:
    """It gets batches only, and raises for one chunk."""
    read = of(READER, step("remote-read", name, **MOONCAKE[name]))
    assert read["one"] and read["sync"] and read["hits"] == CHUNKS
    assert read["found"] == [CHUNKS, 0, 0] and read["wrong"] == [[], [], []] and read["used"] == 0
    other = of(READER, step("remote-read", name, model="org/other", **MOONCAKE[name]))
    assert other["hits"] == 0 and other["found"] == [0, 0, 0]


@pytest.mark.engines
def test_lmcaches_lookup_client_for_mooncake(of: Any) -> None:
    """The scheduler's client, which asks Mooncake's store itself instead of a worker."""
    wanted = {"client": "MooncakeLookupClient", "found": [CHUNKS * CHUNK, CHUNKS * CHUNK, 0]}
    assert of(READER, step("mooncake-lookup", "mooncake", **MOONCAKE["mooncake"])) == wanted
    other = of(READER, step("mooncake-lookup", "mooncake", model="org/other", **MOONCAKE["mooncake"]))
    assert other["found"] == [0, 0, 0]


@pytest.mark.engines
def test_the_servers_adapter_for_mooncake(of: Any) -> None:
    """It is a client of Mooncake in C++, which no package ``mooncake.store`` can stand in for."""
    made = of(READER, step("mooncake-server", "mooncake"))
    assert "C++ Mooncake extension" in made["reason"], "LMCache's wheel has it now: run it over Mooncake's API"
    pytest.skip(f"LMCache's wheel is without its C++ client of Mooncake: {made['cause']}")


@pytest.mark.engines
@pytest.mark.parametrize("prompt", [*OBJECTS, *VERSIONS])
def test_objects_of_another_process(of: Any, prompt: str) -> None:
    case = {**OBJECTS, **VERSIONS}[prompt]
    written = of(WRITER, step("l2-write", prompt, **case))
    assert written["stored"] and written["again"] and written["descriptors"] == 3
    assert written["usage"] == written["bytes"] == CHUNKS * BYTES, "the second store copied nothing"
    read = of(READER, step("l2-read", prompt, **case))
    assert read["found"] == read["loaded"] == list(range(CHUNKS)) and read["wrong"] == [] and read["left"] == []
    assert (read["locked"], read["unlocked"]) == (CHUNKS, 0)


@pytest.mark.engines
def test_the_keys_that_lmcache_wrote_are_those_of_the_schemes(of: Any, two_servers: Cluster) -> None:
    dtypes = {"bfloat16": "bfloat16", "float16": "half"}
    with Client(two_servers.address, deadline_s=PATIENT_MS / 1000) as client:
        assert client.wait_ready()
        for prompt in ("remote/plugin", "remote/address", "remote/rank"):
            case = WHOLE[prompt]
            hashes = scheme.chunk_hashes([*tokens_of(prompt, case), *range(2 * CHUNK)], CHUNK)
            dtype = dtypes[case.get("dtype", "bfloat16")]
            world, worker = case.get("world", 1), case.get("worker", 0)
            mine = scheme.engine_keys(hashes, "org/model", dtype, world_size=world, worker_id=worker)
            assert mine[:CHUNKS] == of(WRITER, step("remote-write", prompt, **case))["keys"]
            assert client.exists_many(mine) == [True] * CHUNKS + [False] * 2
        for prompt, case in OBJECTS.items():
            written = of(WRITER, step("l2-write", prompt, **case))
            hashes = [bytes.fromhex(each) for each in written["hashes"]]
            mine = scheme.object_keys(hashes, "org/model", kv_rank=written["rank"], cache_salt=case.get("salt", ""))
            assert mine == written["keys"] and client.exists_many(mine) == [True] * CHUNKS


@pytest.mark.engines
@pytest.mark.parametrize("name", REMOTE_APART)
def test_engines_that_share_nothing(of: Any, name: str) -> None:
    read = of(READER, step("remote-read", f"apart/{name}", **APART[name][1]))
    assert read["hits"] == (CHUNKS if name == "layouts of one size" else 0)
    assert read["found"] == [0, 0, 0] and read["used"] == 0


@pytest.mark.engines
@pytest.mark.parametrize("name", APART)
def test_servers_that_share_nothing(of: Any, name: str) -> None:
    read = of(READER, step("l2-read", f"apart/{name}", **APART[name][1]))
    assert read["found"] == (list(range(CHUNKS)) if name in FOUND_ALL_THE_SAME else [])
    assert read["loaded"] == [] and read["unlocked"] == 0


@pytest.mark.engines
def test_another_layout_was_dropped_and_made_room(of: Any) -> None:
    found = of(AGAIN, AGAIN[1])
    assert found["found"] == [CHUNKS] * 3 and found["wrong"] == [[], [], []]
    loaded = of(AGAIN, AGAIN[3])
    assert loaded["loaded"] == list(range(CHUNKS)) and loaded["wrong"] == []


@pytest.mark.engines
def test_mutation_finds_the_bit_that_was_stored_wrong(of: Any) -> None:
    assert of(READER, step("remote-read", "remote/damaged"))["wrong"] == [[[1, FLIP]]] * 3
    assert of(READER, step("l2-read", "l2/damaged"))["wrong"] == [[1, FLIP]]


@pytest.mark.engines
def test_a_lookup_locks_what_it_found(of: Any) -> None:
    result = of(READER, step("l2-lock", "l2/lock"))
    every = list(range(CHUNKS))
    assert result["stored"] and result["found"] == every and result["twice"] == [0, 1]
    assert result["free"] == [], "deleted, for all others"
    assert result["loaded"] == every and result["wrong"] == []
    assert result["still"] == [0, 1] and result["after"] == [] and result["locked"] == 0


@pytest.mark.engines
def test_remove(of: Any) -> None:
    result = of(READER, step("remote-remove", "remote/half", dtype="float16"))
    assert result == {"removed": [True, False], "hits": 0}


@pytest.mark.engines
@pytest.mark.parametrize(("mode", "rows"), [("test_remote", 4), ("test_l2_adapter", 4)])
def test_lmcaches_own_check(of: Any, mode: str, rows: int) -> None:
    said = of(READER, {**step("basic", ""), "mode": mode})["said"]
    rates = re.findall(r"\|\s+(\d+)/(\d+) \|\s+([\d.]+)%", said)
    assert len(rates) == rows and all(one == other and rate == "100.0" for one, other, rate in rates), said
    assert "Fail" not in said and "FAIL" not in said and "Error" not in said, said


@pytest.mark.engines
def test_failing_calls_are_misses(of: Any) -> None:
    result = of(READER, step("failing", "failing"))
    assert result["stored"] and result["before"] == result["after"] == [CHUNKS, CHUNKS]
    failed, objects = result["failed"], result["failed_l2"]
    assert (failed["hits"], failed["one"], failed["found"]) == (0, False, 0)
    assert (objects["lookup"], objects["load"], objects["store"]) == ([], [], False)
    assert result["untouched"] and result["used"] == 0


@pytest.mark.engines
def test_without_a_manager_all_is_a_miss(of: Any) -> None:
    result = of(READER, ABSENT)
    remote, objects = result["remote"], result["l2"]
    assert (remote["hits"], remote["one"], remote["found"]) == (0, False, 0)
    assert (objects["lookup"], objects["load"], objects["store"]) == ([], [], False)
    assert result["ping"] == 1 and not result["healthy"] and result["used"] == 0


@pytest.mark.engines
def test_stopped_servers_cost_their_deadline(run: DriverRun) -> None:
    result = run.report["steps"][-1]
    assert "error" not in result, result
    assert result["stored"] == [True, CHUNKS]
    halted, objects = result["halted"], result["halted_l2"]
    assert (halted["hits"], halted["one"], halted["found"]) == (0, False, 0)
    assert (objects["lookup"], objects["load"], objects["store"]) == ([], [], False)
    assert max(halted["slowest"], objects["slowest"]) < STOPPED_S
    assert result["untouched"] and result["back"] == CHUNKS and result["wrong"] == [] and result["used"] == 0


@pytest.mark.engines
def test_the_wheel_is_the_released_one(run: DriverRun) -> None:
    assert len(run.report["unmodified"]) == 5 and all(run.report["unmodified"].values())
