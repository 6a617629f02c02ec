"""The process that hosts a store's client library, and the messages between it and the replica.

Such libraries hang in calls without a timeout, crash when they are closed at the wrong moment,
and change the signals and the environment of their process. Here they may: the replica kills this
process and starts another one.

`hosted_store` starts it as ``python -m cacheengine.tiers.client_host``, with a `ClientSetup` on
standard input: settings may contain passwords, and every user of a machine can read arguments.
It ends when the replica closes the socket or has died. Messages contain names and numbers only:
the bytes of blobs lie in memory that both processes have mapped.
"""

import contextlib
import ctypes
import importlib
import mmap
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from typing import Any, Final, Literal, NoReturn

import msgspec

from warmroute_common.decoding import decode_json, decode_msgpack

_LAST_CALLS_S: Final = 1.0
_CLOSE_S: Final = 5.0
_PARENT_CHECK_S: Final = 1.0

Verb = Literal["exists", "get", "put", "remove", "close"]

READY_ID: Final = 0
"""The id of the first reply, sent when the library has connected."""

ABSENT: Final = -1
"""Instead of a blob's size: there is no blob of that name."""
UNREAD: Final = -2
"""Instead of a blob's size: the blob exists but could not be read."""

STORED: Final = 0
FULL: Final = 1
FAILED: Final = 2
"""The outcomes of a put, one for each blob."""


class ClientError(Exception):
    """The library could not do a call. The text is for the log."""


class ClientSetup(msgspec.Struct, frozen=True):
    """The process's input, as JSON."""

    module: str
    """The module whose ``make_client(settings)`` returns a `StoreClient`."""
    settings: dict[str, Any]
    socket_fd: int
    memory_fd: int
    memory_bytes: int
    threads: int
    parent_pid: int


class ClientCall(msgspec.Struct, frozen=True):
    """One call.

    Each blob lies at one of ``offsets``. ``sizes`` are their sizes, or for a get the limits.
    """

    id: int
    verb: Verb
    names: list[str]
    offsets: list[int] = []
    sizes: list[int] = []


class ClientReply(msgspec.Struct, frozen=True):
    """The result of a call: a number for each name, or an error."""

    id: int
    values: list[int] = []
    error: str = ""


class StoreClient(ABC):
    """A store's library, behind blocking calls. Several threads call; raises `ClientError`.

    Blobs lie at addresses in the memory given to `connect`.
    """

    @abstractmethod
    def connect(self, address: int, size_bytes: int) -> None:
        """Connect to the server, and register this memory with the library."""

    @abstractmethod
    def exists(self, names: Sequence[str]) -> list[int]:
        """Return 1 or 0 for each name."""

    @abstractmethod
    def get(
        self, names: Sequence[str], addresses: Sequence[int], limits: Sequence[int]
    ) -> list[int]:
        """Read blobs; return the size of each, ABSENT or UNREAD.

        A blob that is larger than its entry in ``limits`` is not read; its size is returned.
        """

    @abstractmethod
    def put(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Store blobs; return STORED, FULL or FAILED for each."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove blobs. Missing ones are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect. No other call is running or follows."""


class ClientHost:
    """Answers calls from the socket, several at once."""

    def __init__(self, setup: ClientSetup) -> None:
        self._setup = setup
        self._socket = Connection(setup.socket_fd)
        self._send_lock = threading.Lock()
        self._memory = mmap.mmap(setup.memory_fd, setup.memory_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._threads = ThreadPoolExecutor(setup.threads)
        # Prompts wait for questions: they do not queue behind transfers.
        self._asker = ThreadPoolExecutor(1)
        self._connected = threading.Event()

    def run(self) -> None:
        """Connect, and answer until the replica closes the socket or has died."""
        threading.Thread(target=self._end_if_orphaned, daemon=True).start()
        try:
            self._client = self._connect()
        except Exception as error:  # noqa: BLE001  (libraries raise what they like)
            self._send(ClientReply(READY_ID, error=_described(error)))
            return
        self._connected.set()
        self._send(ClientReply(READY_ID))
        running: set[Future[None]] = set()
        with contextlib.suppress(EOFError, OSError):
            while os.getppid() == self._setup.parent_pid:
                if not self._socket.poll(_PARENT_CHECK_S):
                    continue
                ask = decode_msgpack(self._socket.recv_bytes(), ClientCall)
                if ask.verb == "close":
                    break
                threads = self._asker if ask.verb == "exists" else self._threads
                future = threads.submit(self._answer, ask)
                running.add(future)
                future.add_done_callback(running.discard)
        self._leave(running)

    def _end_if_orphaned(self) -> None:
        """End the process with the replica: `run` may hang in a library that connects."""
        while not self._connected.wait(_PARENT_CHECK_S):
            if os.getppid() != self._setup.parent_pid:
                os._exit(1)

    def _connect(self) -> StoreClient:
        adapter = importlib.import_module(self._setup.module)
        client: StoreClient = adapter.make_client(self._setup.settings)
        client.connect(self._address, self._setup.memory_bytes)
        return client

    def _leave(self, running: set[Future[None]]) -> None:
        """Close the library, unless calls are stuck in it."""
        for threads in (self._threads, self._asker):
            threads.shutdown(wait=False, cancel_futures=True)
        # A library that is closed during a call crashes.
        if not wait(list(running), timeout=_LAST_CALLS_S).not_done:
            closing = threading.Thread(target=self._client.close, daemon=True)
            closing.start()
            closing.join(_CLOSE_S)

    def _answer(self, ask: ClientCall) -> None:
        try:
            values = self._call(ask)
        except Exception as error:  # noqa: BLE001  (libraries raise what they like)
            answer = ClientReply(ask.id, error=_described(error))
        else:
            answer = ClientReply(ask.id, values)
        with contextlib.suppress(OSError):  # the replica has died: `run` ends, too
            self._send(answer)

    def _call(self, ask: ClientCall) -> list[int]:
        addresses = [self._address + offset for offset in ask.offsets]
        if ask.verb == "exists":
            return self._client.exists(ask.names)
        if ask.verb == "get":
            return self._client.get(ask.names, addresses, ask.sizes)
        if ask.verb == "put":
            return self._client.put(ask.names, addresses, ask.sizes)
        self._client.remove(ask.names)
        return []

    def _send(self, answer: ClientReply) -> None:
        with self._send_lock:  # two threads' messages must not mix
            self._socket.send_bytes(msgspec.msgpack.encode(answer))


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, ClientError) else f"{type(error).__name__}: {error}"


def main() -> NoReturn:
    """Run with the setup on standard input; exit without the library's exit handlers: they hang."""
    ClientHost(decode_json(sys.stdin.buffer.read(), ClientSetup)).run()
    os._exit(0)


if __name__ == "__main__":
    # By its full name: adapters import that module, and must meet the same `ClientError`.
    importlib.import_module("cacheengine.tiers.client_host").main()
