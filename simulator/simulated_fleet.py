"""The fleet's control server: what nobody outside a simulation could know."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import orjson
from aiohttp import web

from simulator.engine_storage import HASH_ALGORITHM
from simulator.model.estimate import Estimate, estimate
from simulator.model.machine_and_request import SimRequest
from simulator.openai_prompts import BadPromptError, Prompts, SimPrompt, make_tokenizer
from simulator.openai_server import CallReader, OpenAiServer, serve_app
from simulator.simulated_replica import SimulatedReplica
from simulator.simulator_settings import SimulatorSettings
from warmroute_common.keys import HashScheme

_BUSY_WEIGHT: Final = 0.1
"""How much the oracle minds the replica's time, which others wait for."""
_MAX_BODY_BYTES: Final = 64 * 1024**2
_PIN_S: Final = 10.0
_ARRIVAL_S: Final = 1.0
"""How long the oracle waits, by the clock, for a request that it was told would be sent."""


class ControlServer:
    """Answers with the true state of every replica."""

    def __init__(self, replicas: Sequence[SimulatedReplica], prompts: Prompts) -> None:
        self._replicas = replicas
        self._prompts = prompts
        self._asking = asyncio.Lock()
        self._sent_to: tuple[SimulatedReplica, int] | None = None
        """Where the last request goes, and how many had come there before."""

    def app(self) -> web.Application:
        """Return the application, to be served once."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/truth", self._truth),
                web.get("/requests", self._requests),
                web.post("/oracle", self._oracle),
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

    async def _oracle(self, request: web.Request) -> web.Response:
        try:
            body = orjson.loads(await request.read())
            output_tokens = int(body.get("output_tokens", 1))
            prompt = self._prompts.of_ids(body["token_ids"], output_tokens)
        except (
            BadPromptError,
            orjson.JSONDecodeError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            said = {"error": f"give token_ids, a list of token ids: {error}"}
            return web.Response(status=400, body=orjson.dumps(said))
        async with self._asking:
            # The truth includes what was decided before and is still on its way.
            await self._arrival()
            best, its = min(self._estimates(prompt), key=_cost)
            if body.get("sends", False):
                self._sent_to = (best, best.model.totals.requests)
        if body.get("prefetch", True):
            _prefetch(best, prompt)
        return _json(
            {
                "instance_id": best.instance_id,
                "url": best.url,
                "predicted_ttft_s": its.ttft_s,
                "busy_s": its.busy_s,
            }
        )

    async def _arrival(self) -> None:
        """Wait until the last request that was announced (``sends``) is at its replica."""
        if self._sent_to is None:
            return
        (replica, before), self._sent_to = self._sent_to, None
        deadline_s = asyncio.get_running_loop().time() + _ARRIVAL_S
        while replica.model.totals.requests == before:
            if asyncio.get_running_loop().time() > deadline_s:
                return
            await asyncio.sleep(0.001)

    def _estimates(self, prompt: SimPrompt) -> Sequence[tuple[SimulatedReplica, Estimate]]:
        found = []
        for each in self._replicas:
            each.bring_up_to_date()
            asked = SimRequest(
                id="",
                prompt_tokens=len(prompt.token_ids),
                output_tokens=len(prompt.output_ids),
                block_keys=prompt.block_keys,
                chunk_keys=prompt.chunk_keys,
            )
            found.append((each, estimate(each.model, asked, each.now_s())))
        return found


def _cost(candidate: tuple[SimulatedReplica, Estimate]) -> float:
    return candidate[1].ttft_s + _BUSY_WEIGHT * candidate[1].busy_s


def _prefetch(replica: SimulatedReplica, prompt: SimPrompt) -> None:
    """Begin to read from disk what the request will want."""
    engine, shape = replica.storage.engine, replica.settings.shape
    gpu_blocks = replica.model.cache.match(prompt.block_keys, len(prompt.block_keys))
    first = gpu_blocks * shape.block_tokens // shape.chunk_tokens
    keys = prompt.chunk_keys[first : len(prompt.token_ids) // shape.chunk_tokens]
    tiers = engine.match(keys)
    if any(tier != "cpu" for tier in tiers):
        engine.promote(keys[: len(tiers)], pin_s=_PIN_S)


def truth(replica: SimulatedReplica) -> dict[str, Any]:
    """Return the state of a replica as it is now, in tokens and model seconds."""
    model, totals, shape = replica.model, replica.model.totals, replica.settings.shape
    stats = replica.storage.engine.stats()
    tiers = replica.storage.engine.tier_info()
    moved = replica.storage.meter.stats()
    waiting = [*model.waiting, *(each for _, each in model.loading)]
    prefilling = [each for each in model.running if each.is_prefilling]
    item_bytes = replica.settings.chunk_bytes
    disk = tiers.get("disk")
    return {
        "instance_id": replica.instance_id,
        "now_s": replica.now_s(),
        "running": len(model.running),
        "waiting": len(waiting),
        "waiting_prefill_tokens": sum(each.remaining_prefill for each in [*waiting, *prefilling]),
        "held_tokens": {
            "gpu": model.cache.cached_blocks * shape.block_tokens,
            "gpu_in_use": model.cache.held_blocks * shape.block_tokens,
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


# TODO of simulator.simulated_fleet: A whole simulated fleet in one process, from its start to its end.


@contextlib.asynccontextmanager
async def fleet(settings: SimulatorSettings) -> AsyncIterator[dict[str, Any]]:
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
        SimulatedReplica(
            settings, f"sim{first + number}", agent_port=port_of(settings.agent_port, number)
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
        runner, control_url = await serve_app(
            ControlServer(replicas, prompts).app(), settings.host, 0
        )
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


async def run(settings: SimulatorSettings, ready: Callable[[dict[str, Any]], None]) -> None:
    """Run a fleet until SIGINT or SIGTERM; call ``ready`` with where its parts are."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, ended.set)
    async with fleet(settings) as where:
        ready(where)
        await ended.wait()
