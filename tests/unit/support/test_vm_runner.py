"""The parts of the virtual machine's runner that need no virtual machine."""

from __future__ import annotations

import gzip
import itertools
import lzma
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.rdma_vm import boot, initramfs, kernel, modules, packages, qemu, ticks
from tests.rdma_vm.errors import Unavailable
from tests.support.child import Child, alive
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]

# -- modules ----------------------------------------------------------------------------------------------


def module(**info: str) -> bytes:
    """An ELF64 file with nothing but a .modinfo section, as small as they get."""
    modinfo = b"".join(f"{name}={value}".encode() + b"\0" for name, value in info.items())
    names = b"\0.shstrtab\0.modinfo\0"
    names_at, modinfo_at = 64, 64 + len(names)
    sections_at = modinfo_at + len(modinfo)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, sections_at, 0, 64, 0, 0, 64, 3, 1)
    section = struct.Struct("<IIQQQQIIQQ")
    return (
        header + names + modinfo + section.pack(*[0] * 10)
        + section.pack(1, 3, 0, 0, names_at, len(names), 0, 0, 1, 0)
        + section.pack(11, 1, 0, 0, modinfo_at, len(modinfo), 0, 0, 1, 0)
    )  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "modules"
    for path, data in {
        "drivers/rxe/rdma_rxe.ko": module(depends="ib-core,udp_tunnel", softdep="pre: crc32 nowhere post: late"),
        "drivers/core/ib_core.ko.xz": lzma.compress(module(license="GPL", depends="")),
        "net/udp_tunnel.ko.gz": gzip.compress(module(depends="builtin_one")),
        "crypto/crc32.ko": module(depends=""),
        "odd/late.ko": module(depends="rdma_rxe"),
        "odd/chicken.ko": module(depends="egg"),
        "odd/egg.ko": module(depends="chicken"),
        "odd/lost.ko": module(depends="gone"),
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    (folder / "modules.builtin").write_text("kernel/lib/builtin-one.ko\n")
    return folder


def test_modules_come_after_what_they_need(tree: Path) -> None:
    found = modules.Modules(tree)
    assert found.order(["rdma-rxe"]) == ["ib_core", "udp_tunnel", "crc32", "rdma_rxe"]
    assert found.order(["late", "crc32", "builtin_one"]) == ["ib_core", "udp_tunnel", "crc32", "rdma_rxe", "late"]
    assert sorted(found.order(["chicken"])) == ["chicken", "egg"]
    assert found.order([]) == []
    for wanted in ("lost", "never"):
        with pytest.raises(Unavailable, match=r"no module (gone|never)"):
            found.order([wanted])


def test_sections_of_a_module() -> None:
    assert modules.section(module(a="1", b=""), ".modinfo") == b"a=1\0b=\0"
    assert modules.section(module(), ".text") == b""
    with pytest.raises(ValueError, match="not an ELF64"):
        modules.section(b"#!/bin/sh\n", ".modinfo")


# -- kernel -----------------------------------------------------------------------------------------------


def bzimage(payload: bytes, sectors: int) -> bytes:
    image = bytearray((sectors or 4) * 512 + 512 + 100)
    image[0x1F1] = sectors
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<II", image, 0x248, 100, len(payload))
    return bytes(image) + payload + b"behind it"


@pytest.mark.parametrize("sectors", [0, 4, 39])
def test_the_kernel_within_its_image(sectors: int) -> None:
    elf = b"\x7fELF" + os.urandom(5000)
    for pack in (lzma.compress, gzip.compress, bytes):
        assert kernel.unpacked_image(bzimage(pack(elf), sectors)) == elf
    if shutil.which("zstd"):
        packed = subprocess.run(["zstd", "-c"], input=elf, stdout=subprocess.PIPE, check=True).stdout
        # The kernel's build puts the size behind it.
        assert kernel.unpacked_image(bzimage(packed + struct.pack("<I", len(elf)), sectors)) == elf


def test_images_that_are_none() -> None:
    with pytest.raises(Unavailable, match="not a bzImage"):
        kernel.unpacked_image(bytes(4096))
    with pytest.raises(Unavailable, match="not known"):
        kernel.unpacked_image(bzimage(b"BZh91AY&SY", 4))


# -- initramfs --------------------------------------------------------------------------------------------


def unpack(data: bytes, folder: Path) -> None:
    """By the tool that everyone has."""
    if not packages.find_program("cpio") and not packages.find_program("busybox"):
        pytest.skip("neither cpio nor busybox is installed")
    words = ["cpio", "-id"] if packages.find_program("cpio") else ["busybox", "cpio", "-id"]
    folder.mkdir()
    subprocess.run(words, input=data, cwd=folder, check=True, capture_output=True)


def test_cpio_is_what_others_read(tmp_path: Path) -> None:
    contents = {f"file{size}": os.urandom(size) for size in (0, 1, 2, 3, 4, 5, 4097)}
    data = initramfs.cpio(
        [
            initramfs.folder("a"),
            *(initramfs.file(f"a/{name}", content, 0o640) for name, content in contents.items()),
            initramfs.link("a/link", "file5"),
        ]
    )
    assert len(data) % 4 == 0
    unpack(data, tmp_path / "out")
    made = tmp_path / "out" / "a"
    assert {path.name: path.read_bytes() for path in made.iterdir() if not path.is_symlink()} == contents
    assert (made / "file4097").stat().st_mode & 0o777 == 0o640
    assert os.readlink(made / "link") == "file5"


def test_cpio_headers() -> None:
    data = initramfs.cpio([initramfs.file("ab", b"xyz", 0o755)])
    assert data[:6] == b"070701"
    numbers = [int(data[6 + 8 * field : 14 + 8 * field], 16) for field in range(13)]
    assert numbers == [1, 0o100755, 0, 0, 1, 0, 3, 0, 0, 0, 0, 3, 0]
    assert data[110:120] == b"ab\0" + b"\0\0\0" + b"xyz" + b"\0"[:1]
    assert data[120:126] == b"070701" and b"TRAILER!!!\0" in data[120:]


def test_the_second_archive_follows_the_first(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_bytes(initramfs.cpio([initramfs.file("first", b"1")]))
    descriptor = initramfs.complete(kept, {"settings": b"host=0\n", "command": b"true"})
    try:
        data = os.pread(descriptor, 1 << 20, 0)
    finally:
        os.close(descriptor)
    assert data.startswith(kept.read_bytes())
    unpack(data[len(kept.read_bytes()) :], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out/boot").iterdir()) == ["command", "settings"]


# -- command line -----------------------------------------------------------------------------------------

WIRES = qemu.Wires(10, 11, 12, 13, 14)


def options(words: list[str], name: str) -> list[str]:
    return [value for option, value in itertools.pairwise(words) if option == name]


def command(made: qemu.Plan, host: int = 0, cable: int = -1) -> list[str]:
    return list(qemu.command_line(made, host, Path("/k"), WIRES._replace(cable=cable)))


def test_memory_and_processors_are_dealt_out() -> None:
    words = command(qemu.Plan(numa=3, cpus=4, memory_mib=1000))
    assert [value for value in options(words, "-numa") if value.startswith("node")] == [
        "node,nodeid=0,cpus=0-1,memdev=memory0", "node,nodeid=1,cpus=2-2,memdev=memory1",
        "node,nodeid=2,cpus=3-3,memdev=memory2",
    ]  # fmt: skip
    sizes = [int(value.rpartition("=")[2][:-1]) for value in options(words, "-object")]
    assert sum(sizes) == 1000 and max(sizes) - min(sizes) <= 1
    assert len([value for value in options(words, "-numa") if value.startswith("dist")]) == 6
    assert options(words, "-initrd") == ["/dev/fd/10"]


def test_cards_are_on_the_nodes_in_turn() -> None:
    devices = options(command(qemu.Plan(numa=2, nics=3)), "-device")
    nodes = {f"node{node}": node for node in (0, 1)}
    for node in nodes.values():
        assert any(value.startswith(f"pxb-pcie,id=node{node},") and f"numa_node={node}" in value for value in devices)
    ports = [value for value in devices if value.startswith("pcie-root-port")]
    assert [value.split("bus=")[1].split(",")[0] for value in ports] == ["node0", "node1", "node0"]
    cards = [value for value in devices if value.startswith("virtio-net")]
    assert [value.split("mac=")[1][:17] for value in cards] == [qemu.mac(0, nic) for nic in range(3)]
    assert [value.split("bus=")[1].split(",")[0] for value in cards] == ["port0", "port1", "port2"]
    # One node: no bridges.
    devices = options(command(qemu.Plan(nics=1)), "-device")
    assert not any("pxb" in value for value in devices)


def test_two_machines_are_cabled_and_differ() -> None:
    made = qemu.Plan(pairs=0, nics=1, hosts=2)
    one, two = command(made, 0, 20), command(made, 1, 21)
    assert "socket,id=cable,fd=20" in one and "socket,id=cable,fd=21" in two
    assert qemu.mac(0, 0) != qemu.mac(1, 0)
    assert not any("cable" in word for word in command(qemu.Plan(nics=1)))


def test_shares_and_settings() -> None:
    words = command(qemu.Plan(shares=("/a,b", "/c")))
    assert any("path=/a,,b,security_model=none" in word and "readonly" not in word for word in words)
    assert any("path=/,security_model=none" in word and "readonly=on" in word for word in words)
    assert "here='/a b'\n" in qemu.Plan().settings(0, "/a b")
    assert "hugepages=7" in options(command(qemu.Plan(hugepages=7)), "-append")[0].split()
    for systemd in (False, True):
        plan = qemu.Plan(systemd=systemd)
        assert f"systemd={int(systemd)}\n" in plan.settings(0, "/")
        assert ("fstab=no" in options(command(plan), "-append")[0].split()) == systemd


def test_an_emulated_machine_is_told_the_rate_of_its_counter() -> None:
    assert "tsc_early_khz=2600123" in options(command(qemu.Plan(tsc_khz=2_600_123)), "-append")[0].split()
    assert not any("tsc_early_khz" in word for word in command(qemu.Plan()))
    first, second = ticks.khz(), ticks.khz()
    assert 500_000 < first < 10_000_000 and abs(first - second) < first / 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"hosts": 3}, {"hosts": 0}, {"numa": 5}, {"numa": 2, "cpus": 1}, {"memory_mib": 100}, {"pairs": -1},
        {"nics": 17}, {"shares": ("/",)}, {"shares": ("a",)}, {"shares": ("/a\nb",)},
    ],
)  # fmt: skip
def test_plans_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"host|NUMA|card|share"):
        qemu.Plan(**wrong)  # type: ignore[arg-type]


