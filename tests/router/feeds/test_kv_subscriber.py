"""Following a real ZMQ publisher: replay, gaps, restarts, lost connections."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import zmq.asyncio

from router.feeds.kv_receiver import KvReceiver
from router.feeds.kv_subscriber import KvEndpoints, KvSubscriber, monitoring
from router.index.kv_events import BlocksStored, KvBatch, KvEventFormatError, KvEventReader
from tests.router.feeds.kv_publisher import KvPublisher, payload, publisher, stored


class Recorder:
    """A sink that writes down what it hears, and wakes who waits for it."""

    def __init__(self) -> None:
        self.heard: list[int | str] = []
        self._news = asyncio.Event()

    def following(self) -> None:
        self._note("following")

    def apply(self, batch: KvBatch) -> None:
        for event in batch.events:
            if isinstance(event, BlocksStored):
                for key in event.keys:
                    self._note(key)

    def forget(self) -> None:
        self._note("forget")

    def _note(self, what: int | str) -> None:
        self.heard.append(what)
        self._news.set()

    async def until(self, done: Callable[[list[int | str]], bool]) -> None:
        async with asyncio.timeout(20):
            while not done(self.heard):
                self._news.clear()
                await self._news.wait()


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
async def receiver() -> AsyncIterator[KvReceiver]:
    async with contextlib.aclosing(KvReceiver()) as made:
        yield made


@contextlib.asynccontextmanager
async def following(
    source: KvPublisher,
    *,
    replay: bool = True,
    quiet_s: float = 60.0,
    replay_timeout_s: float = 60.0,
) -> AsyncIterator[tuple[Recorder, "asyncio.Task[None]"]]:
    sink = Recorder()
    endpoints = KvEndpoints(source.endpoint, source.replay_endpoint if replay else None)
    receiver = KvReceiver()
    subscriber = KvSubscriber(
        receiver,
        endpoints,
        KvEventReader(),
        sink,
        replay_timeout_s=replay_timeout_s,
        quiet_s=quiet_s,
    )
    task = asyncio.create_task(subscriber.run())
    try:
        yield sink, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await receiver.aclose()


async def test_what_was_published_before_is_replayed(context: zmq.asyncio.Context) -> None:
    async with publisher(context) as source:
        await source.publish(stored([1]))
        await source.publish(stored([2]))
        async with following(source) as (sink, _):
            await source.subscribed()
            await sink.until(lambda heard: "following" in heard)
            await source.publish(stored([3]))
            await sink.until(lambda heard: 3 in heard)
        assert sink.heard == [1, 2, "following", 3, "forget"]


async def test_a_closed_sockets_monitor_is_not_in_the_way(receiver: KvReceiver) -> None:
    """ZMQ's own thread closes it, some time later."""
    for _ in range(300):
        with (
            contextlib.closing(zmq.Context(receiver.context).socket(zmq.SUB)) as socket,
            monitoring(socket, receiver.context),
        ):
            pass


async def test_a_gap_is_repaired_in_order(context: zmq.asyncio.Context) -> None:
    async with publisher(context) as source, following(source) as (sink, _):
        await source.subscribed()
        await sink.until(lambda heard: "following" in heard)
        await source.publish(stored([1]))
        await source.publish(stored([2]), lost=True)
        await source.publish(stored([3]), lost=True)
        await source.publish(stored([4]))
        await source.publish(stored([5]))
        await sink.until(lambda heard: 5 in heard)
        assert sink.heard == ["following", 1, 2, 3, 4, 5]
        assert source.replays == [0, 1]


async def test_a_lost_last_message_is_found_when_it_stays_quiet(
    context: zmq.asyncio.Context,
) -> None:
    async with (
        publisher(context) as source,
        following(source, quiet_s=0.05) as (sink, _),
    ):
        await sink.until(lambda heard: "following" in heard)
        await source.publish(stored([1]), lost=True)
        await sink.until(lambda heard: 1 in heard)


async def test_what_cannot_be_had_again_is_forgotten(context: zmq.asyncio.Context) -> None:
    """The publisher keeps one message only: two lost ones are lost for good."""
    async with publisher(context, kept=1) as source, following(source) as (sink, _):
        await source.subscribed()
        await sink.until(lambda heard: "following" in heard)
        await source.publish(stored([1]))
        await sink.until(lambda heard: 1 in heard)
        await source.publish(stored([2]), lost=True)
        await source.publish(stored([3]), lost=True)
        await source.publish(stored([4]))
        await sink.until(lambda heard: 4 in heard)
        assert sink.heard == ["following", 1, "forget", "following", 4]


