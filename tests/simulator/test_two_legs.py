"""A real router in front of simulated replicas that pull KV from each other. Decisions are
scripted: which replica prefills for which request."""

import asyncio
import json
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.config.settings import (
    RatesConfig,
    ReplicaConfig,
    RouterConfig,
    TimeoutsConfig,
    TokenizerConfig,
)
from router.fleet.decision import Decision
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica, ReplicaState
from router.proxy.remote_prefill import RemotePrefill
from router.proxy.upstream import ReplicaAnswer
from router.record.records import Cause, RequestRecord
from simulator.openai_prompts import NUM_WORDS, text_of
from tests.router.conftest import Running, Wait, eventually, run_router  # noqa: F401
from tests.router.proxy.helpers import prefilling_at
from tests.simulator.nixl_fleet import NixlFleet, nixl_fleet

PROMPT = text_of(range(100, 2100))
TOKENS = 8


async def routed(stack: AsyncExitStack, fleet: NixlFleet, **more: Any) -> Running:
    """A router in front of a fleet."""
    config = RouterConfig(
        port=0,
        replicas=tuple(
            ReplicaConfig(url=each.url, instance_id=each.name, nixl_role="both")
            for each in fleet.replicas
        ),
        tokenizer=TokenizerConfig(path=str(fleet.replicas[0].settings.tokenizer_directory)),
        rates=RatesConfig(**fleet.replicas[0].settings.router_rates()),
        timeouts=TimeoutsConfig(health_interval_s=0.05, health_timeout_s=1.0),
        **more,
    )
    return await run_router(stack, config)


async def asked(
    client: aiohttp.ClientSession, router: Running, text: str = PROMPT, **more: Any
) -> tuple[Any, aiohttp.ClientResponse]:
    body = {"model": "sim", "prompt": text, "max_tokens": TOKENS, **more}
    async with client.post(f"{router.url}/v1/completions", json=body) as response:
        return await response.json(), response


async def test_what_one_replica_computes_another_decodes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Wait,  # noqa: F811
) -> None:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(nixl_fleet(tmp_path, 2, speed=20))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        router = await routed(stack, fleet)
        seen: list[str] = []

        def other(decision: Decision, replicas: Fleet) -> Replica | None:
            seen.append(decision.replica_id)
            return next(each for each in replicas.replicas.values() if each.id != seen[-1])

        prefilling_at(monkeypatch, other)
        answer, response = await asked(client, router)
        assert answer["choices"][0]["text"] == fleet.answer(PROMPT, TOKENS)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        decoder = next(each for each in fleet.replicas if each.name == seen[0])
        prefiller = next(each for each in fleet.replicas if each is not decoder)
        assert response.headers["x-warmroute-prefiller"] == prefiller.name
        totals = prefiller.simulated.model.totals, decoder.simulated.model.totals
        assert [each.prefilled for each in totals] == [2000, 1]
        assert [each.pulled for each in totals] == [0, 1999]
        await eventually(lambda: prefiller.is_clean and decoder.is_clean)
        # The second turn of it: the prefiller has it in its cache, and `usage` says so.
        seen.clear()
        prefilling_at(monkeypatch, lambda decision, replicas: None)
        answer, _ = await asked(client, router)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1984
        assert router.in_flight() == 0


async def test_a_replica_that_refuses_the_second_leg_ends_the_loan(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Wait,  # noqa: F811
) -> None:
    """A lease ends in time where nobody pulls, and a pull of what is lent no more is wrong."""
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(nixl_fleet(tmp_path, 2, speed=20, kv_lease_s=2.0))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        one, two = fleet.replicas
        lend = {
            "model": "sim",
            "prompt": PROMPT,
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True},
        }

        async def ask(url: str, **body: Any) -> tuple[int, Any]:
            async with client.post(f"{url}/v1/completions", json=body) as response:
                return response.status, await response.json()

        async def lent() -> Any:
            _, answer = await ask(one.url, **lend)
            assert one.simulated.model.lent
            return answer["kv_transfer_params"]

        pull = {"model": "sim", "prompt": PROMPT, "max_tokens": TOKENS}
        params = await lent()
        status, _ = await ask(two.url, **{**pull, "n": 2}, kv_transfer_params=params)
        assert status == 400 and one.is_clean
        params = await lent()
        await eventually(lambda: one.is_clean)
        _, answer = await ask(two.url, **pull, kv_transfer_params=params)
        assert answer["choices"][0]["text"] != fleet.answer(PROMPT, TOKENS)
        two.simulated.clear_gpu()
        params = await lent()
        await one.kill()
        await one.start()
        status, answer = await ask(two.url, **pull, kv_transfer_params=params)
        assert status == 500


