"""The outline of a request: a hash for each field of its tools and messages, without text.

Two outlines of one session show which field its client changed. Tokens alone show only where the
prompt differs, and not what the client did.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, compress, count
from operator import ne
from typing import Any, Final

import orjson
import xxhash

from router.prompt.chat_messages import BILLING_HEADER
from router.record.uncached import ChangeKind

_MOST_MESSAGES: Final = 512
_MOST_TOOLS: Final = 256
"""Later ones are not compared."""
_PIECE_CHARS: Final = 1024
"""Characters for each mark, if the prompt is one text."""
_LENGTH_BITS: Final = 20
_LENGTH: Final = (1 << _LENGTH_BITS) - 1
_HASH: Final = ((1 << 64) - 1) ^ _LENGTH
_TOOL_FIELDS: Final = ("name", "description", "parameters")
_MESSAGE_FIELDS: Final = 2
"""A message has a mark for its content, and one for its other fields."""
_hashed: Final = xxhash.xxh3_64_intdigest
_LEAST_ALIKE_CHARS: Final = 100
_ALIKE: Final = 0.02
"""Texts are one text with a small change if their lengths differ by at most this part."""


@dataclass(frozen=True, slots=True)
class OutlineChange:
    """The first field that a client changed."""

    kind: ChangeKind
    place: str
    new_share: float | None
    """How much of the request, by its characters, comes after all that is as before; None if that
    is just what comes after the former prompt's end."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Marks of a request's fields. A mark has a hash and the length of the field in characters."""

    system: int = 0
    tools: "array[int]" = field(default_factory=lambda: array("Q"))
    """For each tool its name, description and parameters."""
    messages: "array[int]" = field(default_factory=lambda: array("Q"))
    """For each message its content and its other fields; for a text its pieces."""
    opening: int = 0
    """The mark of the first message of a user, by which turns without a session's name are found;
    0 if there is none."""
    names: tuple[str, str] = ("messages", "system")
    """What the API calls the messages and the system prompt."""
    salt: int = 0
    """The mark of ``cache_salt``."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Outline":
        """Return the outline of a body's fields. Values of a wrong type have no marks."""
        tools, messages, opening = fields.get("tools"), fields.get("messages"), 0
        name = "messages"
        if not isinstance(messages, list):
            name = "input" if "input" in fields else "prompt"
            messages = fields.get(name)
        marks: array[int] = array("Q")
        if isinstance(messages, str):
            marks.extend(_text_marks(messages))
        elif isinstance(messages, list):
            marks, opening = _message_marks(messages[:_MOST_MESSAGES])
        system = "instructions" if "instructions" in fields else "system"
        return cls(
            _mark(_content(fields.get(system))),
            _tool_marks(tools) if isinstance(tools, list) else array("Q"),
            marks,
            opening,
            (name, system),
            _mark(fields.get("cache_salt")),
        )

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return 8 * (len(self.tools) + len(self.messages)) + 400

    @property
    def is_text(self) -> bool:
        """Whether the prompt is one text, so that the marks are those of its pieces."""
        return self.names[0] == "prompt"

    def change_from(self, before: "Outline") -> OutlineChange | None:
        """Return what the client changed since its request before.

        None if the requests have so little in common that this may be another conversation.
        """
        mine, theirs = _rows(self.messages, self._step), _rows(before.messages, self._step)
        kept = _kept(mine, theirs)
        last = kept[-1][0] if kept else -1
        # What comes after all that was kept is new. If that is the former prompt's end, and no
        # messages before it are missing, the former prompt's length says where it is.
        is_whole = bool(kept) and kept[-1][1] == len(theirs) - 1
        share = None if is_whole else self._share_from(last + 1)
        if self.tools != before.tools:
            return self._change_of_tools(before, share, is_same=bool(kept))
        if self.system != before.system:
            is_same = bool(kept) or _alike(self.system, before.system)
            return OutlineChange(ChangeKind.BEGINNING, self.names[1], share) if is_same else None
        at = _first_other(mine, theirs)
        if at in (len(mine), len(theirs)):
            continues = at == len(theirs) and not self.is_text
            return OutlineChange(ChangeKind.RENDERED, "", None) if continues else None
        if next((new < old for new, old in kept if new >= at), False):
            place = f"{self.names[0]}[{at}]"
            return OutlineChange(ChangeKind.CUT, place, self._share_from(last + 1))
        if last < at:
            if not _alike(mine[at][0], theirs[at][0]):
                return None
            share = self._share_from(at + 1)
        kind = ChangeKind.EDITED if at else ChangeKind.BEGINNING
        return OutlineChange(kind, self._place(mine[at], theirs[at], at), share)

    def message_at(self, share: float) -> str:
        """Return the message in which about this share of the request, by characters, ends.

        If it has other fields than its content, such as reasoning, or the next one that has.
        """
        if self.is_text:
            return self.names[0]
        left = share * self._chars() - sum(map(_length, self.tools)) - _length(self.system)
        rows = _rows(self.messages, _MESSAGE_FIELDS)
        ends = accumulate(sum(map(_length, row)) for row in rows)
        found = next((at for at, end in enumerate(ends) if end >= left), max(0, len(rows) - 1))
        with_more = (at for at in range(max(0, found - 1), len(rows)) if rows[at][1])
        return f"{self.names[0]}[{next(with_more, found)}]"

    def _change_of_tools(
        self, before: "Outline", share: float | None, *, is_same: bool
    ) -> OutlineChange | None:
        mine, theirs = (_rows(each.tools, len(_TOOL_FIELDS)) for each in (self, before))
        if sorted(mine) == sorted(theirs):
            return OutlineChange(ChangeKind.REORDERED, "tools", share)
        if not (is_same or set(mine) & set(theirs)):
            return None
        at = _first_other(mine, theirs)
        place = f"tools[{at}]"
        if at < min(len(mine), len(theirs)) and mine[at][0] == theirs[at][0]:
            place += "." + next(compress(_TOOL_FIELDS, map(ne, mine[at], theirs[at])))
        return OutlineChange(ChangeKind.EDITED, place, share)

    def _place(self, mine: Sequence[int], theirs: Sequence[int], at: int) -> str:
        if self.is_text:
            return self.names[0]
        return f"{self.names[0]}[{at}]" + (".content" if mine[0] != theirs[0] else "")

    @property
    def _step(self) -> int:
        return 1 if self.is_text else _MESSAGE_FIELDS

    def _share_from(self, message: int) -> float:
        """Return the share of characters from a message on."""
        chars = sum(map(_length, self.messages[self._step * message :]))
        return chars / max(1, self._chars())

    def _chars(self) -> int:
        marks = (*self.tools, self.system, *self.messages)
        return sum(map(_length, marks))


