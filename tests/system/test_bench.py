"""``simm bench``: percentiles, floors and verification on their own; the command against a cluster of its own."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from simm.config.settings import load
from simm.errors import UsageError
from simm.tools.bench import command, floor
from simm.tools.bench import load as bench_load
from simm.tools.bench import report as bench_report
from simm.tools.bench.floor import Area, RawStream, stride_of
from simm.tools.bench.load import LoadThread, Samples, fault, stamp
from simm.tools.bench.report import Bar, Cell, Figures, Progress, bar_for, percentiles

WAIT_S = 60.0


# --- percentiles and samples ----------------------------------------------------------------------


def nearest_rank(values: list[int], point: float) -> float:
    """The naive twin: the smallest value that at least ``point`` of all are not above."""
    ordered = sorted(values)
    return next(value for at, value in enumerate(ordered, 1) if at >= point * len(ordered) - 1e-9) / 1000


@pytest.mark.parametrize("seed", range(20))
def test_percentiles_are_those_of_a_naive_twin(seed: int) -> None:
    draw = random.Random(seed)
    lanes = [[draw.randrange(1, 5000) for _ in range(draw.randrange(1, 300))] for _ in range(draw.randrange(1, 4))]
    points = (0.5, 0.99, 0.999, 0.25, 1.0)
    found = percentiles([(len(lane), array("q", lane).tobytes()) for lane in lanes], points)
    together = [value for lane in lanes for value in lane]
    assert found == [nearest_rank(together, point) for point in points]


def test_a_sampled_thread_counts_for_all_its_calls() -> None:
    # 9,000 calls of 1 us of which ten were kept, and 1,000 of 5 us that were all kept: the median is 1 us.
    parts = [(9000, array("q", [1000] * 10).tobytes()), (1000, array("q", [5000] * 1000).tobytes())]
    assert percentiles(parts, (0.5, 0.89, 0.91)) == [1.0, 1.0, 5.0]


def test_no_samples_at_all_are_zeros() -> None:
    assert percentiles([(0, b""), (0, b"")], (0.5, 0.99)) == [0.0, 0.0]


def test_beyond_its_room_a_sample_keeps_each_value_with_the_same_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_load, "SAMPLES_MAX", 50)
    random.seed(7)
    kept: list[int] = []
    for _ in range(40):
        samples = Samples()
        for value in range(500):
            if samples.count < 50:
                samples.values[samples.count] = value
                samples.count += 1
            else:
                samples.replace_one(value)
        count, raw = samples.take()
        values = array("q")
        values.frombytes(raw)
        assert count == 500 and len(values) == 50 and len(set(values)) == 50
        kept += values
    # 2,000 draws; a tenth of them comes from each tenth of the stream, by about 200 +- 13.
    for tenth in range(10):
        assert 140 < sum(value // 50 == tenth for value in kept) < 260


# --- bars and the report --------------------------------------------------------------------------


def cell_of(op: str, size: int, batch: int = 1, path: str = "shm", p50: float = 1.0, ratio: float = 1.0) -> Cell:
    figures = Figures(10, 10 * batch, p50, p50, p50, p50 / batch, 1e6, 1.0)
    return Cell(op, size, batch, path, rounds=[(ratio * 100, 100.0)], own=figures, floor=Figures(10, 10, 0.5))


@pytest.mark.parametrize(
    ("cell", "ring", "text"),
    [
        (cell_of("get", 4096), True, "<= 5 us"),
        (cell_of("put", 4096), True, "<= 10 us"),
        (cell_of("put", 4096), False, "<= 25 us"),
        (cell_of("mput", 4096, 32), True, "<= 5 us"),
        (cell_of("exists", 4096), True, "<= 3 us"),
        (cell_of("mexists", 4096, 128), True, "<= 1.5 us"),
        (cell_of("get", 1 << 20), True, "ratio >= 0.85"),
        (cell_of("mget", 16 << 20, 8), True, "ratio >= 0.85"),
        (cell_of("put", 1 << 20), True, "ratio >= 0.75"),
        (cell_of("mput", 4 << 20, 8), True, "ratio >= 0.75"),
        (cell_of("put", 1 << 20, path="tcp"), True, "ratio >= 0.85"),
        (cell_of("mget", 1 << 20, 8, "tcp"), True, "ratio >= 0.85"),
    ],
)
def test_the_bars_are_those_of_the_design(cell: Cell, ring: bool, text: str) -> None:
    assert str(bar_for(cell, ring=ring, single=True)) == text
    assert bar_for(cell, ring=ring, single=False) is None


@pytest.mark.parametrize(
    "cell",
    [
        cell_of("get", 64 << 10), cell_of("mexists", 4096, 32), cell_of("mput", 4096, 8), cell_of("view", 1 << 20),
        cell_of("get", 4096, path="tcp"), cell_of("exists", 4096, path="tcp"),
    ],
)  # fmt: skip
def test_no_bar_where_the_design_has_none(cell: Cell) -> None:
    assert bar_for(cell, ring=True, single=True) is None


def test_a_missed_bar_is_told() -> None:
    slow, bar = cell_of("get", 4096, p50=5.01), Bar(5.0, False)
    assert not bar.held_by(slow) and bar.held_by(cell_of("get", 4096, p50=4.99))
    assert bench_report.rows(slow, bar)[0].endswith("MISSED (<= 5 us)")
    assert not Bar(0.85, True).held_by(cell_of("get", 1 << 20, ratio=0.84))
    assert bench_report.as_json(slow, bar)["bar"] == {"bar": "<= 5 us", "ok": False}


def test_what_went_wrong_stands_below_its_row() -> None:
    cell = cell_of("put", 4096)
    assert len(bench_report.rows(cell, None)) == 2
    cell.bad, cell.wrong, cell.why_wrong = 3, 2, "key k: torn"
    assert bench_report.rows(cell, None)[2:] == [
        "  ! 3 keys were not stored", "  ! 2 WRONG VALUES, the last: key k: torn",
    ]  # fmt: skip


def test_the_ratio_is_the_median_over_the_rounds() -> None:
    cell = cell_of("get", 1 << 20)
    cell.rounds = [(90.0, 100.0), (1.0, 100.0), (95.0, 100.0)]
    assert cell.ratio == 0.9


def test_progress_is_for_terminals_only() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    quiet, terminal = io.StringIO(), Terminal()
    Progress(quiet)("round 1")
    Progress(terminal)("round 1 " + "x" * 500)
    assert quiet.getvalue() == ""
    assert "round 1" in terminal.getvalue() and "\n" not in terminal.getvalue() and len(terminal.getvalue()) < 500


# --- floors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 63, 64, 1000, 4096])
def test_rows_lie_apart_and_where_they_say(size: int) -> None:
    area = Area(64 << 10)
    count = area.size // stride_of(size)
    rows, addresses = area.rows(0, count, size), area.addresses(0, count, size)
    assert len(rows) == len(addresses) == count and all(address % 64 == 0 for address in addresses)
    for number, row in enumerate(rows):
        row[:] = bytes([number % 251]) * size
    assert all(bytes(row) == bytes([number % 251]) * size for number, row in enumerate(rows))
    floor.copy_many(addresses[:1], addresses[-1:], size)
    assert rows[0] == rows[-1]


def test_a_shared_area_leaves_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    area = Area(1 << 20, shared=True)
    area.fill()
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"simm-bench-{os.getpid()}-")]
    assert bytes(area.rows(0, 1, 1 << 20)[0][:16]) != bytes(16)

    def full(*_: object, **__: object) -> bool:
        raise floor.TransportError("no room")

    monkeypatch.setattr(floor.OwnedSegment, "populate", full)
    with pytest.raises(floor.TransportError):
        Area(1 << 20, shared=True)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"simm-bench-{os.getpid()}-")]


@pytest.fixture
def far_side() -> Iterator[Any]:
    """The raw socket's far side in threads of ours: its ``address``, and ``settle`` to wait until they are done."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            if closing:
                return sock.close()
            threads.append(threading.Thread(target=floor._serve, args=(sock, 64 << 10)))
            threads[-1].start()

    closing: list[bool] = []
    acceptor = threading.Thread(target=accept)
    acceptor.start()

    def settle() -> None:
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    yield SimpleNamespace(address=listener.getsockname(), settle=settle)
    closing.append(True)
    socket.create_connection(listener.getsockname()).close()
    acceptor.join(WAIT_S)
    assert not acceptor.is_alive()
    settle()
    listener.close()
    floor._IDLE.clear()


