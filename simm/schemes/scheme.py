"""How one deployment makes its keys: the scheme that its connector registers, and the keys of a prompt by it.

A scheme's fields come from a store that others write, too (``registry.py``). So each is checked and bounded when a
:class:`Scheme` is made, and what remains can only contradict itself: then making keys raises UsageError.

Keys of SiMM's own connectors begin with a scope and its generation, which a flush replaces
(``simm.connectors.keyspace``). A scheme has the generation of its registration. Who asks the store reads the one that
holds now (``stored.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from ..errors import UsageError
from . import lmcache, sglang, vllm
from .encodings import BLOCK_TOKENS_MAX, short_key
from .groups import GroupKeys

#: Bounds of a scheme's numbers and texts.
RANKS_MAX: Final = 1 << 12
TEXT_MAX: Final = 1024
#: Of options that list something.
LIST_MAX: Final = 8192
KEYS_OF_PAGE_MAX: Final = 1 << 14
GROUPS_MAX: Final = 64

Option = str | int | bool
Tokens = Sequence[int] | NDArray[Any]
#: Digests of libraries by their names, as ``{"blake3": ...}``, for schemes that need one.
Libraries = Mapping[str, Callable[[bytes], bytes]]
_NO_LIBRARIES: Final[Libraries] = {}


class Request(NamedTuple):
    """What of a request, beside its tokens, makes its pages its own."""

    extra_key: str | None = None
    cache_salt: str | None = None
    #: Name and path of the adapter. The path None: as the deployment has registered it.
    lora: tuple[str, str | None] | None = None


class PromptKeys(NamedTuple):
    """The keys of a prompt's full pages, ``per_page`` for each: a page can be loaded if all of them are stored."""

    keys: list[str]
    per_page: int


class _Group(NamedTuple):
    """A KV cache group: its number in keys, the tokens of a block, and of its window; 0 for full attention."""

    number: int
    tokens: int
    window: int


@dataclass(frozen=True)
class Scheme:
    """How one deployment makes its keys.

    Args:
        model: its name, as requests have it.
        scheme: one of :data:`SCHEMES`.
        page: tokens of a page, block or chunk; of several KV cache groups a multiple of each one's block.
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
        self._check_options()
        try:
            json.dumps([*texts, *self.options.values()], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise UsageError("a registration has a text that is no Unicode") from None
        most = self._keys_max()
        if most > KEYS_OF_PAGE_MAX:
            raise UsageError(f"up to {most} keys for each page of {self.model}, {KEYS_OF_PAGE_MAX} at most")

    def _check_options(self) -> None:
        wrong = [name for name, value in self.options.items() if type(value) is not _OPTIONS[self.scheme].get(name)]
        if wrong:
            raise UsageError(f"{self.scheme} has no options {wrong}; it has {dict(_OPTIONS[self.scheme])}")
        for name, option in self.options.items():
            most = LIST_MAX if name in _LISTS else TEXT_MAX
            if isinstance(option, str) and len(option) > most:
                raise UsageError(f"option {name} has {len(option)} characters, {most} at most")
            if isinstance(option, int) and name != "root" and not 0 <= option <= BLOCK_TOKENS_MAX:
                raise UsageError(f"option {name} is {option}, 0 to {BLOCK_TOKENS_MAX} are allowed")

    def _keys_max(self) -> int:
        """Return a number that the keys of a page do not exceed. Raises UsageError for groups that cannot be."""
        many = {name: value for name, value in self.options.items() if type(value) is int}
        if self.scheme == "sglang-pages":
            return str(self.options.get("heads", "")).count(",") + 1
        if self.scheme == "sglang-unified":
            return int(many.get("model_layers", 0) * max(1, many.get("heads", 0)))
        if self.scheme in _GROUPED:
            groups = _groups(self)
            blocks = sum(self.page // each.tokens for each in groups)
            identities = str(self.options.get("identities", "")).count(",") + 1
            keys = blocks * (self.ranks * self.stages if self.scheme == "vllm-mooncake" else identities)
            return max(keys, self.page // _unit(self, groups))  # a hash costs what a key does
        parts = 2 * max(1, many.get("split", 0)) * max(1, many.get("layers", 0)) * len(self.pools)
        parts *= max(1, many.get("object_groups", 0))
        return int(parts * self.ranks * self.stages)

    @property
    def keys_max(self) -> int:
        """A number that the keys of a page do not exceed, 1 at least."""
        return max(1, self._keys_max())

    @property
    def scope(self) -> str:
        """The scope of its keys; empty for keys that no flush replaces."""
        return str(self.options.get("scope", ""))

    def groups(
        self, tokens: Tokens, request: Request = Request(), *, generation: str = "",  # noqa: B008
        libraries: Libraries = _NO_LIBRARIES,
    ) -> list[GroupKeys]:  # fmt: skip
        """Return the keys of all ranks for a prompt's full blocks, by KV cache group. O(tokens + keys).

        ``generation``: of the scope; empty: the one that was registered.

        Raises UsageError for tokens that are none, and for a registration that contradicts itself.
        """
        generation = generation or str(self.options.get("generation", ""))
        asked = _Asked(tokens, request, libraries)
        head = f"{self.scope}/{generation}/" if self.scope else str(self.options.get("head", ""))
        found = []
        for part in SCHEMES[self.scheme](self, asked):
            per_block = [len(each) // (part.blocks or 1) for each in part.lists]
            keys: list[str] = []
            for block in range(part.blocks):
                for each, count in zip(part.lists, per_block):
                    keys += each[block * count : (block + 1) * count]
            found.append(GroupKeys(part.tokens, part.window, sum(per_block), [short_key(head + key) for key in keys]))
        return found

    def keys(
        self, tokens: Tokens, request: Request = Request(), *, libraries: Libraries = _NO_LIBRARIES  # noqa: B008
    ) -> PromptKeys:  # fmt: skip
        """Return the keys of all ranks and groups for a prompt's full pages, page by page. O(tokens + keys).

        A page can be loaded if all of them are stored. Of groups with a window less is needed: see :meth:`groups`.

        Raises UsageError for tokens that are none, and for a registration that contradicts itself.
        """
        found = self.groups(tokens, request, libraries=libraries)
        if len(found) == 1:
            return PromptKeys(found[0].keys, found[0].per_block)
        blocks = [self.page // each.block_tokens for each in found]
        keys: list[str] = []
        for page in range(len(tokens) // self.page):
            for each, count in zip(found, blocks):
                keys += each.range(page * count, (page + 1) * count)
        return PromptKeys(keys, sum(each.per_block * count for each, count in zip(found, blocks)))


def scheme_of(item: object) -> Scheme:
    """Return the registration that a JSON object has: the fields of :class:`Scheme`. Raises UsageError for another."""
    try:
        fields = dict(item)  # type: ignore[call-overload]
        return Scheme(**{**fields, "pools": tuple(fields.get("pools", ("kv",)))})
    except (TypeError, ValueError, AttributeError) as exc:
        raise UsageError(f"no scheme of keys: {exc}") from None


class _Asked(NamedTuple):
    """What keys are asked for."""

    tokens: Tokens
    request: Request
    libraries: Libraries


class _Part(NamedTuple):
    """The keys of a group: its full blocks' number, and of each rank a list that has as many of each block."""

    tokens: int
    window: int
    blocks: int
    lists: list[list[str]]


