"""Tokens are proven on both sides, once, for one service and one role, and never shown."""

from __future__ import annotations

import itertools

import pytest

from simm.config.tokens import Token, TokenRole
from simm.errors import RemoteProtocolError
from simm.rpc import OPCODES, encode
from simm.wire.auth import PROOF_BYTES, Asker, Gate
from simm.wire.hello import client_hello
from simm.wire.messages import (
    Challenge,
    Done,
    Drain,
    Error,
    Fetch,
    Freeze,
    Hello,
    Prove,
    Role,
    Service,
    Status,
    WorkerInfo,
)
from tests.support.tokens import old_tokens

SECRETS = ("first-token-of-two", "second-tökén-of-two")
TOKENS = old_tokens(*SECRETS)
ROLES = {role: Token(f"the-token-of-a-{role}", role, f"some-{role}") for role in TokenRole}
BOUND = Token("a-token-for-a-and-b", TokenRole.CLIENT, "team", {"a": None, "b": 1 << 30})


def challenged(asker: Asker, gate: Gate) -> Challenge:
    answer, status = gate.take(asker.auth)
    assert isinstance(answer, Challenge) and status == Status.OK
    return answer


@pytest.mark.parametrize("token", SECRETS)
@pytest.mark.parametrize("service", [Service.MANAGER, Service.STREAM, Service.ENDPOINT])
def test_both_sides_prove_it(token: str, service: int) -> None:
    asker, gate = Asker(token, service, Role.MOVER), Gate(service, TOKENS)
    challenge = challenged(asker, gate)
    prove = asker.prove(challenge)
    assert isinstance(prove, Prove) and not gate.open and gate.token is None
    assert gate.take(prove) == (Done(1), Status.OK) and gate.open
    assert gate.token is not None and gate.token.secret == token
    assert gate.fault(client_hello(Role.MOVER)) == ""
    assert "role" in gate.fault(client_hello(Role.CLIENT)), "it was not proven for that one"
    sent = b"".join(encode(msg, 1) for msg in (asker.auth, challenge, prove))
    assert not any(each.encode() in sent for each in SECRETS)


@pytest.mark.parametrize("tokens", [(), ("another-token-of-one",), ("first-token-of-tw", "irst-token-of-two")])
def test_a_server_that_does_not_know_it_gets_no_proof(tokens: tuple[str, ...]) -> None:
    asker, gate = Asker(SECRETS[0], Service.MANAGER, Role.CLIENT), Gate(Service.MANAGER, old_tokens(*tokens))
    answer, status = gate.take(asker.auth)
    assert (status == Status.UNAUTHORIZED) == bool(tokens)
    assert isinstance(asker.prove(answer), str)
    for lie in (
        Challenge(1, bytes(16), b""), Challenge(1, bytes(16), bytes(32)), Challenge(1, bytes(16), bytes(31)),
        Challenge(1, bytes(16), bytes(PROOF_BYTES * 1000)), Done(1), Prove(bytes(32)),
    ):  # fmt: skip
        assert isinstance(asker.prove(lie), str)


def test_a_client_that_does_not_know_it_is_refused() -> None:
    for proof in (b"", bytes(32), bytes(31), bytes(64)):
        asker, gate = Asker("another-token", Service.STREAM, Role.CLIENT), Gate(Service.STREAM, TOKENS)
        answer, status = gate.take(asker.auth)
        assert isinstance(answer, Error) and status == Status.UNAUTHORIZED and not gate.open
        # One that has heard the id of a token, which is no secret.
        named = asker.auth._replace(token=TOKENS[0].id)
        assert gate.take(named)[1] == Status.OK
        answer, status = gate.take(Prove(proof))
        assert isinstance(answer, Error) and status == Status.UNAUTHORIZED and not gate.open and gate.token is None
        assert gate.fault(client_hello(Role.CLIENT)) and all(token not in answer.text for token in SECRETS)
        with pytest.raises(RemoteProtocolError):
            gate.take(Prove(proof))


