"""The manager's view of what clients do: rates from reports, against a plain computation; what it refuses."""

from __future__ import annotations

import random

import pytest

from simm.cluster.nodes import Node, NodeState
from simm.constants import OTHERS_NAMESPACE
from simm.control import activity
from simm.control.activity import Activity, fault
from simm.ipc.counts import bound_s
from simm.wire.report_messages import (
    CLIENTS_MAX,
    COUNTS,
    NAMESPACES_MAX,
    ClientActivity,
    NamespaceActivity,
    Report,
    WorkerActivity,
)
from tests.support.reports import BUCKETS_OF_ALL, report


def test_rates_are_the_differences_of_reports_over_their_time() -> None:
    """Servers that report at times of their own, restart and fall silent, beside a plain computation."""
    for seed in range(20):
        rng, made, now = random.Random(seed), Activity(), 100.0
        last: dict[str, tuple[float, int, list[int]]] = {}
        rates: dict[str, list[float]] = {}
        for _ in range(40):
            now += rng.random()
            name = rng.choice("abc")
            at, instance, counts = last.get(name, (0.0, 1, [0] * len(COUNTS)))
            if rng.random() < 0.1:
                instance, counts = instance + 1, [0] * len(COUNTS)
            new = [count + rng.randrange(1000) for count in counts]
            known = name in last and last[name][1] == instance
            rates[name] = [(one - two) / (now - at) for one, two in zip(new, counts)] if known else [0.0] * len(COUNTS)
            last[name] = now, instance, new
            assert made.take(report(name, new, instance=instance), now) == ""
            fresh = [each for each in last if now - last[each][0] <= 3 * activity.REPORT_S]
            wanted = [sum(rates[each][place] for each in fresh) for place in range(len(COUNTS))]
            found = made.rates(now)
            assert [found[f"{each}_per_s"] for each in COUNTS] == pytest.approx(wanted, abs=0.01)
            assert found["gets_per_s"] == pytest.approx(wanted[0] + wanted[1], abs=0.01)
            assert made.since_start()["hits"] == sum(each[2][0] for each in last.values())
            (row, *_), left = made.namespaces({"e": 9}, now)
            assert row["name"] == "n" and row["hits"] == made.since_start()["hits"] and left == 0
            assert row["rates"]["puts_per_s"] == pytest.approx(wanted[2], abs=0.01)


def test_a_server_that_says_nothing_any_more_counts_for_nothing() -> None:
    made = Activity()
    made.take(report(counts=[10] * 7), 0.0)
    made.take(report(counts=[30] * 7), 2.0)
    assert made.rates(3.0)["gets_per_s"] == 20.0 and made.server("a", 3.0)["clients"] == 3
    late = 2.1 + activity.STALE_REPORTS * activity.REPORT_S
    assert made.rates(late)["gets_per_s"] == 0 and made.rates(late)["hit_ratio"] is None
    row = made.server("a", late)
    assert row["rates"] is None and row["clients"] is None and row["report_age_s"] == pytest.approx(late - 2.0, abs=0.1)
    assert made.clients(late) == ([], 0) and made.since_start()["hits"] == 30
    assert made.server("never", late) == {"report_age_s": None, "clients": None, "rates": None}
    made.look({}, late)
    assert made.since_start()["hits"] == 0, "a server that the cluster has forgotten is forgotten here"


def test_servers_that_have_gone_are_forgotten() -> None:
    """A report has thousands of numbers, and a cluster knows thousands of names."""
    made = Activity()
    nodes = {name: Node(name, 1, [], NodeState.RUNNING, 0.0) for name in ("lives", "away", "gone")}
    for name in (*nodes, "left"):
        made.take(report(name), 0.0)
    nodes["away"].state = nodes["gone"].state = NodeState.DEAD
    nodes["gone"].released = True
    made.drop("left")
    made.drop("unknown")
    assert set(made._servers) == {"lives", "away", "gone"}
    made.look(nodes, 1.0)
    assert set(made._servers) == {"lives", "away"}, "others have the shards of the one that is gone"


def test_a_large_cluster_reports_less_often() -> None:
    """Also before the first report, and what is reported so counts until the next one."""
    made = Activity()
    nodes = {str(number): Node(str(number), 1, [], NodeState.RUNNING, 0.0) for number in range(1500)}
    made.look(nodes, 0.0)
    made.take(report("0"), 0.0)
    assert made.server("0", 20.0)["clients"] == 3
    nodes = {name: node for name, node in nodes.items() if int(name) < 100}
    made.look(nodes, 20.0)
    assert made.server("0", 20.0)["clients"] is None


