"""Who may say what: each message of the protocol, to each kind of server, by each role of a token."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simm.config.tokens import Token, TokenRole
from simm.errors import TransportError
from simm.net.channel import Channel, Refused, greet
from simm.net.peer_uid import credentials
from simm.rpc import CODECS, OPCODES
from simm.wire import admin_messages as A
from simm.wire import epoch_messages as E
from simm.wire import group_messages as G
from simm.wire import keep_messages as K
from simm.wire import messages as M
from simm.wire import rdma_messages as R
from simm.wire import report_messages as P
from simm.wire import trace_messages as T
from simm.wire.auth import Gate
from simm.wire.hello import FOR_MANAGERS, client_hello
from simm.wire.messages import Role, Status
from simm.wire.shard_set import bitmap_of
from tests.support.manager_client import ManagerClient, instance, joining
from tests.support.manager_process import WAIT_S, workers
from tests.support.token_servers import KINDS, ManagerThread, serving
from tests.support.waiting import wait_until
from tests.support.wire_samples import sample
from tests.support.worker_thread import WorkerThread

CLIENT, SERVER, ADMIN = TokenRole
TOKENS = {role: Token(f"the-token-of-a-{role}", role, f"some-{role}") for role in TokenRole}
BOUND = Token("the-token-of-a-team", CLIENT, "team", {"theirs": None})
OTHER = Token("the-token-of-others", CLIENT, "others", {"others": None})
ALL = (*TOKENS.values(), BOUND, OTHER)

#: The least role that may send it; None: it is no request. Each message of the protocol stands here.
RULES: dict[type, TokenRole | None] = {
    M.Hello: CLIENT, M.Welcome: None, M.Error: None, M.Ping: CLIENT, M.Pong: None, M.Done: None,
    M.Auth: CLIENT, M.Challenge: None, M.Prove: CLIENT,
    M.Commit: CLIENT, M.Committed: None, M.Grant: CLIENT, M.Granted: None, M.ReturnGrants: CLIENT, M.Recall: None,
    M.Delete: CLIENT, M.Statuses: None, M.Locate: CLIENT, M.Located: None, M.Unpin: CLIENT,
    M.ReleaseSessions: CLIENT, M.DeleteSized: CLIENT, M.DataAttach: CLIENT, M.RingAttach: CLIENT,
    M.Kick: CLIENT, M.Wake: CLIENT,
    M.Shards: SERVER, M.Stats: CLIENT, M.StatsReply: None,
    M.Freeze: SERVER, M.Frozen: None, M.Adopt: SERVER, M.Finish: SERVER, M.MoveProgress: None,
    M.Fetch: CLIENT, M.Fetched: None, M.FetchPrevious: CLIENT, M.Verdict: None, M.Store: CLIENT, M.Exists: CLIENT,
    M.Namespace: SERVER, E.ForNamespace: SERVER, M.List: SERVER, M.Listed: None, M.FetchRanges: CLIENT,
    M.Pin: CLIENT, M.Pinned: None, M.FetchPinned: CLIENT,
    R.RdmaOpen: CLIENT, R.RdmaOpened: None, R.RdmaConnect: CLIENT, R.RdmaConnected: None, R.RdmaDisconnect: CLIENT,
    R.RdmaGranted: None,
    M.Join: SERVER, M.Joined: None, M.Heartbeat: SERVER, M.HeartbeatAck: None, M.Leave: SERVER, M.Moved: SERVER,
    M.MapGet: CLIENT, M.MapReply: None, M.MapOffer: SERVER, M.ClusterStatus: CLIENT, M.Drain: ADMIN,
    G.Group: CLIENT, K.Keep: CLIENT, K.Marks: SERVER, K.Marked: None,
    E.Advance: CLIENT, E.Advanced: None, E.Epochs: SERVER, E.EpochLease: SERVER, E.LeaseAck: None,
    T.Traced: CLIENT, T.Timed: None, T.AskTrace: ADMIN, T.OrderTrace: None,
    P.ReportEvery: None, P.Report: SERVER,
    A.AskSettings: ADMIN, A.AskNodeSettings: ADMIN, A.OrderSettings: None, A.SettingsDone: SERVER,
}  # fmt: skip
#: Those of the opening have their own order, which tests/unit/wire/test_auth.py has.
OPENING = (M.Hello, M.Auth, M.Prove)
#: What each server must refuse by role: an answer to all others would be its business.
REQUESTS = {cls: least for cls, least in RULES.items() if cls not in OPENING}


def test_each_message_has_a_rule() -> None:
    assert set(RULES) == {codec.cls for codec in CODECS.values()}, "say who may send the new message"


@pytest.fixture
def manager() -> Iterator[ManagerThread]:
    made = ManagerThread(ALL)
    yield made
    made.close()


Opener = Callable[[Token, int], Channel]


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Opens connections to a server: by a token, for a role in HELLO."""
    with serving(request.param, ALL) as made:

        def opened(token: Token, role: int) -> Channel:
            channel = Channel.tcp(*made.address, WAIT_S)
            try:
                greet(channel, made.service, client_hello(role, namespace="theirs"), token.secret)
            except BaseException:
                channel.close()
                raise
            return channel

        yield opened


