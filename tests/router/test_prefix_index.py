"""The index against a naive model, and the matches that it must get right."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cacheengine.keys import HashScheme, key64
from router.prefix_index import LOWER_TIERS, ChunkRun, Claim, Match, PrefixIndex, keys64
from router.replica import Tier

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


class IndexMachine(RuleBasedStateMachine):
    """Random operations on the index and on counters per replica and tier."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_keys=10_000)
        self.held: dict[tuple[int, Tier], Counter[int]] = {}
        self.claims: list[tuple[Claim, int, set[int], float]] = []
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
        self.drop_belief(replica, keys)  # the later claim takes over
        self.claims.append((claim, replica, set(keys), self.now_s + ttl_s))

    @rule(which=st.integers(0, 20))
    def withdraw(self, which: int) -> None:
        if self.claims:
            claim, *_ = self.claims.pop(which % len(self.claims))
            self.index.withdraw(claim)

    @rule(step_s=st.integers(0, 3))
    def expire(self, step_s: int) -> None:
        self.now_s += step_s
        self.index.expire(self.now_s)
        self.claims = [each for each in self.claims if each[3] > self.now_s]

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


def test_expiring_takes_as_many_claims_as_it_may() -> None:
    index = PrefixIndex(100)
    for key in range(3):
        index.believe(0, [key], until_s=1.0)
    index.expire(1.0, limit=2)
    assert len(index) == 1


def test_keys64_are_the_low_64_bits_of_digests_of_any_scheme() -> None:
    for algorithm in ("sha256", "xxhash"):
        chain = HashScheme(algorithm).chain(range(64), 16)
        assert keys64(chain) == [key64(key) for key in chain]
    assert keys64([]) == []
