"""InfiniStore's own client, as a `StoreClient`. Imported in the hosting process only.

UNTESTED ON HARDWARE: see `infinistore.InfiniStore`.
"""

import asyncio
import ctypes
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final

import infinistore

from cacheengine.tiers.stores.hosted.client_host import StoreClient
from cacheengine.tiers.stores.hosted.client_wire import (
    ABSENT,
    FAILED,
    FULL,
    STORED,
    UNREAD,
    ClientError,
)
from cacheengine.tiers.stores.infinistore.infinistore import SIZE_PREFIX

_MAGIC: Final = b"WARMSIZE"
_OUT_OF_MEMORY: Final = "507"
"""The server's code at the end of the library's message."""


def make_client(settings: Mapping[str, Any]) -> StoreClient:
    """Return the client for keyword arguments of the library's ``ClientConfig``."""
    return InfiniStoreClient(settings)


class InfiniStoreClient(StoreClient):
    """One RDMA connection, whose transfers run on an event loop of their own.

    A server sends as many bytes as it is asked for, whatever a key's blob has:
    so each blob is read in two steps, its size first.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        config = infinistore.ClientConfig(
            connection_type=infinistore.TYPE_RDMA, log_level="warning", **settings
        )
        self._connection = infinistore.InfinityConnection(config)
        self._loop = asyncio.new_event_loop()
        # What is no transfer goes over one TCP connection, question by question.
        self._question_lock = threading.Lock()

    def connect(self, address: int, size_bytes: int) -> None:
        """Connect, and register the memory for RDMA."""
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._connection.connect()
        self._connection.register_mr(address, size_bytes)

    def exists(self, names: Sequence[str]) -> list[int]:
        """Ask name by name: the library's question about several finds a prefix only."""
        with self._question_lock:
            return [int(self._connection.check_exist(name)) for name in names]

    def get(
        self, names: Sequence[str], addresses: Sequence[int], rooms: Sequence[int]
    ) -> list[int]:
        """Read all at once."""
        return self._all(self._get(*each) for each in zip(names, addresses, rooms, strict=True))

    async def _get(self, name: str, address: int, room: int) -> int:
        try:
            await self._read(name, SIZE_PREFIX.size, address)
            size = _size_at(address)
            if size is None:
                return 0
            if size <= room:
                await self._read(name, SIZE_PREFIX.size + size, address)
                if _size_at(address) != size:
                    return ABSENT  # replaced between the two
        except infinistore.InfiniStoreKeyNotFound:
            return ABSENT
        return size

    async def _read(self, name: str, size_bytes: int, address: int) -> None:
        await self._connection.rdma_read_cache_async([(name, 0)], size_bytes, address)

    def put(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Write all at once; a key is visible to others when all of its bytes are there."""
        return self._all(
            (self._put(*each) for each in zip(names, addresses, sizes, strict=True)), failed=FAILED
        )

    async def _put(self, name: str, address: int, size: int) -> int:
        ctypes.memmove(address, SIZE_PREFIX.pack(_MAGIC, size), SIZE_PREFIX.size)
        try:
            await self._connection.rdma_write_cache_async(
                [(name, 0)], SIZE_PREFIX.size + size, address
            )
        except Exception as error:
            if str(error).endswith(_OUT_OF_MEMORY):
                return FULL
            raise
        return STORED

    def _all(self, calls: Iterable[Coroutine[Any, Any, int]], failed: int = UNREAD) -> list[int]:
        """Run calls at once; raise `ClientError` when every one of them failed."""

        async def gather() -> list[int | BaseException]:
            return await asyncio.gather(*calls, return_exceptions=True)

        outcomes = asyncio.run_coroutine_threadsafe(gather(), self._loop).result()
        errors = [each for each in outcomes if isinstance(each, BaseException)]
        if len(errors) == len(outcomes):
            raise ClientError(str(errors[0]))
        return [failed if isinstance(each, BaseException) else each for each in outcomes]

    def remove(self, names: Sequence[str]) -> None:
        """Remove all in one call."""
        with self._question_lock:
            self._connection.delete_keys(list(names))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
        self._loop.call_soon_threadsafe(self._loop.stop)


def _size_at(address: int) -> int | None:
    """Return the size of the blob that was read to this address; None if it is none of ours."""
    magic, size_bytes = SIZE_PREFIX.unpack(ctypes.string_at(address, SIZE_PREFIX.size))
    return int(size_bytes) if magic == _MAGIC else None
