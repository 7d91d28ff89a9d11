"""Small mistakes of a user or a program: each is a sentence and exit code 2, or a UsageError; nothing is made."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from simm import kv
from simm.client import Client
from simm.cluster.machine import Cluster as Machine
from simm.cluster.nodes import Answer
from simm.constants import LARGE_BYTES_MAX
from simm.errors import ConfigError, UsageError
from simm.host.buffers import Span
from simm.rpc import encode
from simm.testing import FakeClient
from simm.wire.messages import Status
from tests.support.child import ROOT

#: An address that is not mapped: nobody must look at it.
TOO_LARGE = Span(4096, LARGE_BYTES_MAX + 1)

#: Arguments of ``simm``, and a part of the sentence. "RUN" is a folder of the test's own.
COMMANDS: list[tuple[Sequence[str], str]] = [
    (["dataserver", "--memory", "0"], "memory (from --memory): '0' is no size of an arena: 8M to 64T"),
    (["dataserver", "--memory", "1"], "8M to 64T"),
    (["dataserver", "--memory", "7M"], "8M to 64T"),
    (["dataserver", "--memory", "1000000T"], "8M to 64T"),
    (["local", "--memory", "0"], "8M to 64T"),
    (["dataserver", "--slots", "2000000000", "--memory", "64M"], "no room for 2000000000 slots"),
    (["dataserver", "--group", "99999999999"], "group (from --group): '99999999999' is no group"),
    (["dataserver", "--group", "9" * 5000], "is no group"),
    (["dataserver", "--name", "a:b"], "is no name of a data server"),
    (["dataserver", "--name", "K\xf6ln"], "is no name of a data server"),
    (["dataserver", "--name", "n" * 129], "is no name of a data server"),
    (["dataserver", "--name", "n" * 128], "the sockets' path"),
    (["dataserver", "--runtime-dir", "RUN/" + "r" * 100], "107 are allowed: choose a shorter --runtime-dir or --name"),
    (["dataserver", "--poll-us", "99999999999999999"], "from 0 to 1000000"),
    (["manager", "--heartbeat-ms", "99999999999999"], "from 10 to 60000"),
    (["manager", "--grace-ms", "99999999999999"], "from 0 to "),
    (["status", "--deadline-ms", "9999999999999999"], "from 1 to 3600000"),
    (["node", "drain", "n" * 65_000], "is no name of a data server"),
    (["bench", "--copy-threads", "-1"], "from 0 to 256"),
]


def run(argv: Sequence[str], folder: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, in a runtime folder and under a name of the test's own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SIMM_")}
    environment |= {"PYTHONPATH": str(ROOT), "SIMM_RUNTIME_DIR": str(folder / "run"), "SIMM_MANAGER": "127.0.0.1:1"}
    environment["SIMM_NAME"] = f"mistakes-{os.getpid()}"
    argv = [word.replace("RUN/", f"{folder}/") for word in argv]
    return subprocess.run(
        [sys.executable, "-m", "simm", *argv], env=environment, capture_output=True, text=True, timeout=300,
        check=False, stdin=subprocess.DEVNULL, **more,
    )  # fmt: skip


@pytest.mark.parametrize(("argv", "says"), COMMANDS, ids=[" ".join(argv)[:40] for argv, _ in COMMANDS])
def test_a_wrong_setting_is_a_sentence_and_exit_code_2(argv: Sequence[str], says: str, tmp_path: Path) -> None:
    done = run(argv, tmp_path)
    assert done.returncode == 2, done
    assert says in done.stderr and "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("simm")]
    assert len(said) == 1, done.stderr
    assert not [name for name in os.listdir("/dev/shm") if f"mistakes-{os.getpid()}" in name]


@pytest.mark.parametrize("server", ["dataserver", "manager"])
def test_a_server_without_descriptors_starts_nothing(server: str, tmp_path: Path) -> None:
    """With ten it made an arena, ran out in the middle of the start, and could not open the arena to remove it."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10))

    memory = ["--memory", "64M"] if server == "dataserver" else ["--listen", "127.0.0.1:0"]
    done = run([server, *memory], tmp_path, preexec_fn=few)
    assert done.returncode == 2, done
    assert "this process may open 10 files only" in done.stderr and "Traceback" not in done.stderr
    assert not [name for name in os.listdir("/dev/shm") if f"mistakes-{os.getpid()}" in name]


