"""Requests for rules to place."""

from collections.abc import Sequence
from itertools import count

from bench.discrete.rules.rule import Asked, Rule

BLOCK_TOKENS = 10


def ask(
    number: int, blocks: Sequence[int], *, more_tokens: int = 0, session: str | None = None
) -> Asked:
    """Return a request for a prompt of full blocks, and some tokens after them."""
    return Asked(
        id=number,
        blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        prompt_tokens=len(blocks) * BLOCK_TOKENS + more_tokens,
        session=session,
    )


class Asking:
    """Sends requests through a rule, at a time of its own."""

    def __init__(self, rule: Rule, replicas: int) -> None:
        self.rule = rule
        self.healthy: list[int] = list(range(replicas))
        self.now_s = 0.0
        self._numbers = count()
        self._fresh = count(1_000_000)
        self.last = -1

    def send(
        self, blocks: Sequence[int] = (), *, more_tokens: int = 0, session: str | None = None
    ) -> int:
        """Send a request; return its replica."""
        self.last = next(self._numbers)
        asked = ask(self.last, blocks, more_tokens=more_tokens, session=session)
        return self.rule.pick(asked, self.healthy, self.now_s)

    def new(self, blocks: int = 1) -> list[int]:
        """Return blocks that nothing has seen."""
        return [next(self._fresh) for _ in range(blocks)]

    def load(self, replica: int, requests: int = 1) -> None:
        """Send a replica requests of blocks of their own, for good."""
        healthy, self.healthy = self.healthy, [replica]
        for _ in range(requests):
            self.send(self.new())
        self.healthy = healthy

    def finish(self, request: int) -> None:
        """End a request."""
        self.rule.finished(request, self.now_s)
