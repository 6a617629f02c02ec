"""How long answers are expected to be, from those before."""

import pytest

from router.config.cost_weights import DEFAULT_WEIGHTS
from router.fleet.output_lengths import OutputLengths

START = DEFAULT_WEIGHTS.output_tokens


def test_a_sessions_own_answers_count_before_its_keys_and_these_before_all() -> None:
    lengths = OutputLengths(10)
    assert lengths.expected("new", None) == START
    lengths.note("agent", "team", 40)
    lengths.note("chat", "team", 400)
    assert lengths.expected("agent", "team") == 40
    assert lengths.expected("new", "team") == pytest.approx(0.7 * 40 + 0.3 * 400)
    all_expected = lengths.expected("new", "others")
    assert (
        all_expected
        == lengths.expected(None, None)
        == pytest.approx(0.7 * (0.7 * START + 0.3 * 40) + 0.3 * 400)
    )


def test_later_answers_count_more() -> None:
    lengths = OutputLengths(10)
    for tokens in [1000, *[10] * 20]:
        lengths.note("s", None, tokens)
    assert lengths.expected("s", None) == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(("max_tokens", "expected"), [(0, 500.0), (1, 1.0), (700, 500.0)])
def test_an_answer_is_not_longer_than_asked_for(max_tokens: int, expected: float) -> None:
    lengths = OutputLengths(10)
    lengths.note("s", None, 500)
    assert lengths.expected("s", None, max_tokens) == expected


def test_an_answer_without_tokens_says_nothing() -> None:
    lengths = OutputLengths(10)
    lengths.note("s", "k", 0)
    assert (len(lengths), lengths.expected("s", "k")) == (0, START)


def test_the_session_that_was_answered_least_recently_is_forgotten() -> None:
    lengths = OutputLengths(2)
    for session in ("a", "b", "a", "c"):
        lengths.note(session, None, 10)
    lengths.note(None, "key", 1000)
    assert [lengths.expected(each, None) == 10 for each in ("a", "b", "c")] == [True, False, True]
    assert len(lengths) == 3
