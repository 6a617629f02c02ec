"""Which replicas a router takes for healthy: it finds out by a failed try, or a little later."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from bench.discrete.replica import ModelReplica

PROBE_S: Final = 2.0
"""Between two probes of a replica, as our router's default has it; the same for all."""


class Health:
    """Watches replicas; ``changed`` hears of each that goes down or comes up again."""

    def __init__(
        self,
        replicas: Sequence[ModelReplica],
        changed: Callable[[ModelReplica, bool], None],
    ) -> None:
        self._replicas = replicas
        self._changed = changed
        self._up = {each.slot for each in replicas}

    @property
    def healthy(self) -> list[int]:
        """The slots of replicas that are taken for healthy, in order."""
        return sorted(self._up)

    def suspect(self, replica: ModelReplica) -> None:
        """A try has failed there: look at it now."""
        self._probe(replica)

    async def watch(self) -> None:
        """Probe for ever."""
        while True:
            await asyncio.sleep(PROBE_S)
            for each in self._replicas:
                self._probe(each)

    def _probe(self, replica: ModelReplica) -> None:
        was_up = replica.slot in self._up
        if replica.is_alive == was_up:
            return
        if replica.is_alive:
            self._up.add(replica.slot)
        else:
            self._up.discard(replica.slot)
        self._changed(replica, replica.is_alive)
