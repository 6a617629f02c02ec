"""What an agent and its callers say to each other over HTTP.

Requests and small answers are JSON. The two that carry every key of a replica
(`Snapshot`, `EventBatch`) are msgpack, with keys packed as consecutive 8-byte
big-endian integers (`keys.key64`), so that a million keys are 8 MB and need no
parsing. Keys in requests are whole digests in hex: they name bytes to move.

This module is shared with the router: standard library and msgspec only.
"""

import sys
from array import array
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

TierName = Literal["cpu", "disk", "remote"]
"""The tiers that an engine reports. The GPU's are in vLLM's own KV events."""


class TierInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One tier's size and its measured speed (0.0 while nothing was measured)."""

    capacity_bytes: int
    used_bytes: int
    read_bytes_per_s: float = 0.0
    """Towards the CPU pool; for the cpu tier, towards the GPU."""
    write_bytes_per_s: float = 0.0


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /info``: who a replica is and how its keys are made."""

    instance_id: str
    incarnation: str
    """New at every start: what was known of an earlier one is void."""
    model: str
    """vLLM's ``--model``: a path or a name."""
    hash_algorithm: str
    hash_seed: str
    block_tokens: int
    chunk_tokens: int
    chunk_bytes: int
    tiers: dict[str, TierInfo]
    kv_events_port: int | None = None
    """Port of vLLM's ZMQ publisher on the replica's host, if events are on."""
    kv_replay_port: int | None = None
    version: str = ""


class LookupRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /lookup``: either ``tokens`` (with their salt) or chunk ``keys`` in hex."""

    tokens: list[int] | None = None
    cache_salt: str | None = None
    keys: list[str] | None = None


class LookupReply(msgspec.Struct, frozen=True, kw_only=True):
    """How far the prompt's chunks are held without a gap, and where.

    ``tiers`` has, chunk by chunk, the fastest tier that holds it.
    """

    matched_tokens: int
    tokens_by_tier: dict[str, int]
    tiers: list[str]


class PrefetchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /prefetch``: promote these chunks to the cpu tier and pin them.

    The pins last until a request has used the chunks, ``pin_s`` at most. The
    answer comes when all is there, or after ``wait_s``, whichever is first;
    the promotion goes on in either case.
    """

    keys: list[str]
    wait_s: float = 0.0
    pin_s: float = 10.0


class PrefetchReply(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the chunks so far; the counts add up to those asked for."""

    resident: int
    """In the cpu tier before the call."""
    promoted: int
    """Brought there by the call, whole and pinned."""
    pending: int
    """Still being read."""
    missing: int
    """In no tier, damaged, or no room for them; after the first such chunk the
    rest of the prefix is not fetched either."""
    promoted_bytes: int


class ClearRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /clear``: drop everything not in use, from these tiers or from all."""

    tiers: list[TierName] | None = None


class ClearReply(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks dropped, by tier."""

    dropped: dict[str, int]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /snapshot``: all keys by tier, as of event ``seq`` of ``incarnation``."""

    incarnation: str
    seq: int
    tiers: dict[str, bytes]


class KeyEvent(msgspec.Struct, frozen=True, array_like=True):
    """Chunks that a tier gained or lost, packed keys."""

    tier: str
    stored: bool
    keys: bytes


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /events?after=SEQ&wait_s=S``: what happened after event SEQ, in order.

    ``seq`` is that of the last event in it (SEQ itself when there is none).
    The agent answers 410 when SEQ is older than its history or of another
    incarnation: take a new snapshot.
    """

    incarnation: str
    seq: int
    events: list[KeyEvent]


MSGPACK: Final = "application/msgpack"


def pack_keys(keys: Iterable[int]) -> bytes:
    """Pack 64-bit keys, 8 bytes each, big-endian."""
    return _swapped(array("Q", keys)).tobytes()


def unpack_keys(packed: bytes) -> list[int]:
    """Return the 64-bit keys of `pack_keys`."""
    keys = array("Q")
    try:
        keys.frombytes(packed)
    except ValueError:
        raise ValueError(f"packed keys have {len(packed)} bytes, not a multiple of 8") from None
    return _swapped(keys).tolist()


def _swapped(keys: "array[int]") -> "array[int]":
    """Turn native byte order to big-endian, or back, in place."""
    if sys.byteorder == "little":
        keys.byteswap()
    return keys
