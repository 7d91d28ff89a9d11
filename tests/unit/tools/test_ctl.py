"""``simm ctl``: tables, and what ``why`` says of each cause of misses."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simm import cli
from simm.config.settings import Settings
from simm.errors import TransportError, UsageError
from simm.ipc.counts import COUNTERS, Word
from simm.rpc import Connection, reply
from simm.server.children import WorkerSlot
from simm.tools.ctl import command, entries, upstream, why, workers
from simm.tools.ctl.cluster import local_nodes, rows_of, summary
from simm.tools.ctl.tables import TABLES, client_rows, kept_text, namespace_rows, rates_text, table, worker_rows
from simm.tools.ctl.tuning import no_socket
from simm.tools.ctl.workers import Asked, ask_all
from simm.wire import messages as M
from tests.support.waiting import WAIT_S

STATS: dict[str, Any] = {
    "pid": 7, "entries": 3, "data_bytes": 1 << 20, "free_bytes": 1 << 19, "granted_bytes": 0, "pins": 0,
    "sessions_quarantined": 0, "epoch": 4, "shards": 16384, "fenced": False, "evictions": {"own": 2},
    "set_evictions": 1, "group_evictions": 0, "evicted_with_groups": 0, "put_failures": {"no_room": 0}, "policy": "lru",
    "poll_us": 50, "segment": "simm-none", "clients": [], "clients_left_out": 0,
    "counted": {"namespaces": {}, "latencies": {}, "disbelieved": 0},
}  # fmt: skip


def asked(**changes: Any) -> Asked:
    return Asked("host", 0, "/nowhere", {**STATS, **changes})


def counted(**words: int) -> list[int]:
    """Return counters with these words."""
    counts = [0] * COUNTERS
    for name, count in words.items():
        counts[getattr(Word, name)] = count
    return counts


def row(name: str = "a", entries: int = 0, **words: int) -> dict[str, Any]:
    """Return a namespace's row with these counters."""
    (found,) = namespace_rows([asked(counted={"namespaces": {name: counted(**words)}, "latencies": {}})])
    return {**found, "entries": entries}


def said(rows: list[dict[str, Any]], only: str = "a", **changes: Any) -> list[why.Finding]:
    return why.explain(worker_rows([asked(**changes)]), rows, only)


def test_what_left_with_its_group_counts_as_evicted() -> None:
    """``simm nodes``, ``simm ctl workers`` and a drain left those out."""
    stats = asked(puts=9, moving=0, frozen=0, evicted_with_groups=4, group_evictions=5)
    (worker,), (node,) = worker_rows([stats]), local_nodes([stats], "no manager")
    slot: Any = SimpleNamespace(stats=stats.stats, moved_before=0, progress=M.MoveProgress(0, 0, 0, 0, 0))
    assert worker["evictions"] == node["evictions"] == WorkerSlot.load(slot, 0).evictions == 7


def test_issue_servers_that_are_gone_counted_as_memory_for_a_day() -> None:
    """One of them with 1 of 64 GiB and two that were gone were 121 of 192 GiB. Shards wait for who is away."""
    def node(state: str, used: int, shards: int = 0, *, drained: bool = False) -> dict[str, Any]:
        worker = {
            "address": "127.0.0.1:1", "shards": shards, "moving_in": 0, "moving_out": 0, "used_bytes": used,
            "capacity_bytes": 64, "entries": used, "puts": used, "evictions": 0,
        }  # fmt: skip
        return {"name": state, "state": state, "draining": drained, "drained": drained, "silent_s": 0.0,
                "workers": [worker]}  # fmt: skip

    nodes = [node("running", 1, 12), node("left", 60), node("dead", 60, 4), node("dead", 60, drained=True)]
    found = summary(rows_of({"nodes": nodes}))
    assert (found["used_bytes"], found["capacity_bytes"], found["entries"], found["puts"]) == (1, 64, 1, 1)
    assert found["nodes"] == 4 and found["shards"] == 16
    assert found["states"] == {"running": 1, "left": 1, "dead": 1, "dead, drained": 1}