def test_the_raw_socket_moves_whole_pieces(far_side: Any) -> None:
    target = memoryview(bytearray(5000))
    stream = RawStream(far_side.address, "get", 5000)
    stream.get(target)
    stream.get_many([target, target])
    stream.finish()
    assert bytes(target) != bytes(5000)
    far_side.settle()
    stream = RawStream(far_side.address, "put", 5000)
    stream.put(target)
    stream.put_many([target] * 100)
    stream.finish()
    far_side.settle()
    (rows,) = floor._IDLE[64 << 10, 5000]
    assert all(row == target for row in rows)  # more pieces than rows: all of them came round
    stream = RawStream(far_side.address, "ask", 32)
    stream.ask()
    stream.ask()
    stream.finish()


def test_a_far_side_that_is_not_there_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(floor.TransportError, match="does not answer"):
        RawStream(address, "get", 64)


# --- verification -------------------------------------------------------------------------------------


class Store:
    """A client that keeps values in a dict; ``fault`` says how it lies."""

    def __init__(self, fault: str = "") -> None:
        self.values: dict[str, bytes] = {}
        self.fault = fault

    def put(self, key: str, value: Any) -> bool:
        if self.fault == "put forgets" and key in self.values:
            return True
        self.values[key] = bytes(value)
        return True

    def put_many(self, keys: list[str], values: list[Any]) -> list[bool]:
        return [self.put(key, value) for key, value in zip(keys, values)]

    def get_into(self, key: str, buffer: Any) -> int | None:
        if self.fault == "get misses":
            return None
        if self.fault == "get of another key":
            key = next(iter(self.values))
        value = self.values.get(key)
        if value is None:
            return None
        if self.fault == "get writes nothing":
            return len(value)
        if self.fault == "get is short":
            value = value[:-1]
        buffer[: len(value)] = value
        if self.fault == "get is torn":
            buffer[len(value) - 1] ^= 1
        return len(value)

    def get_into_many(self, keys: list[str], buffers: list[Any]) -> list[int | None]:
        return [self.get_into(key, buffer) for key, buffer in zip(keys, buffers)]

    def exists(self, key: str) -> bool:
        return self.fault == "exists is always true" or key in self.values

    def exists_many(self, keys: list[str]) -> list[bool]:
        return [self.exists(key) for key in keys]

    def view(self, key: str) -> Any:
        buffer = memoryview(bytearray(1 << 16))
        length = self.get_into(key, buffer)
        return None if length is None else View(buffer[:length])


