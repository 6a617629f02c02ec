"""The simulated fleet of a replay: its regime, its process, what it knows to be true."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from bench.ttft import BenchError
from router.launch.processes import ChildFailedError, ProcessGroup, tail

CPU_TOKENS: Final = {"ample": 800_000, "equal": 200_000, "scarce": 40_000}
"""What a replica's CPU RAM holds, by regime: 4, 1 and 0.2 times what its GPU cache does."""
DISK_TOKENS_PER_S: Final = {"fast": 20_000.0, "slow": 4_000.0}
"""Reading from disk: faster than prefill, or slower than it."""

Cpu = Literal["ample", "equal", "scarce"]
Disk = Literal["fast", "slow"]

_READY_S: Final = 120.0
_GRACE_S: Final = 20.0
_NAME: Final = "fleet"


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """The fleet's size and its replicas' rates, in tokens and model seconds."""

    replicas: int = 8
    speed: float = 4.0
    """How many model seconds pass in one of the clock's."""
    cpu: Cpu = "scarce"
    disk: Disk = "fast"
    gpu_tokens: int = 200_000
    disk_tokens: int = 4_000_000
    prefill_tokens_per_s: float = 8_000.0
    load_tokens_per_s: float = 160_000.0
    peer_tokens_per_s: float = 24_000.0
    block_tokens: int = 64
    chunk_tokens: int = 256
    stream_interval_tokens: int = 64
    """Tokens of an answer that come together; the first always comes alone."""
    seed: int = 1

    @property
    def disk_tokens_per_s(self) -> float:
        """Tokens whose KV comes from disk in a second."""
        return DISK_TOKENS_PER_S[self.disk]

    @property
    def fleet_tokens_per_s(self) -> float:
        """Tokens that all replicas together prefill in a second: a load of 1."""
        return self.replicas * self.prefill_tokens_per_s

    def command(self) -> list[str]:
        """Return the command that runs such a fleet."""
        values = {
            "--replicas": self.replicas,
            "--speed": self.speed,
            "--gpu-tokens": self.gpu_tokens,
            "--cpu-tokens": CPU_TOKENS[self.cpu],
            "--disk-tokens": self.disk_tokens,
            "--prefill-tokens-per-s": self.prefill_tokens_per_s,
            "--load-tokens-per-s": self.load_tokens_per_s,
            "--disk-tokens-per-s": self.disk_tokens_per_s,
            "--peer-tokens-per-s": self.peer_tokens_per_s,
            "--block-tokens": self.block_tokens,
            "--chunk-tokens": self.chunk_tokens,
            "--stream-interval-tokens": self.stream_interval_tokens,
            "--seed": self.seed,
        }
        options = [text for name, value in values.items() for text in (name, str(value))]
        return [sys.executable, "-m", "simulator", *options, "--json"]


@dataclass(frozen=True, kw_only=True)
class FleetReplica:
    """Where one replica can be reached."""

    instance_id: str
    url: str
    agent_url: str
    kv_events: str
    kv_replay: str


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A running fleet."""

    options: FleetOptions
    replicas: tuple[FleetReplica, ...]
    control_url: str
    tokenizer: Path
    model: str = "sim"

    @property
    def speed(self) -> float:
        """How many model seconds pass in one of the clock's."""
        return self.options.speed

    def replica_at(self, url: str) -> str:
        """Return the id of the replica at a URL."""
        return next(each.instance_id for each in self.replicas if each.url == url)


def read_fleet(line: str, options: FleetOptions) -> Fleet:
    """Read the line that tells of a running fleet."""
    told: dict[str, Any] = json.loads(line)
    names = FleetReplica.__dataclass_fields__
    return Fleet(
        options=options,
        replicas=tuple(
            FleetReplica(**{name: each[name] for name in names}) for each in told["replicas"]
        ),
        control_url=told["control_url"],
        tokenizer=Path(told["tokenizer"]),
    )


@contextmanager
def running_fleet(options: FleetOptions, directory: Path) -> Iterator[tuple[ProcessGroup, Fleet]]:
    """Start a fleet with empty caches, and end it with all else that was started in its group.

    Raises `BenchError` when it cannot be started.
    """
    log = directory / f"{_NAME}.log"
    with ProcessGroup(grace_s=_GRACE_S) as group:
        try:
            group.start(_NAME, options.command(), None, log)
            line = _wait_for_line(group, log)
        except ChildFailedError as error:
            raise BenchError(str(error)) from None
        yield group, read_fleet(line, options)


def _wait_for_line(group: ProcessGroup, log: Path) -> str:
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s:
        group.check()
        with log.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith('{"replicas"') and line.endswith("\n"):
                    return line
        time.sleep(0.1)
    raise BenchError(f"the fleet was not ready within {_READY_S:.0f} s:\n{tail(log)}")