@pytest.mark.parametrize("has_replay", [False, True])
async def test_without_an_answer_to_the_replay_a_gap_is_forgotten(
    context: zmq.asyncio.Context, has_replay: bool
) -> None:
    async with publisher(context) as source:
        async with following(source, replay=has_replay, replay_timeout_s=0.5) as (sink, _):
            await source.subscribed()
            await sink.until(lambda heard: "following" in heard)
            source.answers_replays = False
            await source.publish(stored([1]))
            await source.publish(stored([2]), lost=True)
            await source.publish(stored([3]))
            await sink.until(lambda heard: 3 in heard)
        assert sink.heard == ["following", 1, "forget", "following", 3, "forget"]


async def test_a_subscriber_that_comes_late_takes_what_is_left(
    context: zmq.asyncio.Context,
) -> None:
    async with publisher(context, kept=2) as source:
        for number in range(5):
            await source.publish(stored([number]))
        async with following(source) as (sink, _):
            await sink.until(lambda heard: "following" in heard)
            assert sink.heard == [3, 4, "following"]


@pytest.mark.parametrize(
    "drops",
    [
        pytest.param(lambda at: 1000 <= at < 2499, id="but for the last one and the end"),
        pytest.param(lambda at: 1000 <= at < 2500, id="but for the end"),
        pytest.param(lambda at: at >= 1000, id="and the end"),
    ],
)
async def test_what_a_publisher_drops_of_a_long_replay_is_asked_for_again(
    context: zmq.asyncio.Context, drops: Callable[[int], bool]
) -> None:
    """Its queue takes 1000 messages, and the next ones when some of them have gone."""
    async with publisher(context) as source:
        for number in range(2500):
            await source.publish(stored([number]), lost=True)
        source.drops_replayed = lambda at: source.replays[-1] < 2000 and drops(at)
        async with following(source) as (sink, _):
            await sink.until(lambda heard: "following" in heard)
        assert sink.heard == [*range(2500), "following", "forget"]
        assert source.replays == [0, 1000, 2000]


async def test_few_messages_of_a_replay_are_kept_while_others_are_applied(
    context: zmq.asyncio.Context, receiver: KvReceiver
) -> None:
    """Inside one process ZMQ sends no more than both sides keep: one here, and the feed's 100."""
    answering = receiver.context.socket(zmq.ROUTER)
    answering.setsockopt(zmq.LINGER, 0)
    answering.setsockopt(zmq.SNDHWM, 1)
    answering.setsockopt(zmq.ROUTER_MANDATORY, 1)  # to say that there is no room, not drop it
    answering.bind("inproc://replay")
    sink = Recorder()
    async with publisher(context) as source:
        endpoints = KvEndpoints(source.endpoint, "inproc://replay")
        subscriber = KvSubscriber(receiver, endpoints, KvEventReader(), sink)
        task = asyncio.create_task(subscriber.run())
        try:
            client, _, start = await answering.recv_multipart()
            assert int.from_bytes(start, "big") == 0
            assert _sent(answering, client) == 101
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            answering.close()


def _sent(answering: zmq.asyncio.Socket, client: bytes) -> int:
    """Send as much of an answer as there is room for, while the feed cannot run."""
    without_loop: zmq.SyncSocket = zmq.Socket.shadow(answering.underlying)
    for number in range(5000):
        frames = [client, b"", b"", number.to_bytes(8, "big"), payload(1.0, stored([number]))]
        try:
            without_loop.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return number
    return 5000


async def test_numbers_that_begin_anew_mean_a_restart(context: zmq.asyncio.Context) -> None:
    async with publisher(context) as source, following(source) as (sink, _):
        await source.subscribed()
        await sink.until(lambda heard: "following" in heard)
        await source.publish(stored([1]))
        await source.publish(stored([2]))
        await sink.until(lambda heard: 2 in heard)
        await source.send_raw(0, payload(5000.0, stored([9])))
        await sink.until(lambda heard: 9 in heard)
        assert sink.heard == ["following", 1, 2, "forget", "following", 9]


