"""Where texts may be cut, and where not."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt.text_cutter import CUT_CHARS, Cutter, longest_first
from tests.router.prompt.tokenizer_makers import KINDS

CUT_TEXT = {
    "gpt2",
    "llama3",
    "qwen2",
    *(
        f"metaspace-{scheme}-{how}"
        for scheme in ("first", "always", "never")
        for how in ("split", "whole")
    ),
    "gemma",
    "wordpiece",
    "unigram",
    "greedy-specials",
}


def description_of(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(KINDS[kind]().to_str())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_known_to_be_local_is_cut(kind: str) -> None:
    assert Cutter(description_of(kind)).splits_text == (kind in CUT_TEXT)


def test_a_tokenizer_that_looks_around_its_tokens_is_never_cut() -> None:
    cutter = Cutter(description_of("single-words"))
    assert not cutter.splits_text
    assert not cutter.splits_specials


def split(pattern: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False, **more}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Strip", "strip_left": True, "strip_right": True}),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}),
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "a b"}, "content": "c"}),
        ("pre_tokenizer", split({"Regex": "a b|."})),
        ("pre_tokenizer", split({"Regex": r"\p{N}"})),
        ("pre_tokenizer", split({"Regex": r" ?\p{L}+"}, invert=True)),
        ("pre_tokenizer", split({"Regex": r" ?\p{L}+"}, behavior="MergedWithNext")),
        ("pre_tokenizer", split({"String": " "}, behavior="MergedWithPrevious")),
        ("pre_tokenizer", {"type": "ByteLevel", "use_regex": False}),
        ("pre_tokenizer", {"type": "UnicodeScripts"}),
        ("pre_tokenizer", None),
    ],
)
def test_what_is_not_known_is_not_cut(part: str, value: dict[str, Any] | None) -> None:
    assert not Cutter({**description_of("gpt2"), part: value}).splits_text


def test_a_merge_over_a_space_forbids_cuts() -> None:
    description = description_of("gemma")
    assert Cutter(description).splits_text
    description["model"]["merges"].append(["e", "▁t"])
    assert not Cutter(description).splits_text


def test_dropout_forbids_cuts() -> None:
    description = description_of("gpt2")
    description["model"]["dropout"] = 0.1
    assert not Cutter(description).splits_text


def test_parts_are_the_text() -> None:
    cutter = Cutter(description_of("llama3"))
    text = "<s>" + "some words and more " * 500 + "<|user|><|assistant|>" + "x" * 5000
    parts = list(cutter.parts(text))
    assert "".join(part.text for part in parts) == text
    assert all(part.text for part in parts)
    assert [part.text for part in parts if part.token_id is not None] == [
        "<s>",
        "<|user|>",
        "<|assistant|>",
    ]
    longest = max(len(part.text) for part in parts if "x" not in part.text)
    assert longest < CUT_CHARS + 50


def test_a_longer_text_is_cut_at_the_same_places() -> None:
    cutter = Cutter(description_of("llama3"))
    text = "some words and more " * 500
    before = [part.text for part in cutter.parts(text)]
    assert [part.text for part in cutter.parts(text + "and the rest")][: len(before) - 1] == before[
        :-1
    ]


def test_thousands_of_tokens_and_long_ones_are_searched_quickly() -> None:
    contents = [f"<unused{number}>" for number in range(6000)] + ["<" + "x" * 5000]
    pattern = re.compile(longest_first(contents))
    assert pattern.findall("<unused12> <unused123 <unused5999><") == ["<unused12>", "<unused5999>"]


CONTENTS = st.lists(st.text(alphabet="ab<|.*", min_size=1, max_size=5), min_size=1, max_size=8)


@given(CONTENTS, st.text(alphabet="ab<|.*x", max_size=40))
def test_the_longest_of_several_is_found_first(contents: list[str], text: str) -> None:
    simple = "|".join(re.escape(one) for one in sorted(contents, key=len, reverse=True))
    assert re.findall(longest_first(contents), text) == re.findall(simple, text)
