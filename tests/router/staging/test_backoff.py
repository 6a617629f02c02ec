"""An agent that hangs or fails costs a request no more than its gain, and later ones nothing."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from router.agent_client import AgentTimeoutError
from router.config.settings import PrefetchConfig, ReplicaConfig, RouterConfig
from router.fleet.decision import Decision, KvCopy
from router.fleet.fleet import Fleet
from router.staging.stager import Stager, StagingResult
from tests.router.staging.helpers import KEYS, decision
from warmroute_common.agent_protocol import Lora, MoveReply, MoveRequest, MoveStatus, PrefetchReply


class Agent:
    """Answers, fails, or hangs until it is told to fail."""

    def __init__(self) -> None:
        self.asked = 0
        self.fails = False
        self.hanging: asyncio.Event | None = None

    async def prefetch(
        self, keys: Sequence[bytes], *, wait_s: float, pin_s: float, lora: Lora | None = None
    ) -> PrefetchReply:
        await self._asked()
        return PrefetchReply(resident=0, promoted=len(keys), pending=0, missing=0, promoted_bytes=1)

    async def move(self, request: MoveRequest) -> MoveReply:
        await self._asked()
        return MoveReply(event_id="1", num_tokens=0)

    async def move_status(self, event_id: str, *, wait_s: float = 0.0) -> MoveStatus:
        count = len(KEYS)
        return MoveStatus(
            event_id=event_id, state="done", asked_chunks=count, arrived_chunks=count, moved_bytes=1
        )

    async def _asked(self) -> None:
        self.asked += 1
        if self.hanging is not None:
            await self.hanging.wait()
        if self.fails:
            raise AgentTimeoutError("no answer within 2 s")


class Stage:
    """A stager before one agent, and a clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.agent = Agent()
        config = RouterConfig(
            replicas=tuple(
                ReplicaConfig(url=f"http://{name}", instance_id=name, agent_url=f"http://{name}:2")
                for name in ("r", "source")
            ),
            prefetch=PrefetchConfig(wait_cap_s=60.0),
        )
        fleet = Fleet(config)
        fleet.replicas["source"].transfer_port = 1
        self.stager = Stager(config, fleet, lambda url: self.agent, lambda: self.now_s)

    async def prefetch(self, *, gain_s: float = 20.0) -> StagingResult:
        """Prepare; fail if that takes longer than any gain."""
        return await self._prepare(decision(gain_s))

    async def copy(self) -> StagingResult:
        copy = KvCopy(source_id="source", keys=KEYS, nbytes=1, expected_gain_s=20.0)
        return await self._prepare(replace(decision(keys=()), copy=copy))

    async def _prepare(self, asked: Decision) -> StagingResult:
        async with asyncio.timeout(40):
            return await self.stager.prepare(asked)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    yield made
    await made.stager.stop()


async def test_a_request_goes_after_its_gain_while_the_agent_hangs(stage: Stage) -> None:
    stage.agent.hanging = asyncio.Event()
    prepared = await stage.prefetch(gain_s=0.01)
    assert prepared.prefetch is not None
    assert (prepared.prefetch.timing, prepared.prefetch.pending) == ("late", len(KEYS))
    assert stage.agent.asked == 1


async def test_an_agent_that_hung_is_left_alone_for_longer_and_longer(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stage.agent.fails = True
    asked_at_s = []
    for _ in range(2000):
        before = stage.agent.asked
        prepared = await stage.prefetch()
        assert prepared.prefetch is not None and prepared.prefetch.timing == "failed"
        if stage.agent.asked > before:
            asked_at_s.append(stage.now_s)
        stage.now_s += 0.25
    gaps_s = [after - before for before, after in pairwise(asked_at_s)]
    assert gaps_s[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert set(gaps_s[6:]) == {60.0}, "not for ever"
    (line,) = [each for each in caplog.records if each.name == "warmroute.staging"]
    assert "staging KV at r" in line.getMessage() and line.levelno == logging.WARNING


async def test_the_calls_of_one_hang_are_one_failure(stage: Stage) -> None:
    """Of many requests that came before it was known none makes the interval longer."""
    stage.agent.hanging, stage.agent.fails = asyncio.Event(), True
    many = [asyncio.create_task(stage.prefetch()) for _ in range(20)]
    while stage.agent.asked < 20:  # noqa: ASYNC110  (an agent signals nothing)
        await asyncio.sleep(0)
    stage.agent.hanging.set()
    await asyncio.gather(*many)
    stage.now_s += 1.0
    await stage.prefetch()
    assert stage.agent.asked == 21


async def test_only_one_request_at_a_time_tries_whether_it_answers_again(stage: Stage) -> None:
    stage.agent.fails = True
    await stage.prefetch()
    stage.agent.hanging = asyncio.Event()
    stage.now_s += 1.0
    await asyncio.gather(*(stage.prefetch(gain_s=0.01) for _ in range(20)))
    assert stage.agent.asked == 2


async def test_an_agent_that_answers_again_is_asked_each_time(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stage.agent.fails = True
    await stage.prefetch()
    stage.now_s += 1.0
    stage.agent.fails = False
    for _ in range(3):
        prepared = await stage.prefetch()
        assert prepared.prefetch is not None and prepared.prefetch.timing == "in-time"
    assert stage.agent.asked == 4
    assert "works again" in caplog.text


async def test_a_copy_is_not_asked_of_an_agent_that_hangs_either(stage: Stage) -> None:
    stage.agent.fails = True
    await stage.prefetch()
    prepared = await stage.copy()
    assert prepared.copy is not None and prepared.copy.timing == "failed"
    assert stage.agent.asked == 1
    stage.now_s += 1.0
    stage.agent.fails = False
    assert (await stage.copy()).copy is not None
    await stage.prefetch()
    assert stage.agent.asked == 3
