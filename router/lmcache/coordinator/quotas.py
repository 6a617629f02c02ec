"""How many bytes of L2 each salt's keys may take. Pure.

No server hears of a quota: LMCache's coordinator compares it with the usage that events tell,
and has servers delete keys (`eviction`). Shares and defaults are those of lmcache 0.5.6
(``mp_coordinator/config.py``).
"""

from collections.abc import Mapping
from typing import Final

from warmroute_common.api_errors import OverloadedError

MAX_QUOTAS: Final = 100_000
_SHARE: Final = 0.2
"""Of a salt's keys in L2, to be evicted at a time."""


class Quotas:
    """The quotas that clients have set, at most `MAX_QUOTAS`; lost when the router ends."""

    def __init__(self) -> None:
        self.default_bytes: int | None = None
        """Of salts without a quota of their own; None: no limit."""
        self._limits: dict[str, int] = {}

    def set(self, salt: str, limit_bytes: int) -> None:
        """Set a salt's quota; raise `OverloadedError` when there is no room for one more."""
        if salt not in self._limits and len(self._limits) >= MAX_QUOTAS:
            raise OverloadedError(f"{MAX_QUOTAS} quotas may be set at most; delete some")
        self._limits[salt] = limit_bytes

    def remove(self, salt: str) -> bool:
        """Remove a salt's quota; return whether it had one."""
        return self._limits.pop(salt, None) is not None

    def all(self) -> Mapping[str, int]:
        """Return the quotas that were set, by salt, in bytes."""
        return self._limits

    def evicted_shares(self, used_bytes: Mapping[str, int]) -> dict[str, float]:
        """Return the salts that have reached their quotas, and which share of their keys goes."""
        limits = {each: self._limits.get(each, self.default_bytes) for each in used_bytes}
        return {
            salt: _SHARE if limit else 1.0
            for salt, limit in limits.items()
            if limit is not None and used_bytes[salt] >= limit
        }
