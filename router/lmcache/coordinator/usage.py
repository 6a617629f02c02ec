"""Bytes that LMCache's servers hold, beside the capacities that they have declared. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from router.lmcache.coordinator.records import Place, Total, owner_of
from router.lmcache.wire import Batch, LmcacheTier

Totals = Mapping[tuple[Place, str], Total]
"""Keys and bytes at each place, by salt (`Directory.totals`)."""

MAX_BACKENDS: Final = 64
"""Of one server; a declaration of more is cut off."""
_NO_BLEND_INDEX: Final = {
    f"num_{each}": 0 for each in ("contents", "chunks", "claims", "namespaces")
} | {"table_size": 0}
"""Sizes of an index of chunks by their tokens alone, for CacheBlend: there is none here."""


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


def bytes_by_salt(totals: Totals, tier: LmcacheTier) -> dict[str, int]:
    """Return how many bytes of a tier the keys of each salt take."""
    found: Counter[str] = Counter()
    for (place, salt), total in totals.items():
        if place.tier == tier and total.nbytes:
            found[salt] += total.nbytes
    return dict(found)


def summary(totals: Totals, keys: int) -> dict[str, Any]:
    """Return the answer to ``GET /directory/stats``."""
    tiers: dict[str, Total] = {"l1": Total(), "l2": Total()}
    in_l1: Counter[str] = Counter()
    for (place, _), total in totals.items():
        tiers[place.tier].keys += total.keys
        tiers[place.tier].nbytes += total.nbytes
        if place.tier == "l1" and not place.shared:
            in_l1[place.owner] += total.keys
    found: dict[str, Any] = {
        "num_keys": keys,
        "num_placements": sum(each.keys for each in tiers.values()),
        "l1_keys_by_instance": in_l1,
        "blend": _NO_BLEND_INDEX,
    }
    for name, each in tiers.items():
        found |= {f"{name}_count": each.keys, f"{name}_size_bytes": each.nbytes}
    return found


def usage(totals: Totals, declared: Declared, registered: set[str]) -> dict[str, Any]:
    """Return the answer to ``GET /instances/usage``: every server, then the shared backends."""
    used: Counter[Place] = Counter()
    for (place, _), total in totals.items():
        if total.nbytes:
            used[place] += total.nbytes
    own = {place.owner for place in used if not place.shared}
    names = sorted(registered | own | set(declared.instances()))
    shared = (_module(each, used[each], declared.shared(each)) for each in used if each.shared)
    return {
        "instances": [_instance_usage(each, used, declared, registered) for each in names],
        "shared_modules": _sorted(shared),
    }


def _instance_usage(
    instance_id: str, used: Mapping[Place, int], declared: Declared, registered: set[str]
) -> dict[str, Any]:
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
