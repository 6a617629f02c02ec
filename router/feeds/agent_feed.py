"""Following one replica's agent: ``/info``, a snapshot, then every change by long polling."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import msgspec

from router.feeds.pause import Pause
from router.fleet import Fleet, Replica
from router.staging import AgentClient, AgentError, HistoryGoneError
from warmroute_common.agent_protocol import EventBatch, InstanceInfo, KeyEvent, Snapshot

log = logging.getLogger("warmroute.feeds")

_POLL_S: Final = 20.0
_POLL_GAP_S: Final = 0.05
"""From news of an agent to the next question: the first is told at once, and what follows it
comes together. Asking for every change costs both ends more than all else that they do."""
_POLLS_PER_S: Final = 500.0
"""To all agents together: at 0.3 ms of CPU each, some 15% of the router's one core."""
_INFO_EVERY_S: Final = 30.0
_KEY_BYTES: Final = 8
_PIECE_KEYS: Final = 5_000
"""Keys applied before others may run: some milliseconds."""


def poll_gap_s(agents: int) -> float:
    """Return how long to leave each of so many agents alone after it has answered."""
    return max(_POLL_GAP_S, agents / _POLLS_PER_S)


class AgentFeed:
    """What one replica's agent tells: the replica's identity, and its lower tiers."""

    def __init__(
        self,
        fleet: Fleet,
        replica: Replica,
        client: AgentClient,
        told: Callable[[InstanceInfo, bool], None],
        gap_s: Callable[[], float],
    ) -> None:
        """``told`` hears each ``/info`` that the fleet has taken over, and whether the replica
        has started anew; ``gap_s`` says that of `poll_gap_s`, as it is now.
        """
        self._fleet = fleet
        self._replica = replica
        self._client = client
        self._told = told
        self._gap_s = gap_s
        self.tried = asyncio.Event()
        """Set when the agent was asked once, with or without success."""

    async def run(self) -> None:
        """Follow the agent, and begin anew whenever that breaks off; without end."""
        pause = Pause()
        while True:
            try:
                await self._follow(pause)
            except HistoryGoneError:
                log.info("%s: events were lost; taking a new snapshot", self._replica.id)
            except (AgentError, ValueError) as error:  # ValueError: keys that are not whole
                if pause.is_first:
                    log.warning("%s: its agent does not answer: %s", self._replica.id, error)
            except Exception:  # else the following would end unnoticed
                log.exception("%s: following its agent failed", self._replica.id)
            finally:
                self.tried.set()
            await asyncio.sleep(pause.next_s())

    async def _follow(self, pause: Pause) -> None:
        """Take a snapshot and then every change; raise `AgentError` when that breaks off."""
        await self._take_info()
        snapshot = await self._client.snapshot()
        incarnation, after = snapshot.incarnation, snapshot.seq
        if self._replica.incarnation != incarnation:
            raise HistoryGoneError("the replica started anew between /info and /snapshot")
        await self._take_snapshot(snapshot)
        self.tried.set()
        pause.reset()
        log.info("%s: following its agent at %s", self._replica.id, self._client.base_url)
        info_due_s = time.monotonic() + _INFO_EVERY_S
        while True:
            batch = await self._client.events(after, incarnation, _POLL_S)
            if batch.incarnation != incarnation:
                raise HistoryGoneError("the replica started anew")
            await self._take_events(batch)
            after = batch.seq
            if time.monotonic() >= info_due_s:
                await self._take_info()
                info_due_s = time.monotonic() + _INFO_EVERY_S
            # After an empty answer too: an agent that answers at once would be asked without end.
            await asyncio.sleep(self._gap_s())

    async def _take_info(self) -> None:
        info = await self._client.info()
        self._told(info, self._fleet.apply_info(self._replica.id, info))

    async def _take_snapshot(self, snapshot: Snapshot) -> None:
        """Replace what is known of the lower tiers: by nothing, then by the snapshot in pieces.

        Requests placed between the pieces see less than there is. What changes at the agent
        meanwhile is asked for when the snapshot is whole, by the same task, and so wins over it.
        """
        self._fleet.apply_snapshot(self._replica.id, msgspec.structs.replace(snapshot, tiers={}))
        stored = [KeyEvent(tier, True, keys) for tier, keys in snapshot.tiers.items()]
        await self._take_events(
            EventBatch(incarnation=snapshot.incarnation, seq=snapshot.seq, events=stored)
        )

    async def _take_events(self, batch: EventBatch) -> None:
        """Apply events in their order, with a turn for others after every `_PIECE_KEYS`.

        Between the pieces nothing else changes the lower tiers of this replica: of its KV
        events, which another task applies, only those of the GPU count, as there is an agent.
        """
        room_bytes = _PIECE_KEYS * _KEY_BYTES
        for event in batch.events:
            at = 0
            while at < len(event.keys):
                keys = event.keys[at : at + room_bytes]
                piece = [KeyEvent(event.tier, event.stored, keys)]
                self._fleet.apply_events(
                    self._replica.id, msgspec.structs.replace(batch, events=piece)
                )
                at += len(keys)
                room_bytes -= len(keys)
                if room_bytes <= 0:
                    await asyncio.sleep(0)
                    room_bytes = _PIECE_KEYS * _KEY_BYTES
