"""Tokenizes text, and keeps the tokens and block keys of text that was seen before.

`Encoder` cuts a text where its tokens are the tokens of its pieces, one after another. One place is
a special token that absorbs none of the text around it: the tokenizer splits there before it
normalizes. The other is between an ASCII letter and a space followed by a letter (``the| cat``), if
no normalizer, pre-tokenizer, merge or added token in ``tokenizer.json`` can reach across it; a
component that is not in the lists below allows no cut. Where a split pattern is known, the end of
any word before a space or punctuation is such a place too (`_CUT_AT_OTHERS`).

`Memo` is one least-recently-used store, bounded in bytes and shared by all tokenizers. It holds
pieces (text to token ids) and steps (a piece after other pieces, hashed in one way, to the keys of
the blocks that end in it). Texts are the dictionary's keys, so that a hash collision cannot give
wrong tokens. Each salt and each adapter is its own way of hashing, so tenants do not share steps.
"""

import json
import logging
import os.path
import re
import threading
import unicodedata
from array import array
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer

from warmroute_common.config_reader import ConfigError
from warmroute_common.keys import ExtraKeys, HashScheme

_log = logging.getLogger("warmroute.prompt")

CUT_CHARS: Final = 1024
"""The approximate length of a piece of plain text."""

_HUGE_BYTES: Final = 32 << 10
"""Longer parts are not tokenized, if prose has none: they take 50 to 200 times their size."""
_BATCH_BYTES: Final = 32 << 10
"""Tokenized at once: the tokenizer uses 50 to 200x this memory meanwhile."""

_ENTRY_BYTES: Final = 400
"""Size of a dictionary entry and its small objects, without its payload."""
_KEY_BYTES: Final = 80

_RUN_TOKENS: Final = 128
"""Token ids that a request gives directly are cached in runs of this length."""

_PROBES: Final = ("a", "Hello, world", " x\n", "é 12")

_CUT: Final = re.compile(r"[A-Za-z](?= [A-Za-z])")
_SEARCHED_CHARS: Final = 2048
_CUT_AT_OTHERS: Final = re.compile("[^\\W\\d_](?=[ \n!-&(-@\\[-`{-~。，、；：！？])")  # noqa: RUF001
"""Where the split patterns below end a match, if the letter is plain (`_is_plain`).

On the right is nothing that may be of a word: no apostrophe, no mark, no other letter.
"""

# Normalizers that leave ASCII letters and spaces alone, or change each by itself.
_LOCAL_NORMALIZERS: Final = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
)
_SPACES_REPLACED: Final = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}

# Pre-tokenizers that part a letter from a space behind it, whatever surrounds them.
_PARTING: Final = frozenset({"Whitespace", "WhitespaceSplit", "BertPreTokenizer"})

# The alternatives in the split patterns of GPT-2, GPT-4, GPT-4o, Llama 3, Qwen 2, Tekken and
# DeepSeek. A match that contains a letter does not continue over a space. A match that ends at or
# before a space looks no further than that space. No match looks back. So, if letters are matched
# at all, a match ends at ``letter|space letter`` whatever the text before and after it.
_CASED: Final = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = (
    r" ?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    *(rf"[^\r\n\p{{L}}\p{{N}}]?{cased}" for cased in _CASED),
    *(rf"[^\r\n\p{{L}}\p{{N}}]?{cased}{_ENDINGS}?" for cased in _CASED),
)
_OTHERS: Final = (
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _ENDINGS),
    *(r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,3}"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
    *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    *(r"[一-龥぀-ゟ゠-ヿ]+", r"[一-龥]+"),  # noqa: RUF001  (as DeepSeek has it)
)


def _made_of(alternatives: Iterable[str]) -> re.Pattern[str]:
    """Return what matches a split pattern whose alternatives are all among these."""
    one = f"(?:{'|'.join(map(re.escape, alternatives))})"
    return re.compile(rf"{one}(?:\|{one})*")


_LOCAL_SPLIT: Final = _made_of((*_WORDS, *_OTHERS))
_SPLIT_WITHOUT_WORDS: Final = _made_of(_OTHERS)