async def test_a_router_that_stood_still_lets_nobody_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease ends while the first leg's answer lies in the router's socket."""
    monkeypatch.setattr("router.proxy.remote_prefill._LEASE_S", 0.5)
    monkeypatch.setattr("router.app._TICK_S", 0.05)
    read = RemotePrefill._read

    async def stands_still(legs: RemotePrefill, answer: ReplicaAnswer) -> bytes:
        time.sleep(1.2)  # noqa: ASYNC251  (the whole process stands still)
        return await read(legs, answer)

    monkeypatch.setattr(RemotePrefill, "_read", stands_still)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(nixl_fleet(tmp_path, 2, speed=20, kv_lease_s=1.0))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        router = await routed(stack, fleet)
        await asyncio.sleep(0.2)
        prefilling_at(
            monkeypatch,
            lambda decision, replicas: next(
                each for each in replicas.replicas.values() if each.id != decision.replica_id
            ),
        )
        answer, response = await asked(client, router)
        assert "x-warmroute-prefiller" not in response.headers
        assert answer["choices"][0]["text"] == fleet.answer(PROMPT, TOKENS)


def words_from(first: int, count: int) -> str:
    """Return a text of ``count`` words, which begins again after the last one."""
    return text_of(word % NUM_WORDS for word in range(first, first + count))


async def test_the_router_itself_decides_which_prompts_are_prefilled_elsewhere(
    tmp_path: Path,
    eventually: Wait,  # noqa: F811
) -> None:
    """Long prompts between long answers: some have two legs, and every answer is right."""
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(nixl_fleet(tmp_path, 3, speed=10))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        router = await routed(stack, fleet)

        async def chat(number: int) -> list[str]:
            """Three turns with long answers, and then a long new prompt."""
            ends = []
            for turn in range(3):
                text = words_from(300 * number, 400 * (turn + 1))
                ends.append(
                    await one_answer(client, router, fleet, text, streamed=True, tokens=300)
                )
            text = words_from(37 * number, 9000)
            ends.append(await one_answer(client, router, fleet, text, streamed=True, tokens=24))
            return ends

        split: list[RequestRecord] = []
        first = 0
        while not split and first < 12 * 5:  # how much overlaps depends on the machine
            ends = await asyncio.gather(*map(chat, range(first, first + 12)))
            assert {end for each in ends for end in each} == {"right"}
            split = [each for each in router.records if each.first_leg is not None]
            first += 12
        assert split and len(split) < len(router.records)
        await eventually(lambda: all(each.is_clean for each in fleet.replicas))
        assert router.in_flight() == 0


KILLS = 200


def could_be_retried(record: RequestRecord) -> bool:
    """Whether the router gave up a request that another replica might have answered.

    After a replica that broke off, one more is asked: the request may be what kills them. If three
    replicas of four have failed it, the fourth may be the one that was just killed.
    """
    broke_off = [each for each in record.failed_tries if each.cause in (Cause.CUT, Cause.ERROR)]
    return len(broke_off) < 2 and len({each.replica_id for each in record.failed_tries}) < 3


@pytest.mark.slow
async def test_replicas_killed_at_random_instants(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Wait,  # noqa: F811
) -> None:
    """Prefillers, decoders and side channels, 200 times: no wrong answer, no request lost that
    could be retried, nothing lent or in flight in the end."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")  # noqa: T201  (to repeat it)
    choice = random.Random(seed)
    monkeypatch.setattr("router.proxy.remote_prefill._LEASE_S", 0.7)
    monkeypatch.setattr("router.app._TICK_S", 0.05)
    ends: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        # Longer than this machine, where all of them are one process, ever stands still.
        fleet = await stack.enter_async_context(nixl_fleet(tmp_path, 4, speed=10, kv_lease_s=5.0))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        router = await routed(stack, fleet, retries=10)

        def any_other(decision: Decision, replicas: Fleet) -> Replica | None:
            able = [
                each
                for each in replicas.replicas.values()
                if each.state is ReplicaState.UP
                and each.nixl_role
                and each.id != decision.replica_id
            ]
            return choice.choice(able) if able and choice.random() < 0.8 else None

        prefilling_at(monkeypatch, any_other)
        is_over = asyncio.Event()

        async def use(number: int) -> None:
            turn = 0
            while not is_over.is_set():
                turn += 1
                first = choice.randrange(4000)
                text = text_of(range(first, first + choice.randrange(200, 3000)))
                streamed = bool((number + turn) % 2)
                ends[await one_answer(client, router, fleet, text, streamed=streamed)] += 1

        users = [asyncio.create_task(use(number)) for number in range(8)]
        for _ in range(KILLS):
            await asyncio.sleep(choice.uniform(0.0, 0.1))
            victim = choice.choice(fleet.replicas)
            if choice.random() < 0.2:
                restore = victim.cut_side_channel()
                await asyncio.sleep(choice.uniform(0.0, 0.03))
                restore()
                continue
            await victim.kill()
            await asyncio.sleep(choice.uniform(0.0, 0.03))
            await victim.start()
        is_over.set()
        await asyncio.gather(*users)
        await eventually(lambda: all(each.is_clean for each in fleet.replicas))
        for each in router.parts.fleet.replicas.values():
            assert (each.waiting, each.decoding, each.fetching) == (0, 0, 0)
        legs = sum(each.first_leg is not None for each in router.records)
        causes = Counter(
            f"{each.cause}{' (first leg)' if each.is_prefill else ''}"
            for record in router.records
            for each in record.failed_tries
        )
        print(f"{dict(ends)}; {legs} answers with two legs; failed tries: {dict(causes)}")  # noqa: T201
        assert not ends["wrong"]
        lost = [each for each in router.records if each.status not in (200, None)]
        assert not [each.failed_tries for each in lost if could_be_retried(each)]
        assert legs > KILLS and causes


async def one_answer(
    client: aiohttp.ClientSession,
    router: Running,
    fleet: NixlFleet,
    text: str,
    *,
    streamed: bool,
    tokens: int = 24,
) -> str:
    """Ask, and say how that ended: right, cut (the beginning of the right answer), lost, wrong."""
    body = {"model": "sim", "prompt": text, "max_tokens": tokens, "stream": streamed}
    async with client.post(f"{router.url}/v1/completions", json=body) as response:
        whole = await response.text()
        if response.status != 200:
            return "lost"
    right = fleet.answer(text, tokens)
    if not streamed:
        return "right" if json.loads(whole)["choices"][0]["text"] == right else "wrong"
    events = [json.loads(each[6:]) for each in whole.split("\n\n") if each.startswith("data: {")]
    told = "".join(each["choices"][0]["text"] for each in events if "error" not in each)
    if told == right:
        return "right"
    return "cut" if right.startswith(told) and any("error" in each for each in events) else "wrong"
