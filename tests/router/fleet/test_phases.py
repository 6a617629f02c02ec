"""Answers that are not streamed: when their prefill is taken to be over, to exact outcomes.

A thousand tokens take a second here, and a little more: that is attention.
"""

import pytest

from router.fleet.cost_model import CostPart
from router.fleet.fleet import Fleet
from router.fleet.in_flight import Ticket
from router.fleet.replica import Replica
from router.index.prompt_keys import KvTier
from tests.router.fleet.helpers import blocks, in_cpu_ram, make_fleet, place, stored
from tests.router.prompt.prompts_given import GivenPrompt, text, tokens
from tests.router.scheduling.helpers import Driver, make_learned_fleet


def start(fleet: Fleet, prompt: GivenPrompt, now_s: float = 0.0) -> tuple[Ticket, float]:
    """Start a request whose answer is not streamed; return when its first token is to come."""
    decision = place(fleet, prompt, now_s, streamed=False)
    return fleet.start(decision, now_s), now_s + decision.predicted_ttft_s


def counts(replica: Replica) -> tuple[int, int]:
    return replica.waiting, replica.decoding


def test_its_prefill_is_over_when_that_was_predicted() -> None:
    fleet, prompt = make_fleet(1), tokens(6400)
    in_cpu_ram(fleet, prompt)
    replica = fleet.replicas["r0"]
    ticket, due_s = start(fleet, prompt)
    assert counts(replica) == (1, 0)
    assert 0.0 < due_s < 2.0
    fleet.tick(due_s - 0.001)
    assert counts(replica) == (1, 0)
    fleet.tick(due_s + 0.001)
    assert counts(replica) == (0, 1)
    ticket.first_byte(20.0, streamed=False)
    assert counts(replica) == (0, 1)
    ticket.finish(20.0, ok=True)
    assert counts(replica) == (0, 0)


def test_a_streamed_one_waits_until_its_first_token() -> None:
    fleet = make_fleet(1)
    fleet.start(place(fleet, tokens(1000)), 0.0)
    fleet.tick(100.0)
    assert fleet.replicas["r0"].waiting == 1


def test_one_behind_a_late_prefill_is_late_too() -> None:
    """The first prefill takes three seconds, not one: the second one cannot have begun before."""
    fleet = make_fleet(1)
    first = fleet.start(place(fleet, tokens(1000)), 0.0)
    _, due_s = start(fleet, tokens(1000, start=50_000))
    assert due_s == pytest.approx(2.0, rel=0.1)
    first.first_byte(1.9)
    fleet.tick(due_s + 0.1)
    assert fleet.replicas["r0"].waiting == 1
    fleet.tick(due_s + 1.0)
    assert fleet.replicas["r0"].waiting == 0


def test_a_first_token_behind_it_shows_that_it_is_over() -> None:
    """It is due and has been overtaken by nobody: the replica works in order."""
    fleet = make_fleet(1)
    replica = fleet.replicas["r0"]
    start(fleet, tokens(1000))
    behind = fleet.start(place(fleet, tokens(10, start=50_000)), 0.0)
    behind.first_byte(1.5)
    fleet.tick(1.5)
    assert (replica.waiting, replica.decoding) == (0, 2)


def test_the_event_of_its_last_block_ends_its_prefill() -> None:
    fleet, prompt = make_fleet(1), tokens(6400)
    in_cpu_ram(fleet, prompt)
    replica = fleet.replicas["r0"]
    tickets = [start(fleet, prompt)[0] for _ in range(2)]
    stored(fleet, "r0", KvTier.CPU, blocks(prompt))
    stored(fleet, "r0", KvTier.GPU, blocks(prompt)[:-1])
    assert counts(replica) == (2, 0), "the second finds what the first one loads"
    stored(fleet, "r0", KvTier.GPU, blocks(prompt)[-1:])
    assert counts(replica) == (0, 2)
    for ticket in tickets:
        ticket.finish(20.0, ok=False)
    assert counts(replica) == (0, 0)


