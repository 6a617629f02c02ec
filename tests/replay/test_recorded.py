"""Request logs that are read to be played."""

import json
from typing import Any

import pytest

from replay.recorded import LogError, RecordedLog, model_prompt, read_log
from router.index.prompt_keys import PromptKeys
from router.record.prompt_hashes import PromptHashes

BLOCK = 64


def line(
    *parts: tuple[int, int],
    end_s: float = 10.0,
    total_s: float = 2.0,
    session: str | None = "s",
    **changes: Any,
) -> bytes:
    """Return a line of a prompt that consists of parts: a text's number, and its tokens."""
    chain: list[int] = []
    for number, tokens in parts:
        for _ in range(tokens // BLOCK):
            chain.append(hash((number, *chain[-1:])))
    keys = PromptKeys(keys=chain, block_tokens=BLOCK)
    values = {
        "time": f"2026-01-01T00:00:{end_s:06.3f}Z",
        "total_s": total_s,
        "model": "m",
        "status": 200,
        "outcome": "ok",
        "streamed": True,
        "prompt_tokens": sum(tokens for _, tokens in parts),
        "output_tokens": 100,
        "ttft_s": 1.0,
        "tpot_s": 0.01,
        "cached_tokens": 0,
        "prompt_hashes": PromptHashes.of(keys, session).to_json(),
    }
    return json.dumps(values | changes).encode()


def read(*lines: bytes, model: str | None = None) -> RecordedLog:
    return read_log(lines, model)


def shared_blocks(log: RecordedLog, one: int, two: int) -> int:
    """Return how many blocks of the prompt and answer of one the prompt of another begins with."""
    held, asked = (model_prompt(log.requests[each], BLOCK) for each in (one, two))
    blocks = 0
    for key in asked.keys[: asked.prompt_blocks]:
        if key not in held.keys:
            break
        blocks += 1
    return blocks


def test_requests_are_in_the_order_of_their_beginnings() -> None:
    log = read(line((1, 640), end_s=10.0, total_s=1.0), line((2, 640), end_s=11.0, total_s=5.0))
    assert [(each.start_s, each.end_s) for each in log.requests] == [(0.0, 5.0), (3.0, 4.0)]
    first, second = log.requests
    assert second.before is first and first.before is None


def test_prompts_share_what_their_hashes_share() -> None:
    log = read(
        line((1, 1280), (2, 640), session="a"),
        line((1, 1280), (3, 640), session="b"),
        line((4, 1280), session="c"),
    )
    assert shared_blocks(log, 0, 1) == 1280 // BLOCK
    assert shared_blocks(log, 0, 2) == 0


def test_an_end_after_the_last_hash_is_shared_with_nobody() -> None:
    """Two equal prompts share all but that."""
    log = read(line((1, 704), session="a"), line((1, 704), session="b"))
    assert shared_blocks(log, 0, 1) == 640 // BLOCK


def test_the_next_turn_contains_prompt_and_answer() -> None:
    log = read(
        line((1, 704), end_s=10.0, output_tokens=320),
        line((1, 704), (2, 640), end_s=20.0),
    )
    first, second = log.requests
    assert first.following is second
    # The last token of an answer is not computed.
    assert shared_blocks(log, 0, 1) == (704 + 320 - 1) // BLOCK


@pytest.mark.parametrize(
    "second",
    [
        line((1, 704), (2, 640), end_s=20.0, session="other"),
        line((3, 704), (2, 640), end_s=20.0),
        line((1, 704), (2, 64), end_s=20.0),
    ],
)
def test_others_do_not(second: bytes) -> None:
    """Another session, another prompt, or one that has no place for the answer."""
    log = read(line((1, 704), end_s=10.0, output_tokens=320), second)
    assert log.requests[0].following is None


def test_what_cannot_be_played_is_left_out_and_counted() -> None:
    log = read(
        line((1, 640)),
        line((1, 640), status=400),
        line((1, 640), prompt_hashes=None),
        line((1, 640), model="other"),
        b"not JSON",
        b"[]",
        b'{"time": 7}',
        b"",
        model="m",
    )
    assert len(log.requests) == 1
    assert log.left_out == {
        "refused for what it asked": 1,
        "without prompt_hashes": 1,
        "another model": 1,
        "not a line of the request log as JSON": 3,
    }


@pytest.mark.parametrize("status", [429, 503])
def test_what_was_refused_is_played_with_a_usual_answer(status: int) -> None:
    nothing: dict[str, Any] = dict.fromkeys(("prompt_tokens", "output_tokens", "ttft_s", "tpot_s"))
    refused = line((1, 704), status=status, outcome="refused", end_s=12.0, **nothing)
    log = read(line((2, 640), output_tokens=77), refused)
    assert (log.requests[1].output_tokens, log.requests[1].prompt_tokens) == (77, 640)
    assert not log.requests[1].is_ok


def test_a_log_without_hashes_says_what_is_missing() -> None:
    with pytest.raises(LogError, match="prompt_hashes: true"):
        read(line((1, 640), prompt_hashes=None))
    with pytest.raises(LogError, match="no lines"):
        read()


def test_of_several_models_one_must_be_chosen() -> None:
    with pytest.raises(LogError, match="--model"):
        read(line((1, 640)), line((1, 640), model="other"))
