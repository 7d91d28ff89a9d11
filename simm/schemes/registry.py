"""What a connector registers in the store, so that others can make the keys of its pages.

A registration is one deployment's key scheme: the model, the scheme's name, tokens of a page, ranks, pools, namespace,
epoch and the scheme's own options. All deployments of a model and scheme are one small value under :func:`value_key`,
in a namespace that connectors and askers agree on. Connectors register at their start and again now and then:

* The value may be evicted, as any other.
* Two connectors that register at the same moment read the same value, and one of them is lost until its next turn.

What comes out of the store is another process's word. :func:`parse` bounds it and checks each field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol

from numpy.typing import NDArray

from ..errors import UsageError
from . import lmcache, sglang, vllm
from .encodings import BLOCK_TOKENS_MAX

#: Bounds of a value, of the deployments in it, and of a registration's numbers and texts.
VALUE_BYTES_MAX: Final = 64 << 10
DEPLOYMENTS_MAX: Final = 64
RANKS_MAX: Final = 1 << 12
TEXT_MAX: Final = 1024
KEYS_OF_PAGE_MAX: Final = 1 << 14

Option = str | int | bool


class Request(NamedTuple):
    """What of a request, beside its tokens, makes its pages its own."""

    extra_key: str | None = None
    cache_salt: str | None = None
    #: Name and path of the adapter.
    lora: tuple[str, str] | None = None


class PromptKeys(NamedTuple):
    """The keys of a prompt's full pages, ``per_page`` for each: a page can be loaded if all of them are stored."""

    keys: list[str]
    per_page: int