# -- why ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        ([row(BATCH_HITS=80, ABSENT=20, PUTS=9, )], {}, "80.0% of 100"),
        ([row(PUTS=9)], {}, "no client of this host has asked"),
        ([row(ABSENT=9), row("b", PUTS=5)], {}, "but to 'b'"),
        ([row(ABSENT=9)], {}, "no client of this host has put"),
        ([row(NOT_FOUND=9)], {}, "no client of this host has put"),
        ([row(NOT_FOUND=9, PUTS=9, entries=9)], {}, "other keys are asked for"),
        ([row(NOT_FOUND=9, PUTS=1, entries=1)], {}, "other keys are asked for"),
        ([row(ABSENT=5, WRONG_SIZE=5, PUTS=5)], {}, "another size than the buffer"),
        ([row(HITS=1, UNSOUND=9, PUTS=5)], {}, "another checksum"),
        ([row(UNREACHABLE=5, MOVING=2, ABSENT=1, PUTS=5)], {}, "could not be asked"),
        ([row(TIMEOUT=5, HITS=1, PUTS=5)], {}, "did not answer within the deadline"),
        ([row(AWAY_TIMEOUT=5, HITS=1, PUTS=5)], {}, "did not answer within the deadline"),
        ([row(ABSENT=9, PUTS=1, PUT_FAILURES=9)], {"put_failures": {"over_quota": 9}}, "over_quota 9"),
        ([row(HITS=9, PUTS=9, PUT_FAILURES=1)], {"put_failures": {"no_room": 1}},
         "1 of 10 puts failed (workers refused: no_room 1)"),
        ([row(PUTS=9, PUT_FAILURES=9)], {"put_failures": {"no_room": 9}}, "9 of 18 puts failed"),
        ([row(ABSENT=9, HITS=1, PUTS=99, PUT_FAILURES=1)], {"put_failures": {"no_room": 1}}, "1 of 100 puts failed"),
        ([row(ABSENT=90, PUTS=1000, entries=5)], {"evictions": {"own": 995}}, "evicted before they are asked for"),
        ([row(ABSENT=50, EVICTED=40, PUTS=100, entries=100)], {}, "about 40 of the keys"),
        ([row(NOT_FOUND=50, NOT_FOUND_EVICTED=40, PUTS=100, entries=100)], {}, "were evicted"),
        ([row(ABSENT=90, PUTS=100, entries=100)], {}, "other keys are asked for"),
        ([row(ABSENT=90, PUTS=100)], {"evictions": {"own": 0}, "set_evictions": 0}, "none is left"),
        ([row("b", HITS=1)], {}, "no client on this host has named it"),
        ([row(ABSENT=9, PUTS=9)], {"fenced": True}, "takes no puts"),
        ([row(ABSENT=9, PUTS=9)], {"shards": 0}, "owns no shard"),
        ([row()], {}, "no client of this host has asked for anything"),
    ],
)  # fmt: skip
def test_each_cause_has_a_finding(rows: list[dict[str, Any]], changes: dict[str, Any], words: str) -> None:
    found = said(rows, **changes)
    assert any(words in each.seen for each in found), why.text_of(found)
    bad = [each for each in found if each.bad]
    assert all(each.remedy for each in bad)
    assert json.loads(json.dumps(why.as_json(found)))[0]["seen"]


def test_what_is_well_is_no_cause() -> None:
    (finding,) = said([row(HITS=80, ABSENT=20, PUTS=80, entries=80)])
    assert not finding.bad


@pytest.mark.parametrize("puts", [770, 400, 1000])
def test_what_puts_of_two_copies_look_for_is_no_cause(puts: int) -> None:
    """Servers count it as exists. Engines that only put were said to ask for other keys than they put."""
    (finding,) = said([row(FOUND=700, NOT_FOUND=1300, PUTS=puts, entries=puts)])
    assert not finding.bad and "puts of two copies" in finding.seen and finding.remedy
    failed, finding = said([row(NOT_FOUND=2000, PUTS=1, PUT_FAILURES=700)], put_failures={"no_room": 700})
    assert failed.bad and not finding.bad


def test_failed_puts_are_a_cause_if_they_are_many() -> None:
    """Also where gets hit, or nobody gets: ``simm ctl why`` is what is asked why puts fail."""
    few = said([row(HITS=80, PUTS=80, PUT_FAILURES=1, entries=80)])
    many = said([row(HITS=80, PUTS=80, PUT_FAILURES=80, entries=80)])
    assert [each.bad for each in few] == [False, False] and [each.bad for each in many] == [False, True]


def test_without_any_client_that_is_said() -> None:
    (finding,) = said([], only="")
    assert finding.bad and "nothing is stored" in finding.seen


def test_a_silent_worker_is_said_first() -> None:
    first, *_ = why.explain(worker_rows([Asked("host", 0, "p", {}, "stopped")]), [row(HITS=1)])
    assert "host/0 does not answer: stopped" in first.seen and first.bad


# -- tables ------------------------------------------------------------------------------------------


