"""Takes the long strings and lists of token ids out of a JSON body before it is parsed.

Both are decoded in parts. A call that parses 64 MiB holds the interpreter, and with it the event
loop, for up to 0.2 s, in whichever thread it runs. Here each call handles at most a few MiB. Images
and other media are never decoded: what stands for one is its beginning and a hash. So it is for
texts beyond `MAX_TEXT_BYTES`, more than any model's context takes. Token ids of a prompt become an
array: a list takes 7 to 18 times what they take in the body.
"""

import os
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import xxhash

from router.prompt.media import FIELDS
from router.prompt.request_body import LARGE_BODY_BYTES, BodyBytes, joined
from warmroute_common.api_errors import BadRequestError

MAX_TEXT_BYTES: Final = 8 << 20
"""Long strings of one body that are decoded, besides media."""
_MAX_REST_BYTES: Final = 8 << 20
"""A body without its long strings."""
_SCANNED_BYTES: Final = 4 << 10
"""Strings of twice this length are always long, shorter ones than this never."""
_LISTED_BYTES: Final = 16 << 10
"""Lists of numbers of twice this length are taken out. No string is as long that is not."""
_DECODED_BYTES: Final = 256 << 10
_HEAD_BYTES: Final = 256
_LONGEST_CHARACTER: Final = 12
"""Bytes of two surrogates, each written as an escape."""

LARGEST_ID: Final = 0x7FFF_FFFF
"""No token id is larger."""
_NUMBERS: Final = b"0123456789, \t\r\n"
_PROMPTS: Final = ("prompt", "input")
"""The fields that may be token ids."""

_IN_BASE64: Final = re.compile(rb"(?:data:[\w/+.;=-]*,)?[\w+/=\\-]*")
_STRING: Final = msgspec.json.Decoder(str)
_INTEGERS: Final = msgspec.json.Decoder(list[int])


class LongStrings:
    """The long strings of one body. ``rest`` is the body with a mark in the place of each.

    A long list of numbers counts as one: in its place stands a list of one mark.

    A body of up to `LARGE_BODY_BYTES` has none: it is parsed in one call.
    """

    def __init__(self, body: BodyBytes) -> None:
        """Find them; raise `BadRequestError` if the rest is too large."""
        self._source, self._body = body, memoryview(body)
        self._spans: list[tuple[int, int]] = []
        self._lists: set[int] = set()
        """The spans that are lists of numbers, by their places in ``_spans``."""
        self.listed = 0
        """How many numbers are in these lists."""
        rest_bytes = len(body)
        if len(body) > LARGE_BODY_BYTES:
            strings = list(_spans(body))
            rest_bytes -= sum(end - start for start, end in strings)
            lists = list(_lists(body, strings))
            self._spans = sorted([*strings, *lists])
            found = set(lists)
            self._lists = {at for at, each in enumerate(self._spans) if each in found}
            self.listed = sum(_numbers_in(body, *each) for each in lists)
        # Nobody can guess it, so no string of the client is taken for one.
        self._mark = os.urandom(12).hex() if self._spans else ""
        self.text_bytes = 0
        """Length of the strings that were decoded."""
        self.media_bytes = 0
        """Length of the strings that belong to media."""
        self.is_cut = False
        """Whether only the beginning of a text was decoded."""
        self._chars_left = MAX_TEXT_BYTES
        if rest_bytes > _MAX_REST_BYTES:
            raise BadRequestError(
                f"the body has more than {_MAX_REST_BYTES} bytes besides its strings of more than "
                f"{2 * _SCANNED_BYTES} bytes",
                code="too_many_values",
            )
        self.rest: BodyBytes = self._without_strings() if self._spans else body

    def _without_strings(self) -> bytes:
        parts: list[bytes | memoryview] = []
        at = 0
        for number, (start, end) in enumerate(self._spans):
            mark = f"{self._mark}{number} ".encode()
            parts += [self._body[at:start], b'"%s"' % mark if number in self._lists else mark]
            at = end
        return b"".join([*parts, self._body[at:]])

    def is_mark(self, value: object) -> bool:
        """Whether a value in ``rest`` stands for a long string."""
        return bool(self._spans) and isinstance(value, str) and value.startswith(self._mark)

    def put_back(self, changed: BodyBytes) -> BodyBytes:
        """Return ``rest``, whose other members were changed, with the strings as they were sent."""
        if not self._spans:
            return changed
        first, *others = bytes(changed).split(self._mark.encode())
        parts: list[bytes | memoryview] = [first]
        for each in others:
            number, _, after = each.partition(b" ")
            if is_list := int(number) in self._lists:
                parts[-1] = parts[-1][:-1]  # the mark's quotes
            start, end = self._spans[int(number)]
            parts += [self._body[start:end], after[is_list:]]
        return joined(parts)

    def restore(self, fields: dict[str, Any], most_chars: int | None = None) -> None:
        """Decode the strings into what was parsed of ``rest``; raise `BadRequestError`.

        Texts beyond ``most_chars`` are not decoded.
        """
        self._chars_left = MAX_TEXT_BYTES if most_chars is None else most_chars
        if self._spans:
            try:
                for name in _PROMPTS:
                    if name in fields:
                        fields[name] = self.ids(fields[name])
                self._restored(fields, in_medium=False)
            except RecursionError:
                raise BadRequestError("the body's values are nested too deeply") from None

    def ids(self, value: Any) -> Any:
        """Return a field of ``rest`` with arrays in place of long lists of ids (``LARGEST_ID``)."""
        if not isinstance(value, list):
            return value
        if not self._is_list(value):
            return [self.ids(each) if self._is_list(each) else each for each in value]
        ids = array("I")
        for part in self._integers(value[0]):
            if max(part, default=0) > LARGEST_ID:
                return value  # to be a list
            ids.extend(part)
        return ids

    def _is_list(self, value: Any) -> bool:
        return (
            isinstance(value, list)
            and len(value) == 1
            and self.is_mark(value[0])
            and self._number(value[0]) in self._lists
        )

    def _number(self, mark: str) -> int:
        return int(mark[len(self._mark) :])

    def _integers(self, mark: str) -> Iterator[list[int]]:
        """Yield a list of numbers in parts; raise `BadRequestError`."""
        at, stop = self._spans[self._number(mark)]
        while at <= stop:
            end = self._source.find(b",", min(at + _LISTED_BYTES, stop), stop)
            end = stop if end < 0 else end
            try:
                part = _INTEGERS.decode(b"".join((b"[", self._body[at:end], b"]")))
            except (msgspec.MsgspecError, ValueError) as error:
                message = f"the body is not valid JSON: {error}"
                raise BadRequestError(message, code="invalid_json") from None
            if not part and (end < stop or self._source[at - 1 : at] == b","):
                raise BadRequestError(
                    "the body is not valid JSON: a number is missing", code="invalid_json"
                )
            yield part
            at = end + 1

    def _restored(self, value: Any, *, in_medium: bool) -> Any:
        if self.is_mark(value):
            return self._string(value, in_medium)
        if self._is_list(value):
            value[:] = [each for part in self._integers(value[0]) for each in part]
        elif isinstance(value, list):
            for at, each in enumerate(value):
                value[at] = self._restored(each, in_medium=in_medium)
        elif isinstance(value, dict):
            for name, each in list(value.items()):
                value[name] = self._restored(each, in_medium=in_medium or name in FIELDS)
                if self.is_mark(name):
                    value[self._string(name, in_medium)] = value.pop(name)
        return value

    def _string(self, mark: str, in_medium: bool) -> str:
        start, end = self._spans[self._number(mark)]
        raw, length = self._body[start:end], end - start
        if in_medium and _IN_BASE64.fullmatch(raw[:_HEAD_BYTES]):
            self.media_bytes += length
        elif self.text_bytes + length > MAX_TEXT_BYTES:
            self.is_cut = True
        else:
            # Appended to in place: joining parts would take the memory twice.
            text = ""
            for part in _decoded(raw):
                self._chars_left -= len(part)
                if self._chars_left < 0:
                    self.is_cut = True
                    break
                text += part
            else:
                self.text_bytes += length
                return text
        return next(_decoded(raw, _HEAD_BYTES)) + xxhash.xxh3_128_hexdigest(raw)