def test_kvm_only_on_processors_that_have_it() -> None:
    """A paravirtual /dev/kvm is there, may be used, and is a hundred times slower than none."""
    for flags, usable, chosen in (("fpu vmx", True, "kvm"), ("svm", True, "kvm"), ("fpu", True, "tcg"),
                                  ("vmx", False, "tcg"), ("vmxx", True, "tcg")):  # fmt: skip
        assert qemu.choose_accelerator(f"processor\t: 0\nflags\t\t: {flags}\n", usable) == chosen
    assert qemu.choose_accelerator("Features : asimd\n", True) == "tcg"


# -- boot -------------------------------------------------------------------------------------------------


def test_the_command_is_quoted(tmp_path: Path) -> None:
    text = boot.script(["printf", "%s|", "a b", "$HOME", "it's"], str(tmp_path), {"GIVEN": "x y"})
    said = subprocess.run(["sh"], input=text, capture_output=True, text=True, check=True).stdout
    assert said == "a b|$HOME|it's|"
    text = boot.script(["sh", "-c", 'printf "$GIVEN"; pwd'], str(tmp_path), {"GIVEN": "x y"})
    assert subprocess.run(["sh"], input=text, capture_output=True, text=True).stdout == f"x y{tmp_path}\n"
    assert subprocess.run(["sh"], input=boot.script(["true"], "/no/such", {}), text=True).returncode == 125


