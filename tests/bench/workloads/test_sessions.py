"""Workloads: what a trace says, what the generators make, and the texts of both."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from statistics import fmean, median

import pytest

from bench.ttft import BenchError
from bench.workloads.generated import BURST_REQUESTS, agents, burst, chats, mixture, rounds, unique
from bench.workloads.offered import GENERATED
from bench.workloads.session import Session, Span, Turn, stretched
from bench.workloads.trace import read_trace, rotated, scaled


def trace_file(directory: Path, *lines: object) -> Path:
    path = directory / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def line(timestamp: int, tokens: int, ids: list[int], output_tokens: int = 7) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": tokens,
        "output_length": output_tokens,
        "hash_ids": ids,
    }


def test_a_trace_gives_blocks_of_512_tokens_and_the_last_one_cut(tmp_path: Path) -> None:
    path = trace_file(tmp_path, line(0, 1100, [4, 5, 6]), line(3000, 512, [4]))
    first, second = read_trace(path)
    assert first.turns[0].spans == (Span(4, 512), Span(5, 512), Span(6, 76))
    assert first.turns[0].output_tokens == 7
    assert (second.start_s, second.turns[0].spans, second.name) == (3.0, (Span(4, 512),), None)


def test_a_trace_can_be_cut_and_scaled(tmp_path: Path) -> None:
    path = trace_file(tmp_path, *(line(1000 * i, 512, [i]) for i in range(5)))
    read = read_trace(path, limit=3)
    assert [each.start_s for each in scaled(read, 0.5)] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("no json", "write an object"),
        ({"timestamp": 0}, "write an object"),
        (line(0, 600, [1]), "do not make 1 blocks"),
        (line(0, 512, [1, 2]), "do not make 2 blocks"),
        (line(0, 512, []), "hash_ids are whole numbers"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: object, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    text = bad if isinstance(bad, str) else json.dumps(bad)
    path.write_text(f"{json.dumps(line(0, 512, [1]))}\n{text}\n", encoding="utf-8")
    with pytest.raises(BenchError, match=f"line 2: .*{said}"):
        read_trace(path)


def test_a_missing_trace_is_said(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="--trace"):
        read_trace(tmp_path / "none.jsonl")


@pytest.mark.parametrize("name", GENERATED)
def test_generated_workloads_are_seeded_and_in_order(name: str) -> None:
    first, again, other = (list(islice(GENERATED[name](seed), 330)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    starts = [each.start_s for each in first]
    assert starts == sorted(starts)


@pytest.mark.parametrize("name", GENERATED)
def test_starts_are_in_mean_gaps(name: str) -> None:
    """Of 40,000 sessions (400 bursts) the last starts after about this many gaps."""
    *_, last = islice(GENERATED[name](1), 40_000 if name == "burst" else 4_000)
    expected, spread = (40_000, 0.15) if name == "burst" else (4_000, 0.05)
    assert last.start_s == pytest.approx(expected, rel=spread)


def test_a_burst_is_one_prompt_and_the_next_burst_another() -> None:
    made = list(islice(burst(1), 2 * BURST_REQUESTS))
    first, second = made[:BURST_REQUESTS], made[BURST_REQUESTS:]
    assert len({(each.start_s, each.turns[0].spans) for each in first}) == 1
    assert first[0].turns[0].spans != second[0].turns[0].spans
    assert second[0].start_s > first[0].start_s


def test_unique_prompts_share_no_text() -> None:
    made = list(islice(unique(1), 200))
    assert len({each.turns[0].spans[0].number for each in made}) == 200


def test_sessions_share_the_system_prompt_and_nothing_else() -> None:
    made = list(islice(rounds(1), 10))
    assert len({each.turns[0].spans[0] for each in made}) == 1
    rest = [span.number for each in made for turn in each.turns for span in turn.spans]
    own = [number for number in rest if number != 0]
    assert len(own) == len(set(own))
    assert len({each.name for each in made}) == len(made) == 10


def test_generated_agents_have_the_statistics_they_were_fitted_to() -> None:
    made = list(islice(agents(1), 3000))
    later = [turn for each in made for turn in each.turns[1:]]
    answers = [turn.output_tokens for each in made for turn in each.turns]
    pauses_s = sorted(turn.pause_s for turn in later)
    assert fmean(each.turns[0].tokens for each in made) == pytest.approx(62_000, rel=0.05)
    assert fmean(turn.tokens for turn in later) == pytest.approx(3_000, rel=0.05)
    assert median(turn.tokens for turn in later) == pytest.approx(1_800, rel=0.05)
    assert (fmean(answers), median(answers)) == pytest.approx((490, 300), rel=0.05)
    assert (fmean(pauses_s), median(pauses_s)) == pytest.approx((5.0, 1.1), rel=0.1)
    assert pauses_s[int(0.9 * len(pauses_s))] == pytest.approx(13.6, rel=0.1)
    assert fmean(len(each.turns) for each in made) == pytest.approx(8, rel=0.05)
    assert max(each.longest_tokens - each.turns[-1].output_tokens for each in made) <= 100_000


def test_agents_share_one_prompt_with_all_and_one_with_their_group() -> None:
    made = list(islice(agents(1), 1000))
    assert len({each.turns[0].spans[0] for each in made}) == 1
    groups = Counter(each.turns[0].spans[1].number for each in made)
    assert max(groups.values()) == pytest.approx(333, abs=60)
    assert 20 < len(groups) <= 50
    assert len({each.turns[0].spans[2].number for each in made}) == 1000


def test_a_generated_conversation_is_like_the_trace_it_stands_for() -> None:
    seen: set[int] = set()
    blocks = known = tokens = 0
    for request in islice(chats(1), 12_000):
        numbers = {span.number for span in request.turns[0].spans}
        blocks += len(numbers)
        known += len(numbers & seen)
        tokens += request.prompt_tokens
        seen |= numbers
    assert known / blocks == pytest.approx(0.366, abs=0.03)
    assert tokens / 12_000 == pytest.approx(12_035, rel=0.1)


def test_a_third_of_the_mixture_is_not_streamed_and_answers_are_short_and_long() -> None:
    made = list(islice(mixture(1), 2000))
    turns = [turn for each in made for turn in each.turns]
    for kind in ("agent", "chat", "None"):
        of_kind = [each for each in made if str(each.name).startswith(kind)]
        whole = [each for each in of_kind if not each.turns[0].streamed]
        assert len(whole) / len(of_kind) == pytest.approx(1 / 3, abs=0.01)
    assert sum(not each.streamed for each in turns) / len(turns) == pytest.approx(1 / 3, abs=0.04)
    assert all(len({turn.streamed for turn in each.turns}) == 1 for each in made)
    answers = [each.output_tokens for each in turns]
    assert (min(answers), max(answers)) == (1, 2000)


def test_a_trace_begins_elsewhere_with_each_seed_and_goes_round(tmp_path: Path) -> None:
    lines = (line(1000 * i, 512, [i % 3]) for i in range(5))
    read = read_trace(trace_file(tmp_path, *lines))
    laps = {seed: list(islice(rotated(read, seed), 11)) for seed in range(8)}
    offsets = {tuple(each.turns[0].spans[0].number for each in made[:5]) for made in laps.values()}
    assert len(offsets) > 1
    for made in laps.values():
        assert [each.start_s for each in made] == pytest.approx(range(11))
        numbers = [each.turns[0].spans[0].number for each in made]
        assert sorted(numbers[:5]) == [0, 0, 1, 1, 2]
        # What comes after the trace's end was never asked before.
        assert numbers[5:10] == [3 + number for number in numbers[:5]]
        assert numbers[10] == 6 + numbers[0]


def test_a_trace_of_one_moment_cannot_be_paced(tmp_path: Path) -> None:
    read = read_trace(trace_file(tmp_path, line(5, 512, [1]), line(5, 512, [2])))
    with pytest.raises(BenchError, match="all come at once"):
        next(rotated(read, 1))


def test_a_sessions_prompts_hold_all_before() -> None:
    session = Session(0.0, (Turn((Span(1, 10),), 5), Turn((Span(2, 3),), 1, 2.0)))
    assert session.prompt_tokens == 10 + (10 + 5 + 3)
    assert session.pauses_s == 2.0
    assert session.longest_tokens == 10 + 5 + 3 + 1
    assert stretched(session, 3.0).pauses_s == 6.0
