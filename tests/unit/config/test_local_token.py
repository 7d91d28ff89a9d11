"""The token of a local cluster: where its user's clients find it, and when they do not."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from simm.config import local_token
from simm.config.client_options import ClientOptions
from simm.config.local_token import PublishedToken, find, find_sockets, token_path
from simm.config.parsers import Address
from tests.support.segments import child, status_of

TOKEN = "a-token-of-sixteen-bytes-or-more"
HERE = Address("127.0.0.1", 30001)


def killed(folder: Path) -> Path:
    """Leave the token of a process that was killed."""

    def dies() -> None:
        PublishedToken(folder, HERE, TOKEN)
        os.kill(os.getpid(), signal.SIGKILL)

    assert status_of(child(dies)) == -signal.SIGKILL
    return token_path(folder, HERE)


def test_it_is_found_while_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMM_RUNTIME_DIR", str(tmp_path))
    made = PublishedToken(tmp_path, HERE, TOKEN)
    assert made.path.stat().st_mode & 0o777 == 0o600
    for manager in ("127.0.0.1:30001", "localhost:30001", "10.0.0.1:1,localhost:30001"):
        assert ClientOptions.resolve(manager=manager).token == TOKEN
    for manager in ("127.0.0.1:30002", "10.0.0.1:30001", "[::1]:30001"):
        assert ClientOptions.resolve(manager=manager).token == ""
    assert ClientOptions.resolve(manager="127.0.0.1:30001", token="").token == ""
    with pytest.raises(OSError, match="exists"):
        PublishedToken(tmp_path, HERE, "another one's")
    made.close()
    made.close()
    assert find(tmp_path, [HERE]) == "" and not list(tmp_path.iterdir())


def test_the_folder_of_its_sockets_is_found_with_it(tmp_path: Path) -> None:
    sockets = tmp_path / "a folder" / "run"
    made = PublishedToken(tmp_path, HERE, TOKEN, sockets)
    assert find(tmp_path, [HERE]) == TOKEN and find_sockets(tmp_path, [HERE]) == sockets
    assert find_sockets(tmp_path, [Address("127.0.0.1", 30002)]) is None
    made.close()
    assert find_sockets(tmp_path, [HERE]) is None
    for folder in (None, Path("two\nlines")):  # as an older cluster, or what no line can hold
        made = PublishedToken(tmp_path, HERE, TOKEN, folder)
        assert find(tmp_path, [HERE]) == TOKEN and find_sockets(tmp_path, [HERE]) is None
        made.close()


def test_issue_a_cluster_without_a_token_of_its_own_is_found_too(tmp_path: Path) -> None:
    """Its sockets were not: commands for it took those of another cluster."""
    sockets = tmp_path / "run"
    made = PublishedToken(tmp_path, HERE, "", sockets)
    assert find_sockets(tmp_path, [HERE]) == sockets and find(tmp_path, [HERE]) == ""
    made.close()


def test_a_listener_on_all_addresses_is_found_on_loopback(tmp_path: Path) -> None:
    for host, reached in (("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("localhost", "127.0.0.1")):
        made = PublishedToken(tmp_path, Address(host, 1), TOKEN)
        assert find(tmp_path, [Address(reached, 1)]) == TOKEN
        made.close()


def test_a_killed_process_has_published_nothing(tmp_path: Path) -> None:
    """Another server may have the port by now, and a token that it does not know would keep clients from it."""
    assert killed(tmp_path).read_text().endswith(TOKEN + "\n")
    assert find(tmp_path, [HERE]) == ""
    made = PublishedToken(tmp_path, Address("127.0.0.1", 30002), TOKEN)  # of any other cluster
    assert [path.name for path in tmp_path.iterdir()] == ["local-127.0.0.1-30002.token"]
    made.close()


class Meanwhile:
    """Does something before a file is locked in this way for the first time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], operation: int) -> None:
        self._real = fcntl.flock
        self._operation = operation
        self._act: Callable[[], object] | None = act
        monkeypatch.setattr(fcntl, "flock", self._flock)

    def _flock(self, fd: int, operation: int) -> None:
        act = self._act
        if operation == self._operation and act is not None:
            self._act = None
            act()
        self._real(fd, operation)


