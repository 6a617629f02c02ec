"""Fake replicas that answer at once: ``python -m bench.overhead.fake_replicas``, until SIGTERM.

Prints one line of JSON when they listen. They speak HTTP/1.1 with whole requests and prepared
answers: aiohttp would take ten times as much CPU, on cores that the routers need. One timer sends
an event of each slow stream every 20 ms, since a timer for each event would cost more than to send
it.

A replica that publishes KV events has tokens and keys that a router can know, as a vLLM without an
agent. ``/v1/models`` names its tokenizer's directory, ``/tokenize`` gives tokens that prove it, and
``/kv_event_sources`` says where each prompt's blocks are published when it is answered. Tokens and
keys of all prompts are made before anything is measured, and found by a body's hash.
"""

import argparse
import asyncio
import gc
import re
import signal
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

import httptools
import msgspec
import orjson
import uvloop
import xxhash

from bench.overhead.cases import EVENT_GAP_S, MODEL, PATH, SHORT_TOKENS, AnswerForm
from router.prompt.prompt_reader import PromptReader
from simulator.kv_event_publisher import KvEventPublisher
from warmroute_common.api_errors import BadRequestError
from warmroute_common.keys import HashScheme, key64

_ID: Final = "chatcmpl-0123456789abcdef0123456789abcdef"
_CREATED: Final = 1_750_000_000
_WORD: Final = " word"
_PROMPT_TOKENS: Final = 1_000


def expected(form: AnswerForm, tokens: int) -> bytes:
    """Return the body of an answer, whatever pieces it comes in."""
    return whole(tokens) if form == "whole" else b"".join(events(tokens))


def whole(tokens: int) -> bytes:
    """Return an answer that is not streamed."""
    message = {"role": "assistant", "content": _WORD * tokens}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    head = _head("chat.completion")
    return orjson.dumps({**head, "choices": [choice], "usage": _usage(tokens)})


def events(tokens: int) -> list[bytes]:
    """Return a streamed answer's pieces, a token in each.

    The first tells the role too, the last the usage and the end.
    """
    pieces = [_event({"content": _WORD}) for _ in range(tokens - 1)]
    pieces.append(_event({"content": _WORD}, finish_reason="length"))
    pieces[0] = _event({"role": "assistant", "content": ""}) + pieces[0]
    usage = {**_head("chat.completion.chunk"), "choices": [], "usage": _usage(tokens)}
    pieces[-1] += _data(usage) + b"data: [DONE]\n\n"
    return pieces


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return _data({**_head("chat.completion.chunk"), "choices": [choice]})


