"""Processes of the engine tests: the engine environment, a SiMM cluster, and the driver that is let loose on it.

The pytest process has neither torch nor SGLang. It starts manager and data server under its own
interpreter, as an operator would, and the driver under the engine environment's, and it reads what the
driver says about itself.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support.child import Child
from tests.support.server_process import ServerProcess

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

#: Upper bounds for things that hang, in seconds; none of them is a speed limit. A driver takes up to a minute of
#: processor time, and beside two whole suites and busy loops some twenty times as long.
BUILD_S = 1800.0
DRIVER_S = 3600.0
STOP_S = 30.0
#: The deadline of clients in drivers, unless a case has its own: a busy machine makes no call late.
PATIENT_MS = 60_000

#: For vLLM. Without the compiler, which compiles small functions even in eager mode: that takes longer than the rest.
VLLM = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}


_numbers = itertools.count()


class Unavailable(Exception):
    """The engine environment cannot be had here; the text is the reason to show for the skip."""


def engine_python(*options: str) -> str:
    """The python that an engine is installed for, built first if need be (minutes, once); see ``scripts/engine-env``.

    Raises Unavailable where it cannot be had or is switched off, RuntimeError where building it broke.
    """
    if os.environ.get("SIMM_ENGINES") == "0":
        raise Unavailable("SIMM_ENGINES=0")
    without = os.environ.get("SIMM_ENGINE_WITHOUT", "")
    if set(without.split()) & set(options):
        raise Unavailable(f"SIMM_ENGINE_WITHOUT={without}")
    command = [str(ROOT / "scripts" / "engine-env"), *options]
    try:
        built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"scripts/engine-env did not finish in {BUILD_S:.0f} s") from None
    if built.returncode == 3:
        raise Unavailable(built.stderr.strip().splitlines()[-1])
    if built.returncode != 0:
        raise RuntimeError(f"scripts/engine-env failed with {built.returncode}: {built.stderr[-2000:]}")
    return built.stdout.strip().splitlines()[-1]


def tail(path: Path, count: int = 4000) -> str:
    return path.read_text(errors="replace")[-count:] if path.exists() else ""


@dataclass
class Cluster:
    manager: ServerProcess
    data: ServerProcess
    others: tuple[ServerProcess, ...] = ()
    #: What the names of its data servers begin with, and of no other cluster's on this host.
    names: str = ""

    @property
    def servers(self) -> tuple[ServerProcess, ...]:
        return self.manager, self.data, *self.others

    @property
    def address(self) -> str:
        """The manager's "ip:port"."""
        return self.manager.address

    def logs(self) -> str:
        return "\n".join(f"--- {s.name}\n{tail(s.log)}" for s in self.servers)


@contextmanager
def cluster(folder: Path, memory: str = "1G", servers: int = 1) -> Iterator[Cluster]:
    """A manager and data servers with ``memory`` each, in their own processes, stopped at the end."""
    with ExitStack() as stack:
        manager = stack.enter_context(ServerProcess("manager", folder, "--listen", "127.0.0.1:0"))
        data = []
        names = f"t{os.getpid()}-e{next(_numbers)}-"  # short: the path of a socket has 107 bytes at most
        for number in range(servers):
            name = f"engines{number or ''}"
            arguments = [
                "--numa", "0", "--manager", manager.address, "--memory", memory, "--listen", "127.0.0.1:0",
                "--name", f"{names}{number}", "--runtime-dir", str(folder / "run"),
            ]  # fmt: skip
            data.append(stack.enter_context(ServerProcess("dataserver", folder, *arguments, name=name)))
        yield Cluster(manager, data[0], tuple(data[1:]), names)


@dataclass
class DriverRun:
    """One driver process that has ended. ``report`` is its JSON line."""

    status: int
    report: dict[str, Any]
    stderr: str

    @property
    def said(self) -> str:
        """What SiMM said in it, the last lines."""
        return "\n".join([line for line in self.stderr.splitlines() if "simm" in line.lower()][-40:])


