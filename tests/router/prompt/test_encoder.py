"""Tokens put together from remembered pieces are those of the whole text."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from router.prompt import text_cutter
from router.prompt.text_cutter import Cutter, HugePartError
from router.prompt.token_cache import Encoder, Memo, TooManyTokensError
from tests.router.prompt.helpers import LONG
from tests.router.prompt.tokenizer_makers import KINDS, SPECIALS, TEXT, texts

# Kinds of which it is known beforehand that plain text in them cannot be cut.
UNCUT = {"legacy-llama", "single-words", "spaced-special"}


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


def encoder_of(kind: str, max_bytes: int = 1 << 24) -> Encoder:
    return Encoder(tokenizer_of(kind), Memo(max_bytes))


def ids_of(encoder: Encoder, text: str, *, special: bool = False) -> list[int]:
    pieces = encoder.cut(text, add_special_tokens=special).pieces()
    return [token for piece in pieces for token in piece.ids]


def expected(kind: str, text: str, *, special: bool = False) -> list[int]:
    found: list[int] = tokenizer_of(kind).encode(text, add_special_tokens=special).ids
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_tokens_of_the_whole(kind: str) -> None:
    encoder = encoder_of(kind)
    for text in texts():
        for special in (False, True):
            for _ in range(2):  # again, and remembered
                assert ids_of(encoder, text, special=special) == expected(
                    kind, text, special=special
                ), text


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - UNCUT))
def test_an_unchanged_beginning_is_not_tokenized_again(kind: str) -> None:
    memo = Memo(1 << 24)
    encoder = Encoder(tokenizer_of(kind), memo)
    text = LONG[:12_000]
    ids_of(encoder, text)
    before = memo.tokens_tokenized
    ids_of(encoder, text + " and so it goes on")
    assert memo.tokens_tokenized - before < 0.25 * before


@pytest.mark.parametrize("kind", ["legacy-llama", "spaced-special"])
def test_what_cannot_be_cut_is_still_split_at_special_tokens(kind: str) -> None:
    memo = Memo(1 << 24)
    encoder = Encoder(tokenizer_of(kind), memo)
    turn = "<|user|>" + LONG[:3000] + "<|assistant|>"
    ids_of(encoder, turn)
    before = memo.tokens_tokenized
    ids_of(encoder, turn + "yes</s><|user|>more")
    assert memo.tokens_tokenized - before < 20


def test_texts_differ_at_the_beginning_only_where_the_tokenizer_does() -> None:
    # The same words first and after a special token have other tokens here,
    # so one must not be remembered for the other.
    encoder = encoder_of("metaspace-first-split")
    assert ids_of(encoder, "word")[0] != ids_of(encoder, "<s>word")[1]
    assert ids_of(encoder, "<s>word<s>word") == expected("metaspace-first-split", "<s>word<s>word")


def test_without_room_everything_is_tokenized_anew() -> None:
    memo = Memo(0)
    encoder = Encoder(tokenizer_of("llama3"), memo)
    for text in texts():
        assert ids_of(encoder, text) == expected("llama3", text)
    memo.check()
    assert memo.used_bytes == 0


def test_a_text_of_too_many_tokens_is_not_tokenized_to_its_end() -> None:
    memo = Memo(1 << 24)
    encoder = Encoder(tokenizer_of("llama3"), memo)
    text = "".join(f"the number {number} and " for number in range(50_000))
    with pytest.raises(TooManyTokensError):
        encoder.cut(text, add_special_tokens=False).pieces(1_000)
    assert 1_000 < memo.tokens_tokenized < 100_000
    assert len(ids_of(encoder, text)) > 200_000
    with pytest.raises(TooManyTokensError):
        encoder.cut("the same words and " * 1_000, add_special_tokens=False).pieces(1_000)


def test_text_that_is_not_unicode_is_an_error() -> None:
    with pytest.raises((UnicodeEncodeError, TypeError)):
        encoder_of("gpt2").cut("a\ud800", add_special_tokens=False).pieces()


ATOMS = st.one_of(
    st.sampled_from(
        [
            *SPECIALS,
            *("<left>", "<right>", "<|use", "  ", "café", "brown fox", "dog", "END", "<mask>"),
            *(" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "'s", "'LL", "e\u0301", "\u0301"),
            *("日本", "한국", "👩\u200d👩", "ﬁ", "İ", "ß", "▁", "Ġ", "x▁y"),
        ]
    ),
    st.text(max_size=8),
    st.sampled_from(" ".join(TEXT[:7]).split(" ")).map(lambda word: word + " "),
)
# Long plain stretches in between, or nothing would ever be cut.
STRETCHES = st.integers(0, 500).flatmap(
    lambda start: st.integers(0, 2500).map(lambda length: LONG[start : start + length])
)
TEXTS = st.lists(st.one_of(ATOMS, ATOMS, ATOMS, STRETCHES), max_size=12).map("".join)


def edited(draw: Callable[..., Any], text: str) -> str:
    """Return ``text`` with something inserted, removed or put behind it."""
    at = draw(st.integers(0, len(text)))
    to = draw(st.integers(at, min(len(text), at + 40)))
    return f"{text[:at]}{draw(ATOMS)}{text[to:]}"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, suppress_health_check=list(HealthCheck), print_blob=True)
@given(data=st.data())
def test_remembered_tokens_equal_fresh_ones_after_any_edit(kind: str, data: st.DataObject) -> None:
    encoder = encoder_of(kind, max_bytes=data.draw(st.sampled_from([2_000, 1 << 24])))
    text = data.draw(TEXTS)
    for _ in range(4):
        special = data.draw(st.booleans())
        assert ids_of(encoder, text, special=special) == expected(kind, text, special=special)
        text = edited(data.draw, text)


LETTERS = "sTéßİгйЖ词語龥한がカｶﾞーกָא\u0915\u093e\u0958ﬁªʰ"  # noqa: RUF001
OTHERS = " \n\t'’!,/=<|>_0.。，、！？\u0301\u200d\u00a0²👩\u30fb"  # noqa: RUF001
WORDS = (
    st.sampled_from(["'s", "T'LL", ""]) | st.text(LETTERS, max_size=3) | st.text(OTHERS, max_size=3)
)


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "o200k", "deepseek"])
@pytest.mark.parametrize("normalizer", ["NFC", "NFD", "NFKC", "NFKD", "Lowercase"])
@settings(max_examples=150, suppress_health_check=list(HealthCheck), print_blob=True)
@given(words=st.lists(WORDS, max_size=60))
def test_texts_are_cut_at_the_ends_of_words(kind: str, normalizer: str, words: list[str]) -> None:
    """The words that the tokenizer splits the parts into are those of the whole."""
    tokenizer, cutter = splitting(kind, normalizer)

    def split(text: str) -> list[str]:
        normalized = tokenizer.normalizer.normalize_str(text)
        return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized)]

    text = "".join(words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_cutter, "CUT_CHARS", 2)
        patch.setattr(text_cutter, "SEARCHED_CHARS", 4)
        parts = [part.text for part in cutter.parts(text)]
    assert "".join(parts) == text
    assert [word for part in parts for word in split(part)] == split(text)


ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERNS = {
    "o200k": [
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{ENDINGS}|"
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+"
        rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{ENDINGS}|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek": [
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}


@cache
def splitting(kind: str, normalizer: str) -> tuple[Tokenizer, Cutter]:
    tokenizer = KINDS["gpt2" if kind == "gpt2" else "llama3"]()
    if kind in PATTERNS:
        patterns = [Split(Regex(each), "isolated") for each in PATTERNS[kind]]
        bytes_of = ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = Sequence([*patterns, bytes_of])
    tokenizer.normalizer = getattr(normalizers, normalizer)()
    cutter = Cutter(json.loads(tokenizer.to_str()))
    assert cutter.splits_words
    return tokenizer, cutter


@pytest.mark.parametrize(
    "text", ["这是一段很长的文字。", "iVBOR/w0KGgo+", "съешь же ещё. ", "した、"]
)
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2"])
def test_no_part_of_prose_is_huge(kind: str, text: str) -> None:
    encoder = encoder_of(kind)
    prose = encoder.cut(text * (500_000 // len(text)), add_special_tokens=False)
    assert max(len(part.text) for part in prose.parts) < 2_100
    for huge in ("a" * 40_000, "👩" * 10_000):
        with pytest.raises(HugePartError):
            encoder.cut(huge, add_special_tokens=False)
    assert encoder.cut("a" * 30_000, add_special_tokens=False).parts


def test_a_text_that_cannot_be_cut_may_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoder, "_cuts_well", lambda *_: False)
    encoder = Encoder(tokenizer_of("llama3"), Memo(1 << 20))
    assert len(encoder.cut(LONG * (100_000 // len(LONG)), add_special_tokens=False).parts) == 1


@pytest.mark.parametrize("kind", ["gemma", "unigram", "legacy-llama", "single-words"])
def test_parts_are_bounded_where_prose_may_have_long_ones(kind: str) -> None:
    """Chinese has no spaces; some tokenizers' texts cannot be cut at all."""
    encoder = encoder_of(kind)
    for text in ("这是一段很长的文字。" * 30_000, "a" * 1_000_000):
        assert len(encoder.cut(text, add_special_tokens=False).parts) == 1
        with pytest.raises(HugePartError):
            encoder.cut(2 * text, add_special_tokens=False)
