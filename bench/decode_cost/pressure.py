"""What keeps the engine at work while decodes run, as fast as it goes."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import aiohttp

from bench.replica.tiers import total
from bench.ttft import BenchError

_CALL_S: Final = 60.0
_PIN_S: Final = 5.0
_POLL_S: Final = 0.2
_PAUSE_S: Final = 0.5


class Situation(StrEnum):
    """What there is beside the decodes."""

    PLAIN = "vLLM without the engine"
    IDLE = "engine idle"
    DISK = "promoting from disk"
    REMOTE = "promoting from Redis"
    SEND = "sending copies"
    RECEIVE = "receiving copies"


_COUNTED: Final[Mapping[Situation, tuple[str, dict[str, str]]]] = {
    Situation.DISK: ("warmroute_engine_tier_get_bytes_total", {"tier": "disk"}),
    Situation.REMOTE: ("warmroute_engine_tier_get_bytes_total", {"tier": "remote"}),
    Situation.SEND: ("warmroute_transfer_sent_bytes_total", {}),
    Situation.RECEIVE: ("warmroute_transfer_received_bytes_total", {}),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """An engine's agent, and where its chunks are fetched."""

    agent_url: str
    transfer_address: str


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Which chunks are moved in which situation; each set is a prefix."""

    on_disk: Sequence[bytes]
    in_store: Sequence[bytes]
    at_peer: Sequence[bytes]


class Pressure:
    """Moves chunks of one replica again and again."""

    def __init__(
        self, session: aiohttp.ClientSession, replica: Place, peer: Place, chunks: Chunks
    ) -> None:
        self.session = session
        self._replica = replica
        self._peer = peer
        self._chunks = chunks
        self.failures: list[str] = []
        """Turns in which not all chunks came, in words."""

    async def run(self, situation: Situation) -> None:
        """Move chunks without end; raise `BenchError` when an agent refuses."""
        turns: Mapping[Situation, Callable[[], Coroutine[Any, Any, None]]] = {
            Situation.DISK: self._from_disk,
            Situation.REMOTE: self._from_store,
            Situation.SEND: self._send,
            Situation.RECEIVE: self._receive,
        }
        if situation not in turns:
            return
        if situation is Situation.SEND:
            await self._promote(self._chunks.on_disk)
        while True:
            await turns[situation]()

    async def moved_bytes(self, situation: Situation) -> int:
        """Return how much the replica has moved so since its start, by its own count."""
        if situation not in _COUNTED:
            return 0
        name, labels = _COUNTED[situation]
        async with self.session.get(f"{self._replica.agent_url}/metrics") as response:
            return int(total(await response.text(), name, **labels))

    async def _from_disk(self) -> None:
        await self._clear(self._replica, self._chunks.on_disk, ["cpu"])
        await self._promote(self._chunks.on_disk)

    async def _from_store(self) -> None:
        await self._clear(self._replica, self._chunks.in_store, ["cpu", "disk"])
        await self._promote(self._chunks.in_store)

    async def _send(self) -> None:
        await self._clear(self._peer, self._chunks.on_disk, None)
        await self._copy(self._replica, self._peer, self._chunks.on_disk)

    async def _receive(self) -> None:
        await self._clear(self._replica, self._chunks.at_peer, None)
        await self._copy(self._peer, self._replica, self._chunks.at_peer)

    async def _clear(self, place: Place, keys: Sequence[bytes], tiers: list[str] | None) -> None:
        await self._call(f"{place.agent_url}/clear", {"keys": _hex(keys), "tiers": tiers})

    async def _promote(self, keys: Sequence[bytes]) -> None:
        body = {"keys": _hex(keys), "wait_s": _CALL_S / 2, "pin_s": _PIN_S}
        told = await self._call(f"{self._replica.agent_url}/prefetch", body)
        if told["missing"] or told["pending"]:
            await self._failed(f"{len(keys)} chunks promoted: {told}")

    async def _copy(self, source: Place, to: Place, keys: Sequence[bytes]) -> None:
        where = {
            "agent_url": source.agent_url,
            "transfer_address": source.transfer_address,
            "tier": None,
        }
        body = {"keys": _hex(keys), "source": where, "copy": True}
        move = await self._call(f"{to.agent_url}/move", body)
        url = f"{to.agent_url}/moves/{move['event_id']}?wait_s={_CALL_S / 2}"
        told = await self._call(url)
        if told["state"] != "done":
            await self._failed(f"a copy of {len(keys)} chunks: {told}")

    async def _failed(self, what: str) -> None:
        # On a busy machine Redis may have let a call wait for longer than the engine does,
        # which then leaves it alone for a while.
        self.failures.append(what)
        await asyncio.sleep(_PAUSE_S)

    async def _call(self, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        method = "GET" if body is None else "POST"
        timeout = aiohttp.ClientTimeout(total=_CALL_S)
        async with self.session.request(method, url, json=body, timeout=timeout) as response:
            if response.status != 200:
                raise BenchError(f"{url}: {response.status}: {await response.text()}")
            told: dict[str, Any] = await response.json()
            return told

    async def until_held(self, keys: Sequence[bytes], tiers: Sequence[str]) -> None:
        """Return when these tiers of the replica hold the chunks; raise `BenchError`."""
        url = f"{self._replica.agent_url}/lookup"
        try:
            async with asyncio.timeout(_CALL_S):
                for tier in tiers:
                    body = {"keys": _hex(keys), "tier": tier}
                    # The agent says what it has, and does not call when there is more.
                    while len((await self._call(url, body))["tiers"]) < len(keys):  # noqa: ASYNC110
                        await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise BenchError(f"{len(keys)} chunks did not come to {tiers}") from None


def _hex(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]
