"""What the router's judgment makes of bursts, sessions and large fleets."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from math import inf
from statistics import mean
from typing import Final

import pytest

from bench.discrete.contenders import OURS, play
from bench.discrete.play import Contender, FleetOptions, StoppableRouter, play_with
from bench.workloads.session import Session, Span, Turn, prompt_tokens
from replay.our_router import OurRouter, Settings, with_sections
from replay.record import Record
from replay.replica import ModelReplica
from router.config.settings import AdmissionConfig, SessionConfig
from router.fleet.cost_model import CostPart
from simulator.model.replica_machine import Machine, Rates, Shape
from tests.bench.discrete.building import talk

FLEET: Final = FleetOptions(replicas=8, machine=Machine(cpu_tokens=40_000), noise=0.0)


class Kept:
    """Our router, and a look at it after a play."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.routers: list[OurRouter] = []

    def __call__(self, replicas: Sequence[ModelReplica], seed: int) -> StoppableRouter:
        self.routers.append(OurRouter(replicas, self._settings))
        return self.routers[-1]

    def play(self, sessions: Sequence[Session], options: FleetOptions) -> Sequence[Record]:
        return play_with(Contender(make=self), sessions, options).records

    def check(self) -> None:
        """Nothing is in flight, and the tables hold together."""
        for router in self.routers:
            assert all(each.in_flight == 0 for each in router.fleet.replicas.values())
            router.fleet.index.check()
            router.fleet.sessions.check()


def burst(requests: int, tokens: int, apart_s: float = 0.0) -> list[Session]:
    """Equal prompts, one after the other; they belong to no session."""
    return [Session(apart_s * at, (Turn((Span(1, tokens),), 1),)) for at in range(requests)]


def test_a_burst_is_computed_once_a_replica_and_stampedes_nobody() -> None:
    """100 equal prompts at once: replicas compute them, each once at most, and share the rest."""
    ours = Kept(Settings())
    records = ours.play(burst(100, 8_192), FLEET)
    ours.check()
    assert all(each.ok for each in records)
    computed = [each for each in records if each.computed_tokens > 4_096]
    assert len(computed) <= 8
    assert max(each.ttft_s or 0.0 for each in records) < 8_192 / 8_000 + 100 * 0.15


def test_a_burst_opens_all_replicas_while_it_is_still_read() -> None:
    """Each of 40 equal prompts comes 2 ms after the one before, as a router reads them."""
    records = play(OURS, burst(40, 8_063, apart_s=0.002), FLEET).records
    assert 7 <= sum(not each.cached_tokens["gpu"] for each in records) <= 8
    assert max(each.ttft_s or 0.0 for each in records) < 1.1 * 8_063 / 8_000


def test_late_binding_serves_the_short_ones_first() -> None:
    settings = with_sections(Settings(), admission=AdmissionConfig(dispatch_ahead_s=0.1))
    texts = count(1)

    def one(at_s: float, tokens: int) -> Session:
        return Session(at_s, (Turn((Span(next(texts), tokens),), 1),))

    warm = [one(0.0, 512)]
    long = [one(10.0, 51_200) for _ in range(2)]
    short = [one(10.1 + at, 512) for at in range(5)]
    ours = Kept(settings)
    records = ours.play([*warm, *long, *short], replace(FLEET, replicas=1))
    ours.check()
    served = sorted(records, key=lambda each: each.sent_s + (each.ttft_s or 0.0))
    assert [each.prompt_tokens for each in served[1:]] == [51_200, *[512] * 5, 51_200]


def conversations(
    sessions: int, turns: int, chooser: random.Random, answer_tokens: int = 20
) -> list[Session]:
    """Sessions behind one system prompt, each turn some seconds after the answer before."""
    texts = count(2)
    return [
        talk(
            *((chooser.randrange(500, 6_000), answer_tokens) for _ in range(turns)),
            start_s=chooser.uniform(0.0, 30.0),
            pause_s=chooser.uniform(5.0, 15.0),
            name=f"s{session}",
            texts=texts,
            shared=(Span(1, 512),),
        )
        for session in range(sessions)
    ]


