"""What SGLang's configuration says of keys: whether its pages are of pairs of tokens."""

from __future__ import annotations

import sys
from typing import Any, Final

from ...errors import UsageError

#: Names of algorithms, for releases whose own list is not known here. With the first ones pages are of pairs.
_OF_PAIRS: Final = frozenset(("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP"))
_OF_TOKENS: Final = frozenset(("", "NONE", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO"))
#: Where SGLang says by which algorithm it speculates: as resolved, as given, and how releases before 0.5.23 have it.
_CONTEXT: Final = "sglang.srt.runtime_context"
_TOLD: Final = (
    (_CONTEXT, "get_spec"), (_CONTEXT, "get_server_args"), ("sglang.srt.server_args", "get_global_server_args"),
)  # fmt: skip


def paging_of() -> dict[str, bool]:
    """Return the options of a registration that say what a page's hash covers, as the engine was started here.

    SGLang decides it so: pairs of neighbouring tokens with EAGLE, unless the model has Mamba's layers. The caller
    registers nothing of such a model.

    Raises UsageError where it cannot be told.
    """
    return {"bigram": True} if _of_pairs(_algorithm()) else {}


def _algorithm() -> Any:
    """Return the algorithm by which the engine of this process speculates. Raises UsageError where it is not known."""
    for module, name in _TOLD:
        try:
            return getattr(sys.modules[module], name)().speculative_algorithm
        except Exception:  # in another place, or not at all
            continue
    try:
        sys.modules[_CONTEXT].get_server_args()
    except ValueError:  # nothing is published: a program that embeds parts of SGLang, without those that speculate
        return None
    except Exception:
        pass
    raise UsageError("it is not known by which algorithm this engine speculates, and so what its pages cover")


def _of_pairs(algorithm: Any) -> bool:
    """Return whether SGLang takes an algorithm for one like EAGLE. Raises UsageError for one that nobody knows."""
    name = str(algorithm or "").upper()
    if name in _OF_TOKENS:
        return False
    kinds: Any = getattr(sys.modules.get("sglang.srt.speculative.spec_info"), "SpeculativeAlgorithm", None)
    try:
        return bool(kinds.from_string(name).is_eagle())
    except Exception:
        if name in _OF_PAIRS:
            return True
    raise UsageError(f"of the algorithm {name[:80]!r} it is not known whether pages are of pairs of tokens")
