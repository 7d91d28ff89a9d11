"""What Mooncake's Python API for its store has beside the store: codes, enumerations, options, memory by address."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import itertools
import logging
import mmap
import os
from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from ..errors import DeviceError, UsageError
from ..host import numa
from ..host.buffers import Pieces, Ranges, Span
from ..sdk.ops.parts import pieces_of, ranges_of
from ..wire.status import Status

if TYPE_CHECKING:
    from ..gpu.cuda import Driver

_T = TypeVar("_T")

log = logging.getLogger("simm.connectors.mooncake")

#: Mooncake's codes, as far as these calls return them.
OK: Final = 0
FAILED: Final = -1
NO_AVAILABLE_HANDLE: Final = -200
INVALID_PARAMS: Final = -600
OBJECT_NOT_FOUND: Final = -704
TRANSFER_FAIL: Final = -800
RPC_FAIL: Final = -900

#: CUDA_ERROR_INVALID_VALUE: the driver's answer for an address that it does not know.
_UNKNOWN_TO_CUDA: Final = 1


class ObjectDataType(enum.IntEnum):
    """What an object holds. SiMM does not care."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class SoftPinAction(enum.IntEnum):
    """Whether a put pins an object softly. SiMM does not."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ReplicaStatus(enum.IntEnum):
    """The state of a copy of an object; of those that are found it is COMPLETE."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class ReplicateConfig:
    """How a put places copies. Accepted without effect: SiMM's own settings decide (SIMM_REPLICAS)."""

    def __init__(self) -> None:
        self.replica_num = 1
        self.dfs_replica_num = 0
        self.nof_replica_num = 0
        self.with_hard_pin = False
        self.soft_pin_action = SoftPinAction.PRESERVE
        self.soft_pin_ttl_ms: int | None = None
        self.preferred_segment = ""
        self.preferred_segments: list[str] = []
        self.preferred_nof_segments: list[str] = []
        self.prefer_alloc_in_same_node = False
        self.data_type = ObjectDataType.UNKNOWN
        self.group_ids: list[str] | None = None


class ReplicaDescriptor:
    """A copy of an object, in memory. Where it lies is not for the client to know."""

    status = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        """Return True."""
        return True

    def is_disk_replica(self) -> bool:
        """Return False."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Return False."""
        return False


class BufferHandle(bytearray):
    """A value in memory of its own: a buffer, which the caller may write to."""

    def ptr(self) -> int:
        """Return the address, which is good while this object lives and keeps its length."""
        return ctypes.addressof((ctypes.c_char * len(self)).from_buffer(self))

    def size(self) -> int:
        """Return the length in bytes."""
        return len(self)


class MooncakeHostMemAllocator:
    """Allocates page-aligned memory by address."""

    def __init__(self) -> None:
        self._blocks: dict[int, mmap.mmap] = {}

    def alloc(self, size: int) -> int:
        """Return the address of ``size`` bytes, zeroed. Raises RuntimeError if there are none."""
        try:
            block = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError) as exc:
            raise RuntimeError(f"no memory of {size} bytes: {exc}") from None
        address: int = np.frombuffer(block, np.uint8).__array_interface__["data"][0]
        self._blocks[address] = block
        return address

    def free(self, ptr: int) -> int:
        """Give a block back; return 0, or -1 if it is none."""
        return OK if self._blocks.pop(ptr, None) is not None else FAILED


class DeviceMemory(UsageError):
    """A caller passes the address of a GPU's memory, where these calls take the host's."""


class HostMemory:
    """Memory by address, for one call of the store. The CPU copies from it and to it, and dies at a GPU's address.

    Args:
        registered: spans by their addresses, which were asked about when they were registered.
    """

    def __init__(self, registered: Mapping[int, Span]) -> None:
        self._registered = registered
        self._driver: Driver | None = None
        self._asked = False

    def __call__(self, address: int, size: int) -> Span:
        """Return memory, with its registration if it has one. O(registrations).

        Raises DeviceMemory for a GPU's, UsageError for what is none.
        """
        for start, span in self._registered.items():
            if start <= address and address + size <= start + span.size:
                return span.part(address - start, size)
        made = Span(address, size)
        if not self._asked:  # once a call: the caller had these addresses before
            self._asked, self._driver = True, cuda_driver()
        if self._driver is not None:
            _check_host(self._driver, address)
        return made


