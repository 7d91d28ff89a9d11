"""The manager's page in a real browser: what a reader sees, on a phone and on a wall, in light and in dark.

``SIMM_PICTURES=FOLDER`` keeps pictures of it there.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.client import Client
from tests.support.browser import Browser, browser, missing
from tests.support.http_page import page
from tests.support.ports import reserve_port
from tests.support.processes import Cluster, new_folder
from tests.support.waiting import wait_until

EVIL = "n<img src=x onerror=\"document.title='owned'\">&amp;"
SCREENS = (("phone", 360, 780), ("wall", 1920, 1080))
LONG = "llama-3.1-405b-instruct-fp8-tp8-p64-with-a-name-of-64-bytes-in-all"[:64]

needs_a_browser = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


class Shown(Cluster):
    """A cluster whose manager has pages."""

    def __init__(self, *arguments: str, http: str = "") -> None:
        self.http = http or f"127.0.0.1:{reserve_port()}"
        super().__init__(
            new_folder(), memory="16M", manager_arguments=["--http", self.http, *arguments]
        )

    @contextlib.contextmanager
    def only_manager(self) -> Iterator[Shown]:
        try:
            self.start_manager()
            yield self
        finally:
            self.stop()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(page(self.http, "/api/v1/status")[1])
        return found


@pytest.fixture(scope="module")
def cluster(nothing_is_left: Path) -> Iterator[Shown]:
    with Shown() as running:
        yield running


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def keep_picture(window: Browser, name: str) -> None:
    if folder := os.environ.get("SIMM_PICTURES"):
        window.picture(Path(folder) / f"{name}.png")


@pytest.mark.quick
def test_clients_are_in_the_api_within_moments(cluster: Shown) -> None:
    with Client(cluster.manager, namespace=EVIL, deadline_s=30.0) as client:
        assert all(client.put(f"k{number}", b"x" * 5000) for number in range(20))
        assert all(client.get(f"k{number}") for number in range(20)) and client.get("none") is None
        wait_until(lambda: cluster.status()["since_start"]["gets"] == 21, "the report arrives")
        found = cluster.status()
        assert found["since_start"]["hits"] == 20 and found["since_start"]["bytes_put"] == 100_000
        (row,) = [each for each in found["namespaces"] if each["name"] == EVIL]
        assert row["puts"] == 20 and row["hit_ratio"] == 20 / 21
        assert os.getpid() in {each["pid"] for each in found["clients"]}
        (node,) = found["nodes"]
        assert node["clients"] == 1 and node["state"] == "running" and node["report_age_s"] < 60
        wait_until(lambda: cluster.status()["nodes"][0]["entries"] == 20, "a heartbeat")
        wait_until(lambda: len(cluster.status()["history"]["clients"]) > 1, "the history grows")


@needs_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("name", "width", "height"), SCREENS)
def test_the_page(cluster: Shown, window: Browser, name: str, width: int, height: int, scheme: str) -> None:
    with Client(cluster.manager, namespace=EVIL) as client, Client(cluster.manager, namespace=LONG) as other:
        assert client.put("k", b"x") and client.get("k") and other.put("k", b"x" * 2048)
        window.screen(width, height, scheme)
        window.complaints()
        window.open(f"http://{cluster.http}/")
        window.until("return !document.getElementById('main').hidden", "the page shows the cluster")
        wait_until(lambda: EVIL in window.text("#namespaces"), "the namespace is there, as text")
        assert "1 running" in window.text("#tiles") and cluster.name in window.text("#nodes")
        assert window.text("#state") == "● all is well" and "joining" in window.text("#events")
        assert window.run("return document.images.length") == 0 and "owned" not in window.run("return document.title")
        wait_until(lambda: LONG in window.text("#clients"), "and who they are")
        assert str(os.getpid()) in window.text("#clients") and "KiB of 14.0 MiB" in window.text("#nodes")
        wide = window.run("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide[0] <= wide[1], "no scrolling to the side"
        boxes = "[...document.querySelectorAll('.box')]"
        wider = window.run(f"return {boxes}.filter(e => e.scrollWidth > e.clientWidth).map(e => e.id)")
        assert wider == [], "nor in a table"
        origins = "return performance.getEntriesByType('resource').map(e => new URL(e.name).origin)"
        assert set(window.run(origins)) == {f"http://{cluster.http}"}, "no outside request"
        back = window.run("return getComputedStyle(document.body).backgroundColor")
        light = sum(int(part) for part in back.removeprefix("rgb(").removesuffix(")").split(",")) > 3 * 128
        assert light == (scheme == "light")
        assert contrast_faults(window) == []
        roles = window.run("return [...document.querySelectorAll('svg')].every(e => e.getAttribute('aria-label'))")
        assert roles is True and window.run("return document.documentElement.lang") == "en"
        assert window.complaints() == [], "nothing is refused by the policy"
        keep_picture(window, f"{name}-{scheme}")


def contrast_faults(window: Browser) -> list[str]:
    """Return texts whose contrast to what is behind them is below 4.5, as WCAG 2.1 computes it."""
    found: list[str] = window.run("""
        const parts = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
        const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
          .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
          .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
        const behind = (element) => {
          for (let at = element; at; at = at.parentElement) {
            const color = parts(getComputedStyle(at).backgroundColor);
            if (color.length === 3 || color[3] > 0) return color;
          }
          return [255, 255, 255];
        };
        const page = behind(document.body);
        const shown = (color, element) => {
          for (let at = element; at; at = at.parentElement) {
            const share = Number(getComputedStyle(at).opacity);
            color = color.slice(0, 3).map((v, place) => share * v + (1 - share) * page[place]);
          }
          return color;
        };
        const bad = [];
        for (const element of document.querySelectorAll('h1,h2,h3,th,td,div,span,a,p,footer,li')) {
          if (!element.innerText || !element.checkVisibility()) continue;
          const both = [parts(getComputedStyle(element).color), behind(element)].map((v) => light(shown(v, element)));
          const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
          if (ratio < 4.5) bad.push(element.tagName + ' ' + element.innerText.slice(0, 40));
        }
        return bad;
    """)
    return found


@needs_a_browser
def test_control_a_pale_text_is_found(cluster: Shown, window: Browser) -> None:
    window.screen(800, 600, "light")
    window.open(f"http://{cluster.http}/")
    window.until("return !document.getElementById('main').hidden", "the page shows the cluster")
    window.run("document.querySelector('h1').style.color = '#bbb'")
    assert any(each.startswith("H1") for each in contrast_faults(window))
    window.run("document.querySelector('main').style.opacity = 0.5")
    assert any(each.startswith("H2") for each in contrast_faults(window))


@needs_a_browser
def test_the_policy_refuses_what_a_name_might_bring(cluster: Shown, window: Browser) -> None:
    """Had the script a hole, a script in a name would not run, and nothing would be sent elsewhere."""
    window.open(f"http://{cluster.http}/")
    window.until("return !document.getElementById('main').hidden", "the page shows the cluster")
    window.complaints()
    refused = window.run("""
        try { document.body.innerHTML += '<img src=x onerror="document.title=1">'; return 'taken'; }
        catch (error) { return error.name; }
    """)
    assert refused == "TypeError", "no text becomes markup (trusted types)"
    window.run("""
        const made = document.createElement('div');
        made.setAttribute('style', 'background: red');
        document.body.append(made);
        fetch('http://127.0.0.2:9/').catch(() => 0);
    """)
    said: list[str] = []

    def complained() -> bool:
        said.extend(window.complaints())
        return any("connect-src" in each or "Connecting to" in each for each in said)

    wait_until(complained, "the browser refuses another address")
    assert any("style" in each for each in said)


@needs_a_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_data_server_and_a_manager_that_are_down(window: Browser, scheme: str) -> None:
    with Shown() as cluster:
        window.screen(1280, 800, scheme)
        window.open(f"http://{cluster.http}/")
        window.until("return !document.getElementById('main').hidden", "the page shows the cluster")
        cluster.kill("dataserver")
        wait_until(lambda: f"data server dead: {cluster.name}" in window.text("#state"), "it is shown as dead")
        assert "dead" in window.text("#nodes") and "-> dead" in window.text("#events")
        cluster.kill("manager")
        wait_until(lambda: "the manager does not answer" in window.text("#state"), "it is shown as silent")
        assert cluster.name in window.text("#nodes"), "what was known stays"
        assert contrast_faults(window) == [], "and can be read"
        keep_picture(window, f"manager-down-{scheme}")
        cluster.start_manager()
        wait_until(lambda: "does not answer" not in window.text("#state"), "it goes on by itself")


@needs_a_browser
def test_a_page_beyond_loopback_asks_for_the_token(window: Browser, tmp_path: Path) -> None:
    token = "t" * 32
    (tmp_path / "token").write_text(token)
    (tmp_path / "token").chmod(0o600)
    port = reserve_port()
    made = Shown("--token-file", str(tmp_path / "token"), http=f"0.0.0.0:{port}")
    with made.only_manager() as cluster:
        assert page(f"127.0.0.1:{port}", "/api/v1/status")[0] == 401
        window.open(f"http://127.0.0.1:{port}/")
        window.until("return !document.getElementById('login').hidden", "it asks")
        for given, after in (("wrong" * 4, "this token is not taken"), (token, "no data server has joined")):
            window.run(
                "document.getElementById('token').value = arguments[0];"
                "document.getElementById('login').requestSubmit();", given,
            )  # fmt: skip
            wait_until(lambda after=after: after in window.text("#state"), after)  # type: ignore[misc]
        assert token not in window.run("return document.documentElement.outerHTML + location.href")
        assert cluster.manager
