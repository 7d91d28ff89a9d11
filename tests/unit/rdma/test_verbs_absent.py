"""Without RDMA: what ``simm.verbs`` says when pyverbs, a device, an address or a right is missing. Needs none of them.

pyverbs itself is played by ``PYVERBS``, just enough of version 59's names for devices to open or not.
"""

from __future__ import annotations

import errno
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from simm import verbs
from simm.rdma import work_requests
from simm.rdma.api import FENCED_READ, READ, WRITE, Absence, FabricError

PYVERBS = {
    "__init__": "",
    "pyverbs_error": """
        import os
        class PyverbsError(Exception):
            pass
        class PyverbsRDMAError(PyverbsError):
            def __init__(self, text, code):
                super().__init__(f"{text}. Errno: {code}, {os.strerror(code)}")
                self.error_code = code
    """,
    "fork": """
        calls = []
        def is_fork_initialized():
            return 0
        def fork_init():
            calls.append("fork_init")
    """,
    "libibverbs_enums": """
        import enum
        IBV_QPT_RC, IBV_QP_STATE, IBV_QPS_ERR, IBV_WR_BIND_MW, IBV_WR_LOCAL_INV = 2, 1, 6, 5, 6
        class Access(enum.IntFlag):
            IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_MW_BIND = 1, 2, 4, 16
        globals().update(Access.__members__)
    """,
    "device": """
        from types import SimpleNamespace as Some
        from .fork import calls
        from .pyverbs_error import PyverbsRDMAError
        SICK, ODD = set(), {}
        class Context:
            num_comp_vectors = 2
            def __init__(self, name):
                self.name = name
                calls.append(f"open {name}")
                if name in SICK:
                    raise PyverbsRDMAError("Failed to open device", 13)
            def query_device(self):
                values = dict(max_mr_size=1 << 64, max_mw=77, device_cap_flags=1 << 24, max_qp_rd_atom=128,
                              max_qp_init_rd_atom=128, max_qp_wr=1 << 20, max_cqe=32767)
                return Some(**{**values, **ODD})
            def query_port(self, number):
                return Some(lid=7, active_mtu=5, link_layer=2, max_msg_sz=0)
            def query_gid(self, port, index):
                return "0000:0000:0000:0000:0000:ffff:0a00:0001"
            def close(self):
                calls.append(f"close {self.name}")
            def __del__(self):
                calls.append(f"destructor of {self.name}")
    """,
    "pd": """
        from .fork import calls
        class PD:
            def __init__(self, context):
                self.name = context.name
            def close(self):
                calls.append(f"close pd of {self.name}")
    """,
    "addr": "AHAttr = GID = GlobalRoute = None",
    "cq": "CQ = CompChannel = None",
    "mr": """
        from .pyverbs_error import PyverbsRDMAError
        MW = MWBindInfo = None
        class MR:
            def __init__(self, pd, length, access, address):
                raise PyverbsRDMAError("Failed to register a MR", 12 if length > 4096 else 14)
    """,
    "qp": "QP = QPAttr = QPCap = QPInitAttr = None",
    "wr": "SGE = SendWR = None",
}


def package(folder: Path, files: dict[str, str]) -> Path:
    (folder / "pyverbs").mkdir()
    for name, text in files.items():
        (folder / "pyverbs" / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


def device(root: Path, name: str, *, state: str = "4: ACTIVE", gid: bool = True, numa: int | None = None) -> None:
    """One port, in a tree like sysfs's."""
    port = root / "sys/class/infiniband" / name / "ports/1"
    for path, text in {
        "state": state,
        "link_layer": "Ethernet",
        "rate": "100 Gb/sec (4X EDR)",
        "gids/0": "0000:0000:0000:0000:0000:ffff:0a00:0001" if gid else "0000:0000:0000:0000:0000:0000:0000:0000",
        "gid_attrs/types/0": "RoCE v2",
    }.items():
        (port / path).parent.mkdir(parents=True, exist_ok=True)
        (port / path).write_text(text + "\n")
    if numa is not None:
        (root / "sys/class/infiniband" / name / "device").mkdir()
        (root / "sys/class/infiniband" / name / "device/numa_node").write_text(f"{numa}\n")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has not imported pyverbs, and does not find the system's."""
    for name in [name for name in sys.modules if name.split(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(verbs, "_library", None)
    monkeypatch.setattr(verbs, "_OPEN", [])

    def gone() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "pyverbs"]:
            del sys.modules[name]

    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "pyverbs").exists()])
    gone()
    return monkeypatch


