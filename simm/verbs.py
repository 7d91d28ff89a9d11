"""RDMA by pyverbs: what :mod:`simm.fabric` asks for, on real devices. The only importer of pyverbs.

What can go wrong with verbs from Python
----------------------------------------
* **Importing it.** pyverbs is part of rdma-core, built by the distribution for its own Python: another one finds no
  ``pyverbs.device``, a virtual environment finds nothing. So it is looked for at the first need, and whatever the
  import raises is an :class:`~simm.fabric.Absence`, not an error. Version 59 renamed the module of the constants.
* **The GIL.** No call of pyverbs gives it up. Registering (seconds per 10 GiB), connecting (a second when nobody
  answers for the peer's address) and a blocking wait for an event stop all threads of the process. So big memory is
  registered in pieces by who owns it; ``neighbours.py`` asks first whether somebody answers; and we sleep in
  ``poll(2)`` on the completion channel's descriptor, which is non-blocking, before we ask for the event. pyverbs 44
  does not tell the descriptor: it is the one that appears in ``/proc/self/fd`` while the channel is made, under a
  lock, and made once more when two appeared.
* **Memory that C keeps.** ``SGE`` and ``SendWR`` are freed by ``close()`` only, and a chained work request is not kept
  alive by the one before. Ours are made once, linked once, and re-targeted in place; those of a closed link are kept
  for the next (``SPARES``) and never freed, so that no version of pyverbs can free them twice.
* **Destructors.** A pyverbs object that is dropped destroys its verbs object, in whatever order the collector likes,
  with the errors going nowhere. Worse: a forked child inherits the uverbs descriptor, and a destructor that runs
  there, be it at its exit, destroys the *parent's* queue pair. So each object has one reference too many from its
  birth on (``pin``), which only our ``close`` takes away: no destructor ever runs by itself. What a process has
  not closed when it ends the kernel destroys, as it does after a kill.
* **Fork.** Kernels from 5.12 on copy pinned pages at a fork for the child, and the parent keeps what the device writes
  to (``is_fork_initialized() == UNNEEDED``). On older ones ``fork_init`` must come before the first object: it takes
  registered private memory away from children. In the child all is marked as of no use at once (``register_at_fork``).
* **Endless retries.** ``retry_cnt`` and ``rnr_retry`` of 7 mean for ever. Ours are finite: a dead peer costs ``4.096
  us * 2^timeout * (retry_cnt + 1)``, 1.1 s, and up to four times that on devices that round up.
* **Queues.** Soft-RoCE takes more work requests than it was asked for and fails later; we count. There is a completion
  for each chain and none for the operations before its last, which are done when that is: one queue pair completes in
  order. An error has a completion of its own, signalled or not. Two queue pairs never share a completion queue.
* **Bytes in flight after the end.** Destroying a queue pair is the fence: rxe stops its tasks and waits for them,
  mlx5's firmware answers when the last DMA of the queue pair is done. Packets for it that arrive later find no such
  queue pair; a later one with its number starts at a random packet number. Moving to the error state first cancels
  what is queued, so that destroying 256 operations under way takes no longer than destroying none.

Chains
------
``post_send`` copies work requests into the device's queue before it returns. So a link has one row of them, each
linked to the one before it in the row; a chain of n begins at the n-th and ends with the first, the only one that is
ever signalled. Per operation that is six stores into C structs, 0.17 us natively (CPython 3.11), against 1.0 for new
objects. ``post`` and ``wait`` together cost 1.4 us for a chain of one and 0.23 for each further operation, without
what the C below does. On soft-RoCE in the emulator, where Python runs 20 times slower: an 8-byte READ 133 us, 86 with
bare ``post_send`` and ``poll``; 64 KiB and more as quick as bare. Flags and opcode are set anew each time, so a fence
cannot be left over from an earlier chain. The constants are plain ints: ``|`` of pyverbs' enums alone costs more than
all of that. WRITEs are not sent inline: the processor would copy from the address, which is a crash where it is a
GPU's. The fence of verbs waits for earlier READs; that a READ is carried out after earlier WRITEs is the responder's
order.

dma-buf
-------
``DmaBufMR(pd, length, access, dmabuf=descriptor, offset=...)`` calls ``ibv_reg_dmabuf_mr`` with the offset as the I/O
virtual address too, and has no parameter for another: operations on such a region count from the offset, and not from
the GPU's address. (``ibv_reg_dmabuf_mr`` itself takes any, and mlx5's own ``Mlx5DmaBufMR`` has a parameter for it, in
later versions and for that card alone; the plain one would need the pointer to the ``ibv_pd``, which pyverbs does not
give.) So ``Region.address`` is the offset, and who posts translates (``gpudirect.py``). Without a descriptor pyverbs
allocates memory of a GPU's by itself; so one is always passed. From then on the kernel has its own reference to the
dma-buf, and the descriptor may be closed.

Windows
-------
Type 2, bound by a work request to one queue pair (so another client cannot use a key that it guessed). pyverbs sends
the bind, with the next key after ``MW.rkey``; but it is the application that must then note the new key in the
``ibv_mw``, or the next bind is refused and kills the queue pair, and pyverbs has no setter. The struct is part of the
ABI of libibverbs. We find it through a work request that points to it, check all that pyverbs tells about it against
what is there, and write that one word (``Tag``); where the check fails, windows are freed and allocated anew for
each binding instead, which is slower by two system calls. Invalidation is ``LOCAL_INV``; its key goes into
``imm_data``, which is the same word of ``ibv_send_wr``. The low byte of a key counts up, so a key is good again after
256 bindings of the same window on the same link: it then allows what that link is granted at that time.

A device may count a bound window as a user of its queue pair, and does of its region: either cannot go before it.
``VerbsLink.close`` frees the windows bound to it, ``VerbsRegion.close`` those bound to it; they are allocated again at
the next bind. Soft-RoCE (kernel 6.1) checks a window's key and queue pair, and not its bounds but the region's: there,
and only there, a client with a grant could write beside it. And a packet of 4 KiB that it is copying on one processor
while another invalidates the key is still copied: nothing that an honest client does, whose WRITEs are done before it
commits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from . import rails as rails_
from . import verbs_wr
from .errors import ConfigError
from .fabric import Absence, Fabric, FabricError, Rail
from .verbs_link import VerbsRail
from .verbs_wr import Library

_FORK_DISABLED: Final = 0


def _import() -> Library:
    """Import pyverbs; raises whatever that does."""
    import pyverbs.addr
    import pyverbs.cq
    import pyverbs.device
    import pyverbs.fork
    import pyverbs.mr
    import pyverbs.pd
    import pyverbs.pyverbs_error
    import pyverbs.qp
    import pyverbs.wr

    try:
        import pyverbs.enums as enums
    except ImportError:  # since version 59
        import pyverbs.libibverbs_enums as enums
    package: Any = pyverbs
    return Library({**vars(package), "enums": enums})


#: Set by the first import that succeeds.
_library: Library | None = None


def _load() -> Library | Absence:
    """pyverbs, or why this Python has none."""
    global _library
    if _library is None:
        try:
            _library = _import()
        except ModuleNotFoundError as error:
            if error.name == "pyverbs":
                return Absence(
                    "pyverbs is not installed for this Python",
                    "install python3-pyverbs (Debian, Ubuntu, Fedora); in a virtual environment of the system's Python "
                    "add a folder with one link to that package to its path: simm doctor prints the commands",
                )
            return Absence(
                f"pyverbs is there and cannot be loaded ({error})",
                "it is built for the system's own Python: run SiMM with that; simm doctor says more",
            )
        except Exception as error:
            return Absence(
                f"pyverbs is there and cannot be loaded ({type(error).__name__}: {error})",
                "install rdma-core and python3-pyverbs of the same version",
            )
    return _library


class VerbsFabric:
    """Rails of this process; see :class:`simm.fabric.Fabric`. ``skipped``: the ports that are not, with the reason."""

    def __init__(self, opened: Sequence[VerbsRail], skipped: Sequence[tuple[str, str]]) -> None:
        self._rails = tuple(opened)
        self.rails: Sequence[Rail] = self._rails
        self.skipped = tuple(skipped)
        _OPEN.append(self)

    def close(self) -> None:
        for rail in self._rails:
            rail.close()
        if self in _OPEN:
            _OPEN.remove(self)

    def abandon(self) -> None:
        """Comes by itself in every child, and does no harm twice. In the parent it would only leak."""
        for rail in self._rails:
            rail.forget()


#: All that are open, and so never dropped.
_OPEN: Final[list[VerbsFabric]] = []


def _in_the_child() -> None:
    verbs_wr.forget_lock()
    for fabric in _OPEN:
        fabric.abandon()
    # The child may use verbs on its own; what it inherited stays pinned.
    _OPEN.clear()


os.register_at_fork(after_in_child=_in_the_child)


# --- from outside -------------------------------------------------------------------------------


def _usable_ports(
    devices: str | None, numa: int, env: Mapping[str, str], sys_root: str
) -> tuple[list[rails_.Port], list[tuple[str, str]]] | Absence:
    """The ports to use, and those not to with the reason."""
    known = rails_.ports(sys_root)
    if not known:
        return Absence("this host has no RDMA device", "load the card's driver; pass the devices into the container")
    spec, source = rails_.restriction(devices, env)
    try:
        named = rails_.parse_devices(spec, known) if spec else None
    except ConfigError as error:
        return Absence(f"{source}: {error}", "name one of those")
    verdicts = rails_.choose(numa, known, named=named)
    chosen = [verdict.port for verdict in verdicts if verdict.used]
    if not chosen:
        reasons = "; ".join(f"{verdict.port.name}: {verdict.why}" for verdict in verdicts)
        return Absence(f"no RDMA port can be used ({reasons})", "see simm topo; a port must be up and have an address")
    return chosen, [(verdict.port.name, verdict.why) for verdict in verdicts if not verdict.used]


def available(
    devices: str | None = None, *, numa: int = -1, env: Mapping[str, str] = os.environ, sys_root: str = "/"
) -> Absence | None:
    """Whether it makes sense to call :func:`open_fabric`: None, or why not. Opens no device; some file reads."""
    library = _load()
    if isinstance(library, Absence):
        return library
    found = _usable_ports(devices, numa, env, sys_root)
    return found if isinstance(found, Absence) else None


def open_fabric(
    devices: str | None = None, *, numa: int = -1, env: Mapping[str, str] = os.environ, sys_root: str = "/"
) -> Fabric | Absence:
    """Open the rails of NUMA node ``numa`` (-1: of none in particular), or say why there are none.

    ``devices`` restricts them (``mlx5_0,mlx5_1:2``), as the engines' variable in ``env`` does. A device that does not
    open is left out, with the reason in ``skipped``. Never raises for what is missing. The caller owns the result.
    """
    library = _load()
    if isinstance(library, Absence):
        return library
    found = _usable_ports(devices, numa, env, sys_root)
    if isinstance(found, Absence):
        return found
    chosen, skipped = found
    if int(library.fork_status()) == _FORK_DISABLED:
        try:
            library.fork_init()
        except library.Error:
            pass  # too late: somebody else's memory is registered already, and protecting it was up to them
    opened = []
    for port in chosen:
        try:
            opened.append(VerbsRail(library, port))
        except FabricError as error:
            skipped.append((port.name, str(error)))
    if not opened:
        reasons = "; ".join(f"{name}: {why}" for name, why in skipped)
        return Absence(
            f"no RDMA device could be opened ({reasons})",
            "this user needs read and write access to /dev/infiniband/uverbs*, in a container too",
        )
    return VerbsFabric(opened, skipped)
