"""Fixed roles: who prefills, who decodes, and what becomes of it before model replicas."""

from collections.abc import Sequence
from itertools import count

import pytest

from bench.discrete.play import Contender, FleetOptions, StoppableRouter, play_with
from bench.discrete.rule_router import RuleRouter
from bench.discrete.rules.catalogue import LeastLoaded, splits
from bench.discrete.rules.fixed_split import FixedSplit
from bench.discrete.rules.rule import Asked
from replay.replica import ModelReplica
from simulator.model.replica_machine import Machine
from tests.bench.discrete.building import talk


def asked(number: int, tokens: int = 1_000) -> Asked:
    return Asked(
        id=number, blocks=range(tokens // 10), block_tokens=10, prompt_tokens=tokens, session=None
    )


def made(*, held_blocks: int = 0, non_cached_tokens: int = 0) -> FixedSplit:
    return FixedSplit(
        2,
        prefill=LeastLoaded(4),
        decode=LeastLoaded(4),
        matched=lambda asked, replica, now_s: held_blocks,
        non_cached_tokens=non_cached_tokens,
    )


def test_the_first_replicas_prefill_and_the_others_decode() -> None:
    rule = made()
    decoders = [rule.pick(asked(number), range(4), 0.0) for number in range(4)]
    assert decoders == [2, 3, 2, 3]
    firsts = [rule.prefiller(asked(number), 2, range(4), 0.0) for number in range(4)]
    assert firsts == [0, 1, 0, 1]
    rule.prefilled(0, 1.0)
    assert rule.prefiller(asked(4), 2, range(4), 1.0) == 0, "it has one less than the other"


def test_a_prompt_is_prefilled_where_it_decodes_if_little_is_lacking_or_nobody_else_can() -> None:
    def first(rule: FixedSplit, healthy: Sequence[int] = range(4)) -> int | None:
        return rule.prefiller(asked(1), rule.pick(asked(1), healthy, 0.0), healthy, 0.0)

    assert first(made(held_blocks=95, non_cached_tokens=100)) is None
    assert first(made(held_blocks=90, non_cached_tokens=100)) == 0
    assert first(made(), [2, 3]) is None
    assert first(made(), [0, 1]) is None
    assert made().pick(asked(1), [0, 1], 0.0) == 0


@pytest.mark.parametrize("name", ["llm-d-6+2", "llm-d-2000-5+3", "vllm-router-7+1"])
def test_prompts_are_pulled_and_nothing_stays_lent(name: str) -> None:
    texts = count(1)
    given = [
        talk((3_000, 40), (200, 40), start_s=0.1 * at, name=f"s{at}", texts=texts)
        for at in range(24)
    ]
    kept: list[ModelReplica] = []

    def make(replicas: Sequence[ModelReplica], seed: int) -> StoppableRouter:
        kept.extend(replicas)
        known = splits(8, 64, seed, prefill_tokens_per_s=8_000.0)
        return RuleRouter(replicas, known[name]())

    run = play_with(Contender(make=make), given, FleetOptions(machine=Machine(), noise=0.0))
    assert all(each.ok for each in run.records)
    decoders = {"llm-d-6+2": 2, "llm-d-2000-5+3": 3, "vllm-router-7+1": 1}[name]
    served_by = {each.instance_id for each in run.records}
    assert served_by <= {f"r{slot}" for slot in range(8 - decoders, 8)}
    # By tokens, second turns are prefilled where their first ones were decoded.
    assert run.counts["remote_prefills"] == (24 if "2000" in name else 48)
    assert not any(each.model.lent for each in kept)
    assert sum(each.model.totals.pulled for each in kept) >= 24 * 2_999, (
        "the last token is computed"
    )
