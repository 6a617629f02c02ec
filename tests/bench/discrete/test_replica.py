"""One replica in model time: 10 ms a step, 1 ms a prefilled token, 10 ms a decode."""

import asyncio

import pytest

from bench.discrete.conversation import Conversation
from bench.workloads.session import Span
from replay.replica import AnswerCutError, ModelReplica, ReplicaDownError, numbers_of
from router.index.prompt_keys import KvTier
from tests.bench.discrete.building import (
    BLOCK,
    Heard,
    Told,
    in_model_time,
    machine,
    prompt,
    served,
)


@in_model_time
async def test_a_cold_prompt_takes_its_steps_and_its_prefill() -> None:
    replica = ModelReplica(0, machine())
    heard = Heard()
    await asyncio.sleep(1.0)
    serving = replica.submit(prompt(150, answer=3), 3, heard)
    await serving.done
    # 100 tokens and 50 in a step each, then two decodes of 10 + 10 ms.
    assert heard.first_s == [pytest.approx(1.0 + 0.11 + 0.06)]
    assert asyncio.get_running_loop().time() == pytest.approx(1.17 + 2 * 0.02)
    assert serving.request.cached.total == 0


@in_model_time
async def test_the_next_turn_finds_what_was_said_and_answered() -> None:
    replica = ModelReplica(0, machine())
    said = Conversation(BLOCK)
    await served(replica, said.turn([Span(1, 100)], Span(-1, 21)), 21)
    # Of 120 tokens that were run all are there; the 121st, and 29 more, are computed.
    took_s = await served(replica, said.turn([Span(2, 29)], Span(-2, 1)))
    assert took_s == pytest.approx(0.01 + 0.03)


@in_model_time
async def test_two_prompts_share_a_step() -> None:
    replica = ModelReplica(0, machine())
    first, second = await asyncio.gather(
        served(replica, prompt(40, text=1)), served(replica, prompt(40, text=2))
    )
    assert first == pytest.approx(0.05)
    assert second == pytest.approx(0.1)  # it came while the other's step went on


@in_model_time
async def test_what_the_gpu_lost_comes_from_ram() -> None:
    replica = ModelReplica(0, machine(gpu_tokens=200))
    await served(replica, prompt(100, text=1))
    await served(replica, prompt(200, text=2))
    serving = replica.submit(prompt(99, text=1), 1, Heard())
    await serving.done
    assert (serving.request.cached.gpu, serving.request.cached.cpu) == (0, 80)
    # 80 tokens are loaded in 8 ms; 19 are computed.
    assert serving.request.first_token_s == pytest.approx(0.11 + 0.22 + 0.008 + 0.029)


@in_model_time
async def test_what_ram_lost_comes_from_disk() -> None:
    replica = ModelReplica(0, machine(gpu_tokens=200, cpu_tokens=200))
    await served(replica, prompt(100, text=1))
    await asyncio.sleep(1.0)
    await served(replica, prompt(200, text=2))
    await asyncio.sleep(1.0)
    serving = replica.submit(prompt(79, text=1), 1, Heard())
    await serving.done
    assert (serving.request.cached.cpu, serving.request.cached.disk) == (0, 60)
    # Three chunks of 40 ms, 60 tokens loaded in 6, 19 computed in 29.
    assert serving.request.first_token_s is not None
    took_s = serving.request.first_token_s - serving.request.arrived_s
    assert took_s == pytest.approx(0.12 + 0.006 + 0.029)


@in_model_time
async def test_a_chunk_can_be_found_in_ram_when_it_has_been_stored() -> None:
    replica = ModelReplica(0, machine(store_tokens_per_s=100.0))
    chunks = prompt(40).keys[1::2]
    await served(replica, prompt(40))
    assert replica.engine.match(chunks) == []
    await asyncio.sleep(0.39)
    assert replica.engine.match(chunks) == []
    await asyncio.sleep(0.02)
    assert replica.engine.match(chunks) == ["cpu", "cpu"]