def test_tables_have_all_rows_and_no_control_characters() -> None:
    claimed = {
        "session": 1, "pid": 1 << 30, "namespace": "\x1b[2J\nevil", "kind": "client", "quarantined": False, "grants": 0,
        "granted_bytes": 5, "pins": 2, "idle_s": 75.0, "believed": False,
    }  # fmt: skip
    server = {**claimed, "kind": "server"}
    rows = client_rows([asked(clients=[claimed, server])])
    assert len(rows) == 1 and rows[0]["program"] == "", "there is no such process; servers are no clients"
    text = table("clients", rows)
    assert "\x1b" not in text and len(text.splitlines()) == 2
    assert "counts nonsense" in text and "1m" in text
    assert table("slabs", []) == "no slabs"


@pytest.mark.parametrize("what", list(TABLES))
def test_a_worker_that_is_silent_costs_no_table(what: str) -> None:
    rows = TABLES[what][0]([Asked("host", 0, "p", {}, "stopped"), asked()])
    assert table(what, rows)


def test_rows_of_several_workers_are_added_up() -> None:
    one = asked(counted={"namespaces": {"a": counted(HITS=3, HIT_BYTES=9)}, "latencies": {}})
    (found,) = namespace_rows([one, one])
    assert (found["hits"], found["gets"], found["bytes_read"], found["hit_ratio"]) == (6, 6, 18, 1.0)


def test_what_namespaces_keep_is_added_up_beside_what_they_may() -> None:
    kept = {"bytes": {"a": {"soft": 9 << 20, "hard": 3 << 20}, "b": {"soft": 1, "hard": 0}}, "hard_max": 8 << 20,
            "namespace_max": 4 << 20}  # fmt: skip
    two = [asked(kept=kept), asked(kept=kept)]
    rows = namespace_rows(two)
    found = {row["namespace"]: (row["kept_bytes"], row["soft_kept_bytes"]) for row in rows}
    assert found == {"a": (6 << 20, 18 << 20), "b": (0, 2)}
    head, first, *_ = table("namespaces", rows).splitlines()
    assert "HARD KEPT  SOFT KEPT" in head and first.split()[3:5] == ["6M", "18M"]
    assert kept_text(two) == (
        "\nhard kept: 6M of the 16M that may be (keep_share), 8M of one namespace (keep_namespace_share)"
    )
    assert kept_text([asked(), asked(kept={**kept, "bytes": {}})]) == "", "a worker of an older version says nothing"
    slots = {"slots": {"a": {"hard": 700}, "b": {"hard": 68}}, "slots_max": 1024, "namespace_slots_max": 512}
    assert kept_text([asked(kept=kept), asked(kept=kept | slots)]) == (
        "\nhard kept: 6M of the 16M that may be (keep_share), 8M of one namespace (keep_namespace_share); "
        "768 of 1024 slots of the table, 512 of one namespace"
    )


def test_rates_are_those_between_two_looks() -> None:
    before = [row("a", HITS=10, ABSENT=10, HIT_BYTES=1000, PUTS=1), row("gone", HITS=5)]
    now = [row("a", HITS=40, ABSENT=20, HIT_BYTES=1000 + (4 << 10), PUTS=5, PUT_BYTES=2 << 20), row("new", HITS=9)]
    text = rates_text(now, before, 2.0)
    assert text.strip() == "20 gets/s, 75.0% of them hits, 2K/s read, 2 puts/s, 1M/s put"
    assert rates_text([{"chunk_bytes": 64}], [{"chunk_bytes": 64}], 2.0) == ""
    assert rates_text(before, now, 1.0).startswith("\n\n0 gets/s, - of them"), "a worker that began anew"


@pytest.mark.parametrize("pid", [7, 8])
def test_issue_rates_of_namespaces_are_of_workers_that_answered_both_looks(pid: int) -> None:
    """All that one had ever done was shown as done since the look that it did not answer."""

    def look(hits: int, others: int, pid: int = 7) -> Any:
        counts = [{"namespaces": {"a": counted(HITS=each)}, "latencies": {}} for each in (hits, others)]
        other = Asked("other", 0, "/n", {**STATS, "pid": pid, "counted": counts[1]})
        return namespace_rows([asked(counted=counts[0]), other if others else Asked("other", 0, "/n", {}, "silent")])

    looks = [look(10, 5_000_000), look(30, 0), look(50, 5_000_900, pid), look(70, 5_000_920, pid)]
    rates = [rates_text(now, before, 2.0).split()[0] for before, now in itertools.pairwise(looks)]
    assert rates == ["10", "10", "20"]
    assert json.loads(json.dumps(looks[0]))[0]["hits"] == 5_000_010


# -- the command -------------------------------------------------------------------------------------


