"""Prefetches that start before a request's tokens are known, or before it has come at all.

What the session's last prompt had, and now lies only on disk or remote at the
session's home, is promoted when its next turn is accepted; with ``ahead``,
shortly before that turn is due. Nobody waits for these.
"""

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from router.config import RouterConfig
from router.fleet import Decision, Fleet, Replica, Rhythms, State
from router.residency import Tier, keys64
from router.staging.prefetch import Prefetcher
from router.staging.session_chains import SessionChains

MAX_UNDER_WAY: Final = 256
"""Calls to agents at once; a prefetch beyond is left out: it would only have been early."""
MAX_WAITED_FOR: Final = 10_000
"""Sessions whose next turn is due or has been prefetched for; there is no more prefetch beyond."""
_SLOW: Final = (Tier.DISK, Tier.REMOTE)


class Occasion(StrEnum):
    """When a prefetch was started."""

    EARLY = "early"
    """When the request was accepted, before its tokens were known."""
    AHEAD = "ahead"
    """Before the request came."""


class Use(StrEnum):
    """Whether the request for which was prefetched came to that replica in time."""

    USED = "used"
    UNUSED = "unused"


@dataclass(frozen=True, slots=True)
class _Asked:
    occasion: Occasion
    slot: int
    until_s: float


class EarlyPrefetch:
    """Remembers sessions' chains and rhythms, and prefetches by them. Belongs to one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        prefetcher: Prefetcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pin_s = config.prefetch.pin_s
        self._early = config.prefetch.enabled and config.prefetch.early
        self._ahead = config.prefetch.enabled and config.prefetch.ahead
        self._fleet = fleet
        self._prefetcher = prefetcher
        self._clock = clock
        ttl_s = config.sessions.ttl_s
        self.chains = SessionChains(config.prefetch.session_keys_bytes, ttl_s)
        self.rhythms = Rhythms(config.sessions.max_sessions, ttl_s)
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._counts: Counter[tuple[Occasion, Use]] = Counter()

    @contextlib.contextmanager
    def turn(self, session: str | None) -> Iterator[None]:
        """Start a prefetch for a request of which only the session is known yet.

        The block is to end with its answer: from then on the next is waited for.
        """
        if session is None:
            yield
            return
        if self._ahead:
            self._cancel_timer(session)
            self.rhythms.came(session, self._clock())
        if self._early:
            self._ask(session, Occasion.EARLY, self._pin_s)
        try:
            yield
        finally:
            if self._ahead:
                self._wait_for_next(session)

    def chosen(self, decision: Decision) -> None:
        """Note where a session's turn goes, and which chunks it has there."""
        session = decision.plan.session
        if session is None or not decision.prompt_tokens or not (self._early or self._ahead):
            return
        now_s = self._clock()
        asked = self._asked.pop(session, None)
        if asked is not None:
            is_used = asked.slot == decision.plan.slot and now_s <= asked.until_s
            self._counts[asked.occasion, Use.USED if is_used else Use.UNUSED] += 1
        replica = self._fleet.replicas[decision.replica_id]
        keys: Sequence[bytes] = ()
        if replica.has_agent and replica.shape is not None:
            step = replica.shape.blocks_per_chunk
            keys = decision.plan.chain[step - 1 :: step]
        self.chains.note(session, replica.id, keys, now_s)

    def counts(self) -> dict[tuple[str, str], int]:
        """Return how many of these prefetches were of use, and how many not."""
        self._expire(self._clock())
        return {(when, use): self._counts[when, use] for when in Occasion for use in Use}

    async def stop(self) -> None:
        """Start no more, and end the calls that are under way."""
        self._early = self._ahead = False
        for session in list(self._timers):
            self._cancel_timer(session)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _wait_for_next(self, session: str) -> None:
        expected = self.rhythms.ended(session, self._clock())
        self._cancel_timer(session)
        if expected is not None and len(self._timers) < MAX_WAITED_FOR:
            loop = asyncio.get_running_loop()
            pin_s = self._pin_s + expected.pin_s
            self._timers[session] = loop.call_later(expected.in_s, self._is_due, session, pin_s)

    def _is_due(self, session: str, pin_s: float) -> None:
        del self._timers[session]
        self._ask(session, Occasion.AHEAD, pin_s)

    def _cancel_timer(self, session: str) -> None:
        timer = self._timers.pop(session, None)
        if timer is not None:
            timer.cancel()

    def _ask(self, session: str, occasion: Occasion, pin_s: float) -> None:
        now_s = self._clock()
        self._expire(now_s)
        is_full = len(self._tasks) >= MAX_UNDER_WAY or len(self._asked) >= MAX_WAITED_FOR
        if session in self._asked or is_full:
            return
        found = self._slow_at_home(session, now_s)
        if found is None:
            return
        replica, keys = found
        self._asked[session] = _Asked(occasion, replica.slot, now_s + pin_s)
        promoting = self._prefetcher.promote(replica.id, keys, wait_s=0.0, pin_s=pin_s)
        task: asyncio.Task[object] = asyncio.create_task(promoting)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _slow_at_home(self, session: str, now_s: float) -> tuple[Replica, list[bytes]] | None:
        """Return a session's home and those of its chunks that lie only on disk or remote there."""
        chain = self.chains.get(session, now_s)
        if chain is None:
            return None
        replica = self._fleet.replicas[chain.replica_id]
        is_home = replica.slot == self._fleet.sessions.home(session, now_s)
        if not is_home or replica.state is not State.UP or not replica.has_agent:
            return None
        keys = chain.keys()
        # Each key is a block's too, the last of its chunk: so it tells of the GPU as well.
        match = self._fleet.index.match(replica.slot, keys64(keys))
        slow = [
            key for run in match.runs if run.tier in _SLOW for key in keys[run.start : run.stop]
        ]
        return (replica, slow) if slow else None

    def _expire(self, now_s: float) -> None:
        """Count what was asked for and not come to be used, the oldest first."""
        while self._asked:
            session, asked = next(iter(self._asked.items()))
            if asked.until_s >= now_s:
                return
            del self._asked[session]
            self._counts[asked.occasion, Use.UNUSED] += 1