_Maker = Callable[[Scheme, _Asked], list[_Part]]


def _option(scheme: Scheme, name: str, default: Any) -> Any:
    return scheme.options.get(name, default)


def _plain(scheme: Scheme, hashes: Sequence[Any], lists: list[list[str]]) -> list[_Part]:
    """Return the one group of a scheme without several."""
    return [_Part(scheme.page, 0, len(hashes), lists)]


def _without_adapter(request: Request) -> None:
    """Raise UsageError for a request with an adapter: what its keys have of it, nobody outside the engine knows."""
    if request.lora is not None:
        raise UsageError("keys of requests with an adapter are not known")


def _sglang_hashes(scheme: Scheme, asked: _Asked) -> list[str]:
    _without_adapter(asked.request)  # it is told apart by a number that is drawn when it is loaded
    return sglang.page_hashes(
        asked.tokens, scheme.page, extra_key=asked.request.extra_key, cache_salt=asked.request.cache_salt,
        bigram=_option(scheme, "bigram", False),
    )  # fmt: skip


def _ranks(scheme: Scheme, mla: bool) -> list[sglang.Rank]:
    """Return the ranks whose keys differ."""
    return [
        sglang.Rank(rank, stage, scheme.stages)
        for stage in range(scheme.stages) for rank in range(1 if mla else scheme.ranks)
    ]  # fmt: skip


def _sglang_simm(scheme: Scheme, asked: _Asked) -> list[_Part]:
    hashes = _sglang_hashes(scheme, asked)
    mla, tag = _option(scheme, "mla", False), _option(scheme, "tag", None)
    return _plain(scheme, hashes, [sglang.simm_keys(hashes, rank, mla=mla, tag=tag) for rank in _ranks(scheme, mla)])


def _sglang_pages(scheme: Scheme, asked: _Asked) -> list[_Part]:
    hashes = _sglang_hashes(scheme, asked)
    heads = _option(scheme, "heads", "").split(",")
    return _plain(scheme, hashes, [[head + each for each in hashes] for head in heads])


