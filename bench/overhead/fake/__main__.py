"""The process of the fake replicas: ``python -m bench.overhead.fake``, until SIGTERM.

Prints one line of JSON when they listen.
"""

import argparse
import asyncio
import gc
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import orjson
import uvloop

from bench.overhead.fake.clock import StreamClock
from bench.overhead.fake.http import Connection, Replica
from bench.overhead.fake.telling import (
    Prompts,
    Telling,
    handlers,
    model_handlers,
    read_prompts,
)
from simulator.kv_stream import KvStream

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
    stream = KvStream(HOST)
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
    parser = argparse.ArgumentParser(prog="bench.overhead.fake", description=__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="of each kind")
    parser.add_argument("--tokenizer", type=Path, help="directory, for replicas that tell")
    parser.add_argument("--prompts", type=Path, help="what they know; none of them without it")
    uvloop.run(serve(parser.parse_args(argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
