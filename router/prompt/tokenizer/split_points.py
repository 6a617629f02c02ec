"""Where a text can be cut so that its tokens are those of its pieces, in a row.

Two kinds of places qualify. At a special token that takes nothing of the text
around it, the tokenizer itself splits, before it normalizes. Elsewhere, between
an ASCII letter and a space with a letter behind it, as in ``the| cat``, provided
that no normalizer, no pre-tokenizer, no merge and no added token of this
tokenizer can reach across; that is decided here from its description
(``tokenizer.json``), by lists of what is known to be local. What is not known
is not cut.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

CUT_CHARS: Final = 1024
"""About how long pieces of plain text get."""

_CUT: Final = re.compile(r"[A-Za-z](?= [A-Za-z])")

# Normalizers that leave ASCII letters and spaces alone, or change each by itself.
_LOCAL_NORMALIZERS: Final = frozenset(
    {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer"}
)

# Pre-tokenizers that part a letter from a space behind it, whatever surrounds them.
_PARTING: Final = frozenset({"Whitespace", "WhitespaceSplit", "BertPreTokenizer"})

# The alternatives that split patterns of GPT-2, GPT-4, GPT-4o, Llama 3, Qwen 2,
# Tekken and DeepSeek are made of. Of each holds: a match with a letter in it
# does not go on over a space; one that ends at or before a space looks at most
# at that space; none looks back. So ``letter|space letter`` is an end of
# matches whatever comes before or after, provided that letters are matched.
_CASED: Final = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = frozenset(
    {
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        *(rf"[^\r\n\p{{L}}\p{{N}}]?{cased}" for cased in _CASED),
        *(rf"[^\r\n\p{{L}}\p{{N}}]?{cased}{_ENDINGS}?" for cased in _CASED),
    }
)
_OTHERS: Final = frozenset(
    {
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _ENDINGS),
        *(r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,3}"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
        *(r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
        *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        *(r"[一-龥぀-ゟ゠-ヿ]+", r"[一-龥]+"),  # noqa: RUF001  (as DeepSeek has it)
    }
)


@dataclass(frozen=True, slots=True)
class Part:
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
        # A token that looks at the characters around it would see other ones
        # at a cut; then nothing is cut at all.
        self.splits_specials = not any(one["single_word"] for one in added)
        self.splits_text = (
            not any(one["single_word"] or _reaches_across(one) for one in added)
            and _is_local_normalizer(description.get("normalizer"))
            and _parts_words(description)
        )
        # All tokens that are looked for before normalization take part in the
        # search, since the longest at a place wins; but only those that take
        # nothing around them are places to cut.
        self._search = re.compile(longest_first(one["content"] for one in before) or r"(?!)")
        # Where none of these is, there is nothing to search for: an alternation that does
        # not begin with one character is tried at every place of the text.
        self._beginnings = {one["content"][:1] for one in before}
        self._ids: dict[str, int] = {
            one["content"]: one["id"] for one in before if not (one["lstrip"] or one["rstrip"])
        }

    @property
    def barrier(self) -> str | None:
        """A special token that can stand in front of a piece to say that it is not the first."""
        return min(self._ids, default=None) if self.splits_specials else None

    def parts(self, text: str) -> Iterable[Part]:
        """Yield the parts of ``text``, in order; none of them is empty."""
        start = 0
        may_hold = self.splits_specials and any(map(text.__contains__, self._beginnings))
        for match in self._search.finditer(text) if may_hold else ():
            token_id = self._ids.get(match.group())
            if token_id is None:
                continue
            if match.start() > start:
                yield from self._pieces(text[start : match.start()])
            yield Part(match.group(), token_id)
            start = match.end()
        if start < len(text):
            yield from self._pieces(text[start:])

    def _pieces(self, stretch: str) -> Iterable[Part]:
        start = 0
        while self.splits_text and len(stretch) - start > CUT_CHARS:
            cut = _CUT.search(stretch, start + CUT_CHARS)
            if cut is None:
                break
            yield Part(stretch[start : cut.end()])
            start = cut.end()
        yield Part(stretch[start:])


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
        shared = _common_start(min(group), max(group))
        branches.append(re.escape(shared) + longest_first(one[len(shared) :] for one in group))
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if may_end else ''}"


def _common_start(first: str, second: str) -> str:
    pairs = enumerate(zip(first, second, strict=False))
    end = next((index for index, (one, other) in pairs if one != other), None)
    return first if end is None else first[:end]


def _reaches_across(added: Mapping[str, Any]) -> bool:
    """Whether an added token can hold a letter and the space behind it."""
    content: str = added["content"]
    if re.search(r"\S\s", content):
        return True
    return bool(added["rstrip"]) and content[-1:].isalpha()


def _is_local_normalizer(normalizer: Mapping[str, Any] | None) -> bool:
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(_is_local_normalizer(one) for one in normalizer["normalizers"])
    if normalizer["type"] == "Replace":
        return bool(normalizer["pattern"] == {"String": " "} and normalizer["content"] == "▁")
    return normalizer["type"] in _LOCAL_NORMALIZERS


def _parts_words(description: Mapping[str, Any]) -> bool:
    """Whether words end at a space, by the pre-tokenizer or for want of a merge over it."""
    model = description["model"]
    if model.get("dropout"):
        return False
    steps = _steps(description.get("pre_tokenizer"))
    spaces_left = not _replaces_spaces(description.get("normalizer"))
    if not all(_is_local_step(step, spaces_left=spaces_left) for step in steps):
        return False
    return any(_parts(step) for step in steps) or _no_merge_over_space(model)


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [step for one in pre_tokenizer["pretokenizers"] for step in _steps(one)]
    return [pre_tokenizer]


def _replaces_spaces(normalizer: Mapping[str, Any] | None) -> bool:
    if normalizer is None:
        return False
    if normalizer["type"] == "Sequence":
        return any(_replaces_spaces(one) for one in normalizer["normalizers"])
    return bool(normalizer["type"] == "Replace")


def _is_local_step(step: Mapping[str, Any], *, spaces_left: bool) -> bool:
    match step["type"]:
        case "ByteLevel" | "Digits" | "Punctuation":
            return True  # ByteLevel prepends a space only where there is none
        case "Metaspace":
            return bool(step["replacement"] == "▁")  # likewise
        case "Split":
            if step["pattern"] == {"String": " "}:
                return not spaces_left  # nothing to split at
            alternatives = _alternatives(step)
            return bool(alternatives) and all(one in _WORDS | _OTHERS for one in alternatives)
    return step["type"] in _PARTING


def _parts(step: Mapping[str, Any]) -> bool:
    match step["type"]:
        case "ByteLevel":
            return bool(step.get("use_regex", True))
        case "Metaspace":
            return bool(step.get("split", True))
        case "Split":
            return any(one in _WORDS for one in _alternatives(step))
    return step["type"] in _PARTING


def _alternatives(step: Mapping[str, Any]) -> list[str]:
    """Return the alternatives of a split whose matches are pieces of their own, else none."""
    if step.get("invert") or step["behavior"] not in ("Isolated", "Removed"):
        return []
    return _top_level(step["pattern"].get("Regex", ""))


def _top_level(pattern: str) -> list[str]:
    """Split a pattern at each ``|`` that is in no brackets."""
    found, depth, in_class, start, at = [], 0, False, 0, 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            found.append(pattern[start:at])
            start = at + 1
        at += 1
    return [*found, pattern[start:]]


def _no_merge_over_space(model: Mapping[str, Any]) -> bool:
    """Whether no token of a BPE has a space (``▁``) behind something else.

    Then no merge can cross ``letter|▁``, in whatever order merges are made.
    The space must be a token itself, or it could melt with an unknown letter.
    """
    if model.get("type") != "BPE" or "▁" not in model["vocab"]:
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    return not any("▁" in token.lstrip("▁") for token in _merged(model["merges"]))


def _merged(merges: Iterable[Any]) -> Iterable[str]:
    for merge in merges:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        yield left + right