def _sglang_mooncake(scheme: Scheme, asked: _Asked) -> list[_Part]:
    hashes = _sglang_hashes(scheme, asked)
    mla, split = _option(scheme, "mla", False), _option(scheme, "split", 0)
    prefix = sglang.mooncake_prefix(_option(scheme, "model_name", ""), tag=_option(scheme, "tag", None))
    lists = []
    for pool in scheme.pools:
        alike = mla or pool in sglang.PACKED_POOLS
        lists += [
            sglang.mooncake_keys(hashes, rank, prefix=prefix, mla=mla, split=split, pool=pool)
            for rank in _ranks(scheme, alike)
        ]
    return _plain(scheme, hashes, lists)


def _sglang_unified(scheme: Scheme, asked: _Asked) -> list[_Part]:
    hashes = _sglang_hashes(scheme, asked)
    grid = sglang.Grid(
        _option(scheme, "model_id", scheme.model), _option(scheme, "dtype", "bfloat16"), scheme.page,
        _option(scheme, "heads", 0), _option(scheme, "head_group", 0), _option(scheme, "layers", 0),
    )  # fmt: skip
    return _plain(scheme, hashes, [sglang.unified_keys(hashes, grid, (0, _option(scheme, "model_layers", 0)))])


def as_groups(groups: Sequence[tuple[int, int, int]]) -> str:
    """Return the option ``groups``: of each KV cache group its number in keys, tokens of a block, and window or 0."""
    return ",".join(":".join(map(str, each)) for each in groups)


def _groups(scheme: Scheme) -> list[_Group]:
    """Return the KV cache groups that a registration names, else one. Raises UsageError for those that cannot be."""
    text = str(scheme.options.get("groups", ""))
    parts = [each.split(":") for each in text.split(",")] if text else []
    if len(parts) > GROUPS_MAX or not all(len(each) == 3 and all(_is_number(one) for one in each) for each in parts):
        raise UsageError(f"groups are up to {GROUPS_MAX} times NUMBER:TOKENS:WINDOW, not {text[:80]!r}")
    groups = [_Group(*map(int, each)) for each in parts] or [_Group(_option(scheme, "group", 0), scheme.page, 0)]
    unit = _unit(scheme, groups)
    for each in groups:
        if not 0 < each.tokens <= BLOCK_TOKENS_MAX or scheme.page % each.tokens or not unit or each.tokens % unit:
            raise UsageError(f"blocks of {each.tokens} tokens do not fit pages of {scheme.page} and hashes of {unit}")
        if each.window == 1:
            raise UsageError("a window of one token needs no block, so none would ever be looked for")
    return groups


