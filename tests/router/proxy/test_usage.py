"""What an answer says of itself is read from its ends, in every API's shape."""

import json
from typing import Any

import pytest

from router.proxy.relay import Usage, UsageReader


def read(body: bytes, *, step: int) -> Usage:
    reader = UsageReader()
    for start in range(0, len(body), step):
        reader.feed(body[start : start + step])
    return reader.read()


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


def test_memory_is_bounded() -> None:
    reader = UsageReader()
    for _ in range(1000):
        reader.feed(b"x" * 10_000)
    assert sum(map(len, reader._tail)) < 64 << 10


def test_a_usage_nested_too_deeply_to_be_read_is_none() -> None:
    assert read(b'{"usage": {"x": ' + b"[" * 9_000, step=4096) == Usage()


def test_an_id_that_is_no_text_is_none() -> None:
    body = b'{"id": "resp_\xff", "usage": {"completion_tokens": 3}}'
    assert read(body, step=100) == Usage(output_tokens=3)
