"""``simm.kv``: flags, stores and their clients, asyncio, logging, exit, outages."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from simm import kv
from simm.config import engine_flags
from simm.config.client_options import ClientOptions
from simm.constants import VALUE_BYTES_MAX
from simm.errors import Code
from simm.kv import Block, Store, set_flag
from tests.support.kv_values import WAIT_S, content, filled, point_at, run_python
from tests.support.waiting import wait_until

#: From 3.12 on CPython warns of every fork beside threads. Ours are the point of the tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


# --- settings ---------------------------------------------------------------------------------


def test_the_other_flags_reach_the_client(cluster: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point_at(cluster.manager)
    monkeypatch.delenv("SIMM_DEADLINE_MS")
    monkeypatch.setattr(kv, "DEFAULT_COPY_THREADS", 3)
    with Store() as store:
        assert store._client is not None
        assert store._client.deadline_s == 3.0
        assert store._client.namespace == namespace
    assert set_flag("clnt_async_req_timeout_ms", "700")
    assert set_flag("clnt_thread_pool_size", "10")
    options = ClientOptions.from_settings(engine_flags.load(3))
    assert options == ClientOptions(cluster.manager, namespace, deadline_s=0.7, copy_threads=3)
    assert set_flag("clnt_sync_req_timeout_ms", "900")
    assert set_flag("clnt_thread_pool_size", "2")
    with Store() as store:
        assert store._client is not None
        assert store._client.deadline_s == 0.9
        assert store._client._copier.threads == 2


def test_the_environment_names_the_manager(cluster: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMM_CLUSTER_MANAGER", cluster.manager)
    with Store() as store:
        assert store.put("k", filled(b"v")) == 0


# --- stores -------------------------------------------------------------------------------------


def test_a_refused_address_is_a_runtime_error(cluster: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang does not look at what set_flag returns, and splits [::1]:31001 at its colons."""
    monkeypatch.setenv("SIMM_MANAGER", cluster.manager)
    assert not set_flag("cm_primary_node_ip", "[")
    assert set_flag("cm_primary_node_port", "")
    with pytest.raises(RuntimeError, match=r"SiMM: set_flag\('cm_primary_node_ip', '\['\) was refused"):
        Store()
    point_at(cluster.manager)
    with Store() as store:
        assert store.put("k", filled(b"v")) == 0


def test_a_bad_environment_is_a_runtime_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMM_CLUSTER_MANAGER", "not an address")
    with pytest.raises(RuntimeError, match="SIMM_CLUSTER_MANAGER"):
        Store()


def test_stores_share_a_client_until_the_last_is_closed(cluster: Any, namespace: str) -> None:
    point_at(cluster.manager)
    first, second = Store(), Store()
    client = first._client
    assert client is not None
    assert second._client is client
    assert set_flag("clnt_sync_req_timeout_ms", "4321")
    third = Store()
    assert third._client is not client
    assert first.put("k", filled(b"v")) == 0
    assert third.exists("k") is True
    first.close()
    first.close()
    assert second.exists("k") is True
    second.close()
    assert client._closed
    assert third.exists("k") is True
    third.close()


def test_a_dropped_store_closes_nothing(cluster: Any, namespace: str) -> None:
    point_at(cluster.manager)
    store = Store()
    client = store._client
    assert client is not None
    del store
    gc.collect()
    assert not client._closed
    assert Store()._client is client


def test_a_closed_store_answers_without_raising(cluster: Any, namespace: str) -> None:
    point_at(cluster.manager)
    keeper = Store()
    view = filled(b"v")
    bad = int(Code.INVALID_ARGUMENT)
    with Store() as store:
        assert store.put("k", view) == 0
    for closed in (store, keeper):
        if closed is keeper:
            assert keeper._client is not None
            keeper._client.close()  # by someone else, while the store is in use
        assert closed.put("k", view) == closed.get("k", view) == closed.delete("k") == bad
        assert closed.exists("k") is False
        assert closed.mexists(["k", "l"]) == [False, False]
        assert closed.mput(["k"], [view]) == [bad]
        assert closed.load_ms(["k"]) == asyncio.run(closed.load_ms_async(["k"])) == bad
        assert asyncio.run(closed.put_async("k", view)) == bad
        assert asyncio.run(closed.mexists_async(["k"])) == [False]
        assert closed.stats()["rejected"] > 0
    assert "closed" in repr(store)


def test_stores_in_processes_share_the_data(store: Store, cluster: Any, namespace: str) -> None:
    """FlexKV asks in its main process and moves data in a worker process."""
    assert store.put("parent", filled(b"from the parent")) == 0
    host, port = cluster.manager.split(":")
    code = (
        "from simm.kv import *\n"
        f"set_flag('cm_primary_node_ip', '{host}'); set_flag('cm_primary_node_port', '{port}')\n"
        "s = Store(); b = s.allocate(100)\n"
        "assert s.get('parent', b.view()) == 15 and s.put('child', b.view()) == 0\n"
    )
    done = run_python(code, namespace)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert store.mexists(["parent", "child"]) == [True, True]


