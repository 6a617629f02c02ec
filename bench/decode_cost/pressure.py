"""What keeps an engine at work while decodes run, as fast as it goes or at a given rate."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

from bench.decode_cost.situations import MODERATE_BYTES_S, Pace, Work
from bench.replica.tiers import total
from bench.ttft import BenchError

_CALL_S: Final = 60.0
_PIN_S: Final = 5.0
_POLL_S: Final = 0.2
_PAUSE_S: Final = 0.5
_MADE_UP_S: Final = 3.0
"""More than the longest time from one prompt to the next at a rate: 1.7 s."""


_COUNTED: Final[Mapping[Work, tuple[str, dict[str, str]]]] = {
    Work.DISK: ("warmroute_engine_tier_get_bytes_total", {"tier": "disk"}),
    Work.REMOTE: ("warmroute_engine_tier_get_bytes_total", {"tier": "remote"}),
    Work.SEND: ("warmroute_transfer_sent_bytes_total", {}),
    Work.RECEIVE: ("warmroute_transfer_received_bytes_total", {}),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """An engine's agent, and where its chunks are fetched."""

    agent_url: str
    transfer_address: str


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Which chunks are moved by which work; each set is a prefix."""

    on_disk: Sequence[bytes]
    in_store: Sequence[bytes]
    at_peer: Sequence[bytes]
    chunk_bytes: int


class Pressure:
    """Moves chunks of one engine again and again, from and to another, its peer."""

    def __init__(
        self, session: aiohttp.ClientSession, engine: Place, peer: Place, chunks: Chunks
    ) -> None:
        self._session = session
        self._engine = engine
        self._peer = peer
        self._chunks = chunks
        self.failures: list[str] = []
        """Turns in which not all chunks came, in words."""

    async def run(self, work: Work, pace: Pace) -> None:
        """Move chunks without end; raise `BenchError` when an agent refuses."""
        turns: Mapping[Work, Callable[[], Coroutine[Any, Any, None]]] = {
            Work.DISK: self._from_disk,
            Work.REMOTE: self._from_store,
            Work.SEND: self._send,
            Work.RECEIVE: self._receive,
        }
        # A call for a whole prompt, as routers make them.
        set_bytes = len(self._chunks.on_disk) * self._chunks.chunk_bytes
        every_s = set_bytes / MODERATE_BYTES_S[work] if pace is Pace.MODERATE else 0.0
        if work is Work.SEND:
            await self._promote(self._chunks.on_disk)
        due_s = time.monotonic()
        while True:
            await turns[work]()
            # What was late is made up for, so that the rate is kept, but not a long pause.
            due_s = max(due_s + every_s, time.monotonic() - _MADE_UP_S)
            await asyncio.sleep(due_s - time.monotonic())

    async def moved_bytes(self, work: Work) -> int:
        """Return how much the engine has moved so since its start, by its own count."""
        name, labels = _COUNTED[work]
        async with self._session.get(f"{self._engine.agent_url}/metrics") as response:
            return int(total(await response.text(), name, **labels))

    async def _from_disk(self) -> None:
        await self._clear(self._engine, self._chunks.on_disk, ["cpu"])
        await self._promote(self._chunks.on_disk)

    async def _from_store(self) -> None:
        await self._clear(self._engine, self._chunks.in_store, ["cpu", "disk"])
        await self._promote(self._chunks.in_store)

    async def _send(self) -> None:
        await self._clear(self._peer, self._chunks.on_disk, None)
        await self._copy(self._engine, self._peer, self._chunks.on_disk)

    async def _receive(self) -> None:
        await self._clear(self._engine, self._chunks.at_peer, None)
        await self._copy(self._peer, self._engine, self._chunks.at_peer)

    async def _clear(self, place: Place, keys: Sequence[bytes], tiers: list[str] | None) -> None:
        await self._call(f"{place.agent_url}/clear", {"keys": _hex(keys), "tiers": tiers})

    async def _promote(self, keys: Sequence[bytes]) -> None:
        body = {"keys": _hex(keys), "wait_s": _CALL_S / 2, "pin_s": _PIN_S}
        told = await self._call(f"{self._engine.agent_url}/prefetch", body)
        if told["missing"] or told["pending"]:
            await self._failed(f"{len(keys)} chunks promoted: {told}")

    async def _copy(self, source: Place, to: Place, keys: Sequence[bytes]) -> None:
        where = {
            "agent_url": source.agent_url,
            "transfer_address": source.transfer_address,
            "tier": None,
        }
        body = {"keys": _hex(keys), "source": where, "copy": True}
        try:
            move = await self._call(f"{to.agent_url}/move", body)
        except BenchError as error:
            await self._failed(str(error))
            return
        url = f"{to.agent_url}/moves/{move['event_id']}?wait_s={_CALL_S / 2}"
        told = await self._call(url)
        if told["state"] != "done":
            await self._failed(f"a copy of {len(keys)} chunks: {told}")

    async def _failed(self, what: str) -> None:
        # On a busy machine Redis or the peer may have let a call wait for longer than the engine
        # does, which then leaves it alone for a while.
        self.failures.append(what)
        await asyncio.sleep(_PAUSE_S)

    async def _call(self, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        method = "GET" if body is None else "POST"
        timeout = aiohttp.ClientTimeout(total=_CALL_S)
        async with self._session.request(method, url, json=body, timeout=timeout) as response:
            if response.status != 200:
                raise BenchError(f"{url}: {response.status}: {await response.text()}")
            told: dict[str, Any] = await response.json()
            return told

    async def until_held(self, keys: Sequence[bytes], tiers: Sequence[str]) -> None:
        """Return when these tiers of the engine hold the chunks; raise `BenchError`."""
        url = f"{self._engine.agent_url}/lookup"
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
