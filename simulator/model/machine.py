"""A replica's machine: its speeds, the sizes of its GPU cache and of the tiers below. Pure."""

from dataclasses import dataclass, field

from simulator.model.rates import Rates, Shape


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a modelled replica has and how fast it is."""

    shape: Shape = field(default_factory=Shape)
    rates: Rates = field(default_factory=Rates)
    cpu_tokens: int = 200_000
    disk_tokens: int = 4_000_000

    def __post_init__(self) -> None:
        for name in ("cpu_tokens", "disk_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")

    @property
    def cpu_chunks(self) -> int:
        """Chunks in the CPU tier."""
        return self.cpu_tokens // self.shape.chunk_tokens

    @property
    def disk_chunks(self) -> int:
        """Chunks in the disk tier."""
        return self.disk_tokens // self.shape.chunk_tokens
