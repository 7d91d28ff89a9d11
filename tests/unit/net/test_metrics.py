"""Metrics as text: what Prometheus' own parsers read of it, and the names."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from simm import __version__
from simm.control import pages as manager
from simm.host import processes
from simm.index import figures as index
from simm.index.publish import figures as publisher
from simm.net import metrics
from simm.net.metrics import OF_PROCESSES, Metric, Samples, wants_openmetrics
from simm.server.operators import pages as server
from tests.support.metric_rules import LABELS, faults

ROOT = Path(metrics.__file__).parents[2]
EVIL = 'x"\\\n} 1\n# EOF'
COUNTER = Metric("simm_a_total", "counter", 'As "said" \\ here.', ("server", "worker"))
GAUGE = Metric("simm_b_bytes", "gauge", "Of it.")
UNUSED = Metric("simm_c", "gauge", "Without a sample.", ("server",))
INFO = Metric("simm_d_info", "info", "What there is.", ("version",))


def page() -> Samples:
    samples = Samples((COUNTER, GAUGE, UNUSED, INFO))
    samples.add(INFO, 1, "1.0")
    samples.add(COUNTER, 7, EVIL, 0)
    samples.add(GAUGE, 2.5)
    samples.add(COUNTER, 1 << 62, "b", 1)
    return samples


def flat(families: Any) -> dict[str, tuple[str, str, dict[tuple[str, ...], float]]]:
    """Return family -> type, HELP, and label values -> value."""
    return {
        family.name: (
            family.type, family.documentation,
            {tuple(sample.labels.values()): sample.value for sample in family.samples},
        )
        for family in families
    }  # fmt: skip


def test_prometheus_reads_the_text() -> None:
    found = flat(read_text(page().text()))
    assert found == {
        "simm_a": ("counter", COUNTER.about, {(EVIL, "0"): 7.0, ("b", "1"): float(1 << 62)}),
        "simm_b_bytes": ("gauge", "Of it.", {(): 2.5}),
        "simm_c": ("gauge", "Without a sample.", {}),
        "simm_d_info": ("gauge", "What there is.", {("1.0",): 1.0}),
    }
    assert page().text().splitlines()[:3] == [
        '# HELP simm_a_total As "said" \\\\ here.', "# TYPE simm_a_total counter",
        'simm_a_total{server="x\\"\\\\\\n} 1\\n# EOF",worker="0"} 7',
    ]  # fmt: skip


def test_openmetrics_is_read_by_its_strict_parser() -> None:
    text = page().text(openmetrics=True)
    assert text.endswith("# EOF\n")
    assert flat(read_openmetrics(text)) == {
        "simm_a": ("counter", COUNTER.about, {(EVIL, "0"): 7.0, ("b", "1"): float(1 << 62)}),
        "simm_b_bytes": ("gauge", "Of it.", {(): 2.5}),
        "simm_c": ("gauge", "Without a sample.", {}),
        "simm_d": ("info", "What there is.", {("1.0",): 1.0}),
    }
    with pytest.raises(ValueError):
        list(read_openmetrics(page().text()))  # control: it is strict


def test_numbers() -> None:
    samples = Samples([UNUSED])
    for number, value in enumerate((math.nan, math.inf, -math.inf, True, 0.1, 1e300)):
        samples.add(UNUSED, value, number)
    found = [sample.value for family in read_text(samples.text()) for sample in family.samples]
    assert math.isnan(found[0]) and found[1:] == [math.inf, -math.inf, 1.0, 0.1, 1e300]


def test_a_sample_has_the_labels_of_its_metric() -> None:
    samples = Samples([COUNTER])
    with pytest.raises(ValueError, match="has the labels"):
        samples.add(COUNTER, 1, "one too few")
    with pytest.raises(KeyError):
        samples.add(GAUGE, 1)


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("", False), ("*/*", False), ("text/plain", False), ("application/openmetrics-text", True),
        # What Prometheus sends, of old and of late.
        ("application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
         "text/plain;version=0.0.4;q=0.5,*/*;q=0.1", True),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
         "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
         "text/plain;version=0.0.4;q=0.3,*/*;q=0.2", True),
        ("text/plain, application/openmetrics-text;q=0.9", False), ("application/openmetrics-text;q=x", False),
        (";;,;q=", False),
    ],
)  # fmt: skip
def test_who_wants_openmetrics(accept: str, wanted: bool) -> None:
    assert wants_openmetrics(accept) is wanted


# -- the process -------------------------------------------------------------------------------------


def test_the_process_is_reported_as_prometheus_expects() -> None:
    samples = Samples(OF_PROCESSES)
    samples.add_process(certificate_ends=1.5e9)
    found = flat(read_text(samples.text()))
    own = psutil.Process()
    value = {name: next(iter(values.values())) for name, (_, _, values) in found.items()}
    # psutil takes the boot's second, without its fraction.
    assert abs(value["process_start_time_seconds"] - own.create_time()) < 2
    assert value["process_resident_memory_bytes"] > 1 << 20
    assert value["process_virtual_memory_bytes"] >= value["process_resident_memory_bytes"]
    assert 0 < value["process_open_fds"] <= value["process_max_fds"]
    assert found["process_cpu_seconds"][0] == "counter"
    assert 0 < value["process_cpu_seconds"] <= sum(own.cpu_times()[:2])
    assert value["process_threads"] >= 1 and value["simm_tls_certificate_expiry_timestamp_seconds"] == 1_500_000_000
    ((labels, one),) = found["simm_build_info"][2].items()
    assert labels[0] == __version__ and one == 1


def test_what_the_system_does_not_tell_costs_that_value_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(metrics.os, "listdir", denied)
    samples = Samples(OF_PROCESSES)
    samples.add_process()
    found = {line.split(" ")[0] for line in samples.text().splitlines() if line.startswith("process_")}
    assert found == {each.name for each in metrics._PROCESS} - {"process_open_fds"}


def test_the_start_stays_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    began = processes.start_time()
    monkeypatch.setattr(processes.time, "time", lambda: 0.0)
    assert processes.start_time() == began


#: A /proc as in a unit with ProcSubset=pid: it has processes, and nothing of the system. The manager's is one.
SUBSET = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, kind, flags, data):
    if libc.mount(source, b"/proc", kind, flags, data):
        raise OSError(ctypes.get_errno(), "mount")
try:
    if libc.unshare(0x20000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    if libc.mount(None, b"/", None, 1 << 18 | 16384, None):  # MS_PRIVATE | MS_REC
        raise OSError(ctypes.get_errno(), "mount")
    mount(b"proc", b"proc", 0, b"subset=pid")
except OSError as exc:
    print("skip", exc)
    sys.exit(0)
assert not os.path.exists("/proc/stat") and not os.path.exists("/proc/meminfo")
from simm.net.metrics import _process_values
for metric, value in _process_values().items():
    print(metric.name, value)
"""


