"""Cuts texts where their tokens are the tokens of the pieces, one after another.

One place is a special token that absorbs none of the text around it: the tokenizer splits there
before it normalizes. The other is between an ASCII letter and a space followed by a letter
(``the| cat``), if no normalizer, pre-tokenizer, merge or added token in ``tokenizer.json`` can
reach across it; a component that is not in the lists below allows no cut. Where a split pattern is
known, the end of any word before a space or punctuation is such a place too (`_CUT_AT_OTHERS`).
"""

import os.path
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

CUT_CHARS: Final = 1024
"""The approximate length of a piece of plain text."""

_HUGE_WORD_BYTES: Final = 32 << 10
"""Longer parts are not tokenized: that takes 50 to 200 times their size. Where texts are cut at the
ends of all words, prose has no such part."""
_HUGE_TEXT_BYTES: Final = 1 << 20
"""The same for other tokenizers, which take much prose in one part."""

_CUT: Final = re.compile(r"[A-Za-z](?= [A-Za-z])")
SEARCHED_CHARS: Final = 2048
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

    ``splits_specials``, ``splits_text`` and ``splits_words`` say what it may do.
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

    def cut_nothing(self) -> None:
        """Return each text in one part from now on."""
        self.splits_specials = self.splits_text = self.splits_words = False

    def parts(self, text: str) -> list[Part]:
        """Return the parts of ``text``, in order; none of them is empty.

        Raises `HugePartError` if one is too long to be tokenized.
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
            end = start + SEARCHED_CHARS
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
        chars = stop - start
        most_bytes = _HUGE_WORD_BYTES if self.splits_words else _HUGE_TEXT_BYTES
        if chars > most_bytes or 4 * chars > most_bytes < len(text[start:stop].encode()):
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
