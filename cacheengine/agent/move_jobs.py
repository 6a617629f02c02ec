"""Moves of chunks into this replica, from being asked for to their end, and the latest of them."""

import asyncio
import logging
import uuid
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import msgspec

from cacheengine.agent.agent_requests import PeerError, wait_for_event, wait_for_promotion
from cacheengine.agent.peers import AgentHttpClient, PeerAgent
from cacheengine.engine import CacheEngine
from cacheengine.record import TransferMeter
from cacheengine.transfer import Fetch
from warmroute_common import agent_protocol as wire
from warmroute_common.addresses import split_host_port
from warmroute_common.api_errors import BadRequestError, OverloadedError

logger = logging.getLogger("vllm.warmroute")

MAX_FETCHES: Final = 4
"""Moves whose bytes flow at the same time; further moves wait for them."""
MAX_RUNNING: Final = 64
MAX_REMEMBERED: Final = 1000
MAX_CHUNKS: Final = 131_072
"""Of all moves that are running, unless one alone has more."""
_LONGEST_ERROR: Final = 1000
_PROMOTE_S: Final = 60.0
_STOP_S: Final = 8.0
_SHORTEST_PAUSE_S: Final = 0.002
_LONGEST_PAUSE_S: Final = 0.256


@dataclass(slots=True, eq=False, kw_only=True)
class MoveJob:
    """What is moved from where, and how far that is."""

    event_id: str
    request: wire.MoveRequest
    """Without the chunks: `keys` are those."""
    keys: list[bytes]
    """What the source's tier held of the prefix when it was asked; none of them once it is over."""
    source: PeerAgent
    address: tuple[str, int] | None
    """Where the source's chunks are fetched; None if the source is this replica."""
    fetch: Fetch | None = None
    """While it runs and after: its counts are live."""
    held_chunks: int = 0
    moved_bytes: int = 0
    error: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _final: wire.MoveStatus | None = None

    def status(self) -> wire.MoveStatus:
        """Return how it stands."""
        if self._final is not None:
            return self._final
        return wire.MoveStatus(
            event_id=self.event_id,
            state="running",
            asked_chunks=len(self.keys),
            arrived_chunks=self.fetch.received_chunks if self.fetch else 0,
            moved_bytes=0,
        )

    def end(self) -> None:
        """Keep of it only how it has ended: its keys are large, and calls may wait for it."""
        self._final = wire.MoveStatus(
            event_id=self.event_id,
            state="failed" if self.error else "done",
            asked_chunks=len(self.keys),
            arrived_chunks=self.held_chunks,
            moved_bytes=self.moved_bytes,
            error=self.error[:_LONGEST_ERROR],
        )
        self.keys, self.fetch = [], None
        self.over.set()


