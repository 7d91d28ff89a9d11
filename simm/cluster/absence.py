"""Decide which nodes are away, and how long their shards wait for them. No I/O, no clock.

Three times run for a node without heartbeats: until it is SUSPECT, until it is DEAD, and until it is *overdue*. Those
of ``Timing.dead_after`` and ``grace_s`` follow each other. A node that announced a warm return is overdue
``restart_grace_s`` after its goodbye.

What can go wrong, and what we chose
------------------------------------
* *No worker can take the shards of an overdue node.* Then they stay its own, with the same ``since``. Taking them away
  would help no client, and would cost all values of a server that was only stopped, or cut off: a worker that finds its
  shards unowned, or its own since a new epoch, drops their values. No other worker accepts anything for them meanwhile,
  so their owner may serve clients all that time. A node is released, and leaves the map, when it is overdue and other
  workers have all its shards, or when the map has no room for it.
* *All nodes were away* (the manager's network was cut, all hosts were stopped together), and the first one returns. It
  would take the others' shards an instant before they return. So at the first return the others get the time of a new
  node again; once in an absence, as a node that comes and goes must not hold up the shards of the dead. Only a return
  counts, of the same instance or of a warm one: a new server says nothing about the others.
* *The manager was restarted from an older state* than the last it sent, and does not know that other workers have owned
  the shards since. The first server that names a newer map says so (``cluster/recovery.py``).
* *A node never returns.* After ``FORGET_S`` it is forgotten, and its shards are unowned.
* *Names come and go* (each pod has its own, or somebody joins by one after the other). All that is known is looked
  through and stored with each change. Who has said a cold goodbye owns no shard, and nobody finds a value in its
  arenas. With its name only its preferred shards are lost, and an operator's order to be empty if there is one. So of
  those without an order far fewer are kept than of the dead, for which a namespace's first advance waits
  (``cluster/epochs.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple

from .nodes import WORKERS_MAX, Node, NodeState, Timing

#: Observed seconds after which a dead or left node is forgotten.
FORGET_S: Final = 86_400.0
#: Workers remembered in all, those away included; the longest away are forgotten first.
KNOWN_MAX: Final = 20_000
#: Of these, workers of nodes that have left with a cold goodbye, and that no operator wants empty: the largest cluster.
LEFT_MAX: Final = WORKERS_MAX

#: Notes a node's new state and the reason.
Turn = Callable[[Node, NodeState, str], None]


class Passed(NamedTuple):
    """Whether a rebalance is due, whether the map changes in any case, and the nodes that may be forgotten."""

    due: bool
    changed: bool
    forgotten: list[Node]


def pass_time(nodes: Iterable[Node], observed: float, timing: Timing, turn: Turn) -> Passed:
    """Find the nodes that are suspect, dead, overdue or long gone by now."""
    due = changed = False
    forgotten = []
    dead_s = timing.dead_after * timing.heartbeat_s
    for node in nodes:
        quiet, away = observed - node.last_seen, observed - node.changed
        if node.serving and quiet >= dead_s:
            turn(node, NodeState.DEAD, f"silent for {quiet:.1f} s")
            due, away = True, 0.0
        elif node.serving and quiet >= timing.suspect_after * timing.heartbeat_s:
            turn(node, NodeState.SUSPECT, f"silent for {quiet:.1f} s")
        if node.serving:
            continue
        if node.released:
            if away >= FORGET_S:
                forgotten.append(node)
        elif node.overdue:
            if away >= FORGET_S:
                node.released = due = changed = True
        elif node.state is NodeState.DEAD and quiet >= dead_s + timing.grace_s:
            node.overdue = due = True
        elif node.state is NodeState.LEFT and away >= timing.restart_grace_s:
            node.overdue = due = True
            turn(node, NodeState.LEFT, f"is not back after {away:.1f} s")
    return Passed(due, changed, forgotten)


def surplus(nodes: Collection[Node]) -> list[Node]:
    """Return the nodes to forget because too many are known: of those that have left, then of all that are away."""
    left = [node for node in nodes if node.left and not node.draining]
    found = _longest_away(left, _workers(left) - LEFT_MAX)
    names = {node.name for node in found}
    others = [node for node in nodes if node.released and node.name not in names]
    return found + _longest_away(others, _workers(nodes) - _workers(found) - KNOWN_MAX)


def _workers(nodes: Iterable[Node]) -> int:
    return sum(len(node.workers) for node in nodes)


def _longest_away(nodes: Iterable[Node], excess: int) -> list[Node]:
    """Return the nodes that are away longest, as many as have ``excess`` workers together."""
    found: list[Node] = []
    for node in sorted(nodes, key=lambda node: node.changed) if excess > 0 else ():
        if excess > 0:
            found.append(node)
            excess -= len(node.workers)
    return found


def make_room(nodes: Iterable[Node], workers: int) -> bool:
    """Release overdue nodes if the map would list more than ``workers`` workers of these. Return True if it would."""
    listed = [node for node in nodes if not node.released]
    crowded = sum(len(node.workers) for node in listed) > workers
    for node in listed:
        node.released = crowded and node.overdue
    return crowded


def spare(nodes: Iterable[Node], back: Node, observed: float, last_seen: float, turn: Turn) -> bool:
    """Extend the time of the others if ``back`` is the first node to return. Return True if there are such others.

    ``last_seen``: what they get as such, so that they have the time of a new node.
    """
    others = [node for node in nodes if node is not back and not node.released]
    if any(other.ready for other in others):
        return False
    waited_for = [other for other in others if not other.spared and other.state is not NodeState.JOINING]
    for other in waited_for:
        other.spared, other.overdue = True, False
        if other.state is NodeState.LEFT:
            other.changed = observed
        else:
            other.last_seen = last_seen
            other.linked = other.present = False  # a new instance of it need not wait for it
            turn(other, NodeState.JOINING, f"may be back, as {back.name} is")
    return bool(waited_for)
