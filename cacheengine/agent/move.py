"""One move, as it goes."""

import asyncio
from dataclasses import dataclass, field

from cacheengine import wire
from cacheengine.agent.peer import PeerAgent
from cacheengine.transfer import Fetch


@dataclass(slots=True, eq=False, kw_only=True)
class Move:
    """What is moved from where, and how far that is."""

    event_id: str
    keys: list[bytes]
    """What the source's tier held of the prefix when it was asked."""
    source: PeerAgent
    address: tuple[str, int] | None
    """Where the source's chunks are fetched; None if the source is this replica."""
    old_tier: wire.TierName | None
    """None in a copy that takes what any tier holds."""
    new_tier: wire.TierName
    copy: bool
    pin_s: float
    stall_s: float
    fetch: Fetch | None = None
    """While it runs and after: its counts are live."""
    held_chunks: int = 0
    moved_bytes: int = 0
    error: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def status(self) -> wire.MoveStatus:
        """Return how it stands."""
        state: wire.MoveState = "failed" if self.error else "done"
        is_over = self.over.is_set()
        arrived = self.fetch.received_chunks if self.fetch else 0
        return wire.MoveStatus(
            event_id=self.event_id,
            state=state if is_over else "running",
            asked_chunks=len(self.keys),
            arrived_chunks=self.held_chunks if is_over else arrived,
            moved_bytes=self.moved_bytes if is_over else 0,
            error=self.error,
        )
