"""What is known of a shared tier: chunks it holds, chunks it does not hold, open questions. Pure.

Other engines put into such a tier, too, and its server evicts as it likes. So this is knowledge,
not possession: it may be wrong in both directions, and it is bounded. A chunk that is forgotten
here stays in the tier.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from cacheengine.residency.lower_index import Activity, LowerIndex
from cacheengine.tiers.tier import FIRST_BACKOFF_S, GetOutcome

_MAX_HELD: Final = 1_000_000
_MAX_ABSENT: Final = 131_072
_MAX_ASKED: Final = 65_536
_ABSENT_S: Final = 1.5
"""How long a chunk that was not there is not asked for again."""
_PATIENCE_S: Final = 1.0
_RENEW_S: Final = 600.0
"""For how long a chunk that was put or found is not asked for again while it is used."""
_CLEARED: Final = -1
"""The generation of a chunk that was cleared alone: older than all others."""


class SharedIndex(LowerIndex):
    """Keys known to be held, least recent first; keys known to be absent for a while.

    ``max_held`` and ``max_absent`` bound how many are known. ``max_absent`` also bounds for how
    many the time of the last question is known. After a question that the tier does not answer, and
    after a read that fails, nothing can be read or asked until a ping is answered:
    no request waits to find out whether the server is well again. A ping is due every second; the
    store decides for how long a server is left alone.

    A server evicts what nobody asks it for. Chunks that are used elsewhere, in CPU RAM or on disk,
    are therefore asked for again every ten minutes, and after an outage; one that is gone is put
    again.

    Clearing or forgetting everything is one step: the index gets a new generation. What was
    learned, asked or begun in an older one is hidden, and a question or write of an older one
    ends as if it had found nothing.
    """

    name = "remote"
    queues = ("remote",)
    has_breaker = True

    def __init__(self, *, max_held: int = _MAX_HELD, max_absent: int = _MAX_ABSENT) -> None:
        self._max_held = max_held
        self._max_absent = max_absent
        self._generation = 0
        # The first generation after the last `hide_all`, and after the last `forget_all`.
        self._cleared_at = 0
        self._forgotten_at = 0
        # The generation in which it became known.
        self._held: OrderedDict[bytes, int] = OrderedDict()
        # Until when; in that order, since each stays equally long.
        self._absent: OrderedDict[bytes, float] = OrderedDict()
        # What is under way, and in which generation it began.
        self._busy: dict[bytes, tuple[Activity, int]] = {}
        # Since when, the oldest first, and in which generation; not taken yet: _to_ask.
        self._asked: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        self._to_ask: dict[bytes, None] = {}
        self._forgotten: list[bytes] = []
        # Put or found a short time ago: until when they are not asked for again, in that order.
        self._fresh: OrderedDict[bytes, float] = OrderedDict()
        # Asked for although they are held, and found to be gone.
        self._renewing: set[bytes] = set()
        self._lost: list[bytes] = []
        self._is_down = False
        self._ping_due_s = 0.0
        self._must_ping = False
        self._looked_s = 0.0

    # --- lookups ---

    def __contains__(self, key: bytes) -> bool:
        generation = self._held.get(key, _CLEARED)
        return generation >= self._cleared_at and generation >= self._forgotten_at

    def can_read(self, key: bytes, now_s: float) -> bool:
        return key in self and not self._is_left_alone

    @property
    def _is_left_alone(self) -> bool:
        return self.is_suspended(self.name) or self._is_down

    def keys(self) -> list[bytes]:
        return [key for key in self._held if key in self]

    def is_known(self, key: bytes) -> bool:
        if key in self._busy:
            return True
        generation = self._held.get(key)
        # A chunk that was cleared and is not deleted yet counts; one that was forgotten does not.
        return generation is not None and (
            generation < self._cleared_at or generation >= self._forgotten_at
        )

    def touch(self, key: bytes) -> None:
        if key in self:
            self._held.move_to_end(key)

    # --- questions ---

    def ask(self, key: bytes, now_s: float) -> bool:
        """Ask whether the tier holds a chunk, unless that is known or cannot be asked now.

        Returns whether an answer will come (`answered`).
        """
        is_asked = key in self._asked
        return is_asked or (not self.is_known(key) and self._begin_asking(key, self._absent, now_s))

    def renew(self, key: bytes, now_s: float) -> None:
        """Note a use of a chunk elsewhere: ask for it again, if it is held and was not for long."""
        is_idle = key in self and key not in self._busy and key not in self._asked
        if is_idle and self._begin_asking(key, self._fresh, now_s):
            self._renewing.add(key)

    def _begin_asking(self, key: bytes, not_before: Mapping[bytes, float], now_s: float) -> bool:
        is_too_early = not_before.get(key, now_s) > now_s
        if is_too_early or self._is_left_alone or len(self._asked) >= _MAX_ASKED:
            return False
        self._asked[key] = (now_s, self._generation)
        self._to_ask[key] = None
        return True

    def take_lost(self) -> list[bytes]:
        """Return keys found to be gone, by the questions of `renew`, since the last call."""
        lost, self._lost = self._lost, []
        return lost

    @property
    def has_questions(self) -> bool:
        return bool(self._to_ask)

    def is_late(self, now_s: float) -> bool:
        """Whether an answer is overdue, so that no request should wait for any answer."""
        # For any: questions are asked one call after the other, so later ones wait for the oldest.
        return bool(self._asked) and now_s - next(iter(self._asked.values()))[0] >= _PATIENCE_S

    def is_asked(self, key: bytes) -> bool:
        return key in self._asked

    def take_questions(self, limit: int) -> list[bytes]:
        """Return the keys asked for and not taken yet, at most ``limit``; then `answered`."""
        taken = list(self._to_ask)[:limit]
        for key in taken:
            del self._to_ask[key]
        return taken

    def answered(
        self, keys: Sequence[bytes], found: Sequence[bool] | None, now_s: float
    ) -> list[bytes]:
        """Note the answer for keys taken, None if there was none; return those newly held."""
        asked_in = [self._asked.pop(key)[1] for key in keys]
        renewed = self._renewing.intersection(keys)
        self._renewing -= renewed
        if found is None:
            self._failed(now_s)
            return []
        learned = []
        for key, is_held, generation in zip(keys, found, asked_in, strict=True):
            if is_held:
                self._keep(self._fresh, key, _RENEW_S, now_s)
            if key in renewed and key in self and key not in self._busy:
                if not is_held:
                    del self._held[key]
                    self._lost.append(key)
                continue
            if self.is_known(key):
                continue  # written or deleted since it was asked: that is newer
            # Asked before a clear, the answer may be of before it, too.
            if is_held and generation >= self._cleared_at:
                self._remember(key)
                learned.append(key)
            else:
                self._miss(key, now_s)
        return learned

    # --- pings ---

    def _failed(self, now_s: float) -> None:
        if not self._is_down:
            self._is_down, self._ping_due_s = True, now_s + FIRST_BACKOFF_S
            self._fresh = OrderedDict()  # a server that is restarted may be empty

    def wants_ping(self, now_s: float) -> bool:
        """Whether to find out if a server that failed is well again: then `take_ping`.

        To be called once a second.
        """
        self._looked_s = now_s
        if not self._is_down or self._must_ping or now_s < self._ping_due_s:
            return False
        self._must_ping, self._ping_due_s = True, now_s + FIRST_BACKOFF_S
        return True

    def take_ping(self) -> bool:
        """Whether a ping is to be sent now; then `pinged`."""
        must_ping, self._must_ping = self._must_ping, False
        return must_ping

    def pinged(self, *, is_answered: bool) -> None:
        """Note whether a ping was answered."""
        self._is_down = not is_answered

    # --- writes, reads, deletes ---

    def reserve(self, key: bytes) -> list[bytes] | None:
        """Begin to write a chunk that is not known; nothing needs to be deleted for it."""
        assert not self.is_known(key)
        self._absent.pop(key, None)
        self._busy[key] = (Activity.WRITING, self._generation)
        return []

    def publish(self, key: bytes) -> bool:
        activity, generation = self._busy.pop(key)
        assert activity is Activity.WRITING
        if generation < self._cleared_at:
            self._begin_delete(key)
            return False
        self._remember(key)
        self._keep(self._fresh, key, _RENEW_S, self._looked_s)
        return True

    def not_written(self, key: bytes) -> bool:
        self.forget(key)
        return True

    def forget(self, key: bytes) -> None:
        """End a delete, or a write that failed."""
        activity, _ = self._busy.pop(key)
        assert activity is not Activity.READING

    def begin_read(self, key: bytes) -> None:
        assert key in self and key not in self._busy
        self._busy[key] = (Activity.READING, self._held[key])
        self._held.move_to_end(key)

    def end_read(self, key: bytes, outcome: GetOutcome, now_s: float) -> bool:
        activity, generation = self._busy.pop(key)
        assert activity is Activity.READING
        if outcome is GetOutcome.FAILED:
            self._failed(now_s)
        if outcome in (GetOutcome.MISSING, GetOutcome.DAMAGED):
            self._held.pop(key, None)
            self._miss(key, now_s)
            return False
        if generation < self._cleared_at:
            self._begin_delete(key)
            return True
        if key not in self:
            self._held.pop(key, None)  # forgotten while it was read
        return False

    def _begin_delete(self, key: bytes) -> None:
        self._held.pop(key, None)
        self._busy[key] = (Activity.DELETING, self._generation)

    def _remember(self, key: bytes) -> None:
        self._absent.pop(key, None)
        self._renewing.discard(key)
        self._held[key] = self._generation
        self._held.move_to_end(key)  # it may have been forgotten, and still be in its old place
        if len(self._held) > self._max_held:
            # Never the newest: nothing is under way with that one.
            oldest = next(each for each in self._held if each not in self._busy)
            is_found = oldest in self
            del self._held[oldest]
            self._forgotten += [oldest] if is_found else []

    def _miss(self, key: bytes, now_s: float) -> None:
        self._keep(self._absent, key, _ABSENT_S, now_s)

    def _keep(
        self, untils: OrderedDict[bytes, float], key: bytes, for_s: float, now_s: float
    ) -> None:
        """Remember a chunk for a time that is the same for all in this table."""
        untils.pop(key, None)
        untils[key] = now_s + for_s
        # Two for each that comes: they are forgotten faster than they come, a little at a time.
        for _ in range(2):
            oldest, until_s = next(iter(untils.items()))
            if until_s > now_s and len(untils) <= self._max_absent:
                return
            del untils[oldest]

    def take_forgotten(self) -> list[bytes]:
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    # --- clearing ---

    def hide(self, keys: Collection[bytes]) -> list[bytes]:
        # Only chunks known here are deleted: what other engines put stays, and is found again when
        # it is asked for.
        for key in keys:
            if key in self._asked:
                self._asked[key] = (self._asked[key][0], _CLEARED)
            if key in self._held and self.is_known(key):
                self._held[key] = _CLEARED
            if key in self._busy:
                self._busy[key] = (self._busy[key][0], _CLEARED)
        return self.take_hidden(dict.fromkeys(keys))

    def hide_all(self) -> None:
        self._generation += 1
        self._cleared_at = self._generation

    def forget_all(self) -> None:
        self._generation += 1
        self._forgotten_at = self._generation

    def take_hidden(self, keys: Collection[bytes]) -> list[bytes]:
        deleted = []
        for key in keys:  # one may come twice: it was cleared, learned again and cleared again
            if key not in self._held or key in self or key in self._busy:
                continue
            if self._held.pop(key) < self._cleared_at:
                self._begin_delete(key)
                deleted.append(key)
        return deleted

    def check(self) -> None:
        assert len(self._held) <= self._max_held
        assert len(self._absent) <= self._max_absent
        assert len(self._fresh) <= self._max_absent
        assert not {*self.keys()} & self._absent.keys(), "both held and absent"
        for key, (activity, _) in self._busy.items():
            if activity is not Activity.READING:
                assert key not in self, "found while written or deleted"
        for key, generation in self._held.items():
            assert generation != _CLEARED or key in self._busy, "cleared alone, idle and still here"
        assert self._to_ask.keys() <= self._asked.keys()
        assert self._renewing <= self._asked.keys()
        assert not self._lost, "lost, and not put again"
        assert not self._forgotten, "forgotten, and no event was logged"
