"""Calling other agents, and the controller.

aiohttp's exceptions are mapped here, once, to `PeerError`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import aiohttp
import msgspec

from cacheengine.agent.agent_requests import PeerError
from warmroute_common import agent_protocol as wire
from warmroute_common.addresses import without_password
from warmroute_common.fleet_secret import FleetSecret

_CONNECT_S: Final = 2.0
_ANSWER_S: Final = 10.0
_CLEAR_S: Final = 60.0
"""A disk tier's files are removed one by one."""

MAX_ANSWER_BYTES: Final = 4 * 1024**2
"""Of what peers answer: names of tiers by chunk are the most of it."""
_LONGEST_SAID: Final = 500

_T = TypeVar("_T")


class PeerRefusedError(PeerError):
    """The other side answered, and not with 200."""

    def __init__(self, where: str, answered: int, said: str) -> None:
        super().__init__(f"{where}: {answered}: {said}")
        self.answered = answered
        """HTTP status of the answer."""


class AgentHttpClient:
    """Calls other agents and the controller over one session, showing the secret where one is."""

    def __init__(self, session: aiohttp.ClientSession, secret: FleetSecret | None) -> None:
        self._session = session
        self.secret = secret

    async def call(
        self,
        method: str,
        url: str,
        request: msgspec.Struct | None = None,
        *,
        timeout_s: float = _ANSWER_S,
    ) -> bytes:
        """Return the answer's body; raise `PeerRefusedError` or another `PeerError`."""
        try:
            async with self._session.request(
                method,
                url,
                data=None if request is None else msgspec.json.encode(request),
                headers=self._headers(url, has_body=request is not None),
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S),
                # An agent sends nobody elsewhere; and the secret is shown to none but it.
                allow_redirects=False,
            ) as response:
                body = await _read(response)
        except TimeoutError:
            raise PeerError(f"{without_password(url)}: no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PeerError(f"{without_password(url)}: {error or type(error).__name__}") from error
        if response.status != 200:
            raise PeerRefusedError(without_password(url), response.status, _said(body))
        return body

    def _headers(self, url: str, *, has_body: bool) -> dict[str, str]:
        shown = {} if self.secret is None else self.secret.headers(url)
        return {**shown, "Content-Type": "application/json"} if has_body else shown


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return an answer's body; raise ValueError for one longer than any of an agent's."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


class PeerAgent:
    """Calls one other agent; every call raises `PeerError` when it fails."""

    def __init__(self, caller: AgentHttpClient, base_url: str) -> None:
        self._caller = caller
        self._base_url = base_url.rstrip("/")

    async def info(self) -> wire.InstanceInfo:
        """Return its identity and its tiers."""
        body = await self._caller.call("GET", f"{self._base_url}/info")
        return self._decoded(body, wire.InstanceInfo)

    async def lookup(self, keys: list[bytes], tier: wire.TierName | None) -> wire.LookupReply:
        """Return how much of a prefix its tier holds, or all of its tiers together."""
        request = wire.LookupRequest(
            keys=[key.hex() for key in keys], keys_are_stored=True, tier=tier
        )
        body = await self._caller.call("POST", f"{self._base_url}/lookup", request)
        return self._decoded(body, wire.LookupReply)

    async def clear(self, keys: list[bytes], tier: wire.TierName) -> None:
        """Have it drop chunks from a tier."""
        request = wire.ClearRequest(
            keys=[key.hex() for key in keys], keys_are_stored=True, tiers=[tier]
        )
        await self._caller.call("POST", f"{self._base_url}/clear", request, timeout_s=_CLEAR_S)

    def _decoded(self, body: bytes, kind: type[_T]) -> _T:
        try:
            return msgspec.json.decode(body, type=kind)
        except wire.UNREADABLE as error:
            raise PeerError(f"{self._base_url} is no agent: {error}") from None


def _said(answer: bytes) -> str:
    """Return the other side's own words for a refusal."""
    try:
        error = msgspec.json.decode(answer)["error"]
        said = error["message"] if isinstance(error, dict) else error
        return str(said)[:_LONGEST_SAID]
    except (*wire.UNREADABLE, KeyError, TypeError):
        return answer[:200].decode(errors="replace")


# TODO of cacheengine.agent.peers: Telling the controller that this replica is there, as long as it is.

logger = logging.getLogger("vllm.warmroute")

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_HEARTBEAT_ANSWER_S: Final = 5.0
_GOODBYE_S: Final = 2.0

Sleep = Callable[[float], Awaitable[None]]


class ControllerRegistration:
    """Registers an agent with the controller and sends its heartbeats.

    A controller that is away, or refuses, is tried again for ever, ever less
    often up to every 30 s; the log has a line when that begins and when it ends.
    """

    def __init__(
        self,
        caller: AgentHttpClient,
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
                await self._post("/heartbeat", self._heartbeat, _HEARTBEAT_ANSWER_S)
                self._note_success()
                return
            except PeerRefusedError as error:
                if error.answered != 404:
                    raise
            # It has started anew, or missed too many heartbeats.
            self._is_registered = False
        await self._post("/register", self._registration, _HEARTBEAT_ANSWER_S)
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
