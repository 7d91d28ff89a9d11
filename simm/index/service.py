"""The index by HTTP, with the fields of Mooncake's conductor and Dynamo's indexer, and of llm-d for scores.

Bodies are JSON, at most ``BODY_BYTES_MAX``, and every field is checked. A caller's mistake is a sentence with status
400. ``docs/index.md`` describes the requests.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import numpy as np

from ..errors import SimmError, UsageError, printable
from ..net.http import JSON, Page, Post, Route, Verb
from ..net.metrics import Samples
from ..schemes.encodings import check_block, short_key
from ..schemes.scheme import Libraries, Scheme
from . import figures
from .blocks import Blocks
from .events import RANK_MAX, TEXT_MAX, TOKENS_MAX
from .libraries import msgspec
from .lmcache.hashes import Namer
from .lmcache.servers import Server, Servers
from .prefixes import tiers_of
from .prompts import Prompt, Prompts
from .publishers import Publishers
from .scores import WEIGHTS, Match, Scores, score
from .sources import TIERS, U64, Registration, Source, Space
from .streams import Stream

log = logging.getLogger("simm.index.service")

BODY_BYTES_MAX: Final = 8 << 20
#: Connections that are open, as routers keep several each; and for how long without a request, longer than routers do.
CONNECTIONS_MAX: Final = 256
KEEP_S: Final = 120.0
#: Blocks of all holders that a dump has.
DUMP_MAX: Final = 100_000
#: Blocks of one question: a prompt of a million tokens in blocks of 16. Hashing more holds up all other questions.
QUESTION_BLOCKS_MAX: Final = 1 << 16
EXPECT_S_MAX: Final = 60.0
EXPECT_S: Final = 2.0
LEASE_S_MAX: Final = 86_400.0
NAMES_MAX: Final = 4096
_NONE_S: Final = 1.0
#: After so long no further registered scheme is asked for one question: they are as many as clients like.
QUESTION_S: Final = 1.0
#: Key schemes that cannot answer, of which the log says so.
_USELESS_MAX: Final = 64
assert TIERS[:3] == ("gpu", "cpu", "disk")
_MORE_TIERS: Final = tuple(name.upper() for name in TIERS[3:])

#: Tells what the store itself has of a prompt: of the request's fields.
Shared = Callable[[Mapping[str, Any]], dict[str, Any] | None]
Body = Mapping[str, Any]
#: Where LMCache's servers register, heartbeat and say that they end.
_INSTANCES: Final = "/instances"
_HEARTBEAT: Final = "/heartbeat"


class Asked(NamedTuple):
    """Where and for which keys a request asks.

    Attributes:
        names: what LMCache's servers may call these blocks.
        pairs: their keys where blocks are of pairs of tokens.
    """

    space: Space
    keys: U64
    names: Sequence[Sequence[int]] = ()
    pairs: Sequence[int] | U64 = ()


class Service:
    """The requests. Any thread may call them.

    Args:
        publishers: None for an index that gets its events otherwise; nothing can be registered then.
        shared: asks the store; None without one.
        weights: of tiers.
        servers: LMCache's, which take the index for their coordinator; None: none can.
        namers: how these name the chunks of a prompt.
    """

    def __init__(
        self, index: Blocks, publishers: Publishers | None = None, *, shared: Shared | None = None,
        weights: Mapping[str, float] = WEIGHTS, servers: Servers | None = None, namers: Sequence[Namer] = (),
    ) -> None:  # fmt: skip
        self.index = index
        self._publishers = publishers
        self._servers = servers
        self._namers = namers
        self._shared = shared
        self._weights = weights
        self._prompts = Prompts(index.seed)
        self._requests: Counter[str] = Counter()

    @property
    def posts(self) -> dict[str, Post]:
        """What takes bodies, by path."""
        calls = {
            "/register": self.register, "/unregister": self.unregister, "/query": self.query,
            "/query_by_hash": self.query, "/score": self.score, "/expect": self.expect,
        }  # fmt: skip
        posts = {path: self._page(path, call) for path, call in calls.items()}
        if self._servers is not None:
            posts[_INSTANCES] = self._page(_INSTANCES, self._servers.register)
            posts["/events"] = self._events
        return posts

    @property
    def verbs(self) -> dict[str, Verb]:
        """What takes a path without a body, by method."""
        return {} if self._servers is None else {"PUT": self._heartbeat, "DELETE": self._deregister}

    @property
    def routes(self) -> dict[str, Route]:
        """Pages, by path."""
        return {
            "/healthz": lambda: Page("ok\n"), "/readyz": self._readyz, "/metrics": self.metrics,
            "/workers": lambda: _json(self.workers()), "/dump": lambda: _json(self.dump()),
        }  # fmt: skip

    def _readyz(self) -> Page:
        if self._publishers is None or self._publishers.alive:
            return Page("ok\n")
        return Page("nobody reads the publishers any more: start this process again\n", status=503)

    def count(self, path: str) -> None:
        """Count a request that came otherwise."""
        self._requests[path] += 1

    def _page(self, path: str, call: Callable[[Body], Any]) -> Post:
        def take(body: bytes) -> Page:
            self._requests[path] += 1
            try:
                return _json(call(self._prompts.read(body)))
            except UsageError as exc:
                return _json({"error": str(exc)}, 400)
            except (msgspec.MsgspecError, RecursionError, UnicodeError) as exc:
                return _json({"error": f"the body is no JSON: {exc}"}, 400)

        return take

    # -- LMCache's servers -------------------------------------------------------------------------------

    def _events(self, body: bytes) -> Page:
        self._requests["/events"] += 1
        assert self._servers is not None
        try:
            return _json(self._servers.events(body))
        except UsageError as exc:
            return _json({"error": str(exc)}, 400)

    def _heartbeat(self, path: str) -> Page | None:
        name = _instance(path, _HEARTBEAT)
        if not name or self._servers is None:
            return None
        self._requests[_INSTANCES + _HEARTBEAT] += 1
        if self._servers.heartbeat(name):
            return _json({"instance_id": name})
        return _json({"error": "no such server: register it"}, 404)

    def _deregister(self, path: str) -> Page | None:
        name = _instance(path, "")
        if not name or self._servers is None:
            return None
        self._requests[_INSTANCES] += 1
        self._servers.deregister(name)
        return _json({"instance_id": name})

    # -- publishers --------------------------------------------------------------------------------------

    def register(self, body: Body) -> dict[str, Any]:
        """Listen to a publisher, or renew its lease. Raises UsageError."""
        if self._publishers is None:
            raise UsageError("this index takes no publishers")
        rank = None if body.get("dp_rank", 0) is None else _number(body, "dp_rank", 0, RANK_MAX)
        removals = body.get("storage_removals")
        if not isinstance(removals, bool | None):
            raise UsageError("storage_removals is true or false")
        size = _number(body, "block_size", 0, 1 << 20) or None
        if size is not None:
            check_block(size)
        told = Registration(
            _name(body), _text(body, "modelname", "model_name", "model"), _text(body, "type").lower() or "vllm", size,
            _text(body, "lora_name"), _text(body, "tenant_id") or "default",
            _text(body, "additionalsalt", "additional_salt", "cache_salt"), rank, _text(body, "endpoint"),
            _text(body, "replay_endpoint"), _text(body, "node"), _text(body, "pool"),
            _real(body, "lease_s", 0.0, LEASE_S_MAX), bool(removals),
        )  # fmt: skip
        known = self.index.sources.get(told.name)
        if told.hashed or (known is not None and known.registration.hashed):
            raise UsageError("LMCache's server registers itself, at POST /instances")
        self._publishers.register(told)
        return {"status": "registered successfully", "instance_id": told.instance}

    def unregister(self, body: Body) -> dict[str, Any]:
        """Forget a publisher, or without ``dp_rank`` those of all ranks. Raises UsageError."""
        if self._publishers is None:
            raise UsageError("this index takes no publishers")
        name, tenant = _name(body), _text(body, "tenant_id") or "default"
        rank = None if body.get("dp_rank") is None else _number(body, "dp_rank", 0, RANK_MAX)
        names = [
            each for each, source in list(self.index.sources.items())
            if each[:2] == (name, tenant) and rank in (None, each[2]) and not source.registration.hashed
        ]  # fmt: skip
        gone = [each for each in names if self._publishers.unregister(each)]
        if not gone:
            raise UsageError(f"{name!r} of tenant {tenant!r} is not registered")
        removed = [f"{instance}|{tenant}|{rank}" for instance, tenant, rank in gone]
        return {"status": "unregistered successfully", "removed_instances": removed}

    # -- questions ---------------------------------------------------------------------------------------

    def _asked(self, body: Body, *, plain: bool = False) -> Asked:
        """Return what a request asks for, or its plain keys alone. Raises UsageError."""
        model = _text(body, "model", "model_name", "modelname")
        size = _number(body, "block_size", 0, 1 << 20)
        tenant = _text(body, "tenant_id") or "default"
        if not model:
            raise UsageError("a question has a model")
        if not size:
            with self.index.lock:
                sizes = self.index.spaces.sizes(model, tenant)
                told = [each.registration for each in self.index.sources.values()] if len(sizes) > 1 else []
            sizes = sizes & {each.block_size for each in told if (each.model, each.tenant) == (model, tenant)} or sizes
            if len(sizes) > 1:
                raise UsageError(f"block_size is one of {sorted(sizes)}")
            size = sizes.pop() if sizes else 16
        check_block(size)
        salt = _text(body, "cache_salt", "additionalsalt", "additional_salt")
        space = Space(model, _text(body, "lora_name"), tenant, salt, size)
        given = (body.get(name) for name in ("seq_hashes", "block_hashes", "block_hash"))
        hashes = next((each for each in given if each is not None), None)
        prompt = self._prompt(body)
        if hashes is not None:
            if not isinstance(hashes, list) or len(hashes) > QUESTION_BLOCKS_MAX:
                raise UsageError(f"seq_hashes is a list of at most {QUESTION_BLOCKS_MAX}")
            if not all(type(each) is int and -(1 << 63) <= each < 1 << 64 for each in hashes):
                raise UsageError("seq_hashes are integers of 64 bits")
            return Asked(space, np.array([each & ((1 << 64) - 1) for each in hashes], np.uint64))
        if prompt is None:
            raise UsageError(f"token_ids is a list of at most {TOKENS_MAX}")
        if len(prompt) // size > QUESTION_BLOCKS_MAX:
            raise UsageError(f"token_ids has {len(prompt) // size} blocks of {size}, {QUESTION_BLOCKS_MAX} at most")
        keys = prompt.keys(size)
        if plain:
            return Asked(space, keys)
        with self.index.lock:
            sources = {each.source for each in self.index.spaces.get(space, {}).values()}
            hashed, paired = any(each.registration.hashed for each in sources), any(each.pairs for each in sources)
        names = prompt.ids.tolist() if hashed and self._namers else []
        return Asked(
            space, keys, [each(names, size) for each in self._namers] if hashed else [],
            prompt.keys(size, pairs=True) if paired else (),
        )  # fmt: skip

    def _prompt(self, body: Body) -> Prompt | None:
        """Return a request's token ids; None for null, as without them. Raises UsageError."""
        tokens = body.get("token_ids")
        if tokens is None:
            return None
        if not isinstance(tokens, (list, Prompt)) or len(tokens) > TOKENS_MAX:
            raise UsageError(f"token_ids is a list of at most {TOKENS_MAX}")
        return tokens if isinstance(tokens, Prompt) else Prompt((), tokens, self.index.seed)

    def query(self, body: Body) -> dict[str, Any]:
        """Return what each instance has of a prompt, in tokens, as Mooncake's conductor does. Raises UsageError.

        A request that names the model as Dynamo's indexer has it gets that one's fields, too.
        """
        space, keys, names, pairs = self._asked(body)
        instance = "" if body.get("instance_id") in (None, "") else _name(body)
        found = score(
            self.index, space, keys, names=names, pairs=pairs, weights=self._weights,
            endpoints=[instance] if instance else None,
        )  # fmt: skip
        size = space.block_size
        answer: dict[str, Any] = {
            space.tenant: {name: _tokens(match, size) for name, match in found.matches.items()},
            "stale": found.stale,
        }  # fmt: skip
        if body.get("model_name"):
            answer |= _as_dynamo(found, size)
        prompt = None if self._shared is None else self._prompt(body)
        if self._shared is not None and prompt is not None:
            answer["shared"] = self._shared({**body, "token_ids": prompt.ids})
        return answer

    def score(self, body: Body) -> dict[str, Any]:
        """Return the scores of endpoints for a prompt, as llm-d does, and more. Raises UsageError."""
        space, keys, names, pairs = self._asked(body)
        pods = body.get("pod_identifiers") or None
        if pods is not None and not (
            isinstance(pods, list) and len(pods) <= NAMES_MAX and all(isinstance(each, str) for each in pods)
        ):
            raise UsageError(f"pod_identifiers is a list of at most {NAMES_MAX} names")
        loads = body.get("loads")
        if loads is not None and not (
            isinstance(loads, dict) and len(loads) <= NAMES_MAX
            and all(type(each) in (int, float) and 0 <= each < 1e12 for each in loads.values())
        ):  # fmt: skip
            raise UsageError("loads has a number of blocks for each endpoint")
        found = score(
            self.index, space, keys, names=names, pairs=pairs, weights=self._weights, endpoints=pods, loads=loads,
            load_weight=_real(body, "load_weight", 1.0, 1e6),
        )  # fmt: skip
        return _scored(found)

    def expect(self, body: Body) -> dict[str, Any]:
        """Count a prompt as held for ``ttl_s`` by the instance that it was just sent to. Raises UsageError."""
        space, keys, *_ = self._asked(body, plain=True)
        name = _name(body)
        rank = None if body.get("dp_rank") is None else _number(body, "dp_rank", 0, RANK_MAX)
        seconds = _real(body, "ttl_s", EXPECT_S, EXPECT_S_MAX)
        with self.index.lock:
            for source in self.index.sources.values():
                told = source.registration
                if (told.instance, told.tenant) == (name, space.tenant) and (rank is None or told.rank in (None, rank)):
                    self.index.expect(source, space, keys, time.monotonic() + seconds, rank)
                    return {"status": "expected", "blocks": len(keys)}
        raise UsageError(f"{name!r} of tenant {space.tenant!r} is not registered")

    # -- pages -------------------------------------------------------------------------------------------

    def workers(self) -> list[dict[str, Any]]:
        """Return all publishers, with what is known of each."""
        found = []
        for each in list(self.index.sources.values()):
            with self.index.lock:  # for each by itself: others want it, too
                found.append(self._worker(each))
        return found

    def _worker(self, source: Source) -> dict[str, Any]:
        told = source.registration
        stream: Stream | Server | None = None
        if source.registration.hashed:
            stream = None if self._servers is None else self._servers.stream(source)
        elif self._publishers is not None:
            stream = self._publishers.stream(source)
        return {
            "instance_id": told.instance, "tenant_id": told.tenant, "dp_rank": told.rank, "type": told.type,
            "modelname": told.model, "block_size": told.block_size, "endpoint": told.endpoint,
            "replay_endpoint": told.replay, "node": told.node, "pool": told.pool, "blocks": source.blocks,
            "stale": source.stale or source.lost, "counted": not source.stale,
            "complete": stream is not None and stream.complete and not source.naming, "waiting": source.waiting,
            "unknown_tiers": sorted(source.media), "ignored": dict(source.ignored),
            "stream": {} if stream is None else dict(stream.counts),
        }  # fmt: skip

    def dump(self) -> dict[str, Any]:
        """Return the blocks of all holders by their keys, with their tiers; ``DUMP_MAX`` of them at most."""
        held = self.index.held(DUMP_MAX)
        found = [
            {
                "instance_id": holder.source.registration.instance, "tenant_id": holder.space.tenant,
                "model": holder.space.model, "lora_name": holder.space.lora, "cache_salt": holder.space.salt,
                "block_size": holder.space.block_size, "dp_rank": holder.rank, "group": holder.group,
                "node": holder.node, "blocks": holder.blocks, "seq_hashes": keys.tolist(),
                "tiers": [[TIERS[at] for at, there in enumerate(row) if there] for row in tiers_of(counts).tolist()],
            }
            for holder, keys, counts in held
        ]  # fmt: skip
        return {"holders": found, "truncated": sum(len(keys) for _, keys, _ in held) >= DUMP_MAX}

    def status(self) -> str:
        """Return a line on what it has."""
        sources = list(self.index.sources.values())
        stale = sum(each.stale or each.lost for each in sources)
        return f"{sum(each.blocks for each in sources):,} blocks of {len(sources)} publishers, {stale} of them stale"

    def metrics(self) -> Samples:
        """Return the metrics page."""
        samples = Samples(figures.METRICS)
        for worker in self.workers():
            labels = worker["instance_id"], worker["tenant_id"], worker["dp_rank"]
            samples.add(figures.BLOCKS, worker["blocks"], *labels)
            samples.add(figures.STALE, worker["stale"], *labels)
            samples.add(figures.COMPLETE, worker["complete"], *labels)
            samples.add(figures.WAITING, worker["waiting"], *labels)
            for kind, count in worker["stream"].items():
                samples.add(figures.STREAM, count, *labels, kind)
            for reason, count in worker["ignored"].items():
                samples.add(figures.IGNORED, count, *labels, reason)
        samples.add(figures.BYTES, self.index.nbytes)
        samples.add(figures.ADDED, self.index.added)
        samples.add(figures.REMOVED, self.index.removed)
        for path, count in sorted(self._requests.items()):
            samples.add(figures.QUESTIONS, count, path)
        samples.add_process()
        return samples


