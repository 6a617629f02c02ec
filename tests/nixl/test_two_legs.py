"""Prefill on one stock vLLM, decode on another, by real NIXL. Most decisions are scripted."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.nixl.server import NixlServer
from bench.replica.text import real_text
from bench.replica.tiers import wait_until
from router.config.settings import NixlRole, ReplicaConfig, RouterConfig
from router.doctor.examination import examine
from router.doctor.findings import Level
from router.feeds.replica_answers import fetch, pulled
from router.proxy.remote_prefill import RemotePrefill
from router.record.records import Cause, Outcome
from tests.nixl.conftest import LEASE_S
from tests.nixl.routed import routed
from tests.router.agent_server import until
from tests.router.doctor.replicas import found

pytestmark = pytest.mark.nixl
Servers = dict[str, NixlServer]
TOKENS = 3000
KV_BYTES_PER_TOKEN = 8192
"""The small model has keys and values of 8 layers, 4 heads of 64, 2 bytes each."""
USAGE = "kv_cache_usage_perc"


def configs(servers: Servers) -> list[ReplicaConfig]:
    return [each.config for each in servers.values()]


def empty(servers: Servers) -> None:
    """Have no server hold KV of any prompt."""
    for each in servers.values():
        each.empty_gpu()


def until_free(server: NixlServer, within_s: float) -> None:
    """Wait until no request holds KV there, and none is lent."""
    wait_until(
        f"{server.name}: all blocks are free", lambda: not server.sample(USAGE), timeout_s=within_s
    )


async def test_the_doctor_finds_nixl_connector(servers: Servers) -> None:
    """Each server prefills a short prompt, whose blocks are freed when the lease ends."""
    config = RouterConfig(port=0, replicas=tuple(configs(servers)))
    report = await examine(config, source="router.yaml", probe=True)
    well = found(report, Level.OK)
    assert all("NixlConnector runs" in well[name, "nixl"] for name in servers)
    assert not any(check.startswith("nixl") for _, check in found(report))
    for each in servers.values():
        await asyncio.to_thread(until_free, each, 3 * LEASE_S)


async def test_a_prompt_prefilled_elsewhere_gets_the_answer_that_it_gets_locally(
    servers: Servers, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = real_text(TOKENS, seed=1)
    async with routed(configs(servers), model_dir, monkeypatch) as made:
        _, record = await made.ask(text)
        assert record.first_leg is None and record.cached_tokens == 0
        # With a processor's matrix units the last block's numbers depend on what is computed with
        # it. As after a pull, that is little when the prompt is in the replica's own cache.
        local, _ = await made.ask(text)
        await asyncio.to_thread(empty, servers)
        made.prefiller = "two"
        computed = servers["one"].sample("prompt_tokens_by_source", 'source="local_compute"')
        for streamed in (False, True):
            remote, record = await made.ask(text, stream=streamed)
            assert record.first_leg is not None and record.first_leg.replica_id == "two"
            assert (record.replica_id, remote) == ("one", local)
            assert not record.failed_tries
        # What it pulled it holds: the second time nothing is pulled, and the lender is told.
        left = servers["one"].sample("prompt_tokens_by_source", 'source="local_compute"')
        assert left - computed < 300, "the decoder computed less than two blocks each time"
        page = await fetch(made.client, servers["one"].config, "/metrics", timeout_s=30.0)
        nbytes, seconds = pulled((page or b"").decode())
        assert nbytes > 0.8 * TOKENS * KV_BYTES_PER_TOKEN and 0 < seconds < 60
        # In less time than a lease lasts.
        await asyncio.to_thread(until_free, servers["two"], LEASE_S / 2)
        await asyncio.to_thread(until_free, servers["one"], LEASE_S / 2)


async def test_the_router_has_a_prompt_prefilled_elsewhere_only_where_that_is_cheaper(
    servers: Servers, model_dir: Path
) -> None:
    """One server answers, the other prefills for it. Nothing is scripted."""
    roles: list[tuple[str, NixlRole]] = [("one", "decode"), ("two", "prefill")]
    replicas = [replace(servers[name].config, nixl_role=role) for name, role in roles]
    short, long = (real_text(tokens, seed=7) for tokens in (200, 7000))
    async with routed(replicas, model_dir, None) as made:
        fleet = made.router.parts.fleet
        await until(lambda: all(each.shape is not None for each in fleet.replicas.values()))
        _, record = await made.ask(short, 300)
        assert (record.replica_id, record.first_leg) == ("one", None), "nothing is slowed"
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(made.ask(short, 300, stream=True)) for _ in range(3)]
            await until(lambda: fleet.replicas["one"].decoding == len(running))
            said, record = await made.ask(long)
            assert record.replica_id == "one" and record.first_leg is not None
            assert (record.first_leg.replica_id, record.failed_tries) == ("two", [])
            again, record = await made.ask(long)
            assert (again, record.replica_id, record.first_leg) == (said, "one", None), "it is here"
        assert all(each.result()[1].replica_id == "one" for each in running)


async def test_a_long_prompt_does_not_stop_running_answers(
    servers: Servers, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that run at the same time are the same as answers that run alone."""
    short, long = (real_text(tokens, seed=2) for tokens in (200, 7000))
    async with routed(configs(servers), model_dir, monkeypatch) as made:
        alone, _ = await made.ask(short, 200)
        local, _ = await made.ask(long)
        await asyncio.to_thread(empty, servers)
        running = asyncio.create_task(made.ask(short, 200, stream=True))
        await asyncio.sleep(0.2)
        made.prefiller = "two"
        remote, record = await made.ask(long)
        assert record.first_leg is not None and record.first_leg.replica_id == "two"
        assert remote == local
        said, record = await running
        assert said == alone and record.replica_id == "one"