class HugePartError(Exception):
    """A text has a part that cannot be cut, and that would take too much memory."""


class Part(NamedTuple):
    """A stretch of text between special tokens, or one special token (``token_id``)."""

    text: str
    token_id: int | None = None


class Cutter:
    """Cuts texts for one tokenizer, described as ``tokenizer.json`` describes it.

    ``splits_specials`` and ``splits_text`` say what it may do.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        added: list[Mapping[str, Any]] = list(description.get("added_tokens") or ())
        before = [one for one in added if not one["normalized"]]
        steps = _steps(description.get("pre_tokenizer"), "pretokenizers")
        # A token that looks at the characters around it would see other ones
        # at a cut; then nothing is cut at all.
        looks_around = any(one["single_word"] for one in added)
        # Some tokenizers put a space before the first word of a text, but not
        # before one that follows a special token.
        first_differs = any(step.get("prepend_scheme") == "first" for step in steps)
        self.splits_specials = not looks_around and not first_differs
        self.splits_text = (
            not looks_around
            and not any(map(_reaches_across, added))
            and _parts_words(description, steps)
        )
        self.splits_words = (
            self.splits_text
            and _SPACES_REPLACED not in _steps(description.get("normalizer"), "normalizers")
            and _splits_words(steps, added)
        )
        """Whether texts can be cut at the ends of all words, not only between two words."""
        # All tokens that are looked for before normalization take part in the
        # search, since the longest at a place wins; but only pieces that take
        # nothing around them are places to cut.
        self._search = re.compile(longest_first(one["content"] for one in before) or r"(?!)")
        # Where none of these is, there is nothing to search for: an alternation that does
        # not begin with one character is tried at every place of the text.
        self._beginnings = {one["content"][:1] for one in before}
        self._ids: dict[str, int] = {
            one["content"]: one["id"] for one in before if not (one["lstrip"] or one["rstrip"])
        }

    def parts(self, text: str) -> list[Part]:
        """Return the parts of ``text``, in order; none of them is empty.

        Raises `HugePartError` if one is too long to be tokenized. That happens only where texts can
        be cut at the ends of all words: prose has no such part.
        """
        parts: list[Part] = []
        start = 0
        may_hold = self.splits_specials and any(map(text.__contains__, self._beginnings))
        for match in self._search.finditer(text) if may_hold else ():
            token_id = self._ids.get(match.group())
            if token_id is None:
                continue
            self._add_pieces(parts, text, start, match.start())
            parts.append(Part(match.group(), token_id))
            start = match.end()
        self._add_pieces(parts, text, start, len(text))
        return parts

    def _add_pieces(self, parts: list[Part], text: str, start: int, stop: int) -> None:
        while self.splits_text and stop - start > CUT_CHARS:
            end = start + _SEARCHED_CHARS
            cut = _CUT.search(text, start + CUT_CHARS, min(end + 2, stop))
            if cut is None and self.splits_words:
                found = _CUT_AT_OTHERS.finditer(text, end, stop)
                cut = next((each for each in found if _is_plain(each.group())), None)
            elif cut is None:
                cut = _CUT.search(text, end, stop)
            if cut is None:
                break
            self._add_piece(parts, text, start, cut.end())
            start = cut.end()
        if start < stop:
            self._add_piece(parts, text, start, stop)

    def _add_piece(self, parts: list[Part], text: str, start: int, stop: int) -> None:
        if self.splits_words and (
            stop - start > _HUGE_BYTES
            or (4 * (stop - start) > _HUGE_BYTES < len(text[start:stop].encode()))
        ):
            raise HugePartError
        parts.append(Part(text[start:stop]))


def longest_first(contents: Iterable[str]) -> str:
    """Return a pattern that matches the longest of ``contents`` at a place.

    A tree of common beginnings: some models have thousands of added tokens,
    and an alternation of all would try each in turn at every ``<``.
    """
    heads: dict[str, list[str]] = {}
    for content in contents:
        heads.setdefault(content[:1], []).append(content)
    may_end = heads.pop("", None)
    branches = []
    for group in heads.values():
        shared = os.path.commonprefix(group)  # noqa: RUF071  (characters are meant)
        branches.append(re.escape(shared) + longest_first(one[len(shared) :] for one in group))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if may_end else ''}"


def _reaches_across(added: Mapping[str, Any]) -> bool:
    """Whether an added token can hold a letter and the space behind it."""
    content: str = added["content"]
    return bool(re.search(r"\S\s", content)) or (added["rstrip"] and content[-1:].isalpha())


def _steps(step: Mapping[str, Any] | None, name: str) -> Sequence[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, which may be a sequence in a sequence."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for one in step[name] for inner in _steps(one, name)]
    return [step]


def _parts_words(description: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether words end at a space, by the pre-tokenizer or because no merge spans it."""
    model = description["model"]
    normalizers = _steps(description.get("normalizer"), "normalizers")
    spaces_replaced = _SPACES_REPLACED in normalizers
    if model.get("dropout") or not all(
        one == _SPACES_REPLACED or one["type"] in _LOCAL_NORMALIZERS for one in normalizers
    ):
        return False
    parting = [_parts_at_space(step, spaces_replaced=spaces_replaced) for step in steps]
    return None not in parting and (any(parting) or _no_merge_over_space(model))


