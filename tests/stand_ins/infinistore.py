"""Stands in for the infinistore package where there is no RDMA: the calls that we make.

Keeps blobs in its process. Its server's manner is the real one's: it sends as
many bytes as it is asked for, its own after those of the key; a put replaces.
``test_infinistore`` compares the calls with the real package's.
"""

import ctypes
from typing import Any

TYPE_RDMA = "RDMA"
_ROOM = 64 * 1024 * 1024


class InfiniStoreException(Exception):  # noqa: N818  (the name in the infinistore package)
    pass


class InfiniStoreKeyNotFound(InfiniStoreException):
    pass


class ClientConfig:
    def __init__(self, **kwargs: Any) -> None:
        self.given = kwargs


class InfinityConnection:
    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self.rdma_connected = False
        self._blobs: dict[str, bytes] = {}
        self._registered = range(0)

    def connect(self) -> None:
        if self.config.given["host_addr"] == "nowhere":
            raise Exception("Failed to initialize remote connection")
        self.rdma_connected = True

    def close(self) -> None:
        self.rdma_connected = False

    def register_mr(self, arg: int, size: int | None = None) -> int:
        assert size
        self._registered = range(arg, arg + size)
        return 0

    async def rdma_write_cache_async(
        self, blocks: list[tuple[str, int]], block_size: int, ptr: int
    ) -> int:
        self._check(block_size, ptr)
        for key, offset in blocks:
            if sum(map(len, self._blobs.values())) + block_size > _ROOM:
                raise Exception("Failed to write to infinistore, ret = 507")
            self._blobs[key] = ctypes.string_at(ptr + offset, block_size)
        return 200

    async def rdma_read_cache_async(
        self, blocks: list[tuple[str, int]], block_size: int, ptr: int
    ) -> int:
        self._check(block_size, ptr)
        for key, offset in blocks:
            if key not in self._blobs:
                raise InfiniStoreKeyNotFound("some keys not found")
            blob = self._blobs[key][:block_size]
            ctypes.memmove(ptr + offset, blob + b"\xee" * (block_size - len(blob)), block_size)
        return 200

    def _check(self, block_size: int, ptr: int) -> None:
        assert self.rdma_connected
        assert ptr in self._registered
        assert ptr + block_size - 1 in self._registered, "beyond what is registered"

    def check_exist(self, key: str) -> bool:
        return key in self._blobs

    def delete_keys(self, keys: list[str]) -> int:
        return sum(self._blobs.pop(key, None) is not None for key in keys)
