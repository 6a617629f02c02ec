"""The doctor's checks of KV events, with real publishers and with ports of other servers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from router.doctor import event_checks
from router.doctor.findings import Level
from router.index.prompt_keys import keys64
from router.prompt.prompt_reader import PromptReader
from tests.router.agent_server import AgentServer, serving
from tests.router.doctor.replicas import StandIn, examined, found
from tests.router.feeds.kv_publisher import KvPublisher, publisher, stored
from tests.router.prompt.chat_shapes import TEMPLATES
from tests.router.prompt.prompts_given import tokens
from tests.router.prompt.tokenizer_makers import llama3, write_model
from warmroute_common.keys import HashScheme

PROMPT = tokens(64)


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


@contextlib.asynccontextmanager
async def replica(**settings: Any) -> AsyncIterator[tuple[StandIn, dict[str, Any]]]:
    made = StandIn()
    async with serving(made.app()) as url:
        yield made, {"url": url, "instance_id": "one", **settings}


def published_at(source: KvPublisher) -> dict[str, str]:
    return {"kv_events": source.endpoint, "kv_replay": source.replay_endpoint}


def block(scheme: HashScheme) -> dict[str, Any]:
    return stored(keys64(PROMPT.chain(scheme, 16)), list(PROMPT.token_ids or ()))


async def test_events_that_are_not_published() -> None:
    async with replica() as (made, entry):
        assert "--kv-events-config" in found(await examined(entry))["one", "kv-events"]
        made.version = None
        report = await examined(entry)
    assert "the router guesses its KV" in found(report, Level.NOTE)["one", "kv-events"]
    assert found(report) == {}, "other servers publish none"


async def test_ports_that_are_no_publishers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_checks, "_FOLLOW_S", 0.3)
    async with replica() as (_, entry):
        closed = await examined({**entry, "kv_events": "tcp://127.0.0.1:1"})
        web_server = entry["url"].replace("http", "tcp")
        strange = await examined({**entry, "kv_events": web_server})
    assert "nothing listens at 127.0.0.1:1" in found(closed)["one", "kv-events"]
    assert "does not publish KV events" in found(strange)["one", "kv-events"]


async def test_messages_that_are_not_vllms(context: zmq.asyncio.Context) -> None:
    async with publisher(context) as source, replica(**published_at(source)) as (_, entry):
        source.keep_raw(b"\xc1")
        report = await examined(entry)
    assert "are not vLLM's KV events" in found(report)["one", "kv-events"]


async def test_events_that_are_not_replayed(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_checks, "_REPLAY_S", 0.3)
    async with publisher(context) as source, replica(kv_events=source.endpoint) as (_, entry):
        none = await examined(entry)
        closed = await examined({**entry, "kv_replay": "tcp://127.0.0.1:1"})
    assert "replays no KV events" in found(none, Level.NOTE)["one", "kv-replay"]
    assert "cannot be replayed: nothing listens" in found(closed)["one", "kv-replay"]


async def test_hashes(context: zmq.asyncio.Context) -> None:
    async with publisher(context) as source, replica(**published_at(source)) as (_, entry):
        report = await examined(entry)
        assert "--probe" in found(report, Level.NOTE)["one", "hash"]
        await source.publish(block(HashScheme("sha256", "42")))
        report = await examined(entry)
        assert "sha256 with PYTHONHASHSEED 42" in found(report, Level.OK)["one", "hash"]
        assert {check for _, check in found(report)} == {"tokenizer"}, "there is none of /no/model"
        report = await examined({**entry, "hash_seed": "7"})
        assert "hash_seed is '7' in the file" in found(report)["one", "hash-seed"]


async def test_data_parallel_ranks_behind_one_url(context: zmq.asyncio.Context) -> None:
    """However the endpoint of their KV events is known; only the first rank's are followed."""
    async with publisher(context) as source, replica(**published_at(source)) as (made, entry):
        made.metrics = "".join(f'vllm:cache_config_info{{engine="{at}"}} 1.0\n' for at in range(2))
        report = await examined(entry)
        assert "2 data-parallel ranks" in found(report)["one", "ranks"]
        made.metrics = made.metrics.splitlines()[0]
        assert ("one", "ranks") not in found(await examined(entry))