def test_a_proof_fits_once() -> None:
    """Not again, not another service, role or side: whoever has seen it can do nothing with it."""
    token = SECRETS[0]
    asker, gate = Asker(token, Service.STREAM, Role.CLIENT), Gate(Service.STREAM, TOKENS)
    challenge = challenged(asker, gate)
    prove = asker.prove(challenge)
    assert isinstance(prove, Prove)
    proofs = [prove.proof, challenge.proof]
    for service, proof in itertools.product((Service.MANAGER, Service.STREAM, Service.ENDPOINT), proofs):
        replayed = Gate(service, TOKENS)
        replayed.take(asker.auth._replace(service=service))
        assert replayed.take(Prove(proof))[1] == Status.UNAUTHORIZED, "it has another nonce"
    again = Asker(token, Service.STREAM, Role.CLIENT)
    assert isinstance(again.prove(challenge), str), "a squatter that has heard a real server"
    # The server's proof of this very connection, sent back to it.
    gate = Gate(Service.STREAM, TOKENS)
    reflected = challenged(asker, gate)
    assert gate.take(Prove(reflected.proof))[1] == Status.UNAUTHORIZED
    # A squatter that asks a real server of another kind for a proof to show, and passes the client's on.
    for other in (Service.MANAGER, Service.ENDPOINT):
        real = Gate(other, TOKENS)
        mine = Asker(token, Service.STREAM, Role.CLIENT)
        assert real.take(mine.auth)[1] == Status.BAD_REQUEST
        real = Gate(other, TOKENS)
        relayed = challenged_as(real, mine, other)
        assert isinstance(mine.prove(relayed), str)
    for role in (Role.SUPERVISOR, Role.MOVER):
        real = Gate(Service.STREAM, TOKENS)
        mine = Asker(token, Service.STREAM, Role.CLIENT)
        answer, _ = real.take(mine.auth._replace(role=role))
        assert isinstance(mine.prove(answer), str)


def challenged_as(gate: Gate, asker: Asker, service: int) -> Challenge:
    answer, _ = gate.take(asker.auth._replace(service=service))
    assert isinstance(answer, Challenge)
    return answer


def test_out_of_turn() -> None:
    gate = Gate(Service.STREAM, TOKENS)
    with pytest.raises(RemoteProtocolError):
        gate.take(Prove(bytes(32)))
    asker = Asker(SECRETS[0], Service.STREAM, Role.CLIENT)
    challenged(asker, gate)
    with pytest.raises(RemoteProtocolError):
        gate.take(asker.auth)


def test_nonces_are_new() -> None:
    askers = [Asker(SECRETS[0], Service.STREAM, Role.CLIENT) for _ in range(100)]
    nonces = {asker.auth.nonce for asker in askers}
    nonces |= {challenged(asker, Gate(Service.STREAM, TOKENS)).nonce for asker in askers}
    assert len(nonces) == 200


def test_another_data_server_than_the_map_names_is_none() -> None:
    """A squatter at the address of one that is down passes everything on to one that is up, with the same token."""
    wanted, other = worker_of("a", 0, 7).server, worker_of("b", 0, 8).server
    near = {wanted, other, worker_of("a", 1, 7).server, worker_of("a", 0, 8).server, ""}
    assert len(near) == 5
    for up in near - {wanted}:
        asker, gate = Asker(SECRETS[0], Service.STREAM, Role.CLIENT, wanted), Gate(Service.STREAM, TOKENS, up)
        answer, status = gate.take(asker.auth)
        assert isinstance(answer, Error) and status == Status.UNAVAILABLE
        challenge, _ = gate.take(asker.auth._replace(server=up))  # as the squatter would like it
        assert isinstance(asker.prove(challenge), str)
    asker, gate = Asker(SECRETS[0], Service.STREAM, Role.CLIENT, wanted), Gate(Service.STREAM, TOKENS, wanted)
    assert isinstance(asker.prove(challenged(asker, gate)), Prove)


