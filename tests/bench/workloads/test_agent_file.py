"""Agents from a file: what a line says, what is wrong with it, and sessions drawn from it."""

import json
from itertools import islice
from pathlib import Path

import pytest

from bench.ttft import BenchError
from bench.workloads.session import Session, Span, Turn
from bench.workloads.trace import drawn_agents, read_agents


def turn(session: str, ids: list[int], **more: object) -> dict[str, object]:
    known = {"session_id": session, "input_length": 512 * len(ids), "output_length": 7}
    return known | {"hash_ids": ids} | more


def file(directory: Path, *lines: object) -> Path:
    path = directory / "agents.jsonl"
    shown = (each if isinstance(each, str) else json.dumps(each) for each in lines)
    path.write_text("".join(f"{line}\n" for line in shown), encoding="utf-8")
    return path


def two_sessions(directory: Path) -> Path:
    return file(
        directory,
        turn("a", [1, 2, 10], timestamp=0.0, group_id=0),
        turn("b", [1, 2, 20], input_length=1100),
        turn("a", [11], input_length=30, delay=1500),
        turn("b", [21, 22], delay=0),
        turn("a", [12], delay=2.5),
    )


def test_turns_are_put_together_by_session(tmp_path: Path) -> None:
    first, second = read_agents(two_sessions(tmp_path))
    shared = (Span(1, 512), Span(2, 512))
    assert first == Session(
        0.0,
        (
            Turn((*shared, Span(10, 512)), 7),
            Turn((Span(11, 30),), 7, 1.5),
            Turn((Span(12, 512),), 7, 0.0025),
        ),
        "a",
    )
    assert second.turns[0].spans == (*shared, Span(20, 76))
    assert [each.pause_s for each in second.turns] == [0.0, 0.0]


def test_drawn_sessions_share_what_sessions_of_the_file_share(tmp_path: Path) -> None:
    """Texts 1 and 2 are in both sessions; each other text is of one, and new with each draw."""
    read = read_agents(two_sessions(tmp_path))
    drawn = list(islice(drawn_agents(read, 1), 50))
    numbers = [[span.number for turn in each.turns for span in turn.spans] for each in drawn]
    assert all(each[:2] == [1, 2] for each in numbers)
    own = [number for each in numbers for number in each[2:]]
    assert len(own) == len(set(own))
    assert min(own) > 22
    assert {len(each.turns) for each in drawn} == {2, 3}
    assert len({each.name for each in drawn}) == 50
    shapes = {
        tuple((turn.tokens, turn.output_tokens, turn.pause_s) for turn in each.turns)
        for each in (*read, *drawn)
    }
    assert len(shapes) == 2


def test_draws_are_seeded_and_starts_in_mean_gaps(tmp_path: Path) -> None:
    read = read_agents(two_sessions(tmp_path))
    first, again, other = (list(islice(drawn_agents(read, seed), 3000)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first[-1].start_s == pytest.approx(3000, rel=0.05)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("no json", "write an object with"),
        ("[1]", "write an object with"),
        ({"session_id": "a"}, "write an object with"),
        (turn("", [1]), "session_id is ''; make it a text"),
        (turn("x", [1], session_id=3), "session_id is 3; make it a text"),
        (turn("x", [1], output_length=0), "output_length is 0; make it a whole number"),
        (turn("x", [1], output_length="7"), "output_length is '7'; make it"),
        (turn("x", [1, 2], input_length=512), "512 tokens do not make 2 blocks"),
        (turn("x", [-1]), "hash_ids are whole numbers"),
        (turn("x", []), "hash_ids are whole numbers"),
        (turn("a", [3]), "delay is None; a session's later turns need"),
        (turn("a", [3], delay=-1), "delay is -1; a session's later turns need"),
        (turn("a", [3], delay=True), "delay is True; a session's later turns need"),
        (turn("a", [3], delay=float("nan")), "delay is nan; a session's later turns need"),
    ],
)
def test_a_bad_line_is_named_with_what_to_write(tmp_path: Path, bad: object, said: str) -> None:
    path = file(tmp_path, turn("a", [1]), bad)
    with pytest.raises(BenchError, match=rf"agents\.jsonl, line 2: .*{said}"):
        read_agents(path)


def test_an_empty_or_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="has no sessions"):
        read_agents(file(tmp_path, "  "))
    with pytest.raises(BenchError, match=r"none\.jsonl"):
        read_agents(tmp_path / "none.jsonl")
