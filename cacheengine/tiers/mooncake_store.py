"""Mooncake Store as a remote store: memory that the replicas of a fleet contribute.

Its client runs in a process of its own (`hosted_store`). `MooncakeClient` is used there; the rest
runs in the replica.
"""

import dataclasses
import difflib
import json
import math
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from cacheengine.tiers.remote_url import parse_remote_url
from warmroute_common.addresses import join_host_port, resolve
from warmroute_common.config_reader import (
    BadValueError,
    parse_bool,
    parse_int,
    parse_seconds,
    setting,
)

CONFIG_FILE_VARIABLE: Final = "MOONCAKE_CONFIG_PATH"
"""Names a JSON file with the same keys. As in LMCache, it overrides ``extra_config``."""

DEFAULT_BUFFER_BYTES: Final = 512 * 1024 * 1024
_LEAST_BUFFER_BYTES: Final = 4 * 1024 * 1024
_LEAST_SEGMENT_BYTES: Final = 16 * 1024 * 1024
_PREFIX: Final = "mooncake_"
_NO_SERVER: Final = "P2PHANDSHAKE"
_METADATA_SCHEMES: Final = ("http://", "https://", "etcd://", "redis://")


def _text(value: object) -> str:
    if not isinstance(value, str) or value != value.strip() or any(map(str.isspace, value)):
        raise BadValueError(f"{value!r} is not a name", "write text without spaces")
    return value


def _metadata_server(value: object) -> str:
    text = _text(value)
    if text not in ("", _NO_SERVER) and not text.startswith(_METADATA_SCHEMES):
        allowed = ", ".join(f"{scheme}host:port" for scheme in _METADATA_SCHEMES)
        raise BadValueError(
            f"{text!r} is not a metadata server", f"write {_NO_SERVER}, or one of {allowed}"
        )
    return text or _NO_SERVER


def _protocol(value: object) -> str:
    text = _text(value).lower()
    if text not in ("tcp", "rdma"):
        raise BadValueError(f"{value!r} is not supported", "write tcp or rdma")
    return text


