"""vLLM's KV events: their wire format, their tiers, their hash scheme.

A message is (topic, sequence number, payload); the payload is msgpack
``[ts, [events], dp_rank]``. Events are maps with a ``type`` since vLLM 0.32 and
arrays that begin with it before; both are read. Pure: the sockets are in
`router.feeds.kv_subscriber`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, Final

import msgspec

from router.index.prompt_keys import KeyShape, KvTier
from warmroute_common.agent_protocol import UNREADABLE
from warmroute_common.decoding import decode_msgpack
from warmroute_common.keys import (
    ALGORITHMS,
    DEFAULT_SEED,
    KEY64_MASK,
    HashScheme,
    key64,
    prompt_extra_keys,
)

_FULL_ATTENTION: Final = frozenset(
    {"full_attention", "mla_attention", "sink_full_attention", "unknown", None}
)
_LEAST_HASH_TOKENS: Final = 8
"""Hashes of fewer tokens than this are only tried if the blocks are as small."""
_COMMON_SEEDS: Final = (DEFAULT_SEED, "0", "42")
"""PYTHONHASHSEED values to try besides the configured one."""
_TIERS: Final = {"GPU": KvTier.GPU, "CPU": KvTier.CPU, "DISK": KvTier.DISK}
"""By the medium of vLLM's events."""