NO_OUTLINE: Final = Outline()


def _mark(value: object) -> int:
    """Return the hash of a JSON value and its length; 0 for None."""
    if value is None:
        return 0
    try:
        written = value.encode() if isinstance(value, str) else orjson.dumps(value)
    except (TypeError, UnicodeEncodeError):  # deeper than it writes, or not Unicode
        written = repr(value).encode(errors="surrogatepass")
    return _hashed(written) & _HASH | min(len(written), _LENGTH)


def _message_marks(messages: Sequence[Any]) -> tuple["array[int]", int]:
    """Return the marks of messages, and that of the first one of a user."""
    marks: list[int] = []
    opening = 0
    for each in messages:
        if not isinstance(each, dict):
            break
        content = _mark(_content(each.get("content")))
        rest = 0
        if len(each) > _MESSAGE_FIELDS:  # besides the role and the content
            others = {key: each[key] for key in each if key not in ("role", "content")}
            rest = _mark(others) if others else 0
        marks += (content, rest)
        if not opening and each.get("role") == "user":
            opening = content
    return array("Q", marks), opening


def _content(value: object) -> object:
    """Return content without what clients change in each turn and no template prints.

    That is Anthropic's ``cache_control``, and the line with a hash that Claude Code sends.
    """
    if not isinstance(value, list):
        return value
    return [
        {key: part[key] for key in part if key != "cache_control"}
        if isinstance(part, dict)
        else part
        for part in value
        if not _is_billing_header(part)
    ]


def _is_billing_header(part: object) -> bool:
    text = part.get("text") if isinstance(part, dict) else None
    return isinstance(text, str) and text.startswith(BILLING_HEADER)


def _text_marks(text: str) -> list[int]:
    ends = range(_PIECE_CHARS, len(text) + 1, _PIECE_CHARS)
    return [_mark(text[end - _PIECE_CHARS : end]) for end in ends]


def _tool_marks(tools: Sequence[Any]) -> "array[int]":
    marks: list[int] = []
    for each in tools[:_MOST_TOOLS]:
        tool = each.get("function", each) if isinstance(each, dict) else None
        if not isinstance(tool, dict):
            return array("Q")
        schema = tool["parameters"] if "parameters" in tool else tool.get("input_schema")
        marks += (_mark(tool.get("name")), _mark(tool.get("description")), _mark(schema))
    return array("Q", marks)


def _rows(marks: "array[int]", step: int) -> list[tuple[int, ...]]:
    return [tuple(marks[at : at + step]) for at in range(0, len(marks), step)]


def _first_other(mine: Sequence[object], theirs: Sequence[object]) -> int:
    """Return the first index at which two sequences differ, or one of them ends."""
    return next(compress(count(), map(ne, mine, theirs)), min(len(mine), len(theirs)))


def _kept(
    mine: Sequence[tuple[int, ...]], theirs: Sequence[tuple[int, ...]]
) -> list[tuple[int, int]]:
    """Return the indices of messages that were there before, with their indices then."""
    former = {row: at for at, row in enumerate(theirs) if any(row)}
    kept = []
    for at, row in enumerate(mine):
        if at < len(theirs) and row == theirs[at]:
            kept.append((at, at))  # others may be equal
        elif row in former:
            kept.append((at, former[row]))
    return kept


def _length(mark: int) -> int:
    return mark & _LENGTH


def _alike(mine: int, theirs: int) -> bool:
    """Whether two texts may be one with a small change, by their lengths."""
    longest = max(_length(mine), _length(theirs))
    difference = abs(_length(mine) - _length(theirs))
    return longest >= _LEAST_ALIKE_CHARS and difference <= _ALIKE * longest
