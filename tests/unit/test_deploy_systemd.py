"""The units in deploy/systemd: that systemd takes them, name what exists, and keep what they are for."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from simm.config.settings import CLIENT, MANAGER, SERVER, SETTINGS, load
from simm.config.startup import read_tokens
from simm.errors import ConfigError
from simm.tools import events, index
from tests.support.child import ROOT
from tests.support.other_user import GID, UID, needs_root, run_as

FOLDER = ROOT / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
PYTHON = "/opt/simm/bin/python"
READ_TOKENS = """
from pathlib import Path
from simm.config.startup import read_tokens
try:
    print(len(read_tokens(Path(sys.argv[1]))))
except simm.errors.ConfigError as exc:
    print(exc)
"""


def unit(path: Path, part: str = "Service") -> configparser.SectionProxy:
    """Return a part of a unit."""
    parser = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(path)
    return parser[part]


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def verified(path: Path, folder: Path, *changes: tuple[str, str]) -> str:
    """Return what systemd-analyze finds wrong with a unit, with this Python in place of the installed one."""
    text = path.read_text().replace(PYTHON, sys.executable)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    copy = folder / path.name.replace("@", "@main")
    copy.write_text(text)
    # Without a bus, and without the user's own units.
    environment = {"PATH": os.environ["PATH"], "SYSTEMD_LOG_LEVEL": "warning"}
    done = subprocess.run(
        [tool("systemd-analyze"), "verify", "--man=no", str(copy)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if copy.name in line or "simm" in line]
    return "\n".join(lines) or ("" if done.returncode == 0 else done.stderr)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_takes_the_unit(path: Path, tmp_path: Path) -> None:
    assert verified(path, tmp_path) == ""


def test_mutation_a_misspelled_unit(tmp_path: Path) -> None:
    assert "WatchDogSecs" in verified(UNITS[0], tmp_path, ("WatchdogSec=", "WatchDogSecs="))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_the_unit_waits_until_it_serves_and_watches_it(path: Path) -> None:
    service = unit(path)
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    assert int(service["WatchdogSec"]) >= 30, "a busy machine is no hang"
    assert service["ExecReload"] == "kill -HUP $MAINPID", "rotates logs"
    assert service["LimitCORE"] == "0", "a core file has tokens in it"
    assert service["Restart"] == "on-failure" and service["RestartPreventExitStatus"] == "2"
    assert unit(path, "Unit")["StartLimitIntervalSec"] == "0", "five failed starts in 10 s would be the last"
    assert "nss-user-lookup.target" in unit(path, "Unit")["After"].split(), "it has names of users in its settings"


def test_a_restart_keeps_the_values() -> None:
    service = unit(FOLDER / "simm-dataserver@.service")
    assert service["Environment"] == "SIMM_WARM=1"
    assert service["RuntimeDirectoryPreserve"] == "yes", "engines' containers have the folder mounted"
    assert service["RemoveIPC"] == "no" and "DynamicUser" not in service


def example(path: Path) -> dict[str, str]:
    """Return the settings that a unit has as an example, as systemd reads them: all behind = is the value."""
    lines = re.findall(r"^#   (.*)$", path.read_text(), re.MULTILINE)
    found = [line.strip().partition("=") for line in lines if re.match(r"[A-Z_]+=", line)]  # no comment, no command
    return {name: value.strip() for name, _, value in found}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_the_settings_exist(path: Path) -> None:
    role = {"simm-manager": MANAGER, "simm-dataserver@": SERVER}.get(path.stem, CLIENT)
    known = {setting.env for setting in SETTINGS.values() if role in setting.roles} | {"SIMM_CONFIG", "SIMM_SERVER_UID"}
    known |= {"SIMM_EVENTS"} if path.stem == "simm-events" else set()  # of the data servers, as it says
    named = set(re.findall(r"SIMM_[A-Z_]+[A-Z]", path.read_text()))
    assert named and named <= known, named - known
    shown = {name: value for name, value in example(path).items() if name.startswith("SIMM_")}
    assert bool(shown) == (path.stem in ("simm-dataserver@", "simm-index"))
    command_of = {MANAGER: "manager", SERVER: "dataserver", CLIENT: "client"}[role]
    load(command_of, {}, shown)
    for name, value in shown.items():
        assert "#" not in value and not value.startswith(("'", '"')), f"{name}: to systemd this is part of the value"
    if shown:  # positive control: what it said before
        with pytest.raises(ConfigError, match="30001  # "):
            load(command_of, {}, {**shown, "SIMM_MANAGER": f"{shown['SIMM_MANAGER']}  # the manager"})
    command = unit(path)["ExecStart"].split()
    if role == CLIENT:
        assert command[:3] == [PYTHON, "-m", "simm"] and command[3] == path.stem.partition("-")[2]
        # The flags in the comments, and those that it has without a file.
        found = re.findall(r"^(?:#   |Environment=\")(?:EVENTS|INDEX)=(.*?)\"?$", path.read_text(), re.MULTILINE)
        assert command[4:] in (["$EVENTS"], ["$INDEX"]) and found
        for flags in found:
            (events if command[3] == "events" else index)._parser("simm").parse_args(flags.split())
        return
    assert command[:2] == [PYTHON, "-m"] and (ROOT / f"{command[2].replace('.', '/')}.py").exists()
    flags = {word for word in command if word.startswith("--")}
    assert flags <= {setting.flag for setting in SETTINGS.values() if role in setting.roles}


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_the_unit_is_hardened(path: Path) -> None:
    """Each of them. What a publisher or a caller could make the commands of the index use is bounded, too."""
    service = unit(path)
    for name in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "ProtectKernelModules", "RestrictNamespaces",
                 "RestrictSUIDSGID", "LockPersonality", "RestrictRealtime", "ProtectControlGroups"):  # fmt: skip
        assert service[name] == "yes", name
    assert service["CapabilityBoundingSet"] == "" and service["ProtectSystem"] == "strict"
    assert service["SystemCallArchitectures"] == "native" and "SystemCallFilter" in service
    if path.stem in ("simm-events", "simm-index"):
        assert service["RemoveIPC"] == "no", "the arenas are this user's"
        assert "MemoryMax" in service and "PrivateIPC" not in service


def test_the_user_is_made_and_the_folders_are(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for name in ("systemd-sysusers", "systemd-tmpfiles"):
        tool(name)
    for words in (["systemd-sysusers"], ["systemd-tmpfiles", "--create"]):
        name = f"simm.{words[0].partition('-')[2]}.conf"
        # What a container's kernel refuses of these (a group for a folder) is not what is tested.
        subprocess.run([*words, f"--root={tmp_path}", str(FOLDER / name)], check=False, capture_output=True)
    users = {line.split(":")[0]: line.split(":") for line in (tmp_path / "etc" / "passwd").read_text().splitlines()}
    assert {unit(path)["User"] for path in UNITS} == set(users) == {"simm"}
    assert int(users["simm"][2]) < 1000, "logind removes the /dev/shm files of others"
    assert (tmp_path / "etc" / "simm").stat().st_mode & 0o777 == 0o750


@needs_root
def test_issue_the_units_can_read_the_token_that_the_page_makes() -> None:
    """The command's file was root's alone. Who is in the units' group reads it, and nobody else."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (command,) = re.findall(r"^.*openssl rand -hex 32 > /etc/simm/token.*$", page, re.MULTILINE)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # others may not enter pytest's
        os.chmod(folder, 0o755)
        token = Path(folder, "token")
        here = command.replace("/etc/simm/token", str(token)).replace("chgrp simm", f"chgrp {GID}")
        subprocess.run(["bash", "-c", here], check=True)
        assert len(read_tokens(token)) == 1

        def said(group: int | None) -> str:
            modules = ["encodings.utf_8_sig", "grp", "pwd", "simm.errors"]
            return run_as(READ_TOKENS, str(token), group=group, modules=modules)

        assert said(GID) == "1\n"
        refused = said(None)
        assert f"it is of root:{GID}, mode 0640, and this process is user {UID} (uid {UID}) of group {UID}" in refused
        token.chmod(0o600)
        assert "mode 0600" in said(GID), "what the page said before"


def test_cleaners_keep_off() -> None:
    kept = re.findall(r"^x (\S+)$", (FOLDER / "simm.tmpfiles.conf").read_text(), re.MULTILINE)
    assert kept == ["/dev/shm/simm-*", "/tmp/simm-*"]