def said(open_by: Opener, token: Token, role: int, msg: Any) -> str:
    """What a message is refused with for its sender's role; empty if it is not."""
    with contextlib.closing(open_by(token, role)) as channel:
        try:
            channel.call(msg)
        except Refused as exc:
            by_role = "takes a token with the role" in str(exc) or "is no request" in str(exc)
            return str(exc) if exc.status == Status.UNAUTHORIZED and by_role else ""
        except TransportError:
            pass  # it is no message for this server, or this sample has no sense
        return ""


def example(cls: type) -> Any:
    if cls is M.Store:
        return M.Store([])  # no bytes follow
    if cls is M.MapGet:
        return M.MapGet(0, 0)  # a random epoch makes the manager wait for a server that knows it
    if cls is E.Advance:
        return E.Advance("theirs", 0)  # the answer waits for servers as long as it says
    return sample(cls, random.Random(cls.__name__))


@pytest.mark.quick
@pytest.mark.parametrize("role", TokenRole)
def test_every_message_by_role(server: Opener, role: TokenRole, request: pytest.FixtureRequest) -> None:
    """A server that has no use for a message says so, but to nobody whose role may not send it."""
    token = TOKENS[role]
    wrong = {}
    for cls, least in REQUESTS.items():
        if OPCODES[cls] in FOR_MANAGERS and "manager" not in request.node.name:
            continue  # a data server answers all of them that it is no manager
        text = said(server, token, Role.CLIENT, example(cls))
        if bool(text) != (least is None or role < least):
            wrong[cls.__name__] = text
        assert token.secret not in text and (not text or least is None or token.label in text)
    assert not wrong


