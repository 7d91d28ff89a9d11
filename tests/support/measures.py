"""Figures that tests measure beside the bounds they assert: printed by pytest at the end, and kept where asked.

With ``SIMM_TEST_MEASURES=FILE`` each figure is also appended to that file as one line of JSON.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Final

from tests.support import report

ENV: Final = "SIMM_TEST_MEASURES"


def measured(what: str, value: float, unit: str, bound: str = "", **more: Any) -> float:
    """Note one figure; returns it. ``bound`` is the requirement in words, ``more`` what else there is to say."""
    shown = f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"
    extra = "".join(f", {key} {more[key]}" for key in more)
    report.note(f"{what}: {shown} {unit}{f' (bound {bound})' if bound else ''}{extra}", "measured")
    path = os.environ.get(ENV)
    if path:
        row = {"what": what, "value": value, "unit": unit, "bound": bound, "at": round(time.time()), **more}
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
    return value
