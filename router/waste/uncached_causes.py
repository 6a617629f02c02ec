"""Finds out why tokens of a prompt are not cached: `UncachedCauses`.

`expect` cuts a prompt into parts when its replica has been chosen, by what was known then: what
each replica held, what has left a cache, and the session's prompt before. `settle` takes the number
of tokens that the replica found in its cache. No I/O; time is an argument.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from router.fleet.decision import Candidate, Decision
from router.fleet.fleet import Fleet
from router.fleet.replica import Replica
from router.index.departed import DepartedKeys, Departure
from router.index.holders import slots
from router.index.prompt_keys import KvTier, PromptKeys
from router.record.uncached import (
    Change,
    ChangeKind,
    Declined,
    Eviction,
    HeldElsewhere,
    PromptPart,
    Uncached,
    UncachedCause,
    WhyDeclined,
    covering,
)
from router.waste.last_prompts import LastPrompt, LastPrompts
from router.waste.outline import Outline

MAX_BYTES: Final = 32 << 20
"""For the last prompts of sessions."""
_CLOCK_S: Final = 2.0
"""Departures are dated to about a second."""
_TAIL_BLOCKS: Final = 2
_TAIL_TOKENS: Final = 32
"""The end of a prompt, where the answer begins, is rendered differently in the next one."""
_EARLY: Final = 0.25
"""A change is near the beginning within this part of the prompt."""


@dataclass(slots=True, kw_only=True)
class PendingUncached(Uncached):
    """The causes of a prompt whose answer has not ended, with what `UncachedCauses` needs then."""

    began_s: float
    keys: Sequence[int] = field(repr=False)
    block_tokens: int
    session: str | None = None
    last: LastPrompt | None = field(default=None, repr=False)
    """What the session's next prompt will be compared with."""


class UncachedCauses:
    """Finds causes, and remembers the last prompt of each session for that."""

    def __init__(self, fleet: Fleet, *, max_bytes: int = MAX_BYTES) -> None:
        self._fleet = fleet
        self.last_prompts = LastPrompts(max_bytes)

    def expect(
        self,
        decision: Decision,
        outline: Outline,
        *,
        model: str | None,
        client: str | None,
        now_s: float,
    ) -> PendingUncached | None:
        """Return the causes of what is expected to be computed; None without a prompt.

        Call it before the request's own keys are stored: they are believed to be held then, which
        does not count. ``client`` is the name of the client's key.
        """
        if not decision.prompt_tokens:
            return None
        session = decision.session
        if session is None and outline.opening:
            session = f"{client}\0{outline.opening:x}"
        before = None if session is None else self.last_prompts.get(session)
        picked = decision.picked
        cutter = _Cutter(decision, self._fleet, now_s)
        parts, change = cutter.parts(before, outline, model)
        last = None
        keys = picked.keys
        if session is not None and keys.keys:
            last = LastPrompt.of(
                keys.keys,
                picked.replica.key_shape,
                decision.prompt_tokens,
                model=model,
                outline=outline,
                turn=1 if before is None else before.turn + 1,
                change=change,
            )
        return PendingUncached(
            parts=covering(parts, decision.prompt_tokens),
            prompt_tokens=decision.prompt_tokens,
            cached_tokens=cutter.matched,
            s_per_token=cutter.s_per_token,
            began_s=now_s,
            keys=keys.keys,
            block_tokens=keys.block_tokens,
            session=session,
            last=last,
        )

    def settle(
        self,
        pending: PendingUncached,
        *,
        prompt_tokens: int | None,
        cached_tokens: int | None,
        now_s: float,
    ) -> Uncached:
        """Return the causes of what was computed, by the counts of the replica's ``usage``.

        They are None where the replica does not tell them.
        """
        if pending.session is not None and pending.last is not None:
            self.last_prompts.note(pending.session, pending.last)
        if cached_tokens is not None and cached_tokens < pending.cached_tokens:
            pending.parts = self._left_meanwhile(pending, cached_tokens, now_s)
        return pending.reported(prompt_tokens, cached_tokens)

    def _left_meanwhile(
        self, pending: PendingUncached, cached_tokens: int, now_s: float
    ) -> tuple[PromptPart, ...]:
        """Return the parts, with those marked as evicted that left after the decision."""
        departed, at = self._fleet.index.departed, cached_tokens // pending.block_tokens
        departure = None
        if departed is not None and at < len(pending.keys):
            departure = departed.get(pending.keys[at])
        if departure is None or departure.left_s < pending.began_s - _CLOCK_S:
            return pending.parts
        eviction = _eviction(self._fleet, departure, now_s)
        return tuple(
            replace(each, cause=UncachedCause.EVICTED, detail=eviction)
            if each.stop <= pending.cached_tokens
            else each
            for each in pending.parts
        )


