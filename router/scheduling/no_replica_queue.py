"""Requests that wait because no replica is up: one may be starting, as an autoscaler asked.

Without a replica a prompt is not read: its exact tokens may come from the replicas. So a request
waits here first, and in the `AdmissionQueue` after that.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf

from router.fleet.fleet import Fleet
from router.fleet.replica import ReplicaState
from warmroute_common.api_errors import NoReplicaError, OverloadedError, RateLimitedError
from warmroute_common.command_line import counted


@dataclass(eq=False, slots=True)
class _Waiting:
    model: str | None
    among: Collection[str] | None
    came_up: "asyncio.Future[None]"


class NoReplicaQueue:
    """Holds requests for at most ``admission.no_replica_wait_s``; ``max_waiting`` at once."""

    def __init__(self, fleet: Fleet, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._config = fleet.config.admission
        self._clock = clock
        self._waiting: set[_Waiting] = set()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def by_model(self) -> Mapping[str | None, int]:
        """Return how many wait for each model."""
        return Counter(each.model for each in self._waiting)

    def must_wait(self, model: str | None, among: Collection[str] | None = None) -> bool:
        """Whether no replica of a model is up, and one may come.

        None is expected of a model that no replica was ever seen to serve while others are served.
        """
        if not self._config.no_replica_wait_s or self._is_up(model, among):
            return False
        return model is None or model in self._fleet.pools or not self._fleet.models()

    async def wait(
        self,
        model: str | None,
        *,
        among: Collection[str] | None = None,
        max_wait_s: float = inf,
    ) -> float:
        """Wait until a replica of a model is up; return the seconds that it took.

        ``among``: the ids of the replicas that count; None: all. Raises `RateLimitedError` if too
        many wait, `NoReplicaError` if none comes up in time, and `OverloadedError` if the router
        stops.
        """
        began_s = self._clock()
        limit_s = min(max_wait_s, self._config.no_replica_wait_s)
        if len(self) >= self._config.max_waiting:
            raise RateLimitedError(
                f"no replica is up, and {counted(len(self), 'request')} wait for one "
                "(admission.max_waiting in the router's configuration); send the request again "
                "later",
                cause="full",
                retry_after_s=max(1, round(limit_s)),
            )
        waiting = _Waiting(model, among, asyncio.get_running_loop().create_future())
        self._waiting.add(waiting)
        try:
            async with asyncio.timeout(limit_s):
                await waiting.came_up
        except TimeoutError:
            raise NoReplicaError(
                f"no replica came up within {limit_s:g} s (admission.no_replica_wait_s in the "
                "router's configuration, or the client's own limit); send the request again later"
            ) from None
        finally:
            self._waiting.discard(waiting)
        return self._clock() - began_s

    def look(self) -> None:
        """Let go the requests that have a replica now; to be called when one comes up."""
        for each in self._waiting:
            if not each.came_up.done() and self._is_up(each.model, each.among):
                each.came_up.set_result(None)

    def close(self) -> None:
        """Refuse the waiting requests with 503."""
        for each in self._waiting:
            if not each.came_up.done():
                each.came_up.set_exception(
                    OverloadedError("the router stops; send the request again")
                )

    def _is_up(self, model: str | None, among: Collection[str] | None) -> bool:
        named = None if among is None else {self._fleet.replicas.find(each) for each in among}
        return any(
            each.state is ReplicaState.UP and each.serves(model)
            for each in self._fleet.replicas.values()
            if named is None or each in named
        )
