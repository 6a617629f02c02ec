"""What following the KV events of a large fleet costs the router: its parts' shares of a core.

    python -m bench.overhead.event_load --json out.json

A second process publishes for all replicas: each message is what a vLLM publishes in one step that
stores three blocks and evicts three. This process follows them with `router.feeds.feeds.Feeds`, on
the event loop that the router uses. Each phase does one part more than the one before it (`PARTS`),
so differences between phases are what the parts cost. ``bare`` is the least that pyzmq costs: its
sockets that have something are emptied every 10 ms, with no event loop.

CPU time is that of the thread of the event loop, and of the other threads (ZMQ's) by themselves.
Rates and delays by the clock count only on a machine that has nothing else to do: ``starved_share``
is the part of the time that the loop's thread was ready to run and had no core. Other programs make
CPU times longer too, by their use of the caches. A turn's CPU time is how long a request waits
there for others' work.
"""

import argparse
import asyncio
import gc
import multiprocessing
import select
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final
from unittest.mock import patch

import aiohttp
import msgspec
import uvloop
import zmq

from bench.command import origin, positive, write_report
from bench.ttft import percentile
from replay.requests import ModelPrompt
from router.cli.serve import SWITCH_INTERVAL_S
from router.config.settings import IndexConfig, ReplicaConfig, RouterConfig
from router.feeds import feeds
from router.fleet.fleet import Fleet
from router.index.kv_events import KvBatch, KvEventReader
from router.index.prompt_keys import KeyShape, KvTier, PromptKeyCache
from router.record.metrics import Metrics
from router.record.records import Outcome, RequestRecord
from router.scheduling.request_scheduler import PlacementRequest, RequestScheduler
from warmroute_common.keys import HashScheme
from warmroute_common.tasks import end_all

_PARTS: Final = ("bare", "receiving", "decoding", "index", "turns", "requests alone", "requests")
_BLOCK_TOKENS: Final = 16
_BLOCKS_PER_MESSAGE: Final = 3
_MESSAGES: Final = 64
"""Different messages of a publisher, sent in turns."""
_HELD: Final = 48
"""Messages whose blocks a replica holds at a time; the blocks of the one before are evicted."""
_PROMPT_BLOCKS: Final = 128
_PROMPTS: Final = 2_000
_REQUEST_TURNS: Final = 6
"""Turns of the loop that a request needs, besides its placing."""
_CONNECT_S: Final = 60.0
_SETTLE_S: Final = 2.0
_TICK_S: Final = 0.01
_SCRAPES: Final = 5


class FollowedFleet(Fleet):
    """A fleet that counts messages and losses."""

    indexes = True
    messages = 0
    losses = 0

    def apply_kv(self, replica_id: str, batch: KvBatch, now_s: float) -> None:
        """Count a message, and apply it if this phase does so."""
        self.messages += 1
        if self.indexes:
            super().apply_kv(replica_id, batch, now_s)

    def lost_kv(self, replica_id: str) -> None:
        """Count what should not happen here: a gap."""
        self.losses += 1
        super().lost_kv(replica_id)


class UndecodedReader(KvEventReader):
    """Reads nothing of a message but its number."""

    def read(self, seq: int, payload: bytes) -> KvBatch:
        """Return a message without events."""
        return KvBatch(seq, 0.0, ())


@dataclass(kw_only=True)
class Phase:
    """What was measured in one phase."""

    name: str
    seconds: float = 0.0
    messages: int = 0
    messages_per_s: float = 0.0
    losses: int = 0
    loop_share: float = 0.0
    """CPU time of the loop's thread, as a part of one core at the wanted rate of messages.

    In the phases with turns and requests: at the rate that there was."""
    others_share: float = 0.0
    """The same of the process's other threads."""
    loop_us_per_message: float = 0.0
    others_us_per_message: float = 0.0
    starved_share: float = 0.0
    turn_cpu_ms: dict[str, float] = field(default_factory=dict)
    """CPU time of one turn of the loop."""
    requests: int = 0
    request_ms: dict[str, float] = field(default_factory=dict)
    """From the time that a request was due until it was placed and had its turns, by the clock."""


class Publishers:
    """The process that publishes for all replicas, for the block."""

    def __init__(self, count: int, per_s: int) -> None:
        process = multiprocessing.get_context("spawn")
        self._ours, theirs = process.Pipe()
        self._process = process.Process(target=publish, args=(theirs, count, per_s), daemon=True)

    def __enter__(self) -> list[str]:
        """Start, and return where each publishes."""
        self._process.start()
        endpoints: list[str] = self._ours.recv()
        return endpoints

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join()