def _tokens(match: Match, size: int) -> dict[str, Any]:
    gpu, cpu, disk, *others = match.tiers.values()
    told: dict[str, Any] = {
        "longest_matched": size * match.blocks, "GPU": size * gpu, "CPU": size * cpu, "DISK": size * disk
    }  # fmt: skip
    if any(others):
        told |= {name: size * blocks for name, blocks in zip(_MORE_TIERS, others) if blocks}
    told["DP"] = {str(rank): size * match.ranks[rank] for rank in sorted(match.ranks)}
    return told


def _as_dynamo(found: Scores, size: int) -> dict[str, Any]:
    """Return the answer of Dynamo's indexer: there a tier counts from where the tier before it ends."""
    matches = {name: match for name, match in found.matches.items() if not name.startswith(("pool:", "node:"))}
    scores, instances = {}, {}
    for name, match in matches.items():
        scores[name] = {str(rank): size * blocks for rank, blocks in sorted(match.devices.items())}
        instances[name] = {
            "longest_matched": size * match.blocks, "gpu": size * match.tiers["gpu"], "dp": scores[name],
            "cpu": size * match.near, "disk": size * match.blocks,
        }  # fmt: skip
    return {"scores": scores, "frequencies": [], "instances": instances}


def _scored(found: Scores) -> dict[str, Any]:
    scores = [{"pod": name, "score": match.score} for name, match in found.matches.items() if match.score]
    answer: dict[str, Any] = {
        "scores": sorted(scores, key=lambda each: (-float(each["score"]), str(each["pod"]))),
        "blocks": found.blocks, "with_pool": found.with_pool, "unknown_tiers": found.unknown_tiers,
        "stale": found.stale,
    }  # fmt: skip
    if found.costs:
        answer["costs"] = found.costs
        answer["best"] = min(found.costs, key=lambda name: (found.costs[name], name))
    return answer