def _splits_words(steps: Sequence[Mapping[str, Any]], added: Collection[Mapping[str, Any]]) -> bool:
    """Whether `_CUT_AT_OTHERS` may cut too, where `_CUT` may: words are split by a pattern."""
    patterns = [step for step in steps if "Regex" in step.get("pattern", ())]
    rest = [step for step in steps if step not in patterns]
    return (
        all(one["type"] == "ByteLevel" and not one["add_prefix_space"] for one in rest)
        and any(_parts_at_space(step, spaces_replaced=False) for step in steps)
        and not any(
            one["rstrip"] or _CUT_AT_OTHERS.search(one["content"])
            for one in added
            if one["normalized"] or one["lstrip"] or one["rstrip"]
        )
    )


def _is_plain(letter: str) -> bool:
    """Whether no normalizer makes anything but letters of it."""
    forms = (letter, letter.lower(), unicodedata.normalize("NFKD", letter))
    return all(unicodedata.category(each)[0] == "L" for form in forms for each in form)


def _parts_at_space(step: Mapping[str, Any], *, spaces_replaced: bool) -> bool | None:
    """Whether a step parts a letter from a space behind it; None if it may reach across."""
    match step["type"]:
        case "Digits" | "Punctuation":
            return False
        case "ByteLevel":  # it prepends a space only where there is none
            return bool(step.get("use_regex", True))
        case "Metaspace" if step["replacement"] == "▁":  # likewise
            return bool(step.get("split", True))
        case "Split" if step["pattern"] == {"String": " "} and spaces_replaced:
            return False  # nothing to split at
        case "Split" if not step.get("invert") and step["behavior"] in ("Isolated", "Removed"):
            pattern = step["pattern"].get("Regex", "")
            local = _LOCAL_SPLIT.fullmatch(pattern) is not None
            return _SPLIT_WITHOUT_WORDS.fullmatch(pattern) is None if local else None
    return True if step["type"] in _PARTING else None


def _no_merge_over_space(model: Mapping[str, Any]) -> bool:
    """Whether no token of a BPE has a space (``▁``) behind something else.

    Then no merge can cross ``letter|▁``, in whatever order merges are made.
    The space must be a token itself, or it could melt with an unknown letter.
    """
    if model.get("type") != "BPE" or "▁" not in model["vocab"]:
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    merged = (
        merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)
        for merge in model["merges"]
    )
    return not any("▁" in token.lstrip("▁") for token in merged)


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
            self._cutter.splits_specials = self._cutter.splits_text = False

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
        sample += "词，B/г=" * (3 * _SEARCHED_CHARS // 6)  # noqa: RUF001
        cut = CutText(self._cutter.parts(sample), self._bare, Memo(1 << 20), self._space)
        together = [token for piece in cut.pieces() for token in piece.ids]
        return together == self._bare.encode(sample, add_special_tokens=False).ids
