"""HTTP calls to other replicas' agents and to the controller.

`AgentHttpClient` sends requests and maps aiohttp's exceptions to `PeerError`. `PeerAgent` has one
method per call to another agent. `ControllerRegistration` registers this replica with the
controller and sends its heartbeats.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final, TypeVar

import aiohttp
import msgspec

from cacheengine.agent.agent_requests import PeerError
from warmroute_common import agent_protocol as wire
from warmroute_common.addresses import without_password
from warmroute_common.decoding import decode_json
from warmroute_common.fleet_secret import FleetSecret

logger = logging.getLogger("vllm.warmroute")

MAX_ANSWER_BYTES: Final = 4 * 1024**2
"""Limit of a peer's answer; the largest one has a tier's name per chunk."""
_MAX_REASON_CHARS: Final = 500
_CONNECT_S: Final = 2.0
_ANSWER_S: Final = 10.0
_CLEAR_S: Final = 60.0
"""Longer, because a disk tier removes its files one by one."""
_FIRST_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 30.0
_HEARTBEAT_ANSWER_S: Final = 5.0
_DEREGISTER_S: Final = 2.0

Sleep = Callable[[float], Awaitable[None]]
_T = TypeVar("_T")


class PeerRefusedError(PeerError):
    """The other side answered with an HTTP status other than 200."""

    def __init__(self, url: str, http_status: int, reason: str) -> None:
        super().__init__(f"{url}: {http_status}: {reason}")
        self.http_status = http_status


class AgentHttpClient:
    """Calls other agents and the controller over one session, with the fleet secret if any."""

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
                # Agents do not redirect, and the secret must not go to another server.
                allow_redirects=False,
            ) as response:
                body = await _read_body(response)
        except TimeoutError:
            raise PeerError(f"{without_password(url)}: no answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise PeerError(f"{without_password(url)}: {error or type(error).__name__}") from error
        if response.status != 200:
            raise PeerRefusedError(without_password(url), response.status, _reason(body))
        return body

    def _headers(self, url: str, *, has_body: bool) -> dict[str, str]:
        headers = {} if self.secret is None else self.secret.headers(url)
        return {**headers, "Content-Type": "application/json"} if has_body else headers


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    """Return an answer's body; raise ValueError if it is longer than `MAX_ANSWER_BYTES`."""
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


class PeerAgent:
    """Calls one other agent; every call raises `PeerError` when it fails."""

    def __init__(self, caller: AgentHttpClient, base_url: str) -> None:
        self._caller = caller
        self._base_url = base_url.rstrip("/")

    async def info(self) -> wire.InstanceInfo:
        """Return the replica's identity and tiers."""
        body = await self._caller.call("GET", f"{self._base_url}/info")
        return self._decoded(body, wire.InstanceInfo)

    async def lookup(self, keys: list[bytes], tier: wire.TierName | None) -> wire.LookupReply:
        """Return how much of a prefix one of its tiers holds, or all tiers together."""
        request = wire.LookupRequest(
            keys=[key.hex() for key in keys], keys_are_stored=True, tier=tier
        )
        body = await self._caller.call("POST", f"{self._base_url}/lookup", request)
        return self._decoded(body, wire.LookupReply)

    async def clear(self, keys: list[bytes], tier: wire.TierName) -> None:
        """Drop chunks from one of its tiers."""
        request = wire.ClearRequest(
            keys=[key.hex() for key in keys], keys_are_stored=True, tiers=[tier]
        )
        await self._caller.call("POST", f"{self._base_url}/clear", request, timeout_s=_CLEAR_S)

    def _decoded(self, body: bytes, kind: type[_T]) -> _T:
        try:
            return decode_json(body, kind)
        except wire.UNREADABLE as error:
            raise PeerError(f"{self._base_url} is not an agent: {error}") from None


def _reason(answer: bytes) -> str:
    """Return the reason that the other side gives for a refusal."""
    try:
        error = msgspec.json.decode(answer)["error"]
        reason = error["message"] if isinstance(error, dict) else error
        return str(reason)[:_MAX_REASON_CHARS]
    except (*wire.UNREADABLE, KeyError, TypeError):
        return answer[:200].decode(errors="replace")


class ControllerRegistration:
    """Registers an agent with the controller and sends its heartbeats.

    If the controller is unreachable or refuses, it retries for ever, with pauses that grow to 30 s.
    It logs one line when that begins and one when it ends.
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
                await self._report()
                failures = 0
                pause_s = self._registration.heartbeat_s
            except PeerError as error:
                self._note_failure(error)
                pause_s = min(_FIRST_PAUSE_S * 2 ** min(failures, 10), _MAX_PAUSE_S)
                failures += 1
            await self._sleep(pause_s)

    async def leave(self) -> None:
        """Deregister, if the controller answers quickly."""
        if not self._is_registered:
            return
        self._is_registered = False
        try:
            await self._post("/deregister", self._heartbeat, _DEREGISTER_S)
        except PeerError as error:
            logger.info("could not deregister from the controller: %s", error)

    async def _report(self) -> None:
        if self._is_registered:
            try:
                await self._post("/heartbeat", self._heartbeat, _HEARTBEAT_ANSWER_S)
                self._note_success()
                return
            except PeerRefusedError as error:
                if error.http_status != HTTPStatus.NOT_FOUND:
                    raise
            # The controller has restarted, or missed too many heartbeats.
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
        state = "refused" if isinstance(error, PeerRefusedError) else "unreachable"
        if self._state != state:
            self._state = state
            logger.warning(
                "%s cannot register with the controller and keeps trying: %s",
                self._registration.instance_id,
                error,
            )
