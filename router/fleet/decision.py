"""Candidates for a request, and the decision: where it goes, and why.

`router.scheduling` makes them, and `Fleet.start` acts on a `Decision`. `docs/cost-model.md`
explains the formula of `Candidate.score_s`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from router.config.cost_weights import CostWeights
from router.fleet.cost_model import Cost, CostPart, Work
from router.fleet.replica import SLOW_TIERS, Replica
from router.fleet.replica_queue import NO_KV, KvNeed
from router.index.prompt_keys import ChunkRun, KvTier, PromptKeys


class Reason(StrEnum):
    """Why a replica was picked."""

    LONGEST_MATCH = "longest-match"
    SESSION_HOME = "session-home"
    SESSION_SPILL = "session-spill"
    LEAST_LOADED = "least-loaded"
    NO_INFORMATION = "no-information"
    ONLY_REPLICA = "only-replica"
    BOUND = "bound"
    ROUND_ROBIN = "round-robin"
    RETRY = "retry"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSource:
    """Another replica, from which a candidate copies KV that it lacks."""

    replica: Replica
    runs: tuple[ChunkRun, ...]
    """The chunks to copy, without a gap, by their tiers at the source."""
    tokens: int
    nbytes: float
    gain_s: float
    """Seconds that the copy saves over computing those chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefiller:
    """Another replica, which prefills the prompt; the candidate's replica pulls its KV."""

    replica: Replica
    work: Work
    """At that replica."""
    cost: Cost
    pull_bytes: float
    waiting: int = 0
    """Requests there, or reserved for it, without a first token yet."""
    second_legs_s: Sequence[float] = ()
    """As `Candidate.second_legs_s`."""


