"""deploy/monitoring: rules and panels name what there is, and each alert fires when it should, and only then."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from simm.control import pages as manager
from simm.index import figures as index
from simm.index.publish import figures as publisher
from simm.server.operators import pages as server
from tests.support.child import ROOT
from tests.support.monitoring import (
    ADDED_LABELS,
    ADDED_METRICS,
    FOLDER,
    MISSING,
    PROMTOOL,
    alerts,
    dashboard,
    expressions,
    filled_in,
    labels_in,
    metrics_in,
    panels,
)

METRICS = {metric.name: metric for metric in (*manager.METRICS, *server.METRICS, *index.METRICS, *publisher.METRICS)}
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


@pytest.mark.parametrize(("name", "expression"), list(expressions()))
def test_an_expression_names_metrics_and_labels_that_there_are(name: str, expression: str) -> None:
    metrics = metrics_in(expression)
    assert metrics and metrics <= set(METRICS) | ADDED_METRICS, metrics - set(METRICS)
    all_labels = {label for each in metrics & set(METRICS) for label in METRICS[each].labels}
    for metric, labels in labels_in(expression):
        assert labels <= ADDED_LABELS | (set(METRICS[metric].labels) if metric in METRICS else all_labels), metric
    for metric in metrics & set(METRICS):
        if METRICS[metric].kind == "counter":
            assert re.search(rf"(rate|increase)\({metric}\b", expression), f"{metric} is a counter"


@pytest.mark.parametrize("page", ["README.md", "docs/operations.md"])
def test_issue_servers_under_systemd_are_where_prometheus_looks(page: str) -> None:
    """The manager had Prometheus' own port, and the data server none: two alerts fired for ever."""
    section = re.split(r"^### (?:As services|Under systemd)$", (ROOT / page).read_text(), flags=re.MULTILINE)[1]
    said = re.findall(r"SIMM_HTTP=(\S+) >>? /etc/simm/(manager|dataserver)", section.partition("\n##")[0])
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    looked_at = {each["job_name"]: each["static_configs"][0]["targets"] for each in config["scrape_configs"]}
    assert sorted(name for _, name in said) == ["dataserver", "manager"]
    for at, name in said:
        assert at in looked_at[f"simm-{name}"]


def test_mutation_what_is_found_in_an_expression() -> None:
    text = 'sum by (server, worker) (rate(simm_a_total{cause=~"b|c", x!="y"}[5m])) > on (z) bool 1e3 and up == 0'
    assert metrics_in(text) == {"simm_a_total", "up"}
    assert list(labels_in(text)) == [("simm_a_total", {"cause", "x"}), ("", {"server", "worker"}), ("", {"z"})]
    assert filled_in('a{server=~"$server"}[$__rate_interval]') == 'a{server=~".*"}[1m]'


# -- alerts ------------------------------------------------------------------------------------------


def test_each_alert_is_explained_to_operators() -> None:
    """A row of the table of alerts for each, with what it means and what to do; and no row for another one."""
    table = OPERATIONS.partition("### Alerts")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `Simm")]
    assert {row[0].strip(" `") for row in rows} == set(alerts())
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in rows)


@pytest.mark.parametrize("name", ["SimmNoManager", "SimmNoLeader", "SimmNotJoined"])
def test_alerts_on_managers_say_what_is_lost_meanwhile(name: str) -> None:
    """Values of namespaces with epochs are misses on servers that reach no manager for longer than their lease."""
    (row,) = [line for line in OPERATIONS.splitlines() if line.startswith(f"| `{name}` |")]
    for text in (row, alerts()[name]["annotations"]["description"]):
        assert "epoch" in text and "--epoch-lease-ms" in text and "misses" in text


def test_alerts_say_what_they_are() -> None:
    for name, rule in alerts().items():
        assert re.fullmatch(r"Simm([A-Z][a-z]+)+", name)
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["annotations"]["description"].endswith(".")


