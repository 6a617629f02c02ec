"""What has become of requests, and when which replica was in trouble."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from bench.soak.clients.talk import Manner, Request
from bench.soak.faults import Kind
from bench.soak.settings import instance_id

_SLACK_S: Final = 1.0
_EXAMPLES: Final = 20


class Outcome(StrEnum):
    """How a request ended, for its client."""

    WHOLE = "whole"
    """Every byte came, and every one was right."""
    LEFT = "left"
    """The client closed the connection; what had come was right."""
    TIMED_OUT = "timed out"
    """408: the client had not sent its body."""
    CUT = "cut"
    """It broke off and said so, and its replica had been in trouble meanwhile."""
    LOST = "lost"
    """Nothing of an answer came, although another replica was up."""
    WRONG = "wrong"
    """A byte was wrong, or an answer that had broken off looked like a whole one."""
    HELD = "held"
    """Its body never came whole, and it was waited for all the same."""
    UNEXPLAINED = "cut without reason"
    """It broke off, and its replica was not in trouble."""


BAD: Final = (Outcome.LOST, Outcome.WRONG, Outcome.UNEXPLAINED, Outcome.HELD)


@dataclass(kw_only=True)
class Trouble:
    """When a replica was in trouble, by the clock."""

    replica: int
    kind: Kind
    from_s: float
    to_s: float | None = None


@dataclass(kw_only=True)
class Ended:
    """A request's end."""

    request: Request
    outcome: Outcome
    detail: str = ""
    replica_id: str | None = None


@dataclass(kw_only=True)
class Ledger:
    """Counts of ends, the bad ones in words, and all troubles."""

    counts: Counter[tuple[Manner, bool, Outcome]] = field(default_factory=Counter)
    """By manner, whether streamed, and outcome."""
    bad: list[str] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)

    def note(self, ended: Ended) -> None:
        """Count a request that has ended."""
        request = ended.request
        self.counts[request.manner, request.streamed, ended.outcome] += 1
        if ended.outcome in BAD and len(self.bad) < _EXAMPLES:
            self.bad.append(
                f"{request.request_id} ({request.manner}, "
                f"{'streamed' if request.streamed else 'whole'}, {ended.replica_id}): "
                f"{ended.outcome}: {ended.detail}"
            )

    def total(self, *outcomes: Outcome) -> int:
        """Return how many ended so."""
        return sum(count for (_, _, each), count in self.counts.items() if each in outcomes)

    @contextmanager
    def trouble(self, replica: int, kind: Kind) -> Iterator[None]:
        """Note that a replica is in trouble while the block runs."""
        trouble = Trouble(replica=replica, kind=kind, from_s=time.monotonic())
        self.troubles.append(trouble)
        try:
            yield
        finally:
            trouble.to_s = time.monotonic()

    def was_in_trouble(self, replica_id: str | None, from_s: float, to_s: float) -> bool:
        """Whether a replica was, then; None: whether any was."""
        return any(
            (replica_id is None or replica_id == instance_id(each.replica))
            and each.from_s - _SLACK_S <= to_s
            and (each.to_s is None or from_s <= each.to_s + _SLACK_S)
            for each in self.troubles
        )
