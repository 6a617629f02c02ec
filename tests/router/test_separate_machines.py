"""A router that sees nothing of its replicas' disks: what it tokenizes with, and what it says.

The replicas are simulated ones with real engines and agents, in a process of their own. They name
their model by a path that is relative to their directory, so it leads nowhere in the router's.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from blockbuster import blockbuster_ctx

from router.config.settings import ReplicaConfig, RouterConfig, TimeoutsConfig, TokenizerConfig
from router.doctor.findings import Level
from simulator.model.replica_machine import Shape
from tests.router.agent_server import until
from tests.router.conftest import Running, run_router
from tests.router.doctor.replicas import examined, found
from tests.router.prompt.helpers import limit_questions

ROOT = Path(__file__).parents[2]
SECRET = "known-to-this-fleet-alone"
CHAT = "/v1/chat/completions"
TIERS = ("gpu", "cpu")
REPLICAS = """
import asyncio, json, sys
from pathlib import Path
from simulator.simulated_fleet import run
from simulator.simulator_settings import SimulatorSettings
from warmroute_common.fleet_secret import FleetSecret
settings = SimulatorSettings(
    directory=Path("models"), replicas=2, cpu_tokens=8192, disk_tokens=0, speed=50,
    fleet_secret=FleetSecret(sys.argv[1]),
)
asyncio.run(run(settings, lambda where: print(json.dumps(where), flush=True)))
"""


@contextmanager
def simulated(directory: Path) -> Iterator[dict[str, Any]]:
    """Run two replicas in a directory of their own; give what they say of themselves."""
    directory.mkdir()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", REPLICAS, SECRET]
    with subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


@dataclass
class Apart:
    """The replicas, and how a router on another machine knows them."""

    where: dict[str, Any]
    tokenizer: Path
    cache: Path
    stack: AsyncExitStack

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The replicas as the configuration names them."""
        names = ("url", "agent_url", "instance_id")
        return [{name: each[name] for name in names} for each in self.where["replicas"]]

    async def router(self, **tokenizer: Any) -> Running:
        config = RouterConfig(
            port=0,
            replicas=tuple(ReplicaConfig(**each) for each in self.entries),
            tokenizer=TokenizerConfig(cache_directory=str(self.cache), **tokenizer),
            timeouts=TimeoutsConfig(health_interval_s=0.05, drain_s=60.0),
        )
        return await run_router(self.stack, config)


@pytest.fixture
async def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Apart]:
    monkeypatch.setenv("WARMROUTE_FLEET_SECRET", SECRET)
    with simulated(tmp_path / "replicas") as where:
        assert not Path(where["tokenizer"]).exists(), "the router's directory has no such path"
        async with AsyncExitStack() as stack:
            tokenizer = tmp_path / "replicas" / where["tokenizer"]
            yield Apart(where, tokenizer, tmp_path / "cache", stack)


def words(turn: int) -> str:
    return " ".join(f"word{turn}x{at}" for at in range(60))


async def turns(router: Running, client: aiohttp.ClientSession, count: int) -> list[dict[str, int]]:
    """Hold a conversation; return, of each turn, the router's counts and the replica's own."""
    messages: list[dict[str, str]] = []
    said = []
    for turn in range(count):
        messages.append({"role": "user", "content": words(turn)})
        body = {"model": "sim", "messages": messages, "max_tokens": 20}
        async with client.post(router.url + CHAT, json=body) as response:
            answer, headers = await response.json(), response.headers
            assert response.status == 200, answer
        usage = answer["usage"]
        said.append(
            {
                "prompt": int(headers["x-warmroute-prompt-tokens"]),
                "matched": sum(int(headers[f"x-warmroute-matched-{each}"]) for each in TIERS),
                "their_prompt": usage["prompt_tokens"],
                "their_cached": usage["prompt_tokens_details"]["cached_tokens"],
            }
        )
        messages.append(answer["choices"][0]["message"])
    return said


async def health(router: Running, client: aiohttp.ClientSession) -> dict[str, Any]:
    async with client.get(f"{router.url}/health") as response:
        body: dict[str, Any] = await response.json()
        return body


async def metric(router: Running, client: aiohttp.ClientSession, line: str) -> bool:
    async with client.get(f"{router.url}/metrics") as response:
        return line in (await response.text()).splitlines()


async def test_later_turns_match_exactly_by_tokens(
    apart: Apart, client: aiohttp.ClientSession
) -> None:
    """With nothing configured the agent's files are used, and its next router finds them."""
    apart.stack.enter_context(blockbuster_ctx("router"))
    router = await apart.router()
    tokens = router.parts.faults.tokens
    await until(lambda: tokens() == {"sim": "exact"})
    first, *later = await turns(router, client, 4)
    assert first["prompt"] == first["their_prompt"]
    for before, each in pairwise([first, *later]):
        assert each["prompt"] == each["their_prompt"]
        # All whole blocks of the turn before; those of its answer may still be on their way.
        whole = before["prompt"] - before["prompt"] % Shape().block_tokens
        assert 0 < whole <= each["matched"] <= each["their_cached"]
    assert (await health(router, client))["faults"] == {}
    assert await metric(router, client, 'warmroute_tokens_exact{model="sim"} 1.0')
    # The cache holds whole files: a router that starts again asks for none of them.
    (kept,) = apart.cache.iterdir()
    again = await apart.router()
    await until(lambda: again.parts.faults.tokens() == {"sim": "exact"})
    assert [kept] == [*apart.cache.iterdir()]