@in_model_time
async def test_a_listener_hears_what_each_tier_holds() -> None:
    replica, told = ModelReplica(3, machine(gpu_tokens=100, cpu_tokens=40)), Told()
    replica.listeners.append(told)
    one, other = numbers_of(prompt(60, text=1)), numbers_of(prompt(80, text=2))
    await served(replica, prompt(60, text=1))
    await asyncio.sleep(1.0)
    assert told.of(3, KvTier.GPU) == set(one)
    # A chunk goes by its last block; two of the three found room, and one was written.
    assert told.of(3, KvTier.CPU) == set(one[1:4:2])
    assert told.of(3, KvTier.DISK) <= told.of(3, KvTier.CPU)
    await served(replica, prompt(80, text=2))
    await asyncio.sleep(1.0)
    assert told.of(3, KvTier.GPU) == {*one[:2], *other}


@in_model_time
async def test_a_prompt_that_the_gpu_cannot_hold_is_refused_and_nothing_else_happens() -> None:
    replica = ModelReplica(0, machine(gpu_tokens=100))
    other = asyncio.create_task(served(replica, prompt(50)))
    await asyncio.sleep(0.0)
    with pytest.raises(ValueError, match="do not fit"):
        replica.submit(prompt(150), 1, Heard())
    assert await other == pytest.approx(0.06)
    replica.model.check()


@in_model_time
async def test_who_dies_cuts_its_answers_and_takes_no_more() -> None:
    replica = ModelReplica(0, machine())
    running = replica.submit(prompt(100, answer=50), 50, Heard())
    waiting = replica.submit(prompt(100, text=2), 1, Heard())
    await asyncio.sleep(0.15)
    replica.die()
    for each in (running, waiting):
        with pytest.raises(AnswerCutError):
            await each.done
    with pytest.raises(ReplicaDownError):
        replica.submit(prompt(10), 1, Heard())
    replica.model.check()
    replica.engine.check()


@in_model_time
async def test_who_returns_has_its_disk_and_nothing_else() -> None:
    replica, told = ModelReplica(0, machine()), Told()
    replica.listeners.append(told)
    await served(replica, prompt(99))
    await asyncio.sleep(1.0)
    replica.die()
    assert told.cleared_replicas == [0]
    assert not told.of(0, KvTier.GPU) | told.of(0, KvTier.CPU)
    assert len(told.of(0, KvTier.DISK)) == 4
    replica.come_back()
    serving = replica.submit(prompt(99), 1, Heard())
    await serving.done
    cached = serving.request.cached
    assert (cached.gpu, cached.cpu, cached.disk) == (0, 0, 80)


@in_model_time
async def test_an_answer_that_ends_as_its_replica_dies_is_whole() -> None:
    replica, heard = ModelReplica(0, machine()), Heard()
    rates = machine().rates
    ends_s = rates.step_s + rates.prefill_s(90)
    # Asked for first, so that it comes before the replica's own timer of that moment.
    asyncio.get_running_loop().call_at(ends_s, replica.die)
    serving = replica.submit(prompt(90), 1, heard)
    await serving.done
    assert heard.first_s == [ends_s]
    assert not replica.is_alive


@in_model_time
async def test_what_was_being_read_as_its_replica_died_is_computed_anew() -> None:
    replica = ModelReplica(0, machine(gpu_tokens=200, cpu_tokens=200))
    for text in (1, 2):
        await served(replica, prompt(100 * text, text=text))
        await asyncio.sleep(1.0)
    serving = replica.submit(prompt(79, text=1), 1, Heard())
    await asyncio.sleep(0.01)
    replica.die()
    with pytest.raises(AnswerCutError):
        await serving.done
    replica.come_back()
    assert await served(replica, prompt(79, text=1)) == pytest.approx(0.089)
    await asyncio.sleep(1.0)
    replica.model.check()
    replica.engine.check()


@in_model_time
async def test_noise_is_a_seeds_and_a_replicas_own() -> None:
    async def took_s(slot: int, seed: int, noise: float) -> float:
        return await served(ModelReplica(slot, machine(), seed=seed, noise=noise), prompt(90))

    quiet_s = await took_s(0, 1, 0.0)
    noisy_s = await took_s(0, 1, 0.1)
    assert quiet_s == pytest.approx(0.1)
    assert noisy_s != pytest.approx(quiet_s)
    assert 0.05 < noisy_s < 0.2
    assert await took_s(0, 1, 0.1) == pytest.approx(noisy_s)
    assert await took_s(1, 1, 0.1) != pytest.approx(noisy_s)
    assert await took_s(0, 2, 0.1) != pytest.approx(noisy_s)
