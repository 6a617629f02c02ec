"""What the doctor finds of replicas and of the fleet, over real sockets."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.doctor.findings import Level
from router.prompt.prompt_reader import PromptReader
from simulator.simulated_fleet import fleet as simulated
from simulator.simulator_settings import SimulatorSettings
from tests.router.agent_server import AgentServer, serving
from tests.router.doctor.replicas import StandIn, examined, found
from tests.router.host_names import resolve_hosts
from tests.router.prompt.chat_shapes import TEMPLATES
from tests.router.prompt.tokenizer_makers import llama3, write_model
from warmroute_common.fleet_secret import FleetSecret


@contextlib.asynccontextmanager
async def two(
    **agents: AgentServer,
) -> AsyncIterator[tuple[StandIn, StandIn, list[dict[str, Any]]]]:
    """Run two replicas, with an agent each where one is named; give their entries in a file."""
    one, other = StandIn(), StandIn()
    entries: list[dict[str, Any]] = []
    async with contextlib.AsyncExitStack() as stack:
        for name, each in (("one", one), ("two", other)):
            url = await stack.enter_async_context(serving(each.app()))
            entry: dict[str, Any] = {"url": url, "instance_id": name}
            if name in agents:
                app = agents[name].app()
                entry["agent_url"] = await stack.enter_async_context(serving(app))
            entries.append(entry)
        yield one, other, entries


@pytest.mark.parametrize("with_agents", [True, False])
async def test_a_fleet_that_is_well(tmp_path: Path, with_agents: bool) -> None:
    """Real engines, agents, KV events and tokens; a probe's blocks have the router's keys."""
    settings = SimulatorSettings(
        directory=tmp_path, replicas=2, cpu_tokens=8192, disk_tokens=0, speed=50
    )
    names = ("url", "instance_id", "agent_url")[: 3 if with_agents else 2]
    async with simulated(settings) as where:
        replicas = [{name: each[name] for name in names} for each in where["replicas"]]
        report = await examined(*replicas, probe=True)
    assert found(report) == {}
    well = found(report, Level.OK)
    for name in ("sim1", "sim2"):
        for check in ("health", "models", "tokens", "kv-events", "hash", "probe"):
            assert (name, check) in well
        assert ((name, "agent") in well) is with_agents
        assert ((name, "agent") in found(report, Level.NOTE)) is not with_agents
    assert "sha256 with PYTHONHASHSEED not set" in well["sim1", "hash"]


async def test_replicas_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_hosts(monkeypatch, {"no-such-host.invalid": None})
    async with two() as (one, _, (first, second)):
        one.health = 503
        gone = {"url": "http://127.0.0.1:1", "instance_id": "gone"}
        lost = {"url": "http://no-such-host.invalid", "instance_id": "lost"}
        report = await examined(first, second, gone, lost)
    problems = found(report)
    assert "answers /health with 503" in problems["one", "health"]
    assert "nothing listens at 127.0.0.1:1 (connection refused)" in problems["gone", "health"]
    assert (
        "the host name 'no-such-host.invalid' cannot be resolved (DNS)"
        in problems["lost", "health"]
    )
    assert {about for about, _ in problems} == {"one", "two", "gone", "lost"}
    assert set(problems) - {("two", "kv-events"), ("two", "tokenizer")} == {
        (about, "health") for about in ("one", "gone", "lost")
    }


async def test_a_fleet_of_which_nothing_answers() -> None:
    report = await examined({"url": "http://127.0.0.1:1"})
    assert ("the fleet", "up") in found(report)


async def test_keys_that_replicas_refuse() -> None:
    async with two() as (one, other, (first, second)):
        one.key = other.key = "secret"
        report = await examined({**first, "api_key": "other"}, second)
        assert "refuses the router's key (401)" in found(report)["one", "key"]
        assert "clients' keys are forwarded" in found(report)["two", "key"]
        report = await examined({**first, "api_key": "secret"}, second, access=KEYED)
        assert ("one", "key") not in found(report)
        assert "clients' keys are not forwarded" in found(report)["two", "key"]


KEYED = {"keys": [{"name": "team", "sha256": 64 * "a"}]}


async def test_different_contexts_of_one_model() -> None:
    async with two() as (one, other, entries):
        one.models = [{"id": "m", "max_model_len": 4096}]
        other.models = [{"id": "m", "max_model_len": 32768}]
        notes = found(await examined(*entries), Level.NOTE)
        assert "contexts of 'm' differ in tokens" in notes["the fleet", "context"]
        assert "4096" in notes["the fleet", "context"]
        one.models = other.models
        assert ("the fleet", "context") not in found(await examined(*entries), Level.NOTE)


async def test_models_and_aliases() -> None:
    async with two() as (one, _, entries):
        one.models = [{"id": "m"}, {"id": "only-here"}]
        report = await examined(*entries, model_aliases={"gpt": "nowhere", "x": "m", "m": "m"})
        assert "'gpt' stands for 'nowhere'" in found(report)["the fleet", "alias"]
        notes = found(report, Level.NOTE)
        assert "'only-here' is not served by two" in notes["the fleet", "models-differ"]
        assert "'m' stands for 'm', and hides a model" in notes["the fleet", "alias"]
        one.models = []
        report = await examined(*entries, model_aliases={"gpt": "nowhere"})
        assert "lists no model" in found(report)["one", "models"]
        assert ("the fleet", "alias") not in found(report), "what one serves is not known"


async def test_versions_and_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # A date in whole seconds says the time to half a second, and a slow answer makes that worse.
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.5)
    async with two() as (one, other, entries):
        one.version, one.ahead_s = "0.33.0", 60.0
        other.ahead_s = -1.0
        problems = found(await examined(*entries))
        assert problems["the fleet", "versions"].startswith(
            "versions of vLLM differ: 0.33.0 (one); 0.32.0 (two); finish the upgrade"
        )
        assert "its clock is 60 s ahead of this machine's" in problems["one", "clock"]
        assert ("two", "clock") not in problems
        one.version, one.ahead_s = None, -60.0
        report = await examined(*entries)
        assert "60 s behind" in found(report)["one", "clock"]
        assert ("the fleet", "versions") not in found(report)
        assert "a server without a version" in found(report, Level.OK)["one", "health"]


# --- agents


async def test_agents_that_differ() -> None:
    model = "/no/model"
    first = AgentServer(incarnation="one", model=model, hash_seed="0", version="0.0.1")
    second = AgentServer(incarnation="two", model=model, chunk_tokens=128, instance_id="other")
    async with two(one=first, two=second) as (_, _, entries):
        report = await examined(*entries)
    problems, notes = found(report), found(report, Level.NOTE)
    differs = problems["the fleet", "hash-differs"]
    assert "sha256 with PYTHONHASHSEED 0 (one); sha256 with PYTHONHASHSEED not set (two)" in differs
    assert "64 (one); 128 (two)" in problems["the fleet", "chunk-size"]
    assert "its engine is warmroute 0.0.1" in problems["one", "agent-version"]
    assert "calls it 'other' (lmcache_instance_id), the file 'two'" in notes["two", "agent-name"]
    assert "no KV can be copied from one, two" in notes["the fleet", "copies"]


async def test_agents_with_other_layouts() -> None:
    first = AgentServer(incarnation="one", model="m", layout="a", transfer_port=1)
    second = AgentServer(incarnation="two", model="m", layout="b", transfer_port=1)
    async with two(one=first, two=second) as (_, _, entries):
        report = await examined(*entries)
    assert found(report)["the fleet", "layout"].startswith(
        "replicas of 'm' differ in their KV layout"
    )
    assert ("the fleet", "copies") not in found(report, Level.NOTE)


async def test_an_agent_that_is_another_replicas() -> None:
    async with two(one=AgentServer(model="another")) as (_, _, (first, second)):
        second["agent_url"] = f"{first['agent_url']}/"
        problems = found(await examined(first, second))
    assert (
        "its agent belongs to a replica of 'another', which url does not serve"
        in problems["one", "agent-model"]
    )
    assert "one, two have the same agent" in problems["the fleet", "agent-url"]


async def test_an_agent_that_does_not_answer() -> None:
    async with two() as (_, _, (first, second)):
        problems = found(await examined({**first, "agent_url": "http://127.0.0.1:1"}, second))
    assert "its agent does not answer" in problems["one", "agent"]
    assert "warmroute replica" in problems["one", "kv-events"]


async def test_an_lmcache_server_that_does_not_answer() -> None:
    async with two() as (_, _, (first, second)):
        url = "http://127.0.0.1:1"
        report = await examined({**first, "lmcache": url}, second, controller={})
    assert "its LMCache server does not answer" in found(report)["one", "lmcache"]


async def test_the_builtin_hash_of_lmcache_inside_vllm_needs_a_seed() -> None:
    ports = {"pull_port": 0, "reply_port": 0, "heartbeat_port": 0}
    async with two() as (_, _, (first, second)):
        report = await examined({**first, "hash_seed": "0"}, second, lmcache_workers=ports)
    line = found(report)["the fleet", "lmcache-hash"]
    assert line.startswith("LMCache's builtin hash needs the hash_seed of two;")


# --- tokens


async def test_tokens_that_differ(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", llama3(), TEMPLATES["parts"])
    reader = await asyncio.to_thread(PromptReader.load, model)
    other = write_model(tmp_path / "other", llama3(), TEMPLATES["chatml"])
    templated = await asyncio.to_thread(PromptReader.load, other)
    async with two() as (one, two_, entries):
        one.models = two_.models = [{"id": "m", "root": str(model)}]
        one.tokens = lambda body: list(reader.read_now("/tokenize", body).token_ids or ())
        two_.tokens = lambda body: list(templated.read_now("/tokenize", body).token_ids or ())
        report = await examined(*entries)
        assert "texts and chats" in found(report, Level.OK)["one", "tokens"]
        assert "tokenizer.chat_template" in found(report)["two", "chat-template"]
        # Of one replica alone none agrees: the tokenizer is refuted, and said to be.
        one.tokens = lambda body: [1, 2, 3]
        report = await examined(entries[0])
        assert ("one", "tokens") not in found(report)
        assert "replicas are asked for tokens" in found(report, Level.NOTE)["one", "tokens"]
        report = await examined(entries[0], tokenizer={"ask_replicas": False})
        assert "tokenizer.path" in found(report)["one", "tokens"]
        one.tokens = None
        report = await examined(entries[0])
        assert "could not be compared" in found(report, Level.NOTE)["one", "tokens"]


async def test_a_replica_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its health and models are well, and all else never answers."""
    monkeypatch.setattr("router.prompt.token_trust._ANSWER_S", 0.1)
    monkeypatch.setattr("router.feeds.feeds._SOURCES_S", 0.1)
    model = write_model(tmp_path / "model", llama3(), TEMPLATES["parts"])
    async with two() as (one, _, entries):
        one.models, one.hangs = [{"id": "m", "root": str(model)}], True
        async with asyncio.timeout(20):
            report = await examined(entries[0])
    assert "/tokenize does not answer in time" in found(report)["one", "tokens"]


