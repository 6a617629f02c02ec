"""The process that hosts a store's client library, away from the replica's own.

Such libraries hang in calls that take no timeout, crash when they are closed at
the wrong moment, and change the signals and the environment of their process.
Here they may: the replica kills this process, and a new one connects anew.

Started by `client_process` as ``python -m cacheengine.tiers.stores.hosted.client_host``, with a
`Setup` on standard input: settings may hold passwords, and all of a machine see arguments.
It ends when the replica closes the socket, or is gone.
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
from typing import Final, NoReturn

import msgspec

from cacheengine.tiers.stores.hosted.client_wire import READY_ID, Answer, Ask, ClientError, Setup

_LAST_CALLS_S: Final = 1.0
_CLOSE_S: Final = 5.0
_PARENT_CHECK_S: Final = 1.0


class StoreClient(ABC):
    """A store's library, behind blocking calls. Raises `ClientError`; called from threads.

    Blobs lie at addresses of this process, in the memory given to `connect`.
    """

    @abstractmethod
    def connect(self, address: int, size_bytes: int) -> None:
        """Reach the server, and make this memory known to the library."""

    @abstractmethod
    def exists(self, names: Sequence[str]) -> list[int]:
        """Return 1 or 0 for each name."""

    @abstractmethod
    def get(
        self, names: Sequence[str], addresses: Sequence[int], rooms: Sequence[int]
    ) -> list[int]:
        """Read blobs that fit; return each one's size, ABSENT or UNREAD.

        Larger than its room, a blob is not read but its size returned.
        """

    @abstractmethod
    def put(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Store blobs; return STORED, FULL or FAILED for each."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove blobs; absent ones are no error."""

    @abstractmethod
    def close(self) -> None:
        """Leave the server. No other call is under way, or comes after."""


class Host:
    """Answers what comes from the socket, several calls at once."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._socket = Connection(setup.socket_fd)
        self._send_lock = threading.Lock()
        self._memory = mmap.mmap(setup.memory_fd, setup.memory_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._threads = ThreadPoolExecutor(setup.threads)
        self._connected = threading.Event()

    def run(self) -> None:
        """Connect and serve until the replica closes the socket or is gone."""
        threading.Thread(target=self._end_if_orphaned, daemon=True).start()
        try:
            self._client = self._connect()
        except Exception as error:  # noqa: BLE001  (libraries raise what they like)
            self._send(Answer(READY_ID, error=_described(error)))
            return
        self._connected.set()
        self._send(Answer(READY_ID))
        under_way: set[Future[None]] = set()
        with contextlib.suppress(EOFError, OSError):
            while os.getppid() == self._setup.parent_pid:
                if not self._socket.poll(_PARENT_CHECK_S):
                    continue
                ask = msgspec.msgpack.decode(self._socket.recv_bytes(), type=Ask)
                if ask.verb == "close":
                    break
                future = self._threads.submit(self._answer, ask)
                under_way.add(future)
                future.add_done_callback(under_way.discard)
        self._leave(under_way)

    def _end_if_orphaned(self) -> None:
        """End the process with the replica while `run` may hang in a library that connects."""
        while not self._connected.wait(_PARENT_CHECK_S):
            if os.getppid() != self._setup.parent_pid:
                os._exit(1)

    def _connect(self) -> StoreClient:
        adapter = importlib.import_module(self._setup.module)
        client: StoreClient = adapter.make_client(self._setup.settings)
        client.connect(self._address, self._setup.memory_bytes)
        return client

    def _leave(self, under_way: set[Future[None]]) -> None:
        """Close the library, but for calls that it does not come back from."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        # A library that is closed under a call crashes.
        if not wait(list(under_way), timeout=_LAST_CALLS_S).not_done:
            closing = threading.Thread(target=self._client.close, daemon=True)
            closing.start()
            closing.join(_CLOSE_S)

    def _answer(self, ask: Ask) -> None:
        try:
            values = self._call(ask)
        except Exception as error:  # noqa: BLE001  (libraries raise what they like)
            answer = Answer(ask.id, error=_described(error))
        else:
            answer = Answer(ask.id, values)
        with contextlib.suppress(OSError):  # the replica has gone: `run` ends, too
            self._send(answer)

    def _call(self, ask: Ask) -> list[int]:
        addresses = [self._address + offset for offset in ask.offsets]
        if ask.verb == "exists":
            return self._client.exists(ask.names)
        if ask.verb == "get":
            return self._client.get(ask.names, addresses, ask.sizes)
        if ask.verb == "put":
            return self._client.put(ask.names, addresses, ask.sizes)
        self._client.remove(ask.names)
        return []

    def _send(self, answer: Answer) -> None:
        with self._send_lock:  # two threads' messages must not mix
            self._socket.send_bytes(msgspec.msgpack.encode(answer))


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, ClientError) else f"{type(error).__name__}: {error}"


def main() -> NoReturn:
    """Serve what standard input says, and end without the library's exit handlers, which hang."""
    Host(msgspec.json.decode(sys.stdin.buffer.read(), type=Setup)).run()
    os._exit(0)


if __name__ == "__main__":
    main()
