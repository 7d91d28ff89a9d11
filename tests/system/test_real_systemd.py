"""The units under a real systemd: start, reload, a watchdog for each kind of hang, warm restarts with all values."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.systemd_box import PYTHON_ENVIRONMENT, SystemdBox, why_not
from tests.support.waiting import wait_until

SERVER = "simm-dataserver@main"
PYTHON_ENV = "".join(f"{name}={value}\n" for name, value in PYTHON_ENVIRONMENT.items())
MANAGER_ENV = f"""{PYTHON_ENV}
SIMM_LISTEN=127.0.0.1:30001
"""
SERVER_ENV = f"""{PYTHON_ENV}
SIMM_MANAGER=127.0.0.1:30001
SIMM_MEMORY=32M
SIMM_NUMA=0
SIMM_HTTP=127.0.0.1:30081
SIMM_LOG_FILE=/var/log/simm/main.log
"""
#: Shorter than that of the unit, for the test.
WATCHDOG = "[Service]\nWatchdogSec=3\n"
CTL = ("/opt/simm/bin/python", "-m", "simm", "ctl", "workers")
PUT = """
from simm.client import Client
with Client("127.0.0.1:30001", namespace="box") as client:
    stored = [client.put(f"key {number}", bytes([number]) * 50_000) for number in range(100)]
    print(sum(stored), client.stats()["workers"][0]["path"])
"""
GET = """
from simm.client import Client
with Client("127.0.0.1:30001", namespace="box") as client:
    print(sum(client.get(f"key {number}") == bytes([number]) * 50_000 for number in range(100)))
"""
INDEXED = """
import json, urllib.request
print(sum(each["blocks"] for each in json.load(urllib.request.urlopen("http://127.0.0.1:8090/workers"))
          if not each["stale"]))
"""
PAGE = """
import urllib.request
print(urllib.request.urlopen("http://127.0.0.1:8091/metrics").read().decode())
"""


@pytest.fixture
def box(nothing_is_left: Path) -> Iterator[SystemdBox]:
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="b", dir=nothing_is_left))
    with SystemdBox(folder) as made:
        yield made
    folder.rmdir()


def test_the_units_of_the_index_run_confined_as_they_are(box: SystemdBox) -> None:
    """``simm events`` finds the data server's ring, and ``simm index`` learns of a value by it."""
    for name in ("msgspec", "zmq", "xxhash"):
        pytest.importorskip(name, reason="the extra simm-store[index] is not installed")
    publishers = [{"endpoint": "tcp://127.0.0.1:5567", "replay_endpoint": "tcp://127.0.0.1:5568", "type": "simm",
                   "modelname": "m", "instance_id": "store", "pool": "p"}]  # fmt: skip
    box.write("/etc/simm/manager.env", MANAGER_ENV)
    box.write("/etc/simm/dataserver-main.env", SERVER_ENV + "SIMM_EVENTS=1M\n")
    box.write("/etc/simm/publishers.json", json.dumps(publishers))
    box.write("/etc/simm/events.env", PYTHON_ENV)
    box.write("/etc/simm/index.env", PYTHON_ENV + "INDEX=--register /etc/simm/publishers.json\n")
    box.run("systemctl", "daemon-reload")
    box.run("systemctl", "start", "simm-manager", SERVER, "simm-events", "simm-index")
    assert box.python(PUT) == "100 shm"
    wait_until(lambda: box.python(INDEXED) == "100", "the index knows the values", pause_s=0.5)
    for each in ("simm-events", "simm-index"):
        assert box.run("stat", "-c", "%U", f"/proc/{box.shows(each, 'MainPID')}") == "simm"
    assert "simm_publisher_workers 1" in box.python(PAGE)
    box.run("systemctl", "reload", "simm-events", "simm-index")
    box.run("systemctl", "restart", "simm-events")
    assert "simm-" in box.run("ls", "/dev/shm"), "the arenas stay"
    wait_until(lambda: box.python(INDEXED) == "100", "the index goes on", pause_s=0.5)
    box.run("systemctl", "stop", "simm-events", "simm-index", SERVER)
    for each in ("simm-events", "simm-index"):
        assert box.shows(each, "Result") == "success" and box.shows(each, "NRestarts") == "0"


