"""A whole simulated fleet in one process, from its start to its end."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from simulator.control import Control
from simulator.engine_storage import HASH_ALGORITHM
from simulator.openai_prompts import Prompts, make_tokenizer
from simulator.openai_server import CallReader, OpenAiServer, serve_app
from simulator.replica import Replica
from simulator.settings import Settings
from warmroute_common.keys import HashScheme


@contextlib.asynccontextmanager
async def fleet(settings: Settings) -> AsyncIterator[dict[str, Any]]:
    """Run a fleet for the block; yield where its parts are.

    Raises OSError for a port that is taken or a directory that cannot be used.
    """
    make_tokenizer(settings.tokenizer_directory)
    prompts = Prompts(
        HashScheme(HASH_ALGORITHM),
        settings.shape.block_tokens,
        settings.shape.blocks_per_chunk,
        seed=settings.seed,
    )
    reader = CallReader(settings, prompts)
    first = settings.first
    replicas = [
        Replica(settings, f"sim{first + number}", agent_port=port_of(settings.agent_port, number))
        for number in range(settings.replicas)
    ]
    began_s = time.monotonic()
    async with contextlib.AsyncExitStack() as undo:
        for number, each in enumerate(replicas):
            undo.push_async_callback(each.stop)
            each.start(began_s)
            runner, each.url = await serve_app(
                OpenAiServer(each, reader).app(), settings.host, port_of(settings.port, number)
            )
            undo.push_async_callback(runner.cleanup)
        runner, control_url = await serve_app(Control(replicas, prompts).app(), settings.host, 0)
        undo.push_async_callback(runner.cleanup)
        yield {
            "replicas": [
                {
                    "instance_id": each.instance_id,
                    "url": each.url,
                    "agent_url": each.agent_url,
                    "kv_events": each.stream.endpoint,
                    "kv_replay": each.stream.replay_endpoint,
                }
                for each in replicas
            ],
            "control_url": control_url,
            "tokenizer": str(settings.tokenizer_directory),
            "speed": settings.speed,
            "router_rates": settings.router_rates(),
        }


def port_of(first: int, number: int) -> int:
    """Return the port of a fleet's ``number``-th replica, counted from 0; 0: any free one."""
    return first + number if first else 0


async def run(settings: Settings, ready: Callable[[dict[str, Any]], None]) -> None:
    """Run a fleet until SIGINT or SIGTERM; call ``ready`` with where its parts are."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, ended.set)
    async with fleet(settings) as where:
        ready(where)
        await ended.wait()