@pytest.mark.quick
def test_the_check_is_what_refuses(server: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without it nothing is refused, which the test above would see."""
    monkeypatch.setattr(Gate, "refusal", lambda _self, _opcode: "")
    assert not said(server, TOKENS[CLIENT], Role.CLIENT, example(M.Join))
    assert not said(server, TOKENS[CLIENT], Role.CLIENT, example(M.Freeze))


@pytest.mark.quick
def test_a_client_s_token_opens_no_data_server_s_connection(server: Opener) -> None:
    for role in (Role.STREAM, Role.SUPERVISOR, Role.MOVER):
        for token in (TOKENS[CLIENT], BOUND):
            with pytest.raises(Refused, match=f"'{token.label}'.* is a client's") as caught:
                server(token, role)
            assert caught.value.status == Status.UNAUTHORIZED and token.secret not in str(caught.value)
        server(TOKENS[SERVER], role).close()


@pytest.mark.quick
def test_namespaces_of_a_token(server: Opener, request: pytest.FixtureRequest) -> None:
    """``theirs`` is what all these connections ask for."""
    with pytest.raises(Refused, match=r"'others' may not use the namespace 'theirs'") as caught:
        server(OTHER, Role.CLIENT)
    assert caught.value.status == Status.UNAUTHORIZED and OTHER.secret not in str(caught.value)
    if "endpoint" in request.node.name:  # it could read the whole arena
        with pytest.raises(Refused, match="'team' is bound to namespaces, and RDMA"):
            server(BOUND, Role.CLIENT)
    else:
        server(BOUND, Role.CLIENT).close()


def refused(client: ManagerClient, msg: Any) -> str:
    """The text of a refusal, after which the manager closes the connection."""
    with pytest.raises(Refused) as caught:
        client.call(msg, M.Done)
    client.close()
    assert caught.value.status == Status.UNAUTHORIZED
    return str(caught.value)


@pytest.mark.quick
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_a_client_neither_squats_nor_takes_over_a_server_s_name(
    manager: ManagerThread, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the server starts, and while its connection is broken. Without the check it does both: the control."""
    if not checked:
        monkeypatch.setattr(Gate, "refusal", lambda _self, _opcode: "")
    evil = workers(host="6.6.6.6")
    with manager.client(TOKENS[CLIENT]) as attacker, manager.client(TOKENS[SERVER], Role.SUPERVISOR) as server:
        if not checked:
            assert attacker.call(joining(666, "a", evil), M.Joined).epoch
            assert {info.host for info in attacker.get_map().workers} == {"6.6.6.6"}
            return
        assert "'some-client' has the role client" in refused(attacker, joining(666, "a", evil))
        server.join(1, "a", workers())
        known = server.get_map()
        server.close()
        epoch = known.epoch
        for msg in (
            joining(666, "a", evil), joining(1, "a", evil), M.Heartbeat(instance(1, "a"), epoch, "a", []),
            M.Leave(instance(1, "a"), "a", 0), M.Moved(instance(1, "a"), epoch, "a", 0, bitmap_of([1])),
            M.MapOffer(*known), M.Drain(1, "a"), M.Drain(0, "a"),
        ):  # fmt: skip
            assert "'some-client' has the role client" in refused(attacker, msg)
        server.join(1, "a", workers())
        assert {info.host for info in server.get_map().workers} == {"10.0.0.1"}
        assert server.heartbeat(1, "a", epoch)


NODES = Token("the-token-of-two-servers", SERVER, "rack", nodes={"a": 3 << 30, "b": None, "*": 1 << 30})
NAMED = Token("the-token-of-one-server", SERVER, "one", nodes={"c": None})


@pytest.mark.quick
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_a_server_s_token_joins_by_its_names_with_its_room(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says that it has more room draws more shards to itself. Without the check it does: the control."""
    if not checked:
        monkeypatch.setattr("simm.manager.rights_fault", lambda _msg, _token: [])
    made = ManagerThread((*TOKENS.values(), NODES, NAMED))
    huge, gib = 1 << 60, 1 << 30
    wrong = [
        (NAMED, "a", [gib], "'one' may not join as 'a'"), (NAMED, "*", [gib], "may not join as '*'"),
        (NODES, "a", [2 * gib, gib + 1], f"'a' has {3 * gib + 1} bytes"), (NODES, "x", [gib + 1], "'rack' allows"),
        (NODES, "x", [huge], "'rack' allows"),
    ]  # fmt: skip
    right = [
        (NODES, "a", [2 * gib, gib]), (NODES, "b", [huge]), (NODES, "y", [gib]), (NAMED, "c", [huge]),
        (TOKENS[SERVER], "z", [huge]), (TOKENS[ADMIN], "admin", [huge]),
    ]  # fmt: skip
    try:
        for number, (token, name, sizes, says) in enumerate(wrong, 1):
            with made.client(token, Role.SUPERVISOR) as server:
                msg = joining(number, name, workers(*sizes))
                if not checked:
                    assert server.call(msg, M.Joined).epoch
                    continue
                with pytest.raises(Refused, match=re.escape(says)) as caught:
                    server.call(msg, M.Joined)
                assert caught.value.status == Status.UNAUTHORIZED
        if checked:
            for number, (token, name, sizes) in enumerate(right, 100):
                with made.client(token, Role.SUPERVISOR) as server:
                    assert server.call(joining(number, name, workers(*sizes)), M.Joined).epoch
            with made.client(TOKENS[CLIENT]) as client:
                names = {node["name"] for node in client.status()["nodes"]}
            assert names == {name for _, name, _ in right}
    finally:
        made.close()


def test_servers_speak_for_themselves_and_admins_for_the_cluster(manager: ManagerThread) -> None:
    with manager.client(TOKENS[SERVER], Role.SUPERVISOR) as server, manager.client(TOKENS[ADMIN]) as admin:
        for name in "ab":
            server.join(1, name, workers())
        epoch = server.heartbeat(1, "a", server.get_map().epoch)
        assert "takes a token with the role admin" in refused(server, M.Drain(1, "a"))
        server.join(1, "a", workers())  # by a new connection: this one was closed
        admin.drain("a")
        assert server.moved(1, epoch, "a", 0, [1]) >= 0
        admin.drain("a", False)
        server.leave(1, "a")
    with manager.client(TOKENS[CLIENT]) as client:
        assert [node["name"] for node in client.status()["nodes"]] == ["a", "b"] and client.get_map().epoch > epoch
    with manager.client(TOKENS[ADMIN]) as admin:
        wait_until(lambda: admin.status()["manager"]["unauthorized"] == 1, "it has counted the refusal")


def test_a_map_is_taken_from_those_who_were_asked(manager: ManagerThread) -> None:
    """Once each time."""
    with manager.client(TOKENS[SERVER], Role.SUPERVISOR) as server:
        joined = server.join(1, "a", workers())
        known = server.get_map()
        assert not joined.wants_map
        with pytest.raises(TransportError, match="nobody asked for"):
            server.offer(known)
    with manager.client(TOKENS[SERVER], Role.SUPERVISOR) as server:
        joined = server.call(joining(1, "b", workers(), epoch=known.epoch + 1000), M.Joined)
        assert joined.wants_map
        with contextlib.suppress(Refused):
            server.offer(known._replace(epoch=known.epoch + 1000))
        with pytest.raises(TransportError, match="nobody asked for"):
            server.offer(known)


@pytest.mark.quick
@pytest.mark.parametrize("role", [Role.CLIENT, Role.STREAM, Role.SUPERVISOR, Role.ADMIN, Role.MOVER])
def test_another_uid_is_a_client_of_a_worker(role: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel names a member of the group, whatever it says in HELLO. The worker's own uid is a server."""
    with WorkerThread() as worker:
        worker.worker.settings.any_uid = True

        def other_uid(sock: socket.socket) -> tuple[int, int, int]:
            pid, uid, gid = credentials(sock)
            return pid, uid + 1000, gid

        monkeypatch.setattr("simm.server.worker.credentials", other_uid)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        for cls, least in REQUESTS.items():
            with contextlib.closing(worker.channel()) as channel:
                channel.call(client_hello(role, namespace="default"))
                if least is not CLIENT:
                    with pytest.raises(TransportError):
                        channel.call(example(cls))
        with worker.frozen() as store:
            assert store.shard_words.frozen == store.shard_words.moving == 0
        monkeypatch.undo()
        with contextlib.closing(worker.channel()) as channel:
            channel.call(client_hello(Role.MOVER, namespace="default"))
            assert isinstance(channel.call(M.Freeze(2, bitmap_of([1]))), M.Frozen), "the control"


def test_the_page_has_the_same_rules() -> None:
    """docs/protocol.md, section Roles."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "protocol.md").read_text()
    section = page.partition("### Roles")[2].partition("###")[0]
    named = {role: set(text.split(", ")) for role, text in re.findall(r"^\| (\w+) \| ([A-Z_, ]+) \|$", section, re.M)}
    rules: dict[str, set[str]] = {str(role): set() for role in TokenRole}
    for cls, least in RULES.items():
        if least is not None:
            rules[str(least)].add(re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).upper())
    assert named == rules


@pytest.mark.quick
def test_a_bound_client_advances_its_own_namespaces_only() -> None:
    with contextlib.closing(ManagerThread(ALL)) as manager:
        for token, allowed in ((BOUND, True), (OTHER, False), (TOKENS[CLIENT], True)):
            before = manager.manager.cluster.epoch
            with manager.client(token, Role.CLIENT) as client:
                # No data server has joined that could confirm it.
                with pytest.raises(Refused) as refused:
                    client.call(E.Advance("theirs", 100), E.Advanced)
            assert refused.value.status == (Status.UNAVAILABLE if allowed else Status.UNAUTHORIZED)
            assert (manager.manager.cluster.epoch > before) == allowed


@pytest.mark.quick
def test_epochs_from_who_has_not_joined_are_malformed() -> None:
    with contextlib.closing(ManagerThread(ALL)) as manager, manager.client(TOKENS[SERVER]) as client:
        before = manager.manager.cluster.epoch
        with pytest.raises(TransportError):
            client.call(E.Epochs(0, 0, 0, [E.NamespaceEpoch("theirs", 9)]), M.Done)
        assert not manager.manager.cluster.namespaces and manager.manager.cluster.epoch == before
