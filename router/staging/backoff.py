"""Agents (and LMCache servers) that hang or fail are left alone, each time for longer, until they
answer again.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

log = logging.getLogger("warmroute.staging")

_FIRST_S: Final = 1.0
_LONGEST_S: Final = 60.0


@dataclass(kw_only=True)
class _Failing:
    interval_s: float
    until_s: float
    """Until then its agent is not asked; afterwards by one request at a time."""
    known_s: float
    """When its last failure was known: calls made before that tell nothing new."""


class Backoff:
    """Which replicas' agents may be asked now; logs when one begins to fail, and ends to."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failing: dict[str, _Failing] = {}

    def may_ask(self, replica_id: str) -> bool:
        """Whether an agent may be asked; of a failing one only now and then."""
        failing = self._failing.get(replica_id)
        if failing is None:
            return True
        now_s = self._clock()
        if now_s < failing.until_s:
            return False
        # This request finds out; the others do without until it knows.
        failing.until_s = now_s + failing.interval_s
        return True

    def forget(self, replica_id: str) -> None:
        """Forget how a replica's agent failed: the replica has left the fleet."""
        self._failing.pop(replica_id, None)

    def answered(self, replica_id: str) -> None:
        """Note that an agent has answered."""
        if self._failing.pop(replica_id, None) is not None:
            log.info("staging KV at %s works again", replica_id)

    def failed(self, replica_id: str, asked_s: float, error: Exception) -> None:
        """Note that a call made at ``asked_s`` has failed."""
        now_s, failing = self._clock(), self._failing.get(replica_id)
        if failing is None:
            log.warning(
                "staging KV at %s fails (%s): it is not tried for %g s, and for up to %g s while "
                "it goes on failing; requests go there without",
                replica_id,
                error,
                _FIRST_S,
                _LONGEST_S,
            )
            interval_s = _FIRST_S
        elif asked_s <= failing.known_s:
            return
        else:
            interval_s = min(2 * failing.interval_s, _LONGEST_S)
        self._failing[replica_id] = _Failing(
            interval_s=interval_s, until_s=now_s + interval_s, known_s=now_s
        )