async def test_stock_replicas_whose_hashes_differ(context: zmq.asyncio.Context) -> None:
    async with publisher(context) as first, publisher(context) as second:
        await first.publish(block(HashScheme("sha256", "0")))
        await second.publish(block(HashScheme("sha256_cbor", "0")))
        async with replica(**published_at(first)) as (_, one), replica() as (_, two):
            report = await examined(one, {**two, "instance_id": "two", **published_at(second)})
    line = found(report, Level.NOTE)["the fleet", "hash-differs"]
    assert "sha256 with PYTHONHASHSEED 0 (one); sha256_cbor with PYTHONHASHSEED 0 (two)" in line


async def test_a_hash_that_cannot_be_found_out(context: zmq.asyncio.Context) -> None:
    async with publisher(context) as source, replica(**published_at(source)) as (_, entry):
        await source.publish(block(HashScheme("xxhash", "random")))
        report = await examined(entry)
    assert "PYTHONHASHSEED is not set there" in found(report)["one", "hash"]


async def test_an_agent_whose_hash_is_not_that_of_the_events(context: zmq.asyncio.Context) -> None:
    async with publisher(context) as source:
        ports = {"kv_events_port": source.port, "kv_replay_port": source.replay_port}
        agent = AgentServer(hash_seed="1", model="/no/model", **ports)
        await source.publish(block(HashScheme("sha256", "0")))
        async with serving(agent.app()) as agent_url, replica(agent_url=agent_url) as (_, entry):
            report = await examined(entry)
    assert "its agent says sha256 with PYTHONHASHSEED 1" in found(report)["one", "hash"]


# --- the probe


async def test_a_probe_that_is_answered_without_events(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_checks, "_PROBE_EVENTS_S", 0.1)
    async with publisher(context) as source, replica(**published_at(source)) as (made, entry):
        refused = await examined(entry, probe=True)
        asked: list[Any] = []

        async def complete(body: Any) -> None:
            asked.append(body)

        made.completion = complete
        silent = await examined(entry, probe=True)
        await examined(entry)
    assert "was answered with 500: out of order" in found(refused)["one", "probe"]
    assert "no KV event arrived" in found(silent)["one", "probe"]
    assert len(asked) == 1, "without --probe no prompt is sent"


@pytest.mark.parametrize("is_ours", [True, False])
async def test_a_probes_keys_are_compared(
    context: zmq.asyncio.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    wait = event_checks.EventRecorder.until
    # For the first event as long as it takes, then for the prompt's keys, which may never come.
    limits_s = iter((30.0, 30.0 if is_ours else 0.3))

    async def until(recorder: Any, condition: Any, timeout_s: float) -> None:
        await wait(recorder, condition, next(limits_s))

    monkeypatch.setattr(event_checks.EventRecorder, "until", until)
    model = write_model(tmp_path / "model", llama3(), TEMPLATES["parts"])
    reader = await asyncio.to_thread(PromptReader.load, model)
    async with publisher(context) as source, replica(**published_at(source)) as (made, entry):
        made.models = [{"id": "m", "root": str(model)}]
        made.tokens = lambda body: list(reader.read_now("/tokenize", body).token_ids or ())

        async def complete(body: Any) -> None:
            prompt = reader.read_now("/v1/completions", body)
            ids = list(prompt.token_ids or ())
            whole = len(ids) // 16 * 16
            if not is_ours:  # the replica sees other tokens, and hashes those
                ids = [each + 1 for each in ids]
            chain = HashScheme().chain(ids[:whole], block_tokens=16)
            await source.publish(stored(keys64(chain), ids[:whole]))

        made.completion = complete
        report = await examined(entry, probe=True)
    if is_ours:
        assert "with the keys computed here" in found(report, Level.OK)["one", "probe"]
        assert found(report) == {}
    else:
        assert "have other keys than computed here" in found(report)["one", "probe"]
