"""What has been tokenized and hashed before, found again by its content.

One least-recently-used store, bounded in bytes, holds two kinds of entries:
pieces (text -> token ids) and steps (a piece after a certain sequence of
pieces, hashed in a certain way -> the keys of the blocks that end in it). Texts
themselves are the dictionary's keys, so that nothing rests on a hash alone.
A salt or an adapter is a way of hashing: each tenant's steps are its own, and
leave in their turn. All tokenizers share one store: the name of a piece says whose it is.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final, NamedTuple

from warmroute_common.keys import ExtraKeys, HashScheme

# What a dictionary entry with its small objects takes beside its payload.
_ENTRY_BYTES: Final = 400
_KEY_BYTES: Final = 80

# Token ids given as such are remembered in runs of this many.
_RUN_TOKENS: Final = 128


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
        """Whether a name has a piece; that is no use of it. One dictionary read needs no lock."""
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
            piece = Piece(next(self._serials), array("I", ids), nbytes)
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