def test_issue_a_unit_without_the_systems_files_has_all_values() -> None:
    """The manager's unit had none of them: psutil looks for the boot's time in /proc/stat."""
    done = subprocess.run(
        [sys.executable, "-c", SUBSET, ROOT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("skip"):
        pytest.skip(f"needs root and Linux 5.8: {done.stdout}")
    found = dict(line.split() for line in done.stdout.splitlines())
    assert found.keys() == {each.name for each in metrics._PROCESS}
    assert float(found["process_start_time_seconds"]) > processes.start_time() - 60, "it is this process's child"


# -- names -------------------------------------------------------------------------------------------

ALL = [*manager.METRICS, *server.METRICS, *index.METRICS, *publisher.METRICS]


def test_all_metrics_keep_the_rules() -> None:
    assert [fault for metric in ALL for fault in faults(*metric)] == []


def test_no_two_metrics_share_a_name() -> None:
    """Also not those of the two kinds of server: one Prometheus scrapes both."""
    different = set(ALL)  # both have those of processes
    assert len({metric.name for metric in different}) == len(different)
    assert {label for metric in ALL for label in metric.labels} == set(LABELS), "no label is explained in vain"


@pytest.mark.parametrize(
    ("name", "kind", "about", "labels", "word"),
    [
        ("simm_puts", "counter", "Puts.", (), "_total"), ("simm_puts_total", "gauge", "Puts.", (), "_total"),
        ("simmPuts_total", "counter", "Puts.", (), "snake_case"), ("puts_total", "counter", "Puts.", (), "prefix"),
        ("simm_op_milliseconds", "gauge", "Time.", (), "use seconds"),
        ("simm_op_ms", "gauge", "Time.", (), "abbreviation"),
        ("simm_used_gigabytes", "gauge", "Room.", (), "use bytes"),
        ("simm_fill_percent", "gauge", "Room.", (), "ratio"),
        ("simm_rate_bytes_of", "gauge", "Room.", (), "at its end"), ("simm_a_count", "gauge", "Room.", (), "histogram"),
        ("simm_gauge_a", "gauge", "Room.", (), "type"), ("simm_a", "gauge", "", (), "HELP"),
        ("simm_a", "gauge", "of it", (), "sentence"), ("simm_a", "gauge", "Of it.", ("node",), "meaning"),
        ("simm_a", "gauge", "Of it.", ("Server",), "label"), ("simm_a", "gauge", "Of it.", ("le",), "label le"),
        ("simm_by_server", "gauge", "Of it.", ("server",), "in its name"),
        ("simm_build_info", "gauge", "B.", (), "_info"),
    ],
)  # fmt: skip
def test_mutation_names_that_break_a_rule(name: str, kind: Any, about: str, labels: tuple[str, ...], word: str) -> None:
    assert any(word in fault for fault in faults(name, kind, about, labels))
