"""The settings of a simulated fleet."""

from dataclasses import dataclass, field
from pathlib import Path

from cacheengine.tiers.slot_file import slot_bytes
from simulator.model.replica_machine import Rates, Shape
from simulator.nixl import LEASE_S
from warmroute_common.fleet_secret import FleetSecret


@dataclass(frozen=True, kw_only=True)
class SimulatorSettings:
    """One fleet of equal replicas. Raises ValueError for what cannot be simulated."""

    directory: Path
    """Holds the tokenizer and the disk tiers."""
    replicas: int = 8
    rates: Rates = field(default_factory=Rates)
    shape: Shape = field(default_factory=Shape)
    cpu_tokens: int = 40_000
    disk_tokens: int = 4_000_000
    disk_files: bool = False
    """Keep the disk tiers in files, which outlive the fleet; else in memory."""
    chunk_bytes: int = 256
    """Real bytes that stand for a chunk's KV."""
    speed: float = 1.0
    """Model seconds in a second of the clock."""
    seed: int = 0
    model: str = "sim"
    host: str = "127.0.0.1"
    port: int = 0
    """Port of the first replica; the others use the next ones. 0: free ports."""
    agent_port: int = 0
    """The same for the replicas' agents."""
    first: int = 1
    """Number of the first replica, in its name: of fleets of several processes each has others."""
    stream_interval_tokens: int = 1
    fleet_secret: FleetSecret | None = None
    """Asked for by the agents; beyond loopback there must be one."""
    nixl: bool = False
    """Whether replicas pull KV from each other's GPUs."""
    kv_lease_s: float = LEASE_S
    """How long KV is lent that nobody pulls, in seconds of the clock."""
    output_tokens: int = 64
    """Length of an answer when the request does not say."""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas is {self.replicas}; it must be at least 1")
        if self.speed <= 0:
            raise ValueError(f"speed is {self.speed}; it must be more than 0")
        if self.cpu_chunks < 1:
            raise ValueError(
                f"cpu_tokens is {self.cpu_tokens}, less than a chunk of "
                f"{self.shape.chunk_tokens}; give the CPU tier room for some chunks"
            )
        if 0 < self.disk_tokens < self.shape.chunk_tokens:
            raise ValueError(
                f"disk_tokens is {self.disk_tokens}, less than a chunk of "
                f"{self.shape.chunk_tokens}; make it larger, or 0 for no disk"
            )

    @property
    def tokenizer_directory(self) -> Path:
        """Where the tokenizer's files are."""
        return self.directory / "tokenizer"

    @property
    def cpu_chunks(self) -> int:
        """Chunks in the CPU tier."""
        return self.cpu_tokens // self.shape.chunk_tokens

    @property
    def disk_chunks(self) -> int:
        """Chunks in the disk tier."""
        return self.disk_tokens // self.shape.chunk_tokens

    @property
    def chunk_file_bytes(self) -> int:
        """What a chunk takes in files, with the page that proves it."""
        return slot_bytes(self.chunk_bytes)

    @property
    def max_model_tokens(self) -> int:
        """The longest prompt with its answer that a replica takes: what its GPU holds."""
        return self.shape.gpu_blocks * self.shape.block_tokens

    def router_rates(self) -> dict[str, float]:
        """Return the router's ``rates``: what it should start from in front of this fleet."""
        rates = self.rates
        return {
            "prefill_tokens_per_s": rates.prefill_tokens_per_s * self.speed,
            "cpu_load_bytes_per_s": self.bytes_per_s(rates.load_tokens_per_s),
            "disk_bytes_per_s": self.bytes_per_s(rates.disk_tokens_per_s),
            "peer_bytes_per_s": self.bytes_per_s(
                min(rates.peer_tokens_per_s, rates.receive_tokens_per_s)
            ),
            "pull_bytes_per_s": self.bytes_per_s(rates.pull_tokens_per_s),
            "kv_bytes_per_token": self.chunk_bytes / self.shape.chunk_tokens,
        }

    def bytes_per_s(self, tokens_per_s: float) -> float:
        """Return a modelled rate as bytes of chunks in a second of the clock."""
        return tokens_per_s * self.speed * self.chunk_bytes / self.shape.chunk_tokens
