"""Text to tokens, with the tokens of what has been seen before taken from the memo."""

import json
import logging
import re
from collections.abc import Hashable, Sequence
from math import inf
from typing import Any, Final

from tokenizers import Tokenizer

from router.prompt.tokenizer.split_points import CUT_CHARS, Cutter, Part, longest_first
from router.prompt.tokenizer.token_cache import Memo, Piece

_log = logging.getLogger(__name__)

_PROBES: Final = ("", "a", "Hello, world", " x\n", "é 12")


class MuchIsNew(Exception):  # noqa: N818  (says what is so, is no failure)
    """More of a text would have to be tokenized than was allowed for."""


class Encoder:
    """Tokenizes with one tokenizer; thread-safe.

    The tokenizer must neither truncate nor pad.
    """

    def __init__(self, tokenizer: Tokenizer, memo: Memo) -> None:
        self._memo = memo
        self._whole = tokenizer
        description = json.loads(tokenizer.to_str())
        # Special tokens at the ends are put there by the post-processor. Without
        # it, pieces can be tokenized one by one, and the ends added to all.
        self._bare = Tokenizer.from_str(json.dumps({**description, "post_processor": None}))
        self._ends = self._find_ends()
        added = tokenizer.get_added_tokens_decoder().values()
        special = longest_first(one.content for one in added if one.special)
        self._special = re.compile(special or r"(?!)")
        # Some tokenizers prepend a space to the beginning of the text only: a
        # piece from elsewhere then needs something in front of it.
        self._first_differs = _has_value(description.get("pre_tokenizer"), "first")
        cutter = Cutter(description)
        self._cutter = cutter if self._cuts_well(cutter) else None

    @property
    def splits_specials(self) -> bool:
        """Whether what stands between two special tokens is found again by itself."""
        return self._cutter is not None and self._cutter.splits_specials

    @property
    def splits_text(self) -> bool:
        """Whether an unchanged beginning of a long text is found again by itself."""
        return self._cutter is not None and self._cutter.splits_text

    @property
    def adds_ends(self) -> bool:
        """Whether special tokens are added to texts, where they are asked for."""
        return self._ends != ([], [])

    def holds_special(self, text: str) -> bool:
        """Whether a special token is written out in a text."""
        return self._special.search(text) is not None

    def encode(
        self, text: str, *, add_special_tokens: bool, most_new_chars: float = inf
    ) -> list[Piece]:
        """Return the pieces whose ids, in a row, are the tokens of ``text``.

        Raises `UnicodeEncodeError` or TypeError for text that is not Unicode, and
        `MuchIsNew`, before any work, if more characters than ``most_new_chars`` would
        have to be tokenized.
        """
        if not add_special_tokens:
            return self._encode(text, self._cutter, self._memo, most_new_chars)
        if self._ends is None:
            names = [("whole", text)]
            return self._remembered(
                names, [text], self._memo, self._whole, most_new_chars=most_new_chars
            )
        before, after = self._ends
        return [*before, *self._encode(text, self._cutter, self._memo, most_new_chars), *after]

    def _encode(
        self, text: str, cutter: Cutter | None, memo: Memo, most_new_chars: float = inf
    ) -> list[Piece]:
        parts = [Part(text)] if cutter is None else list(cutter.parts(text))
        names: list[Hashable] = []
        texts: list[str] = []
        for index, part in enumerate(parts):
            if part.token_id is not None:
                continue
            inside = self._first_differs and index > 0
            names.append(("inside", part.text) if inside else part.text)
            texts.append(part.text)
        barrier = cutter.barrier if cutter is not None and self._first_differs else None
        plain = iter(
            self._remembered(names, texts, memo, self._bare, barrier, most_new_chars=most_new_chars)
        )
        return [
            next(plain) if one.token_id is None else Piece.of_token(one.token_id) for one in parts
        ]

    def _remembered(
        self,
        names: Sequence[Hashable],
        texts: Sequence[str],
        memo: Memo,
        tokenizer: Tokenizer,
        barrier: str | None = None,
        *,
        most_new_chars: float,
    ) -> list[Piece]:
        """Return each text's piece, tokenizing those that are not in the memo, each once."""
        by_name = dict(zip(names, texts, strict=True))
        if sum(map(len, texts)) > most_new_chars:
            new_chars = sum(len(by_name[name]) for name in memo.unknown(names))
            if new_chars > most_new_chars:
                raise MuchIsNew
        pieces: dict[Hashable, Piece | None] = dict(zip(names, memo.find(names), strict=True))
        missing = [name for name, piece in pieces.items() if piece is None]
        given = [
            barrier + by_name[name] if barrier and isinstance(name, tuple) else by_name[name]
            for name in missing
        ]
        made = tokenizer.encode_batch_fast(given, add_special_tokens=tokenizer is self._whole)
        for name, encoding in zip(missing, made, strict=True):
            ids = encoding.ids[1:] if barrier and isinstance(name, tuple) else encoding.ids
            pieces[name] = memo.add(name, ids, 2 * len(by_name[name]))
        return [piece for name in names if (piece := pieces[name]) is not None]

    def _find_ends(self) -> tuple[list[Piece], list[Piece]] | None:
        """Return the tokens put before and after any text, or None if they depend on it."""
        found: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for probe in _PROBES:
            bare: list[int] = self._bare.encode(probe, add_special_tokens=False).ids
            whole: list[int] = self._whole.encode(probe, add_special_tokens=True).ids
            at = next(
                (
                    start
                    for start in range(len(whole) - len(bare) + 1)
                    if whole[start : start + len(bare)] == bare
                ),
                None,
            )
            if at is None:
                return None
            if bare:  # without a text, what is before and after it looks the same
                found.add((tuple(whole[:at]), tuple(whole[at + len(bare) :])))
        if len(found) != 1:
            return None
        before, after = found.pop()
        return [Piece.of_token(one) for one in before], [Piece.of_token(one) for one in after]

    def _cuts_well(self, cutter: Cutter) -> bool:
        """Whether a sample's pieces have the tokens of the whole, as they should."""
        barrier = cutter.barrier or ""
        words = "The quick brown fox jumps over 13 lazy dogs, doesn't it?\n\n "
        sample = words + barrier + words * (1 + 3 * CUT_CHARS // len(words)) + barrier + words
        pieces = self._encode(sample, cutter, Memo(1 << 20))
        together = [token for piece in pieces for token in piece.ids]
        if together == self._bare.encode(sample, add_special_tokens=False).ids:
            return True
        _log.warning("this tokenizer's texts cannot be cut: every prompt is tokenized anew")
        return False


def _has_value(description: Any, value: str) -> bool:
    if isinstance(description, dict):
        return any(_has_value(one, value) for one in description.values())
    if isinstance(description, list):
        return any(_has_value(one, value) for one in description)
    return bool(description == value)
