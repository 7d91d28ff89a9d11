"""deploy/helm: the chart takes the sizes that the servers take, as text: a number alone, or with K, M or G."""

from __future__ import annotations

import json
import random
import re
from typing import Final

import pytest

from simm.config.settings import SETTINGS
from simm.constants import EVENTS_BYTES_MAX, EVENTS_BYTES_MIN, VALUE_BYTES_MAX
from simm.errors import ConfigError
from tests.support import chart
from tests.support.chart import CHART, HELM, refusal

needs_helm = pytest.mark.skipif(HELM is None, reason=chart.MISSING)
#: Value sizes with sizes of rings beside them, each at a bound or behind it.
PAIRS: Final = [
    ("1", "0"),
    ("63M", "1024K"),
    (f"{VALUE_BYTES_MAX}", f"{EVENTS_BYTES_MIN}"),
    (f"{VALUE_BYTES_MAX >> 10}K", f"{EVENTS_BYTES_MAX >> 30}G"),
    ("1G", "4M"),
    ("0", "4M"),
    ("64M", "4M"),
    (f"{VALUE_BYTES_MAX + 1}", "4M"),
    (f"{(VALUE_BYTES_MAX >> 10) + 1}K", "4M"),
    ("2M", f"{EVENTS_BYTES_MIN - 1}"),
    ("2M", "1023K"),
    ("2M", f"{(EVENTS_BYTES_MAX >> 20) + 1}M"),
    ("2M", "5G"),
    ("2M", f"{(1 << 33) + 1}G"),  # more bytes than an int64 has
]
SIZES: Final = [
    *(text for pair in PAIRS for text in pair),
    *("65536K", "64000000", "60000000", "65000K", "1024K", "16384K"),
    *(f"{1 + random.Random(seed).randrange(10**seed)}{unit}" for seed in range(1, 10) for unit in ("", "K", "M", "G")),
]
#: Sizes for both settings, in forms that are for servers alone.
OTHER_FORMS: Final = ["4MiB", "4MB", "4m", "1.5M", "4 M", "4194304B", "04M"]


def schema_of(name: str) -> dict[str, str]:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["dataserver"]["properties"]
    about: dict[str, str] = schema["settings"]["properties"][name]
    return about


def refused_by_servers(name: str, text: str) -> bool:
    try:
        SETTINGS[name].parse(text)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("name", ["value_size", "events"])
def test_issue_the_schema_takes_each_size_that_a_server_takes(name: str) -> None:
    """It refused some sizes that servers take, the largest value's among them: an upgrade failed for one that ran."""
    pattern = schema_of(name)["pattern"]
    taken = [text for text in SIZES if not refused_by_servers(name, text)]
    assert len(taken) > 12 and [text for text in taken if not re.fullmatch(pattern, text)] == []


@pytest.mark.parametrize("name", ["value_size", "events"])
def test_the_schema_takes_no_form_that_the_chart_misreads(name: str) -> None:
    """Its own look at the bounds would take 4m for four bytes, and can read no number that is not text."""
    about = schema_of(name)
    assert about["type"] == "string"
    assert [text for text in OTHER_FORMS if refused_by_servers(name, text)] == []
    assert [text for text in OTHER_FORMS if re.search(about["pattern"], text)] == []


@needs_helm
@pytest.mark.parametrize(("value_size", "events"), PAIRS)
def test_the_chart_refuses_the_sizes_that_a_server_refuses(value_size: str, events: str) -> None:
    """And no others, and it says which and why."""
    values = {"value_size": value_size, "events": events}
    wrong = [name for name, text in values.items() if refused_by_servers(name, text)]
    said = refusal({"dataserver.settings": values})
    assert bool(said) == bool(wrong), said
    assert all(f"dataserver.settings.{name}: {values[name]} is no size" in said for name in wrong)
