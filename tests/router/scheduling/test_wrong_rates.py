"""A replica that reports a wrong speed for a minute: the choice recovers when it reports it right.

A prompt takes eight seconds to compute, and its KV is in one source of r0. The source's real speed
is ten times that of computing, or a tenth. Reports say how much they were measured on, and that
grows only while the source is used. So a wrong speed may keep the router from using the source, and
then nothing is measured.
"""

from collections import Counter
from enum import StrEnum
from itertools import count
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.decision import Decision
from router.fleet.fleet import Fleet
from router.index.prompt_keys import KvTier, PromptKeyCache
from router.scheduling.admission import AdmissionQueue, Admitted
from router.scheduling.request_scheduler import PlacementRequest, RequestScheduler
from tests.router.fleet.helpers import chunks
from tests.router.prompt.prompts_given import tokens
from tests.router.scheduling.helpers import make_copying_fleet, peer_info
from warmroute_common.agent_protocol import ComputeRates, TierInfo
from warmroute_common.keys import key64

PROMPT_TOKENS: Final = 8192
PER_S: Final = 1000.0
"""Tokens that a replica computes in a second."""
TOKEN_BYTES: Final = 1000.0
BETWEEN_S: Final = 10
"""Between two requests: each finds idle replicas, so speeds alone decide."""
WRONG_S: Final = 60
RECOVERED_S: Final = 80
"""A speed that was not measured for a minute is forgotten. The next request measures it, and the
next report tells it."""
RECOVERED_REQUESTS: Final = RECOVERED_S // BETWEEN_S
WATCHED_REQUESTS: Final = 36
EXPLORING_S: Final = 60
"""At most once in this time, a source or replica that is not worth it is used, and so measured."""


class Source(StrEnum):
    COMPUTING = "computing"
    COMPUTING_OF_STOCK_VLLM = "computing of stock vLLM"
    COMPUTING_OF_OTHERS = "computing of a server that reports nothing"
    CPU = "cpu"
    DISK = "disk"
    REMOTE = "remote"
    PEER = "peer"


TIERS: Final = {
    Source.CPU: KvTier.CPU,
    Source.DISK: KvTier.DISK,
    Source.REMOTE: KvTier.REMOTE,
    Source.PEER: KvTier.CPU,
}
UNREPORTED: Final = frozenset({Source.COMPUTING_OF_STOCK_VLLM, Source.COMPUTING_OF_OTHERS})


