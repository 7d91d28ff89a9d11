"""A plugin of SGLang that lets its hierarchical cache run on a CPU: copies and events in place of CUDA's.

SGLang finds it by the entry point in the folder beside, and installs it in each of its processes. Replaced are: the
registration of host memory with CUDA; events and streams, as copies here have ended when they return; and the two
methods that copy pages of keys and values between device pool and host pool. What decides, hashes, stores and loads
pages is the released engine's.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any


class Event:
    """Something that has happened."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class Stream:
    """An order of things that happen at once."""

    def wait_event(self, _: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


DEVICE = SimpleNamespace(
    __name__="cpu", Event=Event, Stream=Stream, stream=lambda _: contextlib.nullcontext(), current_stream=Stream,
    synchronize=lambda *_: None,
)  # fmt: skip


def host_rows(host: Any, references: Any, layer: int, indices: Any) -> tuple[Any, Any]:
    """Return the tensor of a layer in the host pool, and what selects these tokens in it."""
    rows = references[layer]
    if host.layout == "page_first_direct":
        return rows, (indices // host.page_size, indices % host.page_size)
    return rows, (indices,)


def load_to_device_per_layer(
    self: Any, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, io_backend: str, **_: Any
) -> None:
    for device, references in ((self.device_k_buffers, self.k_data_refs), (self.device_v_buffers, self.v_data_refs)):
        rows, selected = host_rows(self, references, layer_id, host_indices.cpu())
        device[layer_id][device_indices.cpu()] = rows[selected]


def backup_from_device_all_layer(
    self: Any, device_pool: Any, host_indices: Any, device_indices: Any, io_backend: str
) -> None:
    for layer in range(self.layer_num):
        for device, references in (
            (self.device_k_buffers, self.k_data_refs), (self.device_v_buffers, self.v_data_refs)
        ):  # fmt: skip
            rows, selected = host_rows(self, references, layer, host_indices.cpu())
            rows[selected] = device[layer][device_indices.cpu()]


def install() -> None:
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache import l2_transfer
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    common._cuda_host_register = lambda *_, **__: None
    cache_controller.device_module = l2_transfer.device_module = DEVICE
    MHATokenToKVPoolHost.load_to_device_per_layer = load_to_device_per_layer
    MHATokenToKVPoolHost.backup_from_device_all_layer = backup_from_device_all_layer