def test_counters_that_shrink_are_no_rate() -> None:
    made = Activity()
    made.take(report(counts=[1000] * 7), 0.0)
    made.take(report(counts=[1] * 7), 1.0)
    assert made.rates(1.0)["gets_per_s"] == 0 and made.namespaces({}, 1.0)[0][0]["rates"]["gets_per_s"] == 0


def test_latencies_are_those_since_the_last_report() -> None:
    made, old, new = Activity(), [0] * BUCKETS_OF_ALL, [0] * BUCKETS_OF_ALL
    old[5] = 10**6
    new[5], new[2], new[3] = 10**6, 98, 2
    made.take(report(latencies=old), 0.0)
    made.take(report(latencies=new), 1.0)
    found = made.latency(1.0)
    assert found["get"] == {"timed": 100, "p50_s": bound_s(2), "p99_s": bound_s(3)}
    assert found["put_many"] == {"timed": 0, "p50_s": None, "p99_s": None}


def test_the_history_is_bounded_and_has_every_row() -> None:
    made = Activity()
    for number in range(activity.HISTORY + 10):
        made.look({}, float(number))
    history = made.history()
    assert set(history) == {"step_s", *activity.ROWS}
    assert all(len(history[row]) == activity.HISTORY for row in activity.ROWS)
    made.forget()
    assert made.history()["gets_per_s"] == []


def test_lists_are_bounded() -> None:
    made = Activity()
    for server in range(5):
        names = [NamespaceActivity(f"n{server}-{number}", [number] * 7, 0, 0) for number in range(NAMESPACES_MAX)]
        clients = [ClientActivity(0, number, "p", "n", number, [0] * 7) for number in range(CLIENTS_MAX)]
        made.take(report(f"s{server}", namespaces=names, namespaces_left=7, clients=clients), 0.0)
    rows, left = made.namespaces({}, 0.0)
    assert len(rows) == activity.NAMESPACES_SHOWN and left == 5 * (NAMESPACES_MAX + 7) - activity.NAMESPACES_SHOWN
    assert rows[0]["puts"] == NAMESPACES_MAX - 1, "those with most first"
    shown, others = made.clients(0.0)
    assert len(shown) == activity.CLIENTS_SHOWN and others == 0 and shown[0]["idle_s"] == 0


@pytest.mark.parametrize(
    "bad",
    [
        report(workers=[WorkerActivity(number, 0, 0, [0] * 7, [0] * BUCKETS_OF_ALL) for number in range(65)]),
        report(namespaces=[NamespaceActivity(str(number), [0] * 7, 0, 0) for number in range(NAMESPACES_MAX + 1)]),
        report(clients=[ClientActivity(0, 1, "", "", 0, [0] * 7)] * (CLIENTS_MAX + 1)),
        report(workers=[WorkerActivity(0, 0, 0, [0] * 6, [0] * BUCKETS_OF_ALL)]),
        report(workers=[WorkerActivity(0, 0, 0, [0] * 7, [0] * 95)]),
        report(namespaces=[NamespaceActivity("n", [0] * 8, 0, 0)]),
        report(clients=[ClientActivity(0, 1, "", "", 0, [])]),
        report(namespaces=[NamespaceActivity("ä" * 33, [0] * 7, 0, 0)]),
        report(clients=[ClientActivity(0, 1, "", "n" * 65, 0, [0] * 7)]),
        report(clients=[ClientActivity(0, 1, "p" * 65, "", 0, [0] * 7)]),
    ],
)  # fmt: skip
def test_a_report_that_cannot_be_is_refused_whole(bad: Report) -> None:
    made = Activity()
    assert fault(bad).startswith("a report") and made.take(bad, 1.0) == fault(bad)
    assert made.server("a", 1.0)["report_age_s"] is None
    assert not fault(report(namespaces=[NamespaceActivity(OTHERS_NAMESPACE, [0] * 7, 0, 0)]))


def test_what_a_client_names_is_shown_as_text() -> None:
    made = Activity()
    evil = "\x1b[31m\u202e<b>"
    clients = [ClientActivity(0, 1, evil, evil, 0, [0] * 7)]
    made.take(report(namespaces=[NamespaceActivity(evil, [1] * 7, 0, 0)], clients=clients), 0.0)
    ((row,), _), ((client,), _) = made.namespaces({}, 0.0), made.clients(0.0)
    assert row["name"].isprintable() and client["program"].isprintable() and client["namespace"].isprintable()
