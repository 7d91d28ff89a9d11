"""A client in a process of its own, without the cycle collector, and what that process has mapped and open.

``Engine`` starts it and tells it what to do, a line of JSON at a time; the other end is ``main``. What is mapped and
open is read from /proc, so nothing here keeps alive what it looks at.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.child import Child, child_environment, module_command
from tests.support.waiting import WAIT_S

#: What the file names of arenas and rings begin with. The whole path says nothing: a checkout may lie in any folder.
_PREFIX = "simm-"


def mapped(pid: int | str = "self") -> Counter[str]:
    """Arenas and rings that a process has mapped, by file name: how many maps of each."""
    found: Counter[str] = Counter()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        fields = line.split(None, 5)
        name = Path(fields[5].removesuffix(" (deleted)")).name.removeprefix("memfd:") if len(fields) == 6 else ""
        if name.startswith(_PREFIX):
            found[name] += 1
    return found


def opened(pid: int | str = "self") -> list[str]:
    """What the process's descriptors lead to, without the numbers of sockets and pipes."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{name}").split(":[")[0].removesuffix(" (deleted)"))
        except FileNotFoundError:
            continue  # the listing's own
    return sorted(each for each in found if not each.endswith("/fd"))


def arenas(pid: int | str = "self") -> set[str]:
    """Names of the arenas of which the process has mapped, or open, the metadata or the data."""
    names = {Path(each).name for each in opened(pid)} | set(mapped(pid))
    return {each.removesuffix(".data") for each in names if each.startswith(_PREFIX) and each != "simm-ring"}


class Engine(Child):
    """The process. A context manager; ``call`` gives what the method of ``Session`` returns."""

    def __init__(self) -> None:
        words = module_command("tests.support.client_process")
        super().__init__(words, name="engine", talks=True, environment=child_environment(PYTHONFAULTHANDLER="1"))

    def __exit__(self, kind: object = None, *_: object) -> None:
        try:
            if kind is None:
                self.close_input()
                assert self.wait(WAIT_S) == 0, f"the engine ended with {self.process.returncode}"
        finally:
            self.kill()

    def call(self, what: str, **arguments: Any) -> Any:
        """Do it, and wait until it is done."""
        answer = self.ask([what, arguments])
        assert "error" not in answer, answer["error"]
        return answer["value"]