class World:
    """Two replicas; the source is that of r0, or copies from r0 to r1."""

    def __init__(self, source: Source, advantage: float) -> None:
        self.source = source
        self.advantage = advantage
        """Real speed of the source, over that of computing at r1."""
        self.error = 1.0
        """Reported speed over the real one."""
        self.fleet: Fleet = make_copying_fleet(2)
        self.queue = AdmissionQueue(RequestScheduler(self.fleet))
        self.used = Counter[str]()
        """Tokens for which each replica has used the source."""
        self.now_s = 0
        self.prompts = count(1)
        if source is Source.PEER:
            self.fleet.drain("r0")  # it gives its KV, and gets no requests
        self.report()

    def report(self) -> None:
        per_s = self.advantage * self.error * PER_S
        for name in self.fleet.replicas:
            is_source = name == "r0"
            computing = 1 / (per_s if is_source and self.source is Source.COMPUTING else PER_S)
            compute = ComputeRates(
                step_s=0.0,
                prefill_token_s=computing,
                attended_token_s=0.0,
                decode_token_s=0.0,
                steps=self.now_s,
                tokens=self.now_s,
            )
            tiers = {"cpu": TierInfo(capacity_bytes=10**12, used_bytes=0)}
            tier = TIERS.get(self.source)
            if tier is not None and self.source is not Source.PEER and is_source:
                tiers[tier.value] = TierInfo(
                    capacity_bytes=10**12,
                    used_bytes=0,
                    read_bytes_per_s=per_s * TOKEN_BYTES if self.used[name] else 0.0,
                    read_bytes=round(self.used[name] * TOKEN_BYTES),
                )
            changes = {} if self.source in UNREPORTED else {"compute": compute}
            port = 1 if self.source is Source.PEER else None
            made = peer_info(name, tiers=tiers, transfer_port=port, **changes)
            self.fleet.apply_info(name, made)

    def pass_time(self, seconds: int) -> None:
        """Report and tick once a second."""
        for _ in range(seconds):
            self.now_s += 1
            self.report()
            self.fleet.tick(float(self.now_s))

    def ask(self) -> bool:
        """Let a new prompt come; return whether it uses the source."""
        self.pass_time(BETWEEN_S)
        prompt = tokens(PROMPT_TOKENS, start=10**6 * next(self.prompts))
        if (tier := TIERS.get(self.source)) is not None:
            keys = [key64(each) for each in chunks(prompt)]
            self.fleet.change_lower("r0", tier, keys, stored=True)
        request = PlacementRequest(keys=PromptKeyCache(prompt))
        admitted = self.queue.arrive(request, float(self.now_s))
        assert isinstance(admitted, Admitted), "the replicas are idle"
        uses = self._uses(admitted.decision)
        self._answer(admitted, uses)
        return uses

    def _uses(self, decision: Decision) -> bool:
        picked = decision.picked
        match self.source:
            case Source.PEER:
                return decision.copy is not None
            case Source.CPU:
                return picked.work.load_bytes > 0
            case Source.DISK:
                return picked.work.disk_bytes > 0
            case Source.REMOTE:
                return picked.work.remote_bytes > 0
        return decision.replica_id == "r0"

    def _answer(self, admitted: Admitted, uses: bool) -> None:
        ticket, real_s = admitted.ticket, PROMPT_TOKENS / PER_S
        if uses:
            real_s /= self.advantage
            self.used[admitted.decision.replica_id] += PROMPT_TOKENS
        seen_s = real_s / self.error if uses else real_s
        replica = admitted.decision.picked.replica
        if uses and self.source is Source.PEER:
            self.fleet.observed_copy("r1", round(PROMPT_TOKENS * TOKEN_BYTES), seen_s)
        if self.source is Source.COMPUTING_OF_STOCK_VLLM:
            seen_per_s = PROMPT_TOKENS / seen_s
            replica.rates.report_prefill(seen_per_s, replica.started * PROMPT_TOKENS)
        ticket.sent(float(self.now_s))
        if self.source is Source.COMPUTING_OF_OTHERS:
            ticket.first_byte(self.now_s + seen_s)
            ticket.finish(self.now_s + seen_s, ok=True)
        else:
            ticket.first_byte(float(self.now_s))
            ticket.finish(float(self.now_s), ok=False)


def test_the_source_is_used_if_and_only_if_it_is_worth_it() -> None:
    """The world itself: without errors, the choice is right after a minute."""
    for source in Source:
        for advantage in (0.1, 10.0):
            world = World(source, advantage)
            right = advantage > 1
            chosen = [world.ask() is right for _ in range(24)]
            wrong = chosen[RECOVERED_REQUESTS:].count(False)
            assert wrong <= 1 + (24 - RECOVERED_REQUESTS) * BETWEEN_S // EXPLORING_S, source


@settings(deadline=None, max_examples=40)
@given(
    source=st.sampled_from(Source),
    advantage=st.sampled_from((0.1, 10.0)),
    error=st.sampled_from((0.01, 100.0)),
    before=st.integers(0, 8),
)
def test_the_choice_recovers_from_a_wrong_speed(
    source: Source, advantage: float, error: float, before: int
) -> None:
    world, right = World(source, advantage), advantage > 1
    for _ in range(before):
        world.ask()
    world.error = error
    for _ in range(WRONG_S // BETWEEN_S):
        world.ask()
    world.error = 1.0
    for _ in range(RECOVERED_REQUESTS):
        world.ask()
    chosen = [world.ask() is right for _ in range(WATCHED_REQUESTS)]
    assert chosen.count(False) <= 1 + WATCHED_REQUESTS * BETWEEN_S // EXPLORING_S