class _Cutter:
    """Cuts one prompt into parts."""

    def __init__(self, decision: Decision, fleet: Fleet, now_s: float) -> None:
        picked = decision.picked
        self.replica: Replica = picked.computes_at
        self._decision = decision
        self._own = 1 << self.replica.slot | 1 << picked.replica.slot
        """Where the request itself is believed to be computed."""
        self._fleet = fleet
        self._now_s = now_s
        self._keys: PromptKeys = picked.keys
        departed = fleet.index.departed
        self._departed = DepartedKeys(0) if departed is None else departed
        self._tokens = decision.prompt_tokens
        prefiller = picked.prefiller
        matched = picked.matched if prefiller is None else prefiller.work.matched_tokens
        self.matched = min(matched, self._tokens)
        cost, work = (
            (picked.cost, picked.work) if prefiller is None else (prefiller.cost, prefiller.work)
        )
        self.s_per_token = cost.prefill_s / max(1, work.new_tokens)
        block = self._keys.block_tokens
        whole = len(self._keys.keys) * block
        # vLLM always computes the last token, and so the block that it is in.
        self._cacheable = min(whole, (self._tokens - 1) // block * block)
        self._is_by_tokens = bool(self._keys.chain)

    def parts(
        self, before: LastPrompt | None, outline: Outline, model: str | None
    ) -> tuple[list[PromptPart], Change | None]:
        """Return the parts in order, and what the client has changed."""
        parts = [*self._matched_parts(), *self._held_by_candidates()]
        at = max((each.stop for each in parts), default=0) // self._keys.block_tokens
        seen = self._seen_blocks(at)
        if seen > at:
            parts.append(self._seen_part(at, seen))
        more, change = self._changed_parts(before, outline, model, max(at, seen))
        parts += more
        parts.append(PromptPart(self._cacheable, UncachedCause.NEW))
        whole = len(self._keys.keys) * self._keys.block_tokens
        if self._is_by_tokens and self._tokens - whole > self._keys.block_tokens:
            media = Declined(why=WhyDeclined.MEDIA)
            parts.append(PromptPart(self._tokens, UncachedCause.DECLINED, media))
        parts.append(PromptPart(self._tokens, UncachedCause.SHORT))
        return parts, change

    def _matched_parts(self) -> Iterator[PromptPart]:
        """Return the parts that the replica was believed to hold."""
        if not self.matched:
            return
        picked, at = self._decision.picked, 0
        tiers = picked.matched_tokens if picked.prefiller is None else {KvTier.GPU: self.matched}
        for tier in KvTier:
            if not (tokens := tiers.get(tier, 0)):
                continue
            at = min(at + tokens, self.matched)
            declined = Declined(why=WhyDeclined.NOT_LOADED, tier=tier)
            if not self._is_by_tokens:
                declined = Declined(why=WhyDeclined.NO_TOKENS)
            elif tier is KvTier.GPU and not self.replica.has_events:
                declined = Declined(why=WhyDeclined.NO_EVENTS)
            yield PromptPart(min(at, self._cacheable), UncachedCause.DECLINED, declined)

    def _held_by_candidates(self) -> Iterator[PromptPart]:
        """Return the part that another replica held which could have taken the request."""
        decision = self._decision
        best: Candidate | None = None
        most = self.matched
        for each in decision.candidates:
            if each.replica is not self.replica and each.matched_tokens and each.matched > most:
                best, most = each, each.matched
        if best is not None and self._cacheable > self.matched:
            held = HeldElsewhere(
                replica=best.replica_id,
                reason=decision.reason,
                ttft_s=decision.predicted_ttft_s,
                other_ttft_s=best.ttft_s,
            )
            yield PromptPart(min(best.matched, self._cacheable), UncachedCause.ELSEWHERE, held)

    # --- what was seen before

    def _seen_blocks(self, at: int) -> int:
        """Return how many blocks from the first on are or were held; ``at`` first ones are.

        If a block was, so were those before it, so this is a bisection.
        """
        blocks = range(at, self._cacheable // self._keys.block_tokens)
        if not blocks or not self._is_seen(at):  # nearly always
            return at
        return at + bisect_left(blocks, True, key=lambda block: not self._is_seen(block))

    def _is_seen(self, block: int) -> bool:
        key, chunk = self._names(block)
        holders = self._fleet.index.holders(key, chunk)
        if holders & ~self._own or self._departure(key, chunk) is not None:
            return True
        # Its own place may only be believed: that is this request.
        return bool(holders) and self._fleet.index.knows(self.replica.slot, key, chunk)

    def _names(self, block: int) -> tuple[int, int | None]:
        """Return the key of a block, and that of its chunk if that is whole."""
        keys, chunk = self._keys, block // self._keys.blocks_per_chunk
        whole = chunk < len(keys.chunk_keys)
        return keys.keys[block], keys.chunk_keys[chunk] if whole else None

    def _departure(self, key: int, chunk: int | None) -> Departure | None:
        """Return when and where a block was last lost, alone or with its chunk."""
        alone = self._departed.get(key)
        together = None if chunk is None else self._departed.get(chunk)
        if alone is None or (together is not None and together.left_s > alone.left_s):
            return together
        return alone

    def _seen_part(self, at: int, seen: int) -> PromptPart:
        """Return the part of the blocks that were seen and that no candidate holds."""
        keys, index, slot = self._keys, self._fleet.index, self.replica.slot
        stop = seen * keys.block_tokens
        is_end = stop - self.matched < keys.chunk_tokens and keys.blocks_per_chunk > 1
        if is_end and self._decision.picked.runs and self.matched % keys.chunk_tokens == 0:
            return PromptPart(stop, UncachedCause.SHORT)  # lower tiers have whole chunks
        key, chunk = self._names(at)
        if index.knows(slot, key, chunk):
            declined = Declined(why=WhyDeclined.NOT_LOADED)
            return PromptPart(stop, UncachedCause.DECLINED, declined)
        if holders := index.holders(key, chunk) & ~self._own:
            replica = _replica_at(self._fleet, slots(holders)[0])
            held = HeldElsewhere(
                replica="a store that replicas share" if replica is None else replica.id,
                reason=self._decision.reason,
                ttft_s=self._decision.predicted_ttft_s,
                other_ttft_s=None,
            )
            return PromptPart(stop, UncachedCause.ELSEWHERE, held)
        departure = self._departure(key, chunk)
        eviction = Eviction(replica=None, tier=None)
        if departure is not None:
            eviction = _eviction(self._fleet, departure, self._now_s)
        return PromptPart(stop, UncachedCause.EVICTED, eviction)

    # --- what the client changed

    def _changed_parts(
        self, before: LastPrompt | None, outline: Outline, model: str | None, seen: int
    ) -> tuple[list[PromptPart], Change | None]:
        """Return the parts that the session's prompt before explains, after ``seen`` blocks."""
        keys = self._keys
        if before is None or before.shape != self._decision.picked.replica.key_shape:
            return [], None
        end = min(before.blocks * keys.block_tokens, self._cacheable)
        why = None
        if before.outline.salt != outline.salt:
            why = WhyDeclined.SALT
        elif before.model != model:
            why = WhyDeclined.MODEL
        if why is not None:
            return [PromptPart(end, UncachedCause.DECLINED, Declined(why=why))], None
        common = before.common_blocks(keys.keys, seen)
        parts = []
        if common > seen:
            unknown = Eviction(replica=None, tier=None)
            stop = min(common * keys.block_tokens, self._cacheable)
            parts.append(PromptPart(stop, UncachedCause.EVICTED, unknown))
        at_token = common * keys.block_tokens
        if common >= before.blocks or at_token >= self._cacheable:
            return parts, None
        found = outline.change_from(before.outline)
        if found is None:
            return parts, None
        kind, place = found.kind, found.place
        if kind is ChangeKind.RENDERED:
            tail = max(_TAIL_TOKENS, _TAIL_BLOCKS * keys.block_tokens)
            if at_token >= before.prompt_tokens - tail:
                return parts, None
            place = outline.message_at(at_token / self._tokens)
        elif kind is ChangeKind.BEGINNING and at_token > _EARLY * before.prompt_tokens:
            kind = ChangeKind.EDITED
        if found.new_share is not None:
            whole = round((1.0 - found.new_share) * self._tokens) // keys.block_tokens
            end = min(self._cacheable, whole * keys.block_tokens)
        since, turn = before.turn + 1, before.turn + 1
        if before.change is not None and (before.change.kind, before.change.place) == (kind, place):
            since = before.change.since_turn
        change = Change(kind=kind, place=place, at_token=at_token, turn=turn, since_turn=since)
        return [*parts, PromptPart(end, UncachedCause.CHANGED, change)], change


def _eviction(fleet: Fleet, departure: Departure, now_s: float) -> Eviction:
    replica = _replica_at(fleet, departure.replica)
    return Eviction(
        replica=None if replica is None else replica.id,
        tier=departure.tier,
        ago_s=max(0.0, now_s - departure.left_s),
        is_whole=departure.is_whole,
    )


def _replica_at(fleet: Fleet, slot: int) -> Replica | None:
    return next((each for each in fleet.replicas.values() if each.slot == slot), None)