def test_the_units_live_up_to_what_they_say(box: SystemdBox) -> None:
    box.write("/etc/simm/manager.env", MANAGER_ENV)
    box.write("/etc/simm/dataserver-main.env", SERVER_ENV)
    box.write(f"/run/units/{SERVER.partition('@')[0]}@.service.d/watchdog.conf", WATCHDOG)
    box.run("systemctl", "daemon-reload")

    box.run("systemctl", "start", "simm-manager", SERVER)
    assert box.python(PUT) == "100 shm", "it serves when `start` returns"
    assert re.match(r"serving \d+ values in ", box.shows(SERVER, "StatusText"))
    assert box.shows("simm-manager", "StatusText").startswith("epoch ")
    assert box.run("stat", "-c", "%U %a", "/run/simm-main", "/var/log/simm") == "simm 700\nsimm 750"
    assert "-main/0" in box.run(*CTL, user="simm"), "the folder of the sockets is found"
    assert "-main/0" in box.run("env", "SIMM_SERVER_UID=simm", *CTL), "also by root"
    refused = box.run("sh", "-c", '"$@" 2>&1', "sh", *CTL, check=False)
    assert "/run/simm-main is of uid " in refused and "SIMM_SERVER_UID" in refused

    first = box.shows(SERVER, "MainPID")
    box.run("systemctl", "restart", SERVER)
    assert box.shows(SERVER, "MainPID") != first and box.python(GET) == "100", "a restart keeps all values"

    box.run("mv", "/var/log/simm/main.log", "/var/log/simm/main.log.1")
    box.run("systemctl", "reload", SERVER)
    wait_until(lambda: "opened anew" in box.run("cat", "/var/log/simm/main.log", check=False), "the log was rotated")
    assert box.shows(SERVER, "ActiveState") == "active"

    supervisor = box.shows(SERVER, "MainPID")
    log = box.run("cat", "/var/log/simm/main.log.1")
    worker = re.findall(r"supervisor\[\d+\] simm.dataserver: worker 0 is process (\d+)", log)[-1]
    box.run("kill", "-STOP", worker)
    died = f"worker 0 (process {worker}) died"
    wait_until(lambda: died in box.run("cat", "/var/log/simm/main.log", check=False), "it is replaced")
    assert box.shows(SERVER, "MainPID") == supervisor and box.shows(SERVER, "NRestarts") == "0", "alone"
    assert box.python(GET) == "100"

    # A worker that is slow to end, as on a busy host: systemd waits for it before it kills the rest of the unit.
    worker = re.findall(r"worker 0 is process (\d+)", box.run("cat", "/var/log/simm/main.log"))[-1]
    box.run("kill", "-STOP", supervisor, worker)
    wait_until(lambda: box.shows(SERVER, "SubState") == "stop-post", "the watchdog ends a supervisor that hangs")
    box.run("kill", "-CONT", worker)
    wait_until(lambda: box.shows(SERVER, "NRestarts") == "1", "systemd restarts the unit")
    wait_until(lambda: box.shows(SERVER, "ActiveState") == "active", "it serves again")
    assert box.python(GET) == "100", "its workers have kept their arenas"

    box.run("systemctl", "stop", SERVER)
    assert box.shows(SERVER, "Result") == "success"
    assert "simm-" in box.run("ls", "/dev/shm"), "the values stay for the next start"
    assert "Permission denied" not in log and "Traceback" not in log
    box.write("/etc/simm/manager.env", MANAGER_ENV + "SIMM_HEARTBEAT_MS=much\n")
    box.run("systemctl", "restart", "simm-manager", check=False)
    wait_until(lambda: box.shows("simm-manager", "ActiveState") == "failed", "wrong settings are not tried again")
    assert "heartbeat_ms" in box.shows("simm-manager", "StatusText"), "and `systemctl status` says what is wrong"
