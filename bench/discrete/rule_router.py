"""Other routers in model time: a published rule (`bench.discrete.rules`) before model replicas.

They send each request at once, retry where nobody listens, and hear what their users let
them hear: KV events of all tiers, and the replicas' metrics.
"""

import asyncio
from array import array
from collections.abc import Sequence
from itertools import count
from typing import Final

from bench.discrete.rules.fixed_split import FixedSplit
from bench.discrete.rules.rule import Asked, ReplicaMetrics, Rule
from replay.our_router import Health
from replay.replica import AnswerCutError, ModelReplica, ReplicaDownError, numbers_of
from replay.requests import Sent

_RETRIES: Final = 2
_SCRAPE_S: Final = 0.2
"""Between two looks at a replica's metrics."""


class RuleRouter:
    """A router that decides by a rule."""

    def __init__(self, replicas: Sequence[ModelReplica], rule: Rule) -> None:
        self._replicas = replicas
        self._rule = rule
        self._loop = asyncio.get_running_loop()
        self._health = Health(replicas, self._health_changed)
        self._numbers = count()
        self._remote_prefills = 0
        for each in replicas:
            each.listeners.append(rule)
        self._tasks = [
            self._loop.create_task(self._health.watch()),
            self._loop.create_task(self._scrape()),
        ]

    async def answer(self, sent: Sent) -> None:
        """Send a request where the rule says, and once more where nobody listens there."""
        blocks = numbers_of(sent.prompt)
        tried: set[int] = set()
        for _ in range(_RETRIES + 1):
            left = [each for each in self._health.healthy if each not in tried]
            if not left:
                break
            if await self._try(sent, blocks, left, tried):
                return
        sent.failed(503, "no replica could be reached", self._loop.time())

    async def _try(
        self, sent: Sent, blocks: "array[int]", healthy: Sequence[int], tried: set[int]
    ) -> bool:
        number = next(self._numbers)
        asked = Asked(
            id=number,
            blocks=blocks,
            block_tokens=self._replicas[0].machine.shape.block_tokens,
            prompt_tokens=sent.prompt.token_count,
            session=sent.session,
        )
        rule = self._rule
        slot = rule.pick(asked, healthy, self._loop.time())
        first = None
        if isinstance(rule, FixedSplit):
            first = rule.prefiller(asked, slot, healthy, self._loop.time())
        replica = self._replicas[slot]
        began = False

        def first_token(now_s: float) -> None:
            nonlocal began
            began = True
            sent.began(now_s)
            if sent.streamed:
                self._rule.first_token(number, now_s)

        try:
            lent = None
            if first is not None:
                lender = self._replicas[first]
                leg = lender.submit(sent.prompt, 1, lambda _: None, lends=True)
                await leg.done
                lent = lender, leg.request
                self._remote_prefills += 1
            if isinstance(rule, FixedSplit):
                rule.prefilled(number, self._loop.time())
            serving = replica.submit(sent.prompt, sent.output_tokens, first_token, pulls_from=lent)
            await serving.done
            if lent is not None:
                serving.request.cached = lent[1].cached
            sent.served(slot, serving.request, self._loop.time())
        except ReplicaDownError:
            tried.add(slot)
            self._health.suspect(replica)
            return False
        except AnswerCutError:
            self._health.suspect(replica)
            if not began or not sent.streamed:
                tried.add(slot)
                return False
            sent.failed(200, "the answer broke off", self._loop.time())
        except ValueError as error:
            sent.failed(400, str(error), self._loop.time())
        finally:
            self._rule.finished(number, self._loop.time())
        return True

    def counts(self) -> dict[str, float]:
        """Return how many prompts another replica prefilled."""
        return {"remote_prefills": self._remote_prefills}

    def _health_changed(self, replica: ModelReplica, is_up: bool) -> None:
        """Do nothing: the rule is offered the healthy ones each time."""

    async def _scrape(self) -> None:
        while True:
            for each in self._replicas:
                self._rule.scraped(each.slot, _metrics(each), self._loop.time())
            await asyncio.sleep(_SCRAPE_S)

    async def stop(self) -> None:
        """End what runs in the background."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _metrics(replica: ModelReplica) -> ReplicaMetrics:
    model = replica.model
    return ReplicaMetrics(
        waiting=len(model.waiting) + len(model.loading),
        running=len(model.running),
        kv_used=model.cache.held_blocks / model.cache.num_blocks,
    )
