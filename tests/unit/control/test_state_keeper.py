"""Keeping the manager's state stored: what waits for a slow disk, and for how long."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.control.election import NotLeader
from simm.control.state_file import StateFile
from simm.control.state_keeper import PATIENCE_S, RETRY_S, StateKeeper
from simm.net.loop import Loop
from tests.support.waiting import WAIT_S, wait_until

RESERVE = 8


class Disk:
    """What an fsync does: it waits for ``open`` and raises ``error`` if there is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.error: OSError | None = None
        self.waiting = 0
        real = os.fsync

        def fsync(fd: int) -> None:
            self.waiting += 1
            assert self.open.wait(WAIT_S)
            if self.error is not None:
                raise self.error
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)


class World:
    """A keeper on a file, an epoch, and a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.loop = Loop(lambda: self.now)
        self.file = StateFile(folder, "manager")
        self.epoch = 1
        self.published: list[int] = []
        self.deposed: list[str] = []
        self.keeper = StateKeeper(self.loop, self.file, RESERVE, self.snapshot, self.publish, self.deposed.append)
        self.keeper.begin(0)
        assert self.keeper.save_now()
        self.keeper.save_in_background()

    def snapshot(self) -> tuple[int, Any]:
        return self.epoch, {"epoch": self.epoch}

    def publish(self) -> None:
        if not self.keeper.holds_back:
            self.keeper.sent()
            self.published.append(self.epoch)
        elif self.keeper.landed:
            self.published.append(self.keeper.stored)

    def change(self) -> None:
        self.epoch += 1
        self.keeper.changed()
        self.keeper.save()

    def on_disk(self) -> tuple[int, int]:
        """The epoch that is stored, and the one that it reserves up to."""
        document = self.file.load()
        return document["cluster"]["epoch"], document["epochs_reserved"]

    def turn(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.loop.run_once(0.0)

    def stored(self) -> None:
        """Turn until all is stored."""

        def turned() -> bool:
            self.turn()
            return self.keeper.up_to_date

        wait_until(turned, "all is stored")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def world(tmp_path: Path, disk: Disk) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    disk.open.set()
    world.keeper.close()
    world.loop.close()
    world.file.close()


def test_a_change_is_sent_once_it_is_stored(world: World, disk: Disk) -> None:
    disk.open.clear()
    world.change()
    assert world.keeper.holds_back and not world.keeper.up_to_date
    world.turn(PATIENCE_S / 2)
    assert world.published == [] and world.on_disk()[0] == 1
    disk.open.set()
    world.stored()
    assert world.published == [2] and world.on_disk() == (2, 2 + RESERVE)
    assert not world.keeper.holds_back


def test_a_slow_disk_holds_back_for_a_while_only(
    world: World, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    disk.open.clear()
    world.change()
    world.turn(PATIENCE_S)
    assert world.published == [2] and world.on_disk()[0] == 1
    assert "is not stored after 0.5 s: service goes on" in caplog.text
    world.change()
    world.turn(PATIENCE_S / 2)
    assert world.keeper.holds_back and world.published == [2], "what changes during the same save has its own time"
    world.turn(PATIENCE_S / 2)
    assert world.published == [2, 3] and caplog.text.count("service goes on") == 1
    disk.open.set()
    world.stored()
    assert world.on_disk() == (3, 3 + RESERVE), "the next save has what changed during the one before"
    assert not world.keeper.trouble


def test_issue_what_was_sent_and_is_in_the_next_save_only_is_called_so(world: World, disk: Disk) -> None:
    """The save under way ended, the next one had just begun, and no trouble was shown though it was stored nowhere."""
    disk.open.clear()
    world.change()
    world.turn(PATIENCE_S / 2)
    world.change()
    world.turn(PATIENCE_S / 2)
    assert world.published == [3]
    disk.open.set()
    assert world.keeper.wait(WAIT_S)
    disk.open.clear()
    world.turn()  # the next save is under way
    assert world.on_disk()[0] == 2 and world.keeper.trouble == "the state is not stored yet"
    disk.open.set()
    world.stored()
    assert world.on_disk()[0] == 3 and not world.keeper.trouble


def test_issue_changes_that_never_stop_are_sent_as_they_are_stored(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each save ends with another change waiting. The disk was called slow, and maps waited for half a second."""
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    world.change()
    for _ in range(100):
        world.change()
        world.keeper.wait()
        world.turn(PATIENCE_S / 20)
        assert not world.keeper.up_to_date, "the next save is under way"
        assert world.published[-1] == world.epoch - 1
    assert len(world.published) == 100 and world.published == sorted(set(world.published))
    assert "service goes on" not in caplog.text


