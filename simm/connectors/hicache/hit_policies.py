"""How much of a prompt's prefix can be restored, when some of its pages are stored and others are not.

Pure functions over lists of bools, one for each page of the prompt in order: is that page of that pool stored? A model
has a main pool (attention keys and values), and may have others, such as the states of a Mamba layer. A prefix can be
restored if the main pool has all of its pages, and each other pool has what its policy wants.
"""

from __future__ import annotations

from collections.abc import Sequence


def leading(stored: Sequence[bool]) -> int:
    """Return the number of pages before the first that is not stored. O(pages)."""
    for position, each in enumerate(stored):
        if not each:
            return position
    return len(stored)


def all_pages(stored: Sequence[bool], pages: int) -> set[int]:
    """Return the prefixes, in pages up to ``pages``, that a pool can restore which needs each of their pages."""
    return set(range(1, min(leading(stored), pages) + 1))


def trailing_pages(stored: Sequence[bool], pages: int, window: int) -> set[int]:
    """Return the prefixes that a pool can restore which needs only their last ``window`` pages. O(pages).

    Of a prefix shorter than the window, all pages are needed. A longer prefix may do where a shorter one does not.
    """
    found = set()
    run = 0
    for prefix in range(1, min(pages, len(stored)) + 1):
        run = run + 1 if stored[prefix - 1] else 0
        if run >= min(window, prefix):
            found.add(prefix)
    return found


def block_groups(stored: Sequence[bool], group: int, block_pages: int) -> int:
    """Return how many pages the leading complete groups cover. O(keys).

    ``stored`` has ``group`` entries for each block of ``block_pages`` pages, block after block. A group that is not
    complete covers nothing, nor does any behind it.
    """
    if group < 1 or block_pages < 1:
        return 0
    return leading(stored) // group * block_pages


def block_positions(pages: int, group: int, block_pages: int) -> list[int]:
    """Return the positions of pages whose keys name the groups: the last ``group`` of each whole block. O(pages)."""
    if not 0 < group <= block_pages:
        return []
    return [
        position
        for end in range(block_pages, pages + 1, block_pages)
        for position in range(end - group, end)
    ]  # fmt: skip
