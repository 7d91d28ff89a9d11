"""Token files: roles, labels, namespaces and quotas; files of the old kind; mistakes get a sentence without a token."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from simm.config.startup import read_tokens, server_tokens
from simm.config.tokens import (
    BOUND_BYTES_MAX,
    OLD_TOKENS_MAX,
    TOKENS_MAX,
    Token,
    TokenRole,
    parse_tokens,
    quotas_of,
    token_for,
    token_id,
)
from simm.errors import ConfigError
from tests.support.tokens import old_tokens

SECRET = "f00d" * 8
OTHER = "beef" * 8

WHOLE = f"""
# who may do what
admin   ops       {"a" * 32}
server  nodes     {"b" * 32}
  client  team-a    {"c" * 32}   llama3-70b=2G  qwen3
client  team-a    {"d" * 32}   llama3-70b=2G  qwen3
client  engines@x {"e" * 32}
client  metrics   {"#f" * 16}   none=0
"""


def test_a_whole_file() -> None:
    tokens = parse_tokens(WHOLE, "the file")
    assert [(str(token.role), token.label) for token in tokens] == [
        ("admin", "ops"), ("server", "nodes"), ("client", "team-a"), ("client", "team-a"), ("client", "engines@x"),
        ("client", "metrics"),
    ]  # fmt: skip
    assert [token.secret[0] for token in tokens] == ["a", "b", "c", "d", "e", "#"]
    assert tokens[2].namespaces == {"llama3-70b": 2 << 30, "qwen3": None} and tokens[4].namespaces is None
    assert not any(token.old for token in tokens)
    assert quotas_of(tokens) == {"llama3-70b": 2 << 30, "none": 0}


def test_the_largest_bounds() -> None:
    client, server = parse_tokens(f"client a {SECRET} x=1048576T\nserver b {OTHER} *=1048576T", "f")
    assert quotas_of([client]) == {"x": BOUND_BYTES_MAX} and dict(server.nodes or {}) == {"*": BOUND_BYTES_MAX}


def test_the_least_quota_counts() -> None:
    text = f"client a {SECRET} x=2G y\nclient b {OTHER} x=1G y=5"
    assert quotas_of(parse_tokens(text, "f")) == {"x": 1 << 30, "y": 5}


@pytest.mark.parametrize(
    "text", [SECRET, f"{SECRET}\n{OTHER}\n", f"# old\n\n  {SECRET}  \r\n", "words of an old token", f"{OTHER}#{SECRET}"]
)
def test_a_file_of_the_old_kind(text: str) -> None:
    for token in parse_tokens(text, "f"):
        assert token.old and token.role is TokenRole.ADMIN and token.namespaces is None
    assert parse_tokens(text, "f")[0].secret in (SECRET, "words of an old token", f"{OTHER}#{SECRET}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no token"),
        ("# nothing\n\n", "has no token"),
        ("short", "16 to 1024 bytes"),
        (f"client a {'x' * 15}", "16 to 1024 bytes"),
        (f"client a {'x' * 1025}", "16 to 1024 bytes"),
        (f"{SECRET}\n{OTHER}\nthird-token-of-three", r"3 tokens, 1 to 2 are allowed.*role"),
        (f"cleint a {SECRET}", "line 1 .*'cleint', which is no role: write client"),
        (f"Admin a {SECRET}", "'Admin', which is no role: write admin"),
        (f"servers a {SECRET}", "write server"),
        (f"client a {SECRET}\n{OTHER}", "line 2 .*has no role: begin it with client, server, admin"),
        (f"client {SECRET}", "line 1 .*is incomplete"),
        ("client", "line 1 .*is incomplete"),
        (f"client {SECRET}/+ a", "a label has 1 to 64 letters"),
        (f"client {SECRET} name-of-a-namespace", "shorter than its token: .*swapped, or is the label missing"),
        (f"client {SECRET} {OTHER} ns", "shorter than its token"),
        (f"admin {SECRET} ops ns", "shorter than its token"),
        (f"server a {SECRET} gpu/1", "a data server is written NAME or NAME=BYTES.*no name of a data server"),
        (f"server a {SECRET} gpu=much", "a data server is written.*'much' is no size"),
        (f"server a {SECRET} gpu * gpu=5", "names the data server 'gpu' twice"),
        (f"admin a {SECRET} ns", "'a' has the role admin"),
        (f"client a {SECRET} ns=much", "NAME or NAME=QUOTA.*'much' is no size"),
        (f"client a {SECRET} ns=99999999T", "NAME=QUOTA.*'99999999T' is more than any data server has: 1048576T"),
        (f"client a {SECRET} ns={(1 << 60) + 1}", "is more than any data server has"),
        (f"server a {SECRET} gpu={'9' * 32}T", "a data server is written.*is more than any data server has"),
        (f"client a {SECRET} =5G", "NAME or NAME=QUOTA"),
        (f"client a {SECRET} {'n' * 65}", "64 bytes"),
        (f"client a {SECRET} ns ns=5", "names the namespace 'ns' twice"),
        (f"client a {SECRET} ns (others)=5G", r"no namespace may have the name \(others\)"),
        (f"client a {SECRET} " + " ".join(map(str, range(65))), "names 65 namespaces, 64 are allowed"),
        (f"client a {SECRET}\n# b\nadmin b {SECRET}", "lines 1 and 3 .*same token"),
        (f"client a {SECRET} a # not b", "line 1 .*a comment has a line of its own"),
        (f"client a {SECRET} #b", "line 1 .*a comment has a line of its own"),
        (f"server a {SECRET} # rack 3", "line 1 .*a comment has a line of its own"),
        (f"client b {OTHER}\nadmin a {SECRET} # for ops", "line 2 .*a comment has a line of its own"),
        (f"{SECRET} # my key", "line 1 .*a comment has a line of its own"),
        (f"# old\n{SECRET}\n{OTHER}  #next", "line 3 .*a comment has a line of its own"),
        (f"{SECRET}\n{SECRET}", "lines 1 and 2 .*same token"),
        ("\n".join(f"client a {SECRET}{n}" for n in range(TOKENS_MAX + 1)), f"1 to {TOKENS_MAX} are allowed"),
    ],
)
def test_mistakes(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_tokens(text, "the token file /f")
    said = str(caught.value)
    assert "/f" in said and SECRET not in said and OTHER not in said and "xxx" not in said


def test_a_server_s_token_is_bound_to_data_servers() -> None:
    any_, bound = parse_tokens(f"server a {SECRET}\nserver b {OTHER} gpu-1=200G gpu-2 *=1G", "f")
    assert any_.nodes is None and any_.namespaces is bound.namespaces is None
    assert dict(bound.nodes or {}) == {"gpu-1": 200 << 30, "gpu-2": None, "*": 1 << 30}


def test_nothing_shows_a_token() -> None:
    for token in (*parse_tokens(WHOLE, "f"), *old_tokens(SECRET)):
        assert token.secret not in repr(token) and token.secret not in str(token)
        assert token.secret.encode() not in token.id and token.id == token_id(token.secret)
    assert len({token.id for token in parse_tokens(WHOLE, "f")}) == 6
    assert OLD_TOKENS_MAX == 2


def test_which_token_a_process_proves() -> None:
    tokens = parse_tokens(WHOLE, "f")

    def label(found: Token | None) -> str:
        return found.label if found is not None else ""

    assert label(token_for(tokens, *TokenRole)) == "team-a", "a client takes the least that suffices"
    assert label(token_for(tokens, *TokenRole, namespace="other")) == "engines@x", "and one that may use its namespace"
    assert label(token_for(tokens[:4], *TokenRole, namespace="other")) == "nodes"
    assert label(token_for(tokens[2:4], *TokenRole, namespace="other")) == "team-a", "its refusal says why"
    assert label(token_for(tokens, TokenRole.SERVER, TokenRole.ADMIN)) == "nodes"
    assert label(token_for(tokens, *reversed(TokenRole))) == "ops"
    assert token_for(tokens[2:], TokenRole.SERVER, TokenRole.ADMIN) is None and token_for((), *TokenRole) is None


def test_a_server_warns_of_tokens_without_a_role(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens"

    def written(text: str) -> Path:
        path.write_text(text)
        path.chmod(0o600)
        return path

    monkeypatch.setattr(logging.getLogger("simm"), "propagate", True)
    with caplog.at_level("WARNING"):
        assert server_tokens(None) == () and read_tokens(written(SECRET))[0].old
        assert [token.secret for token in read_tokens(written(f"\ufeff# a comment, by Notepad\n{SECRET}"))] == [SECRET]
        assert server_tokens(written(f"server a {SECRET}"))[0].role is TokenRole.SERVER
        assert not caplog.messages
        assert server_tokens(written(f"{SECRET}\n{OTHER}"))[1].old
    assert len(caplog.messages) == 1 and "everybody who has one may do everything" in caplog.text
    assert SECRET not in caplog.text
    with pytest.raises(ConfigError, match="no server's token"):
        server_tokens(written(f"client a {SECRET}"))
    assert read_tokens(path)[0].label == "a", "a client needs none"