def test_the_same_policy_code_runs_a_thousand_replicas() -> None:
    """Turns find their prefix, nothing leaks, and the router's tables hold together."""
    given = conversations(60, 3, random.Random(3))
    ours = Kept(with_sections(Settings(), sessions=SessionConfig(max_sessions=40)))
    small = Machine(cpu_tokens=20_000, disk_tokens=100_000)
    records = ours.play(given, replace(FLEET, replicas=1_000, machine=small))
    ours.check()
    assert all(each.ok for each in records)
    assert len(ours.routers[0].fleet.sessions) == 40
    computed = sum(each.computed_tokens for each in records)
    fresh = sum(turn.tokens + turn.output_tokens for each in given for turn in each.turns)
    # What is new must be computed once.
    assert computed <= 1.2 * fresh < prompt_tokens(given)


@pytest.mark.parametrize("seed", [5, 6, 7, 8])
def test_sessions_that_share_a_prompt_do_not_gather_on_one_replica(seed: int) -> None:
    """All begin with one prompt of tools, which the first to come has computed somewhere."""
    chooser = random.Random(seed)
    texts = count(2)
    given = [
        talk(
            *((chooser.randrange(1_000, 4_000), 200) for _ in range(6)),
            start_s=1.5 * number,
            pause_s=2.0,
            name=f"s{number}",
            texts=texts,
            shared=(Span(1, 16_000),),
        )
        for number in range(32)
    ]
    records = play(OURS, given, replace(FLEET, replicas=4)).records
    assert all(each.ok for each in records)
    firsts = Counter(each.instance_id for each in records if not each.turn)
    assert len(firsts) >= 3
    assert max(firsts.values()) <= 20
    assert mean(each.ttft_s or inf for each in records) < 0.9


def test_a_fleet_of_one_token_answers_that_are_not_streamed_learns_its_speed() -> None:
    """Four times as slow as the default."""
    slow = Machine(cpu_tokens=40_000, rates=Rates(prefill_tokens_per_s=2_000.0))
    talks = conversations(24, 5, random.Random(1), answer_tokens=1)
    never = [
        replace(each, turns=tuple(replace(turn, streamed=False) for turn in each.turns))
        for each in talks
    ]
    ours = Kept(Settings())
    records = ours.play(never, replace(FLEET, replicas=4, machine=slow))
    assert all(each.ok for each in records)
    for replica in ours.routers[0].fleet.replicas.values():
        assert replica.rates.per_second(CostPart.PREFILL) == pytest.approx(2_000, rel=0.25)


def test_sessions_find_their_kv_whatever_the_noise() -> None:
    found = before = 0
    for seed in range(1, 7):
        given = conversations(24, 5, random.Random(seed))
        records = play(OURS, given, replace(FLEET, noise=0.1, seed=seed)).records
        assert all(each.ok for each in records)
        found += sum(sum(each.cached_tokens.values()) for each in records if each.turn)
        before += sum(each.prompt_tokens for each in records if each.turn < 4)
    assert found >= 0.95 * before


def test_remote_prefills_keep_answers_fast_and_leave_nothing_lent() -> None:
    """A busy fleet: prompts gather at some replicas, and answers at others.

    Means are compared: the ratio of the p90 is 0.4 to 1.2 on four seeds, and says nothing.
    """
    texts = count(1)
    chooser = random.Random(1)
    given = [
        talk((6_000, 300), start_s=chooser.uniform(0.0, 60.0), texts=texts) for _ in range(220)
    ]
    rates = Rates(decode_s_per_sequence=5e-5, decode_s_per_context_token=2.7e-8)
    machine = Machine(cpu_tokens=40_000, shape=Shape(gpu_tokens=400_000), rates=rates)
    fleet = replace(FLEET, replicas=4, machine=machine)

    def per_token_s(settings: Settings) -> tuple[float, float]:
        kept: list[ModelReplica] = []
        ours = Kept(settings)

        def make(replicas: Sequence[ModelReplica], seed: int) -> StoppableRouter:
            kept.extend(replicas)
            return ours(replicas, seed)

        run = play_with(Contender(make=make), given, fleet)
        ours.check()
        assert all(each.ok for each in run.records)
        for each in kept:
            each.model.check()
            assert not each.model.lent
        mean_s = mean(each.per_token_s or inf for each in run.records)
        return mean_s, run.counts["remote_prefills"]

    alone_s, none = per_token_s(Settings(sections={"first_token_weight": 2.0}))
    split_s, some = per_token_s(Settings(sections={"first_token_weight": 2.0}, splits=True))
    assert (none, some > 30) == (0, True)
    assert split_s < 0.7 * alone_s
