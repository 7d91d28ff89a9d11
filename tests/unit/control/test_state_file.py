"""The state file's folder may hold what an operator, or somebody else, has put there."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from simm.control.state_file import StateFile
from simm.errors import ConfigError


def test_issue_the_lock_follows_no_link(tmp_path: Path) -> None:
    """It did, and truncated the file behind it."""
    precious = tmp_path / "precious"
    precious.write_text("of the operator")
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "manager.lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="state-dir"):
        StateFile(folder, "manager")
    assert precious.read_text() == "of the operator"


def test_issue_a_new_state_follows_no_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("of the operator")
    folder = tmp_path / "state"
    with contextlib.closing(StateFile(folder, "manager")) as file:
        (folder / "manager.tmp").symlink_to(precious)
        with pytest.raises(OSError, match="symbolic links"):
            file.save({"epoch": 1})
        assert precious.read_text() == "of the operator"
        file.save({"epoch": 1})  # the link has been removed
        assert file.load() == {"epoch": 1}
