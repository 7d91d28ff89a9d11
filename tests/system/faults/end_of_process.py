"""A program with a client that forks, executes, uses threads and ends without close: ``... MANAGER PATH``.

It says a line of JSON: what its children saw. Then it ends as programs do that know nothing of SiMM: its client is
open, threads are in the middle of calls, and a view is held.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from typing import Any, Final

from simm.client import Client
from simm.errors import SimmError

CHILDREN: Final = 3
#: Lists what the program executed by a child has open and mapped of the parent's.
LIST: Final = (
    "import os, json\n"
    "found = [os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if int(fd) > 2"
    " and os.path.exists(f'/proc/self/fd/{fd}')]\n"
    "found += [line.split()[-1] for line in open('/proc/self/maps') if 'simm' in line]\n"
    "print(json.dumps([each for each in found if 'simm' in each or 'socket' in each]), flush=True)\n"
)


def sockets() -> set[str]:
    """Return the inodes of this process's sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if link.startswith("socket:"):
            found.add(link)
    return found


def fork(body: Any) -> Any:
    """Run ``body`` in a forked child; return what it returns."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            theirs.sendall(json.dumps(body()).encode())
        finally:
            os._exit(0)
    theirs.close()
    ours.settimeout(60)
    said = b""
    while piece := ours.recv(1 << 16):
        said += piece
    os.waitpid(pid, 0)
    ours.close()
    return json.loads(said)


def main() -> None:
    """See the module."""
    manager, path = sys.argv[1:]
    client = Client(manager, path=path, namespace="ends", deadline_s=20.0)
    value = b"of the parent " * 1000
    assert client.put("parent", value)
    view = client.view("parent") if path == "shm" else None
    mine = sockets()

    def child() -> dict[str, Any]:
        number = os.getpid()
        right = client.get("parent") == value and client.put(f"child/{number}", b"of the child")
        opened = len(sockets() - mine)
        right = right and client.get(f"child/{number}") == b"of the child" and client.delete(f"child/{number}")
        return {"right": right, "own": opened}

    children = [fork(child) for _ in range(CHILDREN)]
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 1)
        os.execv(sys.executable, [sys.executable, "-I", "-c", LIST])
    os.close(write)
    with os.fdopen(read) as pipe:
        executed = json.loads(pipe.read())
    os.waitpid(pid, 0)
    seen = client.get("parent") == value and (view is None or bytes(view.data) == value)

    def work(number: int) -> None:
        try:
            while True:
                client.put(f"thread/{number}", value)
                client.get(f"thread/{number}")
        except SimmError:
            pass  # the interpreter ends

    for number in range(4):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    said = {"children": children, "executed": executed, "right": seen, "at": time.monotonic()}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
