"""The replicas of a fleet, by id. No I/O, no clock."""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Final

from router.config.cost_weights import CostWeights
from router.config.settings import BreakerConfig, RatesConfig, ReplicaConfig
from router.fleet.cost_model import CostModel, CostPart
from router.fleet.replica import Replica, Signal

_KEPT_S: Final = 120.0
"""A removed replica is found by its ids for this long at least: longer than any prefetch or copy
runs that uses an id."""


class Replicas(dict[str, Replica]):
    """Replicas by id. Former ids of a renamed replica find it too.

    So do the ids of a removed one, until nothing refers to it (`release`): only then another
    replica may get its slot. ``version`` changes with whatever decides which replicas may answer:
    `changed` must follow each change of a replica's state, models, key shape or id.
    """

    def __init__(
        self,
        breaker: BreakerConfig | None = None,
        jitter: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``jitter`` returns random numbers from 0 to 1, for the times that breakers are open."""
        super().__init__()
        self.version = 0
        self._breaker = breaker or BreakerConfig()
        self._jitter = jitter
        self._breaker_due_s = inf
        """When time changes a breaker next."""
        # The replicas themselves, not ids: another replica may have taken the id.
        self._former: dict[str, Replica] = {}
        self._configured: set[str] = set()
        self._by_serial: dict[int, Replica] = {}
        self._removed: dict[Replica, float | None] = {}
        """When each was first seen to be removed."""
        self._serials = 0
        self._free_slots: list[int] = []
        self._taken_slots: set[int] = set()

    def __missing__(self, replica_id: str) -> Replica:
        return self._former[replica_id]

    def find(self, replica_id: str) -> Replica | None:
        """Return the replica that has or had an id, removed or not; None if the id is not known."""
        return self.get(replica_id) or self._former.get(replica_id)

    def with_serial(self, serial: int | None) -> Replica | None:
        """Return the replica with a serial number, None if it was removed."""
        return None if serial is None else self._by_serial.get(serial)

    def changed(self) -> None:
        """Note that other replicas may answer now."""
        self.version += 1

    # --- coming and going

    def add(self, config: ReplicaConfig, rates: RatesConfig, weights: CostWeights) -> Replica:
        """Add a replica.

        Raises ValueError if another is configured with that name. A replica that only got the name
        from its agent gets its configured name back.
        """
        if config.name in self._configured:
            raise ValueError(f"there is a replica '{config.name}' already")
        self._configured.add(config.name)
        self._give_up(config.name)
        replica = Replica.new(self._new_slot(), config, rates, weights, serial=self._serials)
        self._serials += 1
        self[replica.id] = self._by_serial[replica.serial] = replica
        self.changed()
        return replica

    def remove(self, replica_id: str) -> Replica:
        """Remove a replica; raise KeyError if there is none."""
        replica = self[replica_id]
        if replica.is_removed:
            raise KeyError(replica_id)
        del self[replica.id], self._by_serial[replica.serial]
        self._configured.remove(replica.config.name)
        self._former[replica.id] = replica
        self._removed[replica] = None
        replica.receive(Signal.REMOVE)
        self.changed()
        return replica

    def release(self, is_clear: Callable[[int], bool], now_s: float) -> None:
        """Forget the removed replicas that nothing refers to.

        A request in flight changes its replica's counts, and the index refers to slots:
        ``is_clear`` says whether the index does not refer to a slot.
        """
        for replica, since_s in list(self._removed.items()):
            if since_s is None:
                self._removed[replica] = now_s
            elif now_s - since_s >= _KEPT_S and not replica.in_flight and is_clear(replica.slot):
                del self._removed[replica]
                heappush(self._free_slots, replica.slot)
                for former in [name for name, each in self._former.items() if each is replica]:
                    del self._former[former]

    def rename(self, old: str, new: str) -> None:
        """Give a replica another id; it keeps its position in the order."""
        renamed = [(new if key == old else key, each) for key, each in self.items()]
        self.clear()
        self.update(renamed)
        self._former[old] = self[new]
        self[new].id = new
        self.changed()

    def _give_up(self, name: str) -> None:
        """Rename a replica that got this name from its agent to its configured name."""
        if (holder := self.get(name)) is not None:
            self._give_up(holder.config.name)
            self.rename(name, holder.config.name)

    def take_slot(self) -> int:
        """Return a slot for something in the index that is not a replica; no replica gets it."""
        slot = self._new_slot()
        self._taken_slots.add(slot)
        return slot

    def _new_slot(self) -> int:
        if self._free_slots:
            return heappop(self._free_slots)
        return len(self) + len(self._removed) + len(self._taken_slots)  # no slot below is free

    # --- breakers

    def pass_time(self, now_s: float) -> None:
        """Allow trials where the time of an open breaker is over."""
        if now_s >= self._breaker_due_s:
            for each in self.values():
                each.breaker.pass_time(now_s)
            self._breakers_changed()

    def begin(self, replica: Replica, now_s: float) -> int:
        """Note that a replica gets a request; return its number as a trial, 0 if it is not one."""
        if trial := replica.breaker.begin(now_s):
            self._breakers_changed()
        return trial

    def end_trial(self, replica: Replica, trial: int) -> None:
        """Note that a trial has ended, perhaps without a result."""
        if replica.breaker.end_trial(trial):
            self._breakers_changed()

    def note_result(self, replica: Replica, now_s: float, *, ok: bool, trial: int) -> bool:
        """Note the result of a request; return whether that opened or closed the breaker."""
        changed = replica.breaker.note(
            ok, now_s, self._breaker, trial=trial, jitter=0.0 if ok else self._jitter()
        )
        if changed:
            self._breakers_changed()
        return changed

    def take_back_failure(self, replica: Replica, now_s: float) -> bool:
        """Forget one failure of a replica; return whether its breaker now admits some."""
        changed = replica.breaker.take_back(now_s, self._breaker)
        if changed:
            self._breakers_changed()
        return changed

    def came_back(self, replica: Replica) -> None:
        """Note that a replica was down and is up again."""
        if replica.breaker.came_back():
            self._breakers_changed()

    def _breakers_changed(self) -> None:
        self._breaker_due_s = min((each.breaker.due_s for each in self.values()), default=inf)
        self.changed()

    # --- rates

    def share_rates(self, measured: CostModel) -> None:
        """Use rates that were just measured for all replicas that have not measured them."""
        known = dict.fromkeys(measured.measured(), measured)
        for each in self.values():
            each.rates.take_over(known)

    def tick(self) -> None:
        """Forget old measurements, and give each replica the others' for what it has not measured.

        Otherwise an unknown replica would look faster than a known one, and get prompts whose KV
        the other holds.
        """
        known: dict[CostPart, CostModel] = {}
        for each in self.values():
            each.rates.tick(is_idle=not each.in_flight)
            known |= dict.fromkeys(each.rates.measured(), each.rates)
        for each in self.values():
            each.rates.take_over(known)

    def check(self) -> None:
        """Raise AssertionError if the replicas contradict each other."""
        assert all(name == each.id for name, each in self.items())
        assert self._configured == {each.config.name for each in self.values()}
        assert not any(each.is_removed for each in self.values())
        assert all(each.is_removed for each in self._removed)
        assert set(self._by_serial.values()) == set(self.values())
        used = [*self._taken_slots, *(each.slot for each in (*self.values(), *self._removed))]
        assert sorted(used + self._free_slots) == list(range(len(used) + len(self._free_slots)))
        assert all(each in self._removed or each.id in self for each in self._former.values())