class View:
    def __init__(self, data: memoryview) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def thread_on(store: Store, size: int = 200, rows: int = 12) -> LoadThread:
    room = rows * stride_of(size)
    source, target = Area(room), Area(room)
    source.fill()
    load: Any = SimpleNamespace(
        run="r", verify=True, source=source, target=target, shared=None, raw=None, samples=[(Samples(), Samples())],
        client=store,
    )  # fmt: skip
    thread = LoadThread(load, 0, 0, rows, size, {"mput": 4, "mget": 4, "mexists": 4})
    store.put_many(thread.keys, thread.sources)
    return thread


OPS = ("put", "get", "mput", "mget", "view", "exists", "mexists")


@pytest.mark.parametrize("size", [5, 32, 200, 4096])
def test_a_good_store_passes_verification(size: int) -> None:
    thread = thread_on(Store(), size)
    for op in OPS:
        for counted in (False, True):
            result = thread.burst(op, False, 0.002, counted)
            assert result["bad"] == 0 and result["calls"] >= 2, op
    assert thread.wrong == 0, thread.last_error
    count, raw = thread.samples[False].take()
    assert count * 8 == len(raw) > 0


@pytest.mark.parametrize(
    ("lie", "op"),
    [
        ("put forgets", "put"), ("put forgets", "mput"), ("get of another key", "get"), ("get writes nothing", "get"),
        ("get is short", "mget"), ("get is torn", "get"), ("get is torn", "mget"), ("get is torn", "view"),
        ("exists is always true", "exists"), ("exists is always true", "mexists"),
    ],
)  # fmt: skip
def test_a_store_that_lies_is_found_out(lie: str, op: str) -> None:
    store = Store()
    thread = thread_on(store)
    store.fault = lie
    thread.burst(op, False, 0.002, False)
    assert thread.wrong > 0 and thread.last_error


