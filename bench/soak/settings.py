"""What a soak is told, and the sizes of its fleet."""

from dataclasses import dataclass
from typing import Final

HOST: Final = "127.0.0.1"
BLOCK_TOKENS: Final = 64
CHUNK_TOKENS: Final = 256
FIRST_BYTE_S: Final = 8.0
"""The router's ``timeouts.first_byte_s``: shorter than most hangs, so that both ways are gone."""
BODY_S: Final = 10.0
"""Its ``timeouts.body_s``."""
WAIT_S: Final = 10.0
"""Its ``admission.max_wait_s``: behind Envoy a request may take both, to come whole."""
_LONGEST_SETTLING_S: Final = 300.0


@dataclass(frozen=True, kw_only=True)
class LongRun:
    """A run of some minutes in which memory is watched."""

    minutes: float

    @property
    def duration_s(self) -> float:
        """How long there are requests and troubles."""
        return self.minutes * 60

    @property
    def settling_s(self) -> float:
        """How long memory may grow: tables, memos and buffers fill up to their bounds."""
        return min(_LONGEST_SETTLING_S, self.duration_s / 3)


@dataclass(frozen=True, kw_only=True)
class Settings(LongRun):
    """One soak. Raises ValueError for what cannot be."""

    minutes: float = 30.0
    replicas: int = 4
    clients: int = 64
    """That ask at the same time, each one thing after the other."""
    seed: int = 1
    by_envoy: bool = False
    """Whether an Envoy carries the requests, and the router is its picker."""
    fault_every_s: float = 20.0
    reload_every_s: float = 60.0

    def __post_init__(self) -> None:
        if self.replicas < 2:
            raise ValueError("a soak needs two replicas: one of them may be in trouble")


def instance_id(replica: int) -> str:
    """Return the name of a replica, counted from 0."""
    return f"sim{replica + 1}"
