"""Workloads played to their end: records, order, and the same ones every time."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any

import pytest

from bench.discrete.contenders import CONTENDERS, OURS, SHARED_CACHE, SPLITS, play
from bench.discrete.play import Contender, FleetOptions, StoppableRouter, play_with
from bench.workloads.session import Session, Span, Turn, prompt_tokens, requests
from replay.record import Record
from replay.replica import Fault, ModelReplica
from replay.requests import Sent
from tests.bench.discrete.building import machine, talk

QUIET = FleetOptions(replicas=2, machine=machine(), noise=0.0)
BUSY = FleetOptions(replicas=3, machine=machine(gpu_tokens=1_500, disk_tokens=20_000))


def sessions(many: int) -> list[Session]:
    return [
        talk(
            (100 + 30 * number, 20),
            (60, 15),
            (150, 25),
            start_s=0.3 * number,
            pause_s=0.4,
            name=f"s{number}",
            texts=count(10 * (number + 1)),
            shared=(Span(1, 200),),
        )
        for number in range(many)
    ]


def told(records: Sequence[Record]) -> list[dict[str, Any]]:
    return [asdict(each) for each in records]


@pytest.mark.parametrize("name", [OURS, "power-of-two", "dynamo", SHARED_CACHE])
def test_the_same_arguments_give_the_same_records(name: str) -> None:
    options = replace(BUSY, faults=[Fault(slot=0, dies_s=2.0, returns_s=3.0)])
    first, again = (play(name, sessions(10), options) for _ in range(2))
    assert told(first.records) == told(again.records)
    assert first.counts == again.counts
    other = play(name, sessions(10), replace(options, seed=2))
    assert told(other.records) != told(first.records)


def test_a_session_alone_takes_what_its_turns_take() -> None:
    records = play("round-robin", [talk((90, 11), (79, 1), pause_s=2.0)], QUIET).records
    first, second = records
    # 100 ms; then ten decodes of 20. The second turn comes 2 s after that, to another replica.
    assert first.ttft_s == pytest.approx(0.1)
    assert first.total_s == pytest.approx(0.3)
    assert (second.due_s, second.sent_s) == pytest.approx((2.3, 2.3))
    assert second.prompt_tokens == 90 + 11 + 79
    assert second.ttft_s == pytest.approx(0.02 + 0.18)
    assert (first.instance_id, second.instance_id) == ("r0", "r1")


def test_records_are_numbered_as_the_workload_is() -> None:
    given = [talk((50, 1), (50, 1), start_s=1.0, name="late"), talk((50, 1), name="early")]
    records = play("round-robin", given, QUIET).records
    assert [(each.number, each.session, each.turn) for each in records] == [
        (0, "late", 0),
        (1, "late", 1),
        (2, "early", 0),
    ]
    assert records[2].sent_s < records[0].sent_s


def test_prompts_are_as_long_as_the_workload_says() -> None:
    given = sessions(6)
    records = play("least-loaded", given, BUSY).records
    assert len(records) == requests(given)
    assert sum(each.prompt_tokens for each in records) == prompt_tokens(given)


def test_an_answer_that_is_not_streamed_has_a_first_token_too() -> None:
    given = [talk((90, 11), name="s", streamed=False)]
    (record,) = play(OURS, given, QUIET).records
    assert not record.streamed
    assert record.ttft_s == pytest.approx(0.1)
    assert record.total_s == pytest.approx(0.3)


def test_turns_after_a_failed_one_are_not_sent() -> None:
    given = [talk((90, 1), (2_000, 1), (50, 1), (50, 1), name="s"), talk((60, 1), name="t")]
    records = play("round-robin", given, QUIET).records
    assert [each.ok for each in records] == [True, False, False, False, True]
    assert records[1].status == 400
    for each in records[2:4]:
        assert (each.error, each.status) == ("not sent: the turn before was not answered", None)
        assert each.ttft_s is None
    assert [each.turn for each in records] == [0, 1, 2, 3, 0]


def test_a_slow_replica_is_slow() -> None:
    given = [talk((90, 1), start_s=1.0 * at, texts=count(at + 1)) for at in range(2)]
    options = replace(QUIET, faults=[Fault(slot=1, slowdown=3.0)])
    first, second = play("round-robin", given, options).records
    assert (first.ttft_s, second.ttft_s) == pytest.approx((0.1, 0.3))


def test_what_happens_in_the_tiers_is_counted() -> None:
    small = replace(BUSY, machine=machine(gpu_tokens=800, cpu_tokens=600, disk_tokens=20_000))
    counts = play(OURS, sessions(10), small).counts
    assert counts["prefilled_tokens"] > 0
    assert counts["promoted_tokens"] % small.machine.shape.chunk_tokens == 0
    assert {"prefetch_unused_tokens", "preemptions", "store_drops", "copied_tokens"} <= {*counts}


def test_a_routers_error_ends_the_play() -> None:
    """A contender that raises would else be one that was never asked."""

    class Broken:
        async def answer(self, sent: Sent) -> None:
            raise RuntimeError("no route")

        def counts(self) -> dict[str, float]:
            return {}

        async def stop(self) -> None:
            pass

    def make(replicas: Sequence[ModelReplica], seed: int) -> StoppableRouter:
        return Broken()

    with pytest.raises(RuntimeError, match="no route"):
        play_with(Contender(make=make), sessions(2), QUIET)


class Refusing:
    """Refuses the first requests with what it is given, then answers at once."""

    def __init__(self, refusals: Sequence[tuple[int, float | None]]) -> None:
        self._refusals = list(refusals)
        self.asked_s: list[float] = []

    async def answer(self, sent: Sent) -> None:
        now_s = asyncio.get_running_loop().time()
        self.asked_s.append(now_s)
        if self._refusals:
            status, retry_after_s = self._refusals.pop(0)
            sent.failed(status, "not now", now_s, retry_after_s=retry_after_s)
            return
        sent.began(now_s)
        sent.record.status, sent.record.error = 200, None

    def counts(self) -> dict[str, float]:
        return {}

    async def stop(self) -> None:
        pass


@pytest.mark.parametrize(
    ("refusals", "asked_s"),
    [
        ([(429, 7.0), (429, 12.0)], [0.0, 7.0, 19.0]),
        ([(503, None), (503, None)], [0.0, 0.5, 1.5]),
        ([(429, 61.0)], [0.0, 0.5]),
    ],
)
def test_a_client_sends_a_refused_request_again_when_it_is_told(
    refusals: list[tuple[int, float | None]], asked_s: list[float]
) -> None:
    router = Refusing(refusals)
    given = [talk((90, 1), name="s")]
    (record,) = play_with(Contender(make=lambda *_: router), given, QUIET).records
    assert router.asked_s == pytest.approx(asked_s)
    assert record.ok
    assert record.ttft_s == pytest.approx(asked_s[-1]), "the time counts from the first try"


def test_a_client_gives_up_after_three_tries() -> None:
    router = Refusing([(429, 1.0)] * 3)
    given = [talk((90, 1), (90, 1), name="s")]
    first, second = play_with(Contender(make=lambda *_: router), given, QUIET).records
    assert (first.status, first.ok, len(router.asked_s)) == (429, False, 3)
    assert second.error == "not sent: the turn before was not answered"


def test_a_client_does_not_repeat_what_is_wrong() -> None:
    router = Refusing([(400, None)])
    (record,) = play_with(
        Contender(make=lambda *_: router), [talk((9, 1), name="s")], QUIET
    ).records
    assert (record.status, len(router.asked_s)) == (400, 1)


@pytest.mark.parametrize("name", CONTENDERS)
def test_each_contender_answers_all_of_a_small_workload(name: str) -> None:
    given = [*sessions(6), Session(0.5, (Turn((Span(900, 120),), 10),))]
    options = replace(BUSY, replicas=8) if name in SPLITS else BUSY
    records = play(name, given, options).records
    assert [each.number for each in records] == list(range(19))
    for each in records:
        assert each.ok, each.error
        assert each.ttft_s is not None and each.total_s is not None
        assert 0 < each.ttft_s <= each.total_s
        assert each.sent_s >= each.due_s - 1e-9
        assert 0 <= sum(each.cached_tokens.values()) <= each.prompt_tokens
