"""Admission with asyncio: a future for each waiting request, and one timer for them all."""

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import Final

from router.admission.gate import Admitted, End, Gate, Place, Waiting
from warmroute_common.api_errors import OverloadedError

_PUMP_GAP_S: Final = 0.005
"""Between two pumps: queues shorten in bursts, and replicas have work ahead for longer."""
_PUMP_REST: Final = 10.0
"""And so many times as long as a pump took that admitted no request, so that to scan a long
queue in vain costs a tenth of the time."""


class Admission:
    """Holds requests until the `Gate` lets them go."""

    def __init__(self, gate: Gate, clock: Callable[[], float] = time.monotonic) -> None:
        self._gate = gate
        self._clock = clock
        self._released: dict[Waiting, asyncio.Future[Admitted]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = inf
        self._next_pump_s = -inf
        self._closed = False

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._gate)

    async def admit(
        self,
        place: Place,
        *,
        model: str | None = None,
        at_once: bool = False,
        max_wait_s: float = inf,
    ) -> Admitted:
        """Wait until a request may go; its caller must finish the ticket, whatever comes.

        Raises what `Gate.arrive` raises, what ``place`` raises later, and
        `OverloadedError` when the router stops meanwhile.
        """
        arrived = self._gate.arrive(
            place,
            self._clock(),
            model=model,
            at_once=at_once or self._closed,
            max_wait_s=max_wait_s,
        )
        if isinstance(arrived, Admitted):
            return arrived
        released: asyncio.Future[Admitted] = asyncio.get_running_loop().create_future()
        self._released[arrived] = released
        self._pump_by(self._gate.next_pump_s(self._clock()))
        try:
            return await released
        except asyncio.CancelledError:
            # The pump may have admitted the request in that very turn of the loop: then
            # its ticket is taken, and has no other owner.
            if released.done() and not released.cancelled() and released.exception() is None:
                self._give_back(released.result())
            raise
        finally:
            del self._released[arrived]
            self._gate.leave(arrived)

    def wake(self) -> None:
        """Look soon which request may go; to be called when a replica's queue has shortened."""
        self._pump_by(-inf)

    def close(self) -> None:
        """Refuse the waiting requests with 503; later ones do not wait."""
        self._closed = True
        for released in self._released.values():
            if not released.done():
                released.set_exception(OverloadedError("the router stops; send the request again"))

    def _pump_by(self, at_s: float) -> None:
        at_s = max(at_s, self._next_pump_s)
        if not len(self) or at_s >= self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = at_s
        delay_s = max(0.0, at_s - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._pump)

    def _pump(self) -> None:
        self._timer, self._timer_s = None, inf
        began_s = self._clock()
        in_vain = True
        try:
            for waiting, end in self._gate.pump(began_s):
                in_vain = False
                self._deliver(self._released[waiting], end)
        finally:
            now_s = self._clock()
            rest_s = _PUMP_REST * (now_s - began_s) if in_vain else 0.0
            self._next_pump_s = now_s + max(_PUMP_GAP_S, rest_s)
            self._pump_by(self._gate.next_pump_s(began_s))

    def _deliver(self, released: asyncio.Future[Admitted], end: End) -> None:
        if released.done():
            # Its client has gone, or the router stops, and its handler has not
            # run since: the request was still in the queue.
            if isinstance(end, Admitted):
                self._give_back(end)
        elif isinstance(end, Admitted):
            released.set_result(end)
        else:
            released.set_exception(end)

    def _give_back(self, admitted: Admitted) -> None:
        admitted.ticket.finish(self._clock(), ok=False)
        self.wake()