def test_a_miss_is_counted_and_is_no_wrong_value() -> None:
    store = Store()
    thread = thread_on(store)
    store.fault = "get misses"
    result = thread.burst("mget", False, 0.002, True)
    assert result["bad"] == result["keys"] and thread.wrong == 0


@pytest.mark.parametrize("size", [36, 100])
def test_a_stamp_says_whose_it_is(size: int) -> None:
    row = memoryview(bytearray(os.urandom(size)))
    stamp(row, "mine")
    assert fault(row, "mine", size, 0) == ""
    assert fault(row, "mine", size, -1) == ""
    assert fault(row, "mine", size, 1) == "version 0 instead of 1"
    assert fault(row, "yours", size, 0) == "another key's bytes"
    assert fault(row[:-1], "mine", size, 0) == f"{size - 1} bytes instead of {size}"
    row[-1] ^= 1
    assert "torn" in fault(row, "mine", size, 0)


# --- the plan ---------------------------------------------------------------------------------------


def plan_of(*argv: str, env: Mapping[str, str] | None = None) -> command.Plan:
    arguments = command._parser("simm bench").parse_args(list(argv))
    given = {key: value for key, value in vars(arguments).items() if key == "manager"}
    return command.plan_from(arguments, load("bench", given, env or {}))


def test_the_plan_as_asked() -> None:
    plan = plan_of("get", "--op", "mput,get", "--size", "4K,1M,4K", "--batch", "7", "--duration", "250ms", "--no-ring")
    assert plan.ops == ("get", "mput") and plan.sizes == (4096, 1 << 20) and plan.batches["mexists"] == 7
    assert plan.seconds == 0.25 and not plan.ring and plan.single
    assert plan.memory == 1 << 30 and plan.working_set == 256 << 20
    assert plan_of().batches == {"mput": 32, "mget": 32, "mexists": 128} and plan_of().ops == command.OPS
    assert plan_of("--manager", "10.0.0.1:5").memory == 0


@pytest.mark.parametrize("by_file", [False, True])
def test_a_cluster_that_only_the_surroundings_name_is_not_loaded(tmp_path: Path, by_file: bool) -> None:
    """``export SIMM_MANAGER=production; simm bench`` filled production's memory and evicted its values."""
    (tmp_path / "simm.json").write_text('{"manager": "10.0.0.1:5"}')
    env = {"SIMM_CONFIG": str(tmp_path / "simm.json")} if by_file else {"SIMM_MANAGER": "10.0.0.1:5"}
    assert plan_of(env=env).memory == 1 << 30
    assert plan_of("--memory", "64M", "--working-set", "16M", "--size", "4K", env=env).memory == 64 << 20
    assert plan_of("--manager", "10.0.0.1:5", env=env).memory == 0


