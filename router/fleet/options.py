"""What one prompt would cost at one replica: the match of its keys, the ways, the seconds. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from router.config import Judgment
from router.fleet.policy import CandidateCost, with_taken_s
from router.fleet.replica import Replica
from router.latency import Cost, Part, Promised, Work
from router.residency import ChunkRun, Match, PrefixIndex, PromptKeys, Tier

_SLOW: Final = {Tier.DISK: Part.DISK, Tier.REMOTE: Part.REMOTE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Chunks of a prompt that another replica could give: those of ``runs``, without a gap."""

    donor: Replica
    runs: tuple[ChunkRun, ...]
    """In the donor's tiers."""


@dataclass(slots=True, kw_only=True)  # not frozen: many are made for each decision
class Way:
    """One way to serve a prompt at a replica."""

    work: Work
    cost: Cost
    gain_s: float = 0.0
    """What using the chunks on its disk and remote saves over computing them."""
    offer: Offer | None = None
    """The chunks to be copied there first."""
    copied_tokens: int = 0
    copy_gain_s: float = 0.0
    """What the copy saves over computing those chunks."""


@dataclass(slots=True, kw_only=True)  # not frozen: many are made for each decision
class Assessment:
    """A replica, weighed for one prompt."""

    replica: Replica
    candidate: CandidateCost
    keys: PromptKeys
    match: Match
    way: Way

    def slow_keys(self) -> tuple[bytes, ...]:
        """Return the whole keys of the chunks to be used that lie only on disk or remote."""
        if not self.keys.chain:
            return ()
        runs = (run for run in self.match.runs if run.tier in _SLOW)
        return self.keys.chunks(runs)[: -(-self.slow_tokens // self.keys.chunk_tokens)]

    @property
    def slow_tokens(self) -> int:
        """Matched tokens that are to be fetched from disk or remote."""
        return sum(self.candidate.matched_tokens.get(tier.value, 0) for tier in _SLOW)


class Assessor:
    """Weighs replicas for one prompt of ``prompt_tokens``.

    ``donors`` are replicas that hold much of it, each with how many blocks, of which
    others may get what they lack; ``promised`` is what replicas will
    be given before it, beside what they have; ``busy_share`` is the fleet's.
    """

    def __init__(
        self,
        index: PrefixIndex,
        prompt_tokens: int,
        *,
        judgment: Judgment,
        donors: Sequence[tuple[Replica, int]] = (),
        promised: Promised,
        busy_share: float,
        now_s: float,
    ) -> None:
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._judgment = judgment
        self._donors = donors
        self._promised = promised
        self._busy_share = busy_share
        self._now_s = now_s

    def assess(self, replica: Replica, keys: PromptKeys, gpu_blocks: int) -> Assessment:
        """Return what the prompt would cost at a replica whose GPU has so many blocks of it."""
        runs = self._index.runs(replica.slot, keys.chunk_keys, gpu_blocks // keys.blocks_per_chunk)
        match = Match(gpu_blocks, runs)
        held = match.tokens(keys.block_tokens, keys.blocks_per_chunk)
        matched = _usable(held, self._prompt_tokens, replica.max_staged_tokens)
        way = self._best_way(replica, keys, match, matched)
        cost = way.cost
        candidate = CandidateCost(
            replica_id=replica.id,
            matched_tokens={tier.value: count for tier, count in matched.items()},
            copied_tokens=way.copied_tokens,
            copied_from=way.offer.donor.id if way.offer else None,
            in_flight=replica.in_flight,
            waiting=self._waiting(replica),
            ttft_s=cost.ttft_s,
            base_s=cost.base_s,
            queue_s=cost.queue_s,
            fetch_s=cost.fetched_s,
            load_s=cost.load_s,
            prefill_s=cost.prefill_s,
            busy_share=self._share(replica),
        )
        return Assessment(replica=replica, candidate=candidate, keys=keys, match=match, way=way)

    def _new_tokens(self, keys: PromptKeys, matched_tokens: int) -> int:
        """Return what is left to compute: the last token at least, and with it its whole block."""
        least = 1
        if keys.chain:
            least += max(0, self._prompt_tokens - 1) % keys.block_tokens
        return max(least, self._prompt_tokens - matched_tokens)

    def _best_way(
        self, replica: Replica, keys: PromptKeys, match: Match, matched: dict[Tier, int]
    ) -> Way:
        own = self._own_way(replica, keys, matched)
        if not keys.chain or not replica.has_agent or replica.no_copies_until_s > self._now_s:
            return own
        ways = [own]
        blocks = match.blocks(keys.blocks_per_chunk)
        for donor, donor_blocks in self._donors:
            deeper = donor_blocks > blocks and _may_fetch(replica, donor)
            if deeper and (offer := self._offer(donor, replica, keys, match)):
                way = self._way_with(offer, replica, keys, matched, own)
                if way.copy_gain_s >= self._judgment.least_copy_gain_s:
                    ways.append(way)
        if len(ways) == 1:
            return own
        waiting, busy_share = self._waiting(replica), self._share(replica)

        def score_s(way: Way) -> float:
            return with_taken_s(
                way.cost.ttft_s,
                busy_s=way.cost.busy_s,
                fetch_s=way.cost.fetched_s,
                waiting=waiting,
                busy_share=busy_share,
                judgment=self._judgment,
            )

        return min(ways, key=score_s)

    def _share(self, replica: Replica) -> float:
        return (replica.recent.share(self._now_s) + self._busy_share) / 2

    def _waiting(self, replica: Replica) -> int:
        return replica.waiting + self._promised.requests(replica.slot)

    def _own_way(self, replica: Replica, keys: PromptKeys, matched: dict[Tier, int]) -> Way:
        """Return what it costs with the replica's slow tiers or without, whichever is less.

        Without is believed only when the slow tier's speed is known: a guess that
        never let it be used would never be put right.
        """
        deep = self._work(replica, keys, matched)
        deep_cost = replica.rates.cost(deep)
        slow = [tier for tier in _SLOW if matched.get(tier)]
        if not slow:
            return Way(work=deep, cost=deep_cost)
        # Tiers may alternate along a prefix. What of a faster tier lies behind a
        # slow one would be lost too; that is rare enough not to be told apart here.
        shallow = self._work(replica, keys, _before(matched, slow))
        shallow_cost = replica.rates.cost(shallow)
        known = all(replica.rates.knows(_SLOW[tier]) for tier in slow)
        if known and shallow_cost.ttft_s < deep_cost.ttft_s:
            return Way(work=shallow, cost=shallow_cost)
        gain_s = max(0.0, shallow_cost.busy_s - deep_cost.busy_s)
        return Way(work=deep, cost=deep_cost, gain_s=gain_s)

    def _offer(
        self, donor: Replica, replica: Replica, keys: PromptKeys, match: Match
    ) -> Offer | None:
        """Return what a replica could use of a donor's from the end of a match on."""
        on_gpu = match.gpu_blocks // keys.blocks_per_chunk
        start = match.runs[-1].stop if match.runs else on_gpu
        runs = self._index.runs(donor.slot, keys.chunk_keys, start)
        end = on_gpu + replica.max_staged_tokens / keys.chunk_tokens
        usable = [run for run in runs if run.start + 1 <= end]
        if not usable:
            return None
        last = usable[-1]
        usable[-1] = replace(last, stop=int(min(last.stop, end)))
        return Offer(donor=donor, runs=tuple(usable))

    def _way_with(
        self,
        offer: Offer,
        replica: Replica,
        keys: PromptKeys,
        matched: dict[Tier, int],
        own: Way,
    ) -> Way:
        """Return what it costs when the offer is copied first; the replica's own tiers all count.

        What of it lies on the donor's disk or remote is read there first, which
        is taken to be as fast as the replica's own.
        """
        reach = min(offer.runs[-1].stop * keys.chunk_tokens, self._prompt_tokens)
        per_chunk = keys.chunk_tokens * replica.kv_bytes_per_token
        slow = dict.fromkeys(_SLOW, 0.0)
        copied = 0.0
        for run in offer.runs:
            nbytes = (run.stop - run.start) * per_chunk
            copied += nbytes
            if run.tier in slow:
                slow[run.tier] += nbytes
        base = self._work(replica, keys, matched)
        new_tokens = self._new_tokens(keys, reach)
        work = Work(
            new_tokens=new_tokens,
            matched_tokens=max(0, self._prompt_tokens - new_tokens),
            load_bytes=(reach - matched.get(Tier.GPU, 0)) * replica.kv_bytes_per_token,
            disk_bytes=base.disk_bytes + slow[Tier.DISK],
            remote_bytes=base.remote_bytes + slow[Tier.REMOTE],
            peer_bytes=copied,
            queue_s=base.queue_s,
            backlog_s=max(base.backlog_s, offer.donor.fetching_until_s - self._now_s)
            if any(slow.values())
            else base.backlog_s,
            decoding=base.decoding,
        )
        cost = replica.rates.cost(work)
        gain_s = replica.rates.cost(base).busy_s - cost.busy_s
        return Way(
            work=work,
            cost=cost,
            gain_s=own.gain_s,
            offer=offer,
            copied_tokens=reach - sum(matched.values()),
            copy_gain_s=gain_s,
        )

    def _work(self, replica: Replica, keys: PromptKeys, matched: dict[Tier, int]) -> Work:
        total = sum(matched.values())
        per_token = replica.kv_bytes_per_token
        new_tokens = self._new_tokens(keys, total)
        return Work(
            new_tokens=new_tokens,
            matched_tokens=max(0, self._prompt_tokens - new_tokens),
            load_bytes=(total - matched.get(Tier.GPU, 0)) * per_token,
            disk_bytes=matched.get(Tier.DISK, 0) * per_token,
            remote_bytes=matched.get(Tier.REMOTE, 0) * per_token,
            queue_s=replica.line.queue_s(self._now_s) + self._promised.work_s(replica.slot),
            backlog_s=max(0.0, replica.fetching_until_s - self._now_s),
            decoding=replica.decoding,
        )


def actual(work: Work, cached_tokens: int, kv_bytes_per_token: float) -> Work:
    """Return what a request asked in truth, now that its cached tokens are known.

    Matched tokens that were not there are missing from the end: those to be
    copied first, then those of the slowest tiers.
    """
    prompt_tokens = work.new_tokens + work.matched_tokens
    matched = min(cached_tokens, prompt_tokens - 1)
    lost_bytes = max(0, work.matched_tokens - matched) * kv_bytes_per_token
    left_to_lose = lost_bytes
    left: list[float] = []
    for nbytes in (work.peer_bytes, work.remote_bytes, work.disk_bytes):
        left.append(max(0.0, nbytes - left_to_lose))
        left_to_lose = max(0.0, left_to_lose - nbytes)
    peer_bytes, remote_bytes, disk_bytes = left
    return Work(
        new_tokens=prompt_tokens - matched,
        matched_tokens=matched,
        load_bytes=max(0.0, work.load_bytes - lost_bytes),
        disk_bytes=disk_bytes,
        remote_bytes=remote_bytes,
        peer_bytes=peer_bytes,
        queue_s=work.queue_s,
        backlog_s=work.backlog_s,
        decoding=work.decoding,
    )


def _may_fetch(replica: Replica, donor: Replica) -> bool:
    """Whether a replica can use chunks of a donor."""
    if donor is replica or donor.layout != replica.layout:
        return False
    return donor.key_shape == replica.key_shape


def _usable(held: dict[Tier, int], prompt_tokens: int, max_staged_tokens: float) -> dict[Tier, int]:
    """Cut off what exceeds the prompt (token counts of texts are estimates), or the CPU RAM.

    All that is not on the GPU is brought there through CPU RAM, at once.
    """
    left: float = prompt_tokens
    usable: dict[Tier, int] = {}
    staged_left = max_staged_tokens
    for tier, count in held.items():
        usable[tier] = int(min(count, left if tier is Tier.GPU else min(left, staged_left)))
        left -= usable[tier]
        staged_left -= 0 if tier is Tier.GPU else usable[tier]
    return usable


def _before(matched: dict[Tier, int], slow: Sequence[Tier]) -> dict[Tier, int]:
    first = min(list(matched).index(tier) for tier in slow)
    return dict(list(matched.items())[:first])