def worker_of(node: str, number: int, instance: int) -> WorkerInfo:
    return WorkerInfo(number, 0, 1, instance, 1, node, "", "127.0.0.1", 1)


def opened(token: Token, service: int = Service.STREAM, role: int = Role.CLIENT) -> Gate:
    """A gate of a server with all tokens, to whose holder this one was proven."""
    asker, gate = Asker(token.secret, service, role), Gate(service, (*ROLES.values(), BOUND))
    prove = asker.prove(challenged(asker, gate))
    assert isinstance(prove, Prove) and gate.take(prove)[1] == Status.OK
    return gate


@pytest.mark.parametrize("role", TokenRole)
def test_the_gate_knows_the_role(role: TokenRole) -> None:
    gate = opened(ROLES[role])
    assert gate.token == ROLES[role] and not gate.bound
    may = {request: not gate.refusal(OPCODES[request]) for request in (Fetch, Freeze, Drain)}
    assert may == {Fetch: True, Freeze: role >= TokenRole.SERVER, Drain: role == TokenRole.ADMIN}
    text = gate.refusal(OPCODES[Challenge]) + gate.refusal(0xFFFF)
    assert "no request" in text and "0xffff" in text
    for request in (Freeze, Drain):
        text = gate.refusal(OPCODES[request])
        assert not text or (ROLES[role].label in text and ROLES[role].secret not in text and request.__name__ in text)


def test_a_client_is_no_data_server() -> None:
    for role in (Role.STREAM, Role.SUPERVISOR, Role.MOVER):
        for token in ROLES.values():
            gate = opened(token, Service.MANAGER, role)
            fault = gate.fault(client_hello(role))
            assert bool(fault) == (token.role == TokenRole.CLIENT) and token.secret not in fault
    for role in (Role.CLIENT, Role.ADMIN):
        assert not opened(ROLES[TokenRole.CLIENT], Service.MANAGER, role).fault(client_hello(role))


@pytest.mark.parametrize("service", [Service.MANAGER, Service.STREAM])
def test_a_token_is_bound_to_namespaces(service: int) -> None:
    def fault(token: Token, namespace: str) -> str:
        hello: Hello = client_hello(Role.CLIENT, namespace=namespace)
        return opened(token, service).fault(hello)

    assert opened(BOUND, service).bound
    for namespace in ("a", "b"):
        assert not fault(BOUND, namespace)
    for namespace in ("c", "A", "a ", "default"):
        text = fault(BOUND, namespace)
        assert repr(namespace) in text and "'team'" in text and BOUND.secret not in text
        assert not fault(ROLES[TokenRole.CLIENT], namespace)
    assert bool(fault(BOUND, "")) == (service != Service.MANAGER)


def test_another_client_s_token_makes_no_server() -> None:
    """Who has a client's token can pass for a server to holders of that token, and to nobody else."""
    other = Token("the-token-of-another", TokenRole.CLIENT, "another")
    for squats in (BOUND, other):
        for asks in (*ROLES.values(), BOUND, other):
            asker = Asker(asks.secret, Service.MANAGER, Role.CLIENT)
            gate = Gate(Service.MANAGER, (squats,))
            answer, _ = gate.take(asker.auth)
            assert isinstance(asker.prove(answer), Prove) == (asks is squats)
            if asks is not squats:  # it proves what it knows, under the other's name
                gate = Gate(Service.MANAGER, (squats,))
                answer, _ = gate.take(asker.auth._replace(token=squats.id))
                assert isinstance(asker.prove(answer), str)


def test_without_tokens_everything_is_open() -> None:
    gate = Gate(Service.STREAM, ())
    assert gate.open and gate.token is None and not gate.bound
    assert not any(gate.refusal(opcode) for opcode in OPCODES.values())
    assert not gate.fault(client_hello(Role.MOVER, namespace="any"))
