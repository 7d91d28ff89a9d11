"""What some load processes did, call by call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from .generator import BACK, FAILED, LOST, OUTAGE, OUTCOMES, RAISED, WRONG

#: began: time.monotonic(); took: seconds; key: its number; the call may be one of a batch; processor: seconds that the
#: calling thread worked, without what it waited for another process or for a processor.
ROW: Final = np.dtype(
    [
        ("began", "f8"), ("took", "f8"), ("kind", "u1"), ("outcome", "u1"), ("key", "u2"), ("epoch", "u4"),
        ("processor", "f8"),
    ]
)  # fmt: skip


class Records:
    """What some clients did: all their rows, in the order of time.

    ``why``: of each client whose puts failed, what it says of them, and its last log lines.
    """

    def __init__(self, rows: np.ndarray[Any, Any], said: list[str], why: Sequence[str] = ()) -> None:
        self.rows = rows
        self.said = said
        self.why = why

    def __len__(self) -> int:
        return len(self.rows)

    def _part(self, rows: np.ndarray[Any, Any]) -> Records:
        return Records(rows, self.said, self.why)

    def between(self, begin: float, end: float) -> Records:
        """Calls that began in this piece of time.monotonic()."""
        began = self.rows["began"]
        return self._part(self.rows[(began >= begin) & (began < end)])

    def within(self, begin: float, end: float) -> Records:
        """Calls that began and ended in this piece of time.monotonic()."""
        calls = self.between(begin, end)
        return self._part(calls.rows[calls.rows["began"] + calls.rows["took"] < end])

    def of(self, *outcomes: int, kind: int | None = None) -> Records:
        """Calls with one of these outcomes."""
        chosen = np.isin(self.rows["outcome"], outcomes)
        if kind is not None:
            chosen &= self.rows["kind"] == kind
        return self._part(self.rows[chosen])

    def count(self, *outcomes: int, kind: int | None = None) -> int:
        """How many."""
        return len(self.of(*outcomes, kind=kind))

    def last_end(self, default: float) -> float:
        """When the last of these calls was over."""
        return float((self.rows["began"] + self.rows["took"]).max()) if len(self.rows) else default

    def longest(self) -> float:
        """The longest call, seconds."""
        return float(self.rows["took"].max()) if len(self.rows) else 0.0

    def quantile(self, part: float, column: str = "took") -> float:
        """Of the calls' times, seconds, or of another column of ROW."""
        return float(np.quantile(self.rows[column], part)) if len(self.rows) else 0.0

    def assert_right(self) -> None:
        """No wrong byte, nothing superseded, no exception, in all of the clients' time."""
        bad = self.of(WRONG, BACK, RAISED, LOST)
        assert not len(bad), (len(bad), self.said)

    def summary(self) -> str:
        """For people."""
        parts = [f"{name} {self.count(number)}" for number, name in enumerate(OUTCOMES) if self.count(number)]
        text = f"{len(self)} calls: {', '.join(parts)}; longest {self.longest() * 1e3:.0f} ms"
        bad = self.of(FAILED, OUTAGE).rows
        if len(bad):
            calls = [f"{OUTCOMES[row['outcome']]} at {row['began']:.2f} for {row['took']:.2f} s" for row in bad[:4]]
            text += f"; {', '.join(calls)}; {' | '.join(self.why)}"
        return text
