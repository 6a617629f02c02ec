"""How long a step takes: contexts that decodes read, concurrent copies, noise."""

from simulator.model.lower_tier_view import NoLowerTiers
from simulator.model.replica_model import ReplicaModel
from tests.simulator.helpers import model, rates, request, run, shape


def test_a_decode_takes_longer_for_each_token_whose_kv_it_reads() -> None:
    sim = model(speeds=rates(decode_s_per_context_token=0.01))
    sim.arrive(request("a", 10, 2), 0.0)
    # 1 + 1 s of prefill; then 1 + 0.5 s, and 10 tokens read.
    assert run(sim) == [("a", 2, 3.6)]


def test_prefill_is_slowed_by_the_contexts_of_the_decodes_beside_it() -> None:
    sim = model(speeds=rates(decode_s_per_context_token=0.01))
    sim.arrive(request("a", 100, 2), 0.0)
    sim.arrive(request("b", 10), 1.0)
    # a's prompt until 11 s; then 1 + 0.5 s, 100 tokens read, and b's 10 tokens.
    assert run(sim) == [("b", 1, 14.5), ("a", 2, 14.5)]
    assert (sim.totals.between_tokens, sim.totals.between_tokens_s) == (1, 3.5)


def test_noise_is_a_factor_on_each_step() -> None:
    factors = iter([2.0, 0.5])
    sim = ReplicaModel(shape(), rates(), NoLowerTiers(), noise=lambda: next(factors))
    sim.arrive(request("a", 150), 0.0)
    # 1 + 10 s, doubled; then 1 + 5 s, halved.
    assert run(sim) == [("a", 1, 25.0)]


def test_decodes_that_are_taken_together_have_one_factor() -> None:
    drawn = []

    def noise() -> float:
        drawn.append(1.0)
        return 1.0

    sim = ReplicaModel(shape(), rates(), NoLowerTiers(), noise=noise)
    sim.arrive(request("a", 10, 50), 0.0)
    assert run(sim) == [("a", 50, 2.0 + 49 * 1.5)]
    assert len(drawn) == 2
    assert (sim.totals.between_tokens, sim.totals.between_tokens_s) == (49, 49 * 1.5)


def test_a_slowed_replica_computes_so_many_times_as_long() -> None:
    spoken = rates(decode_s_per_context_token=0.01).slowed(3.0)
    sim = model(speeds=spoken)
    sim.arrive(request("a", 10, 2), 0.0)
    assert run(sim) == [("a", 2, 10.8)]
    assert spoken.load_tokens_per_s == rates().load_tokens_per_s