async def test_a_session_that_leaves_its_home_takes_its_kv_along(
    servers: Servers, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second turn is answered elsewhere; the home computes only the new part."""
    text = real_text(TOKENS, seed=3)
    async with routed(configs(servers), model_dir, monkeypatch) as made:
        said, _ = await made.ask(text, 64)
        turn = text + said + " And then?"
        await made.ask(turn)
        expected, _ = await made.ask(turn)  # from its own cache, as in the test above
        made.decoder, made.prefiller = "two", "one"
        moved, record = await made.ask(turn)
        assert (moved, record.replica_id) == (expected, "two")
        assert record.first_leg is not None and record.cached_tokens is not None
        assert record.cached_tokens > 0.9 * TOKENS, "the home had it"


async def test_kv_that_nobody_pulls_is_freed_when_its_lease_ends(
    servers: Servers, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client leaves between the legs."""
    left = asyncio.Event()
    async with routed(configs(servers), model_dir, monkeypatch) as made:
        made.prefiller = "two"
        prefill = RemotePrefill._prefill

        async def stops(self: RemotePrefill, leg: Any) -> Any:
            await prefill(self, leg)
            left.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(RemotePrefill, "_prefill", stops)
        asked = asyncio.create_task(made.ask(real_text(TOKENS, seed=4)))
        await left.wait()
        assert servers["two"].sample(USAGE)
        asked.cancel()
        record = await made.router.record()
        assert record.outcome is Outcome.CLIENT_GONE and not made.router.in_flight()
        await asyncio.to_thread(until_free, servers["two"], 3 * LEASE_S)


async def test_a_prefiller_that_is_killed_before_the_pull_costs_no_answer(
    servers: Servers, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM answers 500; the same replica then computes the prompt itself."""
    text = real_text(TOKENS, seed=5)
    async with routed(configs(servers), model_dir, monkeypatch) as made:
        local, _ = await made.ask(text)
        await asyncio.to_thread(empty, servers)
        made.prefiller = "two"
        prefill = RemotePrefill._prefill

        async def kills(self: RemotePrefill, leg: Any) -> Any:
            lent = await prefill(self, leg)
            await asyncio.to_thread(servers["two"].kill)
            return lent

        monkeypatch.setattr(RemotePrefill, "_prefill", kills)
        said, record = await made.ask(text)
        assert (said, record.replica_id) == (local, "one")
        assert [(each.replica_id, each.cause) for each in record.failed_tries] == [
            ("one", Cause.PULL)
        ]
        assert not made.router.in_flight()
