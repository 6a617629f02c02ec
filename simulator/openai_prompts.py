"""The simulated model's tokenizer, and prompts as tokens with their chain of block keys.

The vocabulary has words of four letters, one token each. Any other text has one token per byte of
UTF-8, so that different texts are different prompts. White space separates words and has no token.

To tokenize and hash 12,000 tokens takes 5 ms, and most of a prompt was seen before, by this or
another replica. So all replicas share one memo of pieces of prompts, by the pieces before them.
"""

import json
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

from warmroute_common.keys import HashScheme, chunk_keys, prompt_extra_keys

_CONSONANTS: Final = "bcdfghjklmnpqrstvwxz"
_VOWELS: Final = "aeiou"
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_MAX_WORD_CHARS: Final = 100
"""A longer word outside the vocabulary is one token, as for base64."""
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
    """Write a file unless it exists: a router may be reading what another fleet has written."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


_PIECE_CHARS: Final = 2048
_PIECE_IDS: Final = 512
_MAX_PIECES: Final = 16_384
"""About 80 MB; beyond that the piece that was left the longest ago is forgotten."""
_STRIDE: Final = 7919
"""Between the words of an answer; it has no factor with their number, so none comes twice soon."""


class BadPromptError(ValueError):
    """A prompt that the simulated model cannot take; the text says why."""


@dataclass(frozen=True, slots=True)
class SimPrompt:
    """A prompt and the answer to it."""

    token_ids: "array[int]"
    """Tokens of the prompt."""
    output_ids: Sequence[int]
    block_keys: Sequence[bytes]
    """Keys of the full blocks of both together."""
    chunk_keys: Sequence[bytes]
    salt: str | None

    def tokens(self, start: int, end: int) -> list[int]:
        """Return token ids of prompt and answer."""
        size = len(self.token_ids)
        ids = self.token_ids[start : min(end, size)].tolist()
        if end > size:
            ids += self.output_ids[max(0, start - size) : end - size]
        return ids


@dataclass(slots=True, eq=False)
class _Piece:
    """A piece of prompts after certain other pieces; ``tail``: its tokens of no full block."""

    serial: int
    ids: "array[int]"
    keys: tuple[bytes, ...]
    tail: tuple[int, ...]


class Prompts:
    """Makes prompts of texts and token ids, remembering a bounded number of pieces."""

    def __init__(
        self, scheme: HashScheme, block_tokens: int, blocks_per_chunk: int, *, seed: int = 0
    ) -> None:
        self._scheme = scheme
        self._block_tokens = block_tokens
        self._blocks_per_chunk = blocks_per_chunk
        self._seed = seed
        self._pieces: OrderedDict[Hashable, _Piece] = OrderedDict()
        self._last_serial = 0

    def of_text(self, text: str, output_tokens: int, salt: str | None = None) -> SimPrompt:
        """Return the prompt of a text."""
        return self._prompt(_cut_text(text), output_tokens, salt)

    def of_ids(self, ids: Sequence[int], output_tokens: int, salt: str | None = None) -> SimPrompt:
        """Return the prompt of token ids; raise `BadPromptError` for one out of the vocabulary."""
        try:
            packed = array("H", ids).tobytes()
        except (TypeError, OverflowError):
            raise BadPromptError("a prompt of token ids must be a list of small integers") from None
        if ids and max(ids) >= vocabulary_size():
            raise BadPromptError(f"Token id {max(ids)} is out of vocabulary")
        size = 2 * _PIECE_IDS
        pieces = (packed[start : start + size] for start in range(0, len(packed), size))
        return self._prompt(pieces, output_tokens, salt)

    def _prompt(
        self, pieces: Iterator[str | bytes], output_tokens: int, salt: str | None
    ) -> SimPrompt:
        ids = array("H")
        keys: list[bytes] = []
        piece = _Piece(0, ids, (), ())
        for each in pieces:
            piece = self._after(piece, each, keys, salt)
            ids.extend(piece.ids)
            keys += piece.keys
        if not ids:
            raise BadPromptError("the prompt has no tokens")
        output = self._answer(keys, piece.tail, output_tokens)
        # The last token that is given is never run, so it has no KV.
        new = self._chain((*piece.tail, *output[:-1]), keys, salt)
        keys += new
        return SimPrompt(ids, output, keys, chunk_keys(keys, self._blocks_per_chunk), salt)

    def _after(
        self, before: _Piece, content: str | bytes, keys: Sequence[bytes], salt: str | None
    ) -> _Piece:
        name = (before.serial or salt, content)
        known = self._pieces.get(name)
        if known is not None:
            self._pieces.move_to_end(name)
            return known
        ids = tokens_of(content) if isinstance(content, str) else array("H", content).tolist()
        tokens = (*before.tail, *ids)
        new = self._chain(tokens, keys, salt)
        self._last_serial += 1
        tail = tokens[len(new) * self._block_tokens :]
        piece = _Piece(self._last_serial, array("H", ids), tuple(new), tail)
        self._pieces[name] = piece
        if len(self._pieces) > _MAX_PIECES:
            self._pieces.popitem(last=False)
        return piece

    def _chain(self, tokens: Sequence[int], keys: Sequence[bytes], salt: str | None) -> list[bytes]:
        every, first = prompt_extra_keys(cache_salt=salt)
        return self._scheme.chain(
            tokens,
            self._block_tokens,
            parent=keys[-1] if keys else None,
            extra_keys=every,
            first_extra_keys=first,
        )

    def _answer(self, keys: Sequence[bytes], tail: Sequence[int], tokens: int) -> list[int]:
        """Return the answer: the same for the same prompt and seed, as at temperature 0."""
        start = int.from_bytes(keys[-1][:4], "big") if keys else 0
        start += sum(tail) + self._seed
        return [(start + _STRIDE * index) % NUM_WORDS for index in range(tokens)]


def _cut_text(text: str) -> Iterator[str]:
    """Cut a text before spaces, always at the same places from its beginning on."""
    start = 0
    while len(text) - start > _PIECE_CHARS:
        end = text.find(" ", start + _PIECE_CHARS)
        if end < 0:
            break
        yield text[start:end]
        start = end
    yield text[start:]


def chat_text(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
    """Return the prompt of a conversation, as `vocabulary.CHAT_TEMPLATE` has it.

    Raises `BadPromptError` if it is not text.
    """
    try:
        turns = [f"<|{each['role']}|> {_content(each.get('content'))}\n" for each in messages]
    except (KeyError, TypeError, AttributeError):
        raise BadPromptError(
            "'messages' must be a list of objects with 'role' and 'content'"
        ) from None
    if not turns:
        raise BadPromptError("'messages' is empty")
    if add_generation_prompt:
        turns.append("<|assistant|>\n")
    return "".join(turns)


def _content(content: object) -> str:
    if isinstance(content, list):
        try:
            return "\n".join([part if isinstance(part, str) else part["text"] for part in content])
        except (KeyError, TypeError):
            raise BadPromptError(
                "only text parts are taken: the simulated model sees text"
            ) from None
    if content is not None and not isinstance(content, str):
        raise BadPromptError("a message's content must be text")
    return content or ""