async def test_a_tokenizer_that_is_not_here_and_one_that_is_none(tmp_path: Path) -> None:
    async with two() as (one, _, entries):
        one.version = None
        report = await examined(*entries)
        assert "no tokenizer of '/no/model'" in found(report, Level.NOTE)["one", "tokenizer"]
        assert "its tokenizer is missing" in found(report)["two", "tokenizer"]
        report = await examined(*entries, tokenizer={"path": str(tmp_path)})
        assert str(tmp_path) in found(report)["the router", "tokenizer"]


async def test_agents_that_ask_for_the_fleet_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real agents; with the secret here, without one, and with another one."""
    secret = "known-to-the-fleet-alone"
    settings = SimulatorSettings(
        directory=tmp_path, replicas=1, disk_tokens=0, fleet_secret=FleetSecret(secret)
    )
    names = ("url", "instance_id", "agent_url")
    async with simulated(settings) as where:
        replicas = [{name: each[name] for name in names} for each in where["replicas"]]
        report = await examined(*replicas)
        assert (
            "requires the fleet secret, but here none is set"
            in (found(report)["sim1", "fleet-secret"])
        )
        monkeypatch.setenv("WARMROUTE_FLEET_SECRET", "of-another-fleet-altogether")
        report = await examined(*replicas)
        assert "but here another one is set" in found(report)["sim1", "fleet-secret"]
        monkeypatch.setenv("WARMROUTE_FLEET_SECRET", secret)
        report = await examined(*replicas)
    assert ("sim1", "fleet-secret") not in found(report)
    assert ("sim1", "agent") in found(report, Level.OK)
    assert ("sim1", "fleet-secret") in found(report, Level.OK)


async def test_an_agent_that_asks_for_none_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMROUTE_FLEET_SECRET", "known-to-the-fleet-alone")
    async with two(one=AgentServer()) as (_, _, entries):
        report = await examined(*entries)
    told = found(report, Level.NOTE)["one", "fleet-secret"]
    assert "answers every caller" in told


async def test_nixl_connector_is_probed_where_a_role_says_that_it_runs() -> None:
    """One answers a first leg with where its KV is, the other ignores what it is asked for."""
    asked: list[dict[str, Any]] = []

    async def hand_over(body: dict[str, Any]) -> dict[str, Any] | None:
        if "kv_transfer_params" not in body:
            return None  # the probe of KV events
        asked.append(body)
        where = {"remote_engine_id": "e", "remote_host": "10.0.0.1", "remote_port": 5600}
        return {"kv_transfer_params": where}

    async def ignore(body: dict[str, Any]) -> dict[str, Any]:
        return {"kv_transfer_params": None}

    async with two() as (one, other, entries):
        one.completion, other.completion = hand_over, ignore
        entries[0]["nixl_role"], entries[1]["nixl_role"] = "prefill", "decode"
        report = await examined(*entries)
        assert not asked and ("two", "nixl") not in found(report), "nothing is sent without --probe"
        report = await examined(*entries, probe=True)
        assert "reach it at 10.0.0.1:5600" in found(report, Level.OK)["one", "nixl"]
        told = found(report)["two", "nixl"]
        assert "NixlConnector does not run there" in told and "--kv-transfer-config" in told
        assert [each["kv_transfer_params"]["do_remote_decode"] for each in asked] == [True]
        assert asked[0]["max_tokens"] == 1
        other.completion = None
        report = await examined(*entries, probe=True)
        assert "got 500: out of order" in found(report)["two", "nixl"]


@pytest.mark.parametrize(
    ("nbytes", "level", "told"),
    [
        (90e6, None, ""),
        (1.5e9, Level.NOTE, "at 0.38 GB/s: computing may be faster"),
        (40e9, Level.OK, "at 10 GB/s"),
    ],
)
async def test_slow_pulls_are_told(nbytes: float, level: Level | None, told: str) -> None:
    async with two() as (one, _, entries):
        entries[0]["nixl_role"], entries[1]["nixl_role"] = "decode", "prefill"
        one.metrics = (
            f'vllm:nixl_bytes_transferred_sum{{engine="0"}} {nbytes}\n'
            'vllm:nixl_xfer_time_seconds_sum{engine="0"} 4.0\n'
        )
        report = await examined(*entries)
    assert told in found(report, level or Level.OK).get(("one", "nixl-pulls"), "")
    levels = [
        each.level
        for section in report.sections
        for each in section.findings
        if each.check == "nixl-pulls"
    ]
    assert levels == ([] if level is None else [level])


@pytest.mark.parametrize(
    ("roles", "alone"),
    [
        (("both", "both"), set()),
        (("prefill", "decode"), set()),
        (("both", None), {"one can prefill for no replica", "one can decode for no replica"}),
        (("decode", "decode"), {"one, two can decode for no replica"}),
    ],
)
async def test_a_nixl_role_that_no_other_replica_completes(
    roles: tuple[str | None, ...], alone: set[str]
) -> None:
    async with two() as (_, _, entries):
        for entry, role in zip(entries, roles, strict=True):
            entry["nixl_role"] = role
        report = await examined(*entries)
        told = [
            each.line
            for section in report.sections
            for each in section.findings
            if each.check == "nixl-pairs"
        ]
        assert len(told) == len(alone)
        assert all(any(each in line for line in told) for each in alone), told


async def test_replicas_of_two_models_are_no_pair() -> None:
    async with two() as (_, other, entries):
        other.models = [{"id": "n", "root": "/no/other"}]
        entries[0]["nixl_role"], entries[1]["nixl_role"] = "prefill", "decode"
        report = await examined(*entries)
        assert (
            "nixl_role: two can decode for no replica" in found(report)["the fleet", "nixl-pairs"]
        )
