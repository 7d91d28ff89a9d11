"""simm.tools.doctor: each check on trees that are well and on trees that are ill."""

from __future__ import annotations

import mmap
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from simm import shm
from simm.arena.layout import HEADER_BYTES, MAGIC, State, Word
from simm.host import pages
from simm.ipc.segments import ArenaName
from simm.tools import doctor, doctor_arenas
from simm.tools.doctor import Finding
from tests.support.left_arenas import name_of

GIB = 1 << 30
MIB = 1 << 20


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def disk(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    class State:
        f_frsize = 4096
        f_blocks = total // 4096
        f_bavail = free // 4096

    monkeypatch.setattr(os, "statvfs", lambda _: State)


def limit(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))


def judged(finding: Finding, status: str, *words: str) -> None:
    """The status is that, every word is in the text, and a remedy is there exactly when it is needed."""
    assert finding.status == status, finding
    for word in words:
        assert word in finding.detail + finding.remedy, finding
    assert bool(finding.remedy) == (status != "ok"), finding


def test_every_check_runs_here_and_says_something() -> None:
    found = doctor.run_checks()
    assert len(found) == len(doctor.CHECKS)
    assert len({finding.name for finding in found}) == len(found)
    for finding in found:
        judged(finding, finding.status)
        assert finding.status in ("ok", "warn", "fail") and finding.detail
        assert "\n" not in finding.detail + finding.remedy


def test_every_check_function_is_listed() -> None:
    functions = {each for name, each in vars(doctor).items() if name.startswith("check_")}
    assert functions == set(doctor.CHECKS)


def test_an_empty_root_breaks_nothing(tmp_path: Path) -> None:
    by_name = {finding.name: finding for finding in doctor.run_checks(str(tmp_path))}
    judged(by_name["shm-size"], "fail", "mount -t tmpfs")
    assert not [each for each in by_name.values() if "could not be checked" in each.detail]


@pytest.mark.parametrize(
    ("raised", "said"),
    [(PermissionError("no entry"), "checked: no entry"), (KeyError("x"), "checked: KeyError: 'x'"),
     (ImportError("no x"), "checked: ImportError: no x")],
    ids=repr,
)  # fmt: skip
def test_a_broken_check_is_a_finding(raised: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_nothing(_: str) -> Finding:
        raise raised

    monkeypatch.setattr(doctor, "CHECKS", (check_nothing, doctor.check_cpus))
    found = doctor.run_checks()
    assert [each.name for each in found] == ["nothing", "cpus"]
    judged(found[0], "warn", said)


@pytest.mark.parametrize(
    ("total", "free", "status", "words"),
    [
        (64 * MIB, 64 * MIB, "fail", "--shm-size"),
        (100 * GIB, MIB, "fail", "remove other files"),
        (40 * GIB, 30 * GIB, "warn", "size=80%"),
        (50 * GIB, GIB, "ok", "1.00 GiB free"),
    ],
)
def test_shm_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, status: str, words: str
) -> None:
    write(tmp_path, "proc/meminfo", f"MemTotal: {100 << 20} kB\n")
    disk(monkeypatch, total, free)
    judged(doctor.check_shm_size(str(tmp_path)), status, words)


@pytest.mark.parametrize(("total", "installed"), [(80 * GIB, 100), (95 * GIB, 100), (200 * GIB, 100), (GIB, 0)])
def test_issue_no_remedy_makes_shm_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, installed: int
) -> None:
    """Of 95 % of the memory it made 80 %: the next start found no room for the arenas that the host is there for."""
    if installed:
        write(tmp_path, "proc/meminfo", f"MemTotal: {installed << 20} kB\n")
    disk(monkeypatch, total, MIB)
    found = doctor.check_shm_size(str(tmp_path))
    judged(found, "fail")
    assert "%" not in found.remedy and "64g" not in found.remedy