def _unit(scheme: Scheme, groups: Sequence[_Group]) -> int:
    """Return the tokens that a block's hash covers."""
    return int(_option(scheme, "hash_tokens", 0)) or min(each.tokens for each in groups)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _vllm_parts(scheme: Scheme, asked: _Asked, lists: Callable[[list[bytes], int], list[list[str]]]) -> list[_Part]:
    """Return the groups of an engine with vLLM's hashes. ``lists``: the keys of a group's blocks, of each rank."""
    groups = _groups(scheme)
    unit = _unit(scheme, groups)
    lora, salt = _adapter(scheme, asked.request), asked.request.cache_salt
    extras = None
    if lora is not None or salt:
        extras = vllm.extra_keys(len(asked.tokens) // unit, unit, lora=lora, cache_salt=salt)
    hashes = vllm.block_hashes(
        asked.tokens, unit, algorithm=_option(scheme, "algorithm", "sha256"),
        seed=_option(scheme, "seed", vllm.DEFAULT_SEED), extras=extras,
    )  # fmt: skip
    parts = []
    for group in groups:
        own = vllm.merged(hashes, group.tokens // unit)
        parts.append(_Part(group.tokens, group.window, len(own), lists(own, group.number)))
    return parts


def _adapter(scheme: Scheme, request: Request) -> tuple[str, str] | None:
    """Return name and path of a request's adapter. Raises UsageError for a path that is not known."""
    if request.lora is None:
        return None
    name, path = request.lora
    if path is None:
        path = adapters(scheme).get(name)
        if path is None:
            raise UsageError(f"where the adapter {name[:80]!r} is, is not known")
    return name, path


def adapters(scheme: Scheme) -> dict[str, str]:
    """Return where adapters are, path by name, as far as a registration says it."""
    try:
        found = json.loads(_option(scheme, "loras", "") or "{}")
    except (ValueError, RecursionError):
        return {}
    pairs = found.items() if isinstance(found, dict) else ()
    return {name: path for name, path in pairs if isinstance(path, str)}


def _vllm_mooncake(scheme: Scheme, asked: _Asked) -> list[_Part]:
    model, prefix = _option(scheme, "model_name", scheme.model), _option(scheme, "prefix", "")
    ranks = _ranks(scheme, _option(scheme, "mla", False))
    return _vllm_parts(scheme, asked, lambda hashes, group: [
        vllm.mooncake_keys(hashes, model, tp_rank=rank.tp, pp_rank=rank.pp, group=group, prefix=prefix)
        for rank in ranks
    ])  # fmt: skip


def _vllm_blocks(scheme: Scheme, asked: _Asked) -> list[_Part]:
    identities = _option(scheme, "identities", "").split(",")
    return _vllm_parts(
        scheme, asked,
        lambda hashes, group: [vllm.connector_keys(hashes, identity, group=group) for identity in identities],
    )  # fmt: skip


def _vllm_tier(scheme: Scheme, asked: _Asked) -> list[_Part]:
    return _vllm_parts(scheme, asked, lambda hashes, group: [vllm.tier_keys(hashes, group=group)])


def _lmcache(scheme: Scheme, asked: _Asked) -> list[_Part]:
    _without_adapter(asked.request)
    hashes = lmcache.chunk_hashes(
        asked.tokens, scheme.page, algorithm=_option(scheme, "algorithm", "builtin"),
        seed=scheme.options.get("seed"), root=_option(scheme, "root", 0),  # type: ignore[arg-type]
    )  # fmt: skip
    workers = 1 if _option(scheme, "mla", False) else scheme.ranks * scheme.stages
    return _plain(scheme, hashes, [
        lmcache.engine_keys(
            hashes, _option(scheme, "model_name", scheme.model), _option(scheme, "dtype", "bfloat16"),
            world_size=_option(scheme, "world", 0) or workers, worker_id=worker, layers=_option(scheme, "layers", 0),
        )
        for worker in range(workers)
    ])  # fmt: skip


def _lmcache_server(scheme: Scheme, asked: _Asked) -> list[_Part]:
    _without_adapter(asked.request)
    algorithm, workers = _option(scheme, "algorithm", "blake3"), scheme.ranks * scheme.stages
    digest = asked.libraries.get("blake3") if algorithm == "blake3" else None
    if algorithm == "blake3" and digest is None:
        raise UsageError("LMCache's hash needs blake3, which is not installed")
    hashes = lmcache.server_chunk_hashes(
        asked.tokens, scheme.page, blake3=digest, algorithm=algorithm, seed=_option(scheme, "seed", vllm.DEFAULT_SEED)
    )
    return _plain(scheme, hashes, [
        lmcache.object_keys(
            hashes, _option(scheme, "model_name", scheme.model), kv_rank=lmcache.kv_rank(workers, worker), group=group,
            cache_salt=asked.request.cache_salt or "",
        )
        for group in range(_option(scheme, "object_groups", 1) or 1) for worker in range(workers)
    ])  # fmt: skip


#: By name: returns the keys of a scheme.
SCHEMES: Final[Mapping[str, _Maker]] = {
    "sglang-pages": _sglang_pages, "sglang-simm": _sglang_simm, "sglang-mooncake": _sglang_mooncake,
    "sglang-unified": _sglang_unified,
    "vllm-blocks": _vllm_blocks, "vllm-tier": _vllm_tier, "vllm-mooncake": _vllm_mooncake,
    "lmcache": _lmcache, "lmcache-server": _lmcache_server,
}  # fmt: skip
_SCOPED: Final[Mapping[str, type]] = {"scope": str, "generation": str}
_VLLM: Final[Mapping[str, type]] = {
    **_SCOPED, "algorithm": str, "seed": str, "hash_tokens": int, "groups": str, "loras": str,
}  # fmt: skip
_OPTIONS: Final[Mapping[str, Mapping[str, type]]] = {
    "sglang-pages": {**_SCOPED, "bigram": bool, "heads": str},
    "sglang-simm": {"mla": bool, "tag": str, "bigram": bool},
    "sglang-mooncake": {**_SCOPED, "mla": bool, "tag": str, "bigram": bool, "model_name": str, "split": int},
    "sglang-unified": {
        **_SCOPED, "bigram": bool, "model_id": str, "dtype": str, "heads": int, "head_group": int, "layers": int,
        "model_layers": int,
    },
    "vllm-blocks": {**_VLLM, "identities": str},
    "vllm-tier": _VLLM,
    "vllm-mooncake": {**_VLLM, "mla": bool, "model_name": str, "group": int, "prefix": str},
    "lmcache": {
        **_SCOPED, "head": str, "mla": bool, "algorithm": str, "seed": str, "root": int, "model_name": str,
        "dtype": str, "layers": int, "world": int,
    },
    "lmcache-server": {"head": str, "algorithm": str, "seed": str, "model_name": str, "object_groups": int},
}  # fmt: skip
_GROUPED: Final = frozenset(("vllm-blocks", "vllm-tier", "vllm-mooncake"))
_LISTS: Final = frozenset(("groups", "heads", "identities", "loras"))
assert set(SCHEMES) == set(_OPTIONS)
