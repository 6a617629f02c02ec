"""What is known of a shared tier: which chunks it holds, which not, which were asked for.

Other engines put into such a tier, too, and its server evicts as it likes. So this is knowledge,
not possession: it may be wrong in both directions, is bounded, and what is forgotten stays.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Final

from cacheengine.residency.lower.lower_index import Activity, LowerIndex
from cacheengine.residency.lower.put_aside import PutAside
from cacheengine.tiers import GetOutcome, TierBackoff

_MAX_HELD: Final = 1_000_000
_MAX_ABSENT: Final = 131_072
_MAX_ASKED: Final = 65_536
_ABSENT_S: Final = 1.5
"""How long a chunk that was not there is not asked for again."""
_PATIENCE_S: Final = 1.0


class RemoteIndex(LowerIndex):
    """Keys known to be held, least recent first; keys known to be absent for a while.

    ``max_held`` and ``max_absent`` bound what is known. A question that the tier does not answer,
    and a read that fails, begin a short pause in which nothing can be read or asked: how long a
    server is left alone is the store's to decide.
    """

    name = "remote"
    has_breaker = True

    def __init__(self, *, max_held: int = _MAX_HELD, max_absent: int = _MAX_ABSENT) -> None:
        self._max_held = max_held
        self._max_absent = max_absent
        self._held: OrderedDict[bytes, None] = OrderedDict()
        # Until when; in that order, as each stays equally long.
        self._absent: OrderedDict[bytes, float] = OrderedDict()
        self._busy: dict[bytes, Activity] = {}
        self._condemned: set[bytes] = set()
        # What was cleared or forgotten whole, until its chunks are met.
        self._cleared, self._forgotten_held = PutAside[None](), PutAside[None]()
        self._cleared_busy = PutAside[Activity]()
        self._put_aside = (self._cleared, self._cleared_busy)
        self._to_delete: list[bytes] = []
        self._clears = 0
        # Since when, the oldest first, and after how many clears; not given out yet: _to_ask.
        self._asked: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        self._to_ask: dict[bytes, None] = {}
        # Asked before a clear (of all: `_clears` tells): so may the answer be.
        self._void: set[bytes] = set()
        self._forgotten: list[bytes] = []
        self._backoff = TierBackoff()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: bytes) -> bool:
        """Whether the tier is known to hold the chunk."""
        return key in self._held and key not in self._condemned

    def can_read(self, key: bytes, now_s: float) -> bool:
        """Whether the tier is known to hold the chunk and is not being left alone."""
        return key in self._held and key not in self._condemned and not self._backoff.is_on(now_s)

    def keys(self) -> list[bytes]:
        """Return the keys known to be held, least recent first."""
        return [key for key in self._held if key not in self._condemned]

    def is_known(self, key: bytes) -> bool:
        """Whether the chunk is known to be there, or something is under way with it."""
        return any(key in each for each in (self._held, self._busy, *self._put_aside))

    def touch(self, key: bytes) -> None:
        """Forget a chunk later than others, if it is known to be held."""
        if key in self._held:
            self._held.move_to_end(key)

    # --- questions ---

    def ask(self, key: bytes, now_s: float) -> bool:
        """Ask whether the tier holds a chunk, unless that is known or cannot be asked now.

        Returns whether an answer will come (`answered`).
        """
        if key in self._asked:
            return True
        is_absent = self._absent.get(key, now_s) > now_s
        is_barred = is_absent or self._backoff.is_on(now_s) or len(self._asked) >= _MAX_ASKED
        if is_barred or self.is_known(key):
            return False
        self._asked[key] = (now_s, self._clears)
        self._to_ask[key] = None
        return True

    @property
    def has_questions(self) -> bool:
        """Whether there is something for `take_questions`."""
        return bool(self._to_ask)

    def is_late(self, now_s: float) -> bool:
        """Whether an answer has been due for so long that no request should wait for any."""
        # Any: it is one after the other that is asked, so later ones wait for the oldest.
        return bool(self._asked) and now_s - next(iter(self._asked.values()))[0] >= _PATIENCE_S

    def is_asked(self, key: bytes) -> bool:
        """Whether an answer will come."""
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
        clears = [self._asked.pop(key)[1] for key in keys]
        self._void.update(key for key, n in zip(keys, clears, strict=True) if n != self._clears)
        if found is None:
            self._backoff.failed(now_s, grows=False)
            self._void.difference_update(keys)
            return []
        self._backoff.succeeded()
        return [
            key
            for key, is_held in zip(keys, found, strict=True)
            if self._learn(key, is_held=is_held, now_s=now_s)
        ]

    def _learn(self, key: bytes, *, is_held: bool, now_s: float) -> bool:
        is_void = key in self._void
        self._void.discard(key)
        if self.is_known(key):
            # Written or deleted since it was asked: we know better.
            return False
        if is_held and not is_void:
            self._remember(key)
            return True
        self._miss(key, now_s)
        return False

    # --- writes, reads, deletions ---

    def reserve(self, key: bytes) -> list[bytes] | None:
        """Begin to write a chunk that is not known; nothing needs to be deleted for it."""
        assert not self.is_known(key)
        self._absent.pop(key, None)
        self._busy[key] = Activity.WRITING
        return []

    def publish(self, key: bytes) -> bool:
        """End a write that succeeded. False: it was cleared meanwhile, delete it and `forget`."""
        self._meet(key)
        assert self._busy[key] is Activity.WRITING
        if key in self._condemned:
            self._begin_delete(key)
            return False
        del self._busy[key]
        self._remember(key)
        return True

    def forget(self, key: bytes) -> None:
        """End a deletion, or a write that failed."""
        self._meet(key)
        assert self._busy[key] is not Activity.READING
        del self._busy[key]
        self._condemned.discard(key)

    def begin_read(self, key: bytes) -> None:
        """Note that a chunk known to be held is read; forget it later than others."""
        assert key in self and key not in self._busy
        self._busy[key] = Activity.READING
        self._held.move_to_end(key)

    def end_read(self, key: bytes, outcome: GetOutcome, now_s: float) -> bool:
        """End a read. True: the chunk was cleared meanwhile and must be deleted now."""
        self._meet(key)
        assert self._busy.pop(key) is Activity.READING
        if outcome is GetOutcome.FAILED:
            self._backoff.failed(now_s, grows=False)
        else:
            self._backoff.succeeded()
        is_gone = outcome in (GetOutcome.MISSING, GetOutcome.DAMAGED)
        if is_gone:
            self._held.pop(key, None)
            self._miss(key, now_s)
        if key not in self._condemned:
            return False
        self._condemned.discard(key)
        if not is_gone:
            self._begin_delete(key)
        return not is_gone

    def clear(self, keys: Collection[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Forget these; return what was known to be held, and what to delete now.

        Only what is known here is deleted: what other engines put stays, and
        is found again when it is asked for.
        """
        readable, idle = [], []
        for key in dict.fromkeys(keys):
            self._meet(key)
            if key in self:
                readable.append(key)
            if key not in self._busy:
                if key in self._held:
                    idle.append(key)
            elif self._busy[key] is not Activity.DELETING:
                self._condemned.add(key)
        for key in idle:
            self._begin_delete(key)
        self._void.update(key for key in keys if key in self._asked)
        return readable, idle

    def clear_all(self) -> None:
        """Forget everything, in one step."""
        self._cleared.add(self._held)
        self._cleared_busy.add(self._busy)
        self._held, self._busy = OrderedDict(), {}
        self._clears += 1

    def forget_held(self) -> None:
        """Know no more of what is held, in one step; reads under way go on."""
        self._forgotten_held.add(self._held)
        self._held = OrderedDict()

    def take_cleared(self, most: int) -> tuple[list[bytes], bool]:
        """Return some of what was hidden and is idle, to delete now; and whether more is there."""
        for _ in range(most):
            self._forgotten_held.popitem()
            if busy := self._cleared_busy.popitem():
                self._met(*busy)
            if held := self._cleared.popitem():
                self._met(held[0], self._cleared_busy.pop(held[0]))
        taken, self._to_delete = self._to_delete[:most], self._to_delete[most:]
        left = len(self._cleared) + len(self._cleared_busy) + len(self._forgotten_held)
        return taken, left + len(self._to_delete) > 0

    def _meet(self, key: bytes) -> None:
        """Do for a chunk that was hidden with all others what `clear` does for one."""
        activity = self._cleared_busy.pop(key)
        if activity is not None or key in self._cleared:
            self._met(key, activity)

    def _met(self, key: bytes, activity: Activity | None) -> None:
        self._cleared.pop(key)
        if activity is not None:
            self._busy[key] = activity
            if activity is not Activity.DELETING:
                self._condemned.add(key)
        else:
            self._begin_delete(key)
            self._to_delete.append(key)

    def take_forgotten(self) -> list[bytes]:
        """Return what could be found and is forgotten since the last call, for want of memory."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping contradicts itself."""
        assert len(self._held) <= self._max_held
        assert len(self._absent) <= self._max_absent
        assert not self._held.keys() & self._absent.keys(), "both held and absent"
        for key, activity in self._busy.items():
            if activity is not Activity.READING:
                assert key not in self._held, "found while written or deleted"
        assert self._condemned <= {*self._busy, *self._cleared_busy}, "cleared, idle and here"
        assert all(self.is_known(key) for key in self._to_delete)
        assert self._to_ask.keys() <= self._asked.keys() >= self._void
        assert not self._forgotten, "forgotten, and no event says so"

    def _begin_delete(self, key: bytes) -> None:
        self._held.pop(key, None)
        self._condemned.discard(key)
        self._busy[key] = Activity.DELETING

    def _remember(self, key: bytes) -> None:
        self._absent.pop(key, None)
        self._held[key] = None
        if len(self._held) > self._max_held:
            # Never the newest: nothing is under way with that one.
            oldest = next(each for each in self._held if each not in self._busy)
            del self._held[oldest]
            self._forgotten.append(oldest)

    def _miss(self, key: bytes, now_s: float) -> None:
        self._absent.pop(key, None)
        self._absent[key] = now_s + _ABSENT_S
        # Two for each that comes: what is over goes sooner than it came, a little at a time.
        for _ in range(2):
            oldest, until_s = next(iter(self._absent.items()))
            if until_s > now_s and len(self._absent) <= self._max_absent:
                return
            del self._absent[oldest]
