"""``simm bench --model``: rates of a host that is computed, against what is known of such queues."""

from __future__ import annotations

import itertools
import random

import pytest

from simm.config.settings import load
from simm.errors import UsageError
from simm.tools.bench import model
from simm.tools.bench.model import Host, estimate, rate_of_closed
from simm.tools.bench.plan import parser_for, plan_from
from simm.tools.bench.report import Cell, Figures

HOST = Host(64, 8, 2)


def cell_of(op: str, size: int = 4096, batch: int = 1, us: float = 10.0, worker: float | None = None) -> Cell:
    return Cell(op, size, batch, "shm", own=Figures(p50=us * batch, us_per_key=us), caller_us=us, worker_us=worker)


def test_one_customer_never_waits_and_many_never_exceed_the_worker() -> None:
    assert rate_of_closed(1, 1, 8e-6, 2e-6) == pytest.approx(1e5)
    assert rate_of_closed(1, 4, 8e-6, 0.5e-6) == pytest.approx(1e5)
    rates = [rate_of_closed(n, 1, 8e-6, 2e-6) for n in range(1, 200)]
    assert all(later > rate * (1 - 1e-9) for rate, later in itertools.pairwise(rates))
    assert max(rates) < 500_000 * (1 + 1e-9) and rates[-1] == pytest.approx(500_000, rel=1e-3)
    assert all(rate <= n * 1e5 * (1 + 1e-9) for n, rate in enumerate(rates, 1))


def test_the_rate_is_that_of_a_simulated_queue() -> None:
    """The naive twin: customers that think, queue for one server, and start over."""
    draw = random.Random(5)
    customers, think, service = 6, 3.0, 1.0
    arrivals = [draw.expovariate(1 / think) for _ in range(customers)]
    free, served, rounds = 0.0, 0.0, 40_000
    for _ in range(rounds):
        first = min(range(customers), key=arrivals.__getitem__)
        free = max(free, arrivals[first]) + draw.expovariate(1 / service)
        arrivals[first] = free + draw.expovariate(1 / think)
        served = free
    assert rate_of_closed(customers, 1, think, service) == pytest.approx(rounds / served, rel=0.02)


def test_what_limits_a_host() -> None:
    reads = estimate(cell_of("get"), HOST)
    assert reads.all == pytest.approx(8e5) and (reads.busy, reads.limit) == (0.0, "engines")
    puts = estimate(cell_of("put", worker=8.0), HOST)
    assert puts.one == pytest.approx(1e5) and puts.limit == "workers" and 0.8 < puts.busy < 1
    assert puts.all < 2 / 8e-6
    # A worker cannot take longer than the call that waits for it.
    slow, slower = (estimate(cell_of("put", worker=worker), HOST) for worker in (10.0, 80.0))
    assert slow == slower
    wide = estimate(cell_of("get", 1 << 20, us=10.0), HOST)
    assert wide.limit == "bandwidth" and wide.all * (1 << 20) == pytest.approx(200 << 30)
    assert wide.gib_per_s(cell_of("get", 1 << 20)) == pytest.approx(200)
    small = estimate(cell_of("mget", batch=32), Host(2, 8, 1))
    assert small.limit == "cores" and small.all == pytest.approx(2e5)
    assert estimate(cell_of("exists", 1 << 20), HOST).limit == "engines"


def test_batches_are_served_in_the_same_time_a_key() -> None:
    one, many = (estimate(cell_of("mput", batch=batch, worker=6.0), HOST) for batch in (1, 64))
    assert many.all == pytest.approx(one.all) and many.busy == pytest.approx(one.busy)


def test_the_report_names_host_and_assumptions() -> None:
    cells = [cell_of("put", worker=8.0), cell_of("exists")]
    lines = model.report(cells, HOST)
    assert lines[0].startswith("computed for 64 cores, 8 GPUs, 2 NUMA node(s) of 100 GiB/s")
    assert [line[2:] for line in lines if line.startswith("- ")] == list(model.ASSUMPTIONS)
    assert lines[-2].split()[:3] == ["put", "4K", "1"] and lines[-2].endswith("workers")
    found = model.as_json(cells, HOST)
    assert found["host"]["gpus"] == 8 and found["assumptions"] and found["results"][1]["gib_per_s"] is None
    assert found["results"][0]["limited_by"] == "workers"


def test_a_host_as_text() -> None:
    assert Host.parse("cores=64,gpus=8") == Host(64, 8)
    assert Host.parse("gpus=1, cores=2, numa=4, bandwidth=50G") == Host(2, 1, 4, 50 << 30)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("64", "write it as cores=64"), ("cores=64", "name cores and gpus"), ("cores=64,gpus=0", "gpus=0"),
        ("cores=64,gpus=8,gpus=9", "write it as"), ("cores=-1,gpus=8", "cores=-1"), ("cores=1e9,gpus=8", "cores=1e9"),
        ("cores=64,gpus=8,bandwidth=fast", "'fast' is no size"), ("cores=64,gpus=8,bandwidth=0", "bandwidth=0"),
        ("", "write it as"), ("cores=99999999,gpus=1", "from 1 to 65536"),
    ],
)  # fmt: skip
def test_a_host_that_cannot_be_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Host.parse(text)


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--manager", "h:1"], "omit --manager"), (["--processes", "2"], "omit --processes"),
        (["--threads", "2"], "omit --processes and --threads"), (["--mixed"], "omit --mixed"),
        (["--path", "tcp"], "not for --path tcp"),
    ],
)  # fmt: skip
def test_a_model_needs_one_caller_and_a_worker_of_its_own(argv: list[str], why: str) -> None:
    arguments = parser_for("simm bench").parse_args(["--model", "cores=64,gpus=8", *argv])
    given = {key: value for key, value in vars(arguments).items() if key in ("manager", "path")}
    with pytest.raises(UsageError, match=why):
        plan_from(arguments, load("bench", given, {}))