def arena(monkeypatch: pytest.MonkeyPatch, folder: Path, size: int = 8 * MIB, **about: int) -> shm.OwnedSegment:
    """Return a file of ``size`` bytes in the place of a running server's arena."""
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(shm, "SHM_DIR", str(folder))
    monkeypatch.setattr(doctor, "SHM_BYTES_MIN", 8 * MIB)
    segment = shm.OwnedSegment.create(name_of("gpu", 0), size, **about)
    os.pwrite(segment.fd, bytes(size), 0)
    return segment


def state(segment: shm.OwnedSegment, state: int, size: int = 0) -> None:
    head = memoryview(bytearray(HEADER_BYTES)).cast("Q")
    head[Word.MAGIC], head[Word.STATE], head[Word.SIZE] = MAGIC, state, size
    os.pwrite(segment.fd, head, 0)


def test_issue_shm_that_arenas_fill_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed on every host whose server has the memory that docs/operations.md gives to it."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {100 << 20} kB\n")
    segment = arena(monkeypatch, tmp_path / "dev/shm")
    disk(monkeypatch, 90 * GIB, MIB)
    judged(doctor.check_shm_size(str(tmp_path)), "ok", "arenas: 0.01 GiB")
    state(segment, State.SUSPENDED)
    segment.close()
    judged(doctor.check_shm_size(str(tmp_path)), "ok", "arenas")  # it waits for its server's next start


def test_issue_another_users_files_are_arenas_perhaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else may open files of the user ``simm`` of the units; but any user's garbage of such a name was well."""
    write(tmp_path, "proc/meminfo", f"MemTotal: {100 << 20} kB\n")
    segment = arena(monkeypatch, tmp_path / "dev/shm")
    disk(monkeypatch, 90 * GIB, MIB)

    def denied(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shm, "_open", denied)
    found = doctor.check_shm_size(str(tmp_path))
    judged(found, "warn", "arenas", f"in files of uid {os.geteuid()}, which", "as root")
    disk(monkeypatch, 90 * GIB, GIB)
    judged(doctor.check_shm_size(str(tmp_path)), "ok", "arenas")  # there is room without them
    monkeypatch.setattr(doctor, "SHM_BYTES_MIN", 2 * GIB)
    judged(doctor.check_shm_size(str(tmp_path)), "fail", "arenas")  # nor is it enough with them
    segment.close()


def test_control_what_is_no_servers_counts_as_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "proc/meminfo", f"MemTotal: {100 << 20} kB\n")
    segment = arena(monkeypatch, tmp_path / "dev/shm")
    state(segment, State.OPEN)
    segment.close()
    (tmp_path / "dev/shm" / "other").write_bytes(bytes(8 * MIB))
    foreign = shm.OwnedSegment.create(str(ArenaName(os.geteuid() + 1, "gpu", 0, 1)), 8 * MIB)
    os.pwrite(foreign.fd, bytes(8 * MIB), 0)
    disk(monkeypatch, 90 * GIB, MIB)
    judged(doctor.check_shm_size(str(tmp_path)), "fail", "leftovers")
    foreign.unlink()
    foreign.close()


@pytest.mark.parametrize(("allowed", "status"), [(None, "ok"), (90 * GIB, "ok"), (30 * GIB, "warn"), (MIB, "fail")])
def test_memory_limit(tmp_path: Path, allowed: int | None, status: str) -> None:
    write(tmp_path, "proc/meminfo", f"MemTotal: {100 << 20} kB\nMemAvailable: {100 << 20} kB\n")
    if allowed is not None:
        write(tmp_path, "sys/fs/cgroup/memory.max", str(allowed))
        write(tmp_path, "sys/fs/cgroup/memory.current", "0")
    judged(doctor.check_memory_limit(str(tmp_path)), status, *([] if status == "ok" else ["--memory"]))