@dataclass(slots=True, kw_only=True)  # not frozen: many are made for each decision
class Candidate:
    """A replica for one prompt, the source of its KV, and the predicted parts of its TTFT."""

    replica: Replica
    keys: PromptKeys
    runs: tuple[ChunkRun, ...] = ()
    """Matched chunks beyond the GPU, in the replica's tiers."""
    matched_tokens: Mapping[KvTier, int]
    """By tier; without the tokens to copy from a peer source."""
    work: Work
    cost: Cost
    kv: KvNeed = NO_KV
    """The KV memory that the prompt takes."""
    prefetch_gain_s: float = 0.0
    """Seconds that the chunks on disk and remote save over computing them."""
    source: PeerSource | None = None
    prefiller: Prefiller | None = None
    waiting: int = 0
    """Requests at the replica, or reserved for it, without a first token yet."""
    second_legs_s: Sequence[float] = ()
    """Those of them that other replicas prefill now: seconds until each can be pulled."""
    pairs_up: bool = False
    """Whether another replica may prefill the prompt."""
    busy_share: float = 0.0
    """Share of all replicas' time that recent requests took; above 1 the load exceeds the capacity.
    Not the replica's own share: what made it busy waits there and counts already, and a prompt
    that leaves it for that reason takes its KV with it."""
    own_share: float = 0.0
    """The same of the replica alone: for fetches, which delay nobody elsewhere."""
    output_tokens: float = 0.0
    """Expected length of the answer."""
    beyond_home_s: float = 0.0
    """Seconds of work that the session's home would not have: what is computed or fetched here is
    there already, and takes room from other KV in the caches."""

    @property
    def replica_id(self) -> str:
        """The replica's id."""
        return self.replica.id

    @property
    def in_flight(self) -> int:
        """Requests in flight at the replica, with those of other routers as far as known."""
        return self.replica.in_flight + self.replica.others_waiting + self.replica.others_running

    @property
    def matched(self) -> int:
        """Matched tokens in all tiers."""
        return sum(self.matched_tokens.values())

    @property
    def slow_tokens(self) -> int:
        """Matched tokens that lie only on disk or remote."""
        return sum(self.matched_tokens.get(tier, 0) for tier in SLOW_TIERS)

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token."""
        return self.cost.ttft_s

    @property
    def work_s(self) -> float:
        """Seconds of replicas' time, for computing and for fetching."""
        return self.busy_s + self.cost.fetch_s + self.cost.pull_s

    @property
    def busy_s(self) -> float:
        """Seconds of replicas' time that those behind it wait for."""
        return self.cost.busy_s + (self.prefiller.cost.busy_s if self.prefiller else 0.0)

    @property
    def computes_at(self) -> Replica:
        """The replica that computes the prompt."""
        return self.prefiller.replica if self.prefiller else self.replica

    @property
    def begins_in_s(self) -> float:
        """Seconds until that replica begins with the prompt."""
        return self.prefiller.cost.queue_s if self.prefiller else self.cost.queue_s

    def slowed_s(self, weights: CostWeights) -> float:
        """Return by how long running answers are delayed, in total.

        They wait for the prefill, wherever it is computed. Then a step lasts equally long for all
        of a replica's answers, and reads the KV of this one too.
        """
        read_s = self._alone_s * self.work.prompt_tokens / weights.doubling_tokens
        slowed_s = self.work.decoding * (self.cost.prefill_s + read_s)
        if (there := self.prefiller) is not None:
            slowed_s += there.work.decoding * there.cost.prefill_s
        return slowed_s

    def decode_s(self, weights: CostWeights) -> float:
        """Return the expected seconds from the first token to the last one.

        Prefills take their share of the replica's time. This one counts as those do that came
        before it: where it is computed, more like it follow. Not where another replica may prefill
        the prompt: answers after long prompts would seem to take up to twice as long as they do,
        and such prompts, whose KV takes longest to pull, would go to two replicas for nothing.
        """
        share = self.own_share
        if not self.pairs_up:
            share += self.cost.busy_s / weights.recent_s
        share = min(weights.most_prefill_share, share)
        work = self.work
        longer = 1.0 + (work.context_tokens + work.prompt_tokens) / weights.doubling_tokens
        return self._alone_s * longer / (1.0 - share)

    @property
    def _alone_s(self) -> float:
        """Seconds from the first token to the last one if nothing else ran at the replica."""
        return self.output_tokens * self.replica.rates.seconds(CostPart.OUTPUT_TOKEN)

    def after_s(self, weights: CostWeights) -> float:
        """Return the seconds that count after a first token: this answer's, and other answers'."""
        return self.decode_s(weights) + self.slowed_s(weights)

    def behind(self, weights: CostWeights) -> float:
        """Return how many requests are expected to wait behind this one.

        This is the number that waits there now, or the mean queue length ``r / (1 - r)`` of a
        server that is busy for a share r of its time (M/M/1), whichever is larger, within
        `CostWeights.least_behind` and `CostWeights.most_behind`.

        Where another replica may prefill the prompt, it is the sum of both: while those before it
        are computed, as many come as wait now. By the larger number, prefills waited where few
        answers run while other replicas had time for them.
        """
        return self._behind_prefill(self.waiting, self.second_legs_s, weights)

    def _behind_prefill(
        self, waiting: int, second_legs_s: Sequence[float], weights: CostWeights
    ) -> float:
        """Return `behind` for a replica; what waits to be pulled counts by its time."""
        waiting -= len(second_legs_s)
        usual = _usual(self.busy_share)
        expected = usual + waiting if self.pairs_up else max(usual, waiting)
        return min(weights.most_behind, max(weights.least_behind, expected))

    def behind_fetch(self, weights: CostWeights) -> float:
        """Return how many requests are expected to wait behind what this one fetches.

        Only the replica's own share counts, if that is the lower one. Otherwise a busy fleet would
        never copy KV to a replica that has none, however idle it is.
        """
        usual = _usual(min(self.busy_share, self.own_share))
        return min(weights.most_behind, max(weights.least_behind, usual, self.waiting))

    def others_s(self, weights: CostWeights) -> float:
        """Return what the request costs others: its time, for each request behind it.

        Fetching counts too: transfers are shared, and fetched KV evicts KV in CPU RAM that others
        would find there. What a session's home holds already counts once more, as work to come:
        other KV that it evicts has to be computed again.
        """
        behind = self.behind(weights)
        fetch_s = self.cost.fetch_s + self.cost.pull_s
        own_s = behind * self.cost.busy_s + self.behind_fetch(weights) * fetch_s
        own_s += _late_s(self.cost, self.second_legs_s)
        if (there := self.prefiller) is not None:
            behind_there = self._behind_prefill(there.waiting, there.second_legs_s, weights)
            own_s += behind_there * there.cost.busy_s + _late_s(there.cost, there.second_legs_s)
        return own_s + (1.0 + behind) * self.beyond_home_s

    def score_s(self, weights: CostWeights) -> float:
        """Return what the picker minimizes, in seconds before a first token."""
        after_s = self.after_s(weights) / weights.first_token_weight
        return self.cost.ttft_s + self.others_s(weights) + after_s

    def slow_keys(self) -> tuple[bytes, ...]:
        """Return the whole digests of the chunks to use that lie only on disk or remote."""
        if not self.keys.chain:
            return ()
        runs = (run for run in self.runs if run.tier in SLOW_TIERS)
        return self.keys.chunks(runs)[: -(-self.slow_tokens // self.keys.chunk_tokens)]


def _usual(share: float) -> float:
    """Return the mean queue of a server that is busy for a share of its time (M/M/1)."""
    return share / (1.0 - share) if share < 1.0 else inf


def _late_s(cost: Cost, second_legs_s: Sequence[float]) -> float:
    """Return by how long a prefill delays second legs, in total.

    One that comes before the prefill's end waits for it: until then vLLM admits no request.
    """
    end_s = cost.queue_s + cost.busy_s
    return sum(min(cost.busy_s, max(0.0, end_s - each)) for each in second_legs_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCopy:
    """KV that the picked replica should copy from another one before the request is sent."""

    source_id: str
    keys: tuple[bytes, ...] = field(repr=False)
    """Whole digests of the chunks that the source holds, in any tier, and the picked one lacks."""
    nbytes: int
    expected_gain_s: float
    """Seconds that the copy saves over computing those chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes and why. Making it changes nothing; `Fleet.start` acts on it."""

    picked: Candidate
    reason: Reason
    prompt_tokens: int
    candidates: tuple[Candidate, ...] = field(default=(), repr=False)
    """All scored candidates, with the picked one."""
    away: Sequence[Replica] = field(default=(), repr=False)
    """Replicas that get no requests now and may answer if the picked one fails later."""
    prefetch_keys: tuple[bytes, ...] = field(default=(), repr=False)
    """Whole digests of the matched chunks that lie only on disk or remote, in order."""
    copy: KvCopy | None = None
    home: str | None = None
    """Id of the session's home at the time of the decision, if it could take the request."""
    session: str | None = None
    streamed: bool = True
    """Whether the answer is streamed, so that its first token will be seen."""
    made_in_s: float = field(default=0.0, compare=False, repr=False)
    """Seconds that making the decision took; 0 where nothing measures that."""

    @property
    def replica_id(self) -> str:
        """Id of the picked replica."""
        return self.picked.replica.id

    @property
    def url(self) -> str:
        """URL of the picked replica."""
        return self.picked.replica.config.url

    @property
    def matched_tokens(self) -> Mapping[KvTier, int]:
        """Tokens of the prompt that the picked replica holds, by tier."""
        return self.picked.matched_tokens

    @property
    def predicted_ttft_s(self) -> float:
        """Predicted time to first token."""
        return self.picked.ttft_s

    @property
    def expected_gain_s(self) -> float:
        """Seconds that the prefetch saves over computing its chunks: a longer wait is a loss."""
        return self.picked.prefetch_gain_s if self.prefetch_keys else 0.0

    @property
    def staged_tokens(self) -> int:
        """Tokens whose KV is brought to the replica's CPU RAM before the request is sent."""
        source = self.picked.source
        copied = source.tokens if source is not None else 0
        return copied + (self.picked.slow_tokens if self.prefetch_keys else 0)

    @property
    def is_staged(self) -> bool:
        """Whether KV must be brought to the replica's CPU RAM, or be computed at another replica,
        before the request is sent."""
        return (
            bool(self.prefetch_keys) or self.copy is not None or self.picked.prefiller is not None
        )

    def first_leg(self) -> "Decision | None":
        """Return the decision for the prefill at another replica; None if there is none.

        Its end is seen, as that of a stream is: its answer is one token.
        """
        picked, prefiller = self.picked, self.picked.prefiller
        if prefiller is None:
            return None
        replica = prefiller.replica
        return Decision(
            picked=Candidate(
                replica=replica,
                keys=picked.keys if replica.has_keys_of(picked.replica) else PromptKeys(),
                matched_tokens={},
                work=prefiller.work,
                cost=prefiller.cost,
                kv=picked.kv,
            ),
            reason=self.reason,
            prompt_tokens=self.prompt_tokens,
        )