@dataclass(frozen=True)
class Scheme:
    """How one deployment makes its keys.

    Args:
        model: its name, as requests have it.
        scheme: one of :data:`SCHEMES`.
        page: tokens of a page, block or chunk.
        ranks, stages: tensor-parallel ranks and pipeline stages that each store a part of every page.
        pools: what is stored of every page; ``kv`` alone, but for SGLang's hybrid models.
        namespace: where the pages are.
        epoch: of the namespace, which a change of the model's weights raises.
        options: the scheme's own, by the names of its functions' arguments.

    Raises UsageError for fields that cannot be.
    """

    model: str
    scheme: str
    page: int
    ranks: int = 1
    stages: int = 1
    pools: tuple[str, ...] = ("kv",)
    namespace: str = ""
    epoch: int = 0
    options: Mapping[str, Option] = field(default_factory=dict)

    def __post_init__(self) -> None:
        texts = (self.model, self.scheme, self.namespace, *self.pools, *self.options)
        if not all(isinstance(each, str) and len(each) <= TEXT_MAX for each in texts) or not self.model:
            raise UsageError("a registration has texts for model, scheme, namespace, pools and options' names")
        for name, value, most in (("page", self.page, BLOCK_TOKENS_MAX), ("ranks", self.ranks, RANKS_MAX),
                                  ("stages", self.stages, RANKS_MAX)):  # fmt: skip
            if type(value) is not int or not 0 < value <= most:
                raise UsageError(f"{name} of a registration is 1 to {most}, not {value!r}")
        if type(self.epoch) is not int or not 0 <= self.epoch < 1 << 63:
            raise UsageError(f"{self.epoch!r} is no epoch")
        if self.scheme not in SCHEMES:
            raise UsageError(f"{self.scheme!r} is no key scheme; there are {', '.join(SCHEMES)}")
        wrong = [name for name, value in self.options.items() if type(value) is not _OPTIONS[self.scheme].get(name)]
        if wrong:
            raise UsageError(f"{self.scheme} has no options {wrong}; it has {dict(_OPTIONS[self.scheme])}")
        for name, option in self.options.items():
            if isinstance(option, str) and len(option) > TEXT_MAX:
                raise UsageError(f"option {name} has {len(option)} characters, {TEXT_MAX} at most")
            if isinstance(option, int) and name != "root" and not 0 <= option <= RANKS_MAX:
                raise UsageError(f"option {name} is {option}, 0 to {RANKS_MAX} are allowed")
        most = self._keys_max()
        if most > KEYS_OF_PAGE_MAX:
            raise UsageError(f"up to {most} keys for each page of {self.model}, {KEYS_OF_PAGE_MAX} at most")

    def _keys_max(self) -> int:
        """Return a number that the keys of a page do not exceed."""
        many = {name: value for name, value in self.options.items() if type(value) is int}
        if self.scheme == "sglang-pages":
            return str(self.options.get("heads", "")).count(",") + 1
        if self.scheme == "sglang-unified":
            return int(many.get("model_layers", 0) * max(1, many.get("heads", 0)))
        parts = 2 * max(1, many.get("split", 0)) * max(1, many.get("layers", 0)) * len(self.pools)
        return int(parts * self.ranks * self.stages)

    def keys(self, tokens: Sequence[int] | NDArray[Any], request: Request = Request()) -> PromptKeys:  # noqa: B008
        """Return the keys of all ranks for a prompt's full pages, page by page. O(tokens + keys).

        Raises UsageError for tokens that are none, and for a registration that contradicts itself.
        """
        lists = SCHEMES[self.scheme](self, tokens, request)
        per_page = [len(each) // (len(lists[0]) or 1) for each in lists[1:]]
        keys: list[str] = []
        for page in range(len(lists[0])):
            for each, count in zip(lists[1:], per_page):
                keys += each[page * count : (page + 1) * count]
        return PromptKeys(keys, sum(per_page))


#: The hashes of a prompt's pages, and for each rank the keys of all of them.
_Lists = list[list[Any]]
_Maker = Callable[[Scheme, Sequence[int] | NDArray[Any], Request], _Lists]


def _option(scheme: Scheme, name: str, default: Any) -> Any:
    return scheme.options.get(name, default)


def _sglang_hashes(scheme: Scheme, tokens: Sequence[int] | NDArray[Any], request: Request) -> list[str]:
    return sglang.page_hashes(
        tokens, scheme.page, extra_key=request.extra_key, cache_salt=request.cache_salt,
        bigram=_option(scheme, "bigram", False),
    )  # fmt: skip


def _ranks(scheme: Scheme, mla: bool) -> list[sglang.Rank]:
    """Return the ranks whose keys differ."""
    return [
        sglang.Rank(rank, stage, scheme.stages)
        for stage in range(scheme.stages) for rank in range(1 if mla else scheme.ranks)
    ]  # fmt: skip


def _sglang_simm(scheme: Scheme, tokens: Sequence[int] | NDArray[Any], request: Request) -> _Lists:
    hashes = _sglang_hashes(scheme, tokens, request)
    mla, tag = _option(scheme, "mla", False), _option(scheme, "tag", None)
    return [hashes, *(sglang.simm_keys(hashes, rank, mla=mla, tag=tag) for rank in _ranks(scheme, mla))]


def _sglang_pages(scheme: Scheme, tokens: Sequence[int] | NDArray[Any], request: Request) -> _Lists:
    hashes = _sglang_hashes(scheme, tokens, request)
    heads = _option(scheme, "heads", "").split(",")
    scope, generation = _option(scheme, "scope", ""), _option(scheme, "generation", "")
    return [hashes, sglang.page_keys(hashes, heads, scope=scope, generation=generation)]


def _sglang_mooncake(scheme: Scheme, tokens: Sequence[int] | NDArray[Any], request: Request) -> _Lists:
    hashes = _sglang_hashes(scheme, tokens, request)
    mla, split = _option(scheme, "mla", False), _option(scheme, "split", 0)
    prefix = sglang.mooncake_prefix(_option(scheme, "model_name", ""), tag=_option(scheme, "tag", None))
    lists: _Lists = [hashes]
    for pool in scheme.pools:
        alike = mla or pool in sglang.PACKED_POOLS
        lists += [
            sglang.mooncake_keys(hashes, rank, prefix=prefix, mla=mla, split=split, pool=pool)
            for rank in _ranks(scheme, alike)
        ]
    return lists


def _sglang_unified(scheme: Scheme, tokens: Sequence[int] | NDArray[Any], request: Request) -> _Lists:
    hashes = _sglang_hashes(scheme, tokens, request)
    grid = sglang.Grid(
        _option(scheme, "model_id", scheme.model), _option(scheme, "dtype", "bfloat16"), scheme.page,
        _option(scheme, "heads", 0), _option(scheme, "head_group", 0), _option(scheme, "layers", 0),
    )  # fmt: skip
    return [hashes, sglang.unified_keys(hashes, grid, (0, _option(scheme, "model_layers", 0)))]


def _vllm_mooncake(scheme: Scheme, tokens: Sequence[int] | NDArray[Any], request: Request) -> _Lists:
    extras = None
    if request.lora is not None or request.cache_salt:
        extras = vllm.extra_keys(
            len(tokens) // scheme.page, scheme.page, lora=request.lora, cache_salt=request.cache_salt
        )
    hashes = vllm.block_hashes(
        tokens, scheme.page, algorithm=_option(scheme, "algorithm", "sha256"),
        seed=_option(scheme, "seed", vllm.DEFAULT_SEED), extras=extras,
    )  # fmt: skip
    return [hashes, *(
        vllm.mooncake_keys(
            hashes, _option(scheme, "model_name", scheme.model), tp_rank=rank.tp, pp_rank=rank.pp,
            group=_option(scheme, "group", 0), prefix=_option(scheme, "prefix", ""),
        )
        for rank in _ranks(scheme, _option(scheme, "mla", False))
    )]  # fmt: skip


def _lmcache(scheme: Scheme, tokens: Sequence[int] | NDArray[Any], request: Request) -> _Lists:
    hashes = lmcache.chunk_hashes(
        tokens, scheme.page, algorithm=_option(scheme, "algorithm", "builtin"), seed=scheme.options.get("seed"),  # type: ignore[arg-type]
        root=_option(scheme, "root", 0),
    )  # fmt: skip
    workers = scheme.ranks * scheme.stages
    mla = _option(scheme, "mla", False)
    return [hashes, *(
        lmcache.engine_keys(
            hashes, _option(scheme, "model_name", scheme.model), _option(scheme, "dtype", "bfloat16"),
            world_size=1 if mla else workers, worker_id=worker, layers=_option(scheme, "layers", 0),
        )
        for worker in range(1 if mla else workers)
    )]  # fmt: skip


#: By name: returns the keys of a scheme.
SCHEMES: Final[Mapping[str, _Maker]] = {
    "sglang-pages": _sglang_pages, "sglang-simm": _sglang_simm, "sglang-mooncake": _sglang_mooncake,
    "sglang-unified": _sglang_unified,
    "vllm-mooncake": _vllm_mooncake, "lmcache": _lmcache,
}  # fmt: skip
_OPTIONS: Final[Mapping[str, Mapping[str, type]]] = {
    "sglang-pages": {"bigram": bool, "scope": str, "generation": str, "heads": str},
    "sglang-simm": {"mla": bool, "tag": str, "bigram": bool},
    "sglang-mooncake": {"mla": bool, "tag": str, "bigram": bool, "model_name": str, "split": int},
    "sglang-unified": {
        "bigram": bool, "model_id": str, "dtype": str, "heads": int, "head_group": int, "layers": int,
        "model_layers": int,
    },
    "vllm-mooncake": {
        "mla": bool, "algorithm": str, "seed": str, "model_name": str, "group": int, "prefix": str,
    },
    "lmcache": {
        "mla": bool, "algorithm": str, "seed": str, "root": int, "model_name": str, "dtype": str, "layers": int,
    },
}  # fmt: skip


# -- in the store --------------------------------------------------------------------------------------


class Values(Protocol):
    """What registering needs of a client."""

    def put(self, key: str, value: Any) -> bool: ...

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]: ...