def test_a_forked_child_uses_its_parents_store_and_one_of_its_own(store: Store) -> None:
    view = filled(b"value")
    assert store.put("k", view) == 0
    pid = os.fork()
    if not pid:
        code = 1
        try:
            signal.alarm(60)
            back = Block(5)
            good = store.get("k", back.view()) == 5 and content(back) == b"value"
            own = Store()
            good = good and own._client is not store._client and own.put("child", view) == 0
            own.close()
            store.close()
            code = 0 if good else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert store.mexists(["k", "child"]) == [True, True]
    assert store.mexists("kk") == [False, False] == store.mexists("k") * 2, "a text is no list of keys"


def test_one_store_in_many_threads(store: Store) -> None:
    """SGLang's three and some more: backups, prefetch look-ups, prefetch reads."""
    wrong: list[str] = []
    pages = [(f"{number:064x}_0_k", bytes([number + 1]) * (5000 + number)) for number in range(32)]

    def work(seed: int) -> None:
        try:
            rng = random.Random(seed)
            backs = [Block(6000) for _ in pages]
            for _ in range(25):
                some = rng.sample(range(len(pages)), 8)
                keys = [pages[number][0] for number in some]
                kind = rng.randrange(3)
                if kind == 0:
                    assert store.mput(keys, [filled(pages[number][1]) for number in some]) == [0] * 8
                elif kind == 1:
                    assert all(type(found) is bool for found in store.mexists(keys))
                else:
                    got = store.mget(keys, [backs[number].view() for number in some])
                    for number, length in zip(some, got):
                        assert length == Code.GET_FAILED or content(backs[number])[:length] == pages[number][1]
        except BaseException as exc:
            wrong.append(repr(exc))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not wrong


# --- asyncio ------------------------------------------------------------------------------------


def test_the_async_forms_answer_the_same(store: Store) -> None:
    async def body() -> None:
        view, back = filled(b"value"), Block(10)
        assert await store.put_async("k", view) == 0
        assert await store.get_async("k", back.view()) == 5
        assert content(back) == b"value\0\0\0\0\0"
        assert await store.exists_async("k") is True
        assert await store.mput_async(["a", "", "b"], [view] * 3) == [0, int(Code.INVALID_ARGUMENT), 0]
        assert await store.mget_async(["a", "c"], [view, view]) == [5, int(Code.GET_FAILED)]
        assert await store.mexists_async(["a", "b", "c"]) == [True, True, False]
        assert await store.delete_async("k") == 0
        assert await store.delete_async("k") == Code.KEY_NOT_FOUND
        assert await asyncio.gather(*(store.put_async(f"k{n}", view) for n in range(50))) == [0] * 50

    asyncio.run(body())


