"""``examples/llmd_hint.py`` as a filter of Envoy itself, by ``examples/llmd_envoy.yaml``, before ``simm index``.

What the filter behind it gets is what llm-d's router would: a server behind Envoy shows the heads of each request. The
router itself, a program in Go, cannot be had here. That a hint is read as it is meant stands in its sources, version of
2026-09: session-affinity-scorer compares the base64 of x-session-token with NAMESPACE/NAME of each endpoint.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the extra simm-store[index] is not installed")
pytest.importorskip("zmq", reason="the extra simm-store[index] is not installed")
pytest.importorskip("xxhash", reason="the extra simm-store[index] is not installed")
pytest.importorskip("yaml", reason="needs PyYAML")

import yaml

from simm.index.blocks import Blocks
from simm.index.events import Stored, Where
from simm.index.keys import token_bytes
from simm.index.service import BODY_BYTES_MAX, Service
from simm.index.sources import Registration
from simm.net.http import Web
from simm.net.loop import Loop
from tests.engines.engine_processes import ROOT, Unavailable, engine_python
from tests.support.child import Child, child_environment
from tests.support.http_page import serving
from tests.support.ports import reserve_port
from tests.support.waiting import wait_until

EXAMPLES = ROOT / "examples"
SIZE = 16
PROMPT = list(range(1000, 1000 + 8 * SIZE))
TEXT, PODS = "a prompt of text", ["llm/pod-a", "llm/pod-b", "llm/pod-c"]
#: Types of llm-d's plug-ins, those that examples/llmd_epp.yaml may name.
PLUGINS = {"single-profile-handler", "decode-filter", "session-affinity-scorer", "queue-scorer", "max-score-picker",
           "kv-cache-utilization-scorer"}  # fmt: skip


def test_the_routers_configuration_is_well_formed() -> None:
    """The fields of EndpointPickerConfig (apix/config/v1alpha1), which the router decodes strictly, and references."""
    config = yaml.safe_load((EXAMPLES / "llmd_epp.yaml").read_text())
    assert config["apiVersion"] == "llm-d.ai/v1alpha1" and config["kind"] == "EndpointPickerConfig"
    assert set(config) == {"apiVersion", "kind", "plugins", "schedulingProfiles"}
    assert all(set(each) <= {"type", "name", "parameters"} for each in config["plugins"])
    names = [each.get("name", each["type"]) for each in config["plugins"]]
    assert {each["type"] for each in config["plugins"]} == PLUGINS and len(set(names)) == len(names)
    (profile,) = config["schedulingProfiles"]
    assert set(profile) == {"name", "plugins"}
    weights = {each["pluginRef"]: each.get("weight") for each in profile["plugins"]}
    assert set(weights) <= set(names) and all(set(each) <= {"pluginRef", "weight"} for each in profile["plugins"])
    scorers = {name for name in names if name.endswith("-scorer")}
    assert {name for name, weight in weights.items() if weight} == scorers, "scorers have weights, and others none"
    # A full pod does not get the request for its cache alone.
    assert weights["session-affinity-scorer"] <= weights["queue-scorer"] + weights["kv-cache-utilization-scorer"]


class _Handler(BaseHTTPRequestHandler):
    """Shows a request's heads; or makes tokens as vLLM's server does, of the one text that it knows."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        told: Any = {"heads": {name.lower(): value for name, value in self.headers.items()}, "body": raw.decode()}
        if self.path == "/tokenize":
            fields = json.loads(raw)
            known = fields.get("prompt") == TEXT or fields.get("messages") == [{"role": "user", "content": TEXT}]
            told = {"tokens": PROMPT if known else [], "count": len(PROMPT) if known else 0}
        body = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def _index() -> Iterator[tuple[str, Blocks, list[Any]]]:
    index = Blocks()
    loop, listener = Loop(), socket.create_server(("127.0.0.1", 0))
    service = Service(index)
    web = Web(loop, listener, service.routes, posts=service.posts, body_max=BODY_BYTES_MAX, keep_s=60.0)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    try:
        yield "{}:{}".format(*listener.getsockname()), index, [
            index.register(Registration(pod, "m", block_size=SIZE)) for pod in PODS
        ]
    finally:
        loop.call_later(0.0, web.close)
        loop.call_later(0.0, loop.stop)
        thread.join()
        loop.close()


