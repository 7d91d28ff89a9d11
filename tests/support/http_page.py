"""Reading a server's HTTP pages."""

from __future__ import annotations

import urllib.error
import urllib.request


def page(address: str, path: str) -> tuple[int, str]:
    """Return status and text of a page of a server at HOST:PORT."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()