def test_a_disk_that_fails_is_tried_again(world: World, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    world.change()

    def failed() -> bool:
        world.turn()
        return world.keeper.failures > 0

    wait_until(failed, "the save fails")
    assert world.published == [2] and world.keeper.trouble and world.on_disk()[0] == 1
    world.change()
    world.turn(RETRY_S / 2)
    assert world.keeper.failures == 1, "it waits"
    disk.error = None
    world.turn(RETRY_S)
    world.stored()
    assert world.on_disk()[0] == 3 and not world.keeper.trouble
    assert "No space left on device; service goes on" in caplog.text


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes wait for this machine's disk as long as it takes."""
    monkeypatch.setattr("simm.control.state_keeper.PATIENCE_S", WAIT_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("seed", range(3))
def test_no_epoch_is_sent_that_the_file_does_not_cover(world: World, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        if rng.random() < 0.8:
            world.change()
        if rng.random() < 0.5:
            assert world.keeper.cover(world.epoch)
            assert world.epoch < world.on_disk()[1]
        if rng.random() < 0.3:
            world.turn()
    assert world.keeper.writes < 200


@pytest.mark.usefixtures("patient")
def test_a_sudden_jump_of_the_epoch_waits_for_the_disk(world: World) -> None:
    world.epoch += 100 * RESERVE
    assert world.keeper.cover(world.epoch)
    assert world.epoch < world.on_disk()[1]


def test_a_stuck_disk_is_waited_for_once_a_turn(world: World, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many requests may come in one turn of the loop, whose time stands still."""
    waited: list[float] = []

    def wait(timeout_s: float) -> bool:
        waited.append(timeout_s)
        world.now += timeout_s
        return False

    monkeypatch.setattr(world.keeper, "wait", wait)
    disk.open.clear()
    world.epoch += 100 * RESERVE
    for _ in range(20):
        assert world.keeper.cover(world.epoch)
    world.turn()
    for _ in range(20):
        world.change()
        assert world.keeper.holds_back and world.keeper.cover(world.epoch)
    monkeypatch.undo()
    assert sum(waited) == PATIENCE_S, "a change has its own time, but no time of the loop"


def test_each_change_has_its_own_time(world: World, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that was stored and could not be sent, as the manager collects a map, leaves none to the next."""
    monkeypatch.setattr(world.keeper, "sent", lambda: None)
    world.change()
    world.stored()
    monkeypatch.undo()
    disk.open.clear()
    world.turn(2 * PATIENCE_S)
    world.change()
    assert world.keeper.holds_back, "it is sent before it is stored"
    disk.open.set()
    world.stored()


def test_the_last_save_stores_the_exact_epoch(world: World, disk: Disk) -> None:
    world.change()
    world.change()
    world.keeper.close()
    assert world.keeper.save_now(last=True)
    assert world.on_disk() == (3, 3)


def test_without_a_further_thread_it_saves_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    world.change()
    assert world.keeper.up_to_date and world.on_disk()[0] == 2


class Etcd:
    """A coordinator's store: nothing that it does not have may be sent."""

    where = "etcd"
    error: Exception | None = None

    def save(self, state: Any) -> None:
        if self.error is not None:
            raise self.error


def test_issue_a_change_is_sent_that_was_stored_without_a_further_thread(
    world: World, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save behind another one was made at once, and nobody told that it was."""
    disk.open.clear()
    world.change()
    world.change()  # for the next save
    disk.open.set()
    assert world.keeper.wait(WAIT_S)

    def no_thread(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        wait_until(lambda: (world.turn(), world.keeper.up_to_date)[1], "all is stored")
    assert world.on_disk()[0] == world.epoch == world.published[-1]


def test_with_a_coordinator_nothing_is_sent_that_is_not_stored() -> None:
    store, deposed = Etcd(), []
    with contextlib.closing(Loop(lambda: 0.0)) as loop:
        keeper = StateKeeper(loop, store, RESERVE, lambda: (5, {}), lambda: None, deposed.append)  # type: ignore[arg-type]
        keeper.begin(5)
        keeper.save_in_background()
        store.error = OSError(errno.EIO, "no answer")
        assert not keeper.cover(5) and keeper.holds_back and keeper.trouble
        store.error = None
        keeper.load = lambda: None  # type: ignore[method-assign]
        keeper.begin(5)
        assert keeper.save_now() and not keeper.holds_back and keeper.cover(5)
        store.error = NotLeader("another one leads")
        keeper.changed()
        assert not keeper.save_now() and deposed == ["another one leads"]


def test_what_is_beside_the_cluster_is_stored_with_it_and_loaded(tmp_path: Path, disk: Disk) -> None:
    loop = Loop()
    file = StateFile(tmp_path, "manager")
    keeper = StateKeeper(loop, file, RESERVE, lambda: (5, {}), lambda: None, lambda _why: None, lambda: {"trace": [1]})
    keeper.changed()
    assert keeper.save_now() and file.load() == {"trace": [1], "cluster": {}, "epochs_reserved": 5 + RESERVE}
    assert keeper.loaded is None and keeper.load() == keeper.loaded == file.load()
    file.close()
    loop.close()


def test_without_a_store_nothing_waits_to_be_stored() -> None:
    """The status page warned for ever of a state that is not stored yet."""
    loop = Loop()
    keeper = StateKeeper(loop, None, RESERVE, lambda: (1, {}), lambda: None, lambda _why: None)
    keeper.changed()
    assert keeper.up_to_date and not keeper.refuses
    loop.close()


def test_tenants_make_no_epochs_while_a_coordinator_takes_no_writes() -> None:
    """A file that fails holds nothing back, so it refuses nothing."""

    class Full:
        where = "etcd"
        error: OSError | None = OSError("no space")

        def save(self, _document: Any) -> None:
            if self.error is not None:
                raise self.error

    loop, store = Loop(), Full()
    coordinator: Any = store
    keeper = StateKeeper(loop, coordinator, RESERVE, lambda: (1, {}), lambda: None, lambda _why: None)
    keeper.begin(0)
    assert not keeper.refuses
    assert not keeper.save_now() and keeper.refuses == "the state cannot be stored"
    store.error = None
    assert keeper.save_now() and not keeper.refuses
    loop.close()
