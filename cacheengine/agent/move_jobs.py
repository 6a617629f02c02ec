"""Jobs that move chunks into this replica, and the status of the latest ones.

A job asks the source replica which chunks of a prefix it holds, fetches them, and has the source
drop them unless it is a copy. If the source is this replica, the job moves chunks between tiers.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import msgspec

from cacheengine.agent.agent_requests import PeerError, wait_for_event, wait_for_promotion
from cacheengine.agent.peers import AgentHttpClient, PeerAgent
from cacheengine.engine.engine import CacheEngine
from cacheengine.record import TransferMeter
from cacheengine.transfer.fetch import Fetch
from cacheengine.transfer.protocol import (
    Channel,
    PeerGoneError,
    ProtocolError,
    TransferRefusedError,
    greet,
)
from warmroute_common import agent_protocol as wire
from warmroute_common.addresses import split_host_port
from warmroute_common.api_errors import BadRequestError, OverloadedError

logger = logging.getLogger("vllm.warmroute")

MAX_FETCHES: Final = 4
"""Jobs that transfer at the same time; further jobs wait for them."""
MAX_RUNNING: Final = 64
MAX_REMEMBERED: Final = 1000
MAX_CHUNKS: Final = 131_072
"""Limit of the chunks of all running jobs; a single job may have more."""
_MAX_ERROR_CHARS: Final = 1000
_PROMOTE_S: Final = 60.0
_PROOF_S: Final = 5.0
PROVEN_S: Final = 30.0
"""How long a source's proof counts; a stranger hardly gets its address within that time."""
_MOST_PROVEN: Final = 1024
_STOP_S: Final = 8.0
_MIN_PAUSE_S: Final = 0.002
_MAX_PAUSE_S: Final = 0.256


def _transfer_address(source: wire.MoveSource) -> tuple[str, int]:
    try:
        return split_host_port(source.transfer_address)
    except ValueError as error:
        raise BadRequestError(f"'transfer_address': {error}") from None


@dataclass(slots=True, eq=False, kw_only=True)
class MoveJob:
    """One job: its chunks, its source and its progress."""

    event_id: str
    request: wire.MoveRequest
    """The request without its tokens and keys; see `keys`."""
    keys: list[bytes]
    """The chunks that the source's tier held at the job's start; empty once the job has ended."""
    source: PeerAgent
    address: tuple[str, int] | None
    """The source's `TransferServer`; None if the source is this replica."""
    fetch: Fetch | None = None
    """The running fetch, whose counts are current."""
    held_chunks: int = 0
    moved_bytes: int = 0
    note: str = ""
    """Why there is nothing to move, if so."""
    error: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _final: wire.MoveStatus | None = None

    def status(self) -> wire.MoveStatus:
        """Return the job's current or final status."""
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
        """Keep only the final status: keys are large, and calls may still wait for the job."""
        self._final = wire.MoveStatus(
            event_id=self.event_id,
            state="failed" if self.error else "done",
            asked_chunks=len(self.keys),
            arrived_chunks=self.held_chunks,
            moved_bytes=self.moved_bytes,
            error=self.error[:_MAX_ERROR_CHARS],
            note=self.note,
        )
        self.keys, self.fetch = [], None
        self.ended.set()


