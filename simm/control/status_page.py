"""The manager's page: one file, with its style and script, and the policy that binds a browser to it.

The page loads nothing but ``/api/v1/status`` of the server that it came from. Its Content-Security-Policy names style
and script by their SHA-256, so a browser runs no other, whatever text a server or client puts into a name; and
``require-trusted-types-for`` makes it refuse every way of turning text into elements.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources
from typing import Final

from ..net.http import HTML, Page

FILE: Final = "status_page.html"
_BLOCK: Final = "<{0}>(.*?)</{0}>"


def _hashes(text: str, element: str) -> str:
    """Return the sources that a policy names for all inline elements of one kind."""
    found = re.findall(_BLOCK.format(element), text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def policy(text: str) -> str:
    """Return the Content-Security-Policy of a page's text."""
    return "; ".join((
        "default-src 'none'", f"script-src {_hashes(text, 'script')}", f"style-src {_hashes(text, 'style')}",
        "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'", "trusted-types 'none'",
    ))  # fmt: skip


@functools.cache
def page() -> Page:
    """Return the page with its headers."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    return Page(text, HTML, headers=(
        ("Content-Security-Policy", policy(text)), ("Referrer-Policy", "no-referrer"), ("X-Frame-Options", "DENY"),
        ("Cross-Origin-Opener-Policy", "same-origin"), ("Cross-Origin-Resource-Policy", "same-origin"),
    ))  # fmt: skip