class KvEventFormatError(Exception):
    """A message that is not in vLLM's format."""


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    dp_rank: int | None = None


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _StoredArray(_Stored, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(_Removed, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(_Cleared, array_like=True, tag="AllBlocksCleared"):
    pass


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    dp_rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    dp_rank: int | None = None


_MAP_BATCHES: Final[msgspec.msgpack.Decoder[_MapBatch | _ArrayBatch]] = msgspec.msgpack.Decoder(
    _MapBatch
)
_ARRAY_BATCHES: Final[msgspec.msgpack.Decoder[_MapBatch | _ArrayBatch]] = msgspec.msgpack.Decoder(
    _ArrayBatch
)
_BATCHES: Final = msgspec.msgpack.Decoder(_Batch)
_MAPS: Final = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_ARRAYS: Final = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A tier gained blocks, which follow each other in a prompt."""

    tier: KvTier
    keys: Sequence[int]
    parent: int | None = field(default=None, compare=False)
    """The key of the block before them, if there is one."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """A tier lost blocks."""

    tier: KvTier
    keys: Sequence[int]


@dataclass(frozen=True, slots=True)
class GpuCleared:
    """The GPU's prefix cache was emptied."""


@dataclass(frozen=True, slots=True)
class GroupChanged:
    """Another cache group is followed from now on: its blocks, sizes and keys are others."""


@dataclass(frozen=True, slots=True)
class FirstBlocks:
    """The beginning of a prompt with nothing but tokens, and a salt, in its keys.

    It shows the hash scheme. An adapter's or a medium's blocks cannot: events do not tell
    all that is in their keys (``to_event_extra_keys`` of vLLM 0.32).
    """

    keys: Sequence[int]
    token_ids: Sequence[int]
    block_tokens: int
    cache_salt: str | None = None


KvEvent = BlocksStored | BlocksRemoved | GpuCleared | GroupChanged | FirstBlocks


@dataclass(frozen=True, slots=True)
class KvBatch:
    """One message's events, in order. ``ts`` is the publisher's clock."""

    seq: int
    ts: float
    events: Sequence[KvEvent]


def tier_of(medium: str | None, locality: str | None = None) -> KvTier:
    """Return the tier that an event's medium names; an unknown one is the slowest."""
    if medium == "GPU":
        return KvTier.GPU
    name = (medium or "GPU").upper()
    if name == "STORAGE" and (locality or "LOCAL").upper() == "LOCAL":
        return KvTier.DISK
    return _TIERS.get(name, KvTier.REMOTE)


class KvEventReader:
    """Decodes one replica's messages.

    Hybrid models publish each KV cache group's blocks under the same keys.
    Only one group is followed, of full attention if there is one: the others
    drop blocks that a prefix hit still uses. Until its first event another one is
    followed. An event without a kind is a placeholder of vLLM's offloading, or a part
    of a block; it does not show what its group is.
    """

    def __init__(self) -> None:
        self._whole = [_MAP_BATCHES, _ARRAY_BATCHES]
        """Of whole messages; the one that fitted last is the first."""
        self.restart()

    def restart(self) -> None:
        """Forget which group is followed: the publisher may be another one now."""
        self.shows_first = True
        """Whether `FirstBlocks` are wanted: once the scheme is known they only cost time."""
        self._group: int | None = None
        self._rank = -1
        self._block_tokens = 0

    def read(self, seq: int, payload: bytes) -> KvBatch:
        """Return a message's events; raise `KvEventFormatError` if it is not in vLLM's format.

        Events of a type that is not known are left out.
        """
        try:
            ts, decoded = self._decode(payload)
            return KvBatch(seq, ts, self._events(decoded))
        except UNREADABLE as error:
            raise KvEventFormatError(f"message {seq}: {error}") from None

    def _events(self, decoded: Iterable[_Stored | _Removed | _Cleared]) -> list[KvEvent]:
        events: list[KvEvent] = []
        removed: list[int] = []
        for event in decoded:
            if isinstance(event, _Stored):
                events.extend(self._stored(event))
            elif isinstance(event, _Cleared):
                events.append(GpuCleared())
            elif self._follows(event.group_idx):
                tier = tier_of(event.medium, event.locality)
                # vLLM reports each evicted block by itself: neighbours become one event.
                if events and isinstance(last := events[-1], BlocksRemoved) and last.tier is tier:
                    removed.extend(_keys(event))
                else:
                    removed = _keys(event)
                    events.append(BlocksRemoved(tier, removed))
        return events

    def _decode(self, payload: bytes) -> tuple[float, Sequence[_Stored | _Removed | _Cleared]]:
        """Decode a message: at once where all events are known, and one by one where not."""
        for decoder in self._whole:
            try:
                batch = decoder.decode(payload)
            except msgspec.ValidationError:
                continue
            if decoder is not self._whole[0]:
                self._whole.reverse()
            return batch.ts, batch.events
        each = _BATCHES.decode(payload)
        events = (self._decode_event(raw) for raw in each.events)
        return each.ts, [event for event in events if event is not None]

    def _decode_event(self, raw: msgspec.Raw) -> _Stored | _Removed | _Cleared | None:
        """Decode an event; return None for a type that is not known."""
        decoder: msgspec.msgpack.Decoder[_Stored | _Removed | _Cleared]
        decoder = _ARRAYS if _is_array(raw) else _MAPS
        try:
            return decoder.decode(raw)
        except msgspec.ValidationError:
            if _type_of(raw) in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
                raise
            return None

    def _stored(self, event: _Stored) -> Iterable[KvEvent]:
        rank, tier = _rank(event), tier_of(event.medium, event.locality)
        is_other = event.group_idx != self._group
        if is_other and rank <= self._rank:
            return
        block_tokens = event.block_size if tier is KvTier.GPU else 0
        # What was noted so far is another group's, or parts of blocks.
        if (is_other and self._rank >= 0) or 0 < self._block_tokens < block_tokens:
            self.shows_first = True
            yield GroupChanged()
        if is_other:
            self._block_tokens = 0
        self._group, self._rank = event.group_idx, max(rank, self._rank)
        self._block_tokens = max(block_tokens, self._block_tokens)
        keys, before = _keys(event), event.parent_block_hash
        # Below the GPU keys may be another cache's: LMCache reports chunks of its own hashes.
        is_whole = 0 < block_tokens == self._block_tokens
        if self.shows_first and is_whole and (first := _first_blocks(event, keys)):
            yield first
        yield BlocksStored(tier, keys, None if before is None else _key(before))

    def _follows(self, group: int | None) -> bool:
        return self._group is None or group is None or group == self._group


def _rank(event: _Stored) -> int:
    """Return 2 for full attention, 1 for another kind of group, 0 if the kind is not told."""
    if event.kv_cache_spec_kind in _FULL_ATTENTION:
        return 0 if event.kv_cache_spec_kind is None and event.group_idx is not None else 2
    return 1


def _keys(event: _Stored | _Removed) -> list[int]:
    return [_key(each) for each in event.block_hashes]


def _key(block_hash: int | bytes) -> int:
    return key64(block_hash) if isinstance(block_hash, bytes) else block_hash & KEY64_MASK


def _first_blocks(event: _Stored, keys: Sequence[int]) -> FirstBlocks | None:
    has_adapter = event.lora_id is not None or event.lora_name is not None
    if event.parent_block_hash is not None or not keys or event.block_size <= 0 or has_adapter:
        return None
    first, *rest = event.extra_keys or (None,)
    salt = first[0] if isinstance(first, list) and len(first) == 1 else None
    # Beside a salt there are media, pairs, and embeddings, bytes.
    if any(rest) or (first and not isinstance(salt, str)):
        return None
    token_ids = decode_msgpack(event.token_ids, list[int])
    if len(token_ids) != len(keys) * event.block_size:
        return None
    return FirstBlocks(keys, token_ids, event.block_size, salt)


def _is_array(raw: msgspec.Raw) -> bool:
    first = memoryview(raw)[0]
    return 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)


def _type_of(raw: msgspec.Raw) -> object:
    value = msgspec.msgpack.decode(raw)
    if isinstance(value, dict):
        return value.get("type")
    return value[0] if isinstance(value, list) and value else None


def find_shape(first: FirstBlocks, seed: str | None) -> KeyShape | None:
    """Return the hash scheme that gives these keys, None if none that is known does.

    ``seed`` is the configured PYTHONHASHSEED, if any; it is tried first.
    """
    seeds = dict.fromkeys((seed, *_COMMON_SEEDS) if seed is not None else _COMMON_SEEDS)
    size = first.block_tokens
    per_block = [n for n in range(1, 1 + size // _LEAST_HASH_TOKENS) if not size % n] or [1]
    for hashes_per_block, each, algorithm in product(per_block, seeds, ALGORITHMS):
        shape = KeyShape(
            scheme=HashScheme(algorithm, each), block_tokens=size, hashes_per_block=hashes_per_block
        )
        if explains(shape, first):
            return shape
    return None


def explains(shape: KeyShape, first: FirstBlocks) -> bool:
    """Return whether a shape gives the keys that a replica has published."""
    size, step = shape.block_tokens, shape.hashes_per_block
    if size != first.block_tokens or shape.scheme is None:
        return False
    _, salted = prompt_extra_keys(cache_salt=first.cache_salt)
    chain = partial(shape.scheme.chain, block_tokens=size // step, first_extra_keys=salted)
    # One block tells; all are checked only where it agrees.
    if key64(chain(first.token_ids[:size])[-1]) != first.keys[0]:
        return False
    return [key64(key) for key in chain(first.token_ids)[step - 1 :: step]] == list(first.keys)
