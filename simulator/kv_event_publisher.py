"""KV events of a simulated replica, published over ZMQ as vLLM publishes them, with a replay.

`TierEvents` converts the engine's events to those of vLLM's offloading connector with
``self_describing_kv_events``: a stored chunk is reported as its blocks with their tokens, a removed
chunk as its blocks. The connector knows a chunk's blocks while the chunk is in CPU RAM, from the
request that stored or found it there. For any other chunk it reports only the key, which is that of
the last block. `encode_events` adds the GPU's events, and `KvEventPublisher` sends the messages.
"""

import asyncio
import contextlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from cacheengine.record import KeyEventRecord
from simulator.model.model_events import (
    BlockEvent,
    GpuBlocksCleared,
    GpuBlocksRemoved,
    GpuBlocksStored,
)
from simulator.openai_prompts import SimPrompt
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

    def vllm_events(self, records: Sequence[KeyEventRecord]) -> list[dict[str, Any]]:
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


_KEPT: Final = 10_000
"""Messages kept for replay, as many as vLLM keeps by default."""
_HIGH_WATER: Final = 100_000
_END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)


def encode_events(
    events: Sequence[BlockEvent],
    prompt_of: Callable[[str], SimPrompt],
    block_tokens: int,
    ts: float,
    lower: Sequence[Mapping[str, Any]] = (),
) -> bytes:
    """Return one message's payload; ``prompt_of`` gives the prompt of a request's id.

    ``lower`` are the events of the tiers below the GPU, which follow the GPU's.
    """
    maps = [_as_map(each, prompt_of, block_tokens) for each in events]
    return msgspec.msgpack.encode([ts, [*maps, *lower], 0])


def _as_map(
    event: BlockEvent, prompt_of: Callable[[str], SimPrompt], block_tokens: int
) -> dict[str, Any]:
    match event:
        case GpuBlocksStored(request, first, end):
            prompt = prompt_of(request.id)
            keys = prompt.block_keys
            extra: list[Any] = [None] * (end - first)
            if prompt.salt is not None and first == 0:
                extra[0] = (prompt.salt,)
            return {
                "type": "BlockStored",
                "block_hashes": [key64(key) for key in keys[first:end]],
                "parent_block_hash": key64(keys[first - 1]) if first else None,
                "token_ids": prompt.tokens(first * block_tokens, end * block_tokens),
                "block_size": block_tokens,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": extra,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        case GpuBlocksRemoved(removed):
            return {
                "type": "BlockRemoved",
                "block_hashes": [key64(key) for key in removed],
                "medium": "GPU",
                "group_idx": 0,
            }
        case GpuBlocksCleared():
            return {"type": "AllBlocksCleared"}


class KvEventPublisher:
    """Publishes numbered messages from `start` to `stop`; all on one event loop."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._context = zmq.asyncio.Context()
        self._replay = self._context.socket(zmq.ROUTER)
        # Without asyncio: to publish never waits.
        self._pub = zmq.Socket(zmq.Context(self._context), zmq.PUB)
        self._seq = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=_KEPT)
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Listen on free ports."""
        for socket in (self._pub, self._replay):
            socket.setsockopt(zmq.LINGER, 0)
        self._pub.setsockopt(zmq.SNDHWM, _HIGH_WATER)
        self._pub.bind(f"tcp://{self._host}:*")
        self._replay.bind(f"tcp://{self._host}:*")
        self._serving = asyncio.get_running_loop().create_task(self._serve())

    @property
    def endpoint(self) -> str:
        """Where the messages are published."""
        return _address(self._pub)

    @property
    def replay_endpoint(self) -> str:
        """Where missed messages are asked for."""
        return _address(self._replay)

    def publish(self, payload: bytes) -> None:
        """Send the next message, and keep it for replay."""
        seq = self._seq.to_bytes(8, "big")
        self._seq += 1
        self._kept.append((seq, payload))
        with contextlib.suppress(zmq.Again):
            self._pub.send_multipart([b"", seq, payload], zmq.NOBLOCK)

    async def stop(self) -> None:
        """Stop listening. Idempotent."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._serving = None
        self._pub.close()
        self._context.destroy(linger=0)

    async def _serve(self) -> None:
        """Answer who asks for the messages from a number on, as vLLM does."""
        while True:
            client, *_, start = await self._replay.recv_multipart()
            for seq, payload in [each for each in self._kept if each[0] >= start]:
                await self._replay.send_multipart([client, b"", b"", seq, payload])
            await self._replay.send_multipart([client, b"", b"", _END_OF_REPLAY, b""])


def _address(socket: "zmq.Socket[Any] | zmq.asyncio.Socket") -> str:
    found = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(found, bytes)
    return found.rstrip(b"\0").decode()
