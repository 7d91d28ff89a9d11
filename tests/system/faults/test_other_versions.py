"""Servers and clients of two versions: they find a common one, or one of them says in a sentence which is older."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable

import pytest

from simm.arena.layout import LAYOUT_VERSION
from simm.client import Client
from simm.errors import TransportError
from simm.net.channel import Channel, greet
from simm.wire import messages as M
from simm.wire.hello import client_hello
from tests.support.child import Child
from tests.support.fleet import Fleet
from tests.support.waiting import WAIT_S, wait_until

NOW = M.PROTOCOL_MAX
NEXT = NOW + 1


def refusal(fleet: Fleet) -> str:
    """Return why a new client is refused."""
    with pytest.raises(TransportError) as raised:
        Client(fleet.manager.address)
    return str(raised.value)


@pytest.mark.fault("F32", ci=1, whole=1)
def test_the_next_version_beside_this_one(make_fleet: Callable[..., Fleet], amount: int) -> None:
    """Servers that speak both: this version's clients use them. By TCP, as the arena's layout is another one."""
    layout = LAYOUT_VERSION + amount
    fleet = make_fleet(1, memory="32M", patches=[f"protocol={M.PROTOCOL_MIN}:{NEXT}", f"layout={layout}"])
    host, _, port = fleet.manager.address.rpartition(":")
    with contextlib.closing(Channel.tcp(host, int(port), WAIT_S)) as channel:
        assert greet(channel, M.Service.MANAGER, client_hello(M.Role.ADMIN), "").proto == NOW
    # The positive control: it is the next version that runs there.
    with contextlib.closing(Channel.tcp(host, int(port), WAIT_S)) as channel:
        later = client_hello(M.Role.ADMIN)._replace(proto_min=NEXT, proto_max=NEXT)
        assert greet(channel, M.Service.MANAGER, later, "").proto == NEXT
    with Client(fleet.manager.address, deadline_s=20.0) as client:
        wait_until(lambda: client.put("k", b"value"), "a put of the older version")
        assert client.get("k") == b"value" and client.delete("k")
        (worker,) = client.stats()["workers"]
        assert worker["path"] == "tcp" and f"layout {layout}" in str(worker), worker
    # The next version alone: this one is told so, and the other way round.
    fleet.servers[0].end()
    fleet.manager.end()
    fleet.manager.patches = [f"protocol={NEXT}:{NEXT}"]
    fleet.manager.start()
    told = re.compile(f"protocol {M.PROTOCOL_MIN} to {NOW}, .*upgrade the older side")
    # A busy machine may keep the first ones from asking at all.
    wait_until(lambda: told.search(refusal(fleet)), lambda: refusal(fleet))
    server = fleet.servers[0]
    words = [sys.executable, "-m", "simm.dataserver", *server.arguments]
    with Child(words, log=fleet.folder / "refused.log", name="a server of this version") as refused:
        wait_until(lambda: "upgrade the older side" in refused.said(), "it says why it does not join")
        refused.end()
        assert "Traceback" not in refused.said()
