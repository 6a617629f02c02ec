"""Workloads: what a trace says, what the generators make, and the texts of both."""

import json
from pathlib import Path

import pytest

from bench.simulator.api.vocabulary import tokens_of
from bench.ttft import BenchError
from bench.workloads.generated import BURST_REQUESTS, GENERATORS
from bench.workloads.session import Session, Span, Turn, prompt_tokens, requests
from bench.workloads.texts import Texts
from bench.workloads.trace import at_load, read_trace, scaled


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


def test_a_trace_can_be_cut_and_paced(tmp_path: Path) -> None:
    path = trace_file(tmp_path, *(line(1000 * i, 512, [i]) for i in range(5)))
    read = read_trace(path, limit=3)
    assert [each.start_s for each in scaled(read, 0.5)] == [0.0, 0.5, 1.0]
    # 1536 tokens in 6 s.
    assert [each.start_s for each in at_load(read, tokens_per_s=256.0)] == [0.0, 3.0, 6.0]


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


@pytest.mark.parametrize("name", GENERATORS)
def test_generators_are_seeded_exact_and_in_order(name: str) -> None:
    make = GENERATORS[name]
    made = make(330, seed=1, tokens_per_s=50_000.0)
    assert made == make(330, seed=1, tokens_per_s=50_000.0)
    assert made != make(330, seed=2, tokens_per_s=50_000.0)
    assert requests(made) == 330
    starts_s = [each.start_s for each in made]
    assert starts_s == sorted(starts_s)


@pytest.mark.parametrize("name", GENERATORS)
def test_twice_the_load_comes_in_half_the_time(name: str) -> None:
    slow, fast = (GENERATORS[name](3000, seed=1, tokens_per_s=rate) for rate in (5e4, 1e5))
    pauses_s = sum(each.pauses_s for each in slow) / len(slow)
    whole_s = prompt_tokens(slow) / 5e4
    assert slow[-1].start_s + pauses_s == pytest.approx(whole_s, rel=0.1)
    assert fast[-1].start_s + pauses_s == pytest.approx(whole_s / 2, rel=0.1)


def test_a_burst_is_one_prompt_and_the_next_burst_another() -> None:
    made = GENERATORS["burst"](2 * BURST_REQUESTS, seed=1, tokens_per_s=50_000.0)
    first, second = made[:BURST_REQUESTS], made[BURST_REQUESTS:]
    assert len({(each.start_s, each.turns[0].spans) for each in first}) == 1
    assert first[0].turns[0].spans != second[0].turns[0].spans
    assert second[0].start_s == pytest.approx(BURST_REQUESTS * 8_000 / 50_000)


def test_unique_prompts_share_no_text() -> None:
    made = GENERATORS["unique"](200, seed=1, tokens_per_s=50_000.0)
    assert len({each.turns[0].spans[0].number for each in made}) == 200


def test_sessions_share_the_system_prompt_and_nothing_else() -> None:
    made = GENERATORS["rounds"](80, seed=1, tokens_per_s=50_000.0)
    assert len({each.turns[0].spans[0] for each in made}) == 1
    rest = [span.number for each in made for turn in each.turns for span in turn.spans][1:]
    own = [number for number in rest if number != 0]
    assert len(own) == len(set(own))
    assert len({each.name for each in made}) == len(made) == 10


def test_a_sessions_prompts_hold_all_before() -> None:
    session = Session(0.0, (Turn((Span(1, 10),), 5), Turn((Span(2, 3),), 1, 2.0)))
    assert session.prompt_tokens == 10 + (10 + 5 + 3)
    assert session.pauses_s == 2.0


def test_equal_spans_give_equal_text_and_shorter_ones_its_beginning() -> None:
    texts = Texts(1)
    long, short = texts.token_ids(Span(7, 40)), texts.token_ids(Span(7, 10))
    assert long[:10] == short
    assert texts.token_ids(Span(8, 40)) != long
    assert Texts(2).token_ids(Span(7, 40)) != long


def test_text_and_numbers_are_the_same_prompt() -> None:
    texts = Texts(1)
    spans = [Span(3, 512), Span(4, 20)]
    expected = [token for span in spans for token in texts.token_ids(span)]
    assert tokens_of(texts.text(spans).decode()) == expected
    assert json.loads(b"[" + texts.numbers(spans) + b"]") == expected