_GETS = 'simm_operations_total{server="a",worker="0",namespace="n",path="shm",op="get"}'
_FOUND = 'simm_hits_total{server="a",worker="0",namespace="n",path="shm"}'
_EVICTED = 'simm_misses_total{server="a",worker="0",namespace="n",path="shm",reason="evicted"}'
_LATE = 'simm_misses_total{server="a",worker="0",namespace="n",path="tcp",reason="timeout"}'
#: A cluster without any fault: a manager that leads, one that stands by and knows nothing, a full data server at work.
WELL = {
    'up{job="simm-manager",instance="m"}': "1x600",
    'up{job="simm-dataserver",instance="d"}': "1x600",
    'simm_manager_leading{instance="m"}': "1x600",
    'simm_manager_leading{instance="standby"}': "0x600",
    'simm_manager_nodes{instance="m",state="running"}': "1x600",
    'simm_manager_nodes{instance="m",state="suspect"}': "0x600",
    'simm_manager_nodes{instance="m",state="dead"}': "0x600",
    'simm_manager_nodes{instance="standby",state="dead"}': "1x600",
    'simm_manager_shards_without_owner{instance="m"}': "0x600",
    'simm_manager_shards_without_owner{instance="standby"}': "16384x600",
    'simm_manager_state_write_failures_total{instance="m"}': "3x600",
    'simm_manager_handler_errors_total{instance="m"}': "1x600",
    'simm_manager_unauthorized_total{instance="m"}': "0+1x600",
    'simm_unauthorized_total{instance="d",server="a",worker="0"}': "0+1x600",
    'simm_manager_insecure{instance="m"}': "0x600",
    'simm_build_info{instance="m",version="1"}': "1x600",
    'simm_build_info{instance="d",version="1"}': "1x600",
    'simm_fenced{server="a"}': "0x600",
    'simm_joined{server="a"}': "1x600",
    'simm_worker_silent_seconds{server="a",worker="0"}': "0.3x600",
    'simm_streams_cut_off{server="a",worker="0"}': "0x600",
    'simm_process_restarts_total{server="a",worker="0",process="worker"}': "0x100 1x500",
    'simm_arena_mended_total{server="a",worker="0"}': "0x600",
    'simm_worker_corruptions_total{server="a",worker="0"}': "0x600",
    'simm_handler_errors_total{server="a",worker="0"}': "0x600",
    'simm_sessions_quarantined{server="a",worker="0"}': "0x100 1x10 0x490",
    'simm_moves_left{server="a",worker="0"}': "0x100 500-1x499",
    'simm_moved_values_total{server="a",worker="0"}': "0x100 0+100x499",
    'simm_move_lost_values_total{server="a",worker="0"}': "2x600",
    'simm_put_failures_total{server="a",worker="0",cause="no_room"}': "0+10x600",
    'simm_put_failures_total{server="a",worker="0",cause="over_quota"}': "5x600",
    'simm_evictions_total{server="a",worker="0",reason="own"}': "0+6000x600",
    'simm_evictions_total{server="a",worker="0",reason="set_full"}': "0+100x600",
    'simm_pins{server="a",worker="0"}': "500x600",
    'simm_kept_bytes{server="a",worker="0",namespace="n",class="hard"}': "20x600",
    'simm_kept_bytes{server="a",worker="0",namespace="n",class="soft"}': "90x600",
    'simm_keep_max_bytes{server="a",worker="0"}': "50x600",
    'simm_keep_fenced_bytes{server="a",worker="0"}': "40x600",
    'simm_keep_namespace_max_bytes{server="a",worker="0"}': "25x600",
    'simm_kept_slots{server="a",worker="0",namespace="n",class="hard"}': "20x600",
    'simm_keep_max_slots{server="a",worker="0"}': "50x600",
    'simm_keep_namespace_max_slots{server="a",worker="0"}': "25x600",
    _GETS: "0+6000x600",
    _FOUND: "0+3000x600",
    _EVICTED: "0+300x600",
    _LATE: "0x50 90x550",
    'simm_sessions_disbelieved_total{server="a",worker="0"}': "0x600",
    'simm_publisher_gaps_total{instance="e"}': "0x100 2x500",
    'simm_index_stale{instance="i",endpoint="vllm-0",tenant="default",rank="0"}': "0x100 1x3 0x497",
    'process_open_fds{job="simm-manager",instance="m"}': "700x600",
    'process_max_fds{job="simm-manager",instance="m"}': "1000x600",
    'simm_process_open_fds{instance="d",server="a",worker="0",process="worker"}': "700x600",
    'simm_process_max_fds{instance="d",server="a",worker="0",process="worker"}': "1000x600",
    'simm_process_open_fds{instance="d",server="a",worker="0",process="stream"}': "700x600",
    'simm_process_max_fds{instance="d",server="a",worker="0",process="stream"}': "1000x600",
    'simm_tls_certificate_expiry_timestamp_seconds{instance="d"}': "9000000x600",
    'simm_rdma_ready{server="a",worker="0",reason="this host has no RDMA device"}': "0x600",
    'simm_rdma_ready{server="b",worker="0",reason=""}': "_x100 1x500",
    'simm_rdma_ready{server="b",worker="0",reason="registering"}': "0x99 stale",
    'simm_rdma_connections_broken_total{server="b",worker="0"}': "0x100 1x500",
}  # fmt: skip
_RESTARTS = 'simm_process_restarts_total{server="a",worker="0",process="worker"}'
_MOVED = 'simm_moved_values_total{server="a",worker="0"}'
#: Alert -> what is different while it fires, from the 100th minute on; None: the series is not there.
FAULTS: dict[str, list[dict[str, str | None]]] = {
    "SimmNoManager": [{'up{job="simm-manager",instance="m"}': "1x99 0x500"},
                      {'up{job="simm-manager",instance="m"}': None}],
    "SimmNoLeader": [{'simm_manager_leading{instance="m"}': "1x99 0x500"}],
    "SimmDataServerDown": [{'up{job="simm-dataserver",instance="d"}': "1x99 0x500"}],
    "SimmNodeLost": [{'simm_manager_nodes{instance="m",state="dead"}': "0x99 1x500"},
                     {'simm_manager_nodes{instance="m",state="suspect"}': "0x99 2x500"}],
    "SimmShardsWithoutOwner": [{'simm_manager_shards_without_owner{instance="m"}': "0x99 7x500"}],
    "SimmStateNotStored": [{'simm_manager_state_write_failures_total{instance="m"}': "0x99 0+1x500"}],
    "SimmMovesStuck": [{'simm_moves_left{server="a",worker="0"}': "0x99 9x500", _MOVED: "7x600"}],
    "SimmValuesLostInMoves": [{'simm_move_lost_values_total{server="a",worker="0"}': "0x115 9x485"}],
    "SimmVersionsMixed": [{'simm_build_info{instance="d",version="1"}': None,
                           'simm_build_info{instance="d",version="2"}': "1x600"}],
    "SimmFenced": [{'simm_fenced{server="a"}': "0x99 1x500"}],
    "SimmNotJoined": [{'simm_joined{server="a"}': "1x99 0x500"}],
    "SimmWorkerSilent": [{'simm_worker_silent_seconds{server="a",worker="0"}': "0x99 20+60x500"}],
    "SimmStreamCutOff": [{'simm_streams_cut_off{server="a",worker="0"}': "0x99 1x500"}],
    "SimmProcessRestarts": [{_RESTARTS: "0x99 0+1x500"}],
    "SimmArenaOverwritten": [{'simm_arena_mended_total{server="a",worker="0"}': "0x115 3x485"},
                             {'simm_worker_corruptions_total{server="a",worker="0"}': "0x115 1x485"}],
    "SimmErrors": [{'simm_handler_errors_total{server="a",worker="0"}': "0x115 1x485"},
                   {'simm_manager_handler_errors_total{instance="m"}': "0x115 1x485"}],
    "SimmSessionsQuarantined": [{'simm_sessions_quarantined{server="a",worker="0"}': "0x40 1x560"}],
    "SimmNoRoom": [{'simm_put_failures_total{server="a",worker="0",cause="no_room"}': "0x99 0+120x500"}],
    "SimmOverQuota": [{'simm_put_failures_total{server="a",worker="0",cause="over_quota"}': "0x99 0+1x500"}],
    "SimmKeptNearShare": [
        {'simm_kept_bytes{server="a",worker="0",namespace="n",class="hard"}': "20x99 24x500"},
        {f'simm_kept_bytes{{server="a",worker="0",namespace="{name}",class="hard"}}': "0x99 16x500" for name in "pq"},
        {'simm_keep_max_bytes{server="a",worker="0"}': "50x99 20x500",
         'simm_keep_fenced_bytes{server="a",worker="0"}': "0x600"},
        {'simm_keep_fenced_bytes{server="a",worker="0"}': "40x99 48x500"},
        {'simm_kept_slots{server="a",worker="0",namespace="n",class="hard"}': "20x99 24x500"},
        {f'simm_kept_slots{{server="a",worker="0",namespace="{name}",class="hard"}}': "0x99 16x500" for name in "pq"},
    ],
    "SimmTableTooSmall": [{'simm_evictions_total{server="a",worker="0",reason="set_full"}': "0x80 0+1000x520"}],
    "SimmPinsGrow": [{'simm_pins{server="a",worker="0"}': "200+1x600"}],
    "SimmNoHits": [{_FOUND: "7x600"}],
    "SimmEvictedBeforeRead": [{_EVICTED: "0+900x600"}],
    "SimmGetsUnanswered": [{_LATE: "0x99 0+20x500"},
                           {'simm_misses_total{server="a",worker="0",namespace="n",path="tcp",reason="unreachable"}':
                            "0x99 0+20x500"}],
    "SimmCountsDisbelieved": [{'simm_sessions_disbelieved_total{server="a",worker="0"}': "0x115 1x485"}],
    "SimmFileDescriptors": [
        {'process_open_fds{job="simm-manager",instance="m"}': "0x99 900x500"},
        {'simm_process_open_fds{instance="d",server="a",worker="0",process="worker"}': "0x99 900x500"},
        {'simm_process_open_fds{instance="d",server="a",worker="0",process="stream"}': "0x99 900x500"},
    ],
    "SimmEventsLost": [{'simm_publisher_gaps_total{instance="e"}': "0x99 0+1x500"}],
    "SimmIndexStale": [
        {'simm_index_stale{instance="i",endpoint="vllm-0",tenant="default",rank="0"}': "0x99 1x500"},
    ],
    "SimmRdmaDown": [{'simm_rdma_ready{server="b",worker="0",reason=""}': "1x99 _x500",
                      'simm_rdma_ready{server="b",worker="0",reason="ports are down"}': "_x99 0x500"},
                     # It registers for minutes, fails, and begins again: another series each time.
                     {'simm_rdma_ready{server="b",worker="0",reason=""}': "1x98 stale",
                      'simm_rdma_ready{server="b",worker="0",reason="too much"}': "_x99 " + "0 stale _ _ _ " * 100,
                      'simm_rdma_ready{server="b",worker="0",reason="registering again after: too much"}':
                      "_x99 " + "stale 0 0 0 0 " * 100}],
    "SimmRdmaLinksBreak": [{'simm_rdma_connections_broken_total{server="b",worker="0"}': "0x99 0+1x500"}],
    "SimmUnauthorized": [
        {'simm_manager_unauthorized_total{instance="m"}': "0x99 0+60x500"},
        {f'simm_unauthorized_total{{instance="d",server="a",worker="{number}"}}': "0x99 0+4x500" for number in (0, 1)},
    ],
    "SimmCertificateEnds": [{'simm_tls_certificate_expiry_timestamp_seconds{instance="d"}': "1200000x600"},
                            {'simm_tls_certificate_expiry_timestamp_seconds{instance="d"}': "6000x600"}],
    "SimmInsecure": [{'simm_manager_insecure{instance="m"}': "0x99 1x500"}],
}  # fmt: skip
#: When an alert is looked at, minutes; of the rest after 120, which is 20 minutes after the fault.
LATER = {"SimmVersionsMixed": 400, "SimmPinsGrow": 300, "SimmMovesStuck": 150, "SimmTableTooSmall": 130}


