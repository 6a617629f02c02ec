"""Tokenizes text, and keeps the tokens and block keys of text that was seen before.

`Encoder` tokenizes the parts of a text (`router.prompt.text_cutter`) that are not remembered.

`Memo` is one least-recently-used store, bounded in bytes and shared by all tokenizers. It holds
pieces (text to token ids) and steps (a piece after other pieces, hashed in one way, to the keys of
the blocks that end in it). Texts are the dictionary's keys, so that a hash collision cannot give
wrong tokens. Each salt and each adapter is its own way of hashing, so tenants do not share steps.
"""

import json
import logging
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

from tokenizers import Tokenizer

from router.prompt.text_cutter import CUT_CHARS, SEARCHED_CHARS, Cutter, Part, longest_first
from warmroute_common.config_reader import ConfigError
from warmroute_common.keys import ExtraKeys, HashScheme

_log = logging.getLogger("warmroute.prompt")

_BATCH_BYTES: Final = 32 << 10
"""Tokenized at once: the tokenizer uses 50 to 200x this memory meanwhile."""

_ENTRY_BYTES: Final = 400
"""Size of a dictionary entry and its small objects, without its payload."""
_KEY_BYTES: Final = 80

_RUN_TOKENS: Final = 128
"""Token ids that a request gives directly are cached in runs of this length."""

_PROBES: Final = ("a", "Hello, world", " x\n", "é 12")


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A run of text and its tokens; the same object as long as it is remembered."""

    serial: int
    ids: "array[int]"
    nbytes: int = 0

    @classmethod
    def of_token(cls, token_id: int) -> "Piece":
        """Return the piece that is one special token; it needs no remembering."""
        return cls(-1 - token_id, array("I", (token_id,)))


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A piece in its place after other pieces, and the keys of the blocks that end in it."""

    serial: int
    keys: tuple[bytes, ...]
    nbytes: int


class _Place(NamedTuple):
    """A place in a sequence of pieces."""

    pieces: int
    before: Hashable
    """The step before it, by its serial; the way of hashing at the beginning."""
    tokens: int
    keys: int


