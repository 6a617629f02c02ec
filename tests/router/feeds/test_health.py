"""Which replicas are up, found by probes at intervals and by failed requests."""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest

from router.config.settings import ReplicaConfig, RouterConfig, TimeoutsConfig, TokenizerConfig
from router.feeds.health_monitor import HealthMonitor
from router.fleet.cost_model import CostPart
from router.fleet.fleet import Fleet
from router.prompt.prompt_source import PromptSource, ServedModel
from router.prompt.tokenizer_store import TokenizerAgent
from router.proxy.upstream import client_session
from router.record.records import Cause
from tests.router.conftest import Wait
from tests.router.host_names import resolve_hosts
from tests.router.scripted import raw_server, scripted


@dataclass
class Heard:
    """What a monitor told, in order."""

    states: list[str] = field(default_factory=list)
    served: list[list[ServedModel]] = field(default_factory=list)
    capacities: list[int] = field(default_factory=list)
    may_learn: asyncio.Event = field(default_factory=asyncio.Event)
    problems: list[Exception] = field(default_factory=list)
    """What learning of models fails with, before it works."""

    def __post_init__(self) -> None:
        self.may_learn.set()


class Told(Fleet):
    """A fleet that writes down what it is told."""

    def __init__(self, config: RouterConfig, heard: Heard) -> None:
        super().__init__(config)
        self._heard = heard

    def up(self, replica_id: str) -> None:
        super().up(replica_id)
        self._heard.states.append(f"{replica_id} up")

    def down(self, replica_id: str, why: str = "it does not answer") -> None:
        super().down(replica_id, why)
        self._heard.states.append(f"{replica_id} down")

    def set_kv_capacity(self, replica_id: str, tokens: int) -> None:
        super().set_kv_capacity(replica_id, tokens)
        self._heard.capacities.append(tokens)


class Prompts(PromptSource):
    """Prompts that write down of which models they learn."""

    def __init__(self, heard: Heard) -> None:
        super().__init__(TokenizerConfig())
        self._heard = heard

    async def learn(
        self,
        models: Sequence[ServedModel],
        *,
        session: aiohttp.ClientSession,
        url: str,
        headers: Mapping[str, str],
        agent: TokenizerAgent | None = None,
    ) -> None:
        self._heard.served.append(list(models))
        if self._heard.problems:
            raise self._heard.problems.pop()
        await self._heard.may_learn.wait()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with client_session() as session:
        yield session


@asynccontextmanager
async def monitoring(
    session: aiohttp.ClientSession, url: str, heard: Heard, **timeouts: float
) -> AsyncIterator[HealthMonitor]:
    replica = ReplicaConfig(url=url, instance_id="r")
    # A slow machine must not look like a replica that is silent.
    timeouts = {"health_timeout_s": 60.0} | timeouts
    config = RouterConfig(replicas=(replica,), timeouts=TimeoutsConfig(**timeouts))
    monitor = HealthMonitor(config, Told(config, heard), Prompts(heard), session)
    async with asyncio.timeout(20):
        await monitor.start()
    try:
        yield monitor
    finally:
        await monitor.stop()


async def test_all_is_known_once_it_has_started(session: aiohttp.ClientSession) -> None:
    heard = Heard()
    async with scripted() as replica, monitoring(session, replica.url, heard):
        assert heard.states == ["r up"]
        assert heard.served == [[ServedModel(id="m", root="m")]]


