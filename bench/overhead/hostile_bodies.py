"""What hostile and large request bodies cost the router, and other requests.

    python -m bench.overhead.hostile_bodies --json out.json

A real ``warmroute serve`` runs before a replica that publishes KV events, so that prompts are
matched by exact tokens. Ordinary requests (1,000 characters) come at a steady rate the whole time,
for as long without as with bodies of each kind, which are sent one after the other.

A timer in the router's event loop ticks each millisecond. The longest time between two ticks, less
a millisecond, is the longest turn: in CPU time of the loop's thread, and by the clock, without the
time that the thread was ready to run and had no core. By the clock it includes the waits for
Python's lock, which threads have that parse bodies. Other programs make both longer.

Memory is the peak of the process's resident memory over that before the body, divided by the
body's size: of the first body of its kind, with what the router then keeps in its bounded caches
(the index, tokenized texts), and of the same body later. Freed memory is returned to the system
before each. Of bodies below 4 MiB it shows the allocator and the libraries more than the body.
"""

import argparse
import asyncio
import ctypes
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import IO, Any, Final
from unittest.mock import patch

import uvloop
import xxhash
from aiohttp import web

from bench.command import origin, positive, work_directory, write_report
from bench.overhead.cases import (
    MODEL,
    MODEL_DIRECTORY,
    PATH,
    SHORT_TOKENS,
    Case,
    library_lines,
    sequences,
)
from bench.overhead.contenders import fetch
from bench.overhead.fake_replicas import (
    HOST,
    Connection,
    Prompts,
    Replica,
    StreamClock,
    Telling,
    events,
    handlers,
    known_prompts,
    whole,
)
from bench.overhead.load_generator import BadAnswerError, Connections
from bench.replica.model import make_model
from bench.ttft import BenchError, percentile
from cacheengine.launch.vllm_launch import free_ports
from router.app import create_app
from router.cli import serve
from router.cli.commands import main as warmroute
from simulator.kv_event_publisher import KvEventPublisher

_MIB: Final = 1 << 20
_TICK_S: Final = 0.001
_KEPT_PARTS: Final = 4
_READY_S: Final = 60.0
_COMPLETIONS: Final = "/v1/completions"
_WORDS: Final = Case(prompt="1k", answer="piece", requests=64)


# The bodies


def _chat(content: bytes, more: bytes = b"") -> bytes:
    head = b'{"model":"%s","max_tokens":%d,"stream":true,%s' % (MODEL.encode(), SHORT_TOKENS, more)
    return head + b'"messages":[{"role":"user","content":' + content + b"}]}"


