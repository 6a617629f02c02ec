"""Real text of a wanted length."""

import pytest

from bench.replica.text import real_text


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("tokens", [100, 5_000, 30_000])
def test_length_is_what_was_asked_for(tokens: int) -> None:
    assert abs(words(real_text(tokens, seed=3, count=words)) - tokens) <= 8


@pytest.mark.parametrize("chars", [10_000, 20_000, 30_000, 40_000])
@pytest.mark.parametrize("denser", [0.1, 3.0, 10.0])
def test_length_is_right_where_the_text_becomes_denser_or_thinner(
    chars: int, denser: float
) -> None:
    """As with tables of numbers or pages of prose between the code."""

    def count(text: str) -> int:
        return round(min(len(text), chars) / 3 + max(0, len(text) - chars) / 3 * denser)

    assert abs(count(real_text(15_000, seed=3, count=count)) - 15_000) <= 8


def test_a_seed_decides_the_text_from_its_first_line_on() -> None:
    first, again, other = (real_text(2000, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.splitlines()[0] != other.splitlines()[0]


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer tokens"):
        real_text(10**9, seed=1)