def test_a_folder_without_sockets_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--runtime-dir"):
        ask_all(tmp_path)
    (tmp_path / "a.0.sock").touch()
    (tmp_path / "manager.sock").touch()
    (found,) = ask_all(tmp_path)
    assert found.name == "a/0" and found.why and not found.stats
    (tmp_path / "c.1.sock").touch()
    with pytest.raises(UsageError, match=r"no data server 'b' in .*, but a, c$"):
        ask_all(tmp_path, "b")


def test_a_folder_that_cannot_be_seen_is_not_one_without_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user was told to name the folder that it had named."""
    with pytest.raises(UsageError, match=r"there is no .*/none, .*: start one, or name it with --runtime-dir"):
        ask_all(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"/file: Not a directory: name the folder"):
        ask_all(tmp_path / "file")

    def refuse(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.listdir", refuse)
    says = f"this user may not look into {tmp_path}, .*: be its user or root;"
    with pytest.raises(UsageError, match=says):
        ask_all(tmp_path)
    assert re.search(says, str(no_socket(Settings(runtime_dir=tmp_path), "")))


@pytest.mark.parametrize("answer", [b"[" * 100_000, b'{"clients": ' * 50_000, b"7", b"\xff", b"{}"])
def test_issue_an_answer_that_is_none_is_a_reason(tmp_path: Path, answer: bytes) -> None:
    """Also one that is nested so deeply that its reading fails in another way."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "a.0.sock"))
        listener.listen()

        def say() -> None:
            with listener.accept()[0] as sock:
                conn = Connection()
                while (frame := conn.next_frame()) is None:
                    conn.receive_data(sock.recv(1 << 16))
                sock.sendall(reply(M.StatsReply(answer), frame.request_id))

        thread = threading.Thread(target=say)
        thread.start()
        (found,) = ask_all(tmp_path)
        thread.join()
    assert found.why and not found.stats


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[list[socket.socket]]:
    """Listening sockets of three workers."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        for number, listener in enumerate(made):
            listener.settimeout(WAIT_S)
            listener.bind(str(tmp_path / f"a.{number}.sock"))
            listener.listen()
        yield made


def test_issue_workers_that_hang_were_waited_for_one_after_another(
    sockets: list[socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight of them took 24 s. Here each answers when all have been asked."""
    monkeypatch.setattr(workers, "ANSWER_S", WAIT_S)

    def serve() -> None:
        with contextlib.ExitStack() as stack:
            asking = []
            for listener in sockets:
                sock = stack.enter_context(listener.accept()[0])
                conn = Connection()
                while (frame := conn.next_frame()) is None:
                    conn.receive_data(sock.recv(1 << 16))
                asking.append((sock, frame.request_id))
            for number, (sock, request) in reversed(list(enumerate(asking))):
                sock.sendall(reply(M.StatsReply(b'{"clients": [], "pid": %d}' % number), request))

    thread = threading.Thread(target=serve)
    thread.start()
    found = ask_all(tmp_path)
    thread.join()
    assert [(each.name, each.stats["pid"]) for each in found] == [("a/0", 0), ("a/1", 1), ("a/2", 2)]