def test_after_a_cancellation_the_buffer_is_left_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read is held open while the task is cancelled: it must not look cancelled before the write is over."""
    assert store.put("k", filled(b"value")) == 0
    client = store._client
    assert client is not None
    entered, go_on = threading.Event(), threading.Event()
    read = client.get_digest

    def slow(*arguments: Any) -> Any:
        entered.set()
        go_on.wait(WAIT_S)
        return read(*arguments)

    monkeypatch.setattr(client, "get_digest", slow)
    back = Block(5)

    async def body() -> None:
        task = asyncio.ensure_future(store.get_async("k", back.view()))
        while not entered.is_set():
            await asyncio.sleep(0)
        task.cancel()
        for _ in range(50):
            await asyncio.sleep(0)
        assert not task.done()
        assert content(back) == bytes(5)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert content(back) == b"value"

    asyncio.run(body())


# --- logging, exit, outages ---------------------------------------------------------------------


def test_a_log_file_gets_what_is_logged_and_the_program_keeps_the_rest(
    cluster: Any, namespace: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    point_at(cluster.manager)
    path = tmp_path / "a" / "b" / "simm_clnt.log"
    assert set_flag("clnt_log_file", str(path))
    store = Store()
    assert store.put("", filled(b"v")) == Code.INVALID_ARGUMENT
    assert "a key has at least 1 byte" in path.read_text()
    assert capfd.readouterr() == ("", "")
    other = tmp_path / "other.log"
    assert set_flag("clnt_log_file", str(other))
    Store()
    logging.getLogger("simm").warning("to the other one")
    assert "other one" in other.read_text()
    assert "other one" not in path.read_text()
    assert len(logging.getLogger("simm").handlers) == 1


def test_a_log_file_that_cannot_be_made_is_said_once_on_stderr(
    cluster: Any, namespace: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    point_at(cluster.manager)
    (tmp_path / "file").write_text("")
    assert set_flag("clnt_log_file", str(tmp_path / "file" / "simm_clnt.log")) is True
    stores = [Store(), Store()]
    assert stores[0].put("k", filled(b"v")) == 0
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.count("logging to stderr") == 1


def test_mistakes_do_not_flood_the_log(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(50):
        store.mput(["", "ok"], [filled(b"v")] * 2)
    assert len([record for record in caplog.records if "invalid argument" in record.getMessage()]) == 1
    assert store.stats()["rejected"] == 50
EXITS = {
    "plain": "",
    "after a fork": (
        "import os, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "pid = os.fork()\n"
        "if pid: assert os.waitpid(pid, 0)[1] == 0\n"
        "s.exists('k')\n"
    ),
    "with a thread at work": (
        "import threading\n"
        "def work():\n"
        "    while True: s.put('k', b.view()); s.get('k', b.view())\n"
        "threading.Thread(target=work, daemon=True).start()\n"
    ),
    "by sys.exit in a callback": "import asyncio\nasyncio.run(s.put_async('k', b.view()))\nimport sys\nsys.exit(0)\n",
    "with an exception": "import sys\nsys.excepthook = lambda *_: sys.stderr.flush()\n",
}


@pytest.mark.parametrize("how", EXITS)
def test_a_program_ends_without_close(cluster: Any, namespace: str, how: str) -> None:
    host, port = cluster.manager.split(":")
    code = (
        "from simm.kv import *\n"
        f"set_flag('cm_primary_node_ip', '{host}'); set_flag('cm_primary_node_port', '{port}')\n"
        "s = Store(); b = s.allocate(100000); assert s.put('k', b.view()) == 0; assert s.get('k', b.view()) == 100000\n"
    )
    done = run_python(code + EXITS[how], namespace)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_program_ends_though_its_servers_hang(make_cluster: Any) -> None:
    """Goodbyes are bounded: with everything stopped, exit waits a second and not for the deadlines of 60."""
    cluster = make_cluster(memory="64M")
    host, port = cluster.manager.split(":")
    code = (
        "from simm.kv import *\nimport os, signal\n"
        f"set_flag('cm_primary_node_ip', '{host}'); set_flag('cm_primary_node_port', '{port}')\n"
        "set_flag('clnt_sync_req_timeout_ms', '3600000')\n"
        "s = Store(); b = s.allocate(5000); assert s.put('k', b.view()) == 0\n"
        f"os.kill({cluster.worker_stats()['pid']}, signal.SIGSTOP)\n"
        f"os.kill({cluster.processes['manager'].pid}, signal.SIGSTOP)\n"
    )
    worker = cluster.worker_stats()["pid"]
    try:
        done = run_python(code)
    finally:
        os.kill(worker, signal.SIGCONT)
        os.kill(cluster.processes["manager"].pid, signal.SIGCONT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_outages_are_codes_and_end(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_cluster(memory="64M")
    point_at(cluster.manager)
    assert set_flag("clnt_sync_req_timeout_ms", "30000")
    store = Store()
    view = filled(b"value")
    gone = {int(Code.UNAVAILABLE), int(Code.NO_ROUTE)}
    assert store.put("k", view) == 0
    cluster.kill("dataserver")
    assert store.put("k", view) in gone
    assert store.delete("k") in gone
    wait_until(lambda: store.get("k", view) in gone, "gets fail")
    # A dead server's shards stay its own while there is no other one. One that says goodbye gives them up.
    cluster.start_server()
    wait_until(lambda: store.put("k", view) == 0, "puts are stored again")
    cluster.processes["dataserver"].end()
    wait_until(lambda: store.put("k", view) == Code.NO_ROUTE, "the route goes")
    assert store.get("k", view) == store.delete("k") == Code.NO_ROUTE
    assert store.mput(["k", ""], [view, view]) == [int(Code.NO_ROUTE), int(Code.INVALID_ARGUMENT)]
    before = store.stats()["outages"]
    assert store.exists("k") is False
    assert store.mexists(["k", "l"]) == [False, False]
    assert store.stats()["outages"] == before + 3
    cluster.start_server()
    wait_until(lambda: store.put("k", view) == 0, "puts are stored again")
    assert store.get("k", view) == 5
    assert store.exists("k") is True


def test_a_value_that_finds_no_room_is_put_failed(make_cluster: Any) -> None:
    cluster = make_cluster(memory="32M")
    point_at(cluster.manager)
    assert set_flag("clnt_sync_req_timeout_ms", "30000")
    store = Store()
    big = Block(VALUE_BYTES_MAX).view()
    small = filled(b"v")
    assert store.put("big", big) == Code.PUT_FAILED
    assert store.mput(["a", "big", "b"], [small, big, small]) == [0, int(Code.PUT_FAILED), 0]