class Engine:
    """Starts drivers under the engine environment's python, in ``folder``."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python = python
        self.folder = folder
        self.varlog = folder / "var-log"
        self.varlog.mkdir()

    @cached_property
    def launcher(self) -> list[str]:
        """What to put before the command so that HiCacheSiMM can be built unmodified; [] where nothing can.

        The class needs /sys/class/infiniband (see ``with_infiniband``). Where that cannot be given to it, the
        driver finds out by itself, patches the one function that trips, and says so.
        """
        if os.path.isdir("/sys/class/infiniband") or os.geteuid() != 0:
            return []
        launcher = [str(HERE / "with_infiniband"), str(self.varlog)]
        try:
            probe = subprocess.run([*launcher, "true"], capture_output=True, timeout=STOP_S)
        except OSError:
            return []
        return launcher if probe.returncode == 0 else []

    def shipped_test_path(self) -> Path:
        """A folder in which ``python`` is a link to site-packages: test_simm.py imports python.sglang."""
        folder = self.folder / "python-package"
        if not folder.exists():
            ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
            done = subprocess.run([self.python, "-c", ask], capture_output=True, text=True, check=True, timeout=300)
            folder.mkdir()
            (folder / "python").symlink_to(done.stdout.strip())
        return folder

    def run(
        self, address: str, seed: int, steps: Sequence[dict[str, Any]], *, driver: str = "sglang_driver.py",
        as_expected: bool = True, module: str = "", installed: Path = ROOT, **environment: str,
    ) -> DriverRun:  # fmt: skip
        """One driver process over ``steps``. RuntimeError if it brings no report, with what it said.

        ``as_expected``: on a machine as SGLang's own backend expects one, see :attr:`launcher`. ``module``: one of
        SiMM's that runs commands, and runs the driver then. ``installed``: where the driver finds SiMM.
        """
        config = self.folder / "simm-config.json"
        config.write_text(json.dumps({"manager_address": address}))
        request = {"manager": address, "seed": seed, "steps": list(steps)}
        done = self._run(
            driver, request, (installed, ROOT, HERE / "shim", self.shipped_test_path()), module, as_expected,
            SGLANG_HICACHE_SIMM_CONFIG_PATH=str(config), **environment,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        try:
            # Exactly one line: a store that prints to stdout would be found here.
            (line,) = lines
            report = json.loads(line)
        except ValueError:
            raise RuntimeError(f"driver exit {done.returncode}, stdout {lines}\n{done.stderr[-4000:]}") from None
        return DriverRun(done.returncode, report, done.stderr)

    def run_whole(
        self, packages: str, weights: int, options: dict[str, Any], *, storage: int = 0, module: str = "",
        as_expected: bool = False, kind: str = "gpt2", layers: int = 2, **environment: str,
    ) -> dict[str, Any]:  # fmt: skip
        """The report of whole_driver.py on one engine. RuntimeError if it brings none, with what it said."""
        request = {
            "folder": str(self.folder), "weights": weights, "options": options, "storage": storage, "kind": kind,
            "layers": layers,
        }  # fmt: skip
        path = (ROOT, HERE / "plugin", HERE / "shim", Path(packages))
        done = self._run("whole_driver.py", request, path, module, as_expected, **environment)
        try:
            report: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise RuntimeError(f"engine exit {done.returncode}\n{done.stderr[-4000:]}") from None
        return {**report, "stderr": done.stderr}

    def run_victims(
        self, packages: str, steps: list[Any], options: dict[str, Any], *, manager: str, module: str = "",
        as_expected: bool = False, **environment: str,
    ) -> dict[str, Any]:  # fmt: skip
        """The report of victims_driver.py on one engine. RuntimeError if it brings none, with what it said."""
        request = {"folder": str(self.folder), "weights": 1, "options": options, "manager": manager, "steps": steps}
        path = (ROOT, HERE / "plugin", HERE / "shim", Path(packages))
        done = self._run("victims_driver.py", request, path, module, as_expected, **environment)
        try:
            report: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise RuntimeError(f"engine exit {done.returncode}\n{done.stderr[-4000:]}") from None
        return {**report, "stderr": done.stderr}

    def run_vllm(self, **request: Any) -> dict[str, Any]:
        """The report of vllm_whole_driver.py on one engine. RuntimeError if it brings none, with what it said."""
        environment, module = {**VLLM, **request.pop("environment", {})}, request.pop("module", "")
        done = self._run(
            "vllm_whole_driver.py", {"folder": str(self.folder), **request}, (ROOT, HERE / "shim"), module, False,
            **environment,
        )  # fmt: skip
        try:
            report: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise RuntimeError(f"engine exit {done.returncode}\n{done.stderr[-4000:]}") from None
        return {**report, "stderr": done.stderr}

    def start_publisher(self, packages: str, **request: Any) -> Child:
        """events_driver.py with its engine, which is told lines; ``packages`` are SGLang's."""
        path = (ROOT, HERE / "shim", *([Path(packages)] if packages else []))
        command = [self.python, str(HERE / "events_driver.py"), json.dumps({"folder": str(self.folder), **request})]
        return Child(
            command, name="events_driver.py", talks=True, log=self.folder / "events_driver.log",
            environment=self._environment(path, **({} if packages else VLLM)), folder=self.folder,
        )  # fmt: skip

    def _environment(self, path: Sequence[Path], **more: str) -> dict[str, str]:
        """The environment of a driver, with ``path`` as PYTHONPATH."""
        return {
            **os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "HOME": str(self.folder),
            "TMPDIR": str(self.folder), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
            "SIMM_DEADLINE_MS": str(PATIENT_MS), **more,
        }  # fmt: skip

    def _run(
        self, driver: str, request: dict[str, Any], path: Sequence[Path], module: str, as_expected: bool,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a driver to its end, with ``path`` as PYTHONPATH. RuntimeError if it does not end."""
        command = [self.python, str(HERE / driver), json.dumps(request)]
        if module:
            command = [self.python, "-m", module, "--", *command]
        if as_expected:
            command = [*self.launcher, *command]
        try:
            return subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                timeout=DRIVER_S, env=self._environment(path, **environment), cwd=self.folder,
            )  # fmt: skip
        except subprocess.TimeoutExpired as hung:
            said = (hung.stderr or b"")[-4000:]
            raise RuntimeError(f"{driver} still running after {DRIVER_S:.0f} s\n{said!r}") from None