async def test_a_replica_is_up_while_its_tokens_are_compared(
    session: aiohttp.ClientSession, eventually: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its models are known by then. So is a replica that comes back, however busy it is."""
    monkeypatch.setattr("router.feeds.health_monitor._FIRST_PROBES_S", 0.01)
    heard = Heard()
    heard.may_learn.clear()
    async with (
        scripted() as replica,
        monitoring(session, replica.url, heard, health_interval_s=0.01) as monitor,
    ):
        await eventually(lambda: "r up" in heard.states)
        (watched,) = monitor._watched
        assert watched.models == frozenset({"m"})
        await eventually(lambda: len(heard.served) == 1)
        replica.healthy = False
        await eventually(lambda: heard.states[-1] == "r down")
        replica.healthy = True
        await eventually(lambda: heard.states[-1] == "r up")
        assert len(heard.served) == 1, "the first comparison has not ended"
        heard.may_learn.set()
        await eventually(lambda: len(heard.served) == 2)


@pytest.mark.parametrize(
    ("page", "capacities"),
    [
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0\n', [1600]),
        ('vllm:cache_config_info{block_size="16" 1.0\n', []),
    ],
)
async def test_a_replica_tells_its_kv_memory_if_it_can(
    session: aiohttp.ClientSession, page: str, capacities: list[int]
) -> None:
    heard = Heard()
    async with scripted() as replica:
        replica.metrics = page
        async with monitoring(session, replica.url, heard):
            assert (heard.states, heard.capacities) == (["r up"], capacities)


@pytest.mark.parametrize(("agent_url", "knows"), [(None, True), ("http://127.0.0.1:1", False)])
async def test_speeds_in_its_metrics_are_used_unless_an_engine_of_ours_measures_better(
    session: aiohttp.ClientSession,
    eventually: Wait,
    monkeypatch: pytest.MonkeyPatch,
    agent_url: str | None,
    knows: bool,
) -> None:
    monkeypatch.setattr("router.feeds.health_monitor._MODELS_EVERY_PROBES", 1)
    page = (
        "vllm:request_prefill_time_seconds_sum {0}\n"
        "vllm:request_prefill_kv_computed_tokens_sum {1}\n"
        "lmcache:retrieve_to_gpu_time_sum {0}\n"
        "lmcache:num_hit_tokens_total {1}\n"
        "vllm:inter_token_latency_seconds_sum {0}\n"
        "vllm:inter_token_latency_seconds_count {1}\n"
    )
    async with scripted() as upstream:
        replica = ReplicaConfig(url=upstream.url, instance_id="r", agent_url=agent_url)
        timeouts = TimeoutsConfig(health_interval_s=0.01)
        config, heard = RouterConfig(replicas=(replica,), timeouts=timeouts), Heard()
        fleet = Told(config, heard)
        monitor = HealthMonitor(config, fleet, Prompts(heard), session)
        upstream.metrics = page.format(1, 1_000)
        await monitor.start()
        upstream.metrics = page.format(2, 5_000)
        probed = len(heard.served)
        await eventually(lambda: len(heard.served) > probed + 2)
        await monitor.stop()
    rates = fleet.replicas["r"].rates
    known = {part for part in CostPart if rates.knows(part)}
    computing = {CostPart.PREFILL, CostPart.ATTENTION, CostPart.DECODE}
    assert known == {CostPart.OUTPUT_TOKEN} | ({*computing, CostPart.LOAD} if knows else set())
    assert rates.per_second(CostPart.OUTPUT_TOKEN) == pytest.approx(4_000)
    if knows:
        assert rates.per_second(CostPart.PREFILL) == pytest.approx(4_000)
        per_token = fleet.replicas["r"].kv_bytes_per_token
        assert rates.per_second(CostPart.LOAD) == pytest.approx(4_000 * per_token)


@pytest.mark.parametrize(("uncounted", "knows"), [(0, True), (1, False)])
async def test_prompts_whose_kv_was_pulled_do_not_make_a_replica_look_fast(
    session: aiohttp.ClientSession,
    eventually: Wait,
    monkeypatch: pytest.MonkeyPatch,
    uncounted: int,
    knows: bool,
) -> None:
    """It computed 4,000 tokens in 1 s; vLLM counts 100,000 that it pulled, too."""
    monkeypatch.setattr("router.feeds.health_monitor._MODELS_EVERY_PROBES", 1)
    page = (
        "vllm:request_prefill_time_seconds_sum {}\n"
        "vllm:request_prefill_kv_computed_tokens_sum {}\n"
        "vllm:inter_token_latency_seconds_sum 1.0\n"
        "vllm:inter_token_latency_seconds_count 100.0\n"
    )
    async with scripted() as upstream:
        heard = Heard()
        config = RouterConfig(
            replicas=(ReplicaConfig(url=upstream.url, instance_id="r", nixl_role="both"),),
            timeouts=TimeoutsConfig(health_interval_s=0.01),
        )
        fleet = Told(config, heard)
        replica = fleet.replicas["r"]
        replica.report_output_tokens(100.0, 10_000, 0.0)
        monitor = HealthMonitor(config, fleet, Prompts(heard), session)
        upstream.metrics = page.format(1, 1_000)
        await monitor.start()
        replica.pulled.ended, replica.pulled.counted_tokens = 10, 100_000
        replica.pulled.uncounted = uncounted
        upstream.metrics = page.format(2.1, 105_000)
        probed = len(heard.served)
        await eventually(lambda: len(heard.served) > probed + 2)
        await monitor.stop()
    assert replica.rates.knows(CostPart.PREFILL) == knows
    if knows:
        assert replica.rates.per_second(CostPart.PREFILL) == pytest.approx(4_000)


async def test_a_replica_without_a_health_endpoint_is_up(session: aiohttp.ClientSession) -> None:
    heard = Heard()
    async with scripted() as replica, monitoring(session, replica.url + "/prefix", heard):
        assert heard.states == ["r up"]
        assert heard.served == [], "it does not tell its models either"


async def test_ill_and_well_again(
    session: aiohttp.ClientSession, eventually: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard()
    async with (
        scripted() as replica,
        monitoring(session, replica.url, heard, health_interval_s=0.01),
    ):
        replica.healthy = False
        await eventually(lambda: heard.states[-1] == "r down")
        replica.healthy = True
        await eventually(lambda: len(heard.served) == 2)
    assert [*dict.fromkeys(heard.states)] == ["r up", "r down"]
    assert heard.states[-1] == "r up"
    assert f"r ({replica.url}) is down: /health answers 503" in caplog.text


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://127.0.0.1:1", "nothing listens at 127.0.0.1:1 (connection refused)"),
        ("http://no-such-host.invalid:8000", "the host name 'no-such-host.invalid' cannot be"),
    ],
)
async def test_a_replica_that_cannot_be_reached(
    session: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    problem: str,
) -> None:
    resolve_hosts(monkeypatch, {"no-such-host.invalid": None})
    heard = Heard()
    async with monitoring(session, url, heard, health_interval_s=3600):
        assert heard.states == ["r down"]
    assert f"r ({url}) is down: {problem}" in caplog.text


@pytest.mark.parametrize("cause", [Cause.CONNECT, Cause.CUT])
async def test_a_failed_request_is_only_a_reason_to_ask(
    session: aiohttp.ClientSession,
    eventually: Wait,
    caplog: pytest.LogCaptureFixture,
    cause: Cause,
) -> None:
    heard = Heard()
    async with (
        scripted() as replica,
        monitoring(session, replica.url, heard, health_interval_s=3600) as monitor,
    ):
        monitor.suspect("r", cause)
        assert heard.states == ["r up"]
        await eventually(lambda: len(heard.states) == 2)
        assert heard.states == ["r up", "r up"]
        assert "is down" not in caplog.text
        replica.healthy = False
        monitor.suspect("r", cause)
        await eventually(lambda: len(heard.states) == 3)
    assert heard.states[2] == "r down"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_a_router_without_resources_finds_no_replica_down(
    session: aiohttp.ClientSession,
    eventually: Wait,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    heard = Heard()
    probes = fail_to_connect(session, monkeypatch, OSError(number, os.strerror(number)))
    async with (
        scripted() as replica,
        monitoring(session, replica.url, heard, health_interval_s=0.001),
    ):
        probes.fail = True
        failed = probes.failed
        await eventually(lambda: probes.failed > failed + 10)
        assert "r down" not in heard.states
    assert caplog.text.count("the router has no resources to probe replicas") == 1


async def test_a_name_that_is_not_resolved_counts_only_after_a_while(
    session: aiohttp.ClientSession, eventually: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard()
    probes = fail_to_connect(session, monkeypatch, socket.gaierror(socket.EAI_AGAIN, "try again"))
    async with (
        scripted() as replica,
        monitoring(session, replica.url, heard, health_interval_s=3600) as monitor,
    ):
        probes.fail = True
        for each in range(1, 4):
            assert heard.states == ["r up"]
            monitor.suspect("r", Cause.CUT)
            await eventually(lambda: probes.failed == each)  # noqa: B023  (used at once)
        await eventually(lambda: heard.states == ["r up", "r down"])


@dataclass
class Connects:
    """Attempts to connect: whether they fail, and how many have."""

    fail: bool = False
    failed: int = 0


def fail_to_connect(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, problem: OSError
) -> Connects:
    """Have connections fail as aiohttp has them fail, while that is wanted."""
    connects, get = Connects(), session.get

    def gets(url: str, **more: Any) -> Any:
        if not connects.fail:
            return get(url, **more)
        connects.failed += 1
        kind = aiohttp.ClientConnectorError
        if isinstance(problem, socket.gaierror):
            kind = aiohttp.ClientConnectorDNSError
        raise kind(Mock(), problem)

    monkeypatch.setattr(session, "get", gets)
    return connects


async def test_silence_is_believed_only_after_a_while(
    session: aiohttp.ClientSession,
    eventually: Wait,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server accepts and says nothing: first well, then stuck for good."""
    heard = Heard()
    asked = 0
    stuck = asyncio.Event()
    get = session.get

    # Counted here: on a slow machine a question may be given up before the server has read it.
    def gets(url: str, **more: Any) -> Any:
        nonlocal asked
        asked += url.endswith("/health")
        return get(url, **more)

    monkeypatch.setattr(session, "get", gets)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not stuck.is_set():
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            await reader.read()

    async with (
        raw_server(serve) as url,
        monitoring(session, url, heard, health_interval_s=3600) as monitor,
    ):
        assert heard.states == ["r up"]
        # The first probe had the time that it needed; the next ones have little.
        monitor._timeouts = TimeoutsConfig(health_interval_s=0.01, health_timeout_s=0.05)
        stuck.set()
        asked = 0
        monitor.suspect("r", Cause.CUT)
        await eventually(lambda: len(heard.states) == 2)
        assert asked >= 3
    assert heard.states[1] == "r down"
    assert "is down: /health does not answer within 0.05 s" in caplog.text


async def test_a_probe_that_fails_unforeseen_is_not_the_last(
    session: aiohttp.ClientSession, eventually: Wait, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard(problems=[RuntimeError("nobody foresaw this")])
    async with (
        scripted() as replica,
        monitoring(session, replica.url, heard, health_interval_s=0.01),
    ):
        await eventually(lambda: len(heard.served) == 2)
    assert set(heard.states) == {"r up"}
    assert "probing it failed" in caplog.text


async def test_the_models_root_is_what_vllm_says(session: aiohttp.ClientSession) -> None:
    heard = Heard()
    async with scripted() as replica:
        replica.entries = [
            {"id": "served", "root": "/models/base", "parent": None, "max_model_len": 4096},
            {"id": "adapter", "root": "/adapters/a", "parent": "served"},
            {"name": "no id"},
        ]
        async with monitoring(session, replica.url, heard):
            pass
    assert heard.served == [
        [
            ServedModel(id="served", root="/models/base", max_model_len=4096),
            ServedModel(
                id="adapter", root="/models/base", adapter_path="/adapters/a", max_model_len=4096
            ),
        ]
    ]
