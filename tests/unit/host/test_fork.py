"""Fork hooks in real forks: who is called, in which order, and what a failing hook does to the others."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import simm
from simm.host import fork

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only a test's own hooks run in its children."""
    monkeypatch.setattr(fork, "_FUNCTIONS", [])
    monkeypatch.setattr(fork, "_METHODS", {})
    monkeypatch.setattr(fork, "_KEPT", {})
    yield


def said_by_child(body: Callable[[], str]) -> str:
    """Fork, and return what ``body`` returns in the child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writer, body().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


class Part:
    """An object with a hook."""

    def __init__(self, name: str, log: list[str], fails: bool = False) -> None:
        self.name, self.log, self.fails = name, log, fails
        fork.in_child(self._after_fork)

    def _after_fork(self) -> None:
        self.log.append(self.name)
        if self.fails:
            raise ValueError(self.name)


def test_functions_come_first_then_objects_newest_first() -> None:
    log: list[str] = []
    owner = Part("owner", log)
    fork.in_child(lambda: log.append("memory"))
    part = Part("part", log)
    fork.in_child(lambda: log.append("driver"))
    assert said_by_child(lambda: " ".join(log)) == "memory driver part owner"
    assert not log, "a hook ran in the parent"
    del owner, part


def test_a_subclass_hook_replaces_its_base() -> None:
    class Special(Part):
        def _after_fork(self) -> None:
            self.log.append("special")
            super()._after_fork()

    log: list[str] = []
    special = Special("base", log)
    assert said_by_child(lambda: " ".join(log)) == "special base"
    del special


def test_registration_keeps_no_object_alive_and_leaves_no_entry() -> None:
    log: list[str] = []
    parts = [Part(str(number), log) for number in range(100)]
    assert len(fork._METHODS) == 100
    del parts[1:]
    gc.collect()
    assert len(fork._METHODS) == 1
    assert said_by_child(lambda: " ".join(log)) == "0"


def test_a_failing_hook_does_not_stop_the_others() -> None:
    """The interpreter says what failed. An interpreter of its own, as pytest catches such reports."""
    script = (
        "import os\n"
        "from simm.host import fork\n"
        "log = []\n"
        "def bad(number):\n"
        "    log.append(number)\n"
        "    raise ValueError(f'hook {number}')\n"
        "for number in range(3):\n"
        "    fork.in_child(lambda number=number: bad(number))\n"
        "if not os.fork():\n"
        "    os._exit(0 if log == [0, 1, 2] else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for number in range(3):
        assert f"ValueError: hook {number}" in done.stderr


def test_nothing_is_collected_between_hooks() -> None:
    """A cycle of the parent's is finalised only after its own hook."""
    log: list[str] = []

    class Cyclic(Part):
        def __del__(self) -> None:
            self.log.append("finalised " + self.name)

    def collect() -> None:
        keep = [[number] for number in range(20_000)]  # enough to start a collection
        del keep

    fork.in_child(collect)
    gc.collect()
    gc.disable()
    try:
        cyclic = Cyclic("cycle", log)
        cyclic.me = cyclic  # type: ignore[attr-defined]
        del cyclic
        gc.enable()
        said = said_by_child(lambda: (gc.collect(), " ".join([*log, str(gc.isenabled())]))[1])
    finally:
        gc.enable()
    assert said == "cycle finalised cycle True"


def test_what_is_kept_is_never_finalised() -> None:
    class Loud:
        def __del__(self) -> None:
            os.write(2, b"finalised")

    one, other = Loud(), Loud()
    assert fork.keep_forever(one)
    assert not fork.keep_forever(one)
    assert fork.keep_forever(other)
    identity = {id(one), id(other)}
    del one, other
    gc.collect()
    assert set(fork._KEPT) == identity
    for kept in fork._KEPT.values():
        kept.__class__ = type("Quiet", (), {})  # or the fixture's end finalises them