def test_what_is_passed_on() -> None:
    given = {"PATH": "/bin", "SIMM_TEST_SLOW": "1", "SIMM_PATH": "tcp", "SECRET": "x", "PYTHONPATH": "p", "LC_ALL": "C"}
    assert set(boot.passed_on(given)) == {"PATH", "SIMM_TEST_SLOW", "PYTHONPATH", "LC_ALL"}


def machine(words: list[str]) -> tuple[boot.Machine, dict[str, socket.socket]]:
    """A machine that is no machine: a process, and the guest's ends of its streams."""
    ours, theirs = {}, {}
    for name in ("console", "control", "out", "err"):
        ours[name], theirs[name] = socket.socketpair()
    return boot.Machine(0, subprocess.Popen(words), ours), theirs


def test_streams_and_exit_status(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    made, ends = machine(["sleep", "1000"])
    try:
        ends["control"].send(b"rea")
        ends["control"].send(b"dy 3.5\nexit 7\n")
        ends["out"].send(b"no newline")
        ends["err"].send(b"\xff\n")
        for end in ends.values():
            end.close()
        boot.Watch([made], None).run()
        assert made.status == 7 and made.ready_s > 0 and made.over
    finally:
        made.end()
    assert made.process.returncode == -signal.SIGKILL
    out, err = capfdbinary.readouterr()
    assert (out, err) == (b"no newline", b"\xff\n")


def test_two_machines_say_who_they_are(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    one, ends_of_one = machine(["sleep", "1000"])
    two, ends_of_two = machine(["sleep", "1000"])
    two.host = 1
    try:
        ends_of_one["out"].send(b"a\nb")
        ends_of_two["out"].send(b"c\n")
        for end in (*ends_of_one.values(), *ends_of_two.values()):
            end.close()
        boot.Watch([one, two], None).run()
    finally:
        one.end()
        two.end()
    out, _ = capfdbinary.readouterr()
    assert sorted(out.splitlines()) == [b"[0] a", b"[0] b", b"[1] c"]


def test_time_is_up_and_a_machine_that_dies() -> None:
    made, ends = machine(["sleep", "1000"])
    try:
        watch = boot.Watch([made], 0.1)
        watch.run()
        assert watch.timed_out and not made.over
    finally:
        made.end()
        for end in ends.values():
            end.close()
    made, ends = machine(["false"])
    ends["control"].send(b"failed no rxe0\n")
    ends["console"].send(b"Kernel panic\n")
    for end in ends.values():
        end.close()
    try:
        boot.Watch([made], None).run()
        assert made.over and made.status is None and made.why == "no rxe0" and b"panic" in made.console
    finally:
        made.end()


def test_a_machine_that_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot, "BOOT_S", 0.1)
    made, ends = machine(["sleep", "1000"])
    try:
        with pytest.raises(boot.BootFailed, match="did not come up"):
            boot.Watch([made], None).run()
    finally:
        made.end()
        for end in ends.values():
            end.close()


def test_nothing_outlives_a_runner_that_is_killed(tmp_path: Path) -> None:
    """By kill -9, with a program in QEMU's place."""
    (tmp_path / "k").write_bytes(b"")
    program = (
        "import sys, time; from pathlib import Path; from tests.rdma_vm import boot, kernel, qemu;"
        "qemu.command_line = boot.command_line = lambda *_: ['sleep', '1000'];"
        f"found = kernel.Kernel('k', Path({str(tmp_path / 'k')!r}), Path('/'));"
        "made = boot._start(qemu.Plan(), 0, found, found.image, {}, None);"
        "print(made.process.pid, flush=True); time.sleep(1000)"
    )
    with Child([sys.executable, "-c", program]) as runner:
        process = psutil.Process(int(runner.read_line()))
        assert alive(process)
        runner.process.kill()
    wait_until(lambda: not alive(process), "it ends")



# -- packages ---------------------------------------------------------------------------------------------


def test_missing_packages_and_the_line_that_installs_them(tmp_path: Path) -> None:
    needed = [("sh", "dash"), ("no-such-program", "bee"), ("/etc/there", "here"), ("/etc/not", "ant"), ("not2", "ant")]
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/there").touch()
    assert packages.missing(needed, str(tmp_path)) == ["ant", "bee", "ibverbs-providers"]
    (tmp_path / "usr/lib/x86_64-linux-gnu/libibverbs").mkdir(parents=True)
    (tmp_path / "usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so").touch()
    assert packages.missing(needed[:1], str(tmp_path)) == []
    assert packages.remedy(["ant", "bee"]) == "apt-get install --no-install-recommends ant bee"
