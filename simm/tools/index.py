"""``simm index``: run the event index, or list the publishers of one that runs."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from argparse import Namespace
from collections.abc import Container, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ..config.parsers import Address, parse_address, users
from ..config.settings import Settings, add_arguments
from ..config.startup import live_tokens, read_tokens
from ..config.tokens import Token, TokenRole, token_for
from ..errors import SimmError, TransportError, UsageError, printable
from .connect import client_arguments, command_settings, page_tokens
from .console import EXIT_NO, EXIT_OK, Parser

if TYPE_CHECKING:
    from ..net.local_users import LocalUsers

#: Where the index answers, without --at.
DEFAULT_AT: Final = "127.0.0.1:8090"
_ANSWER_BYTES_MAX: Final = 64 << 20
_DEADLINE_S: Final = 10.0
#: Of a file of publishers or schemes: 4 KiB for each of ``SOURCES_MAX`` publishers.
_FILE_BYTES_MAX: Final = 16 << 20
#: What is shown of a refusal: longer than its longest sentence.
_SAID_BYTES_MAX: Final = 400


def _parser(prog: str) -> Parser:
    about = (
        "serve (without a word): read engines' KV cache events, and answer by HTTP which engine has a prompt's prefix. "
        "workers: list the publishers of an index that runs. Exit 1 if one of them is stale."
    )
    parser = Parser(prog=prog, description=about)
    parser.add_argument("what", nargs="?", default="serve", choices=["serve", "workers"], metavar="serve|workers")
    parser.add_argument("--at", default=DEFAULT_AT, metavar="HOST:PORT",
                        help=f"where the index answers ({DEFAULT_AT}); beyond loopback with tokens")  # fmt: skip
    parser.add_argument("--grpc", metavar="HOST:PORT",
                        help="where it answers llm-d's indexer.v1 by gRPC; beyond loopback with tokens")  # fmt: skip
    parser.add_argument("--register", metavar="FILE", help="JSON list of publishers, each as for POST /register")
    parser.add_argument("--schemes", metavar="FILE",
                        help="JSON list of key schemes of connectors that register none in the store")  # fmt: skip
    parser.add_argument("--weights", metavar="TIER=W,...", help="weights of tiers, as gpu=1,cpu=0.8,storage=0.5")
    parser.add_argument("--hash-seed", type=int, metavar="N", help="seed of RFC 1527's hash (1337, as Dynamo)")
    parser.add_argument("--lmcache-hash", metavar="NAME[:SEED],...",
                        help="LMCache's hash: blake3 (the default, if installed), sha256_cbor, sha256")  # fmt: skip
    parser.add_argument("--lmcache-chunk", type=int, metavar="N",
                        help="tokens of a chunk of LMCache's servers that do not tell it")  # fmt: skip
    parser.add_argument("--allow-uid", default="", metavar="USERS",
                        help="users, besides its own and root, who may ask on loopback without a token")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_arguments(parser, "client")
    return parser


def main(argv: Sequence[str], prog: str) -> int:
    """Run the command. Raises SimmError."""
    arguments = _parser(prog).parse_args(argv)
    settings = command_settings("client", arguments, serves=arguments.what == "serve")
    at = parse_address(arguments.at)
    if arguments.what == "workers":
        return _workers(at, settings, as_json=arguments.json)
    return _serve(arguments, settings, at)


def parse_weights(text: str | None) -> dict[str, float]:
    """Return weights of tiers, those that are named replaced. Raises UsageError."""
    from ..index.scores import WEIGHTS

    weights = dict(WEIGHTS)
    for part in text.split(",") if text else ():
        name, _, value = part.partition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = -1.0
        if name.strip() not in weights or not 0 <= weight <= 1000:
            raise UsageError(f"--weights {part!r}: TIER=WEIGHT, of the tiers {', '.join(WEIGHTS)}, 0 to 1000")
        weights[name.strip()] = weight
    return weights


def _callers(
    at: Address, flag: str, settings: Settings, named: tuple[int, ...]
) -> tuple[Sequence[Token], LocalUsers | None]:
    """Return the tokens that callers show, and the users that need none: on loopback. Raises UsageError.

    The tokens follow their file (``net/token_watch.py``).
    """
    from ..net.local_users import LocalUsers

    if at.loopback:
        return live_tokens(settings.token_file, read_tokens), LocalUsers(named)
    if named:
        raise UsageError(f"--allow-uid has no effect with {flag} {at}, where everybody shows a token")
    return page_tokens(at, flag, settings), None


def _serve(arguments: Namespace, settings: Settings, at: Address) -> int:
    from ..index import libraries

    assert libraries.__all__  # one sentence now if the extra is not installed
    from ..config.startup import say
    from ..index.blocks import Blocks
    from ..index.keys import SEED
    from ..index.lmcache.hashes import libraries as hash_libraries
    from ..index.lmcache.hashes import namers
    from ..index.lmcache.servers import Servers
    from ..index.publishers import Publishers
    from ..index.service import BODY_BYTES_MAX, CONNECTIONS_MAX, KEEP_S, Service, asking
    from ..net.http import Web
    from ..net.listeners import bound_address, open_listener
    from ..net.loop import Loop
    from ..net.process import raise_file_limit, stop_on_signals
    from ..net.sd_notify import Notifier, keep_informed, reload_logs
    from ..net.token_watch import watch_tokens
    from ..schemes.encodings import check_block
    from ..schemes.scheme import scheme_of

    weights = parse_weights(arguments.weights)
    seed = SEED if arguments.hash_seed is None else arguments.hash_seed
    if not 0 <= seed < 1 << 64:
        raise UsageError(f"--hash-seed {seed}: 0 to 2**64 - 1")
    names = namers(arguments.lmcache_hash)
    if arguments.lmcache_chunk is not None:
        check_block(arguments.lmcache_chunk)
    named = users(arguments.allow_uid)
    tokens, local = _callers(at, "--at", settings, named)
    calls = parse_address(arguments.grpc) if arguments.grpc else None
    callers = None
    if calls:
        from ..index.rpc import library

        assert library.__all__
        callers = _callers(calls, "--grpc", settings, named)
    notify = Notifier.from_environment()
    first = _objects(arguments.register, "each as for POST /register")
    schemes = [scheme_of(each) for each in _objects(arguments.schemes, "each a key scheme, as in docs/routing.md")]
    if schemes and settings.origin("manager").startswith("default"):
        raise UsageError("--schemes has no effect without --manager, the store to ask")
    raise_file_limit()  # each publisher has several sockets
    with contextlib.ExitStack() as stack:
        stack.callback(notify.close)
        shared = None
        if not settings.origin("manager").startswith("default"):
            from ..client import Client

            try:
                client = stack.enter_context(Client(**client_arguments(settings)))
            except TransportError as exc:  # no mistake in the settings, as its exit code would say: a unit tries again
                raise SimmError(str(exc)) from exc
            shared = asking(client, given=schemes, libraries=hash_libraries())
        index = Blocks(seed)
        publishers = Publishers(index)
        stack.callback(publishers.close)
        servers = Servers(index, size=arguments.lmcache_chunk)
        service = Service(index, publishers, shared=shared, weights=weights, servers=servers, namers=names)
        for body in first:
            service.register(body)
        loop = Loop()
        stack.callback(loop.close)
        listener = open_listener(at, "--at")
        address = bound_address(listener)
        web = Web(loop, listener, service.routes, tokens, posts=service.posts, body_max=BODY_BYTES_MAX,
                  verbs=service.verbs, basic=True, users=local, keep_s=KEEP_S,
                  connections_max=CONNECTIONS_MAX)  # fmt: skip
        stack.callback(web.close)
        watch_tokens(loop, tokens)
        loop.call_every(1.0, servers.expire)
        more = ""
        if calls and callers:
            from ..index.rpc.rpcs import Rpcs

            rpcs = Rpcs(service, calls, *callers)
            watch_tokens(loop, callers[0])
            stack.callback(rpcs.close)
            more = str(rpcs.address)
        loop.running = True
        stop_on_signals(loop, interrupt=True, reload=partial(reload_logs, notify))
        if loop.running:
            if arguments.json:
                told = {"ready": "index", "at": str(address), "publishers": len(first)}
                say(json.dumps(told | ({"grpc": more} if more else {})))
            else:
                say(f"READY index {address}" + (f" grpc={more}" if more else ""))
            notify.ready(service.status())
            keep_informed(loop, notify, service.status)
        while loop.running:
            loop.run_once(None)
        notify.stopping("closing its sockets")
    return EXIT_OK


def _objects(path: str | None, what: str) -> list[dict[str, Any]]:
    """Return the objects of a file, none without one. Raises UsageError, OSError."""
    if path is None:
        return []
    with open(path, "rb") as source:
        raw = source.read(_FILE_BYTES_MAX + 1)
    if len(raw) > _FILE_BYTES_MAX:
        raise UsageError(f"{path} is longer than {_FILE_BYTES_MAX:,} bytes")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"{path} is no JSON: {exc}") from None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise UsageError(f"{path} is a JSON list of objects, {what}")
    return found


def _stranger(sock: socket.socket, trusted: Container[int]) -> str:
    """Return why what has the other end of a loopback connection is not shown a token; empty if it is.

    HTTP carries the token itself, and any user can listen on a port that is free. Only root can lead the connection
    into another network namespace. Beyond loopback nothing tells whose server it is.
    """
    from ..host.users import NOT_TRUSTED, trusts
    from ..net.peer_uid import NotHere, UnknownUser, is_loopback, tcp_uid

    until = time.monotonic() + _DEADLINE_S
    while True:
        try:
            if not is_loopback(sock):
                return ""
            uid = tcp_uid(sock)
            return "" if trusts(uid, trusted) else f"it is of uid {uid}, {NOT_TRUSTED}"
        except NotHere:
            return ""
        except (UnknownUser, OSError) as exc:
            if time.monotonic() > until:
                return f"its user cannot be told ({exc})"
        time.sleep(0.005)  # until the server accepts the connection, no process has its end


def _workers(at: Address, settings: Settings, *, as_json: bool) -> int:
    # HTTP carries the token itself, and any role will do. That of a cluster of this user's, which nobody has named, is
    # not for the index.
    own = token_for(read_tokens(settings.token_file), *TokenRole)
    token = own.secret if own is not None else ""
    withheld = ""
    try:
        connection = http.client.HTTPConnection(at.host, at.port, timeout=_DEADLINE_S)
        with contextlib.closing(connection):
            connection.connect()
            if token and (stranger := _stranger(connection.sock, settings.server_uid)):
                withheld = f"; the token was not shown to it, as {stranger}"
            headers = {"Authorization": f"Bearer {token}"} if token and not withheld else {}
            connection.request("GET", "/workers", headers=headers)
            answer = connection.getresponse()
            body = answer.read(_ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as exc:
        raise TransportError(f"no index answers at {at} ({exc}): start one with `simm index`, or give --at") from exc
    if answer.status != 200:
        says = printable(body[:_SAID_BYTES_MAX].decode(errors="replace").strip())
        raise SimmError(f"the index at {at} says: {says}{withheld}")
    try:
        found = json.loads(body)
        rows = [
            (str(each["instance_id"]), str(each["tenant_id"]), str(each["dp_rank"]), str(each["type"]),
             f"{each['blocks']:,}", "stale" if each["stale"] else "all" if each["complete"] else "partly",
             str(each["endpoint"])) for each in found
        ]  # fmt: skip
    except (ValueError, TypeError, KeyError, RecursionError):
        raise SimmError(f"what answers at {at} is no index") from None
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        head = ("INSTANCE", "TENANT", "RANK", "TYPE", "BLOCKS", "KNOWN", "ENDPOINT")
        widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]
        for row in (head, *rows):
            print("  ".join(f"{printable(text):{width}}" for text, width in zip(row, widths)).rstrip())
    return EXIT_NO if any(row[5] == "stale" for row in rows) else EXIT_OK
