"""One task receives for all streams: in order, in turns, a bounded part at a time."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import pytest
import uvloop
import zmq

from router.feeds.kv_receiver import KvReceiver, TakeMessage
from tests.router.agent_server import until


class Pipes:
    """Sockets in one process: what was sent has arrived."""

    def __init__(self, receiver: KvReceiver) -> None:
        self._context = zmq.Context(receiver.context)
        self._sockets: list[zmq.SyncSocket] = []

    def pair(self) -> tuple[Callable[[bytes], None], zmq.SyncSocket]:
        """Return what sends a message, its frames between slashes, and who gets it."""
        sending, getting = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        for socket in (sending, getting):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        sending.bind(f"inproc://pair-{len(self._sockets)}")
        getting.connect(f"inproc://pair-{len(self._sockets)}")
        self._sockets += [sending, getting]

        def send(message: bytes) -> None:
            sending.send_multipart(message.split(b"/"))

        return send, getting

    def close(self) -> None:
        for each in self._sockets:
            each.close(linger=0)


@pytest.fixture
async def receiver() -> AsyncIterator[KvReceiver]:
    async with contextlib.aclosing(KvReceiver()) as made:
        yield made


@pytest.fixture
def pipes(receiver: KvReceiver) -> Iterator[Pipes]:
    with contextlib.closing(Pipes(receiver)) as made:
        yield made


def noting(heard: list[bytes], last: bytes | None = None) -> TakeMessage:
    """Return what writes messages down, and wants none after the last one."""

    def take(frames: Sequence[bytes]) -> bool:
        heard.append(b"/".join(frames))
        return heard[-1] != last

    return take


async def ended(*tasks: "asyncio.Task[None]") -> None:
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_messages_from_before_and_after_come_whole_and_in_order(
    receiver: KvReceiver, pipes: Pipes
) -> None:
    send, socket = pipes.pair()
    heard: list[bytes] = []
    send(b"1")
    send(b"a/b/c")
    task = asyncio.create_task(receiver.receive(socket, noting(heard, b"last"), 60.0))
    await until(lambda: len(heard) == 2)
    for message in (b"", b"2/", b"last"):
        send(message)
    await task
    assert heard == [b"1", b"a/b/c", b"", b"2/", b"last"]
    assert receiver.behind_s == 0.0


async def test_what_follows_the_last_one_wanted_stays_for_the_next_call(
    receiver: KvReceiver, pipes: Pipes
) -> None:
    """As after a gap, until the missing messages were had."""
    send, socket = pipes.pair()
    heard: list[bytes] = []
    for message in (b"1", b"2", b"3"):
        send(message)
    await receiver.receive(socket, noting(heard, b"2"), 60.0)
    send(b"4")
    for _ in range(5):
        await asyncio.sleep(0)
    assert heard == [b"1", b"2"]
    await receiver.receive(socket, noting(heard, b"4"), 60.0)
    assert heard == [b"1", b"2", b"3", b"4"]


async def test_it_returns_when_it_stays_quiet(receiver: KvReceiver, pipes: Pipes) -> None:
    send, socket = pipes.pair()
    heard: list[bytes] = []
    send(b"1")
    await receiver.receive(socket, noting(heard), 0.05)
    assert heard == [b"1"]


async def test_an_error_ends_only_its_own_stream(receiver: KvReceiver, pipes: Pipes) -> None:
    def fail(_: Sequence[bytes]) -> bool:
        raise ValueError("no message")

    send_bad, bad = pipes.pair()
    send, good = pipes.pair()
    heard: list[bytes] = []
    task = asyncio.create_task(receiver.receive(good, noting(heard, b"2"), 60.0))
    send(b"1")
    send_bad(b"1")
    with pytest.raises(ValueError, match="no message"):
        await receiver.receive(bad, fail, 60.0)
    send(b"2")
    await task
    assert heard == [b"1", b"2"]


async def test_nothing_is_taken_after_a_cancellation(receiver: KvReceiver, pipes: Pipes) -> None:
    """Its messages are in the queue, and the next slice is due, when it ends."""
    send, socket = pipes.pair()
    heard: list[bytes] = []

    def take(frames: Sequence[bytes]) -> bool:
        heard.append(frames[0])
        task.cancel()
        return True

    task = asyncio.create_task(receiver.receive(socket, take, 60.0))
    for _ in range(20):
        send(b"x" * 10_000)
    with pytest.raises(asyncio.CancelledError):
        await task
    count = len(heard)
    assert 0 < count < 20, "one slice"
    send(b"x")
    for _ in range(10):
        await asyncio.sleep(0.002)
    assert len(heard) == count


@pytest.mark.parametrize(("message", "most"), [(b"x" * 9_000, 4), (b"", 128)])
async def test_a_turn_takes_a_bounded_part_of_all_streams(
    receiver: KvReceiver, pipes: Pipes, message: bytes, most: int
) -> None:
    turns, taken = [0], Counter[int]()

    def take(_: Sequence[bytes]) -> bool:
        taken[turns[0]] += 1
        return True

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(count())]
    for _ in range(8):
        send, socket = pipes.pair()
        for _ in range(50):
            send(message)
        tasks.append(asyncio.create_task(receiver.receive(socket, take, 60.0)))
    await until(lambda: taken.total() == 400)
    assert max(taken.values()) <= most
    await ended(*tasks)


async def test_a_stream_that_is_never_empty_does_not_starve_others(
    receiver: KvReceiver, pipes: Pipes
) -> None:
    send_much, busy = pipes.pair()
    send, quiet = pipes.pair()

    def refill(_: Sequence[bytes]) -> bool:
        send_much(b"x" * 5_000)
        return True

    send_much(b"x")
    task = asyncio.create_task(receiver.receive(busy, refill, 60.0))
    heard: list[bytes] = []
    other = asyncio.create_task(receiver.receive(quiet, noting(heard, b"3"), 60.0))
    for number in (b"1", b"2"):
        send(number)
    await until(lambda: len(heard) == 2)
    send(b"3")
    await other
    assert receiver.behind_s > 0.0
    await ended(task)


async def _take_one() -> None:
    async with contextlib.aclosing(KvReceiver()) as receiver:
        with contextlib.closing(Pipes(receiver)) as pipes:
            send, socket = pipes.pair()
            heard: list[bytes] = []
            task = asyncio.create_task(receiver.receive(socket, noting(heard, b"2"), 60.0))
            send(b"1")
            await until(lambda: bool(heard))
            send(b"2")
            await task
            assert heard == [b"1", b"2"]


def test_the_routers_own_event_loop_waits_for_it_too() -> None:
    uvloop.run(_take_one())
