"""Skips everything in this folder, at once and with the reason, outside of the machine that scripts/test-rdma boots."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def why_not(item: pytest.Item) -> str:
    """Why a test cannot run here; empty if it can."""
    if not os.environ.get("SIMM_TEST_VM_DEVICES"):
        return "needs RDMA devices: run scripts/test-rdma, which boots a virtual machine that has them"
    hosts = int(os.environ["SIMM_TEST_VM_HOSTS"])
    if item.get_closest_marker("two_hosts"):
        return "needs two machines" if hosts < 2 else ""
    return "for one machine" if hosts > 1 else ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before any fixture is set up."""
    for item in items:
        if HERE in item.path.parents:
            reason = why_not(item)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
