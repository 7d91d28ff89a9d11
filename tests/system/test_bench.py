"""``simm bench``: its floors on their own; the command against a cluster of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from simm.tools.bench import command, floor
from simm.tools.bench.floor import Area, RawStream, stride_of
from simm.tools.bench.measure import ROUNDS
from simm.tools.bench.plan import OPS
from tests.support.waiting import wait_until

WAIT_S = 300.0


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
    with socket.socket() as taken:  # bound but not listening: nobody else is given the port meanwhile
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(floor.TransportError, match="does not answer"):
            RawStream(taken.getsockname(), "get", 64)


# --- the command ------------------------------------------------------------------------------------


def start(*argv: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SIMM_")}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    environment["SIMM_DEADLINE_MS"] = "30000"  # on a busy machine a call may take more than the 3 s
    return subprocess.Popen(
        [sys.executable, "-m", "simm.tools.bench.command", *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def segments_of(pid: int) -> list[str]:
    """Segments of a cluster that process ``pid`` started."""
    return [name for name in os.listdir("/dev/shm") if f"-local-{pid}-" in name or name.startswith(f"simm-bench-{pid}")]


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
    ("extra", "path"), [(["--threads", "2", "--processes", "2"], "shm"), (["--path", "tcp", "--no-ring"], "tcp")]
)
def test_every_operation_beside_its_floor(extra: list[str], path: str, nothing_is_left: Path) -> None:
    process = start("--size", "1000,64K", "--duration", "20ms", "--working-set", "1M", "--memory", "64M", "--verify",
                    "--json", "-", *extra)  # fmt: skip
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["model"] is None
    cells = [(result["op"], result["value_bytes"]) for result in found["results"]]
    assert cells == [(op, size) for size in (1000, 65536) for op in OPS if size == 1000 or "exists" not in op]
    for result in found["results"]:
        assert result["path"] == path and result["floor"]["name"] == ("memcpy" if path == "shm" else "raw socket")
        assert result["keys_not_served"] == result["wrong_values"] == 0
        assert len(result["ratio_rounds"]) == (0 if "exists" in result["op"] else ROUNDS)
        assert (result["worker_cpu_us_per_key"] is None) == (path == "tcp")
        caller = result["caller_cpu_us_per_key"]
        assert caller is None or caller > 0, "a busy machine hides it"
        assert len(result["processes"]) == (found["plan"]["processes"] if found["plan"]["processes"] > 1 else 0)
        for side in (result, result["floor"]):
            assert 0 < side["p10_us"] <= side["p50_us"] <= side["p99_us"] <= side["p99.9_us"]
            assert side["calls"] >= 2 * ROUNDS
    assert found["machine"]["cores"] > 0 and len(found["clients"]) == found["plan"]["processes"]
    # The table is for people, and on stderr when stdout is for programs; not a terminal, so no progress line.
    assert "raw socket" in err if path == "tcp" else "memcpy" in err
    assert "\r" not in err
    assert not segments_of(process.pid)


@pytest.mark.parametrize("api", ["client", "kv"])
def test_a_full_arena_evicts_at_every_put(api: str, nothing_is_left: Path) -> None:
    process = start(
        "put", "mput", "get", "--state", "full", "--api", api, "--size", "16K,64K", "--batch", "8,16",
        "--duration", "10ms", "--working-set", "2M", "--memory", "16M", "--verify", "--json", "-",
        "--model", "cores=64,gpus=8",
    )  # fmt: skip
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert "every put is of a new key" in err and ("through simm.kv" in err) == (api == "kv")
    found = json.loads(out)
    results = found["results"]
    assert "computed for 64 cores, 8 GPUs" in err and len(found["model"]["results"]) == len(results)
    assert all(each["keys_per_s"] > 0 for each in found["model"]["results"])
    calls = [("put", 1), ("mput", 8), ("mput", 16), ("get", 1)]
    assert [(each["op"], each["keys_per_call"]) for each in results] == calls * 2
    for each in results:
        assert each["wrong_values"] == 0 and each["worker_cpu_us_per_key"] >= 0
        assert each["keys_not_served"] == 0 or "put" not in each["op"]
    assert all(each["worker_cpu_us_per_key"] > 0 for each in results if "put" in each["op"])
    assert not segments_of(process.pid)


@pytest.mark.parametrize("extra", [("--api", "kv", "--state", "full", "--processes", "2"), ("--path", "tcp")])
def test_a_mix_beside_the_same_copies(extra: tuple[str, ...], nothing_is_left: Path) -> None:
    process = start("--mixed", "--size", "4K", "--batch", "16", "--duration", "20ms", "--working-set", "1M",
                    "--memory", "16M", "--verify", "--ratios", "get=2", "--json", "-", *extra)  # fmt: skip
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["plan"]["mix"] == {"weights": {"put": 1.0, "get": 2.0, "ask": 1.0}, "hits": 0.75}
    assert [each["op"] for each in found["results"]] == ["put", "get", "exists", "mput", "mget", "mexists"]
    for each in found["results"]:
        assert each["floor"]["name"] == "memcpy" and each["wrong_values"] == 0 and each["worker_cpu_us_per_key"] is None
        assert (each["keys_absent"] > 0) == ("put" not in each["op"])
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
    assert f"{cluster.manager} is a cluster in use: up to 1M will be put" in out
    assert "<= 10 us" in out and json.loads(report.read_text())["results"][0]["op"] == "put"
    assert cluster.worker_stats()["entries"] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_on_a_running_cluster(cluster: Any, number: signal.Signals) -> None:
    """It came in the middle of a burst, and the values stayed."""
    before = cluster.worker_stats()["entries"]
    process = start("put", "--size", "4K", "--duration", "60s", "--working-set", "16M", "--processes", "2",
                    "--manager", cluster.manager)  # fmt: skip
    wait_until(lambda: process.poll() is not None or cluster.worker_stats()["entries"] >= before + 4096, "all is there")
    process.send_signal(number)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 128 + number and err == ""
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
