"""JSON that is nearly right: valid requests with one thing in them, or several, made odd."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hypothesis import strategies as st

HUGE: Final = 1_000_000


@dataclass(frozen=True)
class Raw:
    """Bytes that stand in the text as they are."""

    text: bytes


@dataclass(frozen=True)
class Pairs:
    """An object, whose keys may come twice."""

    pairs: tuple[tuple[str, Any], ...]


def dump(value: Any) -> bytes:
    """Return a value as JSON, or as what is nearly JSON."""
    match value:
        case Raw(text):
            return text
        case Pairs(pairs):
            members = [json.dumps(key).encode() + b":" + dump(each) for key, each in pairs]
            return b"{" + b",".join(members) + b"}"
        case list():
            return b"[" + b",".join(dump(each) for each in value) + b"]"
    return json.dumps(value).encode()


def tree(value: Any) -> Any:
    """Return a value with its objects as pairs."""
    if isinstance(value, dict):
        return Pairs(tuple((key, tree(each)) for key, each in value.items()))
    if isinstance(value, list):
        return [tree(each) for each in value]
    return value


_RAW: Final = st.sampled_from(
    [
        *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"-0.0", b"1e-400", b"01", b"+1"),
        *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\xff\xfe"', b'"\x00"', b"'a'"),
        *(b"9" * 400, b"-" + b"9" * 30, b"18446744073709551616", b"9223372036854775808"),
        *(b'"' + b"x" * 5000 + b'"', b"", b"}", b"[", b"\xef\xbb\xbf{}", b"/**/1"),
        *(b"[" * depth + b"]" * depth for depth in (300, 1000, 2000)),
        *(b'{"a":' * depth + b"1" + b"}" * depth for depth in (300, 1000, 2000)),
    ]
).map(Raw)

TEXT: Final = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        ["", " ", "\x00", "\ud800", "a\udfffb", "\u2028", "\U0001d518", "../..", "<|user|>"]
    ),
    st.text(alphabet=st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010), max_size=8),
)

NUMBERS: Final = st.one_of(
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**32, 2**63, 2**64, -(2**63) - 1, 10**40, 0.5, -0.0, 1e308]),
    st.floats(),
)

ODD: Final[st.SearchStrategy[Any]] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT, _RAW),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(st.tuples(TEXT, inner), max_size=4).map(lambda pairs: Pairs(tuple(pairs))),
    ),
    max_leaves=8,
)


@st.composite
def nearly(draw: st.DrawFn, templates: Sequence[Any]) -> bytes:
    """Return one of the templates as JSON, changed in up to three places."""
    value = tree(draw(st.sampled_from(list(templates))))
    for _ in range(draw(st.integers(0, 3))):
        value = _changed(draw, value)
    return dump(value)


def _changed(draw: st.DrawFn, value: Any) -> Any:
    """Return a value with one place in it changed."""
    inside = (isinstance(value, Pairs) and value.pairs) or (isinstance(value, list) and value)
    if not inside or draw(st.integers(0, 5)) == 0:
        return draw(ODD)
    if isinstance(value, Pairs):
        return _changed_pairs(draw, value)
    at = draw(st.integers(0, len(value) - 1))
    acts: dict[str, Callable[[], list[Any]]] = {
        "inside": lambda: [_changed(draw, value[at])],
        "none": list,
        "twice": lambda: [value[at], value[at]],
        "many": lambda: [value[at]] * draw(st.sampled_from([10, 1000])),
    }
    chosen = draw(st.sampled_from(["inside", "inside", "inside", *acts]))
    return [*value[:at], *acts[chosen](), *value[at + 1 :]]


def _changed_pairs(draw: st.DrawFn, value: Pairs) -> Pairs:
    pairs = value.pairs
    at = draw(st.integers(0, len(pairs) - 1))
    key, each = pairs[at]
    acts: dict[str, Callable[[], list[tuple[str, Any]]]] = {
        "inside": lambda: [(key, _changed(draw, each))],
        "none": list,
        "twice": lambda: [(key, each), (key, _changed(draw, each))],
        "other key": lambda: [(draw(TEXT), each)],
        "more": lambda: [(key, each), (draw(TEXT), draw(ODD))],
    }
    chosen = draw(st.sampled_from(["inside", "inside", "inside", *acts]))
    return Pairs((*pairs[:at], *acts[chosen](), *pairs[at + 1 :]))
