"""deploy/kubernetes/Dockerfile: pinned, without root, and built from nothing but what .dockerignore lets through."""

from __future__ import annotations

import configparser
import json
import re
import subprocess
from typing import Any, Final

import yaml

from tests.support.child import ROOT

FOLDER: Final = ROOT / "deploy" / "kubernetes"
#: Instructions of the Dockerfile with their arguments, continued lines in one.
INSTRUCTIONS: Final = [
    tuple(line.split(None, 1))
    for line in re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", (FOLDER / "Dockerfile").read_text())).splitlines()
    if line.strip()
]


def arguments(instruction: str) -> list[str]:
    return [found[1] for found in INSTRUCTIONS if found[0] == instruction]


def ignored(path: str, rules: list[str]) -> bool:
    """Whether docker leaves a path out: the last rule counts that fits it or a folder above it."""
    out = False
    parts = path.split("/")
    for rule in rules:
        pattern = re.escape(rule.lstrip("!")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, "/".join(parts[: n + 1])) for n in range(len(parts))):
            out = not rule.startswith("!")
    return out


def rules() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:  # no checkout
        return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    return [name for name in done.stdout.split("\0") if name]


def copied() -> set[str]:
    """Return the sources of the instructions that copy out of the build's context."""
    return {word for each in arguments("COPY") if not each.startswith("--from=") for word in each.split()[:-1]}


def test_the_base_and_all_packages_are_pinned() -> None:
    (base,) = arguments("ARG")
    assert re.fullmatch(r"BASE=debian:bookworm-\d{8}-slim@sha256:[0-9a-f]{64}", base)
    assert {each.split()[0] for each in arguments("FROM")} == {"${BASE}"}
    text = re.sub(r"(?m)^#.*\n", "", (FOLDER / "requirements.txt").read_text()).replace("\\\n", "")
    pins = {}
    for line in text.splitlines():
        name, version, *hashes = line.replace("==", " ").split()
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), line
        pins[name] = tuple(map(int, version.split(".")))
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = [*setup["options"]["install_requires"].split(), *setup["options.extras_require"]["index"].split()]
    for line in wanted:
        name, least = line.split(">=")
        assert pins[name] >= tuple(map(int, least.split("."))), name
    assert set(pins) == {line.split(">=")[0] for line in wanted} | {"setuptools"}
    installs = [each for each in " ".join(arguments("RUN")).split("&&") if "pip install" in each]
    assert all("--require-hashes" in each or "--no-deps --no-build-isolation" in each for each in installs)


def test_it_starts_as_the_manifests_start_it() -> None:
    """The same user, by number, as ``runAsNonRoot`` asks for; the entry point with a command of theirs; their ports."""
    assert INSTRUCTIONS.index(("USER", arguments("USER")[0])) > max(
        number for number, each in enumerate(INSTRUCTIONS) if each[0] == "RUN"
    )
    documents: list[dict[str, Any]] = [each for each in yaml.safe_load_all((FOLDER / "simm.yaml").read_text()) if each]
    pods = [each["spec"]["template"]["spec"] for each in documents if "template" in each["spec"]]
    assert len(pods) == 2
    exposed = set(arguments("EXPOSE")[0].split())
    for pod in pods:
        context = pod["securityContext"]
        assert arguments("USER") == [f"{context['runAsUser']}:{context['runAsGroup']}"]
        (container,) = pod["containers"]
        listen = next(each["value"] for each in container["env"] if each["name"] == "SIMM_LISTEN")
        assert listen.rpartition(":")[2] in exposed
    assert json.loads(arguments("ENTRYPOINT")[0]) == ["/opt/simm/bin/simm"]
    script = configparser.ConfigParser()
    script.read(ROOT / "setup.cfg")
    assert "simm = simm.cli:main" in script["options.entry_points"]["console_scripts"].splitlines()


def test_nothing_but_the_package_gets_into_the_image() -> None:
    names = tracked()
    let_in = {name for name in names if not ignored(name, rules())}
    needed = {name for name in names if any(name == each or name.startswith(f"{each}/") for each in copied())}
    assert let_in == needed and {"simm/cli.py", "setup.py"} <= let_in
    for stray in (
        ".git/config",
        ".venv-test/bin/python",
        "token",
        "tests/conftest.py",
        "simm/__pycache__/cli.pyc",
        "x.env",
    ):
        assert ignored(stray, rules()), stray
    # Positive control: without its first rule all would get in.
    assert not ignored(".git/config", rules()[1:])
