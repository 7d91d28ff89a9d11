"""Lock files: who has one, and what somebody else may have put at their path."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from simm.host.file_locks import LockFile


def test_one_has_it_until_it_is_released(tmp_path: Path) -> None:
    path = str(tmp_path / "a.lock")
    first = LockFile.take(path)
    assert first is not None and first.held
    assert LockFile.take(path) is None
    first.release()
    first.release()
    assert not os.path.exists(path)
    again = LockFile.take(path)
    assert again is not None
    os.unlink(path)
    assert not again.held, "another process may have a lock there now"
    other = LockFile.take(path)
    assert other is not None
    again.release()
    assert other.held and LockFile.take(path) is None, "it is not removed by who has lost it"
    other.release()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """The pid would overwrite what is behind it."""
    precious = tmp_path / "precious"
    precious.write_text("of the operator")
    (tmp_path / "a.lock").symlink_to(precious)
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        LockFile.take(str(tmp_path / "a.lock"))
    assert precious.read_text() == "of the operator"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_no_lock(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A pipe would hold up whoever opens it."""
    make(tmp_path / "a.lock")
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        LockFile.take(str(tmp_path / "a.lock"))
