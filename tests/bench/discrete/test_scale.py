"""The bench of the router's decision by the size of the fleet."""

from bench.discrete.scale import _blocks, _prompt, fill_sessions, make_fleet, measure
from router.index.prompt_keys import KvTier, PromptKeyCache
from router.scheduling.request_scheduler import PlacementRequest, RequestScheduler


def test_it_measures_and_reports() -> None:
    row = measure(20, sessions=100, index_keys=5_000, decisions=8)
    assert row.replicas == 20
    assert row.index_keys >= 5_000
    assert row.sessions == 100
    assert 0 < row.place_p50_us <= row.place_p99_us


def test_its_prompts_are_found_where_it_has_put_them() -> None:
    """Else it would time decisions about prompts that nobody knows."""
    fleet = make_fleet(20, index_keys=5_000, sessions=10)
    fleet.index.add(7, KvTier.GPU, _blocks(3))
    decision = RequestScheduler(fleet).place(PlacementRequest(keys=PromptKeyCache(_prompt(3))), 0.0)
    assert decision.replica_id == "r7"
    assert decision.matched_tokens[KvTier.GPU] >= 1_023 * 16


def test_every_session_has_a_home() -> None:
    fleet = make_fleet(3, index_keys=100, sessions=10)
    fill_sessions(fleet, 10, 3)
    assert len(fleet.sessions) == 10
    fleet.sessions.check()
