"""How Mooncake Store is set up: the URL, and LMCache's keys in ``extra_config``."""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cacheengine.tiers.stores.url import parse_remote_url
from warmroute_common.addresses import join_host_port
from warmroute_common.config_reader import BadValueError, parse_bool, parse_int, parse_seconds

CONFIG_FILE_VARIABLE: Final = "MOONCAKE_CONFIG_PATH"
"""Names a JSON file with the same keys, which goes before ``extra_config``, as in LMCache."""

DEFAULT_BUFFER_BYTES: Final = 512 * 1024 * 1024
_LEAST_BUFFER_BYTES: Final = 4 * 1024 * 1024
_LEAST_SEGMENT_BYTES: Final = 16 * 1024 * 1024
_PREFIX: Final = "mooncake_"


@dataclass(frozen=True, kw_only=True)
class MooncakeSettings:
    """What the client is set up with. Names are LMCache's."""

    master_server_address: str
    """``host:port`` of mooncake_master."""
    local_hostname: str = ""
    """What other replicas reach this one by; by default its address towards the master."""
    metadata_server: str = "P2PHANDSHAKE"
    """As mooncake_master was started with."""
    protocol: str = "tcp"
    """``tcp`` or ``rdma``."""
    device_name: str = ""
    """RDMA devices, comma-separated; empty lets the library choose."""
    global_segment_size: int = 3355443200
    """Bytes of this machine's memory that this replica gives to the store; 0 only uses others'."""
    local_buffer_size: int = DEFAULT_BUFFER_BYTES
    """Bytes through which chunks pass, taken as they are first used."""
    prefer_local_alloc: bool = False
    """Store in this replica's own segment while it has room."""
    transfer_timeout: float | None = None
    """Seconds that a call may take, beside those for its bytes."""


def mooncake_settings(
    url: str, extra: Mapping[str, Any], environment: Mapping[str, str]
) -> MooncakeSettings:
    """Return the settings that a URL, the extra keys and the environment's file give.

    The URL names the master, whatever the keys say. Raises `BadValueError`.
    """
    address = parse_remote_url(url)
    address.check_options(("device",))
    address.check_is_bare("write mooncakestore://host:port/, with ?device=name where it is needed")
    given = {**_by_key(extra), **_by_key(_from_file(environment))}
    if device := address.options.get("device"):
        given["device_name"] = device
    given["master_server_address"] = join_host_port(address.host, address.port)
    parsed = {key: _parse(key, value) for key, value in given.items()}
    known: dict[str, Any] = {key: value for key, value in parsed.items() if value is not None}
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
        raise BadValueError(f"{CONFIG_FILE_VARIABLE}: {path} has no keys", "write a JSON object")
    return content


def _by_key(given: Mapping[str, Any]) -> dict[str, Any]:
    """Pick what concerns Mooncake; raise `BadValueError` for what only looks as if it did."""
    found: dict[str, Any] = {}
    for written, value in given.items():
        key = str(written).removeprefix(_PREFIX)
        if key in _PARSERS:
            if key in found and found[key] != value:
                raise BadValueError(f"{written} says again what {key} says", "remove one")
            found[key] = value
        elif key in _LIBRARY_ONLY:
            raise BadValueError(f"{written} is not served", _LIBRARY_ONLY[key])
        elif (near := _nearest(key)) or str(written).startswith(_PREFIX):
            fix = f"did you mean {near}?" if near else f"use one of {', '.join(_PARSERS)}"
            raise BadValueError(f"{written} is no known key", fix)
    return found


def _nearest(key: str) -> str:
    near = difflib.get_close_matches(key.lower(), _PARSERS, n=1, cutoff=0.8)
    return near[0] if near else ""


def _parse(key: str, value: object) -> object:
    if value is None:
        return None
    try:
        return _PARSERS[key](value)
    except BadValueError as error:
        raise BadValueError(f"{key}: {error.problem}", error.fix) from None


def _text(value: object) -> str:
    if not isinstance(value, str) or value != value.strip() or any(map(str.isspace, value)):
        raise BadValueError(f"{value!r} is no name", "write it as text without spaces")
    return value


def _metadata_server(value: object) -> str:
    text = _text(value)
    if text not in ("", "P2PHANDSHAKE") and not text.startswith(_METADATA_SCHEMES):
        allowed = ", ".join(f"{scheme}host:port" for scheme in _METADATA_SCHEMES)
        raise BadValueError(
            f"{text!r} is no metadata server", f"write P2PHANDSHAKE, or one of {allowed}"
        )
    return text or "P2PHANDSHAKE"


_METADATA_SCHEMES: Final = ("http://", "https://", "etcd://", "redis://")


def _protocol(value: object) -> str:
    text = _text(value).lower()
    if text not in ("tcp", "rdma"):
        raise BadValueError(f"{value!r} is not served", "write tcp or rdma")
    return text


def _bytes(least: int, at_zero: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        number = parse_int(minimum=0)(value)
        if 0 < number < least:
            raise BadValueError(f"{number} bytes are too few", f"write 0, or {least} or more")
        return number or at_zero

    return parse


def _no_directory(value: object) -> None:
    if value:
        fix = "remove it: SSD is set up where mooncake_client and mooncake_master are started"
        raise BadValueError(f"{value!r} is not served", fix)


_PARSERS: Final[Mapping[str, Callable[[object], object]]] = {
    "master_server_address": _text,
    "local_hostname": _text,
    "metadata_server": _metadata_server,
    "protocol": _protocol,
    "device_name": _text,
    "global_segment_size": _bytes(_LEAST_SEGMENT_BYTES, at_zero=0),
    "local_buffer_size": _bytes(_LEAST_BUFFER_BYTES, at_zero=DEFAULT_BUFFER_BYTES),
    "prefer_local_alloc": parse_bool,
    "transfer_timeout": parse_seconds,
    "storage_root_dir": _no_directory,
}

_LIBRARY_ONLY: Final[Mapping[str, str]] = {
    "page_first_multi_buffer": "remove it: chunks are stored as single objects",
    "tenant_id": "remove it: replicas that share a master share its chunks",
    "enable_ssd_offload": "remove it: run mooncake_client with --enable_offload for that",
    "ssd_offload_path": "remove it: run mooncake_client with --enable_offload for that",
}
"""Keys of the library or of LMCache that have no counterpart here: what to do instead."""
