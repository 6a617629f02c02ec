"""Any run of stores, holds, promotions and deaths: the engine's state holds together."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cacheengine.record import KeyEventRecord
from cacheengine.residency.decisions import Presence, Promotion
from replay.clock import VirtualLoop
from replay.engine import ModelEngine
from tests.bench.discrete.building import CHUNK, machine
from tests.cacheengine.helpers import key

PREFIXES = st.tuples(st.integers(0, 3), st.integers(1, 5)).map(
    lambda drawn: [key(10 * drawn[0] + at) for at in range(drawn[1])]
)


class AnEngine(RuleBasedStateMachine):
    """One engine on a loop of its own; what it tells must always be what it says it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.told: dict[str, set[bytes]] = {"cpu": set(), "disk": set()}
        self.storing: set[bytes] = set()
        self.held: Counter[bytes] = Counter()
        self.promotions: list[Promotion] = []

    @initialize(cpu_chunks=st.integers(0, 8), disk_chunks=st.integers(0, 12))
    def start(self, cpu_chunks: int, disk_chunks: int) -> None:
        given = machine(cpu_tokens=cpu_chunks * CHUNK, disk_tokens=disk_chunks * CHUNK)
        self.engine = self._do(lambda: ModelEngine(given, self._hear))

    def _do(self, act: Callable[[], Any]) -> Any:
        async def main() -> Any:
            return act()

        return self.loop.run_until_complete(main())

    def _hear(self, records: Sequence[KeyEventRecord]) -> None:
        for each in records:
            held, keys = self.told[each.tier], set(each.keys)
            if each.stored:
                assert not held & keys, "told twice"
                held |= keys
            else:
                assert keys <= held, "lost what was never there"
                held -= keys

    @rule(keys=PREFIXES)
    def reserve(self, keys: list[bytes]) -> None:
        reservation = self._do(lambda: self.engine.prepare_store(keys))
        if reservation is not None:
            self.storing.update(reservation.keys)

    @precondition(lambda self: self.storing)
    @rule(success=st.booleans(), prefetched=st.booleans())
    def complete(self, success: bool, prefetched: bool) -> None:
        keys, self.storing = self.storing, set()
        self._do(lambda: self.engine.complete_store(keys, success=success, prefetched=prefetched))

    @rule(keys=PREFIXES, pin_s=st.sampled_from([0.0, 0.05, 5.0]))
    def promote(self, keys: list[bytes], pin_s: float) -> None:
        self.promotions.append(self._do(lambda: self.engine.promote(keys, pin_s=pin_s)))

    @rule(keys=PREFIXES)
    def hold(self, keys: list[bytes]) -> None:
        for each in keys:
            if self._do(partial(self.engine.try_hold, each)) is not None:
                self.held[each] += 1

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        for each in list(self.held.elements()):
            self._do(partial(self.engine.release, [each]))
        self.held.clear()

    @rule(keys=PREFIXES)
    def touch(self, keys: list[bytes]) -> None:
        self._do(lambda: self.engine.touch(keys))

    @rule()
    def die(self) -> None:
        self._do(self.engine.clear_cpu)

    @rule(wait_s=st.sampled_from([0.001, 0.02, 0.04, 0.3]))
    def wait(self, wait_s: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(wait_s))

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "engine"):
            self._do(self.engine.check)

    @invariant()
    def what_it_told_is_what_it_holds(self) -> None:
        if not hasattr(self, "engine"):
            return
        for text in range(4):
            for at in range(5):
                each = key(10 * text + at)
                found = self._do(partial(self.engine.match, [each]))
                told = [tier for tier in ("cpu", "disk") if each in self.told[tier]]
                assert found == told[:1]
                if found == ["cpu"]:
                    assert self.engine.lookup(each) is Presence.CPU

    def teardown(self) -> None:
        """All that was begun ends: no promotion waits for ever."""
        if hasattr(self, "engine"):
            if self.storing:
                self.complete(success=True, prefetched=False)
            self.wait(100.0)
            assert all(each.done for each in self.promotions)
            self._do(self.engine.check)
        self.loop.close()


TestEngine = AnEngine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=30)
