"""LMCache's workers, put together: what comes to the ports, and what is done with it."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
import zmq.asyncio

from router.config import LmcacheWorkersConfig
from router.fleet import Fleet
from router.lmcache.workers import words
from router.lmcache.workers.calls import WorkerCalls, is_listening
from router.lmcache.workers.control import WorkerControl
from router.lmcache.workers.holdings import Holdings
from router.lmcache.workers.ports import Ports
from router.lmcache.workers.registry import Workers
from warmroute_common.agent_protocol import UNREADABLE
from warmroute_common.api_errors import ApiError
from warmroute_common.config_reader import ConfigError
from warmroute_common.tasks import end_all

log = logging.getLogger("warmroute.lmcache")

_EVERY_S: Final = 1.0

_PUSHED: Final[msgspec.msgpack.Decoder[words.Pushed]] = msgspec.msgpack.Decoder(words.Pushed)
_ASKED: Final[msgspec.msgpack.Decoder[words.Asked]] = msgspec.msgpack.Decoder(words.Asked)
_HEARTBEAT: Final = msgspec.msgpack.Decoder(words.HeartbeatMsg)


class LmcacheWorkers:
    """The workers, between `listen` and `stop`."""

    def __init__(
        self,
        fleet: Fleet,
        config: LmcacheWorkersConfig,
        counts: Counter[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._counts = counts
        self._clock = clock
        self._wall_clock = wall_clock
        self._context = zmq.asyncio.Context()
        self.registry = Workers(fleet, config, counts)
        self._holdings = Holdings(fleet, self.registry)
        self.ports = Ports(config, self._context)
        self.control = WorkerControl(fleet, self.registry, WorkerCalls(self._context))
        self._task: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Listen; raise `ConfigError`, holding nothing, where a port cannot be listened on."""
        handlers = (self._take, self._answer, self._beat)
        try:
            self.ports.open(*(partial(self._counted, each) for each in handlers))
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._task = asyncio.create_task(self._watch(), name="lmcache-workers")
        numbers = ", ".join(f"{name} {port}" for name, port in self.ports.numbers.items())
        log.info(
            "LMCache inside vLLM registers at %s: %s", self._config.unauthenticated_host, numbers
        )

    async def stop(self) -> None:
        """End that."""
        await end_all([] if self._task is None else [self._task])
        await self.ports.close()
        # Calls that are under way end with it.
        self._context.destroy(linger=0)

    def listing(self) -> list[dict[str, Any]]:
        """Return the instances that have registered."""
        return self.control.listing(self._clock())

    # --- what comes

    def _take(self, frame: bytes) -> None:
        """Take a pushed message."""
        now_s, holdings = self._clock(), self._holdings
        match _PUSHED.decode(frame):
            case words.BatchedKVOperationMsg() as call:
                holdings.operations(call, now_s)
            case words.FullSyncBatchMsg() as call:
                holdings.sync_batch(call, now_s)
            case words.FullSyncEndMsg() as call:
                holdings.sync_ended(call, now_s)
            case words.DeRegisterMsg() as call:
                self.registry.deregister(call)

    def _answer(self, frame: bytes) -> msgspec.Struct:
        """Return the answer to a request at the reply port."""
        now_s, holdings = self._clock(), self._holdings
        match _ASKED.decode(frame):
            case words.RegisterMsg() as call:
                self.registry.register(call, now_s, self._wall_clock())
                url = self.ports.heartbeat_url(call.ip)
                return words.RegisterRetMsg(extra_config={"heartbeat_url": url})
            case words.BatchedP2PLookupMsg() as call:
                return words.BatchedP2PLookupRetMsg(layout_info=[holdings.peer_with(call, now_s)])
            case words.FullSyncStartMsg() as call:
                return holdings.sync_started(call, now_s)
            case words.FullSyncStatusMsg() as call:
                return holdings.sync_status(call, now_s)

    def _beat(self, frame: bytes) -> msgspec.Struct:
        """Return the answer to a heartbeat."""
        call = _HEARTBEAT.decode(frame)
        reason = self.registry.heartbeat(call, self._clock(), self._wall_clock())
        return words.HeartbeatRetMsg(commands=[] if reason is None else [words.full_sync(reason)])

    def _counted(
        self, handle: Callable[[bytes], msgspec.Struct | None], frame: bytes
    ) -> msgspec.Struct | None:
        """Handle a message; of one that cannot be used return what its sender is told."""
        try:
            return handle(frame)
        except ApiError as error:
            self._counts["worker_refused"] += 1
            log.error("an LMCache worker was refused: %s", error.message)
            return words.ErrorMsg(error=error.message)
        except UNREADABLE as error:
            self._counts["worker_malformed"] += 1
            log.debug("malformed message of an LMCache worker: %s", error)
            return words.ErrorMsg(error=str(error))
        except Exception:  # else the port's task would end unnoticed
            log.exception("a message of an LMCache worker could not be taken")
            return words.ErrorMsg(error="the router failed; see its log")

    # --- whether they live

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(_EVERY_S, self._config.timeout_s / 4))
            try:
                await self._probe()
                self.registry.expire(self._clock())
            except Exception:  # else the watching would end unnoticed
                log.exception("watching LMCache's workers failed")

    async def _probe(self) -> None:
        """See whether workers that send no heartbeats still listen: by default they send none."""
        began_s = self._clock()
        quiet = [
            each
            for each in self.registry.all()
            if not each.heartbeats and began_s - each.seen_s > self._config.timeout_s / 2
        ]
        for each, listens in zip(
            quiet, await asyncio.gather(*map(is_listening, quiet)), strict=True
        ):
            if listens:
                each.seen_s = max(each.seen_s, began_s)