async def test_a_message_seen_before_is_not_taken_twice(context: zmq.asyncio.Context) -> None:
    async with publisher(context) as source, following(source) as (sink, _):
        await source.subscribed()
        await sink.until(lambda heard: "following" in heard)
        await source.publish(stored([1]))
        await source.send_raw(0, payload(1000.0, stored([1])))
        await source.publish(stored([2]))
        await sink.until(lambda heard: 2 in heard)
        assert sink.heard == ["following", 1, 2]


async def test_a_lost_connection_ends_it_and_all_is_forgotten(
    context: zmq.asyncio.Context,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        source = await stack.enter_async_context(publisher(context))
        await source.publish(stored([1]))
        sink, task = await stack.enter_async_context(following(source))
        await sink.until(lambda heard: "following" in heard)
        await source.close()
        async with asyncio.timeout(20):
            await task
        assert sink.heard == [1, "following", "forget"]


async def test_what_is_not_vllms_ends_it_with_the_reason(context: zmq.asyncio.Context) -> None:
    async with publisher(context) as source, following(source) as (sink, task):
        await source.subscribed()
        await sink.until(lambda heard: "following" in heard)
        await source.send_raw(0, b"\xc1")
        with pytest.raises(KvEventFormatError):
            async with asyncio.timeout(20):
                await task
        assert sink.heard[-1] == "forget"


@pytest.mark.parametrize("number", [b"", b"\x00" * 7, b"\x01" + b"\x00" * 19, b"\xff" * 8])
async def test_a_number_that_is_none_ends_it(context: zmq.asyncio.Context, number: bytes) -> None:
    async with publisher(context) as source, following(source) as (sink, task):
        await source.subscribed()
        await sink.until(lambda heard: "following" in heard)
        await source.send_frames(b"", number, payload(1.0, stored([1])))
        await source.send_raw(5, payload(2.0, stored([2])))
        with pytest.raises(KvEventFormatError, match="number"):
            async with asyncio.timeout(20):
                await task


@pytest.mark.parametrize("frames", [[b""], [b"", b"x"], [b"", b"", b"\x00" * 9, b""]])
async def test_a_replay_that_is_none_ends_it(
    context: zmq.asyncio.Context, frames: list[bytes]
) -> None:
    async with publisher(context) as source:
        source.replays_raw = frames
        async with following(source) as (_, task):
            with pytest.raises(KvEventFormatError):
                async with asyncio.timeout(20):
                    await task


@pytest.mark.vllm
async def test_vllms_own_publisher_is_followed(receiver: KvReceiver, tmp_path: Path) -> None:
    with vllms_own(tmp_path) as (publish, _, endpoints):
        publish(1)
        publish(2)
        sink = Recorder()
        subscriber = KvSubscriber(receiver, endpoints, KvEventReader(), sink, quiet_s=0.5)
        task = asyncio.create_task(subscriber.run())
        await sink.until(lambda heard: "following" in heard and 2 in heard)
        publish(3)
        await sink.until(lambda heard: 3 in heard)
        assert [each for each in sink.heard if each != "following"] == [1, 2, 3]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.vllm
async def test_of_vllms_own_publisher_a_long_replay_comes_whole(
    receiver: KvReceiver, tmp_path: Path
) -> None:
    with vllms_own(tmp_path) as (publish, published, endpoints):
        for key in range(8000):
            publish(key)
        await published()
        sink = Recorder()
        subscriber = KvSubscriber(receiver, endpoints, KvEventReader(), sink)
        task = asyncio.create_task(subscriber.run())
        await sink.until(lambda heard: "following" in heard)
        assert sink.heard == [*range(8000), "following"]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.contextmanager
def vllms_own(
    directory: Path,
) -> Iterator[tuple[Callable[[int], None], Callable[[], Awaitable[None]], KvEndpoints]]:
    """Run vLLM's own publisher; yield what has it publish a block's key, what waits until it has
    published all, and where it does.
    """
    events = pytest.importorskip("vllm.distributed.kv_events")
    endpoints = KvEndpoints(f"ipc://{directory}/events", f"ipc://{directory}/replay")
    source = events.ZmqEventPublisher(
        0, endpoint=endpoints.events, replay_endpoint=endpoints.replay
    )

    def publish(key: int) -> None:
        event = events.BlockStored(
            block_hashes=[key],
            parent_block_hash=None,
            token_ids=list(range(16)),
            block_size=16,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
        source.publish(events.KVEventBatch(ts=1000.0 + key, events=[event]))

    async def published() -> None:
        await asyncio.to_thread(source._event_queue.join)

    try:
        yield publish, published, endpoints
    finally:
        source.shutdown()
