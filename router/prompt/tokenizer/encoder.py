"""Text to tokens, with the tokens of what has been seen before taken from the memo."""

import json
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer

from router.prompt.tokenizer.split_points import CUT_CHARS, Cutter, Part, longest_first
from router.prompt.tokenizer.token_cache import Memo, Piece
from warmroute_common.config_reader import ConfigError

_log = logging.getLogger(__name__)

_PROBES: Final = ("a", "Hello, world", " x\n", "é 12")


@dataclass(frozen=True, slots=True)
class CutText:
    """A text in parts whose tokens, in a row, are its own; thread-safe."""

    parts: Sequence[Part]
    tokenizer: Tokenizer
    memo: Memo
    space: object
    """Keeps the texts of this tokenizer apart from those of others in the memo."""

    def new_chars(self) -> int:
        """Return how many characters would have to be tokenized now."""
        return sum(len(name[1]) for name in self._names() if not self.memo.knows(name))

    def pieces(self) -> list[Piece]:
        """Return the pieces, tokenizing the parts that are not in the memo, each once.

        Raises `UnicodeEncodeError` or TypeError for text that is not Unicode.
        """
        names = self._names()
        known = self.memo.find(names)
        missing = [name for name in names if name not in known]
        if missing:
            texts = [text for _, text in missing]
            made = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for name, encoding in zip(missing, made, strict=True):
                known[name] = self.memo.add(name, encoding.ids, 2 * len(name[1]))
        return [
            Piece.of_token(part.token_id)
            if part.token_id is not None
            else known[(self.space, part.text)]
            for part in self.parts
        ]

    def _names(self) -> Collection[tuple[object, str]]:
        """Return the memo's name of each part that is text, each once."""
        return {(self.space, part.text): None for part in self.parts if part.token_id is None}


class Encoder:
    """Tokenizes with one tokenizer; thread-safe.

    The tokenizer must neither truncate nor pad. ``memo`` may be shared with other encoders.
    Raises `ConfigError` for a tokenizer that puts other tokens around each text.
    """

    def __init__(self, tokenizer: Tokenizer, memo: Memo) -> None:
        self._memo = memo
        self._space = object()
        description = json.loads(tokenizer.to_str())
        # Special tokens at the ends are put there by the post-processor. Without
        # it, pieces can be tokenized one by one, and the ends added to all.
        self._bare = Tokenizer.from_str(json.dumps({**description, "post_processor": None}))
        self._before, self._after = self._ends(tokenizer)
        added = tokenizer.get_added_tokens_decoder().values()
        special = [one.content for one in added if one.special]
        self._special = re.compile(longest_first(special) or r"(?!)")
        self._cutter = Cutter(description)
        if not self._cuts_well(special):
            _log.warning("this tokenizer's texts cannot be cut: every prompt is tokenized anew")
            self._cutter.splits_specials = self._cutter.splits_text = False

    @property
    def adds_ends(self) -> bool:
        """Whether special tokens are added to texts, where they are asked for."""
        return bool(self._before or self._after)

    def holds_special(self, text: str) -> bool:
        """Whether a special token is written out in a text."""
        return self._special.search(text) is not None

    def cut(self, text: str, *, add_special_tokens: bool) -> CutText:
        """Return the text in parts that are tokenized one by one."""
        parts = self._cutter.parts(text)
        if add_special_tokens:
            parts = [*self._before, *parts, *self._after]
        return CutText(parts, self._bare, self._memo, self._space)

    def _ends(self, tokenizer: Tokenizer) -> tuple[list[Part], list[Part]]:
        """Return the tokens put before and after any text."""
        found: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        for probe in _PROBES:
            bare: list[int] = self._bare.encode(probe, add_special_tokens=False).ids
            whole: list[int] = tokenizer.encode(probe, add_special_tokens=True).ids
            starts = range(len(whole) - len(bare) + 1)
            at = next((at for at in starts if whole[at : at + len(bare)] == bare), len(whole))
            found.add((tuple(whole[:at]), tuple(whole[at + len(bare) :])))
        if len(found) != 1:
            raise ConfigError(
                "tokenizer.json",
                "post_processor",
                "puts other tokens around each text",
                "its prompts can only be matched by text",
            )
        before, after = found.pop()
        return [Part("", one) for one in before], [Part("", one) for one in after]

    def _cuts_well(self, special: Sequence[str]) -> bool:
        """Whether a sample's pieces have the tokens of the whole, as they should."""
        mark = min(special, default="")
        words = "The quick brown fox jumps over 13 lazy dogs, doesn't it?\n\n "
        sample = words + mark + words * (1 + 3 * CUT_CHARS // len(words)) + mark + words
        cut = CutText(self._cutter.parts(sample), self._bare, Memo(1 << 20), self._space)
        together = [token for piece in cut.pieces() for token in piece.ids]
        return together == self._bare.encode(sample, add_special_tokens=False).ids