def _envoy(hint: int, behind: int, listen: int) -> str:
    """Return Envoy's configuration: what the example has, and a server behind it."""
    config = yaml.safe_load((EXAMPLES / "llmd_envoy.yaml").read_text())
    (cluster,), (ours,) = config["clusters"], config["http_filters"]
    address = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
    assert address == {"address": "127.0.0.1", "port_value": 9004}, "as the example listens"
    address["port_value"] = hint
    ours["typed_config"]["message_timeout"] = "60s"  # the machine of a test may be busy
    types = "type.googleapis.com/envoy.extensions.filters"
    upstream = {
        "name": "behind", "type": "STATIC", "connect_timeout": "5s",
        "load_assignment": {"cluster_name": "behind", "endpoints": [{"lb_endpoints": [{"endpoint": {"address": {
            "socket_address": {"address": "127.0.0.1", "port_value": behind}}}}]}]},
    }  # fmt: skip
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager", "stat_prefix": "in",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [
            {"match": {"prefix": "/"}, "route": {"cluster": "behind", "timeout": "60s"}}]}]},
        "http_filters": [ours, {"name": "router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}],
    }  # fmt: skip
    listener = {
        "name": "in", "address": {"socket_address": {"address": "127.0.0.1", "port_value": listen}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }  # fmt: skip
    return json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster, upstream]}})


@pytest.mark.engines
def test_the_router_is_told_which_pod_has_the_prompt(tmp_path: Path) -> None:
    try:
        python = engine_python("routers")
    except Unavailable as why:
        pytest.skip(f"no Envoy: {why}")
    packages = next(Path(python).parents[1].glob("lib/python3.*/site-packages"))
    port = reserve_port()
    with serving(_Handler) as behind, serving(_Handler) as tokenizer, _index() as (at, index, sources):
        flags = ["--index", at, "--model", "m", "--block-size", str(SIZE), "--port", "0", "--ask-s", "60",
                 "--tokenize", f"http://127.0.0.1:{tokenizer}"]  # fmt: skip
        command = [python, str(EXAMPLES / "llmd_hint.py"), *flags]
        with Child(command, name="llmd_hint.py", environment=child_environment()) as hint:
            at_hint = int(hint.expect("listening on 127.0.0.1:").rpartition(":")[2])
            words = [str(packages / "envoy" / "_bin" / "envoy"), "--config-yaml", _envoy(at_hint, behind, port),
                     "--concurrency", "1", "-l", "warning", "--disable-hot-restart"]  # fmt: skip
            with Child(words, name="envoy", log=tmp_path / "envoy.log", folder=tmp_path) as envoy:

                def asked(path: str, **fields: Any) -> str | None:
                    """Return the token that arrives behind Envoy; and the body does as it was sent."""
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                    own = {"x-session-token": fields.pop("token")} if "token" in fields else {}
                    body = json.dumps({"model": "m", **fields})
                    with contextlib.closing(connection):
                        connection.request("POST", path, body, {"Content-Type": "application/json", **own})
                        answer = connection.getresponse()
                        told = json.loads(answer.read())
                    assert answer.status == 200 and told["body"] == body
                    token: str | None = told["heads"].get("x-session-token")
                    return token

                def pod(*question: Any, **fields: Any) -> str:
                    return base64.b64decode(asked(*question, **fields) or "").decode()

                def answers() -> bool:
                    assert envoy.running, envoy.said()
                    with contextlib.suppress(OSError):
                        return bool(asked("/v1/completions", prompt=PROMPT) is None)
                    return False

                wait_until(answers, "Envoy answers, and there is no hint, as nobody has the prompt")
                names = list(range(1, 9))
                stored = Stored(names, None, token_bytes(PROMPT), SIZE, Where("GPU"))
                index.apply(sources[1], [stored])
                assert pod("/v1/completions", prompt=PROMPT) == PODS[1]
                assert pod("/v1/completions", prompt=TEXT) == PODS[1], "a text that the model server makes tokens of"
                chat = [{"role": "user", "content": TEXT}]
                assert pod("/v1/chat/completions", messages=chat) == PODS[1]
                assert pod("/v1/completions", prompt=PROMPT, token="bWluZQ==") == PODS[1], "it replaces another one"
                for other in ({"prompt": list(range(SIZE))}, {"prompt": PROMPT[: SIZE - 1]}, {"prompt": [TEXT, TEXT]},
                              {"prompt": "another text"}, {}):  # fmt: skip
                    assert asked("/v1/completions", **other) is None, other
                assert asked("/v1/models", prompt=PROMPT) is None
                assert asked("/v1/completions", prompt=[1], token="bWluZQ==") == "bWluZQ==", "a client's own stays"

                for source in sources[::2]:
                    index.apply(source, [stored])
                assert asked("/v1/completions", prompt=PROMPT) is None, "every pod has it: the load decides"
                index.apply(sources[0], [])
                sources[0].stale = True
                assert asked("/v1/completions", prompt=PROMPT) is None, "what is not known for sure is no hint"
                hint.kill()
                assert asked("/v1/completions", prompt=PROMPT) is None, "no filter, no hint, and no failed request"
                assert envoy.end() == 0
