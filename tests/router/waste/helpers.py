"""Conversations with a fleet whose caches the test controls, rendered by real chat templates."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from router.config.settings import RouterConfig
from router.index.kv_events import BlocksRemoved, KvBatch
from router.index.prompt_keys import KvTier, PromptKeyCache
from router.policy import Plane, Policy
from router.prompt.prompt_reader import PromptReader
from router.record.uncached import PromptPart, Uncached, UncachedCause
from router.scheduling.request_scheduler import PlacementRequest
from router.waste.uncached_causes import UncachedCauses
from tests.router.fleet.helpers import BLOCK, CHUNK, make_fleet, scheduler_of, stored
from tests.router.prompt.chat_shapes import TEMPLATES
from tests.router.prompt.tokenizer_makers import llama3, write_model

WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "some",
    "lazy",
    "dogs",
    "words",
    "learned",
)


def words(count: int, *, seed: int = 0) -> str:
    """Return a text that no other seed gives."""
    return " ".join(WORDS[(seed * 7 + at * (seed + 3)) % len(WORDS)] for at in range(count))


@dataclass
class Talk:
    """A fleet, and the requests of its clients."""

    reader: PromptReader
    replicas: int = 1
    now_s: float = 100.0
    held: dict[str, set[int]] = field(default_factory=dict)
    """Keys on each replica's GPU."""

    def __post_init__(self) -> None:
        self.fleet = make_fleet(self.replicas)
        self.causes = UncachedCauses(self.fleet)
        self.policy = Policy(RouterConfig())
        self.keys: list[int] = []
        """Those of the last prompt."""
        self.replica = ""
        """That of the last prompt."""

    def ask(
        self,
        messages: list[dict[str, Any]],
        *,
        among: tuple[str, ...] | None = None,
        cached_tokens: int | None = None,
        **more: Any,
    ) -> Uncached:
        """Send a chat; return the causes, which must add up to what was computed.

        The replica takes from its cache what its GPU holds, or ``cached_tokens``.
        """
        self.now_s += 10.0
        self.fleet.tick(self.now_s)
        body = {"model": "m", "messages": messages, "user": "u", **more}
        path, headers = "/v1/chat/completions", dict[str, str]()
        asked = self.policy.parse(Plane.PROXY, "POST", path, headers, orjson.dumps(body))
        keys = PromptKeyCache(self.reader.read_now(path, asked.fields))
        request = PlacementRequest(keys=keys, session=asked.session, among=among)
        decision = scheduler_of(self.fleet).place(request, self.now_s)
        ticket = self.fleet.start(decision, self.now_s)
        pending = self.causes.expect(
            decision, asked.outline, model=asked.model, client=None, now_s=self.now_s
        )
        assert pending is not None
        self.keys, self.replica = list(decision.picked.keys.keys), decision.replica_id
        on_gpu = self.held.setdefault(self.replica, set())
        if cached_tokens is None:
            whole = (decision.prompt_tokens - 1) // BLOCK
            at = next((at for at, key in enumerate(self.keys) if key not in on_gpu), whole)
            cached_tokens = min(at, whole) * BLOCK
        on_gpu.update(self.keys)
        stored(self.fleet, self.replica, KvTier.GPU, self.keys)
        ticket.first_byte(self.now_s)
        ticket.finish(self.now_s, ok=True)
        uncached = self.causes.settle(
            pending,
            prompt_tokens=decision.prompt_tokens,
            cached_tokens=cached_tokens,
            now_s=self.now_s,
        )
        assert sum(uncached.tokens().values()) == decision.prompt_tokens - cached_tokens
        assert uncached.is_reported
        return uncached

    def evict(self, name: str, tier: KvTier, keys: list[int]) -> None:
        """Let keys leave a tier of a replica."""
        if tier is KvTier.GPU:
            self.held[name] -= set(keys)
            self.fleet.apply_kv(name, KvBatch(0, 0.0, [BlocksRemoved(tier, keys)]), self.now_s)
        else:
            self.fleet.change_lower(name, tier, keys, stored=False)

    def chunks(self) -> list[int]:
        """Return the keys of the last prompt's chunks."""
        return self.keys[CHUNK // BLOCK - 1 :: CHUNK // BLOCK]


def reader(directory: Path, template: str) -> PromptReader:
    """Return the reader of a model with one of the chat templates."""
    return PromptReader.load(write_model(directory / template, llama3(), TEMPLATES[template]))


def part(uncached: Uncached, cause: UncachedCause) -> tuple[PromptPart, int]:
    """Return the part with a cause, and its computed tokens."""
    found = [each for each in uncached.computed() if each[0].cause is cause]
    assert len(found) == 1, uncached.lines()
    return found[0]