class MoveJobs:
    """Executes moves into this replica's tiers, and tells how they go.

    Belongs to the agent's loop; bytes flow on threads of its own.
    """

    def __init__(
        self,
        engine: CacheEngine,
        identity: wire.ReplicaIdentity,
        caller: AgentHttpClient,
        meter: TransferMeter,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._caller = caller
        self._meter = meter
        # How each has ended, and nothing else: a whole move takes two kilobytes.
        self._ended: OrderedDict[str, wire.MoveStatus] = OrderedDict()
        self._running: dict[asyncio.Task[None], MoveJob] = {}
        self._free_threads = asyncio.Semaphore(MAX_FETCHES)
        self._threads = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="kv-move")

    async def begin(self, request: wire.MoveRequest, keys: list[bytes]) -> MoveJob:
        """Ask the source what it has of ``keys``, and start to bring it here.

        Raises `BadRequestError` when that cannot work, `PeerError` when the source
        cannot be asked, `OverloadedError` when too many moves are running.
        """
        self._check_tier(request.tier, "this replica", self._engine.tier_info())
        if request.source.tier is None and not request.copy:
            raise BadRequestError(
                "name the 'tier' that the source must remove the chunks from, or copy"
            )
        self._check_room(0)
        source = PeerAgent(self._caller, request.source.agent_url)
        info = await source.info()
        address = self._check_source(request, info)
        held = (await source.lookup(keys, request.source.tier)).matched_tokens
        keys = keys[: held // self._identity.chunk_tokens]
        # Others may have begun while the source was asked.
        self._check_room(len(keys))
        move = MoveJob(
            event_id=uuid.uuid4().hex,
            request=msgspec.structs.replace(request, tokens=None, keys=None),
            keys=keys,
            source=source,
            address=address,
        )
        task = asyncio.create_task(self._run(move))
        self._running[task] = move
        task.add_done_callback(lambda done: self._running.pop(done, None))
        return move

    async def status(self, event_id: str, wait_s: float) -> wire.MoveStatus | None:
        """Say how a move stands when it is over, or after ``wait_s``.

        None: no such move is running or was among the latest.
        """
        if event_id in self._ended:
            return self._ended[event_id]
        for move in self._running.values():
            if move.event_id == event_id:
                await wait_for_event(move.over, wait_s)
                return move.status()
        return None

    async def stop(self) -> None:
        """End the moves that are running; what has arrived stays."""
        tasks = list(self._running)
        for task, move in self._running.items():
            if move.fetch is None:
                task.cancel()
            else:
                move.fetch.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- what may be moved ---

    def _check_room(self, chunks: int) -> None:
        if len(self._running) >= MAX_RUNNING:
            raise OverloadedError(f"{len(self._running)} moves are running; try again later")
        running = sum(len(move.keys) for move in self._running.values())
        if running and running + chunks > MAX_CHUNKS:
            raise OverloadedError(f"{running} chunks are being moved; try again later")

    def _check_tier(self, tier: str, replica: str, tiers: dict[str, wire.TierInfo]) -> None:
        if tier not in tiers:
            raise BadRequestError(f"{replica} has no {tier} tier, only {', '.join(tiers)}")

    def _check_source(
        self, request: wire.MoveRequest, info: wire.InstanceInfo
    ) -> tuple[str, int] | None:
        """Return where the source's chunks are fetched; None if they are here already."""
        if request.source.tier is not None:
            self._check_tier(request.source.tier, f"the source, {info.instance_id},", info.tiers)
        if info.incarnation == self._engine.incarnation:
            if request.source.tier == request.tier:
                raise BadRequestError(f"from and to the {request.tier} tier of the same replica")
            return None
        layout = self._engine.layout.fingerprint()
        if info.layout != layout:
            raise BadRequestError(
                f"the chunks of {info.instance_id} have layout {info.layout or 'unknown'}, those "
                f"here {layout}: model, weights, dtype, chunk_size, parallel sizes and hash seed "
                "must be equal"
            )
        if info.transfer_port is None:
            raise BadRequestError(
                f"{info.instance_id} gives no chunks away: set distributed_url in its configuration"
            )
        try:
            return split_host_port(request.source.transfer_address)
        except ValueError as error:
            raise BadRequestError(f"'transfer_address': {error}") from None

    def _remember(self, status: wire.MoveStatus) -> None:
        self._ended[status.event_id] = status
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    # --- how it is done ---

    async def _run(self, move: MoveJob) -> None:
        self._meter.add("moves")
        try:
            if move.address is None:
                await self._move_within(move)
            else:
                await self._fetch(move, move.address)
            if not move.request.copy:
                await self._drop_at_source(move)
        except asyncio.CancelledError:
            move.error = move.error or "given up: this replica stops"
        except Exception as error:
            logger.exception("a move of chunks failed")
            move.error = f"{type(error).__name__}: {error}"
        finally:
            if move.error:
                self._meter.add("moves_failed")
                logger.warning("a move of %d chunks failed: %s", len(move.keys), move.error)
            move.end()
            self._remember(move.status())

    async def _fetch(self, move: MoveJob, address: tuple[str, int]) -> None:
        async with self._free_threads:
            # Made now, not before the wait: it looks at what is here already.
            move.fetch = Fetch(
                self._engine,
                move.keys,
                address,
                self._meter,
                tier=move.request.tier,
                pin_s=move.request.pin_s,
                secret=self._caller.secret,
                timeout_s=move.request.stall_s,
            )
            loop = asyncio.get_running_loop()
            fetched = await loop.run_in_executor(self._threads, move.fetch.run)
        move.held_chunks = fetched.held_chunks
        move.moved_bytes = fetched.received_bytes
        move.error = fetched.error

    async def _move_within(self, move: MoveJob) -> None:
        """Between tiers of this replica: up by promotion; down only what was put there."""
        tier = move.request.tier
        if tier == "cpu":
            promotion = self._engine.promote(move.keys, pin_s=move.request.pin_s)
            await wait_for_promotion(promotion, _PROMOTE_S)
            move.moved_bytes = promotion.counts.promoted * self._identity.chunk_bytes
        else:
            await self._wait_for_puts(move.keys, tier)
        move.held_chunks = self._engine.held_in(move.keys, tier)
        if move.held_chunks < len(move.keys):
            how = "chunks are put into lower tiers when they are stored, and not again later"
            move.error = f"the {tier} tier has {move.held_chunks} of {len(move.keys)} chunks" + (
                f"; {how}" if tier != "cpu" else ""
            )

    async def _wait_for_puts(self, keys: list[bytes], tier: wire.TierName) -> None:
        """Return when none of the chunks is on its way to the lower tier any more."""
        pause_s = _SHORTEST_PAUSE_S
        while self._engine.is_putting(keys, tier):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _drop_at_source(self, move: MoveJob) -> None:
        """Have the source drop exactly what is here now."""
        keys, tier = move.keys[: move.held_chunks], move.request.source.tier
        if not keys or tier is None:
            return
        try:
            if move.address is None:
                await asyncio.to_thread(self._engine.clear, [tier], keys)
            else:
                await move.source.clear(keys, tier)
        except PeerError as error:
            kept = f"the source did not drop the {len(keys)} chunks that arrived: {error}"
            move.error = "; ".join(filter(None, [move.error, kept]))
