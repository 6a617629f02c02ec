"""What a store and the process that hosts its client library say to each other.

Only names and numbers: the bytes of blobs lie in memory that both have mapped.
"""

from typing import Any, Final, Literal

import msgspec

Verb = Literal["exists", "get", "put", "remove", "close"]

READY_ID: Final = 0
"""The one unasked answer: the first, when the library has connected."""

ABSENT: Final = -1
"""Instead of a blob's size: there is none of that name."""
UNREAD: Final = -2
"""Instead of a blob's size: there is one, but it could not be read."""

STORED: Final = 0
FULL: Final = 1
FAILED: Final = 2
"""How a put ended, for each blob."""


class ClientError(Exception):
    """The library could not do what it was asked; the text is for people."""

    # Here, not beside the host: that module runs as ``__main__``, and adapters would import
    # another class by its name.


class Setup(msgspec.Struct, frozen=True):
    """What the process is started with: its one argument, as JSON."""

    module: str
    """Has ``make_client(settings)``, which returns a `StoreClient`."""
    settings: dict[str, Any]
    socket_fd: int
    memory_fd: int
    memory_bytes: int
    threads: int
    parent_pid: int


class Ask(msgspec.Struct, frozen=True):
    """One call. Blobs lie in the memory from ``offsets`` on, ``sizes`` bytes (or room) each."""

    id: int
    verb: Verb
    names: list[str]
    offsets: list[int] = []
    sizes: list[int] = []


class Answer(msgspec.Struct, frozen=True):
    """What came of it: a number for each name, or why there is none."""

    id: int
    values: list[int] = []
    error: str = ""
