"""One class for each store that ``peers.py`` compares, all with the same methods.

Each starts its own servers in its own directory, on UNIX sockets or 127.0.0.1, and stops them in ``close``. ``handle``
converts a row of a caller's array to what the store's calls take (a memoryview, an address). That is not timed, as an
engine knows its buffers in advance.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from peers_wire import BareMemcached, BareRedis

Array = npt.NDArray[np.uint8]

START_SECONDS = 20.0
STOP_SECONDS = 5.0


class PeerError(Exception):
    """A peer did not start, or gave an answer that no healthy store gives."""


class Server:
    """A child process in its own session, with its output in a file; it always ends.

    Where util-linux's ``setpriv`` exists, the kernel ends the child even if this process is killed.
    """

    def __init__(self, command: list[str], home: Path, name: str, environment: dict[str, str] | None = None):
        guard = shutil.which("setpriv")
        if guard:
            command = [guard, "--pdeathsig", "KILL", "--", *command]
        self._log = home / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=home,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, address: str | tuple[str, int], seconds: float = START_SECONDS) -> None:
        """Return once a process accepts connections at ``address``, within ``seconds``.

        Raises:
            PeerError: no process accepts connections in time.
        """
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        deadline = time.monotonic() + seconds
        while True:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(address)
                    return
                except OSError:
                    pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self._log.read_text(errors="replace")[-600:]
                raise PeerError(f"{self._log.stem} did not come up at {address}: {tail}")
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def resident_array(nbytes: int) -> Array:
    """Return ordinary memory with every page touched."""
    array = np.empty(nbytes, dtype=np.uint8)
    array.fill(0)
    return array


class Peer:
    """What the benchmark needs from a store. A get returns ``None`` for a miss."""

    name: ClassVar[str]

    def __init__(self, home: Path, memory: int, buffers: int, state: str = "room"):
        """Take the bytes that the store may hold, and the bytes of the arrays that its caller will use.

        ``state``: ``room`` if it will be given less than it may hold, ``full`` if it is to evict.
        """
        self.home = home
        self.memory = memory
        self.buffers = buffers
        self.state = state
        home.mkdir()

    @classmethod
    def missing(cls) -> str | None:
        """Return the reason why this store cannot run here, or None."""
        raise NotImplementedError

    def version(self) -> str:
        raise NotImplementedError

    def start(self) -> None:
        raise NotImplementedError

    def array(self, nbytes: int) -> Array | None:
        """Return the memory that the store's callers must use, or None if any memory will do."""
        return None

    def adopt(self, array: Array) -> None:
        """Take an array that handles will point into. The benchmark calls this once for each array."""

    def handle(self, row: Array) -> Any:
        return row

    def put(self, key: str, value: Any) -> bool:
        raise NotImplementedError

    def get_into(self, key: str, into: Any) -> int | None:
        raise NotImplementedError

    def mput(self, keys: list[str], values: list[Any]) -> list[bool]:
        raise NotImplementedError

    def mget_into(self, keys: list[str], into: list[Any]) -> Sequence[int | None]:
        raise NotImplementedError

    def exists(self, key: str) -> bool:
        raise NotImplementedError

    def mexists(self, keys: list[str]) -> list[bool]:
        raise NotImplementedError

    def delete_many(self, keys: list[str]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Stop what ``start`` started, even if ``start`` failed. May be called twice."""
        raise NotImplementedError


def absent(*, modules: Sequence[str] = (), programs: Sequence[str] = ()) -> str | None:
    """Return a text that names what is not installed, or None."""
    lacking = [f"module {name}" for name in modules if importlib.util.find_spec(name) is None]
    lacking += [f"program {name}" for name in programs if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else None


def first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return (done.stdout or done.stderr).partition("\n")[0].strip()


class Simm(Peer):
    """SiMM: manager and data server as child processes, values copied to and from shared memory."""

    name = "simm"
    #: Of the client, beside the memory of its cluster.
    ARGUMENTS: ClassVar[dict[str, Any]] = {}
    _client: Any = None

    @classmethod
    def missing(cls) -> str | None:
        try:
            importlib.import_module("simm.client")
        except ImportError as error:
            return f"simm.client not importable ({error})"
        return None

    def version(self) -> str:
        return f"SiMM {getattr(importlib.import_module('simm'), '__version__', '?')}"

    def start(self) -> None:
        self._client = importlib.import_module("simm.client").Client.local(memory=self.memory, **self.ARGUMENTS)
        self.put = self._client.put  # type: ignore[method-assign]
        self.get_into = self._client.get_into  # type: ignore[method-assign]
        self.mput = self._client.put_many  # type: ignore[method-assign]
        self.mget_into = self._client.get_into_many  # type: ignore[method-assign]
        self.exists = self._client.exists  # type: ignore[method-assign]
        self.mexists = self._client.exists_many  # type: ignore[method-assign]

    def delete_many(self, keys: list[str]) -> None:
        self._client.delete_many(keys)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


class SimmTcp(Simm):
    """The same over TCP on the loopback, as from another host."""

    name = "simm-tcp"
    ARGUMENTS: ClassVar[dict[str, Any]] = {"path": "tcp"}


class _OnSocket(Peer):
    """Redis and memcached: one server on a UNIX socket, the client of ``peers_wire``."""

    _server: Server | None = None
    _client: Any = None

    def handle(self, row: Array) -> Any:
        return row.data

    def _serve(self, command: list[str], environment: dict[str, str] | None = None) -> str:
        path = str(self.home / "socket")
        self._server = Server([*command, path], self.home, self.name, environment)
        self._server.wait_for(path)
        return path

    def put(self, key: str, value: Any) -> bool:
        done: bool = self._client.set(key.encode(), value)
        return done

    def get_into(self, key: str, into: Any) -> int | None:
        got: int | None = self._client.get_into(key.encode(), into)
        return got

    def mput(self, keys: list[str], values: list[Any]) -> list[bool]:
        done: list[bool] = self._client.set_many([key.encode() for key in keys], values)
        return done

    def mget_into(self, keys: list[str], into: list[Any]) -> Sequence[int | None]:
        got: list[int | None] = self._client.get_many_into([key.encode() for key in keys], into)
        return got

    def exists(self, key: str) -> bool:
        found: bool = self._client.exists(key.encode())
        return found

    def mexists(self, keys: list[str]) -> list[bool]:
        found: list[bool] = self._client.exists_many([key.encode() for key in keys])
        return found

    def delete_many(self, keys: list[str]) -> None:
        self._client.delete_many([key.encode() for key in keys])

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
        if self._server is not None:
            self._server.stop()


class Redis(_OnSocket):
    """Nothing saved to disk. jemalloc keeps the pages of freed values and reuses them for values of any
    size, instead of returning them to the kernel: PUT is twice as fast so, or more, from 16 KiB on.
    """

    name = "redis"

    @classmethod
    def missing(cls) -> str | None:
        return absent(programs=["redis-server"])

    def version(self) -> str:
        return " ".join(first_line("redis-server", "--version").split()[:3])

    def start(self) -> None:
        command = ["redis-server", "--port", "0", "--save", "", "--appendonly", "no"]
        if self.state == "full":
            command += ["--maxmemory", str(self.memory), "--maxmemory-policy", "allkeys-lru"]
        command.append("--unixsocket")
        keep_pages = {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:30"}
        self._client = BareRedis(self._serve(command, keep_pages))


class Memcached(_OnSocket):
    name = "memcached"

    @classmethod
    def missing(cls) -> str | None:
        return absent(programs=["memcached"])

    def version(self) -> str:
        return first_line("memcached", "--version")

    def start(self) -> None:
        # Large values live in chunks of 512 KiB, and pages move between size classes slowly: the
        # extra memory keeps it from evicting what the other stores can hold.
        memory = self.memory if self.state == "full" else 2 * self.memory
        command = ["memcached", "-m", str(memory >> 20), "-I", "64m", "-R", "1000"]
        command += ["-u", "root", "-s"] if os.geteuid() == 0 else ["-s"]
        self._client = BareMemcached(self._serve(command))


class RedisPy(Redis):
    """The same server through redis-py with the hiredis parser, to compare the bare client with."""

    name = "redis-py"

    @classmethod
    def missing(cls) -> str | None:
        return Redis.missing() or absent(modules=["redis", "hiredis"])

    def version(self) -> str:
        return f"redis-py {metadata.version('redis')}"

    def start(self) -> None:
        super().start()
        self._client.close()
        self._client = importlib.import_module("redis").Redis(unix_socket_path=str(self.home / "socket"))

    def put(self, key: str, value: Any) -> bool:
        return bool(self._client.set(key, value))

    def get_into(self, key: str, into: Any) -> int | None:
        return _copied(self._client.get(key), into)

    def mput(self, keys: list[str], values: list[Any]) -> list[bool]:
        return [bool(self._client.mset(dict(zip(keys, values))))] * len(keys)

    def mget_into(self, keys: list[str], into: list[Any]) -> Sequence[int | None]:
        return [_copied(value, place) for value, place in zip(self._client.mget(keys), into)]

    def exists(self, key: str) -> bool:
        return bool(self._client.exists(key))

    def mexists(self, keys: list[str]) -> list[bool]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        return [bool(found) for found in pipeline.execute()]

    def delete_many(self, keys: list[str]) -> None:
        self._client.delete(*keys)


class PyMemcache(Memcached):
    """The same server through pymemcache, to compare the bare client with."""

    name = "pymemcache"

    @classmethod
    def missing(cls) -> str | None:
        return Memcached.missing() or absent(modules=["pymemcache"])

    def version(self) -> str:
        return f"pymemcache {metadata.version('pymemcache')}"

    def start(self) -> None:
        super().start()
        self._client.close()
        base = importlib.import_module("pymemcache.client.base")
        self._client = base.Client(f"unix:{self.home / 'socket'}", default_noreply=False)

    def put(self, key: str, value: Any) -> bool:
        return bool(self._client.set(key, bytes(value)))

    def get_into(self, key: str, into: Any) -> int | None:
        return _copied(self._client.get(key), into)

    def mput(self, keys: list[str], values: list[Any]) -> list[bool]:
        failed = self._client.set_many({key: bytes(value) for key, value in zip(keys, values)})
        return [key not in failed for key in keys]

    def mget_into(self, keys: list[str], into: list[Any]) -> Sequence[int | None]:
        found = self._client.get_many(keys)
        return [_copied(found.get(key), place) for key, place in zip(keys, into)]

    def exists(self, key: str) -> bool:
        return self._client.get(key) is not None

    def mexists(self, keys: list[str]) -> list[bool]:
        found = self._client.get_many(keys)
        return [key in found for key in keys]

    def delete_many(self, keys: list[str]) -> None:
        self._client.delete_many(keys)


def _copied(value: bytes | None, into: memoryview) -> int | None:
    if value is None:
        return None
    into[: len(value)] = value
    return len(value)


class MooncakeLocal(Peer):
    """Mooncake Store whose memory is in the measuring process itself: master RPC and a memcpy.

    Its quickest way to move a value on one host, and one that no second process shares.
    """

    name = "mooncake-local"
    #: Read by the library once per process. The store copies within a host by memcpy, keeps its
    #: TCP connections, takes no statistics per call, and speaks on 127.0.0.1 only.
    ENVIRONMENT: ClassVar[dict[str, str]] = {
        "MC_STORE_MEMCPY": "1",
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_STORE_CLIENT_METRIC": "0",
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        "MC_LOG_LEVEL": "ERROR",
        "GLOG_minloglevel": "3",
    }

    def __init__(self, home: Path, memory: int, buffers: int, state: str = "room"):
        super().__init__(home, memory, buffers, state)
        self._servers: list[Server] = []
        self._store: Any = None

    @classmethod
    def missing(cls) -> str | None:
        lacking = absent(modules=["mooncake"])
        if lacking is None:
            os.environ.update(MooncakeLocal.ENVIRONMENT)
            try:
                importlib.import_module("mooncake.store")
            except ImportError as error:
                return f"mooncake.store not importable ({error})"
        return lacking

    def version(self) -> str:
        for name in ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"):
            try:
                return f"{name} {metadata.version(name)}"
            except metadata.PackageNotFoundError:
                continue
        return "mooncake ?"

    def start(self) -> None:
        self._setup(self._master(), self.memory)

    def _run(self, program: str, *flags: str) -> Server:
        folder = Path(importlib.import_module("mooncake").__file__ or "").parent
        server = Server([str(folder / program), *flags], self.home, program)
        self._servers.append(server)
        return server

    def _master(self) -> str:
        port = free_port()
        flags = ["--rpc_address=127.0.0.1", f"--rpc_port={port}", "--enable_metric_reporting=false"]
        flags += ["--metrics_host=127.0.0.1", f"--metrics_port={free_port()}"]
        self._run("mooncake_master", *flags).wait_for(("127.0.0.1", port))
        return f"127.0.0.1:{port}"

    def _owner(self, master: str) -> str:
        """Start a process that owns the store's memory; return its address."""
        port = free_port()
        flags = ["--host=127.0.0.1", f"--port={port}", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp"]
        flags += [f"--master_server_address={master}", f"--global_segment_size={self.memory}"]
        self._run("mooncake_client", *flags).wait_for(("127.0.0.1", port))
        return f"127.0.0.1:{port}"

    def _new_store(self) -> Any:
        self._store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        return self._store

    def _setup(self, master: str, memory: int) -> None:
        self._require(
            self._new_store().setup("127.0.0.1", "P2PHANDSHAKE", memory, 64 << 20, "tcp", "", master), "setup"
        )

    @staticmethod
    def _require(code: int, what: str) -> None:
        if code != 0:
            raise PeerError(f"Mooncake: {what} gave {code}")

    def adopt(self, array: Array) -> None:
        self._require(self._store.register_buffer(array.ctypes.data, array.nbytes), "register_buffer")

    def handle(self, row: Array) -> Any:
        return row.ctypes.data, row.nbytes

    def put(self, key: str, value: Any) -> bool:
        return bool(self._store.put_from(key, *value) == 0)

    def get_into(self, key: str, into: Any) -> int | None:
        got: int = self._store.get_into(key, *into)
        return got if got >= 0 else None

    def mput(self, keys: list[str], values: list[Any]) -> list[bool]:
        codes = self._store.batch_put_from(keys, [value[0] for value in values], [value[1] for value in values])
        return [code == 0 for code in codes]

    def mget_into(self, keys: list[str], into: list[Any]) -> Sequence[int | None]:
        codes = self._store.batch_get_into(keys, [place[0] for place in into], [place[1] for place in into])
        return [code if code >= 0 else None for code in codes]

    def exists(self, key: str) -> bool:
        return bool(self._store.is_exist(key) == 1)

    def mexists(self, keys: list[str]) -> list[bool]:
        return [code == 1 for code in self._store.batch_is_exist(keys)]

    def delete_many(self, keys: list[str]) -> None:
        # Forced, as a key that was just read is otherwise leased for seconds.
        self._store.batch_remove(keys, True)

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
        for server in reversed(self._servers):
            server.stop()


class MooncakeTcp(MooncakeLocal):
    """Mooncake Store whose memory is in another process, values over TCP on the loopback."""

    name = "mooncake-tcp"

    def start(self) -> None:
        master = self._master()
        self._owner(master)
        self._setup(master, 0)
        self._wait_for_memory()

    def _wait_for_memory(self) -> None:
        """Wait until the master knows the owner's memory, a moment after the owner listens."""
        deadline = time.monotonic() + START_SECONDS
        while self._store.put("ready", b"ready") != 0:
            if time.monotonic() > deadline:
                raise PeerError("Mooncake: the owner's memory did not appear")
            time.sleep(0.05)
        self._store.remove("ready", True)


class MooncakeShm(MooncakeTcp):
    """Mooncake Store's "dummy client": RPC to an owner process that copies to and from shared memory.

    The caller's buffers must come from the pool that both map.
    """

    name = "mooncake-shm"

    def start(self) -> None:
        owner = self._owner(self._master())
        pool = self.buffers + (64 << 20)
        self._require(self._new_store().setup_dummy(pool, 64 << 20, owner), "setup_dummy")
        self._wait_for_memory()

    def array(self, nbytes: int) -> Array | None:
        address = self._store.alloc_from_mem_pool(nbytes)
        if not address:
            raise PeerError(f"Mooncake: no {nbytes} bytes in the shared pool")
        memory = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        array: Array = np.frombuffer(memory, dtype=np.uint8)
        array.fill(0)
        return array


def restore_signals() -> None:
    """Restore Python's signal handlers, which Mooncake's library replaces."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


PEERS: dict[str, type[Peer]] = {
    kind.name: kind
    for kind in (Simm, SimmTcp, Redis, Memcached, MooncakeLocal, MooncakeShm, MooncakeTcp, RedisPy, PyMemcache)
}
#: Short names for ``--peers``.
GROUPS: dict[str, list[str]] = {"mooncake": ["mooncake-local", "mooncake-shm", "mooncake-tcp"]}
