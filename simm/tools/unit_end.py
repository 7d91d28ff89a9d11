"""Let the workers of a data server's unit end before systemd kills them: the unit's ``ExecStopPost=``.

A supervisor that ends cleanly has no process left behind it, and this returns at once. One that was killed (by the
watchdog, by the OOM killer, by hand) leaves workers that see its end and suspend their arenas, which takes them
milliseconds, or longer on a busy host. ``KillMode=mixed`` sends SIGKILL to all of the unit at that same moment. A
worker that loses this race leaves an arena that the next start has to throw away.

systemd runs ``ExecStopPost=`` between the two, in the control group of the unit. So this waits until that group is
empty. A worker that hangs costs the whole wait, and then its values. ``KillMode=control-group`` would be no way out: it
sends SIGTERM to supervisor and workers at once, and the workers would go before the cluster knows.
"""

from __future__ import annotations

import sys
import time
from typing import Final

from ..host.processes import of_my_cgroup

#: Seconds; below ``TimeoutStopSec=`` of the unit.
WAIT_S: Final = 20.0
_LOOK_S: Final = 0.02


def wait_alone(seconds: float = WAIT_S) -> set[int]:
    """Wait until no other process is in this control group. Return those that still are after ``seconds``."""
    until = time.monotonic() + seconds
    while (others := of_my_cgroup()) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    return others


def main() -> int:
    """Wait; the exit code is 1 if there are processes left, or if that cannot be told."""
    try:
        others = wait_alone()
    except OSError as exc:
        print(f"simm: cannot wait for the processes of this unit: {exc}", file=sys.stderr)
        return 1
    if others:
        print(f"simm: processes {sorted(others)} of this unit did not end in {WAIT_S:.0f} s", file=sys.stderr)
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(main())
