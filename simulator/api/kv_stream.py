"""KV events as vLLM publishes them over ZMQ, with a replay of the latest."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from simulator.api.prompts import SimPrompt
from simulator.model.news import BlockEvent, Cleared, Removed, Stored
from warmroute_common.keys import key64

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
        case Stored(request, first, end):
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
        case Removed(removed):
            return {
                "type": "BlockRemoved",
                "block_hashes": [key64(key) for key in removed],
                "medium": "GPU",
                "group_idx": 0,
            }
        case Cleared():
            return {"type": "AllBlocksCleared"}


class KvStream:
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
