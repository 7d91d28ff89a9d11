"""F30 at the adapters that need their engine's classes: each call of SiMM's client fails once, in each way.

``tests/unit/connectors`` has the same of those that do without. The adapters run in the released LMCache and vLLM, over
a store in the driver's process. Each run must go on with misses and right bytes, and so must the one after it; and the
runs make every call that the adapters' source has: one that is added, and not made here, is named.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.engine_processes import Engine
from tests.support.faulty_client import FAULTS

SEED = 20_261_128

pytestmark = [pytest.mark.engines, pytest.mark.slow]


def check(report: dict[str, Any], adapters: set[str]) -> None:
    assert set(report) == adapters
    for name, found in report.items():
        assert found["wrong"] == [], name
        assert set(found["counts"]) == set(FAULTS) and min(found["counts"].values()) > 8, "each call has failed once"
        assert (found["unreached"], found["uncalled"]) == ([], []), name


def test_lmcache(lmcache: Engine) -> None:
    ran = lmcache.run(
        "", SEED, [{"command": "lmcache"}], driver="faults_driver.py", as_expected=False, LMCACHE_TRACK_USAGE="false",
        PYTHONHASHSEED="0",
    )  # fmt: skip
    check(ran.report, {"SimmConnector", "SimmL2Adapter"})


def test_vllm(vllm: Engine) -> None:
    ran = vllm.run("", SEED, [{"command": "vllm"}], driver="faults_driver.py", as_expected=False)
    check(ran.report, {"SimmTier"})