def _text(part: bytes, size: int, end: bytes = b"") -> bytes:
    """Return a chat whose only message repeats a part of a JSON string."""
    return _chat(b'"%s%s"' % (part * ((size - 200) // len(part)), end))


def _list_in(field_name: bytes, value: bytes, size: int) -> bytes:
    items = b",".join([value] * ((size - 200) // (len(value) + 1)))
    return _chat(b'"hello"', b'"%s":[%s],' % (field_name, items))


def _lines(size: int) -> bytes:
    """Return about ``size`` bytes of real text, as the inside of a JSON string."""
    draw, lines = random.Random(size), library_lines()
    drawn = [draw.choice(lines) for _ in range(size // 40)]
    return json.dumps("\n".join(drawn)).encode()[1 : size - 200].rstrip(b"\\")


def _messages(size: int) -> bytes:
    lines = [json.dumps(each).encode() for each in library_lines()]
    draw, made, left = random.Random(size), [], size - 400
    while left > 0:
        made.append(b'{"role":"user","content":%s}' % draw.choice(lines))
        left -= len(made[-1]) + 1
    return _chat(b'"hello"')[:-2] + b"," + b",".join(made) + b"]}"


def _token_ids(size: int) -> bytes:
    draw = random.Random(size)
    ids = b",".join(b"%d" % draw.randrange(1000, 4000) for _ in range((size - 200) // 5))
    return b'{"model":"%s","max_tokens":%d,"stream":true,"prompt":[%s]}' % (
        *(MODEL.encode(), SHORT_TOKENS, ids),
    )


def _image(size: int) -> bytes:
    data = b"data:image/png;base64," + b"iVBORw0K" * ((size - 400) // 8)
    return _chat(b'[{"type":"image_url","image_url":{"url":"%s"}}]' % data)


KINDS: Final[Mapping[str, Callable[[int], bytes]]] = {
    "deep": lambda size: _chat(b"[" * (size // 2 - 100) + b"]" * (size // 2 - 100)),
    "wide": lambda size: _list_in(b"tools", b"[]", size),
    "nulls": lambda size: _list_in(b"documents", b"null", size),
    "names": lambda size: _list_in(b"tools", b'{"a":0}', size),
    "messages": _messages,
    "token ids": _token_ids,
    "text": lambda size: _chat(b'"%s"' % _lines(size)),
    "text with an emoji": lambda size: _chat(b'"%s %s"' % (_lines(size), "\U0001f600".encode())),
    "a word": lambda size: _text(b"a", size),
    "escapes": lambda size: _text(b"\\n\\t", size),
    "escaped letters": lambda size: _text(b"\\u4e2d", size),
    "Chinese": lambda size: _text("这是一段很长的文字。".encode(), size),
    "emoji": lambda size: _text("\U0001f600".encode(), size),
    "image": _image,
}
"""Bodies by their size."""


# The replica, a process


class _Discarding(Connection):
    """Keeps only the beginning of a body: to join all of it would hold up the other requests."""

    def on_body(self, body: bytes) -> None:
        """More of its body has come."""
        if len(self._body) < _KEPT_PARTS:
            super().on_body(body)


def serve_replica(told: Pipe, tokenizer: Path, prompts: Prompts, context_tokens: int) -> None:
    """Be a replica that publishes what it stores of the ordinary prompts, until killed."""
    uvloop.run(_serve_replica(told, tokenizer, prompts, context_tokens))


async def _serve_replica(
    told: Pipe, tokenizer: Path, prompts: Prompts, context_tokens: int
) -> None:
    stream = KvEventPublisher(HOST)
    stream.start()
    telling = Telling(prompts, stream)
    listed = {"id": MODEL, "root": str(tokenizer), "max_model_len": context_tokens}
    models = json.dumps({"object": "list", "data": [listed]}).encode()
    replica = Replica(
        clock=StreamClock.of_loop(),
        handlers={
            **handlers(tokenizer, stream),
            b"/v1/models": lambda _: models,
            _COMPLETIONS.encode(): lambda _: whole(SHORT_TOKENS),
        },
        note=lambda body: telling.note(body) if xxhash.xxh3_64_intdigest(body) in prompts else None,
    )
    server = await asyncio.get_running_loop().create_server(lambda: _Discarding(replica), HOST, 0)
    told.send(f"http://{HOST}:{server.sockets[0].getsockname()[1]}")
    await server.serve_forever()


# The router, a process


class LoopTurns:
    """The longest turns of the running event loop since they were asked for last."""

    def __init__(self) -> None:
        self._longest = dict.fromkeys(("cpu", "clock", "starved"), 0.0)
        self._starved = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._loop = asyncio.get_running_loop()
        self._before = self._now()
        self._tick()

    def take(self) -> dict[str, float]:
        """Return the longest, in ms, and begin again."""
        found = {name: round(1000 * each, 2) for name, each in self._longest.items()}
        self._longest = dict.fromkeys(found, 0.0)
        self._before = self._now()
        return found

    def _tick(self) -> None:
        now = self._now()
        cpu_s, wall_s, starved_s = (a - b for a, b in zip(now, self._before, strict=True))
        clock_s = wall_s - starved_s - _TICK_S
        for name, each in (("cpu", cpu_s), ("clock", clock_s), ("starved", starved_s)):
            self._longest[name] = max(self._longest[name], each)
        self._before = now
        self._loop.call_later(_TICK_S, self._tick)

    def _now(self) -> tuple[float, float, float]:
        starved_ns = int(os.pread(self._starved, 100, 0).split()[1])
        return time.thread_time(), time.perf_counter(), starved_ns / 1e9


def serve_router(config: str) -> None:
    """Be ``warmroute serve``; for each SIGUSR1 print the longest turns, as a line of JSON."""

    def created(*given: Any, **named: Any) -> web.Application:
        app = create_app(*given, **named)
        app.on_startup.append(watch)
        return app

    async def watch(_: web.Application) -> None:
        turns = LoopTurns()

        def report() -> None:
            ctypes.CDLL(None).malloc_trim(0)
            print(json.dumps(turns.take()), flush=True)

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, report)

    with (
        patch.object(serve, "create_app", created),
        patch.object(sys, "argv", ["warmroute", "serve", "--config", config]),
    ):
        warmroute()


class Router:
    """The router's process."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.url = url
        self._process = process
        self._proc = Path("/proc") / str(process.pid)

    def begin(self) -> int:
        """Return the resident memory; from now on its peak and the turns are measured."""
        self.turns()
        (self._proc / "clear_refs").write_text("5")
        return self._memory("VmRSS")

    def peak_bytes(self) -> int:
        """Return the most resident memory since `begin`."""
        return self._memory("VmHWM")

    def turns(self) -> dict[str, float]:
        """Return the longest turns in ms since the last call."""
        self._process.send_signal(signal.SIGUSR1)
        out: IO[str] | None = self._process.stdout
        assert out is not None
        if not (line := out.readline()):
            raise BenchError("the router has ended")
        found: dict[str, float] = json.loads(line)
        return found

    def _memory(self, name: str) -> int:
        lines = (self._proc / "status").read_text().splitlines()
        return next(int(each.split()[1]) * 1024 for each in lines if each.startswith(name))


@contextmanager
def running(
    tokenizer: Path, ordinary: Sequence[bytes], directory: Path, context_tokens: int
) -> Iterator[Router]:
    """Run the replica and the router for the block; raise `BenchError`."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    prompts = known_prompts(ordinary, tokenizer)
    given = (theirs, tokenizer, prompts, context_tokens)
    replica = spawn.Process(target=serve_replica, args=given, daemon=True)
    replica.start()
    (port,) = free_ports(1)
    config = directory / "router.json"
    replicas = [{"url": ours.recv()}]
    config.write_text(json.dumps({"port": port, "log_level": "warning", "replicas": replicas}))
    command = [sys.executable, "-m", "bench.overhead.hostile_bodies", "--router", str(config)]
    url = f"http://{HOST}:{port}"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            _wait_ready(url, ordinary[0])
            yield Router(process, url)
        finally:
            process.kill()
            replica.kill()
            replica.join()
            replica.close()
            ours.close()
            theirs.close()


def _wait_ready(url: str, body: bytes) -> None:
    """Return when a prompt that was sent is found by its tokens."""
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s:
        try:
            fetch(url + PATH, json.loads(body) | {"stream": False})
            found = fetch(f"{url}/explain", json.loads(body))
        except (OSError, ValueError):
            found = {}
        if found.get("exact_tokens"):
            return
        time.sleep(0.2)
    raise BenchError(f"the router knew no tokens within {_READY_S:.0f} s")


# The measurement


@dataclass(kw_only=True)
class Row:
    """What was measured of one kind of bodies."""

    kind: str
    size_bytes: int
    sent: int = 0
    statuses: list[int] = field(default_factory=list)
    answered_ms: float = 0.0
    """Median."""
    turn_ms: dict[str, float] = field(default_factory=dict)
    quiet_turn_ms: dict[str, float] = field(default_factory=dict)
    """Without these bodies."""
    first_memory: float = 0.0
    """Peak, divided by the body's size."""
    memory: float = 0.0
    others_ms: dict[str, float] = field(default_factory=dict)
    quiet_others_ms: dict[str, float] = field(default_factory=dict)


class Ordinary:
    """The ordinary requests, sent in turn at a steady rate."""

    def __init__(self, url: str, bodies: Sequence[bytes], per_s: int) -> None:
        self._connections = Connections([url], b"".join(events(SHORT_TOKENS)))
        self._bodies = bodies
        self._per_s = per_s

    async def during(self, work: asyncio.Future[Any]) -> dict[str, float]:
        """Send requests until ``work`` is done; return their times."""
        whole_s: list[float] = []
        began_s, number = time.perf_counter(), 0
        async with asyncio.TaskGroup() as tasks:
            while not work.done():
                tasks.create_task(self._ask(self._bodies[number % len(self._bodies)], whole_s))
                number += 1
                await asyncio.sleep(max(0.0, began_s + number / self._per_s - time.perf_counter()))
        await work
        return {f"p{share}": _ms(percentile(whole_s, share / 100)) for share in (50, 99)}

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    async def _ask(self, body: bytes, whole_s: list[float]) -> None:
        try:
            timing = await self._connections.ask(body)
        except (BadAnswerError, OSError, TimeoutError) as error:
            raise BenchError(f"an ordinary request failed: {error}") from error
        whole_s.append(timing.end_s - timing.sent_s)


async def measure(kind: str, size: int, router: Router, ordinary: Ordinary, seconds: float) -> Row:
    """Measure bodies of one kind: first alone, then with the ordinary requests and without."""
    body = await asyncio.to_thread(KINDS[kind], size)
    row = Row(kind=kind, size_bytes=len(body))
    rest = router.begin()
    await asyncio.to_thread(_send, router.url, body, row, 0.0)
    row.first_memory = (router.peak_bytes() - rest) / len(body)
    router.begin()
    row.quiet_others_ms = await ordinary.during(asyncio.ensure_future(asyncio.sleep(seconds)))
    row.quiet_turn_ms = router.turns()
    rest = router.begin()
    sending = asyncio.to_thread(_send, router.url, body, row, seconds)
    row.others_ms = await ordinary.during(asyncio.ensure_future(sending))
    row.memory = (router.peak_bytes() - rest) / len(body)
    row.turn_ms = router.turns()
    return row


def _send(url: str, body: bytes, row: Row, seconds: float) -> None:
    """Send a body again and again, at least once, and note the answers."""
    path = _COMPLETIONS if b'"prompt":' in body[:200] else PATH
    end_s = time.monotonic() + seconds
    took_s: list[float] = []
    while not took_s or time.monotonic() < end_s:
        connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
        began_s = time.perf_counter()
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
        except (OSError, HTTPException) as error:
            raise BenchError(f"{row.kind} of {len(body)} bytes: {error}") from error
        finally:
            connection.close()
        took_s.append(time.perf_counter() - began_s)
        row.sent += 1
        if response.status not in row.statuses:
            row.statuses.append(response.status)
    row.answered_ms = _ms(percentile(took_s, 0.5))


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


_HEAD: Final = (
    "| body | MiB | status | answered | turn, CPU | turn, clock | memory: first | again "
    "| others' p50 | p99 |\n|---|---:|---|---:|---:|---:|---:|---:|---:|---:|"
)


def line(row: Row) -> str:
    """Return a line of the table; figures without these bodies are in parentheses."""
    turn, quiet, others, without = (
        *(row.turn_ms, row.quiet_turn_ms, row.others_ms, row.quiet_others_ms),
    )
    return (
        f"| {row.kind} | {row.size_bytes / _MIB:.0f} | {', '.join(map(str, row.statuses))} "
        f"| {row.answered_ms:.0f} ms | {turn['cpu']:.1f} ({quiet['cpu']:.1f}) ms "
        f"| {turn['clock']:.1f} ({quiet['clock']:.1f}) ms | {row.first_memory:.1f}x "
        f"| {row.memory:.1f}x | {others['p50']:.1f} ({without['p50']:.1f}) ms "
        f"| {others['p99']:.1f} ({without['p99']:.1f}) ms |"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        prog="bench.overhead.hostile_bodies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], metavar="KIND")
    parser.add_argument("--mib", nargs="+", type=positive, default=[1, 4, 16, 64], metavar="N")
    parser.add_argument("--per-s", type=positive, default=50, help="ordinary requests")
    parser.add_argument("--seconds", type=positive, default=5, help="for each body, and without")
    parser.add_argument(
        "--context", type=positive, default=131_072, help="tokens that the model takes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--router", metavar="CONFIG", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.router is not None:
        serve_router(options.router)
        return
    came_from = origin("bench.overhead.hostile_bodies", argv or sys.argv[1:], options.json)
    rows = uvloop.run(_measure_all(options))
    if options.json is not None:
        write_report(options.json, came_from | {"rows": [asdict(each) for each in rows]})


async def _measure_all(options: argparse.Namespace) -> list[Row]:
    made = sequences(_WORDS, library_lines(), random.Random(0))
    bodies = [each for sequence in made for each in sequence]
    rows = []
    model, context = make_model(MODEL_DIRECTORY), options.context
    with work_directory(None) as made_in, running(model, bodies, made_in, context) as router:
        ordinary = Ordinary(router.url, bodies, options.per_s)
        await ordinary.during(asyncio.ensure_future(asyncio.sleep(1.0)))
        print(_HEAD, flush=True)
        for mib in options.mib:
            for kind in options.kinds:
                row = await measure(kind, mib * _MIB, router, ordinary, options.seconds)
                rows.append(row)
                print(line(row), flush=True)
        ordinary.close()
        await asyncio.sleep(0)
    return rows


if __name__ == "__main__":
    main()