def value_key(model: str, scheme: str) -> str:
    """Return the key under which the deployments of a model and scheme are."""
    return f"simm.scheme/{scheme}/{blake2b(model.encode(), digest_size=16).hexdigest()}"


def scheme_of(item: object) -> Scheme:
    """Return the registration that a JSON object has: the fields of :class:`Scheme`. Raises UsageError for another."""
    try:
        fields = dict(item)  # type: ignore[call-overload]
        return Scheme(**{**fields, "pools": tuple(fields.get("pools", ("kv",)))})
    except (TypeError, ValueError, AttributeError) as exc:
        raise UsageError(f"no scheme of keys: {exc}") from None


def parse(value: bytes) -> list[Scheme]:
    """Return the registrations of a value, without those that are wrong. O(bytes)."""
    if len(value) > VALUE_BYTES_MAX:
        return []
    try:
        items = json.loads(value)
    except (ValueError, RecursionError):
        return []
    found = []
    for item in items[:DEPLOYMENTS_MAX] if isinstance(items, list) else ():
        try:
            found.append(scheme_of(item))
        except UsageError:
            continue  # of a newer version, or nonsense
    return found


def as_value(schemes: Sequence[Scheme]) -> bytes:
    """Return the value of these registrations."""
    return json.dumps([{**asdict(each), "pools": list(each.pools)} for each in schemes]).encode()


def register(client: Values, scheme: Scheme) -> bool:
    """Add a deployment to those in the store. Return False if that failed. Two round trips.

    Of more than ``DEPLOYMENTS_MAX``, or of a value that would be too long, the oldest are dropped.
    """
    key = value_key(scheme.model, scheme.scheme)
    (value,) = client.get_many([key])
    known = [each for each in parse(value or b"") if each != scheme and not _replaced(each, scheme)]
    known = [*known, scheme][-DEPLOYMENTS_MAX:]
    while len(raw := as_value(known)) > VALUE_BYTES_MAX and len(known) > 1:
        del known[0]
    return client.put(key, raw)


def _replaced(old: Scheme, new: Scheme) -> bool:
    """Return whether nothing can be read under a registration's keys any more: of a generation before a flush."""
    scope = new.options.get("scope")
    return bool(
        scope and old.options.get("scope") == scope
        and str(old.options.get("generation", "")) < str(new.options.get("generation", ""))
    )  # fmt: skip


def registered(client: Values, model: str) -> list[Scheme]:
    """Return the deployments of a model, of all schemes. One round trip."""
    values = client.get_many([value_key(model, scheme) for scheme in SCHEMES])
    return [each for value in values if value for each in parse(value) if each.model == model]


assert set(SCHEMES) == set(_OPTIONS)
