"""Measure how long asking for many keys takes while other processes put and evict all the time.

    python benchmarks/exists.py                       a cluster of its own, by shared memory; --path tcp by TCP
    python benchmarks/exists.py --keys 512 --storm 2  keys of one question; processes that put, each as fast as it can

The bar: ``exists`` of 512 keys takes at most a millisecond at p99.9, in a storm. The arena is full, so each put of the
storm evicts. Half of the keys that are asked for are stored again and again by the storm, and half never are.

On a machine with fewer free cores than busy processes most of a slow call is waiting for a core, which no store can
change. So each call's time is also shown without what the kernel says that its thread has waited, runnable, for a core
(``/proc/thread-self/schedstat``), and as the processor time of the calling thread. By TCP the server's processes wait
too, which only the difference to a run without the storm (``--storm 0``) shows. The floor is a loop of the same
processor time without SiMM, in turns with the questions. ``--first 20`` gives the thread that asks a core whenever it
wants one: what is left is the call's own time, on caches and cores that the storm uses too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from simm.client import Client

VALUE_BYTES: Final = 16 << 10
PUTS_TOGETHER: Final = 16
#: The kernel takes the core from real-time threads that use more than 95 % of it, for 50 ms at a time.
PAUSE_S: Final = 0.0003


def waited_ns(file: int) -> int:
    """Return for how long this thread has been runnable without a core, as far as the kernel counts that."""
    return int(os.pread(file, 100, 0).split()[1])


def storm(manager: str, token: str, path: str, number: int, keys: int, stop: Any) -> None:
    """Put new values, and those that are asked for, until told to stop."""
    value = bytes(VALUE_BYTES)
    with Client(manager, token=token, path=path, tls_ca="", namespace="storm") as client:
        client.wait_ready(60)
        count = 0
        while not stop.is_set():
            asked = [f"asked {(count + at) % keys}" for at in range(PUTS_TOGETHER // 4)]
            fresh = [f"{number} {count + at}" for at in range(PUTS_TOGETHER)]
            client.put_many(asked + fresh, [value] * (len(asked) + len(fresh)))
            count += PUTS_TOGETHER


def took(call: Callable[[], Any], file: int) -> tuple[float, float, float]:
    """Return the seconds of one call, those without waiting for a core, and those of the thread's processor time."""
    before = waited_ns(file)
    began, used = time.perf_counter(), time.thread_time()
    call()
    used, spent = time.thread_time() - used, time.perf_counter() - began
    return spent, max(used, spent - (waited_ns(file) - before) * 1e-9), used


def show(name: str, times: list[tuple[float, float, float]]) -> None:
    """Print percentiles of the calls."""
    for what, values in zip(("", "  without waiting for a core", "  processor time of the caller"), zip(*times)):
        p50, p99, p999 = np.percentile(np.array(values) * 1e3, (50, 99, 99.9))
        over = sum(each > 1e-3 for each in values) / len(values)
        print(f"{name:<34}{what:<32}{p50:8.3f}{p99:8.3f}{p999:8.3f}{max(values) * 1e3:8.3f}{over:9.2%}", flush=True)
        name = ""


def main() -> None:
    """Run the command line; see the module."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--path", default="shm", choices=("shm", "tcp"))
    parser.add_argument("--keys", type=int, default=512)
    parser.add_argument("--storm", type=int, default=2, help="processes that put")
    parser.add_argument("--calls", type=int, default=10_000, help="questions of each kind")
    parser.add_argument("--memory", default="128M")
    parser.add_argument(
        "--first", type=int, default=0, metavar="PRIORITY",
        help="let the thread that asks, and no other, have a core before all others (SCHED_FIFO; root)",
    )  # fmt: skip
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    stop = spawn.Event()
    file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    with Client.local(arguments.memory, namespace="storm", path=arguments.path) as client:
        client.wait_ready(60)
        cluster = client._owned
        keys = [f"asked {at}" if at % 2 else f"never {at}" for at in range(arguments.keys)]
        store = _store(cluster, arguments.path)
        began = time.process_time()
        for _ in range(50):
            client.exists_many(keys)
        loops = _loops((time.process_time() - began) / 50)

        def floor() -> None:
            for _ in range(loops):
                pass

        storms = [
            spawn.Process(
                target=storm, args=(cluster.manager, cluster.token, arguments.path, number, arguments.keys, stop),
                daemon=True,
            )
            for number in range(arguments.storm)
        ]  # fmt: skip
        for each in storms:
            each.start()
        deadline = time.monotonic() + 60
        while arguments.storm and not client.exists("asked 1") and time.monotonic() < deadline:
            time.sleep(0.1)
        calls = {
            f"Client.exists_many of {arguments.keys}, {arguments.path}": lambda: client.exists_many(keys),
            f"simm.kv mexists of {arguments.keys}, {arguments.path}": lambda: store.mexists(keys),
            "a loop of the same processor time": floor,
        }
        times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
        if arguments.first:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(arguments.first))
        for _ in range(arguments.calls):
            for name, call in calls.items():
                times[name].append(took(call, file))
                if arguments.first:
                    time.sleep(PAUSE_S)
        stop.set()
        for each in storms:
            each.join(30)
        store.close()
    print(f"{'milliseconds':<66}{'p50':>8}{'p99':>8}{'p99.9':>8}{'max':>8}{'over 1':>9}")
    for name, spent in times.items():
        show(name, spent)


def _loops(seconds: float) -> int:
    """Return for how many rounds an empty loop takes so much processor time."""
    began = time.process_time()
    for _ in range(1_000_000):
        pass
    return max(1, int(seconds / (time.process_time() - began) * 1_000_000))


def _store(cluster: Any, path: str) -> Any:
    os.environ.update(
        SIMM_CLUSTER_MANAGER=cluster.manager, SIMM_NAMESPACE="storm", SIMM_PATH=path, SIMM_TOKEN_FILE=cluster.token_file
    )
    from simm.kv import Store

    return Store()


if __name__ == "__main__":
    main()
