"""The tokenizer of the simulated model: words of four letters, one token each.

Any other text has tokens too, one per byte of UTF-8, so that different texts
are different prompts. White space parts words and is no token.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

_CONSONANTS: Final = "bcdfghjklmnpqrstvwxz"
_VOWELS: Final = "aeiou"
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_MAX_WORD_CHARS: Final = 100
"""A longer word that is none of the vocabulary is one token: base64 is no prose."""
_NOT_RUSTS_SPACE: Final = "\x1c\x1d\x1e\x1f"
"""White space for Python, and not for the tokenizer."""
_UNKNOWN: Final = "<unk>"

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] or '' }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def _words() -> list[str]:
    return ["".join(each) for each in product(_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS)]


WORDS: Final[Sequence[str]] = tuple(_words())
"""Token ``i`` of the first `NUM_WORDS` is word ``i``."""
NUM_WORDS: Final = len(WORDS)


def _byte_chars() -> list[str]:
    """Return the character that stands for each byte (GPT-2's table)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


@cache
def _vocabulary() -> dict[str, int]:
    chars = _byte_chars()
    roles = [f"<|{role}|>" for role in _ROLES]
    every = [*WORDS, _UNKNOWN, *roles, *chars, *(f"##{char}" for char in chars)]
    return {token: index for index, token in enumerate(every)}


@cache
def _plain_tokens() -> dict[str, int]:
    """Return the tokens that are written as they read: other characters stand for bytes."""
    return {token: index for token, index in _vocabulary().items() if token.isascii()}


@cache
def _lengths() -> list[int]:
    """Return the lengths that tokens have, the longest first."""
    return sorted({len(token) for token in _vocabulary()}, reverse=True)


def vocabulary_size() -> int:
    """Return the number of tokens."""
    return len(_vocabulary())


def text_of(token_ids: Iterable[int]) -> str:
    """Return the text of tokens: words joined by one space. `tokens_of` gives them back.

    Raises ValueError for an id that is no word's.
    """
    words = WORDS
    try:
        return " ".join([words[token] for token in token_ids])
    except IndexError:
        raise ValueError(f"not all token ids are words': those are below {NUM_WORDS}") from None


def tokens_of(text: str) -> list[int]:
    """Return the tokens of any text, as the tokenizer of `make_tokenizer` gives them."""
    words = text.split()
    if any(char in text for char in _NOT_RUSTS_SPACE):
        words = _split_as_rust(text)
    try:
        return [*map(_plain_tokens().__getitem__, words)]
    except KeyError:
        return [token for word in words for token in _tokens_of_word(word)]


def _split_as_rust(text: str) -> list[str]:
    """Split at white space that is such for Unicode; Python counts four controls, too."""
    kept = text.translate({ord(char): 0xF0000 + ord(char) for char in _NOT_RUSTS_SPACE})
    back = {0xF0000 + ord(char): char for char in _NOT_RUSTS_SPACE}
    return [word.translate(back) for word in kept.split()]


def _tokens_of_word(word: str) -> list[int]:
    known = _vocabulary()
    chars = _chars_of_bytes()
    mapped = "".join([chars[byte] for byte in word.encode()])
    if len(mapped) > _MAX_WORD_CHARS:
        return [known[_UNKNOWN]]
    first = next(length for length in _lengths() if mapped[:length] in known)
    return [known[mapped[:first]], *(known[f"##{char}"] for char in mapped[first:])]


@cache
def _chars_of_bytes() -> list[str]:
    return _byte_chars()


def make_tokenizer(directory: Path) -> None:
    """Write the tokenizer's files, as a model's directory has them."""
    vocabulary = _vocabulary()
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "WhitespaceSplit"},
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": False,
                    "use_regex": False,
                },
            ],
        },
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "model": {
            "type": "WordPiece",
            "unk_token": _UNKNOWN,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": _MAX_WORD_CHARS,
            "vocab": vocabulary,
        },
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    model = {"model_type": "simulated", "vocab_size": len(vocabulary)}
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config),
        ("config.json", model),
    ):
        _write(directory / name, json.dumps(content))


def _write(path: Path, text: str) -> None:
    """Write a file, but not anew: a router may be reading what another fleet has put there."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
