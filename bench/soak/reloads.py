"""The configuration rewritten and read anew, again and again."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.soak.fleet import Replica
from bench.soak.front import Front

_TAKEN_S: Final = 30.0
"""A replica that leaves stays until its requests have ended."""
_POLL_S: Final = 0.2


@dataclass(kw_only=True)
class Reloads:
    """How many configurations were written, and how many the router was seen to work with."""

    sent: int = 0
    seen: int = 0
    bad: int = 0
    """Files that cannot be, of those sent: the router is to say so and go on as before."""

    async def run(
        self,
        front: Front,
        replicas: Sequence[Replica],
        *,
        seed: int,
        every_s: float,
        say: Callable[[str], None],
    ) -> None:
        """Take a replica out, put it in again, write what cannot be; without end."""
        rng = random.Random(f"reloads {seed}")
        while True:
            away = rng.choice(replicas)
            fewer = [each for each in replicas if each is not away]
            for bad, wanted in ((False, fewer), (False, replicas), (True, replicas)):
                await asyncio.sleep(every_s)
                say(f"reload: {'a bad file' if bad else [each.instance_id for each in wanted]}")
                if bad:
                    front.write_bad()
                    self.bad += 1
                else:
                    front.write(wanted)
                front.reload()
                seen = await _has(front, {each.instance_id for each in wanted})
                self.sent, self.seen = self.sent + 1, self.seen + seen


async def _has(front: Front, wanted: set[str]) -> bool:
    until_s = time.monotonic() + _TAKEN_S
    while time.monotonic() < until_s:
        if set(await front.metric("warmroute_in_flight")) == wanted:
            return True
        await asyncio.sleep(_POLL_S)
    return False
