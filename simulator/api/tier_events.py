"""What vLLM's offloading connector publishes of the tiers below the GPU, in its own words.

As with ``self_describing_kv_events``: a chunk stored is told as its blocks with their
tokens, a chunk lost as its blocks. The connector knows a chunk's blocks while the chunk is
in CPU RAM, from when a request stored or found it there; of any other it can tell only the
key, which is its last block's.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from cacheengine.record import KeyEventRecord
from simulator.api.prompts import SimPrompt
from warmroute_common.keys import key64

_MEDIUM: Final = {"cpu": "CPU", "disk": "STORAGE", "remote": "STORAGE"}
_LOCALITY: Final = {"cpu": "LOCAL", "disk": "LOCAL", "remote": "REMOTE"}
_GROUP: Final = 0


class _Chunk(NamedTuple):
    """A chunk as its event tells it."""

    block_hashes: Sequence[int]
    parent: int | None
    token_ids: "array[int]"


class TierEvents:
    """Puts the engine's events into vLLM's form; remembers at most ``most`` chunks for it."""

    def __init__(self, *, block_tokens: int, blocks_per_chunk: int, most: int) -> None:
        self._block_tokens = block_tokens
        self._blocks_per_chunk = blocks_per_chunk
        self._most = most
        self._known: OrderedDict[bytes, _Chunk] = OrderedDict()

    def learn(self, prompt: SimPrompt, chunks: Iterable[int]) -> None:
        """Take note of the blocks of a prompt's chunks, by their numbers."""
        for number in chunks:
            first = number * self._blocks_per_chunk
            keys = prompt.block_keys[first : first + self._blocks_per_chunk]
            if keys[-1] in self._known:
                continue
            start, end = (at * self._block_tokens for at in (first, first + len(keys)))
            self._known[keys[-1]] = _Chunk(
                block_hashes=tuple(map(key64, keys)),
                parent=key64(prompt.block_keys[first - 1]) if first else None,
                token_ids=array("H", prompt.tokens(start, end)),
            )
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def told(self, records: Sequence[KeyEventRecord]) -> list[dict[str, Any]]:
        """Return vLLM's events, in order, of what the tiers gained and lost."""
        events = [event for record in records for event in self._events(record)]
        for record in records:
            if record.tier == "cpu" and not record.stored:
                for key in record.keys:
                    self._known.pop(key, None)
        return events

    def _events(self, record: KeyEventRecord) -> Iterator[dict[str, Any]]:
        where = {"medium": _MEDIUM[record.tier], "locality": _LOCALITY[record.tier]}
        if record.stored:
            for key in record.keys:
                yield self._stored(key) | where
        else:
            hashes = [each for key in record.keys for each in self._hashes(key)]
            event = {"type": "BlockRemoved", "block_hashes": hashes, "group_idx": _GROUP}
            yield event | where

    def _hashes(self, key: bytes) -> Sequence[int]:
        chunk = self._known.get(key)
        return (key64(key),) if chunk is None else chunk.block_hashes

    def _stored(self, key: bytes) -> dict[str, Any]:
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": self._hashes(key),
            "parent_block_hash": None,
            "token_ids": (),
            "block_size": 0,
            "lora_id": None,
            "lora_name": None,
            "group_idx": _GROUP,
        }
        if chunk := self._known.get(key):
            event |= {
                "parent_block_hash": chunk.parent,
                "token_ids": chunk.token_ids.tolist(),
                "block_size": self._block_tokens,
                "kv_cache_spec_kind": "full_attention",
            }
        return event
