"""KV events over real sockets, read by the router's own subscriber."""

import asyncio
from collections.abc import Sequence

from router.feeds.kv_receiver import KvReceiver
from router.feeds.kv_subscriber import KvEndpoints, KvSubscriber
from router.index.kv_events import (
    BlocksRemoved,
    BlocksStored,
    FirstBlocks,
    GpuCleared,
    KvBatch,
    KvEvent,
    KvEventReader,
    find_shape,
)
from router.index.prompt_keys import KvTier
from simulator.kv_event_publisher import KvEventPublisher, encode_events
from simulator.model.model_events import (
    BlockEvent,
    GpuBlocksCleared,
    GpuBlocksRemoved,
    GpuBlocksStored,
)
from simulator.openai_prompts import Prompts, SimPrompt
from tests.simulator.helpers import request
from warmroute_common.keys import HashScheme, key64

BLOCK = 16
PROMPT = Prompts(HashScheme(), BLOCK, 4).of_ids(range(100), 20)
KEYS = [key64(key) for key in PROMPT.block_keys]


def read(payload: bytes) -> Sequence[KvEvent]:
    return KvEventReader().read(0, payload).events


def payload(prompt: SimPrompt = PROMPT) -> bytes:
    asked = request("a", 100)
    events: list[BlockEvent] = [
        GpuBlocksStored(asked, 0, 3),
        GpuBlocksStored(asked, 5, 7),
        GpuBlocksRemoved(prompt.block_keys[:2]),
        GpuBlocksCleared(),
    ]
    return encode_events(events, lambda _: prompt, BLOCK, 1000.0)


def test_the_router_reads_them_and_finds_the_hash_scheme() -> None:
    first, *rest = read(payload())
    assert isinstance(first, FirstBlocks)
    assert first.token_ids == list(range(48))
    shape = find_shape(first, None)
    assert shape is not None
    assert (shape.scheme, shape.block_tokens) == (HashScheme(), BLOCK)
    assert rest == [
        BlocksStored(KvTier.GPU, KEYS[:3]),
        BlocksStored(KvTier.GPU, KEYS[5:7]),
        BlocksRemoved(KvTier.GPU, KEYS[:2]),
        GpuCleared(),
    ]


def test_a_salted_prompt_shows_its_salt() -> None:
    salted = Prompts(HashScheme(), BLOCK, 4).of_ids(range(100), 20, "tenant")
    first = read(payload(salted))[0]
    assert isinstance(first, FirstBlocks)
    assert first.cache_salt == "tenant"
    assert first.keys == [key64(key) for key in salted.block_keys[:3]]
    assert find_shape(first, None) is not None


class Sink:
    """The events that a subscriber has received."""

    def __init__(self, wanted: int) -> None:
        self.batches: list[KvBatch] = []
        self.complete = asyncio.Event()
        self._wanted = wanted

    def following(self) -> None:
        pass

    def apply(self, batch: KvBatch) -> None:
        self.batches.append(batch)
        if len(self.batches) == self._wanted:
            self.complete.set()

    def forget(self) -> None:
        raise AssertionError("nothing was lost")


async def test_who_comes_later_is_told_what_it_missed() -> None:
    stream = KvEventPublisher("127.0.0.1")
    stream.start()
    receiver = KvReceiver()
    sink = Sink(4)
    try:
        stream.publish(payload())
        stream.publish(payload())
        endpoints = KvEndpoints(stream.endpoint, stream.replay_endpoint)
        subscriber = KvSubscriber(receiver, endpoints, KvEventReader(), sink, quiet_s=0.1)
        following = asyncio.create_task(subscriber.run())
        stream.publish(payload())
        stream.publish(payload())
        async with asyncio.timeout(20):
            await sink.complete.wait()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    finally:
        await stream.stop()
        await stream.stop()
        await receiver.aclose()
    assert [each.seq for each in sink.batches] == [0, 1, 2, 3]
