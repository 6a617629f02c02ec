"""What a caller of promote sees."""

from cacheengine.residency.decisions import Promotion, PromotionOutcome


def test_counts_add_up_and_callbacks_come_once() -> None:
    called: list[int] = []
    promotion = Promotion(3)
    promotion.add_done_callback(lambda: called.append(1))
    promotion.settle(PromotionOutcome.RESIDENT)
    promotion.settle(PromotionOutcome.PROMOTED)
    assert (promotion.counts.pending, called, promotion.wait(0)) == (1, [], False)
    promotion.settle(PromotionOutcome.MISSING)
    counts = promotion.counts
    assert (counts.resident, counts.promoted, counts.pending, counts.missing) == (1, 1, 0, 1)
    assert (called, promotion.wait(0), promotion.done) == ([1], True, True)
    promotion.add_done_callback(lambda: called.append(2))
    assert called == [1, 2]


def test_nothing_asked_is_done_at_once() -> None:
    assert Promotion(0).wait(0)