async def test_a_tokenizer_that_is_withheld_is_a_fault_everywhere(
    apart: Apart,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("router.faults._LASTING_S", 0.0)
    monkeypatch.setattr("router.faults._AGAIN_S", 1.0)
    monkeypatch.setattr("router.faults._EVERY_S", 0.0)
    for path in apart.tokenizer.iterdir():
        path.unlink()
    router = await apart.router(ask_replicas=False)
    tokens = router.parts.faults.tokens
    await until(lambda: "tokenizer is missing" in tokens().get("sim", ""))
    await turns(router, client, 2)
    body = await health(router, client)
    assert body["status"] == "ok", "requests are answered"
    assert "its tokenizer is missing: not on this machine" in body["faults"]["model 'sim'"]
    assert "no tokenizer files" in body["tokens"]["sim"], "why the agent did not send it"
    assert await metric(router, client, 'warmroute_tokens_exact{model="sim"} 0.0')
    await until(lambda: caplog.text.count("model 'sim': its tokenizer is missing") >= 2)
    port = int(router.url.rpartition(":")[2])
    settings = {"cache_directory": str(apart.cache), "ask_replicas": False}
    report = await examined(*apart.entries, port=port, tokenizer=settings)
    problems = found(report)
    assert "its tokenizer is missing" in problems["sim1", "tokenizer"]
    assert "the running router: model 'sim'" in problems["the router", "running"]


async def test_replicas_tokenize_for_a_router_without_the_tokenizer(
    apart: Apart,
    client: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its prompts are matched by exact tokens, and that is information instead of a fault."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("router.faults._EVERY_S", 0.0)
    monkeypatch.setattr("router.prompt.replica_tokenizer._LEAST_CHARS", 0)
    limit_questions(monkeypatch, 30.0)
    for path in apart.tokenizer.iterdir():
        path.unlink()
    router = await apart.router()
    tokens = router.parts.faults.tokens
    await until(lambda: "replicas are asked for the tokens" in tokens().get("sim", ""))
    first, *later = await turns(router, client, 4)
    assert first["prompt"] == first["their_prompt"]
    for before, each in pairwise([first, *later]):
        assert each["prompt"] == each["their_prompt"]
        whole = before["prompt"] - before["prompt"] % Shape().block_tokens
        assert 0 < whole <= each["matched"] <= each["their_cached"]
    assert all(each.is_exact for each in router.records)
    body = await health(router, client)
    assert body["faults"] == {}
    assert "no tokenizer files" in body["tokens"]["sim"], "why it is not the router's own"
    assert await metric(router, client, 'warmroute_tokens_exact{model="sim"} 1.0')
    results = "warmroute_replica_tokenize_results_total"
    assert await metric(router, client, f'{results}{{result="answered"}} 4.0')
    assert await metric(router, client, "warmroute_replica_tokenize_seconds_count 4.0")
    await until(lambda: "model 'sim': its tokenizer is missing" in caplog.text)
    report = await examined(*apart.entries, tokenizer={"cache_directory": str(apart.cache)})
    assert found(report) == {}
    assert "are asked for the tokens" in found(report, Level.NOTE)["sim1", "tokenizer"]


async def test_doctor_on_another_machine_compares_with_the_agents_tokenizer(apart: Apart) -> None:
    cache = {"cache_directory": str(apart.cache)}
    report = await examined(*apart.entries, probe=True, tokenizer=cache)
    assert found(report) == {}
    assert "texts and chats" in found(report, Level.OK)["sim2", "tokens"]


async def test_a_tokenizer_that_arrives_late_ends_the_fault(
    apart: Apart,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("router.faults._LASTING_S", 0.0)
    monkeypatch.setattr("router.faults._EVERY_S", 0.0)
    hidden = apart.tokenizer / "hidden.json"
    await asyncio.to_thread((apart.tokenizer / "tokenizer.json").rename, hidden)
    router = await apart.router(ask_replicas=False)
    await until(lambda: "model 'sim': its tokenizer" in caplog.text)
    await asyncio.to_thread(hidden.rename, apart.tokenizer / "tokenizer.json")
    monkeypatch.setattr("router.feeds.health_monitor._MODELS_EVERY_PROBES", 1)
    await until(lambda: router.parts.faults.tokens() == {"sim": "exact"})
    await until(lambda: "model 'sim': this fault is over" in caplog.text)
