"""InfiniStore as a remote store, over RDMA. Untested on hardware: see `InfiniStore`.

Its client runs in a process of its own (`hosted_store`). `InfiniStoreClient` is used there; the
rest runs in the replica.
"""

import asyncio
import ctypes
import logging
import struct
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final

from cacheengine.tiers.client_host import (
    ABSENT,
    FAILED,
    FULL,
    STORED,
    UNREAD,
    ClientError,
    StoreClient,
)
from cacheengine.tiers.hosted_store import HostedLibrary, HostedStore
from cacheengine.tiers.remote_url import RemoteUrl, parse_remote_url
from warmroute_common.config_reader import BadValueError, parse_int

logger = logging.getLogger("vllm.warmroute")

_SIZE_PREFIX: Final = struct.Struct("<8sQ")
"""A magic word and the size, stored before each blob: the server does not know blobs' sizes."""

_TIMEOUT_S: Final = 5.0
_DEFAULT_BUFFER_MIB: Final = 256
_BUFFER_MIB: Final = parse_int(minimum=1, maximum=64 * 1024)
_LINK_TYPES: Final = ("Ethernet", "IB")
_OPTIONS: Final = ("device", "link_type", "ib_port", "buffer_mib")


class InfiniStore(HostedStore):
    """Blobs on an InfiniStore server, by InfiniStore's client in a process of its own.

    UNTESTED ON HARDWARE: the server does not start without an RDMA device, so this adapter has
    never run with a real one. Tests check that the client library has the calls and parameters
    that are used here and, with a substitute for the library, how its answers are handled.

    URL: ``infinistore://host:port/?device=mlx5_0&link_type=Ethernet&ib_port=1``,
    and ``buffer_mib``, the size of the buffer that chunks pass through (pinned at start).
    """

    @classmethod
    def connect(
        cls, url: str, extra: Mapping[str, Any], timeout_s: float = _TIMEOUT_S
    ) -> "InfiniStore":
        """Return the store that ``remote_url`` describes. It uses no key of ``extra``.

        Like `MooncakeStore.connect` otherwise.
        """
        address = parse_remote_url(url)
        settings = _settings(address)
        memory_mib = address.option("buffer_mib", _BUFFER_MIB, _DEFAULT_BUFFER_MIB)
        _check_extra(extra)
        logger.warning("remote tier: %s: the InfiniStore adapter is untested on hardware", address)
        library = HostedLibrary(
            module="cacheengine.tiers.infinistore_store",
            settings=settings,
            environment={},
            log_variable="INFINISTORE_LOG_LEVEL",
        )
        return cls(
            library,
            memory_bytes=memory_mib * 1024 * 1024,
            memory_setting="buffer_mib (in MiB) in remote_url",
            timeout_s=timeout_s,
            prefix_bytes=_SIZE_PREFIX.size,
        )


def _settings(address: RemoteUrl) -> dict[str, Any]:
    address.check_options(_OPTIONS)
    address.check_is_bare("write infinistore://host:port/?device=name")
    link_type = address.options.get("link_type", _LINK_TYPES[0])
    if link_type not in _LINK_TYPES:
        raise BadValueError(
            f"link_type={link_type} is unknown", "write link_type=Ethernet or link_type=IB"
        )
    return {
        "host_addr": address.host,
        "service_port": address.port,
        "dev_name": address.options.get("device", "mlx5_0"),
        "link_type": link_type,
        "ib_port": address.option("ib_port", parse_int(minimum=1, maximum=255), 1),
    }


def _check_extra(extra: Mapping[str, Any]) -> None:
    for key in extra:
        if str(key).startswith("infinistore"):
            options = ", ".join(_OPTIONS)
            raise BadValueError(f"{key} is not a known key", f"set it in remote_url: {options}")


_MAGIC: Final = b"WARMSIZE"
_OUT_OF_MEMORY: Final = "507"
"""The server's code at the end of the library's message."""


def make_client(settings: Mapping[str, Any]) -> StoreClient:
    """Return the client for keyword arguments of the library's ``ClientConfig``."""
    return InfiniStoreClient(settings)


class InfiniStoreClient(StoreClient):
    """One RDMA connection, whose transfers run on their own event loop.

    A server sends as many bytes as a read asks for, whatever the size of the blob. So each blob
    is read in two steps, its size first.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import infinistore  # noqa: PLC0415  (in the client's process only)

        self._not_found = infinistore.InfiniStoreKeyNotFound
        config = infinistore.ClientConfig(
            connection_type=infinistore.TYPE_RDMA, log_level="warning", **settings
        )
        self._connection = infinistore.InfinityConnection(config)
        self._loop = asyncio.new_event_loop()
        # Other calls use one TCP connection, one call at a time.
        self._request_lock = threading.Lock()

    def connect(self, address: int, size_bytes: int) -> None:
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._connection.connect()
        self._connection.register_mr(address, size_bytes)

    def exists(self, names: Sequence[str]) -> list[int]:
        """Ask for each name: the library's call for several names only finds a common prefix."""
        with self._request_lock:
            return [int(self._connection.check_exist(name)) for name in names]

    def get(
        self, names: Sequence[str], addresses: Sequence[int], limits: Sequence[int]
    ) -> list[int]:
        return self._all(self._get(*each) for each in zip(names, addresses, limits, strict=True))

    async def _get(self, name: str, address: int, limit: int) -> int:
        try:
            await self._read(name, _SIZE_PREFIX.size, address)
            size = _size_at(address)
            if size is None:
                return 0
            if size <= limit:
                await self._read(name, _SIZE_PREFIX.size + size, address)
                if _size_at(address) != size:
                    return ABSENT  # replaced between the two reads
        except self._not_found:
            return ABSENT
        return size

    async def _read(self, name: str, size_bytes: int, address: int) -> None:
        await self._connection.rdma_read_cache_async([(name, 0)], size_bytes, address)

    def put(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Write all at once. Others see a key when all its bytes are stored."""
        return self._all(
            (self._put(*each) for each in zip(names, addresses, sizes, strict=True)), failed=FAILED
        )

    async def _put(self, name: str, address: int, size: int) -> int:
        ctypes.memmove(address, _SIZE_PREFIX.pack(_MAGIC, size), _SIZE_PREFIX.size)
        try:
            await self._connection.rdma_write_cache_async(
                [(name, 0)], _SIZE_PREFIX.size + size, address
            )
        except Exception as error:
            if str(error).endswith(_OUT_OF_MEMORY):
                return FULL
            raise
        return STORED

    def _all(self, calls: Iterable[Coroutine[Any, Any, int]], failed: int = UNREAD) -> list[int]:
        """Run calls concurrently; raise `ClientError` if all of them failed."""

        async def gather() -> list[int | BaseException]:
            return await asyncio.gather(*calls, return_exceptions=True)

        outcomes = asyncio.run_coroutine_threadsafe(gather(), self._loop).result()
        errors = [each for each in outcomes if isinstance(each, BaseException)]
        if len(errors) == len(outcomes):
            raise ClientError(str(errors[0]))
        return [failed if isinstance(each, BaseException) else each for each in outcomes]

    def remove(self, names: Sequence[str]) -> None:
        with self._request_lock:
            self._connection.delete_keys(list(names))

    def close(self) -> None:
        self._connection.close()
        self._loop.call_soon_threadsafe(self._loop.stop)


def _size_at(address: int) -> int | None:
    """Return the size of the blob read to this address; None if another program stored it."""
    magic, size_bytes = _SIZE_PREFIX.unpack(ctypes.string_at(address, _SIZE_PREFIX.size))
    return int(size_bytes) if magic == _MAGIC else None
