"""The index against a naive model, and the matches that it must get right."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cacheengine.keys import HashScheme, key64
from router.residency.block_hashes import keys64
from router.residency.claims import Claim
from router.residency.matches import LOWER_TIERS, ChunkRun, Match
from router.residency.prefix_index import PrefixIndex
from router.residency.replica_sets import Depth, slots
from router.residency.tiers import Tier

CHAIN = list(range(100, 124))
KEYS = st.lists(st.sampled_from(CHAIN), max_size=8)
REPLICAS = st.integers(0, 2)
TIERS = st.sampled_from(list(Tier))
STEPS = st.sampled_from([1, 2, 4])


def naive_match(
    gpu: set[int], lower: dict[Tier, set[int]], keys: Sequence[int], step: int
) -> tuple[int, list[Tier]]:
    """Return GPU blocks, and the tier of each chunk from the one that holds their end."""
    blocks = 0
    while blocks < len(keys) and keys[blocks] in gpu:
        blocks += 1
    tiers: list[Tier] = []
    if blocks == len(keys):
        return blocks, tiers
    for end in range((blocks // step + 1) * step, len(keys) + 1, step):
        found = [tier for tier in LOWER_TIERS if keys[end - 1] in lower[tier]]
        if not found:
            break
        tiers.append(found[0])
    return blocks, tiers


def check_depths(index: PrefixIndex, keys: Sequence[int], step: int, among: int) -> None:
    """See that for each replica the depth is what its own match says, deepest first."""
    depths = index.depths(keys, step, among)
    assert [each.blocks for each in depths] == sorted(
        (each.blocks for each in depths), reverse=True
    )
    found = [
        (slot, each.gpu_blocks, each.blocks) for each in depths for slot in slots(each.replicas)
    ]
    matches = {slot: index.match(slot, keys, step) for slot in slots(among)}
    assert sorted(found) == [
        (slot, match.gpu_blocks, sum(match.tokens(1, step).values()))
        for slot, match in matches.items()
        if match != Match()
    ]


class IndexMachine(RuleBasedStateMachine):
    """Random operations on the index and on counters per replica and tier."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_keys=10_000)
        self.held: dict[tuple[int, Tier], Counter[int]] = {}
        self.claims: list[tuple[Claim, int, set[int], float]] = []
        self.former: dict[Claim, dict[int, set[int]]] = {}
        self.now_s = 0.0

    def counter(self, replica: int, tier: Tier) -> Counter[int]:
        return self.held.setdefault((replica, tier), Counter())

    def believed(self, replica: int) -> set[int]:
        keys: set[int] = set()
        for _, at, claimed, _ in self.claims:
            if at == replica:
                keys |= claimed
        return keys

    def drop_belief(self, replica: int, keys: Sequence[int]) -> None:
        for _, at, claimed, _ in self.claims:
            if at == replica:
                claimed -= set(keys)

    @rule(replica=REPLICAS, tier=TIERS, keys=KEYS, counted=st.booleans())
    def add(self, replica: int, tier: Tier, keys: list[int], counted: bool) -> None:
        self.index.add(replica, tier, keys, counted=counted)
        for key in keys:
            counter = self.counter(replica, tier)
            counter[key] = counter[key] + 1 if counted else 1
        if tier is Tier.GPU:
            self.drop_belief(replica, keys)

    @rule(replica=REPLICAS, tier=TIERS, keys=KEYS)
    def remove(self, replica: int, tier: Tier, keys: list[int]) -> None:
        self.index.remove(replica, tier, keys)
        for key in keys:
            counter = self.counter(replica, tier)
            counter[key] -= 1
            if counter[key] <= 0:
                del counter[key]
                if tier is Tier.GPU:
                    self.drop_belief(replica, [key])

    @rule(replica=REPLICAS, tiers=st.none() | st.sets(TIERS))
    def forget(self, replica: int, tiers: set[Tier] | None) -> None:
        self.index.forget(replica, tiers)
        for tier in Tier if tiers is None else tiers:
            self.counter(replica, tier).clear()
        if tiers is None or Tier.GPU in tiers:
            self.drop_belief(replica, CHAIN)

    @rule(replica=REPLICAS, length=st.integers(1, len(CHAIN)), ttl_s=st.integers(1, 5))
    def believe(self, replica: int, length: int, ttl_s: int) -> None:
        keys = CHAIN[:length]
        claim = self.index.believe(replica, keys, self.now_s + ttl_s)
        self.former[claim] = self.holders(replica, keys)
        self.drop_belief(replica, keys)  # the later claim takes over
        self.claims.append((claim, replica, set(keys), self.now_s + ttl_s))

    def holders(self, replica: int, keys: Sequence[int]) -> dict[int, set[int]]:
        """Return the claims, if any, on those keys that need one, up to the first that has none."""
        found: dict[int, set[int]] = {}
        for key in keys:
            claims = [each[2] for each in self.claims if each[1] == replica and key in each[2]]
            if claims:
                (found[key],) = claims
            elif key not in self.counter(replica, Tier.GPU):
                break
        return found

    @rule(which=st.integers(0, 20))
    def withdraw(self, which: int) -> None:
        if self.claims:
            claim, *_ = ended = self.claims.pop(which % len(self.claims))
            self.index.withdraw(claim)
            self.give_back(ended)

    @rule(step_s=st.integers(0, 3))
    def expire(self, step_s: int) -> None:
        self.now_s += step_s
        self.index.expire(self.now_s)
        for ended in sorted(self.claims, key=lambda each: each[3]):
            if ended[3] <= self.now_s:
                self.claims.remove(ended)
                self.give_back(ended)

    def give_back(self, ended: tuple[Claim, int, set[int], float]) -> None:
        """Let the claims whose place one took believe again, if they have not ended."""
        claim, _, keys, _ = ended
        for key in keys:
            former = self.former[claim].get(key)
            if any(former is claimed for _, _, claimed, _ in self.claims):
                assert former is not None
                former.add(key)

    @rule(replica=REPLICAS, step=STEPS, start=st.integers(0, 3), length=st.integers(0, len(CHAIN)))
    def match(self, replica: int, step: int, start: int, length: int) -> None:
        keys = CHAIN[start : start + length]
        gpu = set(self.counter(replica, Tier.GPU)) | self.believed(replica)
        lower = {tier: set(self.counter(replica, tier)) for tier in LOWER_TIERS}
        blocks, tiers = naive_match(gpu, lower, keys, step)
        found = self.index.match(replica, keys, step)
        assert found.gpu_blocks == blocks
        assert [run.tier for run in found.runs for _ in range(run.start, run.stop)] == tiers
        assert all(
            one.stop == other.start for one, other in zip(found.runs, found.runs[1:], strict=False)
        )

    @rule(step=STEPS, length=st.integers(0, len(CHAIN)), among=st.integers(0, 7))
    def depths(self, step: int, length: int, among: int) -> None:
        check_depths(self.index, CHAIN[:length], step, among)

    @rule()
    def sweep(self) -> None:
        self.index.sweep(3)

    @invariant()
    def holds_together(self) -> None:
        self.index.check()
        for (replica, tier), counter in self.held.items():
            assert self.index.held(replica).get(tier, 0) == len(counter)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class BoundedMachine(RuleBasedStateMachine):
    """The limit holds whatever happens, and what is evicted is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_keys=20)
        self.now_s = 0.0

    @rule(replica=REPLICAS, tier=TIERS, keys=st.lists(st.integers(0, 60), max_size=40))
    def add(self, replica: int, tier: Tier, keys: list[int]) -> None:
        self.index.add(replica, tier, keys)

    @rule(replica=REPLICAS, keys=st.lists(st.integers(0, 60), max_size=30, unique=True))
    def believe(self, replica: int, keys: list[int]) -> None:
        self.now_s += 1
        self.index.believe(replica, keys, self.now_s + 3)
        self.index.expire(self.now_s)

    @rule(replica=REPLICAS)
    def forget(self, replica: int) -> None:
        self.index.forget(replica)

    @invariant()
    def stays_bounded(self) -> None:
        self.index.check()


@given(
    held=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 24), st.integers(0, 23))),
    step=STEPS,
    among=st.integers(0, 2**64 - 1),
)
def test_one_walk_tells_what_each_replicas_match_does(
    held: list[tuple[int, int, int]], step: int, among: int
) -> None:
    """Replicas hold different lengths, on the GPU with a hole."""
    index = PrefixIndex(10_000)
    for replica, (on_gpu, on_disk, hole) in enumerate(held):
        index.add(replica, Tier.GPU, [key for key in CHAIN[:on_gpu] if key != CHAIN[hole]])
        index.add(replica, Tier.DISK, CHAIN[:on_disk])
    index.check()
    check_depths(index, CHAIN, step, among)
    check_depths(index, CHAIN, step, 2 ** len(held) - 1)


TestBounded = BoundedMachine.TestCase
TestBounded.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_lower_tiers_go_on_from_the_chunk_that_holds_the_end_of_the_gpu_blocks() -> None:
    """Of the first chunk from a lower tier only what the GPU lacks counts."""
    index = PrefixIndex(1000)
    keys = list(range(16))
    index.add(0, Tier.GPU, keys[:6])
    index.add(0, Tier.CPU, [keys[7]])
    index.add(0, Tier.DISK, [keys[11], keys[15]])
    found = index.match(0, keys, blocks_per_chunk=4)
    assert found == Match(6, (ChunkRun(Tier.CPU, 1, 2), ChunkRun(Tier.DISK, 2, 4)))
    assert found.tokens(16, 4) == {Tier.GPU: 96, Tier.CPU: 32, Tier.DISK: 128}


def test_a_missing_chunk_ends_the_match() -> None:
    index = PrefixIndex(1000)
    keys = list(range(12))
    index.add(0, Tier.CPU, [keys[3], keys[11]])
    assert index.match(0, keys, blocks_per_chunk=4).runs == (ChunkRun(Tier.CPU, 0, 1),)


def test_without_the_chunk_that_holds_the_gpus_end_later_ones_are_worth_nothing() -> None:
    index = PrefixIndex(1000)
    keys = list(range(12))
    index.add(0, Tier.GPU, keys[:5])
    index.add(0, Tier.CPU, [keys[3], keys[11]])
    assert index.match(0, keys, blocks_per_chunk=4) == Match(5)


def test_the_fastest_tier_of_a_chunk_counts() -> None:
    index = PrefixIndex(1000)
    keys = list(range(4))
    index.add(0, Tier.REMOTE, keys)
    index.add(0, Tier.DISK, keys[:3])
    index.add(0, Tier.CPU, keys[1:2])
    assert [run.tier for run in index.match(0, keys).runs] == [
        Tier.DISK,
        Tier.CPU,
        Tier.DISK,
        Tier.REMOTE,
    ]


def test_the_second_copy_of_a_block_outlives_the_first() -> None:
    """vLLM reports every physical copy stored and removed."""
    index = PrefixIndex(1000)
    index.add(0, Tier.GPU, [1], counted=True)
    index.add(0, Tier.GPU, [1], counted=True)
    index.remove(0, Tier.GPU, [1])
    assert index.match(0, [1]).gpu_blocks == 1
    index.remove(0, Tier.GPU, [1])
    assert index.match(0, [1]).gpu_blocks == 0


def test_claims_are_evicted_before_what_is_known() -> None:
    index = PrefixIndex(10)
    index.add(0, Tier.GPU, range(8))
    index.believe(1, [100, 101], until_s=9.0)
    index.add(0, Tier.GPU, [8])
    assert index.match(1, [100, 101]).gpu_blocks == 0
    assert index.held(0) == {Tier.GPU: 9}
    assert index.evicted == 2


def test_the_oldest_keys_of_the_largest_holding_are_evicted() -> None:
    index = PrefixIndex(10)
    index.add(0, Tier.GPU, range(7))
    index.add(1, Tier.CPU, range(3))
    index.add(1, Tier.CPU, [3])
    assert index.held(1) == {Tier.CPU: 4}
    assert index.match(0, range(1, 7)).gpu_blocks == 6
    assert index.match(0, [0]).gpu_blocks == 0
    assert index.evicted == 1


def test_a_withdrawn_claim_leaves_what_a_later_one_claims() -> None:
    index = PrefixIndex(100)
    first = index.believe(0, [1, 2, 3], until_s=5.0)
    index.believe(0, [1, 2], until_s=6.0)
    index.withdraw(first)
    assert index.match(0, [1, 2, 3]).gpu_blocks == 2
    index.check()


def test_a_withdrawn_claim_leaves_what_an_earlier_one_claimed() -> None:
    index = PrefixIndex(100)
    first = index.believe(0, [1, 2], until_s=5.0)
    second = index.believe(0, [1, 2, 3], until_s=6.0)
    index.withdraw(second)
    assert index.match(0, [1, 2, 3]).gpu_blocks == 2
    index.check()
    third = index.believe(0, [1], until_s=7.0)
    index.withdraw(first)
    index.withdraw(third)
    assert index.match(0, [1, 2, 3]).gpu_blocks == 0
    index.check()


def test_a_claim_of_what_is_known_takes_no_room() -> None:
    index = PrefixIndex(100)
    index.add(0, Tier.GPU, [1, 2])
    for _ in range(1000):
        index.withdraw(index.believe(0, [1, 2], until_s=5.0))
    assert not index._claims._by_end


def test_expiring_ends_whole_claims_of_as_many_keys_as_it_may() -> None:
    index = PrefixIndex(100)
    for key in range(3):
        index.believe(0, [key], until_s=1.0)
    index.expire(1.0, max_keys=14)
    assert len(index) == 1


def test_keys64_are_the_low_64_bits_of_digests_of_any_scheme() -> None:
    for algorithm in ("sha256", "xxhash"):
        chain = HashScheme(algorithm).chain(range(64), 16)
        assert keys64(chain) == [key64(key) for key in chain]
    assert keys64([]) == []


def test_replicas_that_match_equally_deep_are_one_group() -> None:
    index = PrefixIndex(1000)
    keys = list(range(8))
    for replica in (0, 5, 900):
        index.add(replica, Tier.GPU, keys[:6])
    index.add(5, Tier.DISK, [keys[3], keys[7]])
    index.add(7, Tier.DISK, [keys[3], keys[7]])
    everyone = (1 << 1000) - 1
    assert index.depths(keys, 4, everyone) == [
        Depth(1 << 5, 6, 8),
        Depth(1 << 7, 0, 8),
        Depth(1 << 0 | 1 << 900, 6, 6),
    ]
    assert index.depths(keys, 4, 1 << 900) == [Depth(1 << 900, 6, 6)]
    assert index.depths([9, *keys], 4, everyone) == []


@pytest.mark.parametrize("replicas", [3, 60])
def test_replicas_that_end_at_different_depths_are_told_apart(replicas: int) -> None:
    index = PrefixIndex(10_000)
    for replica in range(replicas):
        index.add(replica, Tier.GPU, CHAIN[: replica * 7 % 24])
        index.add(replica, Tier.CPU, CHAIN[: replica * 5 % 23])
    check_depths(index, CHAIN, 1, 2**replicas - 1)
    check_depths(index, CHAIN, 4, 2**replicas - 1)


def test_what_is_forgotten_counts_no_more_before_it_is_swept() -> None:
    index = PrefixIndex(1000)
    keys = list(range(25))
    index.add(0, Tier.GPU, keys)
    index.add(1, Tier.GPU, keys[:5])
    index.forget(0)
    assert index.depths(keys, 1, 0b11) == [Depth(0b10, 5, 5)]
    index.add(0, Tier.GPU, keys[:3])
    for _ in range(3):
        assert index.depths(keys, 1, 0b11) == [Depth(0b10, 5, 5), Depth(0b01, 3, 3)]
        index.sweep(10)
        index.check()
    assert len(index) == 8


def test_no_holding_is_evicted_whole_while_others_are_as_large() -> None:
    index = PrefixIndex(16_000)
    for replica in range(160):
        index.add(replica, Tier.GPU, range(100))
    index.add(0, Tier.GPU, [100])
    assert min(index.held(replica)[Tier.GPU] for replica in range(160)) >= 90
    assert index.evicted == 63


def test_slots_are_those_of_the_bits_few_or_many() -> None:
    for replicas in ([], [0], [999], [3, 64, 999], list(range(1000)), list(range(0, 1000, 7))):
        assert slots(sum(1 << replica for replica in replicas)) == replicas
