"""Tiers, fastest first, and how the keys of what they hold are made."""

from dataclasses import dataclass
from enum import StrEnum

from router.residency.lmcache_keys import LmcacheKeys
from warmroute_common.keys import HashScheme


class Tier(StrEnum):
    """Where KV lies, fastest first."""

    GPU = "gpu"
    CPU = "cpu"
    DISK = "disk"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyShape:
    """How a replica makes the keys of its KV."""

    scheme: HashScheme | None
    """None: its blocks' keys are not known, and LMCache's chunks stand for blocks too."""
    block_tokens: int
    blocks_per_chunk: int = 1
    """1 where there is no agent: vLLM's own offloading reports block keys."""
    lmcache: LmcacheKeys | None = None
    """How chunks have LMCache's keys; None: they have those of their last blocks."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.block_tokens * self.blocks_per_chunk