def test_bench_names_the_cluster_that_it_leaves_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIMM_MANAGER", "10.0.0.1:5")
    argv = ["exists", "--size", "4K", "--duration", "10ms", "--memory", "64M", "--working-set", "1M"]
    assert command.main(argv, "simm bench") in (0, 1)
    said = capsys.readouterr().out
    assert "not measured: 10.0.0.1:5 (environment SIMM_MANAGER); to load that cluster, give --manager" in said
    assert "a cluster of its own" in said


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["fetch"], "'fetch' is not an operation"),
        (["--size", "0"], "a value has 1 to"),
        (["--size", "65M"], "a value has 1 to"),
        (["--size", ","], "names no size"),
        (["--threads", "0"], "--threads 0"),
        (["--processes", "-1"], "--processes -1"),
        (["--batch", "0"], "--batch 0"),
        (["--memory", "1G", "--manager", "h:1"], "omit it or --manager"),
        (["--memory", "64M", "--working-set", "40M"], "raise --memory"),
        (["--memory", "64M", "--size", "16M", "--threads", "4"], "raise --memory or --working-set"),
        (["--duration", "1ms"], "from 10ms to 24h"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_the_remedy(argv: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        plan_of(*argv)


# --- the command ------------------------------------------------------------------------------------


def start(*argv: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SIMM_")}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        [sys.executable, "-m", "simm.tools.bench.command", *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def segments_of(pid: int) -> list[str]:
    """Segments of a cluster that process ``pid`` started."""
    return [name for name in os.listdir("/dev/shm") if f"-local-{pid}-" in name or name.startswith(f"simm-bench-{pid}")]


@pytest.mark.parametrize(
    ("extra", "path"), [(["--threads", "2", "--processes", "2"], "shm"), (["--path", "tcp", "--no-ring"], "tcp")]
)
def test_every_operation_beside_its_floor(extra: list[str], path: str, nothing_is_left: Path) -> None:
    process = start("--size", "1000,64K", "--duration", "20ms", "--working-set", "1M", "--memory", "64M", "--verify",
                    "--json", "-", *extra)  # fmt: skip
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    found = json.loads(out)
    cells = [(result["op"], result["value_bytes"]) for result in found["results"]]
    assert cells == [(op, size) for size in (1000, 65536) for op in command.OPS if size == 1000 or "exists" not in op]
    for result in found["results"]:
        assert result["path"] == path and result["floor"]["name"] == ("memcpy" if path == "shm" else "raw socket")
        assert result["keys_not_served"] == result["wrong_values"] == 0
        assert len(result["ratio_rounds"]) == (0 if "exists" in result["op"] else command.ROUNDS)
        for side in (result, result["floor"]):
            assert 0 < side["p50_us"] <= side["p99_us"] <= side["p99.9_us"] and side["calls"] >= 2 * command.ROUNDS
    assert found["machine"]["cores"] > 0 and len(found["clients"]) == found["plan"]["processes"]
    # The table is for people, and on stderr when stdout is for programs; not a terminal, so no progress line.
    assert "raw socket" in err if path == "tcp" else "memcpy" in err
    assert "\r" not in err
    assert not segments_of(process.pid)


def test_on_a_running_cluster_nothing_of_it_stays(cluster: Any, tmp_path: Path) -> None:
    before = cluster.worker_stats()["entries"]
    report = tmp_path / "report.json"
    process = start(
        "put", "--size", "4K", "--duration", "20ms", "--working-set", "1M", "--manager", cluster.manager,
        "--json", str(report),
    )  # fmt: skip
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert "<= 10 us" in out and json.loads(report.read_text())["results"][0]["op"] == "put"
    assert cluster.worker_stats()["entries"] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(number: signal.Signals, nothing_is_left: Path) -> None:
    process = start("get", "--size", "64K", "--memory", "64M", "--duration", "60s")
    assert process.stdout is not None
    while "ratio" not in process.stdout.readline():
        assert process.poll() is None
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + number and err == ""
    assert not psutil.wait_procs(family, timeout=WAIT_S)[1]
    assert not segments_of(process.pid)


def test_a_load_process_that_dies_is_told(nothing_is_left: Path) -> None:
    process = start("get", "--size", "64K", "--memory", "64M", "--duration", "60s", "--path", "shm")
    assert process.stdout is not None
    while "ratio" not in process.stdout.readline():
        assert process.poll() is None
    load = [child for child in psutil.Process(process.pid).children() if "simm.tools.bench.command" in child.cmdline()]
    assert len(load) == 1
    load[0].kill()
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1 and err.startswith("simm bench: a load process ended unexpectedly")
    assert "Traceback" not in err and not segments_of(process.pid)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--size", "big"], "'big' is no size"),
        (["--json", "/nowhere/x"], "cannot be written"),
        (["--manager", "127.0.0.1:1"], "no manager answers"),
    ],
)
def test_bad_input_is_one_sentence(argv: list[str], text: str, nothing_is_left: Path) -> None:
    process = start(*argv)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode in (1, 2) and text in err and err.count("\n") == 1 and out == ""