#: Whether this process has been seen to use CUDA. It then does until it ends.
_cuda_begun = False


def cuda_driver() -> Driver | None:
    """Return CUDA's driver, None if this process does not use it: there is no GPU memory then.

    The question neither loads the driver nor begins its use. A process that forks later must not have done so.
    """
    global _cuda_begun
    from ..gpu import cuda  # with none, it loads no more than ctypes

    if not _cuda_begun:
        try:
            library = ctypes.CDLL(cuda.LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            return None
        if library.cuDeviceGetCount(ctypes.byref(ctypes.c_int())):
            return None  # loaded, but not initialised
        _cuda_begun = True
    try:
        return cuda.load()
    except DeviceError:  # in a child after a fork, where no GPU can be used
        return None


def _check_host(driver: Driver, address: int) -> None:
    """Raise DeviceMemory unless the CPU may use this address."""
    from ..gpu import cuda

    try:
        kind, device = driver.memory_at(address)
    except cuda.CudaError as exc:
        if exc.code == _UNKNOWN_TO_CUDA:
            return  # plain memory of the host
        raise DeviceMemory(f"CUDA's driver does not say whose memory {address:#x} is: {exc}") from exc
    if kind not in (cuda.MEMORY_DEVICE, cuda.MEMORY_UNIFIED):
        return
    with contextlib.suppress(cuda.CudaError):
        if driver.managed(address):
            return  # the CPU may use it, too
    raise DeviceMemory(
        f"{address:#x} is memory of GPU {device}, and Mooncake's API over SiMM takes host memory only: use SiMM's own"
        " connector for this engine (docs/engines.md), or have the engine keep what it stores in host memory"
    )


def bind_to_numa_node(node: int) -> None:
    """Keep the calling thread on a node's processors, as far as its cpuset has them; the kernel allocates there."""
    try:
        numa.pin(node)
    except UsageError as exc:
        log.warning("%s", exc)


def invalid(*_: Any, **__: Any) -> int:
    """Return the code of a call whose arguments make no sense, whatever they are."""
    return INVALID_PARAMS


def failure(*_: Any, **__: Any) -> int:
    """Return the code of a call that fails for another reason."""
    return FAILED


def unreached(*_: Any, **__: Any) -> int:
    """Return the code of a call that reached nobody."""
    return RPC_FAIL


def each_of(keys: object, code: _T) -> list[_T]:
    """Return a code for each of the keys; none for what is no list of them."""
    return [code] * len(keys) if isinstance(keys, Sized) else []


def all_invalid(keys: Sequence[str], *_: Any, **__: Any) -> list[int]:
    """Do :func:`invalid` for each key."""
    return each_of(keys, INVALID_PARAMS)


def all_unreached(keys: Sequence[str], *_: Any, **__: Any) -> list[int]:
    """Do :func:`unreached` for each key."""
    return each_of(keys, RPC_FAIL)


def same_length(*lists: Sequence[Any]) -> None:
    """Raise UsageError unless the lists have as many entries."""
    if len({len(each) for each in lists}) > 1:
        raise UsageError(f"lists of {', '.join(str(len(each)) for each in lists)} entries are not of one length")


def pieces_at(memory: HostMemory, addresses: Sequence[int], sizes: Sequence[int]) -> Pieces:
    """Return pieces of memory as a value. Raises UsageError, and what ``memory`` does. O(pieces)."""
    same_length(addresses, sizes)
    return pieces_of([memory(*each) for each in zip(addresses, sizes)])


def ranges_at(
    memory: HostMemory, addresses: Sequence[int], sizes: Sequence[int], offsets: Sequence[int] | None = None
) -> Ranges:
    """Return pieces of memory as ranges of a value, one behind the other unless ``offsets`` says where. O(pieces).

    Raises UsageError, and what ``memory`` does.
    """
    same_length(addresses, sizes)
    if offsets is None:
        offsets = list(itertools.accumulate(sizes, initial=0))[:-1]
    same_length(addresses, offsets)
    return ranges_of([
        (offset, size, memory(address, size)) for address, size, offset in zip(addresses, sizes, offsets)
    ])  # fmt: skip


def put_code(status: int) -> int:
    """Return Mooncake's code for a put's Status."""
    if status == Status.OK:
        return OK
    return RPC_FAIL if status == Status.UNAVAILABLE else NO_AVAILABLE_HANDLE
