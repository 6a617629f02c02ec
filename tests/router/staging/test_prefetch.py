"""Prefetch before forward: what is asked, how long is waited, and that failing is harmless."""

from functools import partial
from typing import Any, Final

import aiohttp
import pytest
from aiohttp import web

from router.agent_client import AgentClient
from router.config.settings import PrefetchConfig, ReplicaConfig, RouterConfig
from router.fleet.decision import Decision
from router.fleet.fleet import Fleet
from router.staging.stager import PrefetchOutcome, Stager
from tests.router.agent_server import AgentServer, serving
from tests.router.staging.helpers import KEYS, decision
from warmroute_common.agent_protocol import PrefetchReply

PATIENT: Final = PrefetchConfig(wait_cap_s=60.0)
"""The gain alone limits the wait."""


async def run(
    agent_url: str | None,
    asked: Decision,
    prefetch: PrefetchConfig | None = None,
) -> PrefetchOutcome | None:
    replica = ReplicaConfig(url="http://r", instance_id="r", agent_url=agent_url)
    config = RouterConfig(replicas=(replica,), prefetch=prefetch or PrefetchConfig())
    async with aiohttp.ClientSession() as session:
        stager = Stager(config, Fleet(config), partial(AgentClient, session))
        return (await stager.prepare(asked)).prefetch


async def test_the_chunks_are_asked_for_and_the_answer_is_counted() -> None:
    agent = AgentServer()
    agent.prefetch_reply = PrefetchReply(
        resident=1, promoted=1, pending=0, missing=1, promoted_bytes=64_000
    )
    async with serving(agent.app()) as url:
        outcome = await run(url, decision(gain_s=20.0), PATIENT)
    request = agent.prefetches[0]
    assert request.keys == [key.hex() for key in KEYS]
    assert request.wait_s == pytest.approx(19.0)
    assert request.pin_s == 10.0
    assert outcome == PrefetchOutcome(asked=3, promoted=2, missing=1, promoted_bytes=64_000)


async def test_the_wait_is_capped() -> None:
    agent = AgentServer()
    async with serving(agent.app()) as url:
        await run(url, decision(gain_s=60.0), PrefetchConfig(wait_cap_s=20.0, pin_s=3.0))
    asked = agent.prefetches[0]
    assert asked.wait_s == pytest.approx(19.0), "so that it answers within the wait"
    assert asked.pin_s == 3.0


async def test_nothing_is_asked_for_where_there_is_nothing_to_gain() -> None:
    agent = AgentServer()
    async with serving(agent.app()) as url:
        assert await run(url, decision(keys=())) is None
        assert await run(url, decision(), PrefetchConfig(enabled=False)) is None
    assert await run(None, decision()) is None
    assert agent.prefetches == []


@pytest.mark.parametrize(
    ("counts", "timing"),
    [
        ({"promoted": 3}, "in-time"),
        ({"promoted": 2, "pending": 1}, "late"),
        ({"promoted": 1, "missing": 2}, "failed"),
        ({"pending": 3, "error": "no answer"}, "failed"),
    ],
)
def test_in_time_late_or_failed(counts: dict[str, Any], timing: str) -> None:
    assert PrefetchOutcome(asked=3, **counts).timing == timing


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_failed_prefetch_is_an_outcome(is_there: bool) -> None:
    async def fail(request: web.Request) -> web.Response:
        return web.json_response({"error": "broken"}, status=500)

    app = web.Application()
    app.router.add_post("/prefetch", fail)
    async with serving(app) as url:
        if is_there:
            outcome = await run(url, decision(gain_s=20.0), PATIENT)
    if not is_there:
        outcome = await run(url, decision(gain_s=20.0), PATIENT)
    assert outcome is not None
    assert (outcome.asked, outcome.pending, outcome.promoted) == (3, 3, 0)
    assert outcome.error is not None