def asking(
    client: Any, *, every_s: float = 30.0, given: Sequence[Scheme] = (), libraries: Libraries | None = None
) -> Shared:  # fmt: skip
    """Return what asks a store for prompts, by the schemes that connectors have registered in it, and by those given.

    The answer has the greatest of all schemes of the model: ``tokens``, ``by_host`` (keys by data server) and
    ``load_ms``; None if no scheme can answer. Schemes are read again after ``every_s`` seconds, where none or nothing
    was found after one second. A scheme that cannot answer, as a wrong one, leaves the others alone.
    """
    from ..schemes import registry
    from ..schemes.scheme import Request
    from ..schemes.stored import KEYS_MAX, stored

    known: dict[str, tuple[float, list[Scheme]]] = {}
    useless: set[str] = set()

    def schemes_of(model: str, *, anew: bool = False) -> list[Scheme]:
        read, schemes = known.get(model, (0.0, []))
        age = time.monotonic() - read
        if not read or age > (min(every_s, _NONE_S) if anew or not schemes else every_s):
            schemes = registry.registered(client, model)
            if len(known) > NAMES_MAX:
                known.clear()
            known[model] = time.monotonic(), schemes
        return schemes

    def best_of(schemes: Sequence[Scheme], tokens: Any, request: Request, tenant: str) -> dict[str, Any] | None:
        best: dict[str, Any] | None = None
        generations: dict[str, str] = {}
        left, until = KEYS_MAX, time.monotonic() + QUESTION_S
        for scheme in schemes:
            if scheme.namespace not in ("", client.namespace) or not _may_load(scheme.scope, tenant):
                continue
            if time.monotonic() > until:
                break  # anybody may register a scheme, and all who ask wait for this one
            most = left
            left -= min(left, scheme.keys_max * (len(tokens) // scheme.page))
            try:
                found = stored(
                    client, scheme, tokens, request, generations=generations, libraries=libraries or {}, keys_max=most
                )
            except Exception as exc:  # by what others have written: the next one may know
                told = f"{scheme.scheme} of {scheme.model}: {exc}"[:400]
                if told not in useless and len(useless) < _USELESS_MAX:
                    useless.add(told)
                    log.warning("a registered key scheme cannot answer: %s", printable(told))
                continue
            if best is None or found.tokens > best["tokens"]:
                best = {"tokens": found.tokens, "by_host": found.by_host, "load_ms": found.load_ms,
                        "scheme": scheme.scheme, "block_size": scheme.page}  # fmt: skip
        return best

    def shared(body: Body) -> dict[str, Any] | None:
        model, lora = _text(body, "model", "model_name", "modelname"), _text(body, "lora_name")
        salt = _text(body, "cache_salt", "additionalsalt", "additional_salt")
        request = Request(cache_salt=salt or None, lora=(lora, None) if lora else None)
        tenant = _text(body, "tenant_id") or "default"
        mine = [each for each in given if each.model == model]
        best: dict[str, Any] | None = None
        try:
            before = schemes_of(model)
            best = best_of([*reversed(before), *mine], body["token_ids"], request, tenant)
            if best is None or not best["tokens"]:
                after = schemes_of(model, anew=True)
                if after is not before and after != before:
                    best = best_of([*reversed(after), *mine], body["token_ids"], request, tenant)
        except SimmError:
            return best
        return best

    return shared


def _may_load(scope: str, tenant: str) -> bool:
    """Return False for a scope of Mooncake's face that is another tenant's: no engine of this one has its keys."""
    return not scope.startswith(("mooncake/", "sha256:")) or scope == short_key(f"mooncake/{tenant}")


# -- fields of bodies ------------------------------------------------------------------------------------


def _json(value: Any, status: int = 200) -> Page:
    return Page(msgspec.json.encode(value).decode() + "\n", JSON, status)


def _text(body: Body, *names: str) -> str:
    """Return the first of these fields that is there; "" for none. Raises UsageError."""
    for name in names:
        value = body.get(name)
        if value is not None:
            if not isinstance(value, str) or len(value) > TEXT_MAX:
                raise UsageError(f"{name} is a text of at most {TEXT_MAX} characters")
            return value
    return ""


def _instance(path: str, tail: str) -> str:
    """Return the server that a path names; "" for others, and for a name that no server can have."""
    inside = path.startswith(_INSTANCES + "/") and path.endswith(tail)
    name = unquote(path[len(_INSTANCES) + 1 : len(path) - len(tail)]).strip() if inside else ""
    return name if len(name) <= TEXT_MAX else ""


def _name(body: Body) -> str:
    """Return the instance, which Dynamo numbers. Raises UsageError."""
    value = body.get("instance_id")
    name = str(value) if type(value) is int and 0 <= value < 1 << 64 else value
    if not isinstance(name, str) or not 0 < len(name) <= TEXT_MAX:
        raise UsageError("instance_id is missing")
    return name


def _number(body: Body, name: str, default: int, end: int) -> int:
    value = body.get(name)
    value = default if value is None else value
    if type(value) is not int or not 0 <= value < end:
        raise UsageError(f"{name} is 0 to {end - 1}, not {value!r:.40}")
    return value


def _real(body: Body, name: str, default: float, most: float) -> float:
    value = body.get(name)
    value = default if value is None else value
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise UsageError(f"{name} is 0 to {most:g}, not {value!r:.40}")
    return float(value)


__all__ = ["BODY_BYTES_MAX", "CONNECTIONS_MAX", "KEEP_S", "Service", "asking"]
