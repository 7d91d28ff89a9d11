"""The messages by which operators look at servers' settings and change them while they run."""

from __future__ import annotations

from typing import Final, NamedTuple

from ..rpc import message

#: In place of a setting's name: add a worker with an arena. ``value``: its bytes, and perhaps a NUMA node; empty: tell
#: how far that is. A server of an older version says that it has no such setting.
GROW: Final = "grow"


@message(0x74, "s s")
class AskSettings(NamedTuple):
    """Show the settings that can be changed, or with a ``name`` give that one this ``value`` first.

    With the name :data:`GROW` it is no setting but an order to a data server (``server/slots/growth.py``).
    """

    name: str
    value: str


@message(0x75, "s s s")
class AskNodeSettings(NamedTuple):
    """As :class:`AskSettings`, of a data server, by the manager that it has joined."""

    node: str
    name: str
    value: str


@message(0x76, "Q s s")
class OrderSettings(NamedTuple):
    """Push, manager to supervisor: an admin sends this; answer with the number ``order``."""

    order: int
    name: str
    value: str


@message(0x77, "Q H b")
class SettingsDone(NamedTuple):
    """What the supervisor answers to an order: a status, and JSON or the text of an error. Answer: DONE."""

    order: int
    status: int
    json: bytes


#: Bit of MAP_GET's ``subscribe``: this data server takes ORDER_SETTINGS.
SUBSCRIBE_ORDERS: Final = 16