def _spans(body: BodyBytes) -> Iterator[tuple[int, int]]:
    """Yield where the insides of long strings begin and end."""
    is_escaped = in_string = is_long = False
    start = 0
    for at in range(0, len(body), _SCANNED_BYTES):
        part = bytes(body[at : at + _SCANNED_BYTES])
        if is_escaped:
            part = b"_" + part[1:]
        is_escaped = False
        if b"\\" in part:
            part = part.replace(b"\\\\", b"__")
            is_escaped = part.endswith(b"\\")
            part = part.replace(b'\\"', b"__")
        quotes = part.count(b'"')
        if not quotes:
            is_long = in_string
            continue
        if is_long:
            yield start, at + part.index(b'"')
            is_long = False
        in_string ^= bool(quotes & 1)
        start = at + part.rindex(b'"') + 1


def _lists(body: BodyBytes, strings: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield where the insides of long lists of numbers begin and end; ``strings``: see `_spans`."""
    at = 0
    for begin, after in (*strings, (len(body), len(body))):
        gap = at
        while at + _LISTED_BYTES <= begin:
            if not _is_numbers(body, at, at + _LISTED_BYTES):
                at += _LISTED_BYTES
                continue
            start = max(body.rfind(b"[", gap, at) + 1, gap)
            end = body.find(b"]", at, begin)
            if end >= 0 and body[start - 1 : start] == b"[" and _is_numbers(body, start, end):
                yield start, end
            at = gap = begin if end < 0 else end
        at = after


def _numbers_in(body: BodyBytes, start: int, end: int) -> int:
    parts = range(start, end, _DECODED_BYTES)
    return 1 + sum(body.count(b",", at, min(at + _DECODED_BYTES, end)) for at in parts)


def _is_numbers(body: BodyBytes, start: int, end: int) -> bool:
    parts = range(start, end, _LISTED_BYTES)
    return not any(
        body[at : min(at + _LISTED_BYTES, end)].translate(None, _NUMBERS) for at in parts
    )


def _decoded(raw: memoryview, most_bytes: int = _DECODED_BYTES) -> Iterator[str]:
    """Yield the parts of a JSON string's inside, decoded; raise `BadRequestError`."""
    at = 0
    while at < len(raw):
        end = min(at + most_bytes, len(raw))
        # A part must not end within an escape or a character.
        for less in range(_LONGEST_CHARACTER if end < len(raw) else 1):
            try:
                text = _STRING.decode(b"".join((b'"', raw[at : end - less], b'"')))
                break
            except (msgspec.MsgspecError, ValueError) as error:
                problem = str(error)  # the error itself would keep this frame, and so the body
        else:
            message = f"the body is not valid JSON: {problem}"
            raise BadRequestError(message, code="invalid_json")
        yield text
        at = end - less
