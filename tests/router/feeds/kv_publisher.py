"""A ZMQ publisher in vLLM's format, for tests: PUB with a replay ROUTER."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

Event = dict[str, Any] | list[Any]


def stored(
    hashes: Sequence[int | bytes], token_ids: Sequence[int] = (), **more: Any
) -> dict[str, Any]:
    """Return a BlockStored as vLLM 0.32 publishes it."""
    size = len(token_ids) // len(hashes) if hashes else 0
    event = {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": None,
        "token_ids": list(token_ids),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return event | more


def removed(hashes: Sequence[int | bytes], **more: Any) -> dict[str, Any]:
    """Return a BlockRemoved."""
    event = {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0}
    return event | more


def payload(ts: float, *events: Event) -> bytes:
    """Return a message's third frame."""
    return msgspec.msgpack.encode([ts, list(events), 0])


class KvPublisher:
    """Publishes numbered messages; ``kept`` of them can be replayed."""

    def __init__(self, context: zmq.asyncio.Context, *, kept: int = 10_000, port: int = 0) -> None:
        self._pub = context.socket(zmq.XPUB)
        self._router = context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.setsockopt(zmq.LINGER, 0)
        # Else a subscriber that comes before the former one's leave is noticed would not be told.
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        try:
            self._pub.bind(f"tcp://127.0.0.1:{port or '*'}")
            self._router.bind("tcp://127.0.0.1:*")
        except zmq.ZMQError:
            self._pub.close()
            self._router.close()
            raise
        self.kept = kept
        self.answers_replays = True
        self.drops_replayed: Callable[[int], bool] = lambda at: False
        """Which messages of a replay find no room in its queue, counted from 0; its end is one."""
        self.replays_raw: list[bytes] | None = None
        """Sent instead of each replay."""
        self.replays: list[int] = []
        self._seq = 0
        self._buffer: list[tuple[int, bytes]] = []
        self._serving = asyncio.create_task(self._serve())

    @property
    def endpoint(self) -> str:
        return self._pub.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def replay_endpoint(self) -> str:
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def replay_port(self) -> int:
        return int(self.replay_endpoint.rpartition(":")[2])

    async def subscribed(self) -> None:
        """Return when a subscriber has come."""
        while (await self._pub.recv())[:1] != b"\x01":
            pass

    async def publish(self, *events: Event, lost: bool = False) -> None:
        """Publish a message; a lost one is only kept for replay."""
        seq, self._seq = self._seq, self._seq + 1
        body = payload(1000.0 + seq, *events)
        self._buffer = [*self._buffer, (seq, body)][-self.kept :] if self.kept else []
        if not lost:
            await self._pub.send_multipart([b"", seq.to_bytes(8, "big"), body])

    def keep_raw(self, body: bytes) -> None:
        """Keep any bytes as the next message, for replay."""
        self._buffer.append((self._seq, body))
        self._seq += 1

    async def send_raw(self, seq: int, body: bytes) -> None:
        """Publish any bytes under any number."""
        await self.send_frames(b"", seq.to_bytes(8, "big"), body)

    async def send_frames(self, *frames: bytes) -> None:
        """Publish anything."""
        await self._pub.send_multipart(frames)

    async def close(self) -> None:
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._serving
        self._pub.close()
        self._router.close()

    async def _serve(self) -> None:
        end = (-1).to_bytes(8, "big", signed=True)
        while True:
            client, _, start = await self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.replays.append(first)
            if not self.answers_replays:
                continue
            if self.replays_raw is not None:
                await self._router.send_multipart([client, *self.replays_raw])
                continue
            wanted = [(seq.to_bytes(8, "big"), body) for seq, body in self._buffer if seq >= first]
            for at, (number, body) in enumerate([*wanted, (end, b"")]):
                if not self.drops_replayed(at):
                    await self._router.send_multipart([client, b"", b"", number, body])


@contextlib.asynccontextmanager
async def publisher(
    context: zmq.asyncio.Context, *, kept: int = 10_000, port: int = 0
) -> AsyncIterator[KvPublisher]:
    """Run a `KvPublisher` for the block."""
    async with asyncio.timeout(20):
        # ZMQ closes in the background: a port is free a little after its socket.
        while (running := _try_publisher(context, kept, port)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    try:
        yield running
    finally:
        await running.close()


def _try_publisher(context: zmq.asyncio.Context, kept: int, port: int) -> KvPublisher | None:
    try:
        return KvPublisher(context, kept=kept, port=port)
    except zmq.ZMQError as error:
        if error.errno != zmq.EADDRINUSE:
            raise
        return None
