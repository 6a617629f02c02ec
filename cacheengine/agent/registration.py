"""Telling the controller that this replica is there, as long as it is."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from cacheengine.agent.answers import PeerError
from cacheengine.agent.peer import Caller, PeerRefusedError
from warmroute_common import agent_protocol as wire
from warmroute_common.addresses import without_password

logger = logging.getLogger("vllm.warmroute")

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_ANSWER_S: Final = 5.0
_GOODBYE_S: Final = 2.0

Sleep = Callable[[float], Awaitable[None]]


class Registrar:
    """Registers an agent with the controller and sends its heartbeats.

    A controller that is away, or refuses, is tried again for ever, ever less
    often up to every 30 s; the log has a line when that begins and when it ends.
    """

    def __init__(
        self,
        caller: Caller,
        controller_url: str,
        registration: wire.Registration,
        *,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._caller = caller
        self._base_url = controller_url.rstrip("/")
        self._registration = registration
        self._heartbeat = wire.Heartbeat(
            instance_id=registration.instance_id, incarnation=registration.incarnation
        )
        self._sleep = sleep
        self._is_registered = False
        self._state = ""

    async def run(self) -> None:
        """Register, then send heartbeats, until cancelled."""
        failures = 0
        while True:
            try:
                await self._tell()
                failures = 0
                pause_s = self._registration.heartbeat_s
            except PeerError as error:
                self._note_failure(error)
                pause_s = min(_FIRST_PAUSE_S * 2 ** min(failures, 10), _LONGEST_PAUSE_S)
                failures += 1
            await self._sleep(pause_s)

    async def leave(self) -> None:
        """Deregister, if that can be done quickly."""
        if not self._is_registered:
            return
        self._is_registered = False
        try:
            await self._post("/deregister", self._heartbeat, _GOODBYE_S)
        except PeerError as error:
            logger.info("the controller was not told of the end: %s", error)

    async def _tell(self) -> None:
        if self._is_registered:
            try:
                await self._post("/heartbeat", self._heartbeat, _ANSWER_S)
                self._note_success()
                return
            except PeerRefusedError as error:
                if error.answered != 404:
                    raise
            # It has started anew, or missed too many heartbeats.
            self._is_registered = False
        await self._post("/register", self._registration, _ANSWER_S)
        self._is_registered = True
        self._note_success()

    async def _post(
        self, path: str, body: wire.Registration | wire.Heartbeat, timeout_s: float
    ) -> None:
        await self._caller.call("POST", self._base_url + path, body, timeout_s=timeout_s)

    def _note_success(self) -> None:
        if self._state != "registered":
            self._state = "registered"
            name = self._registration.instance_id
            where = without_password(self._base_url)
            logger.info("%s is registered with the controller at %s", name, where)

    def _note_failure(self, error: PeerError) -> None:
        state = "refused" if isinstance(error, PeerRefusedError) else "away"
        if self._state != state:
            self._state = state
            told = "%s is not registered with the controller, and goes on trying: %s"
            logger.warning(told, self._registration.instance_id, error)
