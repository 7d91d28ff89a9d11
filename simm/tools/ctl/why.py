"""``simm ctl why``: why clients of this host find few of the values that they ask for, or none, and why puts fail.

Each rule looks at what workers and clients have counted since the workers began, and at what the arenas hold now. A
finding says what was seen, and what to do. Rules are in the order in which their causes exclude each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from ...errors import printable
from ..nodes import bytes_text
from .tables import Row

#: A share of gets that counts as a cause.
MUCH: Final = 0.1
#: From this hit ratio on nothing is wrong.
GOOD: Final = 0.5
#: Keys that puts of two copies look for, for each copy that they put: five for two copies at the least, or for one.
LOOKS: Final = (2, 5)


class Finding(NamedTuple):
    """What was seen in a namespace ("" for all), and what to do about it. ``bad``: it explains misses."""

    namespace: str
    seen: str
    remedy: str = ""
    bad: bool = True


def explain(workers: Sequence[Row], namespaces: Sequence[Row], only: str = "") -> list[Finding]:
    """Return the findings, of all namespaces or of one."""
    found = list(_of_workers(workers))
    looked = [row for row in namespaces if only in ("", row["namespace"])]
    if only and not looked:
        names = ", ".join(repr(row["namespace"]) for row in namespaces[:8]) or "none"
        return [*found, Finding(
            only, f"no client on this host has named it, and no value is of it. There are: {names}",
            "SIMM_NAMESPACE of the engines says another name, or they use other servers",
        )]  # fmt: skip
    said = [finding for row in looked for finding in _of_namespace(row, namespaces, workers)]
    found += said
    if not said:
        found.append(Finding("", "no client of this host has asked for anything, and nothing is stored",
                             "do the engines run on this host, and name this cluster? `simm doctor`"))  # fmt: skip
    return found


def _of_workers(workers: Sequence[Row]) -> Iterator[Finding]:
    for row in workers:
        if row["reason"]:
            yield Finding("", f"{row['worker']} does not answer: {row['reason']}", "its log, and `/healthz`")
        elif row["fenced"]:
            yield Finding("", f"{row['worker']} takes no puts: the manager does not know it, or has sent no map yet",
                          "is the manager up? `simm status`; the data server's log")  # fmt: skip
        elif not row["shards"]:
            yield Finding("", f"{row['worker']} owns no shard, so it stores nothing",
                          "`simm node list`: is it drained, or has it just joined?")  # fmt: skip


def _of_namespace(row: Row, namespaces: Sequence[Row], workers: Sequence[Row]) -> Iterator[Finding]:
    name, gets, puts = row["namespace"], row["gets"], row["puts"]
    tried = puts + row["put_failures"]
    failed = f"{row['put_failures']:,} of {tried:,} puts failed" if row["put_failures"] else ""
    if failed:
        failed += _causes(workers)
    many = row["put_failures"] > MUCH * tried
    remedy = "more memory, a larger quota, or fewer pins; `simm ctl clients`"
    exists = row["exists"]
    # Servers cannot tell looks of puts from others. Those that are as many as puts need say nothing of gets.
    looks = LOOKS[0] * tried <= exists <= LOOKS[1] * tried and row["exists_evicted"] <= MUCH * exists
    if not gets and (not exists or looks):
        if failed:
            yield Finding(name, failed, remedy, bad=many)
        if exists:
            yield Finding(name, f"{exists:,} keys looked for, none got, and {puts:,} values put: puts of two copies "
                          "look for as many", "with replicas=2 nobody may have asked for any; else do all engines have "
                          "one model, page size, tensor parallelism and hash seed?", bad=False)  # fmt: skip
        elif row["clients"] or puts:
            yield Finding(name, f"{puts:,} values were put, and no client of this host has asked for any",
                          "does the engine look them up? Check its log for the storage backend", bad=False)  # fmt: skip
        return
    share = row["hit_ratio"]
    if share is not None and share >= GOOD:
        yield Finding(name, f"{share:.1%} of {gets:,} gets were hits", bad=False)
        if failed:
            yield Finding(name, failed, remedy, bad=many)
        return
    asked = f"{row['hits']:,} of {gets:,} gets were hits" if gets else f"{exists:,} keys looked for, none got"
    misses: dict[str, int] = row["misses"]
    if misses["wrong_size"] > MUCH * gets:
        yield Finding(name, f"{asked}, and {misses['wrong_size']:,} values had another size than the buffer",
                      "two models or page sizes share this namespace: give each its own SIMM_NAMESPACE")  # fmt: skip
    if misses["unsound"] > MUCH * gets:
        yield Finding(name, f"{asked}, and {misses['unsound']:,} values had another checksum or namespace",
                      "look for errors of memory, and for a program that writes into /dev/shm")  # fmt: skip
    if misses["timeout"] > MUCH * gets:
        yield Finding(name, f"{asked}; {misses['timeout']:,} had an owner that did not answer within the deadline",
                      "`simm status`: does a server hang? `simm doctor`; the network; deadline_ms")  # fmt: skip
    if misses["unreachable"] + misses["moving"] > MUCH * gets:
        yield Finding(name, f"{asked}; {misses['unreachable']:,} had an owner that could not be asked, and "
                      f"{misses['moving']:,} were in shards that move", "`simm status`")  # fmt: skip
    if not puts and not row["entries"]:
        others = [each["namespace"] for each in namespaces if each["puts"] or each["entries"]]
        told = f", but to {', '.join(map(repr, others[:4]))}" if others else ""
        yield Finding(name, f"{asked}: no client of this host has put a value to this namespace{told}",
                      "the engines that put and those that get must have one SIMM_NAMESPACE" if others else
                      "does the engine put anything? Its log; a write policy may wait for evictions")  # fmt: skip
        return
    if failed:
        yield Finding(name, f"{asked}; {failed}", remedy, bad=many)
    gone = misses["evicted"] + row["exists_evicted"]
    if gone > MUCH * (gets + exists):
        yield Finding(name, f"{asked}; about {gone:,} of the keys that were asked for had been there and were evicted",
                      "more memory; docs/eviction.md on policies")  # fmt: skip
        return
    if misses["absent"] <= MUCH * gets and gets:
        return
    evicted = sum(each.get("evictions", 0) for each in workers)
    if row["entries"] < MUCH * puts and evicted:
        size = bytes_text(sum(each.get("data_bytes", 0) for each in workers))
        yield Finding(name, f"{asked}; of {puts:,} values put {row['entries']:,} are left in {size}: they are evicted "
                      "before they are asked for", "more memory; docs/eviction.md on policies")  # fmt: skip
    elif row["entries"]:
        yield Finding(name, f"{asked}, though {row['entries']:,} values are there: other keys are asked for than are "
                      "put", "do all engines have one model, page size, tensor parallelism and hash seed "
                      "(PYTHONHASHSEED)? Or were the prompts new?")  # fmt: skip
    else:
        yield Finding(name, f"{asked}; {puts:,} values were put, and none is left",
                      "did somebody delete them, or was the server started anew? Its log")  # fmt: skip


def _causes(workers: Sequence[Row]) -> str:
    total: dict[str, int] = {}
    for row in workers:
        for cause, count in row.get("put_failures_by_cause", {}).items():
            total[cause] = total.get(cause, 0) + count
    named = [f"{cause} {count:,}" for cause, count in sorted(total.items(), key=lambda item: -item[1]) if count]
    return f" (workers refused: {', '.join(named)})" if named else ""


def text_of(findings: Sequence[Finding]) -> str:
    """Return findings as text, for people."""
    lines = []
    for each in findings:
        line = f"{'!' if each.bad else ' '} {each.namespace + ': ' if each.namespace else ''}{each.seen}"
        lines.append(printable(line))
        if each.remedy:
            lines.append(f"    -> {each.remedy}")
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return findings for programs."""
    return [each._asdict() for each in findings]
