"""``simm events``: publish what this host's data servers store and drop, as KV cache events over ZMQ."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from functools import partial
from typing import Final

from ..config.parsers import parse_address
from ..config.settings import add_arguments
from ..errors import UsageError
from .connect import command_settings, page_tokens
from .console import EXIT_OK, Parser

#: Where the events are without a flag.
DEFAULT_AT: Final = "tcp://127.0.0.1:5567,tcp://127.0.0.1:5568"


def _parser(prog: str) -> Parser:
    about = (
        "Publish what this host's data servers store and drop, for routers and their indexes, until it is ended. The "
        "data servers have --events. Whoever can connect can read which blocks are stored, not what is in them."
    )
    parser = Parser(prog=prog, description=about)
    parser.add_argument("--rfc1527", metavar="STREAM,REPLAY",
                        help=f"addresses of the events in the form of Mooncake's RFC 1527 ({DEFAULT_AT})")  # fmt: skip
    parser.add_argument("--vllm", metavar="STREAM,REPLAY", help="addresses of the events in vLLM's form; none without")
    parser.add_argument("--node", default="", help="name of this host in the events (the host's name)")
    parser.add_argument("--server", default="", metavar="NAME", help="only the data server of this name")
    parser.add_argument("--http", metavar="HOST:PORT",
                        help="where /metrics, /healthz and /readyz are; beyond loopback with tokens")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON when it is ready")
    add_arguments(parser, "client")
    return parser


def _pair(flag: str, text: str) -> tuple[str, str]:
    stream, comma, replay = text.partition(",")
    if not comma or not all(each.startswith(("tcp://", "ipc:///")) for each in (stream, replay)):
        raise UsageError(f"{flag} {text!r}: two addresses with a comma between them, as {DEFAULT_AT}")
    return stream, replay


def main(argv: Sequence[str], prog: str) -> int:
    """Run the command. Raises SimmError."""
    arguments = _parser(prog).parse_args(argv)
    settings = command_settings("client", arguments, serves=True)
    wanted = {}
    if arguments.rfc1527 or not arguments.vllm:
        wanted["rfc1527"] = _pair("--rfc1527", arguments.rfc1527 or DEFAULT_AT)
    if arguments.vllm:
        wanted["vllm"] = _pair("--vllm", arguments.vllm)

    from ..config.startup import say
    from ..index.publish.publisher import EventPublisher
    from ..net.listeners import bound_address, open_listener
    from ..net.loop import Loop
    from ..net.process import stop_on_signals
    from ..net.sd_notify import Notifier, keep_informed, reload_logs
    from ..net.token_watch import watch_tokens

    http = parse_address(arguments.http) if arguments.http else None
    tokens = page_tokens(http, "--http", settings) if http else ()
    notify = Notifier.from_environment()
    with contextlib.ExitStack() as stack:
        stack.callback(notify.close)
        node = arguments.node or socket.gethostname()
        loop = Loop()
        stack.callback(loop.close)
        publisher = EventPublisher(wanted, node, server=arguments.server, trusted=settings.server_uid, loop=loop)
        stack.callback(publisher.close)
        page = ""
        if http:
            from ..net.http import Web

            listener = open_listener(http, "--http")
            page = str(bound_address(listener))
            stack.callback(Web(loop, listener, publisher.routes, tokens).close)
            watch_tokens(loop, tokens)
        loop.running = True
        stop_on_signals(loop, interrupt=True, reload=partial(reload_logs, notify))
        at = {form: outlet.addresses for form, outlet in publisher.outlets.items()}
        if arguments.json:
            say(json.dumps({"ready": "events", "node": node, "at": at} | ({"http": page} if page else {})))
        else:
            told = [f"{form}={','.join(each)}" for form, each in at.items()]
            say(" ".join(["READY events", *told, *([f"http={page}"] if page else [])]))
        notify.ready(publisher.status())
        keep_informed(loop, notify, publisher.status)
        while loop.running:
            publisher.turn()
        notify.stopping("closing its sockets")
    return EXIT_OK