def publish(told: Connection, count: int, per_s: int) -> None:
    """Publish ``per_s`` messages a second for each of ``count`` replicas, until killed."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
    sockets = [context.socket(zmq.PUB) for _ in range(count)]
    for each in sockets:
        each.setsockopt(zmq.SNDHWM, 100_000)
        each.bind("tcp://127.0.0.1:*")
    payloads = [messages(replica) for replica in range(count)]
    told.send([each.getsockopt_string(zmq.LAST_ENDPOINT) for each in sockets])
    sent, began_s = 0, time.monotonic()
    while True:
        due = int((time.monotonic() - began_s) * count * per_s)
        while sent < due:
            seq, replica = divmod(sent, count)
            payload = payloads[replica][seq % _MESSAGES]
            sockets[replica].send_multipart([b"", seq.to_bytes(8, "big"), payload])
            sent += 1
        time.sleep(0.001)


def messages(replica: int) -> list[bytes]:
    """Return the messages that a replica sends in turns, in the format of vLLM 0.32."""
    encode = msgspec.msgpack.Encoder().encode
    return [
        encode(
            [
                1000.0,
                [
                    *(_stored(key) for key in _keys(replica, at)),
                    *(_removed(key) for key in _keys(replica, at - _HELD)),
                ],
                0,
            ]
        )
        for at in range(_MESSAGES)
    ]


def _stored(key: int) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": [key],
        "parent_block_hash": _spread(key),
        "token_ids": list(range(1000, 1000 + _BLOCK_TOKENS)),
        "block_size": _BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _removed(key: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [key], "medium": "GPU", "group_idx": 0}


def _keys(replica: int, message: int) -> list[int]:
    first = (replica * _MESSAGES + message % _MESSAGES) * _BLOCKS_PER_MESSAGE
    return [_spread(first + at) for at in range(_BLOCKS_PER_MESSAGE)]


def _spread(number: int) -> int:
    """Return a key that looks like a hash."""
    return (number * 0x9E3779B97F4A7C15 + 0x1234567) & (1 << 64) - 1


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        prog="bench.overhead.event_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, default, text in (
        ("--replicas", 200, "publishers"),
        ("--per-s", 100, "messages of each publisher per second"),
        ("--requests-per-s", 200, "requests per second in the last phases"),
        ("--seconds", 10, "length of a phase"),
        ("--sustain", 60, "length of the phase with all parts (index)"),
    ):
        parser.add_argument(
            name, type=positive, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    options = parser.parse_args(argv)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    came_from = origin("bench.overhead.event_load", argv or sys.argv[1:], options.json)
    phases = []
    with Publishers(options.replicas, options.per_s) as endpoints:
        for name in _PARTS:
            seconds = options.sustain if name == "index" else options.seconds
            phases.append(measure(name, endpoints, options.per_s, options.requests_per_s, seconds))
            print_phase(phases[-1])
    scrape = uvloop.run(measure_scrapes(options.replicas))
    print(f"/metrics of {options.replicas} replicas: {scrape}")
    shares = parts_of_a_core(phases)
    print(f"of one core at {options.replicas * options.per_s} messages/s: {shares}")
    if options.json is not None:
        report = {"phases": [asdict(each) for each in phases], "scrape": scrape, "shares": shares}
        write_report(options.json, came_from | report)


def measure(
    name: str, endpoints: Sequence[str], per_s: int, requests_per_s: int, seconds: int
) -> Phase:
    """Run one phase."""
    wanted_per_s = len(endpoints) * per_s
    if name == "bare":
        phase = _measure_bare(endpoints, seconds)
    else:
        phase = uvloop.run(_measure_followed(name, endpoints, requests_per_s, seconds))
    phase.messages_per_s = phase.messages / phase.seconds
    if phase.messages:
        phase.loop_us_per_message = 1e6 * phase.loop_share * phase.seconds / phase.messages
        phase.others_us_per_message = 1e6 * phase.others_share * phase.seconds / phase.messages
    if name in ("bare", "receiving", "decoding", "index"):
        phase.loop_share = phase.loop_us_per_message * wanted_per_s / 1e6
        phase.others_share = phase.others_us_per_message * wanted_per_s / 1e6
    return phase


class _CpuTime:
    """CPU time since it was made."""

    def __init__(self) -> None:
        self._began = self._now()

    def note(self, phase: Phase) -> None:
        """Write into a phase what was used of a core."""
        wall_s, thread_s, process_s, starved_s = (
            now - began for now, began in zip(self._now(), self._began, strict=True)
        )
        phase.seconds = wall_s
        phase.starved_share = starved_s / wall_s
        phase.loop_share = thread_s / wall_s
        phase.others_share = (process_s - thread_s) / wall_s

    @staticmethod
    def _now() -> tuple[float, float, float, float]:
        starved_ns = int(Path("/proc/thread-self/schedstat").read_text().split()[1])
        return time.monotonic(), time.thread_time(), time.process_time(), starved_ns / 1e9


def _measure_bare(endpoints: Sequence[str], seconds: int) -> Phase:
    phase = Phase(name="bare")
    with zmq.Context() as context, select.epoll() as epoll:
        context.set(zmq.MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT))
        sockets = [context.socket(zmq.SUB) for _ in endpoints]
        for each, endpoint in zip(sockets, endpoints, strict=True):
            each.subscribe(b"")
            each.setsockopt(zmq.LINGER, 0)
            each.connect(endpoint)
            epoll.register(each.FD, select.EPOLLIN)
        by_descriptor = {each.FD: each for each in sockets}
        end_s = time.monotonic() + _SETTLE_S
        used = None
        while time.monotonic() < end_s or used is None:
            if used is None and time.monotonic() >= end_s:
                used, end_s, phase.messages = _CpuTime(), end_s + seconds, 0
            for descriptor, _ in epoll.poll(0):
                with suppress(zmq.Again):
                    while True:
                        by_descriptor[descriptor].recv_multipart(zmq.NOBLOCK)
                        phase.messages += 1
            time.sleep(_TICK_S)
        used.note(phase)
        for each in sockets:
            each.close()
    return phase


async def _measure_followed(
    name: str, endpoints: Sequence[str], requests_per_s: int, seconds: int
) -> Phase:
    phase = Phase(name=name)
    fleet = make_fleet(endpoints)
    fleet.indexes = name not in ("receiving", "decoding")
    reader = UndecodedReader if name == "receiving" else KvEventReader
    follows = name != "requests alone"
    turns_cpu_s: list[float] = []
    delays_s: list[float] = []
    gc.collect()
    gc.freeze()  # as the router does at its start
    with patch.object(feeds, "KvEventReader", reader):
        async with _fed(fleet) if follows else _unfed():
            if follows:
                await _followed(fleet)
            await asyncio.sleep(_SETTLE_S)
            tasks = []
            if name == "turns":
                tasks.append(asyncio.create_task(count_turns(turns_cpu_s, time.thread_time)))
            if name.startswith("requests"):
                tasks.append(asyncio.create_task(request(fleet, requests_per_s, delays_s)))
            messages, losses, used = fleet.messages, fleet.losses, _CpuTime()
            await asyncio.sleep(seconds)
            used.note(phase)
            phase.messages, phase.losses = fleet.messages - messages, fleet.losses - losses
            await end_all(tasks)
    fleet.index.check()
    phase.turn_cpu_ms = _in_ms(turns_cpu_s)
    phase.requests, phase.request_ms = len(delays_s), _in_ms(delays_s)
    return phase


@asynccontextmanager
async def _fed(fleet: Fleet) -> AsyncIterator[None]:
    async with aiohttp.ClientSession() as session:
        following = feeds.Feeds(fleet, session)
        await following.start()
        try:
            yield
        finally:
            await following.stop()


async def _followed(fleet: Fleet) -> None:
    async with asyncio.timeout(_CONNECT_S):
        while not all(each.has_events for each in fleet.replicas.values()):  # noqa: ASYNC110
            await asyncio.sleep(_TICK_S)


@asynccontextmanager
async def _unfed() -> AsyncIterator[None]:
    yield


def make_fleet(endpoints: Sequence[str]) -> FollowedFleet:
    """Return a fleet whose replicas publish there, each with prompts of its own in its index."""
    replicas = tuple(
        ReplicaConfig(url=f"http://r{at}:1", instance_id=f"r{at}", kv_events=endpoint)
        for at, endpoint in enumerate(endpoints)
    )
    fleet = FollowedFleet(
        RouterConfig(replicas=replicas, index=IndexConfig(max_keys=_PROMPTS * _PROMPT_BLOCKS * 4))
    )
    shape = KeyShape(scheme=HashScheme(), block_tokens=_BLOCK_TOKENS, blocks_per_chunk=1)
    for name, each in fleet.replicas.items():
        fleet.up(name)
        each.shape, each.shape_checked = shape, True
    for number in range(_PROMPTS):
        fleet.index.add(number % len(replicas), KvTier.GPU, _prompt_keys(number))
    return fleet


def _prompt_keys(number: int) -> list[int]:
    first = (1 << 40) + number * _PROMPT_BLOCKS
    return [_spread(first + at) for at in range(_PROMPT_BLOCKS)]


async def request(fleet: Fleet, per_s: int, delays_s: list[float]) -> None:
    """Place requests at a steady rate, each a task; note how late each was through."""
    scheduler = RequestScheduler(fleet)
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        number = 0
        while True:
            number += 1
            due_s = began_s + number / per_s
            if (left_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(left_s)
            tasks.create_task(_one_request(fleet, scheduler, number, due_s, delays_s))


async def _one_request(
    fleet: Fleet, scheduler: RequestScheduler, number: int, due_s: float, delays_s: list[float]
) -> None:
    keys = [key.to_bytes(8, "big") for key in _prompt_keys(number % (2 * _PROMPTS))]
    prompt = ModelPrompt(keys, len(keys), len(keys) * _BLOCK_TOKENS)
    now_s = time.monotonic()
    decision = scheduler.place(PlacementRequest(keys=PromptKeyCache(prompt)), now_s)
    ticket = fleet.start(decision, now_s)
    for _ in range(_REQUEST_TURNS):
        await asyncio.sleep(0)
    ticket.finish(time.monotonic(), ok=False)
    delays_s.append(time.perf_counter() - due_s)


async def count_turns(turns_s: list[float], clock: Callable[[], float]) -> None:
    """Note how long each turn of the loop takes, with this task in each."""
    before_s = clock()
    while True:
        await asyncio.sleep(0)
        now_s = clock()
        turns_s.append(now_s - before_s)
        before_s = now_s


async def measure_scrapes(replicas: int) -> dict[str, object]:
    """Measure the loop's turns, idle and while metrics are rendered: in CPU time, by the clock.

    By the clock a turn is longer by the waits for Python's lock, which the rendering thread has.
    """
    fleet = make_fleet([f"tcp://127.0.0.1:{at + 1}" for at in range(replicas)])
    metrics = Metrics(fleet)
    for name in fleet.replicas:
        record = RequestRecord(
            request_id="r", endpoint="/v1/completions", started_s=0.0, ended_s=3.0
        )
        record.replica_id, record.first_byte_s, record.outcome = name, 1.0, Outcome.OK
        record.status, record.prompt_tokens = 200, 1000
        metrics.observe(record)
    gc.collect()
    gc.freeze()
    cpu_s: dict[str, list[float]] = {"idle": [], "scraped": []}
    turns_s: dict[str, list[float]] = {"idle": [], "scraped": []}
    scrape_s, size_bytes = [], 0
    for kind, turns in turns_s.items():
        counting = [
            asyncio.create_task(count_turns(cpu_s[kind], time.thread_time)),
            asyncio.create_task(count_turns(turns, time.perf_counter)),
        ]
        for _ in range(_SCRAPES):
            began_s = time.perf_counter()
            if kind == "scraped":
                size_bytes = len(await metrics.render())
                scrape_s.append(time.perf_counter() - began_s)
            else:
                await asyncio.sleep(0.2)
        await end_all(counting)
    return {
        "bytes": size_bytes,
        "scrape_ms": _in_ms(scrape_s),
        "turns_per_scrape": len(turns_s["scraped"]) / _SCRAPES,
        "turn_cpu_ms": {kind: _in_ms(turns) for kind, turns in cpu_s.items()},
        "turn_ms": {kind: _in_ms(turns) for kind, turns in turns_s.items()},
    }


def parts_of_a_core(phases: Sequence[Phase]) -> dict[str, float]:
    """Return which part takes which share of a core at the wanted rate of messages."""
    share = {each.name: each.loop_share for each in phases}
    return {
        "receiving": share["bare"],
        "loop": share["receiving"] - share["bare"],
        "decoding": share["decoding"] - share["receiving"],
        "index": share["index"] - share["decoding"],
        "all": share["index"],
        "zmq_threads": next(each.others_share for each in phases if each.name == "index"),
    }


def print_phase(phase: Phase) -> None:
    """Show one phase."""
    print(
        f"{phase.name}: {phase.messages_per_s:.0f} messages/s, {phase.losses} losses; "
        f"loop {phase.loop_share:.1%} of a core ({phase.loop_us_per_message:.1f} us/message), "
        f"other threads {phase.others_share:.1%} ({phase.others_us_per_message:.1f}); "
        f"starved {phase.starved_share:.0%}"
        + (f"; a turn's CPU ms {phase.turn_cpu_ms}" if phase.turn_cpu_ms else "")
        + (f"; {phase.requests} requests, ms {phase.request_ms}" if phase.request_ms else ""),
        flush=True,
    )


def _in_ms(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    found = {f"p{share}": percentile(seconds, share / 100) for share in (50, 99)}
    return {name: round(1000 * each, 3) for name, each in (found | {"max": max(seconds)}).items()}


if __name__ == "__main__":
    main()