def limited(root: Path, v2: bool, shared: int) -> None:
    """Write a cgroup that has 1 MiB left of 1 GiB, and so much shared memory."""
    names = ("memory.max", "memory.current", "shmem")
    if not v2:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_shmem")
    folder = "sys/fs/cgroup" if v2 else "sys/fs/cgroup/memory"
    write(root, f"{folder}/{names[0]}", str(GIB))
    write(root, f"{folder}/{names[1]}", str(GIB - MIB))
    write(root, f"{folder}/memory.stat", f"anon 4096\n{names[2]} {shared}\n")
    write(root, "proc/meminfo", f"MemAvailable: {8 << 10} kB\n")


@pytest.mark.parametrize("v2", [True, False])
def test_issue_a_limit_that_arenas_fill_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, v2: bool) -> None:
    segment = arena(monkeypatch, tmp_path / "dev/shm")
    monkeypatch.setattr(doctor_arenas, "of_my_cgroup", lambda: {os.getpid()})  # the owner's
    limited(tmp_path, v2, GIB // 2)
    judged(doctor.check_memory_limit(str(tmp_path)), "ok", "0.01 GiB")
    limited(tmp_path, v2, 0)
    judged(doctor.check_memory_limit(str(tmp_path)), "fail", "--memory")  # control: they are of another cgroup
    segment.unlink()
    segment.close()
    limited(tmp_path, v2, GIB // 2)
    judged(doctor.check_memory_limit(str(tmp_path)), "fail", "--memory")  # control: what it has is not SiMM's


def test_issue_shared_memory_of_this_cgroup_may_be_no_arenas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another cgroup's arenas in the same /dev/shm made all shared memory of this one count as left, whose it was."""
    segment = arena(monkeypatch, tmp_path / "dev/shm")
    limited(tmp_path, True, GIB // 2)
    words = "only if the shared memory of this cgroup is arenas"
    monkeypatch.setattr(doctor_arenas, "of_my_cgroup", set)
    judged(doctor.check_memory_limit(str(tmp_path)), "warn", words, "in the data server's unit or container")
    # A client of this cgroup reads the arena, which another one's server owns.
    with (
        open(f"{shm.SHM_DIR}/{segment.name}", "rb") as file,
        subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, pass_fds=(file.fileno(),)) as client,
    ):  # fmt: skip
        assert client.stdout is not None and client.stdout.readline()
        monkeypatch.setattr(doctor_arenas, "of_my_cgroup", lambda: {client.pid})
        judged(doctor.check_memory_limit(str(tmp_path)), "warn", words)
        client.communicate(b"\n")

    def unknown() -> set[int]:
        raise FileNotFoundError("no control group of this process in /sys/fs/cgroup")

    monkeypatch.setattr(doctor_arenas, "of_my_cgroup", unknown)
    judged(doctor.check_memory_limit(str(tmp_path)), "warn", words)
    write(tmp_path, "sys/fs/cgroup/memory.current", "0")
    judged(doctor.check_memory_limit(str(tmp_path)), "ok")  # control: there is room without it
    segment.unlink()
    segment.close()


def test_issue_an_arena_without_a_name_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a group, and in reserved huge pages, a header alone tells how large it is."""
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [never]\n")
    monkeypatch.setattr(doctor_arenas, "of_my_cgroup", lambda: {os.getpid()})
    limited(tmp_path, True, GIB // 2)
    for mode, results in ((0o640, ("ok", "warn")), (0o600, ("fail", "ok"))):
        segment = arena(monkeypatch, tmp_path / "dev/shm", HEADER_BYTES, mode=mode)
        state(segment, State.OPEN, 64 * MIB)
        found = doctor.check_memory_limit(str(tmp_path)), doctor.check_huge_pages(str(tmp_path))
        assert tuple(each.status for each in found) == results, found
        segment.unlink()
        segment.close()


@pytest.mark.parametrize(("mode", "status"), [("0", "ok"), ("1", "ok"), ("2", "warn")])
def test_overcommit(tmp_path: Path, mode: str, status: str) -> None:
    write(tmp_path, "proc/sys/vm/overcommit_memory", mode + "\n")
    judged(doctor.check_overcommit(str(tmp_path)), status, f"vm.overcommit_memory={mode}")


@pytest.mark.parametrize(
    ("switch", "status"),
    [(None, "ok"), ("always [advise] never", "ok"), ("always advise [never]", "warn"), ("[always] advise never", "ok")],
)
def test_huge_pages(tmp_path: Path, switch: str | None, status: str) -> None:
    if switch:
        write(tmp_path, "sys/kernel/mm/transparent_hugepage/shmem_enabled", switch + "\n")
    judged(doctor.check_huge_pages(str(tmp_path)), status, *([switch] if switch else []))


def test_reserved_huge_pages_in_their_place(tmp_path: Path) -> None:
    write(tmp_path, "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [never]\n")
    write(tmp_path, "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "512\n")
    judged(doctor.check_huge_pages(str(tmp_path)), "ok", "1,024.0 MiB of reserved ones", "--hugetlb")


def test_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "populate_read", lambda _: True)
    monkeypatch.setattr(os, "memfd_create", lambda *_: -1, raising=False)
    judged(doctor.check_populate(), "ok", platform.release())
    monkeypatch.setattr(pages, "populate_read", lambda _: False)
    monkeypatch.delattr(os, "memfd_create")
    judged(doctor.check_populate(), "warn", "MADV_POPULATE", "memfd_create")


def test_leftovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "SHM_DIR", str(tmp_path))
    judged(doctor.check_leftovers(), "ok")
    alive = shm.OwnedSegment.create("simm-0-alive-0-0123456789abcdef", mmap.PAGESIZE)
    judged(doctor.check_leftovers(), "ok")
    # Of programs that know no lock of ours: it was advised to remove them, though they were in use.
    for name in ("simmulation", "simm_buffer", "simm-registry", "simm"):
        (tmp_path / name).write_bytes(bytes(8192))
    judged(doctor.check_leftovers(), "ok")
    # What a server that stopped with --warm has left is its next start's: it was advised to remove that.
    header = memoryview(bytearray(8192)).cast("Q")
    header[Word.MAGIC], header[Word.STATE] = MAGIC, State.SUSPENDED
    (tmp_path / "simm-0-a-0-0123456789abcdef").write_bytes(header)
    verdict = doctor.check_leftovers()
    judged(verdict, "ok", "1 arenas", "simm-0-a-0-0123456789abcdef", "--warm wait for their next start")
    assert not verdict.remedy
    (tmp_path / "simm-0-dead-0-0123456789abcdef").write_bytes(bytes(8192))
    verdict = doctor.check_leftovers()
    judged(verdict, "warn", "1 segments", "1 arenas", "--warm", f"rm {tmp_path}/simm-0-dead-0-0123456789abcdef")
    assert "simm-0-a-" not in verdict.remedy
    (tmp_path / "simm-bench-7-01234567").write_bytes(bytes(8192))
    judged(doctor.check_leftovers(), "warn", "2 segments", "simm-bench-7-01234567")
    alive.unlink()
    alive.close()


@pytest.mark.parametrize(
    ("uid", "files", "status"),
    [
        (1000, {}, "warn"),
        (999, {}, "ok"),
        (1000, {"logind.conf": "[Login]\n#RemoveIPC=no\n"}, "warn"),
        (1000, {"logind.conf": "[Login]\nRemoveIPC=no\n"}, "ok"),
        (1000, {"logind.conf": "RemoveIPC=no\n", "logind.conf.d/50.conf": "RemoveIPC = yes\n"}, "warn"),
        (1000, {"logind.conf.d/10.conf": "RemoveIPC=yes\n", "logind.conf.d/50.conf": "RemoveIPC=off\n"}, "ok"),
    ],
)
def test_remove_ipc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, files: dict[str, str], status: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    judged(doctor.check_remove_ipc(str(tmp_path)), "ok", "systemd does not run")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    for path, text in files.items():
        write(tmp_path, f"etc/systemd/{path}", text)
    judged(doctor.check_remove_ipc(str(tmp_path)), status)


def test_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    judged(doctor.check_cpus(), "warn", "one CPU")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4})
    judged(doctor.check_cpus(), "ok", "2 of")


def test_numa(tmp_path: Path) -> None:
    write(tmp_path, "sys/devices/system/node/online", "0-1")
    for node in (0, 1):
        write(tmp_path, f"sys/devices/system/node/node{node}/cpulist", f"{node}")
        write(tmp_path, f"sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal: {1 << 20} kB\n")
    write(tmp_path, "proc/sys/vm/zone_reclaim_mode", "0\n")
    judged(doctor.check_numa(str(tmp_path)), "ok", "node 0: 1 CPUs, 1.00 GiB", "node 1")
    write(tmp_path, "proc/sys/vm/zone_reclaim_mode", "1\n")
    judged(doctor.check_numa(str(tmp_path)), "warn", "sysctl vm.zone_reclaim_mode=0")


@pytest.mark.parametrize(
    ("machine", "order", "status"),
    [("x86_64", "little", "ok"), ("aarch64", "little", "warn"), ("s390x", "big", "fail")],
)
def test_machine(monkeypatch: pytest.MonkeyPatch, machine: str, order: str, status: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(sys, "byteorder", order)
    judged(doctor.check_machine(), status, machine, order, "64 bits")


@pytest.mark.parametrize(("soft", "status"), [(1024, "warn"), (4096, "ok"), (resource.RLIM_INFINITY, "ok")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, status: str) -> None:
    limit(monkeypatch, soft, resource.RLIM_INFINITY)
    judged(doctor.check_open_files(), status, "unlimited")


@pytest.mark.parametrize(
    ("version", "implementation", "gil", "status"),
    [
        ((3, 9), "CPython", True, "fail"),
        ((3, 10), "CPython", True, "ok"),
        ((3, 13), "CPython", True, "ok"),
        ((3, 13), "CPython", False, "warn"),
        ((3, 14), "CPython", True, "warn"),
        ((3, 11), "PyPy", True, "fail"),
    ],
)
def test_python(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], implementation: str, gil: bool, status: str
) -> None:
    monkeypatch.setattr(sys, "version_info", (*version, 1, "final", 0))
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: gil, raising=False)
    monkeypatch.setattr(platform, "python_implementation", lambda: implementation)
    judged(doctor.check_python(), status, implementation)


@pytest.mark.parametrize(
    ("mark", "namespace", "status"),
    [
        (None, "pid:[4026531836]", "ok"),
        (None, None, "ok"),
        (None, "pid:[4026532999]", "warn"),
        (".dockerenv", "pid:[4026531836]", "warn"),
        ("run/.containerenv", None, "warn"),
        ("var/run/secrets/kubernetes.io/token", None, "warn"),
    ],
)
def test_container(tmp_path: Path, mark: str | None, namespace: str | None, status: str) -> None:
    if mark:
        write(tmp_path, mark, "")
    if namespace:
        (tmp_path / "proc/self/ns").mkdir(parents=True)
        (tmp_path / "proc/self/ns/pid").symlink_to(namespace)
    judged(doctor.check_container(str(tmp_path)), status, *(["--ipc=host", "--pid=host"] if status == "warn" else []))


@pytest.mark.parametrize(
    ("folders", "status"),
    [
        (["sys/devices/system/cpu/cpu0/node0"], "warn"),
        (["sys/devices/system/cpu/cpu0/node1"], "ok"),
        ([], "ok"),
        (["sys/devices/system/cpu/cpu0/node0", "sys/class/infiniband"], "ok"),
    ],
)
def test_sglang_builtin(tmp_path: Path, folders: list[str], status: str) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    words = ["simm engine sglang", "modprobe ib_core"] if status == "warn" else []
    judged(doctor.check_sglang_builtin(str(tmp_path)), status, *words)
