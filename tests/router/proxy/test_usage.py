"""What an answer says about itself is read wherever it stands, in every API's shape."""

import json
from dataclasses import replace
from typing import Any

import pytest

from router.proxy.relay import Usage, UsageReader


def read(body: bytes, *, step: int) -> Usage:
    """Return what an answer says; how many events a stream has is another test's."""
    reader = UsageReader(streamed=not body.startswith(b"{"))
    for start in range(0, len(body), step):
        reader.feed(body[start : start + step])
    return replace(reader.read(), events=0)


CHAT = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}
RESPONSES = {"input_tokens": 9, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 8}}
MESSAGES = {"input_tokens": 1, "output_tokens": 3, "cache_read_input_tokens": 8}


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize("usage", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_counts_of_every_api(usage: dict[str, Any], separators: tuple[str, str], step: int) -> None:
    answer = {"id": "x", "choices": ["long " * 10_000], "usage": usage, "more": None}
    body = json.dumps(answer, separators=separators).encode()
    assert read(body, step=step) == Usage(prompt_tokens=9, cached_tokens=8, output_tokens=3)


def test_the_last_usage_of_a_stream_counts() -> None:
    events = [{"usage": {"completion_tokens": n}} for n in range(1, 4)]
    body = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)
    assert read(body + b"data: [DONE]\n\n", step=5).output_tokens == 3


@pytest.mark.parametrize("step", [1, 7, 65_536])
def test_counts_before_long_arrays(step: int) -> None:
    """``return_token_ids`` and ``prompt_logprobs`` come after ``usage``."""
    answer = {"id": "x", "choices": [], "usage": CHAT, "prompt_token_ids": [*range(20_000)]}
    counts = Usage(prompt_tokens=9, cached_tokens=8, output_tokens=3)
    assert read(json.dumps(answer).encode(), step=step) == counts


@pytest.mark.parametrize("step", [1, 7, 65_536])
@pytest.mark.parametrize("events", [0, 2_000])
def test_counts_of_the_first_and_the_last_event_are_put_together(step: int, events: int) -> None:
    """Anthropic's servers count the prompt in ``message_start`` alone."""
    start = {"message": {"usage": {"cache_read_input_tokens": 8, "output_tokens": 1}}}
    told = [start, *[{"delta": {"text": "word"}}] * events, {"usage": {"output_tokens": 3}}]
    body = b"".join(b"event: x\ndata: " + json.dumps(each).encode() + b"\n\n" for each in told)
    assert read(body, step=step) == Usage(cached_tokens=8, output_tokens=3)


def test_a_later_object_of_that_name_without_counts_changes_nothing() -> None:
    answer = {"usage": CHAT, "metrics": {"usage": {"x": 1}}}
    counts = Usage(prompt_tokens=9, cached_tokens=8, output_tokens=3)
    assert read(json.dumps(answer).encode(), step=9) == counts


def test_text_that_speaks_of_usage_is_not_read() -> None:
    text = json.dumps({"content": '"usage": {"completion_tokens": 99}'}).encode()
    assert read(text, step=3) == Usage()


@pytest.mark.parametrize(
    "body",
    [b"", b'"usage": null', b'"usage": {', b'"usage": {"completion_tokens": -1}', b"\xff\xfe"],
)
def test_what_cannot_be_read_is_none(body: bytes) -> None:
    assert read(body, step=4) == Usage()


def test_no_details_is_not_zero() -> None:
    body = b'{"usage":{"completion_tokens":3,"prompt_tokens_details":null}}'
    assert read(body, step=100) == Usage(cached_tokens=None, output_tokens=3)


def test_a_response_id_is_read_from_the_beginning() -> None:
    event = {"type": "response.created", "response": {"id": "resp_abc", "object": "response"}}
    body = b"event: response.created\ndata: " + json.dumps(event).encode() + b"\n\n" + b"x" * 99_999
    assert read(body, step=10).stored_id == "resp_abc"


@pytest.mark.parametrize("streamed", [True, False])
def test_memory_is_bounded(streamed: bool) -> None:
    reader = UsageReader(streamed=streamed)
    for _ in range(1000):
        reader.feed(b'{"usage": {"x": ' + b"1" * 10_000)
    assert len(reader._head) + sum(map(len, [*reader._tail, *reader._found])) < 128 << 10


def test_a_usage_nested_too_deeply_to_be_read_is_none() -> None:
    assert read(b'{"usage": {"x": ' + b"[" * 9_000, step=4096) == Usage()


def test_an_id_that_is_no_text_is_none() -> None:
    body = b'{"id": "resp_\xff", "usage": {"completion_tokens": 3}}'
    assert read(body, step=100) == Usage(output_tokens=3)


@pytest.mark.parametrize(
    ("usage", "expected"), [(b"", 100), (b'data: {"usage": {"output_tokens": 7}}\n\n', 7)]
)
def test_a_stream_without_usage_has_about_as_many_tokens_as_events(
    usage: bytes, expected: int
) -> None:
    reader = UsageReader(streamed=True)
    for _ in range(50):
        reader.feed(b"data: {}\n\ndata: {}\n\n")
    reader.feed(usage)
    reader.feed(b"data: [DONE]\n\n")
    assert reader.read().tokens_about == expected


def test_a_whole_answer_without_usage_has_an_unknown_length() -> None:
    reader = UsageReader(streamed=False)
    reader.feed(b'{"text": "a\n\nb"}')
    assert reader.read().tokens_about is None