def _bytes(least: int, at_zero: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        number = parse_int(minimum=0)(value)
        if 0 < number < least:
            raise BadValueError(f"{number} bytes is too little", f"write 0, or at least {least}")
        return number or at_zero

    return parse


@dataclass(frozen=True, kw_only=True)
class MooncakeSettings:
    """The client's settings, with LMCache's names."""

    master_server_address: str = setting(parse=_text)
    """``host:port`` of mooncake_master."""
    local_hostname: str = setting("", parse=_text)
    """This replica's address for other replicas; by default the one that the master sees."""
    metadata_server: str = setting(_NO_SERVER, parse=_metadata_server)
    """The value that mooncake_master was started with."""
    protocol: str = setting("tcp", parse=_protocol)
    """``tcp`` or ``rdma``."""
    device_name: str = setting("", parse=_text)
    """RDMA devices, comma-separated; empty lets the library choose."""
    global_segment_size: int = setting(3355443200, parse=_bytes(_LEAST_SEGMENT_BYTES, at_zero=0))
    """Bytes of memory that this replica contributes to the store; 0 uses only that of others."""
    local_buffer_size: int = setting(
        DEFAULT_BUFFER_BYTES, parse=_bytes(_LEAST_BUFFER_BYTES, at_zero=DEFAULT_BUFFER_BYTES)
    )
    """Bytes of the buffer that chunks pass through. Memory is allocated when it is first used."""
    prefer_local_alloc: bool = setting(False, parse=parse_bool)
    """Store in this replica's own segment until that is full."""
    transfer_timeout: float | None = setting(None, parse=parse_seconds)
    """Seconds that a call may take, plus the time for its bytes."""


_PARSERS: Final[Mapping[str, Callable[[object], object]]] = {
    each.name: each.metadata["parse"] for each in dataclasses.fields(MooncakeSettings)
}


def mooncake_settings(
    url: str, extra: Mapping[str, Any], environment: Mapping[str, str]
) -> MooncakeSettings:
    """Return the settings from the URL, ``extra_config`` and the file that the environment names.

    The URL names the master, also if a key names another. Raises `BadValueError`.
    """
    address = parse_remote_url(url)
    address.check_options(("device",))
    address.check_is_bare("write mooncakestore://host:port/ (and ?device=name if needed)")
    given = {**_by_key(extra), **_by_key(_from_file(environment))}
    if device := address.options.get("device"):
        given["device_name"] = device
    given["master_server_address"] = join_host_port(address.host, address.port)
    known: dict[str, Any] = {}
    for key, value in given.items():
        try:
            known[key] = _PARSERS[key](value)
        except BadValueError as error:
            raise BadValueError(f"{key}: {error.problem}", error.fix) from None
    return MooncakeSettings(**known)


def _from_file(environment: Mapping[str, str]) -> Mapping[str, Any]:
    path = environment.get(CONFIG_FILE_VARIABLE)
    if not path:
        return {}
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problem = f"{CONFIG_FILE_VARIABLE}: {path} cannot be read as JSON ({error})"
        raise BadValueError(problem, "correct it, or unset the variable") from None
    if not isinstance(content, dict):
        problem = f"{CONFIG_FILE_VARIABLE}: {path} is not a JSON object"
        raise BadValueError(problem, "write an object with Mooncake's keys")
    return content


def _by_key(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return Mooncake's keys; raise `BadValueError` for a key that is nearly one of them."""
    found: dict[str, Any] = {}
    for written, value in given.items():
        key = str(written).removeprefix(_PREFIX)
        if value is None or (key in _LIBRARY_ONLY and not value):
            continue
        if key in _PARSERS:
            if key in found and found[key] != value:
                raise BadValueError(
                    f"{written} and {key} are the same key with two values", "remove one"
                )
            found[key] = value
        elif key in _LIBRARY_ONLY:
            raise BadValueError(f"{written} is not supported", _LIBRARY_ONLY[key])
        elif (near := _nearest(key)) or str(written).startswith(_PREFIX):
            fix = f"did you mean {near}?" if near else f"use one of {', '.join(_PARSERS)}"
            raise BadValueError(f"{written} is not a known key", fix)
    return found


def _nearest(key: str) -> str:
    near = difflib.get_close_matches(key.lower(), _PARSERS, n=1, cutoff=0.8)
    return near[0] if near else ""


_LIBRARY_ONLY: Final[Mapping[str, str]] = {
    "page_first_multi_buffer": "remove it: chunks are stored as single objects",
    "tenant_id": "remove it: replicas that share a master share its chunks",
    "enable_ssd_offload": "remove it: run mooncake_client with --enable_offload for that",
    "ssd_offload_path": "remove it: run mooncake_client with --enable_offload for that",
    "storage_root_dir": "remove it: SSDs are configured at mooncake_client and mooncake_master",
}
"""Keys of the library or of LMCache that have an effect only there, and what to do instead."""

_TIMEOUT_S: Final = 5.0


class MooncakeStore(HostedStore):
    """Blobs as objects of one Mooncake Store, by Mooncake's client in a process of its own.

    That client hangs when it is closed or set up without a master, crashes when it is used after
    that, and brings a Go runtime with its signal handlers.

    How Mooncake implements the contract:

    - Objects cannot be changed. A put of a name that exists counts as stored and keeps the
      object. (Mooncake's upsert would replace it, but overwrites bytes that others are reading.)
      The tier removes a damaged object; then the name can be put again.
    - A put of a name that another client is still writing counts as stored, too. If that client
      dies, the object does not exist, and cannot be put for up to 30 s.
    - `remove` ignores leases: a damaged blob that is read again and again would never be removed
      otherwise. A concurrent reader may get bytes of another object; the envelope's checksum
      finds that.
    - The memory that a replica contributed to the store is lost when its process ends.
    """

    @classmethod
    def connect(
        cls,
        url: str,
        extra: Mapping[str, Any],
        timeout_s: float = _TIMEOUT_S,
        environment: Mapping[str, str] = os.environ,
    ) -> "MooncakeStore":
        """Return the store that ``remote_url`` and ``extra_config`` describe.

        Does not wait for the server. A call may take ``timeout_s`` plus the time for its bytes,
        unless ``extra`` has a timeout. Raises `BadValueError` for wrong settings.
        """
        settings = mooncake_settings(url, extra, environment)
        timeout_s = settings.transfer_timeout or timeout_s
        library = HostedLibrary(
            module="cacheengine.tiers.mooncake_store",
            settings=dataclasses.asdict(settings),
            environment=_environment(timeout_s),
            log_variable="MC_LOG_LEVEL",
        )
        return cls(
            library,
            memory_bytes=settings.local_buffer_size,
            memory_setting="local_buffer_size in extra_config",
            timeout_s=timeout_s,
        )


def _environment(timeout_s: float) -> dict[str, str]:
    """Return timeouts shorter than the caller's, so that the library need not be killed."""
    data_s = str(max(1, math.floor(timeout_s / 2)))
    return {
        "MC_RPC_TIMEOUT_MS": str(round(timeout_s / 2 * 1000)),
        # It tries three times.
        "MC_RPC_CONNECT_TIMEOUT_MS": str(round(timeout_s / 4 * 1000)),
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": data_s,
        "MC_TCP_STATUS_TIMEOUT_SEC": data_s,
    }


_NO_SPACE: Final = -200
_TOO_SMALL: Final = -600
_ABSENT: Final = frozenset({-703, -704})
"""The object is not complete yet; it does not exist."""
_UNREACHABLE: Final = 2
"""A result of `health_check`."""

_EXPLAINED: Final[Mapping[int, str]] = {
    -1: "internal error",
    -703: "the object is not complete",
    -705: "the object exists",
    -706: "the object has a lease: it was read a short time ago",
    -707: "reading took longer than the lease",
    -708: "the object is being copied",
    -714: "the object is being copied",
    -800: "the transfer from or to a replica failed",
    -900: "the master cannot be reached",
    -901: "the master does not answer",
}
"""The library's error codes that can occur here."""


def make_client(settings: Mapping[str, Any]) -> StoreClient:
    """Return the client for `MooncakeSettings` as plain values."""
    return MooncakeClient(settings)


class MooncakeClient(StoreClient):
    """Zero-copy calls of `MooncakeDistributedStore` on the memory shared with the replica."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._master = settings["master_server_address"]
        # Imported in the client's process only: the import starts threads.
        from mooncake.store import (  # noqa: PLC0415
            MooncakeDistributedStore,
            ReplicateConfig,
        )

        self._store = MooncakeDistributedStore()
        self._config = ReplicateConfig()

    def connect(self, address: int, size_bytes: int) -> None:
        """Set up the client, which contributes its segment of memory to the store."""
        settings = self._settings
        local = settings["local_hostname"] or _own_address(self._master)
        code = self._store.setup(
            local,
            settings["metadata_server"],
            settings["global_segment_size"],
            0,  # the size of its buffer for calls that copy, which are not used
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
        self._check_master()
        codes: list[int] = self._store.batch_is_exist(names)
        _check(code for code in codes if code < 0)
        return codes

    def get(
        self, names: Sequence[str], addresses: Sequence[int], limits: Sequence[int]
    ) -> list[int]:
        """Read all in one call; then ask for the sizes of blobs that do not fit."""
        self._check_master()
        codes: list[int] = self._store.batch_get_into(names, addresses, limits)
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
        """Put all in one call. A name that exists counts as stored."""
        self._check_master()
        codes: list[int] = self._store.batch_put_from(names, addresses, sizes, self._config)
        if all(codes) and _NO_SPACE not in codes:
            _check(codes)
        return [_outcome(code, size) for code, size in zip(codes, sizes, strict=True)]

    def remove(self, names: Sequence[str]) -> None:
        self._check_master()
        codes: list[int] = self._store.batch_remove(names, True)
        _check(code for code in codes if code < 0 and code not in _ABSENT)

    def close(self) -> None:
        """Leave the store: the master forgets the content of this segment at once."""
        self._store.close()

    def _check_master(self) -> None:
        """Fail at once if the master is known to be away: calls would take seconds to notice."""
        if self._store.health_check() == _UNREACHABLE:
            raise ClientError(f"the master at {self._master} cannot be reached")


def _outcome(code: int, size: int) -> int:
    if code == _NO_SPACE:
        return FULL
    # The library does not store an empty blob, and reports no error.
    return FAILED if code or not size else STORED


def _check(codes: Iterable[int]) -> None:
    """Raise `ClientError` for the first of some error codes."""
    for code in codes:
        raise ClientError(_explained(code))


def _explained(code: int) -> str:
    return f"{_EXPLAINED.get(code, 'error')} ({code})"


def _own_address(master: str) -> str:
    """Return this machine's address on the way to the master. Raises `ClientError`."""
    host, _, port = master.rpartition(":")
    try:
        address = resolve(host.strip("[]"), int(port), _TIMEOUT_S)[0]
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own: str = probe.getsockname()[0]
    except OSError as error:
        raise ClientError(f"the master at {master}: {error.strerror or error}") from None
    return own