@pytest.fixture
def played(fresh: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pyverbs is there, played; the root of a machine with no device yet."""
    fresh.syspath_prepend(str(package(tmp_path, PYVERBS)))
    root = tmp_path / "root"
    root.mkdir()
    return root


def test_not_installed(fresh: pytest.MonkeyPatch) -> None:
    for absence in (verbs.available(), verbs.open_fabric("mlx5_0")):
        assert isinstance(absence, Absence)
        assert "not installed" in absence.why and "python3-pyverbs" in absence.remedy and "link" in absence.remedy


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"__init__": ""}, "pyverbs.addr"),  # another Python's: the extension modules are not found
        ({"__init__": "", "addr": "raise ImportError('libibverbs.so.1: cannot open')"}, "libibverbs.so.1"),
        ({"__init__": "", "addr": "raise OSError('undefined symbol')"}, "undefined symbol"),
        ({"__init__": "raise SystemError('from another age')"}, "another age"),
        ({**PYVERBS, "cq": ""}, "CompChannel"),  # not what we know
        ({name: text for name, text in PYVERBS.items() if name != "libibverbs_enums"}, "libibverbs_enums"),
    ],
)  # fmt: skip
def test_broken(fresh: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], said: str) -> None:
    fresh.syspath_prepend(str(package(tmp_path, files)))
    for absence in (verbs.available(), verbs.open_fabric()):
        assert isinstance(absence, Absence)
        assert "cannot be loaded" in absence.why and (said in absence.why or said == "CompChannel") and absence.remedy


def test_importing_simm_does_not_import_pyverbs() -> None:
    code = "import sys, simm.verbs, simm.client; sys.exit('pyverbs' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_device_and_none_of_use(played: Path) -> None:
    root = str(played)
    absence = verbs.available(sys_root=root)
    assert absence is not None and "no RDMA device" in absence.why and absence.remedy
    device(played, "down", state="1: DOWN")
    device(played, "bare", gid=False)
    for absence in (verbs.available(sys_root=root), verbs.open_fabric(sys_root=root)):
        assert isinstance(absence, Absence)
        assert "its state is DOWN" in absence.why and "no GID" in absence.why and absence.remedy
    device(played, "good")
    assert verbs.available(sys_root=root) is None
    for absence in (
        verbs.available("other", sys_root=root),
        verbs.available(None, env={"SICL_NET_DEVICES": "other"}, sys_root=root),
    ):
        assert isinstance(absence, Absence)
        assert "'other'" in absence.why and "good:1" in absence.why
    assert isinstance(verbs.open_fabric("down", sys_root=root), Absence)
    from pyverbs import fork  # type: ignore[import-not-found]

    assert fork.calls == [], "no device is opened to say so"


def test_a_device_that_does_not_open_is_left_out(played: Path) -> None:
    for name in ("one", "two"):
        device(played, name)
    assert verbs.available(sys_root=str(played)) is None
    from pyverbs import device as theirs
    from pyverbs import fork

    theirs.SICK.add("one")
    fabric = verbs.open_fabric(sys_root=str(played))
    assert isinstance(fabric, verbs.VerbsFabric)
    assert [rail.name for rail in fabric.rails] == ["two:1"]
    ((name, why),) = fabric.skipped
    assert name == "one:1" and "Permission denied" in why
    rail = fabric.rails[0]
    assert rail.limits == (1 << 46, 77, 16, 256), "what the device says is cut to what can be"
    assert (rail.mtu, rail.lid, rail.gid) == (4096, 7, bytes(10) + b"\xff\xff\x0a\x00\x00\x01")
    assert fork.calls[0] == "fork_init", "before the first object"
    for length, code, hint in ((8192, "ENOMEM", "ulimit -l"), (1, "EFAULT", "not mapped")):
        from simm.rdma.api import Access

        with pytest.raises(FabricError, match=hint) as caught:
            rail.register(4096, length, Access.LOCAL_WRITE)
        assert caught.value.status == code
    fabric.close()
    fabric.close()
    made = [call for call in fork.calls if not call.startswith("destructor")]
    assert made == ["fork_init", "open one", "open two", "close pd of two", "close two"], "children first, once"

    theirs.SICK.add("two")
    absence = verbs.open_fabric(sys_root=str(played))
    assert isinstance(absence, Absence)
    assert "one:1: " in absence.why and "two:1: " in absence.why and "/dev/infiniband" in absence.remedy


DMABUF_MR = """
        from .fork import calls
        ERRORS = {}
        MR = MW = MWBindInfo = None
        class DmaBufMR:
            def __init__(self, pd, length, access, dmabuf=None, offset=0, gpu=0, gtt=0):
                if dmabuf in ERRORS:
                    raise ERRORS[dmabuf]
                calls.append(f"dma-buf {dmabuf} offset {offset} length {length} access {access}")
                self.lkey, self.rkey = 77, 78
            def close(self):
                calls.append("close dma-buf mr")
"""


def test_a_dma_buf_is_registered_by_its_offset(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pyverbs has no parameter for another address."""
    fresh.syspath_prepend(str(package(tmp_path, {**PYVERBS, "mr": DMABUF_MR})))
    root = tmp_path / "root"
    root.mkdir()
    device(root, "one")
    fabric = verbs.open_fabric(sys_root=str(root))
    assert not isinstance(fabric, Absence)
    from pyverbs import fork, mr
    from pyverbs.pyverbs_error import PyverbsRDMAError  # type: ignore[import-not-found]

    from simm.rdma.api import Access

    rail = fabric.rails[0]
    before = len(fork.calls)
    region = rail.register_dmabuf(33, 0, 4096, Access.LOCAL_WRITE)
    assert (region.address, region.length, region.lkey, region.rkey) == (0, 4096, 77, 78)
    other = rail.register_dmabuf(33, 8292, 100, Access(0))
    assert other.address == 8292
    other.close()
    other.close()
    for code, status, hint in (
        (95, "EOPNOTSUPP", "driver takes none"), (9, "EBADF", "no dma-buf"), (22, "EINVAL", "does not take this"),
        (12, "ENOMEM", "BAR"), (14, "EFAULT", "cannot be reached"), (5, "EIO", ""),
    ):  # fmt: skip
        mr.ERRORS[34] = PyverbsRDMAError("Failed to register a dma-buf MR", code)
        with pytest.raises(FabricError, match=f"one:1: cannot register 100 bytes of a dma-buf: .*{hint}") as caught:
            rail.register_dmabuf(34, 0, 100, Access.LOCAL_WRITE)
        assert getattr(errno, caught.value.status) == code == getattr(errno, status)
    mr.ERRORS[34] = TypeError("Argument 'dmabuf' has incorrect type (expected pyverbs.dmabuf.DmaBuf, got int)")
    with pytest.raises(FabricError, match=r"takes no descriptor .*: install rdma-core 44"):
        rail.register_dmabuf(34, 0, 100, Access.LOCAL_WRITE)
    for offset, length in ((-1, 100), (0, 0), (0, 1 << 47)):
        with pytest.raises(FabricError):
            rail.register_dmabuf(33, offset, length, Access.LOCAL_WRITE)
    fabric.close()
    with pytest.raises(FabricError, match="the rail is closed"):
        rail.register_dmabuf(33, 0, 100, Access.LOCAL_WRITE)
    assert fork.calls[before : before + 3] == [
        "dma-buf 33 offset 0 length 4096 access 1", "dma-buf 33 offset 8292 length 100 access 0", "close dma-buf mr",
    ]  # fmt: skip
    assert [call for call in fork.calls if "close" in call][-3:] == ["close dma-buf mr", "close pd of one", "close one"]


def test_a_pyverbs_without_dma_bufs(played: Path) -> None:
    from simm.rdma.api import Access

    device(played, "one")
    fabric = verbs.open_fabric(sys_root=str(played))
    assert not isinstance(fabric, Absence)
    with pytest.raises(FabricError, match="no call for it: install rdma-core and python3-pyverbs 44"):
        fabric.rails[0].register_dmabuf(33, 0, 100, Access.LOCAL_WRITE)
    fabric.close()


def test_limits_that_cannot_be(played: Path) -> None:
    device(played, "odd")
    assert verbs.available(sys_root=str(played)) is None
    from pyverbs import device as theirs

    theirs.ODD.update(max_mr_size=0, max_mw=-5, max_qp_rd_atom=0, max_qp_wr=0, max_cqe=0, max_qp_init_rd_atom=0)
    fabric = verbs.open_fabric(sys_root=str(played))
    assert not isinstance(fabric, Absence)
    assert fabric.rails[0].limits == (1 << 46, 0, 1, 16)
    with pytest.raises(FabricError, match="no memory windows"):
        fabric.rails[0].window()
    fabric.close()
    theirs.ODD.update(max_mr_size=1 << 30, device_cap_flags=0, max_mw=5)
    fabric = verbs.open_fabric(sys_root=str(played))
    assert not isinstance(fabric, Absence)
    assert fabric.rails[0].limits[:2] == (1 << 30, 0), "windows of type 1 are not ours"
    fabric.close()


def test_an_abandoned_fabric_is_of_no_use_and_closes_nothing(played: Path) -> None:
    """As in a child after a fork. Nor do destructors run when it is dropped."""
    device(played, "one")
    fabric = verbs.open_fabric(sys_root=str(played))
    assert isinstance(fabric, verbs.VerbsFabric)
    from pyverbs import fork

    before = list(fork.calls)
    verbs._in_the_child()
    rail = fabric.rails[0]
    with pytest.raises(FabricError, match="forked"):
        rail.queue_pair()
    fabric.close()
    fabric.abandon()
    del fabric, rail
    assert fork.calls == before


def test_without_the_extra_reference_destructors_would_run(played: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    device(played, "one")
    monkeypatch.setattr(work_requests, "pin", lambda made: None)
    fabric = verbs.open_fabric(sys_root=str(played))
    from pyverbs import fork

    verbs._in_the_child()
    del fabric
    import gc

    gc.collect()
    assert fork.calls[-1] == "destructor of one"


def test_long_operations_are_posted_in_pieces() -> None:
    ops = [(WRITE, 100, 1, 10, 1000, 2), (FENCED_READ, 200, 1, 25, 2000, 3), (READ, 300, 1, 20, 3000, 3)]
    assert work_requests.split(ops, 10) == [
        (WRITE, 100, 1, 10, 1000, 2),
        (FENCED_READ, 200, 1, 10, 2000, 3), (READ, 210, 1, 10, 2010, 3), (READ, 220, 1, 5, 2020, 3),
        (READ, 300, 1, 10, 3000, 3), (READ, 310, 1, 10, 3010, 3),
    ]  # fmt: skip
    assert work_requests.split([(READ, 5, 1, 0, 6, 2)], 10) == [(READ, 5, 1, 0, 6, 2)]


def test_statuses_have_the_numbers_of_the_interface() -> None:
    for number, name in (
        (0, "SUCCESS"),
        (5, "WR_FLUSH_ERR"),
        (10, "REM_ACCESS_ERR"),
        (12, "RETRY_EXC_ERR"),
        (21, "GENERAL_ERR"),
    ):
        assert work_requests.meaning_of(number)[0] == name
    assert work_requests.meaning_of(99)[0] == "99"
