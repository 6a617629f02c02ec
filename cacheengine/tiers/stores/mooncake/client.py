"""Mooncake's own client, as a `StoreClient`. Imported in the hosting process only."""

import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from cacheengine.tiers.stores.hosted.client_host import StoreClient
from cacheengine.tiers.stores.hosted.client_wire import (
    ABSENT,
    FAILED,
    FULL,
    STORED,
    UNREAD,
    ClientError,
)

_NO_SPACE: Final = -200
_TOO_SMALL: Final = -600
_ABSENT: Final = frozenset({-703, -704})
"""Not whole yet, and not there."""
_UNREACHABLE: Final = 2
"""Of `health_check`."""

_EXPLAINED: Final[Mapping[int, str]] = {
    -1: "internal error",
    -703: "the object is not whole",
    -705: "the object exists",
    -706: "the object has been read lately",
    -707: "reading took longer than the lease",
    -708: "the object is being copied",
    -714: "the object is being copied",
    -800: "the transfer from or to a replica failed",
    -900: "the master cannot be reached",
    -901: "the master does not answer",
}
"""The library's error codes that can be met here."""


def make_client(settings: Mapping[str, Any]) -> StoreClient:
    """Return the client for `MooncakeSettings` as plain values."""
    return MooncakeClient(settings)


class MooncakeClient(StoreClient):
    """Zero-copy calls of `MooncakeDistributedStore` on the memory shared with the replica."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._master = settings["master_server_address"]
        self._store = MooncakeDistributedStore()
        self._config = ReplicateConfig()

    def connect(self, address: int, size_bytes: int) -> None:
        """Set the client up; it contributes its segment of memory to the store."""
        settings = self._settings
        local = settings["local_hostname"] or _own_address(self._master)
        code = self._store.setup(
            local,
            settings["metadata_server"],
            settings["global_segment_size"],
            0,  # its buffer for calls that copy: none is made
            settings["protocol"],
            settings["device_name"],
            self._master,
        )
        if code:
            raise ClientError(f"the client could not be set up ({_explained(code)})")
        code = self._store.register_buffer(address, size_bytes)
        if code:
            raise ClientError(f"{size_bytes} bytes could not be registered ({_explained(code)})")
        if settings["prefer_local_alloc"]:
            self._config.preferred_segment = self._store.get_hostname()

    def exists(self, names: Sequence[str]) -> list[int]:
        """Ask in one call."""
        self._check_master()
        codes: list[int] = self._store.batch_is_exist(names)
        _check(code for code in codes if code < 0)
        return codes

    def get(
        self, names: Sequence[str], addresses: Sequence[int], rooms: Sequence[int]
    ) -> list[int]:
        """Read all in one call; ask for the sizes of blobs that do not fit."""
        self._check_master()
        codes: list[int] = self._store.batch_get_into(names, addresses, rooms)
        values = [self._size(name, code) for name, code in zip(names, codes, strict=True)]
        if all(value == UNREAD for value in values):
            _check(codes)
        return values

    def _size(self, name: str, code: int) -> int:
        if code == _TOO_SMALL:
            code = self._store.get_size(name)
        if code >= 0:
            return code
        return ABSENT if code in _ABSENT else UNREAD

    def put(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Put all in one call, in which a name that is there counts as put."""
        self._check_master()
        codes: list[int] = self._store.batch_put_from(names, addresses, sizes, self._config)
        if all(codes) and _NO_SPACE not in codes:
            _check(codes)
        return [_outcome(code, size) for code, size in zip(codes, sizes, strict=True)]

    def remove(self, names: Sequence[str]) -> None:
        """Remove all in one call, also what has a lease."""
        self._check_master()
        codes: list[int] = self._store.batch_remove(names, True)
        _check(code for code in codes if code < 0 and code not in _ABSENT)

    def close(self) -> None:
        """Leave the store: the master forgets what lay in this segment at once."""
        self._store.close()

    def _check_master(self) -> None:
        """Fail at once when it is known to be away: the calls would take seconds to find out."""
        if self._store.health_check() == _UNREACHABLE:
            raise ClientError(f"the master at {self._master} cannot be reached")


def _outcome(code: int, size: int) -> int:
    if code == _NO_SPACE:
        return FULL
    # An empty one is not stored, but no error to the library.
    return FAILED if code or not size else STORED


def _check(codes: Iterable[int]) -> None:
    """Raise `ClientError` for the first of some error codes."""
    for code in codes:
        raise ClientError(_explained(code))


def _explained(code: int) -> str:
    return f"{_EXPLAINED.get(code, 'error')} ({code})"


def _own_address(master: str) -> str:
    """Return this machine's address towards the master. Raises `ClientError`."""
    host, _, port = master.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            own: str = probe.getsockname()[0]
    except OSError as error:
        raise ClientError(f"the master at {master}: {error.strerror or error}") from None
    return own
