"""Our router before a small fleet in model time."""

import asyncio

from replay.our_router import OurRouter, Settings
from replay.replica import ModelReplica
from replay.requests import Sent
from tests.bench.discrete.building import machine, prompt, sent


class Bench:
    """Our router before a fleet, used request by request."""

    def __init__(self, replicas: int = 2, *, settings: Settings | None = None, **changes: float):
        self.replicas = [ModelReplica(slot, machine(**changes)) for slot in range(replicas)]
        self.router = OurRouter(self.replicas, settings or Settings())
        self.loop = asyncio.get_running_loop()

    async def ask(
        self,
        tokens: int,
        *,
        text: int = 1,
        answer: int = 1,
        session: str | None = None,
        streamed: bool = True,
    ) -> Sent:
        made = sent(
            prompt(tokens, text=text, answer=answer),
            answer=answer,
            session=session,
            streamed=streamed,
            now_s=self.loop.time(),
        )
        await self.router.answer(made)
        return made

    async def stop(self) -> None:
        """End it; nothing may be in flight."""
        for each in self.router.fleet.replicas.values():
            assert each.in_flight == 0, each.id
        self.router.fleet.index.check()
        self.router.fleet.sessions.check()
        await self.router.stop()
