"""Every option of the programs, on servers that then store and return values, and of clients that do both.

The parameters come from the table of settings, so an option that is added without an example here fails. That an
option does what it says is tested elsewhere; here no option may harm what the server is for.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

import pytest

from simm import cli
from simm.client import Client
from simm.config.settings import COMMANDS, SETTINGS
from tests.support.certificates import Authority, needs_openssl
from tests.support.child import Child, child_environment
from tests.support.etcd_server import MISSING, PROGRAM, EtcdServer
from tests.support.ports import reserve_port
from tests.support.processes import HERE, new_folder, remove_left_by
from tests.support.server_process import ServerProcess
from tests.support.waiting import WAIT_S

KEYS: Final = 40
TOKEN: Final = "a token of more than 16 bytes"
SERVERS: Final = ("manager", "dataserver", "local")
#: Program -> the command that lists its options; ``simm put``, ``get``, ``exists`` and ``delete`` are one client.
PROGRAMS: Final = {**dict.fromkeys(SERVERS, ""), "client": "put"}
#: What each option is given; {names} are filled in. A switch is given as it stands, and negated.
EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "--allow-uid": ("{uid},root",),
    "--config": ("{folder}/settings.json",),
    "--coordinator": ("{etcd}/options",),
    "--dead-after": ("4",),
    "--end-with": ("{pid}",),
    "--grace-ms": ("100",),
    "--group": ("{group}",),
    "--heartbeat-ms": ("100ms",),
    "--http": ("127.0.0.1:{port}",),
    "--huge-pages": ("", "no"),
    "--insecure": ("", "no"),
    "--keep-namespace-share": ("0", "90"),
    "--keep-share": ("0", "90"),
    "--listen": ("127.0.0.1:{port}",),
    "--log-file": ("{folder}/made/server.log",),
    "--log-format": ("json",),
    "--log-level": ("debug", "error"),
    "--manager": ("127.0.0.1:{port},{manager}",),
    "--memory": ("24M",),
    "--move-mib-s": ("0", "10"),
    "--epoch-lease-ms": ("5000",),
    "--join-timeout": ("1h",),
    "--moves-at-once": ("16384",),
    "--name": ("{name}-named",),
    "--near-share": ("0", "50"),
    "--numa": ("all",),
    "--policy": ("fifo", "sieve"),
    "--poll-us": ("0", "1ms"),
    "--rdma": ("off", "auto"),
    "--rdma-devices": ("none0",),
    "--rdma-windows": ("", "no"),
    "--restart-grace-ms": ("100",),
    "--runtime-dir": ("{folder}/own",),
    "--server-uid": ("{uid}",),
    "--slots": ("4096",),
    "--slow-ms": ("0", "50"),
    "--state-dir": ("{folder}/state",),
    "--streams": ("0", "2"),
    "--suspect-after": ("2",),
    "--token-file": ("{folder}/token",),
    "--value-size": ("64K",),
    "--events": ("1M",),
    "--warm": ("", "no"),
    "--workers": ("2",),
    # Of clients.
    "--checksum": ("", "no"),
    "--copy-threads": ("0", "2"),
    "--deadline-ms": ("20s",),
    "--namespace": ("{name}",),
    "--near-copies": ("", "no"),
    "--path": ("auto", "shm", "tcp"),
    "--put-if-absent": ("", "no"),
    "--replicas": ("1", "2"),
    "--tcp-streams": ("1", "8"),
    "--trace": ("off", "1"),
    "--trace-dir": ("{folder}/traces",),
}
#: Options of an etcd with TLS or users; managers by such a one are run below.
BY_ETCD: Final = {
    "tls": ("--coordinator-ttl-ms", "--coordinator-ca", "--coordinator-cert"),
    "users": ("--coordinator-ttl-ms", "--coordinator-login"),
}
#: Options that go with others or need more than a value, and the test that runs them.
ELSEWHERE: Final = {
    "--hugetlb": ("test_hugetlb.py", '"--hugetlb"'),
    "--tls-ca": ("../security/test_tls.py", '"--tls-ca"'),
    "--tls-cert": ("../security/test_tls.py", '"--tls-cert"'),
    "--tls-client-ca": ("../security/test_tls.py", '"--tls-client-ca"'),
    "--tls-key": ("../security/test_tls.py", '"--tls-key"'),
    "--tls-name": ("../security/test_tls.py", '"--tls-name"'),
}
#: ``simm local`` runs a manager of its own, and has the tests' process as its parent.
NOT_FOR: Final = {
    "local": {"--manager", "--end-with"}, "manager": set(), "dataserver": set(), "client": {"--end-with"},
}  # fmt: skip
_numbers = itertools.count()


def options_of(program: str) -> list[str]:
    """The options of a program by the table of settings, and those beside it."""
    roles = set(COMMANDS[program])
    flags = [setting.flag for setting in SETTINGS.values() if roles & set(setting.roles)]
    beside = ["--config", "--end-with"] + (["--join-timeout"] if program == "dataserver" else [])
    return [flag for flag in (*flags, *beside) if flag not in NOT_FOR[program]]


def cases(program: str) -> list[tuple[str, str]]:
    """(option, value) of each run of a program."""
    flags = [flag for flag in options_of(program) if flag not in {*ELSEWHERE, *chain(*BY_ETCD.values())}]
    return [(flag, value) for flag in flags for value in EXAMPLES.get(flag, ("?",))]


def words(flag: str, value: str, **names: object) -> list[str]:
    """The words of an option on the command line."""
    assert flag in EXAMPLES, f"{flag} needs an example in EXAMPLES, or a test that ELSEWHERE names"
    if SETTINGS.get(flag[2:].replace("-", "_")) and SETTINGS[flag[2:].replace("-", "_")].is_switch:
        return [f"--no-{flag[2:]}" if value else flag]
    return [flag, value.format(**names)]


def right(manager: str, *, paths: tuple[str, ...], token: str = "") -> int:
    """How many of KEYS values were stored and read back right, of each path."""
    count = 0
    for path in paths:
        with Client(manager, path=path, deadline_s=20.0, token=token) as client:
            assert client.wait_ready(20.0), f"a worker is reached by {path}"
            for number in range(KEYS):
                value = f"{path} {number}".encode() * (1 << number % 12)
                count += client.put(f"{path}{number}", value) and client.get(f"{path}{number}") == value
    return count


class Workshop:
    """A folder with what the examples name, and servers in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"{HERE}o{next(_numbers)}"
        self.servers = contextlib.ExitStack()
        (folder / "settings.json").write_text(json.dumps({"log_level": "warning", "dataserver": {"streams": 2}}))
        (folder / "token").write_text(TOKEN)
        (folder / "token").chmod(0o600)

    def names(self, **more: object) -> dict[str, object]:
        group = os.getegid()
        return {
            "folder": self.folder, "name": self.name, "pid": os.getpid(), "port": reserve_port(), "group": group,
            "uid": os.geteuid(), **more,
        }  # fmt: skip

    def manager(self, *more: str) -> str:
        """Start a manager; its address."""
        server = ServerProcess("manager", self.folder, "--listen", "127.0.0.1:0", *more)
        self.servers.enter_context(server)
        return server.address

    def dataserver(self, manager: str, *more: str) -> None:
        """Start a data server."""
        self.servers.enter_context(ServerProcess(
            "dataserver", self.folder, "--listen", "127.0.0.1:0", "--manager", manager, "--memory", "32M", "--numa",
            "0", "--name", self.name, "--runtime-dir", str(self.folder / "run"), *more,
        ))  # fmt: skip

    def close(self) -> None:
        self.servers.close()
        for name in (self.name, f"{self.name}-named"):
            remove_left_by(name)


