"""The units in deploy/systemd: that systemd takes them, name what exists, and keep what they are for."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simm.config.settings import CLIENT, MANAGER, SERVER, SETTINGS
from simm.tools import events, index
from tests.support.child import ROOT

FOLDER = ROOT / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
PYTHON = "/opt/simm/bin/python"


def unit(path: Path) -> configparser.SectionProxy:
    """Return the part [Service] of a unit."""
    parser = configparser.ConfigParser(strict=False, interpolation=None, comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(path)
    return parser["Service"]


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


def test_a_restart_keeps_the_values() -> None:
    service = unit(FOLDER / "simm-dataserver@.service")
    assert service["Environment"] == "SIMM_WARM=1"
    assert service["RuntimeDirectoryPreserve"] == "restart", "engines' containers have the folder mounted"
    assert service["RemoveIPC"] == "no" and "DynamicUser" not in service


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_the_settings_exist(path: Path) -> None:
    role = {"simm-manager": MANAGER, "simm-dataserver@": SERVER}.get(path.stem, CLIENT)
    known = {setting.env for setting in SETTINGS.values() if role in setting.roles} | {"SIMM_CONFIG", "SIMM_SERVER_UID"}
    known |= {"SIMM_EVENTS"} if path.stem == "simm-events" else set()  # of the data servers, as it says
    named = set(re.findall(r"SIMM_[A-Z_]+[A-Z]", path.read_text()))
    assert named and named <= known, named - known
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


def test_cleaners_keep_off() -> None:
    kept = re.findall(r"^x (\S+)$", (FOLDER / "simm.tmpfiles.conf").read_text(), re.MULTILINE)
    assert kept == ["/dev/shm/simm-*", "/tmp/simm-*"]