class MoveJobs:
    """Runs jobs that move chunks into this replica's tiers, and reports their status.

    Belongs to the agent's event loop; the transfers run on its own threads.
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
        # Only the final status of each job: a whole job takes two kilobytes.
        self._ended: OrderedDict[str, wire.MoveStatus] = OrderedDict()
        self._running: dict[asyncio.Task[None], MoveJob] = {}
        # Until when a source's proof counts: agent and transfer address.
        self._proven: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._free_threads = asyncio.Semaphore(MAX_FETCHES)
        self._threads = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="kv-move")

    async def begin(self, request: wire.MoveRequest, keys: list[bytes]) -> MoveJob:
        """Ask the source which of ``keys`` it has, and start to move them here.

        Raises `BadRequestError` if that is impossible, `PeerError` if the source cannot be reached,
        and `OverloadedError` if too many jobs are running. Without a transfer address the source is
        this replica.
        """
        self._check_tier(request.tier, "this replica", self._engine.tier_info())
        if request.source.tier is None and not request.copy:
            raise BadRequestError(
                "give the source's 'tier' from which to remove the chunks, or set 'copy'"
            )
        self._check_load(0)
        source = PeerAgent(self._caller, request.source.agent_url)
        held, address = await self._held_at_source(request, keys, source)
        nothing = ""
        if not keys:
            nothing = f"less than a chunk of {self._identity.chunk_tokens} tokens is never kept"
        elif not held:
            nothing = f"the source's tier ({request.source.tier or 'any'}) has none of it"
        keys = keys[:held]
        # Other jobs may have started while the source was asked.
        self._check_load(len(keys))
        move = MoveJob(
            event_id=uuid.uuid4().hex,
            request=msgspec.structs.replace(request, tokens=None, keys=None),
            keys=keys,
            source=source,
            address=address,
            note=nothing and f"nothing to move: {nothing}",
        )
        task = asyncio.create_task(self._run(move))
        self._running[task] = move
        task.add_done_callback(lambda done: self._running.pop(done, None))
        return move

    async def _held_at_source(
        self, request: wire.MoveRequest, keys: list[bytes], source: PeerAgent
    ) -> tuple[int, tuple[str, int] | None]:
        """Return how many chunks the source holds, and where to fetch them unless it is here."""
        tier = request.source.tier
        if not request.source.transfer_address:
            self._check_within(request)
            if tier is None:
                return len(self._engine.match(keys)), None
            return self._engine.held_in(keys, tier), None
        address = _transfer_address(request.source)
        if self._caller.secret is not None:
            await self._have_proven(request.source, address)
        is_here = self._check_source(request, await source.info())
        held = (await source.lookup(keys, tier)).matched_tokens // self._identity.chunk_tokens
        return held, None if is_here else address

    async def status(self, event_id: str, wait_s: float) -> wire.MoveStatus | None:
        """Return a job's status when it has ended, or after ``wait_s``.

        Returns None for a job that neither runs nor is one of the latest.
        """
        if event_id in self._ended:
            return self._ended[event_id]
        for move in self._running.values():
            if move.event_id == event_id:
                await wait_for_event(move.ended, wait_s)
                return move.status()
        return None

    async def stop(self) -> None:
        """End the running jobs; chunks that arrived stay."""
        tasks = list(self._running)
        for task, move in self._running.items():
            if move.fetch is None:
                task.cancel()
            else:
                move.fetch.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- checks ---

    def _check_load(self, chunks: int) -> None:
        if len(self._running) >= MAX_RUNNING:
            raise OverloadedError(f"{len(self._running)} moves are running; try again later")
        running = sum(len(move.keys) for move in self._running.values())
        if running and running + chunks > MAX_CHUNKS:
            raise OverloadedError(f"{running} chunks are being moved; try again later")

    def _check_tier(self, tier: str, replica: str, tiers: dict[str, wire.TierInfo]) -> None:
        if tier not in tiers:
            raise BadRequestError(f"{replica} has no {tier} tier; it has {', '.join(tiers)}")

    async def _have_proven(self, source: wire.MoveSource, address: tuple[str, int]) -> None:
        """Check a source unless it has proven a short time ago that it is of the fleet."""
        proven = (source.agent_url, source.transfer_address)
        if self._proven.get(proven, 0.0) > time.monotonic():
            return
        await asyncio.to_thread(self._check_is_of_fleet, source, address)
        self._proven[proven] = time.monotonic() + PROVEN_S
        self._proven.move_to_end(proven)
        if len(self._proven) > _MOST_PROVEN:
            self._proven.popitem(last=False)

    def _check_is_of_fleet(self, source: wire.MoveSource, address: tuple[str, int]) -> None:
        """Have the source prove that it knows the fleet secret, before its agent is shown a token.

        A caller that knows the secret could otherwise have it shown to any server.
        """
        try:
            if urlsplit(source.agent_url).hostname != address[0].lower():
                raise BadRequestError("'agent_url' and 'transfer_address' must have the same host")
            channel = Channel.connect(address, timeout_s=_PROOF_S, connect_s=_PROOF_S)
            with contextlib.closing(channel):
                greet(channel, self._engine.layout.fingerprint(), 1, self._caller.secret)
        except TransferRefusedError as error:
            raise BadRequestError(f"{source.transfer_address}: {error}") from None
        except (PeerGoneError, ProtocolError, OSError, ValueError) as error:
            raise PeerError(f"{source.transfer_address}: {error}") from None

    def _check_within(self, request: wire.MoveRequest) -> None:
        if request.source.tier is not None:
            self._check_tier(request.source.tier, "this replica", self._engine.tier_info())
        if request.source.tier == request.tier:
            raise BadRequestError(
                f"the source and the destination are both this replica's {request.tier} tier"
            )

    def _check_source(self, request: wire.MoveRequest, info: wire.InstanceInfo) -> bool:
        """Whether the source is this replica."""
        if request.source.tier is not None:
            self._check_tier(request.source.tier, f"the source, {info.instance_id},", info.tiers)
        if info.incarnation == self._engine.incarnation:
            self._check_within(request)
            return True
        layout = self._engine.layout.fingerprint()
        if info.layout != layout:
            raise BadRequestError(
                f"the chunks of {info.instance_id} have layout {info.layout or 'unknown'}, those "
                f"here {layout}: model, weights, dtype, chunk_size, parallel sizes and hash seed "
                "must be equal"
            )
        if info.transfer_port is None:
            raise BadRequestError(
                f"{info.instance_id} does not serve chunks: set its distributed_url"
            )
        return False

    def _remember(self, status: wire.MoveStatus) -> None:
        self._ended[status.event_id] = status
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    # --- running a job ---

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
            move.error = move.error or "cancelled, because this replica stops"
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
            # Created after the wait, because it checks which chunks are here already.
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
        """Move between tiers of this replica.

        Promotes chunks to the CPU tier. A lower tier only gets chunks when they are stored, so the
        job waits for writes in progress and reports the missing chunks.
        """
        tier = move.request.tier
        if tier == "cpu":
            promotion = self._engine.promote(move.keys, pin_s=move.request.pin_s)
            await wait_for_promotion(promotion, _PROMOTE_S)
            move.moved_bytes = promotion.counts.promoted * self._identity.chunk_bytes
        else:
            await self._wait_for_puts(move.keys, tier)
        move.held_chunks = self._engine.held_in(move.keys, tier)
        if move.held_chunks < len(move.keys):
            how = "chunks are written to lower tiers only when they are stored"
            move.error = f"the {tier} tier has {move.held_chunks} of {len(move.keys)} chunks" + (
                f"; {how}" if tier != "cpu" else ""
            )

    async def _wait_for_puts(self, keys: list[bytes], tier: wire.TierName) -> None:
        """Wait until the lower tier has written or dropped the chunks."""
        pause_s = _MIN_PAUSE_S
        while self._engine.is_putting(keys, tier):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _drop_at_source(self, move: MoveJob) -> None:
        """Have the source drop exactly the chunks that are here now."""
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
