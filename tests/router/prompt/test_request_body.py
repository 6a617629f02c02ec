"""What is read of a body, and how much of one may be structure."""

import json
import re
import tracemalloc
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from router.prompt import anthropic, drafter, prompt_input
from router.prompt.request_body import (
    MAX_MEMBERS,
    MAX_VALUES,
    parsed_bytes,
    prompt_fields,
    short_members,
    with_members,
    with_new_member,
)
from warmroute_common.api_errors import BadRequestError


def test_fields_that_routing_does_not_need_take_no_memory() -> None:
    lists = b"[" + b"[]," * 100_000 + b"[]]"
    body = b'{"model": "m", "prompt": null, "x": %s, "seed": 1}' % lists
    tracemalloc.start()
    try:
        assert prompt_fields(body) == {"model": "m", "prompt": None}
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < len(body) / 10


@pytest.mark.parametrize(
    ("value", "limit"),
    [("0", MAX_VALUES), ("[]", MAX_MEMBERS), ("{}", MAX_MEMBERS), ('{"k":0}', MAX_MEMBERS // 2)],
)
def test_values_are_counted_up_to_a_limit(value: str, limit: int) -> None:
    def body(count: int) -> bytes:
        return b'{"prompt":[' + b",".join([value.encode()] * count) + b"]}"

    parsed_bytes(body(limit - 5))
    with pytest.raises(BadRequestError, match="more than"):
        parsed_bytes(body(limit + 1))


@pytest.mark.parametrize(
    "text",
    ["[{:," * MAX_MEMBERS, '"[' * MAX_MEMBERS, "\\[" * MAX_MEMBERS, "\\" * 1001, "[\\"],
    ids=["structure", "quotes", "backslashes", "odd", "end"],
)
def test_what_stands_in_strings_is_no_structure(text: str) -> None:
    padding = ["," * MAX_VALUES]  # so that strings have to be told from structure
    body = json.dumps({"prompt": text, "x": padding, "y": text, text: 1}).encode()
    assert parsed_bytes(body) < len(body) + 10_000


@pytest.mark.parametrize("value", [b"[", b"[],", b"null,"], ids=["deep", "wide", "nulls"])
def test_counting_copies_no_large_part(value: bytes) -> None:
    body = b'{"tools":[' + value * (8 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(BadRequestError, match="more than"):
            parsed_bytes(body)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < len(body) / 2


def test_a_body_that_ends_within_a_string_has_a_size() -> None:
    assert parsed_bytes(b'{"prompt": "' + b"," * MAX_VALUES * 2) > 0


@pytest.mark.parametrize("value", [[], {}, 0.5, "ab", [1.5] * 10, {"k": {"l": [1]}}])
def test_the_size_is_at_least_what_is_parsed(value: Any) -> None:
    body = json.dumps({"messages": [value] * 10_000}).encode()
    tracemalloc.start()
    try:
        fields = prompt_fields(body)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(fields["messages"]) == 10_000
    assert kept_bytes / 2 < parsed_bytes(body) + 1_000
    assert parsed_bytes(body) < 4 * kept_bytes


def test_only_short_members_are_read_of_other_bodies() -> None:
    short = {"model": "m", "stream": True, "x_id": "7", "n": -1, "t": 0.5, "stop": None}
    others = {"input": ["a"], "tool": {"a": 1}, "long": "x" * 5_000}
    members = short_members(json.dumps(short | others).encode())
    assert {name: members[name] for name in short} == short
    assert members.keys() == (short | others).keys()
    assert all(isnan(float(members[name] or 0)) for name in others)
    assert short_members(b'{"model": "m", "x": ') == {}
    assert short_members(b'{"x":' + b"[" * 100_000) == {}


def test_another_model_leaves_the_rest_as_it_was() -> None:
    deep = "[" * 300 + "1.10" + "]" * 300
    body = b'{"a": 1e2, "model" : "alias", "deep": %s, "s": "\\u00e9 "}' % deep.encode()
    renamed = with_members(body, {"model": 'a "name"'})
    assert json.loads(renamed) == {**json.loads(body), "model": 'a "name"'}
    assert deep.encode() in renamed and b'"\\u00e9 "' in renamed and b"1e2" in renamed


def test_no_field_that_drafts_are_made_of_is_skipped() -> None:
    """Every name by which the drafter looks into a body."""
    sources = "".join(
        Path(module.__file__ or "").read_text(encoding="utf-8")
        for module in (anthropic, drafter, prompt_input)
    )
    patterns = (
        r'\bbody(?:\.get\(|\[)"(\w+)"',
        r'(?:_typed|_flag)\(body, "(\w+)"',
        r'_text_input\(body, "(\w+)"',
    )
    names = {name for each in patterns for name in re.findall(each, sources)}
    names |= {
        *prompt_input._TOKENIZED,
        *prompt_input._EMBEDDED,
        *prompt_input._ANSWERED,
        *drafter._MEDIA_SETTINGS,
    }
    assert len(names) > 25
    body = dict.fromkeys(names, 1)
    assert prompt_fields(json.dumps(body).encode()) == body


@pytest.mark.parametrize("body", [b"{}", b" { } ", b'{"a": 1.50}', b'\n{ "a":{}}'])
def test_a_new_member_changes_no_other_byte_of_a_body(body: bytes) -> None:
    made = with_new_member(body, "salt", 'a"b')
    assert json.loads(made) == {"salt": 'a"b', **json.loads(body)}
    assert made.endswith(body.partition(b"{")[2].lstrip())