def test_each_worker_that_hangs_is_named(
    sockets: list[socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "ANSWER_S", 0.02)
    sockets[1].close()
    found = ask_all(tmp_path)
    assert [each.name for each in found] == ["a/0", "a/1", "a/2"] and not any(each.stats for each in found)
    assert "deadline passed" in found[0].why and found[2].why == found[0].why and "refused" in found[1].why


def test_watching_shows_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    class Enough(Exception):
        """Ends the watching."""

    turns = iter((1, 2))
    slept: list[float] = []

    def look() -> tuple[Any, str, bool]:
        number = next(turns, None)
        if number is None:
            raise Enough
        return [{"number": number}], f"text {number}", True

    with pytest.raises(Enough):
        command._show(look, 2.0, as_json=False, watch=True, sleep=slept.append)
    assert capsys.readouterr().out == "text 1\ntext 2\n" and slept == [2.0, 2.0]
    turns = iter((1,))
    assert command._show(look, 0.0, as_json=True, watch=False) == 0
    assert json.loads(capsys.readouterr().out) == [{"number": 1}]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["namespaces", "flush", "a", "--dry-run"], "namespaces flush takes no --dry-run, so nothing was done"),
        (["namespaces", "flush", "a", "--older", "1h"], "namespaces flush takes no --older"),
        (["node", "drain", "a", "--dry-run"], "node drain takes no --dry-run"),
        (["node", "set", "a", "DEAD", "--server", "b"], "node set takes no --server"),
        (["settings", "set", "poll_us", "1", "--dry-run"], "settings takes no --dry-run"),
        (["kv", "del", "k", "--dry-run"], "kv takes no --dry-run"),
        (["kv", "exist", "k", "--json"], "kv takes no --json"),
        (["evict", "a", "--of", "far"], "evict takes no --of"),
        (["evict", "a", "--of-manager"], "evict takes no --of-manager"),
        (["grow", "--memory", "8M", "--dry-run"], "grow takes no --dry-run"),
        (["clients", "--most", "3"], "clients takes no --most"),
        (["node", "list", "--server", "a"], "node takes no --server"),
        (["cluster", "status", "--server", "a"], "cluster takes no --server"),
        (["shard", "list", "--server", "a"], "shard takes no --server"),
        (["server", "status", "a", "--server", "b"], "server status a --server b: one of them"),
        (["keys", "hot", "--older", "1h"], "keys takes no --older"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    argv: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is asked: ``namespaces flush NAME --dry-run`` used to flush."""
    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(UsageError, match=says):
        command.main(argv)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["evict", ""], "a namespace has 1 to"), (["evict", "n" * 5000], "a namespace has 1 to"),
        (["keys", "old", ""], "a namespace has 1 to"), (["why", ""], "a namespace has 1 to"),
        (["namespaces", "flush", ""], "a namespace has 1 to"), (["evict", "a", "--server", ""], "--server has no name"),
        (["settings", "set", "poll_us", "1", "--of", ""], "--of has no name"),
    ],
)  # fmt: skip
def test_issue_an_empty_name_is_not_all(
    argv: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``simm ctl evict "$UNSET"`` deleted every value of every namespace."""
    asked: list[Any] = []
    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path))
    for name in ("ask_all", "manager_client"):
        monkeypatch.setattr(command, name, lambda *given: asked.append(given))
    monkeypatch.setattr(command.tuning, "settings_rows", lambda *given, **_: asked.append(given))
    assert cli.main(["ctl", *argv]) == 2 and not asked
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1


@pytest.mark.parametrize(("word", "wanted"), [("*", None), ("a", "a")])
def test_all_namespaces_are_a_star(
    word: str, wanted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[Any] = []
    with pytest.raises(UsageError, match="a namespace has 1 to"):
        entries.evict([asked()], "")
    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(command, "ask_all", lambda *_: [asked()])
    monkeypatch.setattr(command.entries, "evict", lambda _, namespace, **__: named.append(namespace) or [])
    assert command.main(["evict", word]) == 0 and named == [wanted]


def test_a_flush_without_a_manager_says_so_before_it_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It used to say nothing for a minute."""
    asked: list[Any] = []
    monkeypatch.setattr("simm.sdk.ops.epochs.advance", lambda *given: asked.append(given) or 7)
    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(TransportError, match=r"no manager answers .*: start one with `simm manager`, or name it"):
        command.main(["namespaces", "flush", "a", "--manager", "127.0.0.1:1"])
    assert not asked
    monkeypatch.setattr(command, "manager_client", lambda _: io.BytesIO())
    assert command.main(["namespaces", "flush", "a"]) == 0 and len(asked) == 1


def test_what_every_command_needs_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([])
    assert "required: WHAT;" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["clients", "a"], ["why", "--watch", "0s"], ["nothing"], []])
def test_wrong_usage(argv: list[str]) -> None:
    with pytest.raises((SystemExit, UsageError)):
        command.main(argv)


@pytest.mark.parametrize(
    ("value", "terminal", "shown"),
    [(b"\x1b]0;x\x07", True, False), (b"\xff", True, False), (b"\xc2\x9b", True, False),
     ("d\u00e9j\u00e0 vu\n".encode(), True, True), (b"\x1b]0;x\x07", False, True)],
)  # fmt: skip
def test_issue_a_terminal_was_sent_what_others_have_stored(
    value: bytes, terminal: bool, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``simm get`` refused it, ``simmctl kv get`` did not."""

    class Out(io.TextIOWrapper):
        def isatty(self) -> bool:
            return terminal

    @contextlib.contextmanager
    def client(_: Settings) -> Iterator[Any]:
        yield SimpleNamespace(get=lambda _: value)

    monkeypatch.setattr(upstream, "reached_client", client)
    raw = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Out(raw))
        with contextlib.nullcontext() if shown else pytest.raises(UsageError, match="`simm get KEY FILE`"):
            assert upstream.values(Settings(), ["get", "key"]) == 0
        sys.stdout.flush()
        assert raw.getvalue() == (value if shown else b"")
