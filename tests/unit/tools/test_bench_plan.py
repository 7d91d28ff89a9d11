"""The command line of ``simm bench``: what it plans, and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simm.config.client_options import ClientOptions
from simm.config.settings import SETTINGS, load
from simm.errors import UsageError
from simm.tools.bench.plan import OPS, Plan, parser_for, plan_from
from simm.tools.bench.processes import reach
from simm.tools.bench.replay import asks_for_replay
from simm.tools.bench.report import Setup
from simm.tools.connect import client_arguments


def plan_of(*argv: str, env: Mapping[str, str] | None = None) -> Plan:
    arguments = parser_for("simm bench").parse_args(list(argv))
    given = {key: value for key, value in vars(arguments).items() if key == "manager"}
    return plan_from(arguments, load("bench", given, env or {}))


def test_the_plan_as_asked() -> None:
    plan = plan_of("get", "--op", "mput,get", "--size", "4K,1M,4K", "--batch", "7", "--duration", "250ms", "--no-ring")
    assert plan.ops == ("get", "mput") and plan.sizes == (4096, 1 << 20)
    assert plan.batches == {"get": (1,), "mput": (7,)}
    assert plan.seconds == 0.25 and plan.setup == Setup(ring=False)
    assert plan.memory == 1 << 30 and plan.working_set == 256 << 20
    many = {"mput": (32,), "mget": (32,), "mexists": (128,)}
    assert plan_of().batches == {op: many.get(op, (1,)) for op in OPS} and plan_of().ops == OPS
    assert plan_of("mput", "--batch", "32,1024,32").batches == {"mput": (32, 1024)}
    assert plan_of("--state", "full", "--api", "kv", "--threads", "2").setup == Setup("full", "kv", single=False)
    assert "view" not in plan_of("--api", "kv").ops and "view" not in plan_of("--mixed").ops
    assert plan_of("--manager", "10.0.0.1:5").memory == 0


def test_every_flag_of_the_help_can_be_used(tmp_path: Path) -> None:
    """--trace was in it, and began a replay."""
    parser = parser_for("simm bench")
    given = {"--size": "4K", "--batch": "8", "--hits": "50", "--memory": "1G", "--working-set": "1M", "--op": "put",
             "--ratios": "put=1", "--model": "cores=4", "--threads": "2", "--processes": "2", "--duration": "1s",
             "--config": str(tmp_path / "none.json"), "--json": "-"}  # fmt: skip
    seen = set()
    for action in parser._actions:
        for flag in action.option_strings:
            if flag in ("-h", "--help"):
                continue
            seen.add(flag)
            setting = SETTINGS.get(action.dest)
            value = given.get(flag) or (setting.default if setting is not None else next(iter(action.choices or "?")))
            words = [flag] if action.nargs == 0 else [f"{flag}={value if value is not None else ''}"]
            assert not asks_for_replay(words), flag
            parser.parse_args(words)
    assert "--trace" not in seen and "--trace-dir" in seen and given.keys() <= seen
    assert load("bench", {}, {"SIMM_TRACE": "0.5"}).trace == "0.5", "the variable says it"


@pytest.mark.parametrize("by_file", [False, True])
def test_a_cluster_that_only_the_surroundings_name_is_not_loaded(tmp_path: Path, by_file: bool) -> None:
    """``export SIMM_MANAGER=production; simm bench`` filled production's memory and evicted its values."""
    (tmp_path / "simm.json").write_text('{"manager": "10.0.0.1:5"}')
    env = {"SIMM_CONFIG": str(tmp_path / "simm.json")} if by_file else {"SIMM_MANAGER": "10.0.0.1:5"}
    assert plan_of(env=env).memory == 1 << 30
    assert plan_of("--memory", "64M", "--working-set", "16M", "--size", "4K", env=env).memory == 64 << 20
    assert plan_of("--manager", "10.0.0.1:5", env=env).memory == 0


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["fetch"], "'fetch' is not an operation"),
        (["--size", "0"], "a value has 1 to"),
        (["--size", "65M"], "a value has 1 to"),
        (["--size", ","], "names no size"),
        (["--threads", "0"], "--threads 0"),
        (["--processes", "-1"], "--processes -1"),
        (["--batch", "0"], "--batch 0"),
        (["--memory", "1G", "--manager", "h:1"], "omit it or --manager"),
        (["--memory", "64M", "--working-set", "40M"], "raise --memory"),
        (["--memory", "64M", "--size", "16M", "--threads", "4"], "raise --memory or --working-set"),
        (["--duration", "1ms"], "from 10ms to 24h"),
        (["--batch", "32,many"], "numbers of keys, by commas"),
        (["--batch", "32,5000"], "--batch 5000"),
        (["get", "put", "--batch", "32"], "is for mput, mget and mexists"),
        (["view", "--api", "kv"], "--api kv has no view"),
        (["view", "--mixed"], "--mixed has no view"),
        (["--no-ring", "--api", "kv"], "--no-ring is for --api client"),
        (["--state", "full", "--manager", "h:1"], "omit --manager"),
        (["--state", "full", "--memory", "64M", "--working-set", "20M", "--size", "4K"], "more than a quarter"),
        (["--ratios", "put=1"], "--ratios is for --mixed"),
        (["--hits", "50"], "--hits is for --mixed"),
        (["--mixed", "--ratios", "puts=1"], "write it as put=1,get=1,exists=1"),
        (["--mixed", "--ratios", "put=0"], "a number from 0.001 to 1000"),
        (["--mixed", "--ratios", "put=nan"], "a number from 0.001 to 1000"),
        (["get", "--mixed", "--ratios", "put=2"], "put is not among the operations"),
        (["--mixed", "--hits", "101"], "a number from 0 to 100"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_with_the_remedy(argv: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        plan_of(*argv)




def test_what_is_measured_together_and_what_apart() -> None:
    assert plan_of("get", "mput", "mexists", "--size", "4K,1M").groups(4096, 1000) == [
        (("get",), 1), (("mput",), 32), (("mexists",), 128),
    ]  # fmt: skip
    # Questions do not depend on the size; batches have at most half of a thread's keys, and none comes twice.
    several = plan_of("mput", "exists", "--batch", "4,32,128", "--size", "4K,1M")
    assert several.groups(1 << 20, 40) == [(("mput",), 4), (("mput",), 20)]
    assert several.groups(1 << 20, 1) == [(("mput",), 1)]
    mixed = plan_of("--mixed", "--batch", "32,128", "--size", "4K,1M")
    single, many = ("put", "get", "exists"), ("mput", "mget", "mexists")
    assert mixed.groups(1 << 20, 1000) == [(single, 1), (many, 32), (many, 128)]
    assert plan_of("mget", "--mixed").groups(4096, 1000) == [(("mget",), 32)]


def test_a_full_arena_has_values_of_one_size() -> None:
    plan = plan_of("exists", "put", "--size", "1M,4K,64K", "--state", "full")
    assert [(part.sizes, part.ops) for part in plan.parts()] == [
        ((1 << 20,), ("put",)), ((4096,), ("exists", "put")), ((65536,), ("put",)),
    ]  # fmt: skip
    assert [part.sizes for part in plan_of("exists", "--size", "1M,4K", "--state", "full").parts()] == [(4096,)]
    mixed = plan_of("exists", "--size", "1M,4K", "--state", "full", "--mixed").parts()
    assert [part.groups(part.sizes[0], 100) for part in mixed] == [[(("exists",), 1)]] * 2
    assert plan_of().parts() == [plan_of()]


def test_a_mix_is_drawn_as_asked() -> None:
    mix = plan_of("--mixed", "--ratios", "get=5, put=0.5", "--hits", "90").mix
    assert mix is not None and mix.weights == {"put": 0.5, "get": 5.0, "ask": 1.0} and mix.hits == 0.9
    assert str(mix) == "put 0.5, get 5, exists 1, 90 % of the reads for stored keys"
    assert plan_of().mix is None


@pytest.mark.parametrize("own", [False, True])
def test_a_store_and_a_client_reach_the_same_cluster(own: bool) -> None:
    env = {"SIMM_TLS_CA": "/ca.pem", "SIMM_TLS_NAME": "simm", "SIMM_NAMESPACE": "n", "SIMM_DEADLINE_MS": "700"}
    settings = load("bench", {"manager": "10.0.0.1:5", "path": "tcp"}, env)
    cluster: Any = SimpleNamespace(manager="127.0.0.1:9", token="", token_file="") if own else None
    reached = reach(client_arguments(settings), settings, cluster)
    # What simm.kv makes of the environment is what the client was given, whatever the surroundings say.
    store = ClientOptions.from_settings(load("client", {}, {**env, "SIMM_PATH": "shm", **reached["environment"]}))
    assert store == ClientOptions(**reached["client"])
    assert (store.manager, store.tls_ca, store.tls_name) == (
        ("127.0.0.1:9", "", "") if own else ("10.0.0.1:5", "/ca.pem", "simm")
    )
    assert (store.namespace, store.path, store.deadline_s) == ("n", "tcp", 0.7)
