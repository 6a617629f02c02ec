"""A simulated fleet in one process, with the control server that reports its true state.

`run` serves a fleet until a signal; `fleet` does so for a block of code. Each replica has an
OpenAI server, an agent and a stream of KV events. The control server answers ``/truth`` (the state
of every replica) and ``/requests`` (the finished requests): facts that no router can know.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import orjson
from aiohttp import web

from simulator.engine_storage import HASH_ALGORITHM
from simulator.nixl import NixlNetwork
from simulator.openai_prompts import Prompts, make_tokenizer
from simulator.openai_server import CallReader, OpenAiServer, serve_app
from simulator.simulated_replica import SimulatedReplica
from simulator.simulator_settings import SimulatorSettings
from warmroute_common.keys import HashScheme


class ControlServer:
    """Serves the true state of every replica."""

    def __init__(self, replicas: Sequence[SimulatedReplica]) -> None:
        self._replicas = replicas

    def app(self) -> web.Application:
        """Return the application, to be served once."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/truth", self._truth),
                web.get("/requests", self._requests),
            ]
        )
        return app

    async def _truth(self, request: web.Request) -> web.Response:
        for each in self._replicas:
            each.bring_up_to_date()
        return _json([truth(each) for each in self._replicas])

    async def _requests(self, request: web.Request) -> web.Response:
        for each in self._replicas:
            each.bring_up_to_date()
        log = [entry for each in self._replicas for entry in each.log]
        log.sort(key=lambda entry: entry["arrived_s"])
        return _json(log)


def truth(replica: SimulatedReplica) -> dict[str, Any]:
    """Return the present state of a replica, in tokens and model seconds."""
    model, totals, shape = replica.model, replica.model.totals, replica.settings.shape
    stats = replica.storage.engine.stats()
    tiers = replica.storage.engine.tier_info()
    moved = replica.storage.meter.stats()
    waiting = [*model.waiting, *(each for _, each in model.loading)]
    item_bytes = replica.settings.chunk_bytes
    disk = tiers.get("disk")
    return {
        "instance_id": replica.instance_id,
        "now_s": replica.now_s(),
        "running": len(model.running),
        "waiting": len(waiting),
        "held_tokens": {
            "gpu": model.cache.cached_blocks * shape.block_tokens,
            "gpu_in_use": model.cache.held_blocks * shape.block_tokens,
            "gpu_lent": sum(each.num_blocks for each in model.lent) * shape.block_tokens,
            "cpu": tiers["cpu"].used_bytes // item_bytes * shape.chunk_tokens,
            "disk": 0
            if disk is None
            else (stats.disk.puts - stats.disk.evictions) * shape.chunk_tokens,
        },
        "cached_tokens": {
            "gpu": totals.cached.gpu,
            "cpu": totals.cached.cpu,
            "disk": totals.cached.disk,
        },
        "prompt_tokens": totals.queries,
        "prefilled_tokens": totals.prefilled,
        "pulled_tokens": totals.pulled,
        "generated_tokens": totals.generated,
        "requests": totals.requests,
        "finished": totals.finished,
        "cancelled": totals.cancelled,
        "bytes_per_token": item_bytes / shape.chunk_tokens,
        "promoted_bytes": stats.promoted_bytes,
        "prefetch_unused_bytes": stats.prefetch_unused_bytes,
        "put_drops": stats.lower_tiers.put_drops,
        "store_drops": stats.store_drops,
        "received_bytes": moved.received_bytes,
        "sent_bytes": moved.sent_bytes,
        "read_bytes_per_s": 0.0 if disk is None else disk.read_bytes_per_s,
        "wrong_chunks": replica.wrong_chunks,
        "max_lag_s": replica.max_lag_s,
    }


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


@contextlib.asynccontextmanager
async def fleet(settings: SimulatorSettings) -> AsyncIterator[dict[str, Any]]:
    """Run a fleet for the block; yield the addresses of its servers.

    Raises OSError if a port is in use or the directory cannot be used.
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
    network = NixlNetwork() if settings.nixl else None
    replicas = [
        SimulatedReplica(
            settings,
            f"sim{first + number}",
            agent_port=port_of(settings.agent_port, number),
            nixl=network,
        )
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
        runner, control_url = await serve_app(ControlServer(replicas).app(), settings.host, 0)
        undo.push_async_callback(runner.cleanup)
        yield {
            "replicas": [
                {
                    "instance_id": each.instance_id,
                    "url": each.url,
                    "agent_url": each.agent_url,
                    "kv_events": each.stream.endpoint,
                    "kv_replay": each.stream.replay_endpoint,
                    "nixl_role": "both" if settings.nixl else None,
                }
                for each in replicas
            ],
            "control_url": control_url,
            "tokenizer": str(settings.tokenizer_directory),
            "speed": settings.speed,
            "router_rates": settings.router_rates(),
        }


def port_of(first: int, number: int) -> int:
    """Return the port of replica ``number``, counted from 0; 0 stands for any free port."""
    return first + number if first else 0


async def run(settings: SimulatorSettings, ready: Callable[[dict[str, Any]], None]) -> None:
    """Run a fleet until SIGINT or SIGTERM; call ``ready`` with the addresses of its servers."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, ended.set)
    async with fleet(settings) as where:
        ready(where)
        await ended.wait()
