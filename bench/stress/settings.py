"""What a stress is told, and the sizes of its engines."""

from dataclasses import dataclass
from typing import Final

from bench.soak.settings import LongRun

HOST: Final = "127.0.0.1"
CHUNK_BYTES: Final = 16 << 10
LONGEST_CHUNKS: Final = 48
"""Of a prompt."""
STORE_BYTES: Final = 64 << 20
"""Redis evicts beyond it."""
SMALL_DISK_BYTES: Final = 72 << 20
"""The file system of the first engine's disk tier, which is filled now and then."""


@dataclass(frozen=True, kw_only=True)
class Settings(LongRun):
    """One stress. Raises ValueError for what cannot be."""

    minutes: float = 20.0
    engines: int = 4
    seed: int = 1
    trouble_every_s: float = 8.0
    slots: int = 2048
    """Of each engine's pool."""
    disk_chunks: int = 3000
    """That each disk tier may hold."""
    conversations: int = 120
    """Prompts are prefixes of these: more than the pool and the disk of an engine hold, and so few
    that its tables are full soon after a clear. A tier is cleared at random, twice a minute: were
    they full after minutes only, memory would be told by when the last clear was."""
    requests_per_s: float = 10.0
    """Of each engine."""
    controls_per_s: float = 8.0
    """Calls of routers and operators, to all engines together."""

    def __post_init__(self) -> None:
        if self.engines < 2:
            raise ValueError("a stress needs two engines: chunks are copied from one to another")


def engine_name(number: int) -> str:
    """Return the name of an engine, counted from 0."""
    return f"engine{number + 1}"