def test_each_alert_has_a_fault() -> None:
    assert set(FAULTS) == set(alerts())


def checked(folder: Path, tests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Let promtool run tests of the alerts."""
    if PROMTOOL is None:
        pytest.skip(MISSING)
    file = folder / "tests.yml"
    made = {"rule_files": [str(FOLDER / "alerts.yml")], "evaluation_interval": "1m", "tests": tests}
    file.write_text(yaml.safe_dump(made))
    return subprocess.run([PROMTOOL, "test", "rules", str(file)], capture_output=True, text=True, check=False)


def promtool_test(minutes: int, firing: list[str], **changes: str | None) -> dict[str, Any]:
    """Return a test: with these changes to what is well, these alerts fire after so many minutes, and no other one."""
    series = {name: values for name, values in {**WELL, **changes}.items() if values is not None}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{
            "expr": 'count by (alertname) (ALERTS{alertstate="firing"}) > bool 0', "eval_time": f"{minutes}m",
            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing],
        }],
    }  # fmt: skip


def test_alerts_are_quiet_while_all_is_well(tmp_path: Path) -> None:
    done = checked(tmp_path, [promtool_test(minutes, []) for minutes in (10, 105, 130, 300, 590)])
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_for_its_fault_and_for_no_other(tmp_path: Path) -> None:
    tests = [
        promtool_test(LATER.get(name, 120), [name], **changes) for name, faults in FAULTS.items() for changes in faults
    ]
    done = checked(tmp_path, tests)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mutation_an_alert_that_does_not_fire(tmp_path: Path) -> None:
    done = checked(tmp_path, [promtool_test(120, ["SimmFenced"])])
    assert done.returncode != 0 and "SimmFenced" in done.stdout + done.stderr


def test_promtool_takes_the_files() -> None:
    if PROMTOOL is None:
        pytest.skip(MISSING)
    done = subprocess.run([PROMTOOL, "check", "config", str(FOLDER / "prometheus.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_jobs_have_the_names_that_rules_and_panels_use() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    for _, expression in expressions():
        for job in re.findall(r'job="([^"]*)"', expression):
            assert job in jobs
    assert all(job.startswith("simm-") for job in jobs), "simm-.* finds them"
    assert config["rule_files"] == ["alerts.yml"]


# -- dashboard ---------------------------------------------------------------------------------------


def test_the_dashboard_is_whole() -> None:
    board = dashboard()
    assert (board["title"], board["uid"], board["id"]) == ("SiMM", "simm", None), "an import makes or replaces it"
    identifiers = [panel["id"] for panel in board["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    text = (FOLDER / "grafana-dashboard.json").read_text()
    used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval", "__all"}
    assert used == variables


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def test_each_panel_asks_the_chosen_source_and_has_a_title() -> None:
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles) and all(titles)
    for panel in panels():
        assert panel["targets"] and panel["fieldConfig"]["defaults"]["thresholds"], panel["title"]
        for target in (panel, *panel["targets"]):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_what_can_be_chosen_is_what_servers_are_called() -> None:
    (server_variable,) = [each for each in dashboard()["templating"]["list"] if each["name"] == "server"]
    metric, label = re.findall(r"label_values\((\w+), (\w+)\)", server_variable["query"]["query"])[0]
    assert label in METRICS[metric].labels
