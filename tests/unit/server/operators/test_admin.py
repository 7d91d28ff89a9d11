"""A data server's admin socket: whom it answers, and what it closes the connection for."""

from __future__ import annotations

import contextlib
import json
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.config import logs
from simm.config.live import LiveSettings
from simm.errors import SegmentError, TransportError
from simm.net.channel import Channel, Refused
from simm.net.listeners import NamedSocket
from simm.net.loop import Loop
from simm.server.operators import admin
from simm.server.operators.admin import Admin
from simm.wire import messages as M
from simm.wire.admin_messages import GROW, AskSettings, OrderSettings

WAIT_S = 30.0


class Served:
    def __init__(self, folder: Path) -> None:
        self.loop = Loop()
        self.path = str(folder / "a.admin.sock")
        self.unix = NamedSocket(self.path)
        self.live = LiveSettings({"poll_us": 50})
        self.changes = 0
        self.orders: list[str] = []
        self.admin = Admin(self.live, self._changed, self._grow)
        self.loop.listen(self.unix.listener, self.admin)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def _changed(self) -> None:
        self.changes += 1

    def _grow(self, text: str) -> dict[str, Any]:
        if text == "no":
            raise SegmentError("only\x1b[31m 1 MiB is free")
        self.orders.append(text)
        return {"text": text}

    def channel(self) -> contextlib.closing[Channel]:
        return contextlib.closing(Channel.unix(self.path, WAIT_S))

    def close(self) -> None:
        self.loop.stop()
        with socket.socket(socket.AF_UNIX) as waker:
            waker.connect(self.path)
        self.thread.join(WAIT_S)
        self.loop.close()
        self.unix.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    before = list(logs._HOOKS)
    made = Served(tmp_path)
    yield made
    made.close()
    logs._HOOKS[:] = before


def test_an_operator_sees_and_changes_settings(served: Served) -> None:
    assert stat.S_IMODE(Path(served.path).stat().st_mode) == 0o600
    with served.channel() as channel:
        assert channel.call(M.Ping(7)) == M.Pong(7)
        assert json.loads(channel.call(AskSettings("", "")).json)[0]["value"] == "50" and served.changes == 0
        assert json.loads(channel.call(AskSettings("poll_us", "80")).json)[0]["value"] == "80"
        assert served.live["poll_us"] == 80 and served.changes == 1
        with pytest.raises(Refused, match="poll_us"):
            channel.call(AskSettings("poll_us", "x\x1b[31m"))
        with pytest.raises(Refused, match="cannot be changed here"):
            channel.call(AskSettings("memory", "1"))
        assert served.changes == 1 and channel.call(M.Ping(8)) == M.Pong(8), "a mistake costs no connection"


def test_an_order_to_grow_is_no_setting(served: Served) -> None:
    with served.channel() as channel:
        assert json.loads(channel.call(AskSettings(GROW, "64G 1")).json) == {"text": "64G 1"}
        with pytest.raises(Refused, match=r"1 MiB is free") as refused:
            channel.call(AskSettings(GROW, "no"))
        assert "\x1b" not in str(refused.value)
        assert GROW not in {row["name"] for row in json.loads(channel.call(AskSettings("", "")).json)}
    done = served.admin.carry_out(OrderSettings(7, GROW, ""))
    assert (done.order, done.status, json.loads(done.json)) == (7, 0, {"text": ""})
    assert served.admin.carry_out(OrderSettings(8, GROW, "no")).status and served.orders == ["64G 1", ""]
    assert served.changes == 0


def test_it_takes_nothing_else(served: Served) -> None:
    with served.channel() as channel, pytest.raises(TransportError):
        channel.call(M.Drain(1, "a"))
    with served.channel() as channel:
        assert channel.call(M.Ping(1)) == M.Pong(1)


def test_another_user_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "credentials", lambda _sock: (1, 4242, 4242))
    with served.channel() as channel, pytest.raises(TransportError, match="root may do that"):
        channel.call(AskSettings("poll_us", "80"))
    assert served.live["poll_us"] == 50 and served.changes == 0
    monkeypatch.setattr(admin, "credentials", lambda _sock: (1, 0, 0))
    with served.channel() as channel:
        assert channel.call(AskSettings("poll_us", "80")), "control: root"