def value_of(key: str, size: int) -> bytes:
    """The one value that a key ever has."""
    return (key.encode() * (size // len(key) + 1))[:size]


class Session:
    """What the process can be asked for."""

    def __init__(self) -> None:
        self.client: Any = None
        self.view: Any = None
        self.wrong = 0
        self.done = Counter[str]()
        self.threads: list[threading.Thread] = []
        self.stopping = False
        #: Copies of a MiB and more stop in their middle while this is not set.
        self.going = threading.Event()
        self.going.set()
        self.stopped = 0
        self.before = ([""], 0)

    def connect(self, **arguments: Any) -> None:
        """Make a client, and note what was open before."""
        from simm.client import Client

        self.before = opened(), threading.active_count()
        self.client = Client(**arguments)
        if not self.client.wait_ready(60.0):
            raise AssertionError("not ready")

    def put(self, key: str, size: int) -> bool:
        return bool(self.client.put(key, value_of(key, size)))

    def get(self, key: str, size: int) -> bool:
        """Is it there? A wrong byte is counted for ever."""
        buffer = bytearray(size)
        got = self.client.get_into(key, buffer)
        if got is None:
            return False
        if got != size or bytes(buffer) != value_of(key, size):
            self.wrong += 1
        return True

    def stats(self) -> Any:
        return self.client.stats()

    def wrongs(self) -> int:
        return self.wrong

    def paths(self) -> list[str]:
        return [worker["path"] for worker in self.client.stats()["workers"]]

    def readers(self) -> int:
        """How many targets read from a mapped arena."""
        return sum(target.reader is not None for target in self.client._router.targets.values())

    def holds(self, name: str) -> bool:
        """Does a target read from this arena?"""
        readers = [target.reader for target in self.client._router.targets.values()]
        return any(reader is not None and reader.name == name for reader in readers)

    def sessions(self) -> list[int]:
        found = [target.session for target in self.client._router.targets.values()]
        return [session.session for session in found if session is not None and not session.broken]

    # -- load

    def work(self, size: int, threads: int) -> None:
        """Threads that put and get until :meth:`rest`."""
        self.stopping = False
        for number in range(threads):
            thread = threading.Thread(target=self._work, args=(f"w{number}", size))
            thread.start()
            self.threads.append(thread)

    def _work(self, name: str, size: int) -> None:
        number = 0
        while not self.stopping:
            number = (number + 1) % 4
            self.done["puts"] += self.put(f"{name}-{number}", size)
            self.done["gets"] += self.get(f"{name}-{number}", size)
            self.done["rounds"] += 1

    def read(self, key: str, size: int, threads: int) -> None:
        """Threads that get one value once."""
        for _ in range(threads):
            thread = threading.Thread(target=self.get, args=(key, size))
            thread.start()
            self.threads.append(thread)

    def progress(self) -> dict[str, int]:
        return dict(self.done)

    def rest(self) -> None:
        """The threads have ended."""
        self.stopping = True
        self.going.set()
        for thread in self.threads:
            thread.join()
        self.threads.clear()

    def hold(self) -> None:
        """From now on large copies stop in their middle."""
        from simm.host.buffers import Copier

        real = Copier.copy
        self.going.clear()

        def halting(copier: Copier, target: int, source: int, size: int, *node: int) -> None:
            if size < 1 << 20:
                real(copier, target, source, size, *node)
                return
            half = size // 2
            real(copier, target, source, half, *node)
            self.stopped += 1
            self.going.wait()
            real(copier, target + half, source + half, size - half, *node)

        Copier.copy = halting  # type: ignore[method-assign]

    def held(self) -> int:
        """How many copies have stopped in their middle."""
        return self.stopped

    # -- views

    def look(self, key: str) -> bool:
        self.view = self.client.view(key)
        return bool(self.view)

    def seen(self, key: str, size: int) -> bool:
        return bytes(self.view.data) == value_of(key, size)

    def drop(self) -> None:
        self.view = None

    # -- the end

    def everything(self) -> None:
        """All calls once, mistakes and cancellations too."""
        import asyncio

        from simm.errors import UsageError

        client = self.client
        keys = [f"e{number}" for number in range(40)]
        values = [value_of(key, 100 << number % 8) for number, key in enumerate(keys)]
        assert all(client.put_many(keys, values)) and client.get_many(keys) == values
        large = value_of("large", 9 << 20)
        assert client.put("large", large) and client.get_into("large", bytearray(len(large))) == len(large)
        with client.view("e3") as view:
            assert view.data == values[3]
        assert client.exists("e3") and client.delete("e3") and not client.view("e3")
        for call in (lambda: client.get_into("large", bytearray(1)), lambda: client.put("", b"x")):
            try:
                call()
            except UsageError:
                pass
            else:
                raise AssertionError("no error")

        async def later() -> None:
            assert await client.put_async("a", b"x" * 100)
            for wanted in (client.get_into_async("a", bytearray(1)), asyncio.wait_for(client.get_async("large"), 1e-6)):
                try:
                    await wanted
                except (UsageError, asyncio.TimeoutError):
                    pass

        asyncio.run(later())

    def close(self) -> None:
        self.client.close()
        self.client = None

    def forget(self) -> None:
        """Drop the client without closing it."""
        self.client = None

    def left(self) -> dict[str, Any]:
        """What is there that was not before :meth:`connect`."""
        descriptors, threads = self.before
        return {
            "maps": dict(mapped()),
            "open": sorted((Counter(opened()) - Counter(descriptors)).elements()),
            "threads": [each.name for each in threading.enumerate()] if threading.active_count() > threads else [],
        }

    def collectable(self) -> list[str]:
        """Objects of SiMM that only the collector can free, by type. Frees them."""
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        found = [type(each) for each in gc.garbage]
        gc.garbage.clear()
        gc.collect()
        return sorted({f"{kind.__module__}.{kind.__name__}" for kind in found if kind.__module__.startswith("simm.")})


def main() -> None:
    """Answer until the input ends."""
    gc.disable()
    session = Session()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        what, arguments = json.loads(line)
        try:
            answer = {"value": getattr(session, what)(**arguments)}
        except Exception as exc:
            answer = {"error": repr(exc)}
        print(json.dumps(answer), file=answers, flush=True)
    session.rest()
    session.drop()
    if session.client is not None:
        session.close()


if __name__ == "__main__":
    main()