def test_a_fork_waits_for_a_held_lock() -> None:
    """In a process of its own: the hook cannot be taken back."""
    script = (
        "import os, threading\n"
        "from simm.host import fork\n"
        "lock = threading.RLock()\n"
        "fork.hold(lock)\n"
        "inside, half = threading.Event(), []\n"
        "def change():\n"
        "    with lock:\n"
        "        half.append(1)\n"
        "        inside.set()\n"
        "        threading.Event().wait(0.2)\n"
        "        half.append(2)\n"
        "thread = threading.Thread(target=change)\n"
        "thread.start()\n"
        "inside.wait()\n"
        "if not os.fork():\n"
        "    os._exit(0 if half == [1, 2] and lock.acquire(blocking=False) else 1)\n"
        "thread.join()\n"
        "assert lock.acquire(blocking=False)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("where", ["copying", "unmapping"])
def test_an_interrupt_at_the_copies_for_a_child_leaves_no_lock_and_no_map(where: str) -> None:
    """In an interpreter of its own, which prints the interrupt and goes on."""
    script = (
        "import ctypes, os, sys, threading\n"
        "from simm.host import fork_copies, pages\n"
        "class Owner:\n"
        "    def lose(self):\n"
        "        pass\n"
        "owner = Owner()\n"
        "def lend():\n"
        "    fork_copies.lend(next(fork_copies.numbers), at, 4096, None, owner)\n"
        "def fork():\n"
        "    if not os.fork():\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "def once(owner, name):\n"
        "    real = getattr(owner, name)\n"
        "    def interrupted(*arguments):\n"
        "        setattr(owner, name, real)\n"
        "        real(*arguments)\n"
        "        raise KeyboardInterrupt\n"
        "    setattr(owner, name, interrupted)\n"
        "at = pages.map_anonymous(4096)\n"
        "lend()\n"
        "once(*((ctypes, 'memmove') if sys.argv[1] == 'copying' else (pages, 'unmap')))\n"
        "fork()\n"
        "assert not fork_copies._copies and not fork_copies._maps\n"
        "for call in (lend, fork):\n"
        "    thread = threading.Thread(target=call, daemon=True)\n"
        "    thread.start()\n"
        "    thread.join(60)\n"
        "    assert not thread.is_alive(), f'{call.__name__} in another thread'\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, where], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("KeyboardInterrupt") == 1, done.stderr


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=240, check=False
    )


#: Three ranges that are lent, far enough apart to be copied one by one, and a child that says which its owners lost.
_LENT = (
    "import ctypes, os, signal, sys, threading\n"
    "from simm.host import fork, fork_copies, pages\n"
    "class Owner:\n"
    "    def __init__(self, number):\n"
    "        self.number = number\n"
    "    def lose(self):\n"
    "        lost.append(self.number)\n"
    "lost = []\n"
    "at = pages.map_anonymous(5 * 4096)\n"
    "ctypes.memset(at, 7, 5 * 4096)\n"
    "owners = [Owner(number) for number in range(3)]\n"
    "for owner in owners:\n"
    "    fork_copies.lend(next(fork_copies.numbers), at + 8192 * owner.number, 4096, None, owner)\n"
    "def said(name):\n"
    "    pid = os.fork()\n"
    "    if not pid:\n"
    "        free = []\n"
    "        take = lambda: free.append(fork_copies._LOCK.acquire(timeout=10))\n"
    "        thread = threading.Thread(target=take)\n"
    "        thread.start()\n"
    "        thread.join()\n"
    "        os.write(1, f'{name} lost {sorted(lost)} free {free}\\n'.encode())\n"
    "        os._exit(0)\n"
    "    os.waitpid(pid, 0)\n"
)


@pytest.mark.parametrize("returns", [False, True])
def test_a_fork_in_a_handler_while_a_fork_copies_leaves_that_ones_copies_alone(returns: bool) -> None:
    """Also if the handler's child returns to what it has interrupted: to copies of what is not mapped there."""
    done = run(
        _LENT
        + "pages._RESERVED.append((at, at + 5 * 4096))\n"  # as of an arena
        "fork._FUNCTIONS.remove(pages._reserve_in_child)\n"
        f"returns = {returns}\n"
        "def handler(*_):\n"
        "    if not returns:\n"
        "        said('inner')\n"
        "    elif not os.fork():\n"
        "        pages.unmap(at, 5 * 4096)\n"
        "    else:\n"
        "        assert not os.wait()[1]\n"
        "signal.signal(signal.SIGUSR1, handler)\n"
        "real, count = ctypes.memmove, 0\n"
        "def copy(*arguments):\n"
        "    global count\n"
        "    real(*arguments)\n"
        "    count += 1\n"
        "    if count == 2:\n"
        "        signal.raise_signal(signal.SIGUSR1)\n"
        "ctypes.memmove = copy\n"
        "said('outer')\n"
        "assert not fork_copies._maps and not fork_copies._copies and not fork_copies._copying\n"
    )
    assert done.returncode == 0, done.stderr
    assert "outer lost [] free [True]\n" in done.stdout, done.stdout
    assert ("inner lost [0, 1, 2] free [True]\n" in done.stdout) is not returns, done.stdout


def test_an_interrupt_while_a_fork_waits_for_the_lock_leaves_none_to_the_child() -> None:
    """The thread that has the lock does not exist there. The parent's thread has it still."""
    done = run(
        _LENT
        + "held, go, after = threading.Event(), threading.Event(), []\n"
        "def hold():\n"
        "    with fork_copies._LOCK:\n"
        "        held.set()\n"
        "        go.wait()\n"
        "        after.append(fork_copies._LOCK._is_owned())\n"
        "thread = threading.Thread(target=hold)\n"
        "thread.start()\n"
        "held.wait()\n"
        "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.2)\n"
        "said('child')\n"
        "go.set()\n"
        "thread.join()\n"
        "assert after == [True]\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "child lost [0, 1, 2] free [True]\n", done.stdout
    assert done.stderr.count("KeyboardInterrupt") == 1, done.stderr


@pytest.mark.parametrize("times", [1, 3])
def test_an_owner_that_cannot_lose_its_range_does_not_keep_the_others_from_it(times: int) -> None:
    """As of an interrupt. It gets a second try."""
    done = run(
        _LENT
        + "def lose():\n"
        f"    if len(tries) < {times}:\n"
        "        tries.append(1)\n"
        "        raise KeyboardInterrupt\n"
        "    lost.append(2)\n"
        "tries = []\n"
        "owners[2].lose = lose\n"
        "fork_copies.COPY_BYTES_MAX = 0\n"
        "said('child')\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"child lost {[0, 1, 2] if times == 1 else [0, 1]} free [True]\n", done.stdout


def test_threads_may_register_while_another_forks() -> None:
    stop = threading.Event()

    def churn() -> None:
        log: list[str] = []
        while not stop.is_set():
            Part("x", log)

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert said_by_child(lambda: "went on") == "went on"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    gc.collect()
    assert not fork._METHODS


def test_simm_has_no_other_fork_hook() -> None:
    package = Path(simm.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "register_at_fork" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "register_at_fork"
    }
    assert found == {"host/fork.py"}


def test_an_object_that_lives_until_exit_causes_no_report() -> None:
    script = (
        "from simm.host import fork\n"
        "class Part:\n"
        "    def __init__(self):\n"
        "        fork.in_child(self.hook)\n"
        "    def hook(self):\n"
        "        pass\n"
        "part = Part()\n"
        "part.cycle = part\n"
        "kept = part.hook\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == ""
