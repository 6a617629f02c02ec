"""The replicas of a fleet, by their ids, while they come and go."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

from router.config import Judgment, RatesConfig, ReplicaConfig
from router.fleet.replica.replica import Replica
from router.fleet.replica.state import Signal

_OFTEN: Final = 64
"""So many answers teach the others each; all are passed over for it."""
_KEPT_S: Final = 120.0
"""A removed replica is found by its ids for so long at least: longer than any prefetch or copy
that names it by one is followed."""


class Replicas(dict[str, Replica]):
    """Replicas by id. One that was renamed is found by its former ids too.

    So is one that was removed, until nothing names it any more (`release`): only then another
    replica may get its slot.
    """

    def __init__(self) -> None:
        super().__init__()
        # The replicas themselves: another may have taken the name that followed.
        self._former: dict[str, Replica] = {}
        self._configured: set[str] = set()
        self._by_serial: dict[int, Replica] = {}
        self._removed: dict[Replica, float | None] = {}
        """When each was first seen to be removed."""
        self._serials = 0
        self._free_slots: list[int] = []
        self._teacher_observations = 0

    def __missing__(self, replica_id: str) -> Replica:
        return self._former[replica_id]

    def find(self, replica_id: str) -> Replica | None:
        """Return what has or had an id, be it removed; None if that is not known any more."""
        return self.get(replica_id) or self._former.get(replica_id)

    def with_serial(self, serial: int | None) -> Replica | None:
        """Return the replica with a serial number, None if it was removed."""
        return None if serial is None else self._by_serial.get(serial)

    def add(self, config: ReplicaConfig, rates: RatesConfig, judgment: Judgment) -> Replica:
        """Take in a replica, which begins with what the others have learned.

        Raises ValueError where another is configured by that name. One that has merely taken it
        from its agent gets its configured name back.
        """
        if config.name in self._configured:
            raise ValueError(f"there is a replica '{config.name}' already")
        self._configured.add(config.name)
        self._give_up(config.name)
        slot = heappop(self._free_slots) if self._free_slots else self._next_slot()
        replica = Replica.new(slot, config, rates, judgment, serial=self._serials)
        self._serials += 1
        self[replica.id] = self._by_serial[replica.serial] = replica
        teacher = max(self.values(), key=lambda each: each.rates.observations)
        if teacher.rates.observations:
            replica.rates.take_over(teacher.rates)
        return replica

    def remove(self, replica_id: str) -> Replica:
        """Take out a replica; raise KeyError if there is none."""
        replica = self[replica_id]
        if replica.is_removed:
            raise KeyError(replica_id)
        del self[replica.id], self._by_serial[replica.serial]
        self._configured.remove(replica.config.name)
        self._former[replica.id] = replica
        self._removed[replica] = None
        replica.receive(Signal.REMOVE)
        return replica

    def release(self, is_clear: Callable[[int], bool], now_s: float) -> None:
        """Forget the removed replicas that nothing names any more; ``is_clear`` is asked of slots.

        Not a request under way, which moves its replica's counts, nor the index.
        """
        for replica, since_s in list(self._removed.items()):
            if since_s is None:
                self._removed[replica] = now_s
            elif now_s - since_s >= _KEPT_S and not replica.in_flight and is_clear(replica.slot):
                del self._removed[replica]
                heappush(self._free_slots, replica.slot)
                for former in [name for name, each in self._former.items() if each is replica]:
                    del self._former[former]

    def check(self) -> None:
        """Raise AssertionError if the replicas contradict each other."""
        assert all(name == each.id for name, each in self.items())
        assert self._configured == {each.config.name for each in self.values()}
        assert not any(each.is_removed for each in self.values())
        assert all(each.is_removed for each in self._removed)
        assert set(self._by_serial.values()) == set(self.values())
        used = [each.slot for each in (*self.values(), *self._removed)]
        assert sorted(used + self._free_slots) == list(range(len(used) + len(self._free_slots)))
        assert all(each in self._removed or each.id in self for each in self._former.values())

    def _give_up(self, name: str) -> None:
        """Have a replica that got a name from its agent be called as it is configured."""
        if (holder := self.get(name)) is not None:
            self._give_up(holder.config.name)
            self.rename(name, holder.config.name)

    def _next_slot(self) -> int:
        return len(self) + len(self._removed)  # none is free: they have all that there are

    def rename(self, old: str, new: str) -> None:
        """Give a replica another id; it keeps its place in the order."""
        renamed = [(new if key == old else key, each) for key, each in self.items()]
        self.clear()
        self.update(renamed)
        self._former[old] = self[new]
        self[new].id = new

    def teach(self, teacher: Replica) -> None:
        """Let replicas that have not answered yet start from what this one has learned.

        Else an unknown replica looks faster than a known one, and gets what the other holds. Of
        several teachers the one with the most answers counts.
        """
        count = teacher.rates.observations
        rarely = count > _OFTEN and count & (count - 1)  # at 128, 256, ...
        if rarely or count < self._teacher_observations:
            return
        self._teacher_observations = count
        for each in self.values():
            if each is not teacher and not each.rates.observations:
                each.rates.take_over(teacher.rates)
