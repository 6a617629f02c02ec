"""Long strings are taken out of a body before it is parsed, and put back unchanged."""

import gc
import json
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.api.charge import estimated_tokens
from router.config.settings import RouterConfig
from router.policy import ParsedRequest, Plane, Policy
from router.prompt import long_strings
from router.prompt.long_strings import LongStrings
from router.prompt.request_body import MAX_VALUES, prompt_fields, with_members
from warmroute_common.api_errors import BadRequestError

MIB = 1 << 20
TEXT = st.text(
    st.sampled_from([*'ab"\\/\n\u00e9\u20ac\U0001f600', "\ud7ff", "\u2028"]), max_size=120
)
PICTURE = "data:image/png;base64," + "iVBOR/+0" * 100_000


@contextmanager
def short_parts() -> Iterator[None]:
    """Let strings of a few bytes be long, and be decoded in parts of a few bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_strings, "LARGE_BODY_BYTES", 0)
        patch.setattr(long_strings, "_SCANNED_BYTES", 20)
        patch.setattr(long_strings, "_LISTED_BYTES", 48)
        patch.setattr(long_strings, "_DECODED_BYTES", 16)
        yield


def restored(body: bytes) -> dict[str, Any]:
    taken = LongStrings(body)
    fields = prompt_fields(taken.rest)
    taken.restore(fields)
    return fields


def parse(body: bytes) -> ParsedRequest:
    return Policy(RouterConfig()).parse(Plane.PROXY, "POST", "/v1/chat/completions", {}, body)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=5), name=TEXT, in_ascii=st.booleans(), gap=TEXT)
def test_what_is_taken_out_comes_back(
    texts: list[str], name: str, in_ascii: bool, gap: str
) -> None:
    """Whatever stands at the ends of parts: escapes, surrogates, characters of several bytes."""
    fields = {"messages": [texts, {name: gap, "x": [texts[0]]}], "prompt": texts[-1]}
    body = json.dumps(fields, ensure_ascii=in_ascii).encode()
    with short_parts():
        assert restored(body) == fields
        taken = LongStrings(body)
        changed = taken.put_back(with_members(taken.rest, {"model": "m"}))
    assert json.loads(changed) == {**fields, "model": "m"}


@pytest.mark.parametrize(
    "inside", [b"a" * 40 + b"\\ud83d", b"\\x" * 30, b"a" * 40 + b"\xff" + b"a" * 40, b"\n" * 40]
)
def test_what_is_no_json_string_is_refused(inside: bytes) -> None:
    with short_parts(), pytest.raises(BadRequestError, match="not valid JSON"):
        restored(b'{"prompt":"' + inside + b'"}')


def test_a_medium_is_told_apart_and_not_decoded() -> None:
    def written(url: str) -> Any:
        part = {"type": "image_url", "image_url": {"url": url}}
        asked = parse(json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode())
        assert (asked.media_bytes, asked.is_cut) == (len(url), False)
        assert estimated_tokens(asked) < 10_000, "its bytes do not count as text"
        return asked.fields["messages"][0]["content"][0]["image_url"]["url"]

    assert len(written(PICTURE)) < 1000
    assert written(PICTURE) == written(PICTURE)
    assert written(PICTURE) != written(PICTURE[:-1] + "x")


@pytest.mark.parametrize("name", ["text", "source", "image_url"])
def test_a_text_is_read_whole_whatever_its_name_is(name: str) -> None:
    text = "Some prose, not base64. " * 20_000
    body = {"messages": [{"role": "user", "content": [{"type": "text", name: text}]}]}
    asked = parse(json.dumps(body).encode())
    assert asked.fields == body
    assert (asked.media_bytes, asked.is_cut) == (0, False)
    assert asked.parsed_bytes > len(text)


def test_of_more_text_than_a_context_takes_the_beginning_is_read() -> None:
    """So a text of 60 MiB takes its own memory once; it is matched by what was read and a hash."""
    texts = ["a " * MIB, "b " * (4 * MIB), "c " * MIB]
    asked = parse(json.dumps({"messages": texts, "model": "m"}).encode())
    first, second, third = asked.fields["messages"]
    assert (first, third) == (texts[0], texts[2])
    assert len(second) < 1000
    assert second[:200] == texts[1][:200]
    assert asked.is_cut


IDS = st.lists(st.integers(0, 1 << 33) | st.integers(0, 9), max_size=80)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(IDS, min_size=1, max_size=3),
    text=TEXT,
    digits=st.text("0123456789, ", max_size=60),
    indent=st.sampled_from([None, 3]),
)
def test_lists_of_numbers_that_are_taken_out_come_back(
    ids: list[list[int]], text: str, digits: str, indent: int | None
) -> None:
    tools = {"enum": ids[0], text: [text, digits]}
    fields: dict[str, Any] = {
        "prompt": ids[0],
        "input": [*ids, text, digits],
        "tools": [tools],
        "messages": ids,
    }
    body = json.dumps(fields, indent=indent).encode()
    with short_parts():
        found = restored(body)
        taken = LongStrings(body)
        changed = taken.put_back(with_members(taken.rest, {"model": "m"}))
    assert json.loads(changed) == {**fields, "model": "m"}
    assert {name: found[name] for name in ("tools", "messages")} == {
        name: fields[name] for name in ("tools", "messages")
    }
    assert list(found["prompt"]) == ids[0]
    assert [list(each) for each in found["input"]] == [list(each) for each in fields["input"]]


@pytest.mark.parametrize("numbers", [",", "01", "1 2", ""])
@pytest.mark.parametrize("before", [0, 20_000, 150_000])
def test_a_broken_list_of_numbers_is_refused(numbers: str, before: int) -> None:
    inside = "7," * before + numbers + ",7" * (150_000 - before) + " " * 200_000
    with pytest.raises(BadRequestError, match="not valid JSON"):
        restored(b'{"prompt":[%s]}' % inside.encode())


def test_numbers_that_are_taken_out_are_counted_and_bounded() -> None:
    def body(count: int) -> bytes:
        return b'{"prompt":[%s0]}' % (b"0," * count)

    given = body(MAX_VALUES - 10)
    tracemalloc.start()
    try:
        asked = parse(given)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert asked.parsed_bytes > 4 * MAX_VALUES
    assert most_bytes < 6 * MAX_VALUES
    with pytest.raises(BadRequestError, match="more than"):
        parse(body(MAX_VALUES))


@pytest.mark.parametrize("most_chars", [None, 3 * MIB, 3 * MIB - 1])
def test_no_more_is_read_of_a_text_than_a_model_takes(most_chars: int | None) -> None:
    text = "a\u20ac\n" * MIB
    taken = LongStrings(json.dumps({"prompt": text}, ensure_ascii=False).encode())
    fields = prompt_fields(taken.rest)
    taken.restore(fields, most_chars)
    if most_chars is None or most_chars >= len(text):
        assert fields == {"prompt": text}
        assert not taken.is_cut
    else:
        assert len(fields["prompt"]) < 1000
        assert taken.is_cut


@pytest.mark.parametrize("content", ["a", "\\u4e2d", "null"])
def test_reading_a_text_takes_its_memory_once(content: str) -> None:
    body = b'{"prompt":"%s"}' % (content.encode() * (4 * MIB // len(content)))
    tracemalloc.start()
    try:
        restored(body)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 1.6 * len(body), "the decoding of a part of 1 MiB takes memory, too"


def test_a_large_body_of_short_strings_is_refused() -> None:
    """One call would parse it."""
    with pytest.raises(BadRequestError, match="besides its strings of more than 8192 bytes"):
        parse(json.dumps({"messages": ["a" * 1000] * 10_000}).encode())


@pytest.mark.parametrize("content", [PICTURE * 20, "hello wo " * 2 * MIB, '"' * 8 * MIB])
def test_a_body_is_parsed_without_a_copy(content: str) -> None:
    part = {"type": "image_url", "image_url": {"url": content}}
    body = json.dumps({"messages": [{"role": "user", "content": [part]}], "model": "m"}).encode()
    tracemalloc.start()
    try:
        parse(body)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < len(body) / 10


def test_a_body_is_released_with_its_last_reference() -> None:
    """Not at the next garbage collection: characters of several bytes lie across ends of parts."""
    body = json.dumps({"prompt": "\u20ac" * MIB}, ensure_ascii=False).encode()
    references = sys.getrefcount(body)
    gc.disable()
    try:
        restored(body)
        assert sys.getrefcount(body) == references
    finally:
        gc.enable()


def test_a_long_name_of_a_model_is_not_a_mark() -> None:
    policy = Policy(RouterConfig())
    body = json.dumps({"model": "m" * 300_000, "input": "x"}).encode()
    asked = policy.parse(Plane.PROXY, "POST", "/v1/score", {}, body)
    assert (asked.model, asked.body) == (None, body)
    assert parse(body).model == "m" * 300_000
