"""The instances of the controller's API that have no agent of ours (LMCache's workers)."""

from collections.abc import Sequence
from typing import Any, Protocol


class OtherInstances(Protocol):
    """Calls of them; each raises `ApiError`, of what the instance cannot do `ConflictError`."""

    def instances(self) -> Sequence[str]:
        """Return their ids."""

    def worker_infos(
        self, instance_id: str, worker_ids: Sequence[int], since_wall_s: float
    ) -> list[dict[str, Any]]:
        """Return what ``/query_worker_info`` says of some workers, or of all; times since 1970."""

    def lookup(
        self, tokens: Sequence[int], cache_salt: str | None
    ) -> tuple[dict[str, tuple[str, int]], dict[str, str]]:
        """Return a location and how many tokens of a prompt are held; and what went wrong."""

    async def move(
        self,
        source: tuple[str, str],
        target: tuple[str, str],
        tokens: list[int],
        cache_salt: str | None,
        *,
        copy: bool,
    ) -> int:
        """Move a prompt's chunks between instances; return the tokens that have arrived."""

    async def pin(
        self, instance_id: str, location: str, tokens: list[int], cache_salt: str | None
    ) -> int:
        """Have a prompt's chunks be kept; return the tokens."""

    async def unpin(
        self, instance_id: str, location: str, tokens: list[int], cache_salt: str | None
    ) -> int:
        """End that."""

    async def clear(
        self, instance_id: str, locations: Sequence[str] | None, *, all_tokens: bool
    ) -> dict[str, int]:
        """Drop what is in some locations, or all; return the tokens by location."""

    async def health(self, instance_id: str) -> tuple[dict[int, int], dict[int, str]]:
        """Return an error code for each worker, 0 for well ones; and what went wrong."""
