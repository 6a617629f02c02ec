"""Bodies: of the size that their case is named by, and none known before it is sent."""

import random
from itertools import pairwise
from pathlib import Path

import orjson
import pytest

from bench.overhead.cases import (
    SHORT_TOKENS,
    Case,
    Sequences,
    cases,
    library_lines,
    read,
    sequences,
    slow,
    write,
)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return library_lines()


def made(case: Case, lines: list[str], seed: int = 1) -> Sequences:
    return sequences(case, lines, random.Random(seed))


@pytest.mark.parametrize(("prompt", "chars"), [("1k", 1024), ("16k", 16384), ("64k", 65536)])
def test_a_prompt_has_the_size_that_it_is_named_by(
    prompt: str, chars: int, lines: list[str]
) -> None:
    case = Case(prompt=prompt, answer="piece", requests=5)
    bodies = made(case, lines)
    texts = [orjson.loads(one)["messages"][0]["content"] for (one,) in bodies]
    assert [len(each) for each in texts] == [chars] * 5
    assert all(each.isascii() for each in texts)
    # No two begin alike: what begins alike may be in some cache.
    assert len({each[:64] for each in texts}) == 5


def test_a_conversation_grows_by_equal_turns_to_the_whole_and_keeps_what_was_said(
    lines: list[str],
) -> None:
    case = Case(prompt="conversation", answer="piece", requests=40)
    first, second = made(case, lines)
    assert (len(first), len(second)) == (32, 8)
    turns = [orjson.loads(each)["messages"] for each in first]
    for before, after in pairwise(turns):
        assert after[: len(before)] == before
        assert [each["role"] for each in after[len(before) :]] == ["assistant", "user"]
    sizes = [sum(len(each["content"]) for each in messages) for messages in turns]
    assert {after - before for before, after in pairwise(sizes)} == {2048}
    assert 0.95 * 65536 < sizes[-1] <= 65536


def test_the_same_seed_gives_the_same_bodies_and_another_one_others(lines: list[str]) -> None:
    case = Case(prompt="1k", answer="whole", requests=3)
    assert made(case, lines) == made(case, lines)
    assert made(case, lines)[0] != made(case, lines, seed=2)[0]


def test_a_body_asks_for_its_cases_form_of_answer(lines: list[str]) -> None:
    def asked(case: Case) -> tuple[object, object, object]:
        fields = orjson.loads(made(case, lines)[0][0])
        return fields.get("stream"), fields.get("stream_options"), fields["max_tokens"]

    usage = {"include_usage": True}
    assert asked(Case(prompt="1k", answer="whole", requests=1)) == (None, None, SHORT_TOKENS)
    assert asked(Case(prompt="1k", answer="piece", requests=1)) == (True, usage, SHORT_TOKENS)
    assert asked(slow("1k", 1, 200)) == (True, usage, 200)


def test_bodies_come_back_from_their_file(tmp_path: Path, lines: list[str]) -> None:
    bodies = made(Case(prompt="conversation", answer="piece", requests=40), lines)
    write(tmp_path / "bodies", bodies)
    assert read(tmp_path / "bodies") == bodies


def test_slow_streams_come_first_and_are_all_open_before_the_first_one_ends() -> None:
    """Memory that earlier cases have freed would hide what open streams take."""
    every = cases(200, 200)
    held = [each.holds_streams for each in every]
    assert held == sorted(held, reverse=True)
    for each in every:
        if each.holds_streams:
            assert each.rate_per_s is not None
            assert each.requests / each.rate_per_s < 0.5 * each.tokens * 0.02
