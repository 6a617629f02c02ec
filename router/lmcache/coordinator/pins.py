"""The keys that clients have pinned, with how often. Pure.

As at LMCache's coordinator, a pin keeps a key out of evictions by quota and of deletions from L2
that are not forced. It stands for its chunk in every object group.
"""

from collections.abc import Iterable
from typing import Any, Final

from router.lmcache.wire import ObjectKey
from warmroute_common.api_errors import OverloadedError

MAX_PINS: Final = 100_000


class Pins:
    """At most `MAX_PINS` keys."""

    def __init__(self) -> None:
        self._counts: dict[ObjectKey, int] = {}

    def pin(self, keys: Iterable[ObjectKey]) -> None:
        """Pin each key once more; raise `OverloadedError` when there is no room for all of them."""
        keys = list(keys)
        new = sum(key not in self._counts for key in keys)
        if len(self._counts) + new > MAX_PINS:
            raise OverloadedError(f"{MAX_PINS} keys may be pinned at most; unpin some")
        for key in keys:
            self._counts[key] = self._counts.get(key, 0) + 1

    def unpin(self, keys: Iterable[ObjectKey]) -> None:
        """Take a pin off each key; one that has none is passed over."""
        for key in keys:
            count = self._counts.pop(key, 0)
            if count > 1:
                self._counts[key] = count - 1

    def unpinned(self, keys: Iterable[ObjectKey]) -> list[ObjectKey]:
        """Return those of the keys that have no pin."""
        return [each for each in keys if each._replace(object_group_id=0) not in self._counts]

    def drop(self, keys: Iterable[ObjectKey]) -> None:
        """Take every pin off each key."""
        for key in keys:
            self._counts.pop(key._replace(object_group_id=0), None)

    def page(self, salt: str, model: str, part: slice) -> dict[str, Any]:
        """Return a page of the keys of a salt and a model (empty: of all)."""
        found = [
            {"key": key.encoded(), "pin_count": count}
            for key, count in self._counts.items()
            if salt in ("", key.cache_salt) and model in ("", key.model_name)
        ]
        return {"total": len(found), "pins": found[part]}
