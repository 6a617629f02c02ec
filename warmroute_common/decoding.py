"""Decoding into types that msgspec knows, in any thread.

msgspec describes a type to itself when it is first used, in Python code. A second thread that uses
the type meanwhile finds half a description and crashes the process (segmentation fault, seen with
0.22). So a type is described here once, under a lock, before it is used. Decoders that are made
while a module is imported need no lock. All other uses go through this module; a test checks that.
"""

import threading
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

# Two threads that use a type for the first time: the second waits until the first has described it.
_describing: Final = threading.Lock()
_described: Final[set[Any]] = set()
"""Bounded: types are what the code names."""


def decode_json(body: bytes | bytearray, kind: type[T]) -> T:
    """Return what JSON holds; raises one of `UNREADABLE` if it is no ``kind``."""
    return msgspec.json.decode(body, type=_ready(kind))


def decode_msgpack(body: bytes | bytearray, kind: type[T]) -> T:
    """Return what MessagePack holds; raises one of `UNREADABLE` if it is no ``kind``."""
    return msgspec.msgpack.decode(body, type=_ready(kind))


def convert(value: object, kind: type[T]) -> T:
    """Return decoded objects as a ``kind``; raises `msgspec.ValidationError` if they are none."""
    return msgspec.convert(value, _ready(kind))


def _ready(kind: type[T]) -> type[T]:
    if kind not in _described:
        with _describing:
            msgspec.msgpack.Decoder(kind)
            _described.add(kind)
    return kind