def test_one_of_one_token_says_what_a_token_takes() -> None:
    fleet = make_fleet(1)
    for number, output_tokens in enumerate((1, 2)):
        now_s = 10.0 * number
        ticket, _ = start(fleet, tokens(1000, start=50_000 * number), now_s)
        ticket.first_byte(now_s + 3.0, streamed=False)
        ticket.finish(now_s + 3.0, ok=True, cached_tokens=0, output_tokens=output_tokens)
    assert fleet.replicas["r0"].rates.measured_on(CostPart.PREFILL) == 1
    cold_s = place(fleet, tokens(1000, start=9), 99.0).predicted_ttft_s
    assert cold_s == pytest.approx(3.0, rel=0.15)


def test_answers_are_timed_from_the_event_of_the_last_block() -> None:
    fleet, prompt = make_fleet(1), tokens(640)
    ticket, _ = start(fleet, prompt)
    stored(fleet, "r0", KvTier.GPU, blocks(prompt))
    ticket.first_byte(4.0, streamed=False)
    ticket.finish(4.0, ok=True)
    assert fleet.replicas["r0"].answers == 1


def test_nothing_else_does() -> None:
    fleet = make_fleet(1)
    ticket, due_s = start(fleet, tokens(1000))
    fleet.tick(due_s + 0.001)
    ticket.first_byte(60.0, streamed=False)
    ticket.finish(60.0, ok=True, cached_tokens=0)
    assert not fleet.replicas["r0"].rates.measured()


def test_events_of_another_replica_tell_nothing() -> None:
    fleet, prompt = make_fleet(2), tokens(640)
    start(fleet, prompt)
    (busy,) = [each for each in fleet.replicas.values() if each.waiting]
    (idle,) = [each for each in fleet.replicas.values() if not each.waiting]
    stored(fleet, idle.id, KvTier.GPU, blocks(prompt))
    assert busy.waiting == 1


def test_a_prompt_known_by_its_text_goes_by_the_prediction() -> None:
    fleet = make_fleet(1, agents=False)
    _, due_s = start(fleet, text(4096))
    fleet.tick(due_s + 0.001)
    assert fleet.replicas["r0"].waiting == 0


def test_one_that_ends_before_its_time_is_forgotten() -> None:
    fleet = make_fleet(1)
    for _ in range(3):
        ticket, due_s = start(fleet, tokens(1000))
        ticket.finish(0.1, ok=False)
    assert repr(fleet.prefills) == "<PrefillTracker 0>"
    fleet.tick(due_s + 1.0)
    assert counts(fleet.replicas["r0"]) == (0, 0)


def test_one_that_fails_after_its_time_is_released_and_withdraws_its_claim() -> None:
    fleet, prompt = make_fleet(1), tokens(640)
    ticket, due_s = start(fleet, prompt)
    fleet.tick(due_s + 0.001)
    ticket.finish(5.0, ok=False)
    assert counts(fleet.replicas["r0"]) == (0, 0)
    assert place(fleet, prompt, 5.0).matched_tokens == {}


def test_one_that_waits_for_its_prefetch_has_until_then() -> None:
    fleet = make_fleet(1)
    ticket, due_s = start(fleet, tokens(1000))
    ticket.sent(5.0)
    fleet.tick(due_s + 0.001)
    assert fleet.replicas["r0"].waiting == 1
    fleet.tick(due_s + 5.001)
    assert fleet.replicas["r0"].waiting == 0


def test_its_decoding_is_no_burst_and_no_prefill() -> None:
    """Ten answers of a minute each are being decoded: the next one has nothing to wait for."""
    fleet = make_fleet(1)
    for number in range(10):
        start(fleet, tokens(100, start=1000 * number))
    (candidate,) = place(fleet, tokens(100, start=90_000), 10.0).candidates
    assert (candidate.waiting, candidate.in_flight, candidate.cost.queue_s) == (0, 10, 0.0)


def test_a_long_prompt_does_not_wait_for_an_answer_whose_kv_was_loaded() -> None:
    """The load takes a fraction of a second, the answer 20; a prompt of 16 s was held for both."""
    driver, prompt = Driver(make_learned_fleet()), tokens(8192)
    in_cpu_ram(driver.fleet, prompt)
    start(driver.fleet, prompt)
    assert driver.ask("long", 16.0)
