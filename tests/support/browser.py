"""A headless Chromium that tests drive by WebDriver, with the standard library alone.

``scripts/status-page-browser`` installs one; :func:`missing` says why there is none.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.support.ports import reserve_port
from tests.support.waiting import WAIT_S, wait_until

_DRIVERS: Final = ("chromedriver",)
_BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome")


def _found(names: tuple[str, ...]) -> str:
    return next((path for name in names if (path := shutil.which(name))), "")


def missing() -> str:
    """Return why there is no browser here; empty if there is one."""
    if not _found(_BROWSERS):
        return "no Chromium (scripts/status-page-browser gets one)"
    return "" if _found(_DRIVERS) else "no chromedriver (scripts/status-page-browser gets one)"


class Browser:
    """One window."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return json.load(answer)["value"]

    def cdp(self, command: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def screen(self, width: int, height: int, scheme: str) -> None:
        """Take a size in CSS pixels, and a preference for ``light`` or ``dark``."""
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                 mobile=width < 600)  # fmt: skip
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        """Go to a page."""
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a function's body returns in the page."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """Return what a reader sees of an element."""
        found: str = self.run("return (document.querySelector(arguments[0]) || {innerText: ''}).innerText", selector)
        return found

    def until(self, script: str, what: str) -> None:
        """Wait until a function's body returns something true."""
        wait_until(lambda: bool(self.run(script)), what)

    def complaints(self) -> list[str]:
        """Return what the browser has complained of since the last call: errors, refused sources."""
        return [each["message"] for each in self._call("POST", "/se/log", {"type": "browser"})]

    def picture(self, path: Path, top: int = 0, height: int = 0) -> None:
        """Write a picture of the whole page, or of ``height`` pixels of it from ``top`` on."""
        width, whole = self.run("const e = document.documentElement; return [e.scrollWidth, e.scrollHeight]")
        clip = {"x": 0, "y": top, "width": width, "height": height or whole - top, "scale": 1}
        found = self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Yield a browser with its files in a folder. It ends with the context, with all its processes."""
    port = reserve_port()
    log = (folder / "chromedriver.log").open("wb")
    environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder)}
    driver = subprocess.Popen(
        [_found(_DRIVERS), f"--port={port}"], stdout=log, stderr=subprocess.STDOUT, env=environment,
        start_new_session=True,
    )  # fmt: skip
    base = f"http://127.0.0.1:{port}"
    session = ""
    try:
        wait_until(lambda: _answers(base), "the driver answers")
        options = {
            "binary": _found(_BROWSERS),
            "args": [
                "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                "--disable-background-networking", "--disable-component-update",
                f"--user-data-dir={folder / 'profile'}", "--hide-scrollbars", "--force-color-profile=srgb",
                "--no-proxy-server",
            ],
        }  # fmt: skip
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = Browser(base)._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        session = f"{base}/session/{made['sessionId']}"
        yield Browser(session)
    finally:
        if session:
            with contextlib.suppress(OSError):
                Browser(session)._call("DELETE", "")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        log.close()
        shutil.rmtree(folder / "profile", ignore_errors=True)


def _answers(base: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(base + "/status", timeout=5) as answer:
        return bool(json.load(answer)["value"]["ready"])
    return False
