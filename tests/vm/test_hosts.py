"""A client in one of two cabled machines, the servers in the other: no shared memory, no shared kernel, one wire."""

from __future__ import annotations

import subprocess

import pytest

from .far import Far

pytestmark = pytest.mark.two_hosts


@pytest.fixture(scope="module")
def far() -> Far:
    """The other machine."""
    return Far()


def test_the_other_machine_is_another_one(far: Far) -> None:
    assert far.run("hostname") == "vm1\n"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        far.run("sh", "-c", "exit 5")
    assert failed.value.returncode == 5
    # What a killed stand-in stood for is killed.
    stand_in = subprocess.Popen(far.command(["sh", "-c", "echo on; exec sleep 1000"]), stdout=subprocess.PIPE)
    assert stand_in.stdout is not None and stand_in.stdout.readline() == b"on\n"
    stand_in.kill()
    stand_in.communicate()
    far.run("sh", "-c", "for i in $(seq 100); do pgrep -f 'sleep 1000$' >/dev/null || exit 0; sleep 0.1; done; exit 1")
