"""Calls of routers and operators to the engines' agents: at random, from a seed."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import aiohttp

from bench.soak.engines import Engine
from bench.soak.scheduler import LONGEST_CHUNKS, a_prompt

_CALL_S: Final = 40.0
_PIN_S: Final = 3.0
_STALL_S: Final = 3.0
_MOST_CALLS: Final = 64
_MOST_PINNED: Final = 4
_COPIES_AT_ONCE: Final = 4
_PINNED_CHUNKS: Final = 4
_EXAMPLES: Final = 10
_SHARES: Final = {
    "prefetch": 40,
    "copy": 25,
    "move": 12,
    "pin": 4,
    "unpin": 3,
    "snapshot": 3,
    "metrics": 3,
    "clear a prompt": 6,
    "clear the pool": 2,
    "clear the disk": 1,
    "clear all": 1,
}
_TIERS: Final[dict[str, list[str] | None]] = {
    "clear the pool": ["cpu"],
    "clear the disk": ["disk"],
    "clear all": None,
}


class Controls:
    """Calls the agents until `run` is cancelled."""

    def __init__(
        self,
        engines: Sequence[Engine],
        session: aiohttp.ClientSession,
        *,
        seed: int,
        conversations: int,
        per_s: float,
    ) -> None:
        self._engines = engines
        self._conversations = conversations
        self._per_s = per_s
        self._session = session
        self._rng = random.Random(f"controls {seed}")
        self._pinned: list[tuple[Engine, list[bytes]]] = []
        self._calls: set[asyncio.Task[None]] = set()
        self.answers: Counter[tuple[str, str]] = Counter()
        """By call and how it ended."""
        self.failures: list[str] = []
        """The first answers with status 500."""

    async def run(self) -> None:
        """Call agents, several at a time, until this is cancelled."""
        try:
            while True:
                await asyncio.sleep(self._rng.expovariate(self._per_s))
                self._begin(self._one())
        finally:
            for each in self._calls:
                each.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)

    async def clear_disk(self, engine: Engine) -> None:
        """Remove all chunks of an engine's disk."""
        await self._ask("clear the disk", engine, "/clear", {"tiers": ["disk"]})

    def copy_from(self, source: Engine) -> None:
        """Make all other engines copy chunks from an engine that they do not have."""
        for engine in self._engines:
            for _ in range(_COPIES_AT_ONCE if engine is not source else 0):
                self._begin(self._copy_again(engine, source))

    async def _copy_again(self, to: Engine, source: Engine) -> None:
        keys = self._a_prompt()
        await self._ask("clear a prompt", to, "/clear", {"keys": [key.hex() for key in keys]})
        await self._move("copy", to, source, keys)

    def _begin(self, call: Coroutine[Any, Any, None]) -> None:
        if len(self._calls) >= _MOST_CALLS:
            call.close()
            return
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def unpin_all(self) -> None:
        """End all pins, chunk by chunk: an earlier chunk of a prompt may be gone."""
        for engine, keys in self._pinned:
            for key in keys:
                await self._ask("unpin", engine, "/unpin", {"keys": [key.hex()]})
        self._pinned.clear()

    async def _one(self) -> None:
        what = self._rng.choices(list(_SHARES), list(_SHARES.values()))[0]
        engine, other = self._rng.sample(self._engines, 2)
        keys = self._a_prompt()
        named = {"keys": [key.hex() for key in keys]}
        match what:
            case "prefetch":
                body = {**named, "wait_s": self._rng.uniform(0, 2), "pin_s": _PIN_S}
                await self._ask(what, engine, "/prefetch", body)
            case "copy" | "move":
                await self._move(what, engine, other, keys)
            case "pin":
                await self._pin(engine, keys[:_PINNED_CHUNKS])
            case "unpin":
                await self._unpin()
            case "snapshot" | "metrics":
                await self._ask(what, engine, f"/{what}")
            case "clear a prompt":
                await self._ask(what, engine, "/clear", named)
            case _:
                await self._ask(what, engine, "/clear", {"tiers": _TIERS[what]})

    def _a_prompt(self) -> list[bytes]:
        return a_prompt(self._rng, self._conversations, LONGEST_CHUNKS)

    async def _move(self, what: str, to: Engine, source: Engine, keys: list[bytes]) -> None:
        is_copy = what == "copy"
        tier = self._rng.choice((None, "cpu", "disk")) if is_copy else "cpu"
        where = {
            "agent_url": source.agent_url,
            "transfer_address": source.transfer_address,
            "tier": tier,
        }
        body = {
            "keys": [key.hex() for key in keys],
            "source": where,
            "copy": is_copy,
            "pin_s": _PIN_S,
            "stall_s": _STALL_S,
        }
        await self._ask(what, to, "/move", body)

    async def _pin(self, engine: Engine, keys: list[bytes]) -> None:
        if len(self._pinned) < _MOST_PINNED:
            self._pinned.append((engine, keys))
            await self._ask("pin", engine, "/pin", {"keys": [key.hex() for key in keys]})

    async def _unpin(self) -> None:
        if self._pinned:
            engine, keys = self._pinned.pop(self._rng.randrange(len(self._pinned)))
            for key in keys:
                await self._ask("unpin", engine, "/unpin", {"keys": [key.hex()]})

    async def _ask(
        self, what: str, engine: Engine, path: str, body: dict[str, Any] | None = None
    ) -> None:
        began_s = time.monotonic()
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                engine.agent_url + path,
                json=body,
                timeout=aiohttp.ClientTimeout(total=_CALL_S),
            ) as response:
                content = await response.read()
                outcome = str(response.status)
                if response.status == 500 and len(self.failures) < _EXAMPLES:
                    self.failures.append(f"{what}: {content[:300].decode(errors='replace')}")
        except (aiohttp.ClientError, OSError) as error:
            outcome = f"no answer ({type(error).__name__})"
        except TimeoutError:
            outcome = f"no answer in {time.monotonic() - began_s:.0f} s"
        self.answers[what, outcome] += 1