class Memo:
    """Pieces and their keys, at most ``max_bytes`` of them (estimated); thread-safe.

    Readers in several threads may tokenize the same new text at the same time;
    the first to store it wins, and both results are the same.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.tokens_tokenized = 0
        self.blocks_hashed = 0
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, Piece | _Step] = OrderedDict()
        self.used_bytes = 0
        """Estimated, of all that is remembered."""
        self._serials = count(1)

    def find(self, names: Iterable[Hashable]) -> dict[Hashable, Piece]:
        """Return the pieces of the names that have one."""
        with self._lock:
            found = {name: self._get(name) for name in names}
        return {name: one for name, one in found.items() if isinstance(one, Piece)}

    def knows(self, name: Hashable) -> bool:
        """Whether a name has a piece; this is not counted as a use. It needs no lock."""
        return name in self._entries

    def add(self, name: Hashable, ids: Sequence[int], text_bytes: int) -> Piece:
        """Remember the tokens of a text that takes about ``text_bytes``; return its piece."""
        with self._lock:
            self.tokens_tokenized += len(ids)
            return self._piece(name, ids, text_bytes)

    def runs(self, token_ids: Sequence[int]) -> list[Piece]:
        """Return pieces for a prompt that is given as token ids."""
        starts = range(0, len(token_ids), _RUN_TOKENS)
        runs = [token_ids[start : start + _RUN_TOKENS] for start in starts]
        with self._lock:
            return [self._piece(("ids", *run), run, 8 * len(run)) for run in runs]

    def chain(
        self,
        pieces: Sequence[Piece],
        token_ids: Sequence[int],
        scheme: HashScheme,
        block_tokens: int,
        *,
        extra_keys: ExtraKeys = None,
        first_extra_keys: ExtraKeys = None,
    ) -> list[bytes]:
        """Return the keys of the full blocks of ``token_ids``, which ``pieces`` make up.

        Blocks are hashed only from the first piece on that has not been hashed
        in this place, with this scheme and these extra keys, before.
        """
        context = (scheme, block_tokens, extra_keys, first_extra_keys)
        keys, place = self._known_keys(pieces, context)
        start = len(keys) * block_tokens
        new = scheme.chain(
            token_ids[start:],
            block_tokens,
            parent=keys[-1] if keys else None,
            extra_keys=extra_keys,
            first_extra_keys=first_extra_keys,
        )
        keys += new
        if new:
            self._store_keys(pieces, place, keys, block_tokens, len(new))
        return keys

    def check(self) -> None:
        """Raise AssertionError unless sizes add up and the bound is kept."""
        with self._lock:
            assert self.used_bytes == sum(entry.nbytes for entry in self._entries.values())
            assert self.used_bytes <= self.max_bytes or not self._entries

    def _known_keys(
        self, pieces: Sequence[Piece], context: Hashable
    ) -> tuple[list[bytes], "_Place"]:
        """Return the keys of the first pieces, as far as they are known, and where that ends."""
        keys: list[bytes] = []
        before, at, tokens = context, 0, 0
        with self._lock:
            for piece in pieces:
                step = self._get((before, piece.serial))
                if not isinstance(step, _Step):
                    break
                keys += step.keys
                before = step.serial
                at += 1
                tokens += len(piece.ids)
        return keys, _Place(at, before, tokens, len(keys))

    def _store_keys(
        self,
        pieces: Sequence[Piece],
        place: "_Place",
        keys: Sequence[bytes],
        block_tokens: int,
        hashed: int,
    ) -> None:
        """Remember the keys from a place on, which may have been evicted meanwhile: see `_put`."""
        with self._lock:
            self.blocks_hashed += hashed
            start, before, tokens, stored = place
            for piece in pieces[start:]:
                name = (before, piece.serial)
                tokens += len(piece.ids)
                end = tokens // block_tokens
                step = self._get(name)
                if not isinstance(step, _Step):
                    own = tuple(keys[stored:end])
                    step = _Step(next(self._serials), own, _ENTRY_BYTES + _KEY_BYTES * len(own))
                    self._put(name, step)
                before, stored = step.serial, end

    def _piece(self, name: Hashable, ids: Sequence[int], name_bytes: int) -> Piece:
        piece = self._get(name)
        if not isinstance(piece, Piece):  # else another thread was first: keys hang on its serial
            nbytes = _ENTRY_BYTES + name_bytes + 4 * len(ids)
            own = ids if isinstance(ids, array) else array("I", ids)
            piece = Piece(next(self._serials), own, nbytes)
            self._put(name, piece)
        return piece

    def _get(self, name: Hashable) -> Piece | _Step | None:
        entry = self._entries.get(name)
        if entry is not None:
            self._entries.move_to_end(name)
        return entry

    def _put(self, name: Hashable, entry: Piece | _Step) -> None:
        """Store an entry that is not there yet, and evict what was not used for longest."""
        self.used_bytes += entry.nbytes
        self._entries[name] = entry
        while self.used_bytes > self.max_bytes:
            # A step whose predecessor is gone cannot be reached any more: it is
            # never touched again, and leaves in its turn.
            _, oldest = self._entries.popitem(last=False)
            self.used_bytes -= oldest.nbytes


class TooManyTokensError(Exception):
    """A text has more tokens than the model takes. Its message is how many."""


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

    def pieces(self, most_tokens: int | None = None) -> list[Piece]:
        """Return the pieces, tokenizing the parts that are not in the memo, each once.

        Raises `TooManyTokensError` as soon as there are more than ``most_tokens``;
        `UnicodeEncodeError` or TypeError for text that is not Unicode.
        """
        names = self._names()
        known = self.memo.find(names)
        tokens = sum(len(each.ids) for each in known.values())
        for batch in _batches([name for name in names if name not in known]):
            if most_tokens is not None and tokens > most_tokens:
                raise TooManyTokensError(f"more than {most_tokens}")
            texts = [text for _, text in batch]
            made = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            for name, encoding in zip(batch, made, strict=True):
                known[name] = self.memo.add(name, encoding.ids, 2 * len(name[1]))
                tokens += len(known[name].ids)
        pieces: list[Piece] = []
        tokens = 0  # now of the parts that come several times, too
        for part in self.parts:
            if part.token_id is None:
                pieces.append(known[(self.space, part.text)])
            else:
                pieces.append(Piece.of_token(part.token_id))
            tokens += len(pieces[-1].ids)
        if most_tokens is not None and tokens > most_tokens:
            raise TooManyTokensError(f"{tokens}")
        return pieces

    def _names(self) -> Collection[tuple[object, str]]:
        """Return the memo's name of each part that is text, each once."""
        return {(self.space, part.text): None for part in self.parts if part.token_id is None}


def _batches(names: Iterable[tuple[object, str]]) -> Iterator[list[tuple[object, str]]]:
    batch: list[tuple[object, str]] = []
    size = 0
    for name in names:
        size += len(name[1].encode())
        if batch and size > _BATCH_BYTES:
            yield batch
            batch, size = [], len(name[1].encode())
        batch.append(name)
    if batch:
        yield batch


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
            self._cutter.cut_nothing()

    @property
    def adds_ends(self) -> bool:
        """Whether special tokens are added to texts, where they are asked for."""
        return bool(self._before or self._after)

    def holds_special(self, text: str) -> bool:
        """Whether a special token is written out in a text."""
        return self._special.search(text) is not None

    def cut(self, text: str, *, add_special_tokens: bool) -> CutText:
        """Return the text in parts that are tokenized one by one; raise `HugePartError`."""
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
        sample += "词，B/г=" * (3 * SEARCHED_CHARS // 6)  # noqa: RUF001
        cut = CutText(self._cutter.parts(sample), self._bare, Memo(1 << 20), self._space)
        together = [token for piece in cut.pieces() for token in piece.ids]
        return together == self._bare.encode(sample, add_special_tokens=False).ids
