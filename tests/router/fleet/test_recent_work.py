"""How busy a replica was recently."""

import pytest

from router.fleet.cost_model import RecentWork


def busy(share: float) -> RecentWork:
    """Return a replica's work when half a second each made it busy for this share."""
    work = RecentWork()
    for _ in range(round(share * 30.0 / 0.5)):
        work.note(0.5, 0.0)
    return work


def test_the_share_is_of_the_time_and_more_than_one_where_a_replica_falls_behind() -> None:
    assert RecentWork().share(0.0) == 0.0
    assert [busy(share).share(0.0) for share in (0.5, 2.0)] == pytest.approx([0.5, 2.0])


def test_what_is_past_fades() -> None:
    assert busy(0.5).share(300.0) < 0.01 * 0.5
