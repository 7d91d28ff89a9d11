"""GROUP: what a server believes of it, and how many requests a client makes of many groups."""

from __future__ import annotations

import pytest

from simm.constants import BATCH_KEYS_MAX, GROUP_KEYS_MAX
from simm.errors import RemoteProtocolError
from simm.wire.group_messages import REQUEST_KEYS, Group, groups_in, joined, requests_of

A, B, C = bytes(16), b"b" * 16, b"c" * 16


def test_groups_come_back() -> None:
    assert groups_in(joined([[A, B], [C]])) == [[A, B], [C]]
    assert groups_in(joined([])) == []
    assert joined([[A, B], [C]]) == Group([2, 1], [A, B, C])


@pytest.mark.parametrize(
    ("msg", "text"),
    [
        (Group([2], [A]), "has 1 digests"), (Group([1], [A, B]), "has 2 digests"), (Group([], [A]), "has 1 digests"),
        (Group([0, 1], [A]), "no key"),
    ],
)  # fmt: skip
def test_what_no_client_sends_is_refused(msg: Group, text: str) -> None:
    with pytest.raises(RemoteProtocolError, match=text):
        groups_in(msg)


def test_requests_fit_what_a_server_takes() -> None:
    groups = [[A] * GROUP_KEYS_MAX] * 100 + [[A]] * 3000
    requests = list(requests_of(groups))
    assert [digests for part in requests for digests in part] == groups
    assert all(sum(map(len, part)) < REQUEST_KEYS + GROUP_KEYS_MAX <= BATCH_KEYS_MAX for part in requests)
    assert list(requests_of([])) == []