def test_a_token_that_is_being_published_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is not locked yet when another cluster of this user starts, and looks like one that was left."""
    there, made = Address("127.0.0.1", 30002), []
    Meanwhile(monkeypatch, lambda: made.append(PublishedToken(tmp_path, there, "the-token-of-another")), fcntl.LOCK_EX)
    made.append(PublishedToken(tmp_path, HERE, TOKEN))
    assert find(tmp_path, [HERE]) == TOKEN and find(tmp_path, [there]) == "the-token-of-another"
    for each in made:
        each.close()
    assert not list(tmp_path.iterdir())


def test_one_that_is_always_swept_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda _fd, _operation: token_path(tmp_path, HERE).unlink(missing_ok=True))
    with pytest.raises(OSError, match="again and again"):
        PublishedToken(tmp_path, HERE, TOKEN)


def test_of_two_that_sweep_none_removes_a_live_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first has removed what was left, and published its own by the same name, when the second has the lock."""
    killed(tmp_path)
    made: list[PublishedToken] = []
    Meanwhile(
        monkeypatch, lambda: made.append(PublishedToken(tmp_path, HERE, "the-token-of-the-first")),
        fcntl.LOCK_EX | fcntl.LOCK_NB,
    )  # fmt: skip
    made.append(PublishedToken(tmp_path, Address("127.0.0.1", 30002), TOKEN))
    assert find(tmp_path, [HERE]) == "the-token-of-the-first"
    for each in made:
        each.close()


def test_a_client_that_looks_keeps_nothing_from_being_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looking = os.open(killed(tmp_path), os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        fcntl.flock(looking, fcntl.LOCK_UN)

    monkeypatch.setattr(local_token.time, "sleep", sleep)
    made = PublishedToken(tmp_path, HERE, "the-token-of-the-next")
    os.close(looking)
    assert find(tmp_path, [HERE]) == "the-token-of-the-next" and len(waited) == 1
    made.close()


def test_the_lock_of_who_sweeps_makes_no_token_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client finds a file locked that is removed at the same moment: no server knows that token."""
    path = killed(tmp_path)
    sweeping = os.open(path, os.O_RDONLY)
    fcntl.flock(sweeping, fcntl.LOCK_EX)
    Meanwhile(monkeypatch, path.unlink, fcntl.LOCK_SH | fcntl.LOCK_NB)
    assert find(tmp_path, [HERE]) == ""
    os.close(sweeping)


@pytest.mark.parametrize("removed", [True, False], ids=["removed", "its process ended"])
def test_what_another_one_is_removing_is_in_no_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """It has the lock between its look and the removal, and counted as a live cluster at this address."""
    path = killed(tmp_path)
    sweeping = os.open(path, os.O_RDONLY)
    fcntl.flock(sweeping, fcntl.LOCK_EX)
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            if removed:
                path.unlink()
            fcntl.flock(sweeping, fcntl.LOCK_UN)

    monkeypatch.setattr(local_token.time, "sleep", sleep)
    made = PublishedToken(tmp_path, HERE, "the-token-of-the-next")
    os.close(sweeping)
    assert find(tmp_path, [HERE]) == "the-token-of-the-next" and len(waited) == 3
    made.close()


@pytest.mark.parametrize("what", ["for all", "link", "fifo", "folder", "binary"])
def test_a_file_that_others_may_have_made_is_not_used(tmp_path: Path, what: str) -> None:
    path = token_path(tmp_path, HERE)
    made = PublishedToken(tmp_path, HERE, TOKEN)
    assert find(tmp_path, [HERE]) == TOKEN
    if what == "for all":
        path.chmod(0o640)
    elif what == "binary":
        path.write_bytes(b"\xff\xfe")
    else:
        other = tmp_path / "other"
        path.rename(other)
        {"link": lambda: path.symlink_to(other), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[what]()
    assert find(tmp_path, [HERE]) == ""
    made.close()
