"""One replica for one prompt, and what the pick minimizes: the judgment's one value. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from router.config import Judgment
from router.fleet.replica import SLOW_TIERS, Replica
from router.index import ChunkRun, PromptKeys, Tier
from router.latency import NO_KV, Cost, KvNeed, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSource:
    """Another replica that the KV which a candidate lacks is copied from first."""

    replica: Replica
    runs: tuple[ChunkRun, ...]
    """The chunks to be copied, without a gap, in that replica's tiers."""
    tokens: int
    nbytes: float
    gain_s: float
    """What the copy saves over computing those chunks."""


@dataclass(slots=True, kw_only=True)  # not frozen: many are made for each decision
class Candidate:
    """A replica for one prompt, the source of its KV, and the predicted parts of its TTFT."""

    replica: Replica
    keys: PromptKeys
    runs: tuple[ChunkRun, ...] = ()
    """Matched chunks beyond the GPU, in the replica's tiers."""
    matched_tokens: Mapping[Tier, int]
    """By tier; tokens to be copied from a peer source are not among them."""
    work: Work
    cost: Cost
    kv: KvNeed = NO_KV
    """The KV memory that the prompt takes."""
    prefetch_gain_s: float = 0.0
    """What using the chunks on disk and remote saves over computing them."""
    source: PeerSource | None = None
    waiting: int = 0
    """Requests at the replica, or promised to it, without a first token yet."""
    busy_share: float = 0.0
    """Share of time that recent requests took, half of it the replica's own and half the
    fleet's: an idle replica's time is worth something where others are busy. Above 1 it falls
    behind."""

    @property
    def replica_id(self) -> str:
        """The replica's id."""
        return self.replica.id

    @property
    def in_flight(self) -> int:
        """Requests under way at the replica, as far as is known."""
        return self.replica.in_flight + self.replica.others_waiting + self.replica.others_running

    @property
    def matched(self) -> int:
        """Matched tokens in all tiers."""
        return sum(self.matched_tokens.values())

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token."""
        return self.cost.ttft_s

    def behind(self, judgment: Judgment) -> float:
        """Return how many requests are expected to wait behind this one.

        As many as wait there now, or as a queue usually holds whose server is busy for a share
        r of its time: ``r / (1 - r)`` on average (M/M/1). Within `Judgment.least_behind` and
        `Judgment.most_behind`.
        """
        usual = self.busy_share / (1.0 - self.busy_share) if self.busy_share < 1.0 else inf
        return min(judgment.most_behind, max(judgment.least_behind, usual, self.waiting))

    def others_s(self, judgment: Judgment) -> float:
        """Return what the request costs others: the time it takes, for each behind it.

        Fetching counts like computing: transfers are shared, and what they bring to CPU RAM
        evicts what others would find.
        """
        return self.behind(judgment) * (self.cost.busy_s + self.cost.fetch_s)

    def score_s(self, judgment: Judgment) -> float:
        """Return what the pick minimizes: ``ttft + others``."""
        return self.cost.ttft_s + self.others_s(judgment)

    def slow_keys(self) -> tuple[bytes, ...]:
        """Return the whole keys of the chunks to be used that lie only on disk or remote."""
        if not self.keys.chain:
            return ()
        slow_tokens = sum(self.matched_tokens.get(tier, 0) for tier in SLOW_TIERS)
        runs = (run for run in self.runs if run.tier in SLOW_TIERS)
        return self.keys.chunks(runs)[: -(-slow_tokens // self.keys.chunk_tokens)]