@pytest.fixture
def workshop(tmp_path: Path, nothing_is_left: Path) -> Iterator[Workshop]:
    with contextlib.closing(Workshop(tmp_path)) as made:
        yield made


@pytest.fixture(scope="module")
def manager(nothing_is_left: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One manager for all data servers, one after the other."""
    with contextlib.closing(Workshop(tmp_path_factory.mktemp("manager"))) as made:
        yield made.manager("--restart-grace-ms", "0")  # nobody waits for the server that had --warm


def ids(case: tuple[str, str]) -> str:
    return "=".join(filter(None, case))


# -- nothing is forgotten --------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_option_is_run(program: str) -> None:
    """The options that ``--help`` lists are those that are run below, and each example is of an option."""
    text = subprocess.run(
        [sys.executable, "-m", "simm", PROGRAMS[program] or program, "--help"],
        env=child_environment(COLUMNS="200"), capture_output=True, text=True, timeout=WAIT_S, check=True,
    ).stdout  # fmt: skip
    listed = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.M)) - {"--help"}
    assert listed == set(options_of(program)) | (NOT_FOR[program] & listed)
    assert set(options_of(program)) <= {*EXAMPLES, *ELSEWHERE, *chain(*BY_ETCD.values())}
    assert set(EXAMPLES) <= {flag for each in PROGRAMS for flag in options_of(each)}


def test_the_other_options_have_tests() -> None:
    for flag, (file, text) in ELSEWHERE.items():
        assert text in (Path(__file__).parent / file).read_text(), flag


# -- the programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("dataserver"), ids=ids)
def test_a_data_server_with(case: tuple[str, str], workshop: Workshop, manager: str) -> None:
    flag, value = case
    if flag == "--token-file":  # a server with a token refuses a manager without one
        manager = workshop.manager("--token-file", str(workshop.folder / "token"))
    workshop.dataserver(manager, *words(flag, value, manager=manager, **workshop.names()))
    paths = ("shm",) if case == ("--streams", "0") else ("shm", "tcp")
    token = TOKEN if flag == "--token-file" else ""
    assert right(manager, paths=paths, token=token) == KEYS * len(paths)


@pytest.mark.parametrize("case", cases("manager"), ids=ids)
def test_a_manager_with(case: tuple[str, str], workshop: Workshop) -> None:
    flag, value = case
    token = ["--token-file", str(workshop.folder / "token")] if flag == "--token-file" else []
    with contextlib.ExitStack() as stack:
        names = workshop.names()
        if flag == "--coordinator":
            if PROGRAM is None:
                pytest.skip(MISSING)
            names["etcd"] = stack.enter_context(EtcdServer(new_folder())).url
        stack.callback(workshop.servers.close)  # before etcd
        address = workshop.manager(*words(flag, value, **names))
        workshop.dataserver(address, *token)
        assert right(address, paths=("shm",), token=TOKEN if token else "") == KEYS


def etcd_of(kind: str, stack: contextlib.ExitStack, folder: Path) -> tuple[str, dict[str, str]]:
    """Start an etcd with TLS or with users; its URL, and the options of a manager that it takes."""
    given = {"--coordinator-ttl-ms": "5000"}
    if kind == "tls":
        authority = Authority(folder)
        both = authority.issue("etcd")
        given |= {"--coordinator-ca": str(authority.ca), "--coordinator-cert": str(both)}
        flags = [f"--cert-file={both}", f"--key-file={both}", f"--trusted-ca-file={authority.ca}"]
        server = stack.enter_context(EtcdServer(new_folder(), *flags, "--client-cert-auth", scheme="https"))
        return server.url, given
    server = stack.enter_context(EtcdServer(new_folder()))
    server.enable_users("root", "the password of root")
    (folder / "login").write_text("root:the password of root\n")
    (folder / "login").chmod(0o600)
    return server.url, {**given, "--coordinator-login": str(folder / "login")}


@needs_openssl
@pytest.mark.parametrize("kind", BY_ETCD)
def test_a_manager_by_an_etcd_with(kind: str, workshop: Workshop) -> None:
    if PROGRAM is None:
        pytest.skip(MISSING)
    with contextlib.ExitStack() as stack:
        url, given = etcd_of(kind, stack, workshop.folder)
        assert tuple(given) == BY_ETCD[kind]
        stack.callback(workshop.servers.close)  # before etcd
        address = workshop.manager("--coordinator", f"{url}/options", *chain(*given.items()))
        workshop.dataserver(address)
        assert right(address, paths=("shm",)) == KEYS


@pytest.mark.parametrize("negated", [False, True], ids=["switches on", "switches off"])
def test_a_local_cluster_with_all(negated: bool, workshop: Workshop) -> None:
    """Each option goes on to the servers that have it. Where there are several values this takes one of them."""
    names = workshop.names(manager="")
    given = ["--listen", "127.0.0.1:0", "--memory", "32M"]
    # --allow-uid goes without a token; --slots and --value-size say the same.
    left_out = {"--listen", "--coordinator", "--allow-uid", "--slots" if negated else "--value-size"}
    left_out |= {*ELSEWHERE, *chain(*BY_ETCD.values())}
    for flag in options_of("local"):
        if flag not in left_out:
            names["port"] = reserve_port()
            given += words(flag, EXAMPLES[flag][-1 if negated else 0], **names)
    with Child(
        [sys.executable, "-m", "simm", "local", *given], name="simm local", log=workshop.folder / "local.log"
    ) as local:
        address = local.expect("READY local ").split()[2]
        paths = ("shm", "tcp") if negated else ("shm",)
        assert right(address, paths=paths, token=TOKEN) == KEYS * len(paths)
        local.end()


# -- clients ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(nothing_is_left: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Workshop, str]]:
    """Servers that want a token, for all clients, and the manager's address."""
    with contextlib.closing(Workshop(tmp_path_factory.mktemp("guarded"))) as made:
        token = ["--token-file", str(made.folder / "token")]
        address = made.manager(*token)
        made.dataserver(address, *token)
        assert right(address, paths=("shm", "tcp"), token=TOKEN) == 2 * KEYS
        yield made, address


@pytest.mark.parametrize("case", cases("client"), ids=ids)
def test_a_client_with(
    case: tuple[str, str], guarded: tuple[Workshop, str], tmp_path: Path, logging_as_it_was: None
) -> None:
    """``simm put``, ``get``, ``exists`` and ``delete`` of a value."""
    flag, value = case
    workshop, address = guarded
    names = workshop.names(manager=address)
    given = ["--manager", address, "--token-file", str(workshop.folder / "token"), "--deadline-ms", "60s"]
    given += words(flag, value, **names)
    stored, back = tmp_path / "stored", tmp_path / "back"
    stored.write_bytes(f"{flag} {value}".encode() * 1000)
    assert cli.main(["put", "key", str(stored), *given]) == 0
    assert cli.main(["get", "key", "-o", str(back), *given]) == 0
    assert back.read_bytes() == stored.read_bytes()
    assert cli.main(["exists", "key", *given]) == 0
    assert cli.main(["delete", "key", *given]) == 0
    assert cli.main(["exists", "key", *given]) == 1
