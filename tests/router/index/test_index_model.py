"""The index against a naive model, after every random step; and that its limit holds."""

from collections import Counter
from collections.abc import Sequence
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.index.departed import DepartedKeys
from router.index.prefix_index import PrefixIndex, SpeculativeEntry
from router.index.prompt_keys import LOWER_TIERS, KvTier
from tests.router.index.helpers import CHAIN, check_depths

KEYS = st.lists(st.sampled_from(CHAIN), max_size=8)
REPLICAS = st.integers(0, 2)
STORES = (3, 5)
"""Slots of stores that replicas share."""
TIERS = st.sampled_from(list(KvTier))
STEPS = st.sampled_from([1, 2, 4])


def naive_match(
    gpu: set[int], lower: dict[KvTier, set[int]], keys: Sequence[int], step: int
) -> tuple[int, list[KvTier]]:
    """Return GPU blocks, and the tier of each chunk from the one that holds their end."""
    blocks = 0
    while blocks < len(keys) and keys[blocks] in gpu:
        blocks += 1
    tiers: list[KvTier] = []
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
        self.index = PrefixIndex(max_keys=10_000, departed=DepartedKeys(40))
        self.held: dict[tuple[int, KvTier], Counter[int]] = {}
        self.claims: list[tuple[SpeculativeEntry, int, set[int], float]] = []
        self.former: dict[SpeculativeEntry, dict[int, set[int]]] = {}
        self.mounts: dict[int, int] = {}
        self.now_s = 0.0

    def counter(self, replica: int, tier: KvTier) -> Counter[int]:
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
    def add(self, replica: int, tier: KvTier, keys: list[int], counted: bool) -> None:
        self.index.add(replica, tier, keys, counted=counted)
        for key in keys:
            counter = self.counter(replica, tier)
            counter[key] = counter[key] + 1 if counted else 1
        if tier is KvTier.GPU:
            self.drop_belief(replica, keys)

    @rule(replica=REPLICAS, tier=TIERS, keys=KEYS)
    def remove(self, replica: int, tier: KvTier, keys: list[int]) -> None:
        self.index.remove(replica, tier, keys)
        for key in keys:
            counter = self.counter(replica, tier)
            counter[key] -= 1
            if counter[key] <= 0:
                del counter[key]
                if tier is KvTier.GPU:
                    self.drop_belief(replica, [key])

    @rule(replica=REPLICAS, tiers=st.none() | st.sets(TIERS))
    def forget(self, replica: int, tiers: set[KvTier] | None) -> None:
        self.index.forget(replica, tiers)
        for tier in KvTier if tiers is None else tiers:
            self.counter(replica, tier).clear()
        if tiers is None:
            self.mounts = {store: by & ~(1 << replica) for store, by in self.mounts.items()}
        if tiers is None or KvTier.GPU in tiers:
            self.drop_belief(replica, CHAIN)

    @rule(
        replica=REPLICAS,
        length=st.integers(1, len(CHAIN)),
        ttl_s=st.integers(1, 5) | st.none(),
    )
    def believe(self, replica: int, length: int, ttl_s: int | None) -> None:
        keys = CHAIN[:length]
        until_s = None if ttl_s is None else self.now_s + ttl_s
        claim = self.index.believe(replica, keys, until_s)
        self.former[claim] = self.holders(replica, keys)
        self.drop_belief(replica, keys)  # the later claim takes over
        self.claims.append((claim, replica, set(keys), inf if until_s is None else until_s))

    def holders(self, replica: int, keys: Sequence[int]) -> dict[int, set[int]]:
        """Return the claims, if any, on those keys that need one, up to the first that has none."""
        found: dict[int, set[int]] = {}
        for key in keys:
            claims = [each[2] for each in self.claims if each[1] == replica and key in each[2]]
            if claims:
                (found[key],) = claims
            elif key not in self.counter(replica, KvTier.GPU):
                break
        return found

    @rule(which=st.integers(0, 20))
    def withdraw(self, which: int) -> None:
        if self.claims:
            claim, *_ = ended = self.claims.pop(which % len(self.claims))
            self.index.withdraw(claim)
            self.give_back(ended)

    @rule(which=st.integers(0, 20), ttl_s=st.integers(1, 5))
    def set_end(self, which: int, ttl_s: int) -> None:
        if self.claims:
            claim, replica, keys, until_s = self.claims.pop(which % len(self.claims))
            if until_s == inf:
                until_s = self.now_s + ttl_s
                self.index.set_end(claim, until_s)
            self.claims.append((claim, replica, keys, until_s))

    @rule(step_s=st.integers(0, 3))
    def expire(self, step_s: int) -> None:
        self.now_s += step_s
        self.index.expire(self.now_s)
        for ended in sorted(self.claims, key=lambda each: each[3]):
            if ended[3] <= self.now_s:
                self.claims.remove(ended)
                self.give_back(ended)

    def give_back(self, ended: tuple[SpeculativeEntry, int, set[int], float]) -> None:
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
        gpu = set(self.counter(replica, KvTier.GPU)) | self.believed(replica)
        lower = {tier: set(self.counter(replica, tier)) for tier in LOWER_TIERS}
        for store, replicas in self.mounts.items():
            if replicas >> replica & 1:
                lower[KvTier.REMOTE] |= set(self.counter(store, KvTier.REMOTE))
        blocks, tiers = naive_match(gpu, lower, keys, step)
        found = self.index.match(replica, keys, step)
        assert found.gpu_blocks == blocks
        assert [run.tier for run in found.runs for _ in range(run.start, run.stop)] == tiers
        assert all(
            one.stop == other.start for one, other in zip(found.runs, found.runs[1:], strict=False)
        )

    @rule(store=st.sampled_from(STORES), keys=KEYS, stored=st.booleans())
    def change_store(self, store: int, keys: list[int], stored: bool) -> None:
        (self.index.add if stored else self.index.remove)(store, KvTier.REMOTE, keys)
        self.held[store, KvTier.REMOTE] = Counter(
            dict.fromkeys(set(self.counter(store, KvTier.REMOTE)) - set(keys), 1)
            | (dict.fromkeys(keys, 1) if stored else {})
        )

    @rule(store=st.sampled_from(STORES), replicas=st.integers(0, 7))
    def mount(self, store: int, replicas: int) -> None:
        self.index.mount(store, replicas)
        self.mounts[store] = replicas

    @rule(store=st.sampled_from(STORES))
    def forget_store(self, store: int) -> None:
        self.index.forget(store)
        self.mounts.pop(store, None)
        self.counter(store, KvTier.REMOTE).clear()

    @rule(step=STEPS, length=st.integers(0, len(CHAIN)), among=st.integers(0, 7))
    def depths(self, step: int, length: int, among: int) -> None:
        check_depths(self.index, CHAIN[:length], step, among)

    @rule()
    def sweep(self) -> None:
        self.index.sweep(3)

    @invariant()
    def holds_together(self) -> None:
        self.index.check()
        for (replica, tier), counter in list(self.held.items()):
            count = len(counter)
            if tier is KvTier.REMOTE:
                stores = [each for each, by in self.mounts.items() if by >> replica & 1]
                count += sum(len(self.counter(store, tier)) for store in stores)
            assert self.index.held(replica).get(tier, 0) == count

    @invariant()
    def each_key_has_its_holders(self) -> None:
        for key in CHAIN:
            holders = self.index.holders(key, key)
            for (replica, _), counter in self.held.items():
                if key in counter and self.index.is_clear(replica):
                    assert holders >> replica & 1
            for replica in range(3):
                assert self.index.knows(replica, key, key) == self.holds(replica, key)

    def holds(self, replica: int, key: int) -> bool:
        """Whether a replica holds a key, or a store that it reads does."""
        stores = [each for each, by in self.mounts.items() if by >> replica & 1]
        in_stores = any(key in self.counter(each, KvTier.REMOTE) for each in stores)
        return in_stores or any(key in self.counter(replica, tier) for tier in KvTier)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=40)


class BoundedMachine(RuleBasedStateMachine):
    """The limit holds whatever happens, and what is evicted is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_keys=20, departed=DepartedKeys(8))
        self.now_s = 0.0

    @rule(replica=REPLICAS, tier=TIERS, keys=st.lists(st.integers(0, 60), max_size=40))
    def add(self, replica: int, tier: KvTier, keys: list[int]) -> None:
        self.index.add(replica, tier, keys)

    @rule(
        replica=REPLICAS,
        keys=st.lists(st.integers(0, 60), max_size=30, unique=True),
        ends=st.booleans(),
    )
    def believe(self, replica: int, keys: list[int], ends: bool) -> None:
        self.now_s += 1
        self.index.believe(replica, keys, self.now_s + 3 if ends else None)
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
        index.add(replica, KvTier.GPU, [key for key in CHAIN[:on_gpu] if key != CHAIN[hole]])
        index.add(replica, KvTier.DISK, CHAIN[:on_disk])
    index.check()
    check_depths(index, CHAIN, step, among)
    check_depths(index, CHAIN, step, 2 ** len(held) - 1)


TestBounded = BoundedMachine.TestCase
TestBounded.settings = settings(max_examples=60, stateful_step_count=30)
