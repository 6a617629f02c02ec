"""Calls about many chunks, done a portion at a time: between two, others have the lock.

Each says what other threads may do between its portions, and why that does no harm.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from cacheengine.engine.tier_io import Clock, Lend
from cacheengine.residency import (
    PORTION,
    SHARDS,
    Decider,
    Entry,
    Holder,
    Promotion,
    StoreReservation,
    count_held,
)
from warmroute_common import agent_protocol as wire
from warmroute_common.keys import key64

_T = TypeVar("_T")


def portions(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield items in order, as many at once as are decided about in one loan of the state."""
    for start in range(0, len(items), PORTION):
        yield items[start : start + PORTION]


class LongCalls:
    """What `CacheEngine` promises of its calls about many chunks; it has their docstrings."""

    def __init__(self, deciding: Lend, clock: Clock) -> None:
        self._deciding = deciding
        self._clock = clock

    # --- holds, uses ---

    def hold(self, keys: Sequence[bytes], *, held_before: bool, holder: Holder) -> list[int]:
        """Hold all or none.

        Between portions others may clear what is not held yet: then none is. What is held
        already keeps its slot, cleared or not. Pins end only when all is held.
        """
        if len(keys) <= PORTION:
            with self._deciding() as decider:
                slots = decider.hold(keys, held_before=held_before)
                decider.note_hold(keys, holder)
            return slots
        slots = []
        try:
            for portion in portions(keys):
                with self._deciding() as decider:
                    slots += decider.hold(portion, held_before=held_before)
        except KeyError:
            self.release(keys[: len(slots)])
            raise
        for portion in portions(keys):
            with self._deciding() as decider:
                decider.note_hold(portion, holder)
        return slots

    def release(self, keys: Sequence[bytes]) -> None:
        """End holds; the chunks of later portions are kept by theirs until it is their turn."""
        for portion in portions(keys):
            with self._deciding() as decider:
                decider.release(portion, self._clock())

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note uses, the end of the prefix first.

        What others use in between comes to lie between a prefix's chunks, the first of which
        is still more recent than all that follow it.
        """
        for portion in reversed([*portions(keys)]):
            with self._deciding() as decider:
                decider.touch(portion)

    # --- stores ---

    def prepare_store(
        self, keys: Sequence[bytes], prefix: Collection[bytes]
    ) -> StoreReservation | None:
        """Reserve slots up to the first chunk that finds none.

        No eviction takes what is reserved. Between portions others may take free slots, or
        store one of the chunks: then fewer find room, or that one is not wanted any more.
        """
        wanted = list(dict.fromkeys(keys))
        with self._deciding() as decider:
            protected = decider.stores.protected(wanted, prefix)
        made = StoreReservation((), (), ())
        at = 0
        while at < len(wanted):
            portion = wanted[at : at + PORTION]
            with self._deciding() as decider:
                if made.refused:
                    part = decider.stores.refuse(portion)
                else:
                    part = decider.stores.prepare(portion, self._clock(), protected)
            # A part that was cut short says nothing about what follows: that has its turn next.
            at += len(portion) if part.next_key is None else portion.index(part.next_key)
            made = made.joined(part)
        return made if made.keys or not made.refused else None

    def complete_store(self, keys: Collection[bytes], *, success: bool, prefetched: bool) -> None:
        """Publish from the end of the prefix on, then queue puts from its first chunk on.

        For the first chunk is to be the most recent, and the queue may be short.
        A reservation is its caller's alone, so what has one when it is looked for has it in its
        turn, cleared or not. Until its put is queued a chunk is held: others may find it, and
        clear it, but nothing takes its slot.
        """
        wanted = list(dict.fromkeys(keys))
        for portion in portions(wanted):
            with self._deciding() as decider:
                decider.stores.check(portion)
        stored: list[Entry] = []
        for portion in reversed([*portions(wanted)]):
            with self._deciding() as decider:
                whole = decider.stores.end(
                    portion, self._clock(), success=success, prefetched=prefetched
                )
                stored += reversed(whole)
        stored.reverse()
        for entries in portions(stored):
            with self._deciding() as decider:
                decider.stores.put(entries, self._clock())

    # --- promotion, pins ---

    def promote(self, keys: Sequence[bytes], pin_s: float, holder: Holder) -> Promotion:
        """Go along the prefix; where the remote tier is asked, its I/O goes on with the rest.

        What a portion has pinned no later one evicts, nor an unpinned chunk of the prefix.
        Others may evict or clear what is not reached yet: as if they had come before this call.
        """
        # First of all, so that what is wanted leaves the front of the order,
        # where room is looked for.
        self.touch(keys)
        self._expire_if_full()
        with self._deciding() as decider:
            walk = decider.walks.begin(keys, pin_s, holder)
            goes_on = decider.walks.go_on(walk, self._clock())
        while goes_on:
            with self._deciding() as decider:
                goes_on = decider.walks.go_on(walk, self._clock())
        return walk.promotion

    def may_promote(self) -> bool:
        """Look for room once; a search that is cut short goes on with the next call."""
        self._expire_if_full()
        with self._deciding() as decider:
            return decider.may_promote(self._clock())

    def _expire_if_full(self) -> None:
        with self._deciding() as decider:
            may_pin = decider.cpu.may_pin(None)
        if not may_pin:
            # Pins that are over still count against what may be pinned.
            self.expire_pins()

    def end_pins(self, keys: Sequence[bytes], holder: Holder) -> None:
        """End one holder's pins; one that it gets meanwhile stays, or ends with the others."""
        for portion in portions(keys):
            with self._deciding() as decider:
                decider.end_pins(portion, holder, self._clock())

    def expire_pins(self) -> int:
        """End pins that are over; one that others made longer meanwhile is none of them."""
        ended, is_more = 0, True
        while is_more:
            with self._deciding() as decider:
                count, is_more = decider.expire_pins(self._clock())
                ended += count
        return ended

    # --- all there are ---

    def packed_keys(self, tier: str) -> bytes:
        """List a tier's keys, each part of them as of another moment.

        A key stored or removed meanwhile may be listed or not. Whoever has the events from
        before the first part on learns of it in either case, and the last event about a key
        says what is so: a key stored again, or removed and not there, is nothing new to them.
        """
        packed = []
        shard = 0
        while shard < SHARDS:
            with self._deciding() as decider:
                part, shard = decider.state.listed_keys(tier, shard)
            packed.append(wire.pack_keys(map(key64, part)))
        return b"".join(packed)

    def count_held(self) -> int:
        """Count the chunks that cannot be evicted, each part of them as of another moment."""
        with self._deciding() as decider:
            total = decider.cpu.unfinished
        shard = 0
        while shard < SHARDS:
            with self._deciding() as decider:
                part, shard = decider.cpu.listed(shard)
            # Without the lock: an entry counts as it is when it is looked at.
            total += count_held(part, self._clock())
        return total

    # --- for the agent and the operator ---

    def match(self, keys: Sequence[bytes]) -> list[str]:
        """Look from the first chunk on; an answer is as old as its first portion."""
        tiers: list[str] = []
        for portion in portions(keys):
            with self._deciding() as decider:
                found = decider.match(portion, self._clock())
            tiers += found
            if len(found) < len(portion):
                break
        return tiers

    def held_in(self, keys: Sequence[bytes], tier: str) -> int:
        """Look from the first chunk on; an answer is as old as its first portion."""
        return self._count_leading(keys, lambda decider, part: decider.state.held_in(part, tier))

    def is_putting(self, keys: Sequence[bytes], tier: str) -> bool:
        """Look at one portion after the other: a put that begins later is not asked about."""
        for portion in portions(keys):
            with self._deciding() as decider:
                puts = decider.cascades.get(tier)
                if puts is not None and any(map(puts.has, portion)):
                    return True
        return False

    def pin(self, keys: Sequence[bytes], tier: str) -> int:
        """Pin from the first chunk on; what is pinned stays, whatever becomes of the next."""
        return self._count_leading(
            keys, lambda decider, part: decider.state.operator_pin(part, tier)
        )

    def _count_leading(
        self, keys: Sequence[bytes], count: Callable[[Decider, Sequence[bytes]], int]
    ) -> int:
        total = 0
        for portion in portions(keys):
            with self._deciding() as decider:
                counted = count(decider, portion)
            total += counted
            if counted < len(portion):
                break
        return total

    def unpin(self, keys: Sequence[bytes], tier: str) -> int:
        """Unpin from the end on: the first chunk is to be evicted last.

        What has left the tier since it was counted has no pin any more.
        """
        held = keys[: self.held_in(keys, tier)]
        unpinned = 0
        for portion in reversed([*portions(held)]):
            with self._deciding() as decider:
                unpinned += decider.state.operator_unpin(portion, tier, self._clock())
        return unpinned

    def clear(
        self, tiers: Collection[str] | None, keys: Collection[bytes], *, keep_shared: bool
    ) -> dict[str, int]:
        """Clear chunks; what others store anew of an earlier portion is stored after the call."""
        dropped: Counter[str] = Counter()
        for portion in [*portions(list(dict.fromkeys(keys)))] or [()]:
            with self._deciding() as decider:
                dropped.update(decider.clear(tiers, portion, keep_shared=keep_shared))
        return dict(dropped)
