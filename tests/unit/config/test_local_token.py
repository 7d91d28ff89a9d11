"""The token of a local cluster: where its user's clients find it, and when they do not."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from simm.config.client_options import ClientOptions
from simm.config.local_token import PublishedToken, find, find_sockets, token_path
from simm.config.parsers import Address

TOKEN = "a-token-of-sixteen-bytes-or-more"
HERE = Address("127.0.0.1", 30001)


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


def test_a_listener_on_all_addresses_is_found_on_loopback(tmp_path: Path) -> None:
    for host, reached in (("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("localhost", "127.0.0.1")):
        made = PublishedToken(tmp_path, Address(host, 1), TOKEN)
        assert find(tmp_path, [Address(reached, 1)]) == TOKEN
        made.close()


def test_a_killed_process_has_published_nothing(tmp_path: Path) -> None:
    """Another server may have the port by now, and a token that it does not know would keep clients from it."""
    pid = os.fork()
    if not pid:
        PublishedToken(tmp_path, HERE, TOKEN)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert token_path(tmp_path, HERE).read_text().endswith(TOKEN + "\n")
    assert find(tmp_path, [HERE]) == ""
    made = PublishedToken(tmp_path, Address("127.0.0.1", 30002), TOKEN)  # of any other cluster
    assert [path.name for path in tmp_path.iterdir()] == ["local-127.0.0.1-30002.token"]
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
