"""What LMCache's servers hold, beside what they have declared that they can hold. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from router.lmcache.coordinator.records import Place, owner_of
from router.lmcache.wire import Batch

MAX_BACKENDS: Final = 64
"""Of one server; more are not taken note of."""


class Declared:
    """The capacities that servers have declared (``config`` events), the latest declaration."""

    def __init__(self) -> None:
        self._stamps: dict[str, tuple[int, int]] = {}
        self._capacities: dict[str, dict[Place, int]] = {}

    def note(self, batch: Batch) -> None:
        """Take over a declaration's part; a newer declaration replaces all parts of the last."""
        stamp, name = (batch.incarnation, batch.capacity_revision), batch.instance_id
        before = self._stamps.get(name, (-1, -1))
        if stamp < before:
            return
        if stamp > before:
            self._stamps[name], self._capacities[name] = stamp, {}
        place = Place(owner_of(batch), batch.tier, batch.backend)
        if len(self._capacities[name]) < MAX_BACKENDS:
            self._capacities[name][place] = batch.capacity_bytes

    def forget(self, instance_id: str) -> None:
        """Forget a server's declaration."""
        self._stamps.pop(instance_id, None)
        self._capacities.pop(instance_id, None)

    def of(self, instance_id: str) -> Mapping[Place, int]:
        """Return a server's capacities in bytes; 0 where it sets no limit."""
        return self._capacities.get(instance_id, {})

    def instances(self) -> Iterable[str]:
        """Return the servers that have declared any."""
        return self._capacities

    def shared(self, place: Place) -> int:
        """Return a shared backend's capacity; 0 where servers differ in it."""
        told = {each[place] for each in self._capacities.values() if place in each}
        return told.pop() if len(told) == 1 else 0


def usage(used: Mapping[Place, int], declared: Declared, registered: set[str]) -> dict[str, Any]:
    """Return the answer to ``GET /instances/usage``: every server, then the shared backends."""
    own = {place.owner for place in used if not place.shared}
    names = sorted(registered | own | set(declared.instances()))
    shared = (_module(each, used[each], declared.shared(each)) for each in used if each.shared)
    return {
        "instances": [instance_usage(each, used, declared, registered) for each in names],
        "shared_modules": _sorted(shared),
    }


def instance_usage(
    instance_id: str, used: Mapping[Place, int], declared: Declared, registered: set[str]
) -> dict[str, Any]:
    """Return one server's part of it."""
    capacities = declared.of(instance_id)
    places = {each for each in used if each.owner == instance_id}
    places |= {each for each in capacities if not each.shared}
    modules = (_module(each, used.get(each, 0), capacities.get(each, 0)) for each in places)
    return {
        "instance_id": instance_id,
        "registered": instance_id in registered,
        "declared_capacity": bool(capacities),
        "modules": _sorted(modules),
    }


def _module(place: Place, used_bytes: int, capacity_bytes: int) -> dict[str, Any]:
    return {
        "tier": place.tier,
        "backend": place.backend,
        "shared": place.shared,
        "used_bytes": used_bytes,
        "capacity_bytes": capacity_bytes,
        "usage_ratio": used_bytes / capacity_bytes if capacity_bytes else None,
    }


def _sorted(modules: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(modules, key=lambda each: (each["tier"], each["backend"]))
