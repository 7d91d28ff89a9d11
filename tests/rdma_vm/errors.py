"""What ends a run of the machine before its command could say anything."""

from __future__ import annotations


class Unavailable(Exception):
    """Something that the machine needs is not to be had here. The text says what, and what to do."""


class BootFailed(Exception):
    """The machine started and did not come up, or ended without its command's exit status."""