def _data(chunk: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % orjson.dumps(chunk)


def _head(kind: str) -> dict[str, Any]:
    return {"id": _ID, "object": kind, "created": _CREATED, "model": MODEL}


def _usage(tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": _PROMPT_TOKENS,
        "total_tokens": _PROMPT_TOKENS + tokens,
        "completion_tokens": tokens,
    }


HELD_TOKENS: Final = 10**9
"""A request for this many tokens is never answered."""

Step = Callable[[], bool]
"""Sends a stream's next event; returns whether more will come."""

_PHASES: Final = round(EVENT_GAP_S * 1000)


class StreamClock:
    """Steps every stream once in each `EVENT_GAP_S`, to the millisecond it began at.

    The timer runs only while there are streams. A millisecond that comes late
    is made up for, so that streams take their time and no more.
    """

    def __init__(self, now: Callable[[], float], call_at: Callable[..., object]) -> None:
        """``now`` and ``call_at``: the event loop's ``time`` and ``call_at``."""
        self._now = now
        self._call_at = call_at
        self._phases: list[deque[Step]] = [deque() for _ in range(_PHASES)]
        self._streams = 0
        self._next_ms = 0

    @classmethod
    def of_loop(cls) -> "StreamClock":
        """Return one that runs by the running event loop."""
        loop = asyncio.get_running_loop()
        return cls(loop.time, loop.call_at)

    def add(self, step: Step) -> None:
        """Step a stream from now on, for the first time when `EVENT_GAP_S` has passed."""
        now_ms = int(self._now() * 1000)
        if not self._streams:
            self._next_ms = now_ms + 1
            self._call_at(self._next_ms / 1000, self._run)
        self._streams += 1
        # Where the timer is late, the current millisecond is yet to be run: too early by a gap.
        self._phases[min(now_ms, self._next_ms - 1) % _PHASES].append(step)

    def _run(self) -> None:
        now_ms = int(self._now() * 1000)
        while self._next_ms <= now_ms:
            self._run_phase(self._phases[self._next_ms % _PHASES])
            self._next_ms += 1
        if self._streams:
            self._call_at(self._next_ms / 1000, self._run)

    def _run_phase(self, phase: deque[Step]) -> None:
        for _ in range(len(phase)):
            step = phase.popleft()
            if step():
                phase.append(step)
            else:
                self._streams -= 1


Handler = Callable[[bytes], bytes | None]
"""From a request's body to the answer's, JSON; None: refused."""

_STREAMED: Final = b'"stream":true'
# sglang-router sends max_tokens on as max_completion_tokens.
_TOKENS: Final = re.compile(rb'_tokens": ?(\d+)')
_LAST_CHUNK: Final = b"0\r\n\r\n"
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def answer(status: str, body: bytes) -> bytes:
    """Return a whole answer's bytes."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def chunk(data: bytes) -> bytes:
    """Return data as a chunk of an answer of unknown length."""
    return b"%x\r\n%s\r\n" % (len(data), data)


_WHOLE: Final = answer("200 OK", whole(SHORT_TOKENS))
_PIECE: Final = _STREAM_HEAD + chunk(b"".join(events(SHORT_TOKENS))) + _LAST_CHUNK


@cache
def slow_stream(tokens: int) -> Sequence[bytes]:
    """Return the parts of a slow answer, an event in each, head and end included."""
    chunks = [chunk(each) for each in events(tokens)]
    return [_STREAM_HEAD + chunks[0], *chunks[1:-1], chunks[-1] + _LAST_CHUNK]


_NOT_FOUND: Final = answer("404 Not Found", b'{"error":{"message":"not found"}}')
_REFUSED: Final = answer("400 Bad Request", b'{"error":{"message":"refused"}}')


@dataclass(kw_only=True)
class Replica:
    """One fake replica: what all its connections share."""

    clock: StreamClock
    handlers: Mapping[bytes, Handler]
    """Answers by path, other than completions."""
    note: Callable[[bytes], None]
    """Called with the body of each completion, when its answer is on its way."""


class Connection(asyncio.Protocol):
    """One client's connection: a request, its answer, the next request."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._transport: asyncio.WriteTransport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []

    # --- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave it; a slow stream ends by that."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Parse what has come, and answer what is whole."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._close()

    # --- the parser's calls

    def on_message_begin(self) -> None:
        """A request begins."""
        self._path, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        """More of its path has come."""
        self._path += url

    def on_body(self, body: bytes) -> None:
        """More of its body has come."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Answer it."""
        body = b"".join(self._body)
        if self._path == PATH.encode():
            self._complete(body)
            self._replica.note(body)
        else:
            self._write(self._told(body))
        if not self._parser.should_keep_alive():
            self._close()

    # --- answers

    def _complete(self, body: bytes) -> None:
        found = _TOKENS.search(body)
        tokens = int(found[1]) if found else SHORT_TOKENS
        if tokens == HELD_TOKENS:
            return
        if _STREAMED not in body:
            self._write(_WHOLE)
        elif tokens <= SHORT_TOKENS:
            self._write(_PIECE)
        else:
            self._stream(slow_stream(tokens))

    def _stream(self, chunks: Sequence[bytes]) -> None:
        upcoming = iter(chunks[1:])

        def step() -> bool:
            if self._transport is None:
                return False
            if (event := next(upcoming, None)) is not None:
                self._write(event)
            return event is not None

        self._write(chunks[0])
        self._replica.clock.add(step)

    def _told(self, body: bytes) -> bytes:
        handler = self._replica.handlers.get(self._path)
        if handler is None:
            return _NOT_FOUND
        told = handler(body)
        return _REFUSED if told is None else answer("200 OK", told)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()


BLOCK_TOKENS: Final = 16
"""vLLM's default."""
_MAX_TOKENS: Final = 131_072


class Known(msgspec.Struct, frozen=True, array_like=True):
    """A prompt as its replica sees it."""

    token_ids: bytes
    """Four bytes each, in this machine's order."""
    keys: bytes
    """Of its full blocks, eight bytes each."""


Prompts = dict[int, Known]
"""By the hash of a request's body."""


def known_prompts(bodies: Iterable[bytes], tokenizer: Path) -> Prompts:
    """Return the tokens and keys of prompts; raises `ConfigError` without a tokenizer."""
    reader = PromptReader.load(tokenizer)
    return {xxhash.xxh3_64_intdigest(each): _known(each, reader) for each in bodies}


def _known(body: bytes, reader: PromptReader) -> Known:
    prompt = reader.read_now(PATH, orjson.loads(body))
    keys = prompt.chain(HashScheme(), BLOCK_TOKENS)
    return Known(
        token_ids=array("I", prompt.token_ids or ()).tobytes(),
        keys=array("Q", map(key64, keys)).tobytes(),
    )


def write_prompts(path: Path, prompts: Prompts) -> None:
    """Write them for the replicas' process."""
    path.write_bytes(msgspec.msgpack.encode(prompts))


def read_prompts(path: Path) -> Prompts:
    """Read what `write_prompts` has written."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Prompts)


class Telling:
    """What one replica tells; what it has stored it does not tell again."""

    def __init__(self, prompts: Prompts, stream: KvEventPublisher) -> None:
        self._prompts = prompts
        self._stream = stream
        self._stored: set[int] = set()

    def note(self, body: bytes) -> None:
        """Publish the blocks of a prompt that has been answered, in one event.

        Raises KeyError for a prompt that was not made ready.
        """
        known = self._prompts[xxhash.xxh3_64_intdigest(body)]
        keys = array("Q", known.keys)
        first = next((at for at, key in enumerate(keys) if key not in self._stored), len(keys))
        if first == len(keys):
            return
        self._stored.update(keys[first:])
        self._stream.publish(msgspec.msgpack.encode([0.0, [_stored_event(known, keys, first)], 0]))


def _stored_event(known: Known, keys: "array[int]", first: int) -> dict[str, object]:
    """Return vLLM's event of the blocks from ``first`` on."""
    ids = array("I", known.token_ids)[first * BLOCK_TOKENS : len(keys) * BLOCK_TOKENS]
    return {
        "type": "BlockStored",
        "block_hashes": keys[first:].tolist(),
        "parent_block_hash": keys[first - 1] if first else None,
        "token_ids": ids.tolist(),
        "block_size": BLOCK_TOKENS,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * (len(keys) - first),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def handlers(tokenizer: Path, stream: KvEventPublisher) -> Mapping[bytes, Handler]:
    """Return what such a replica answers, other than completions."""
    reader = PromptReader.load(tokenizer)
    source = {"endpoint": stream.endpoint, "replay_endpoint": stream.replay_endpoint, "topic": ""}

    def tokenize(body: bytes) -> bytes | None:
        try:
            ids = reader.read_now("/tokenize", orjson.loads(body)).token_ids
        except BadRequestError:
            return None
        if ids is None:
            return None
        told = {"count": len(ids), "max_model_len": _MAX_TOKENS, "tokens": list(ids)}
        return orjson.dumps(told)

    return {
        b"/tokenize": tokenize,
        b"/kv_event_sources": lambda _: orjson.dumps({"0": source}),
        **model_handlers(str(tokenizer)),
    }


def model_handlers(root: str) -> Mapping[bytes, Handler]:
    """Return what every replica answers; ``root``: where its model comes from."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "vllm", "root": root}
    listed = orjson.dumps({"object": "list", "data": [model]})
    return {b"/health": lambda _: b"", b"/v1/models": lambda _: listed}


HOST: Final = "127.0.0.1"


async def serve(arguments: argparse.Namespace) -> None:
    """Run the replicas until SIGTERM or SIGINT."""
    clock = StreamClock.of_loop()
    async with AsyncExitStack() as stack:
        silent = [await _silent(clock, stack) for _ in range(arguments.replicas)]
        telling = []
        if arguments.prompts is not None:
            prompts = read_prompts(arguments.prompts)
            for _ in range(arguments.replicas):
                telling.append(await _telling(clock, prompts, arguments.tokenizer, stack))
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        gc.freeze()
        print(orjson.dumps({"silent": silent, "telling": telling}).decode(), flush=True)
        await stop.wait()


async def _silent(clock: StreamClock, stack: AsyncExitStack) -> dict[str, str]:
    """Start a replica that tells nothing of its cache; return where it is."""
    known = model_handlers("a-model-from-elsewhere")
    replica = Replica(clock=clock, handlers=known, note=lambda _: None)
    return {"url": await _listen(replica, stack)}


async def _telling(
    clock: StreamClock, prompts: Prompts, tokenizer: Path, stack: AsyncExitStack
) -> dict[str, str]:
    """Start a replica whose tokens and keys can be known; return where it is."""
    stream = KvEventPublisher(HOST)
    stream.start()
    stack.push_async_callback(stream.stop)
    replica = Replica(
        clock=clock,
        handlers=handlers(tokenizer, stream),
        note=Telling(prompts, stream).note,
    )
    told = {"kv_events": stream.endpoint, "kv_replay": stream.replay_endpoint}
    return {"url": await _listen(replica, stack), **told}


async def _listen(replica: Replica, stack: AsyncExitStack) -> str:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(replica), HOST, 0, backlog=1024)
    stack.callback(server.close)
    port = server.sockets[0].getsockname()[1]
    return f"http://{HOST}:{port}"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.overhead.fake_replicas", description=__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="of each kind")
    parser.add_argument("--tokenizer", type=Path, help="directory, for replicas that tell")
    parser.add_argument("--prompts", type=Path, help="what they know; none of them without it")
    uvloop.run(serve(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