def test_a_data_servers_port_that_cannot_be_had_is_a_sentence_that_names_its_flag(tmp_path: Path) -> None:
    """Also the port of its second worker, which nobody has written down. It is said before any memory is taken."""

    def says(*arguments: str) -> str:
        done = run(["dataserver", "--memory", "4T", "--rdma", "off", *arguments], tmp_path)
        assert done.returncode == 1 and "Traceback" not in done.stderr, done
        (said,) = [line for line in done.stderr.splitlines() if line.startswith("simm")]
        assert "[Errno" not in said
        assert not [name for name in os.listdir("/dev/shm") if f"mistakes-{os.getpid()}" in name]
        return said

    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        in_use = f"cannot listen on {at}: Address already in use: free it, or choose another"
        assert f"{in_use} --listen" in says("--listen", at)
        assert f"{in_use} --http" in says("--http", at)
    with socket.create_server(("127.0.0.1", 0)) as found:
        at = f"127.0.0.1:{found.getsockname()[1]}"
    assert f"cannot listen on {at}: Address already in use" in says("--listen", at, "--http", at), "its own"
    said = says("--listen", "127.0.0.1:65535", "--workers", "2")
    assert "there is no port 65536: choose a lower one by --listen" in said


#: Calls that no client can carry out, and a part of the sentence. A client's own arguments are in
#: tests/unit/config/test_client_options.py.
CALLS: list[tuple[Callable[[Client], Any], str]] = [
    (lambda client: client.exists_many("kk"), "keys is a list of keys, not the one text 'kk'"),
    (lambda client: client.get_many("kk"), "keys is a list"),
    (lambda client: client.delete_many("kk"), "keys is a list"),
    (lambda client: client.put_many("kk", [b"1", b"2"]), "keys is a list"),
    (lambda client: client.get_into_many("kk", [bytearray(1), bytearray(1)]), "keys is a list"),
    (lambda client: client.exists_many(b"kk"), "a key is a str"),
    (lambda client: client.put("k", TOO_LARGE), f"a value has 1 to {LARGE_BYTES_MAX} bytes, this one {len(TOO_LARGE)}"),
    (lambda client: client.put_many(["a", "b"], [b"1", TOO_LARGE]), "a value has 1 to"),
    (lambda client: client.put_many(["a", "b"], b"12"), "a value is bytes-like"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("call", "says"), CALLS)
def test_a_wrong_call_is_a_usage_error(call: Callable[[Client], Any], says: str) -> None:
    with FakeClient() as client, pytest.raises(UsageError, match=says):
        call(client)


@pytest.mark.quick
def test_an_arena_of_no_size_is_refused_before_a_server_starts() -> None:
    with pytest.raises(ConfigError, match="8M to 64T"):
        Client.local(memory=0)


@pytest.mark.quick
def test_a_drain_of_a_name_that_cannot_be_is_refused_in_a_few_words() -> None:
    """The refusal repeated the name and did not fit a message; the manager closed the link and logged a traceback."""
    (answer,) = Machine(1, 0.0).drain(0.0, "n" * 65_535, True)
    assert isinstance(answer, Answer) and answer.status == Status.BAD_REQUEST
    assert len(encode(answer.message)) < 200
    (answer,) = Machine(1, 0.0).drain(0.0, "n" * 128, True)
    assert isinstance(answer, Answer) and answer.status == Status.UNKNOWN_NODE


def test_a_flag_without_a_value_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """The text of None was taken for a host's name."""
    assert kv.set_flag("cm_primary_node_ip", None) is False  # type: ignore[arg-type]
    assert "cm_primary_node_ip" in caplog.text
