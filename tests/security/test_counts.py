"""What clients name and count does nothing to a server's page, to its other counts, or to who reads them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from simm.arena.layout import NAMESPACES, SESSION_LINES_MAX
from simm.client import Client
from simm.constants import COUNT_WORDS, FRAME_BYTES_MAX, NAMESPACE_BYTES_MAX, OTHERS_NAMESPACE
from simm.errors import UsageError
from simm.ipc.counts import BUCKETS, COUNTERS, TIMED
from simm.ipc.tally import CLAIMS_MAX, NAMESPACES_MAX, Tally, claims
from simm.server.operators.pages import METRICS
from tests.support.http_page import page
from tests.support.processes import Cluster, new_folder
from tests.support.waiting import WAIT_S, wait_until

#: Another sample, another line, colours, no characters, a direction, a separator of lines, quotes.
EVIL = (
    'a"} 1\nsimm_faked_total{server="', "a\r\nsimm_faked_total 7\n", "\x1b[31mred\x07", "\0\x7f", "‮kcab", "\u2028",
    '\\"\\', "# HELP simm_faked_total x", "x" * NAMESPACE_BYTES_MAX, "\N{PILE OF POO}" * 16,
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster(nothing_is_left: Path) -> Iterator[Cluster]:
    with Cluster(new_folder(), memory="16M", server_arguments=("--http", "127.0.0.1:0")) as running:
        yield running


@pytest.mark.quick
def test_issue_names_of_namespaces_do_nothing_to_a_page(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match="stands for several"):
        Client(cluster.manager, namespace=OTHERS_NAMESPACE)
    for name in EVIL:
        for path in ("shm", "tcp"):
            with Client(cluster.manager, namespace=name, path=path, deadline_s=WAIT_S) as client:
                assert client.put("k", b"v") and client.get("k") == b"v"

    def text() -> str:
        status, found = page(cluster.processes["dataserver"].http, "/metrics")
        assert status == 200
        return found

    def hits() -> float:
        return sum(
            sample.value for family in text_string_to_metric_families(text()) for sample in family.samples
            if sample.name == "simm_hits_total"
        )  # fmt: skip

    wait_until(lambda: hits() == 2 * len(EVIL), "all of them are counted, under some name")
    assert all(line.isprintable() for line in text().split("\n")), "a terminal may show it"
    families = list(text_string_to_metric_families(text()))
    declared = {metric.name.removesuffix("_total") for metric in METRICS}
    assert {family.name for family in families} <= declared
    series = Counter((each.name, *sorted(each.labels.items())) for family in families for each in family.samples)
    assert max(series.values()) == 1, "a scraper refuses a series that is there twice"
    named = {sample.labels.get("namespace") for family in families for sample in family.samples}
    assert {'\\"\\', "x" * NAMESPACE_BYTES_MAX, OTHERS_NAMESPACE} <= named


def test_issue_what_is_told_of_clients_fits_a_frame_whatever_they_name_and_count() -> None:
    """An answer that does not would end the connection of who asks: ``simm ctl``, or the supervisor."""
    tally = Tally(lambda: 100.0, list)
    for number in range(NAMESPACES_MAX):
        name = f"{number:04}{'é' * 30}"  # no name that has counters of its own takes more bytes of JSON
        tally.totals.counters(name)[:] = [10**20] * COUNTERS
    tally.totals.latencies.update((operation, [10**20] * (BUCKETS + 1)) for operation in TIMED)
    assert len(tally.totals.namespaces) == NAMESPACES_MAX and len(name.encode()) == NAMESPACE_BYTES_MAX
    sessions: list[Any] = []
    for number in range(SESSION_LINES_MAX):
        words = memoryview(bytearray(COUNT_WORDS * 8)).cast("Q")
        tally.open(1 << 62 | number, "\1" * NAMESPACE_BYTES_MAX, words)
        tally.sessions[1 << 62 | number].seen[:] = (1 << 64) - 1
        sessions.append(SimpleNamespace(
            session=1 << 62 | number, pid=1 << 22, namespace=0, relays=False, copies=0, closed=False,
            grants=range(4096), granted_bytes=1 << 40, pins=range(4096),
        ))  # fmt: skip
    settings: Any = SimpleNamespace(segment="simm-" + "x" * 250, poll_us=50)
    told = claims(sessions, {0: "\1" * NAMESPACE_BYTES_MAX}, tally, settings) | {"counted": tally.stats()}
    assert len(told["clients"]) == CLAIMS_MAX and told["clients_left_out"] == SESSION_LINES_MAX - CLAIMS_MAX
    # What else a worker tells: some 40 numbers, and the quotas of all namespaces that an arena can have.
    assert len(json.dumps(told)) < FRAME_BYTES_MAX - NAMESPACES * 512 - 8192
