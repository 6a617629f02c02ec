"""The two kinds of fleet, and what AIPerf asks of each."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.aiperf.client import Workload
from bench.aiperf.real import NAMES, real
from bench.aiperf.simulated import OPTIONS, simulated
from bench.aiperf.stage import Stage
from bench.calibration.replica import MACHINE


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A kind of fleet, and what it is asked."""

    what: str
    start: Callable[[Path], AbstractContextManager[Stage]]
    workload: Workload
    settings: Mapping[str, Any]


FLEETS: Final = {
    "simulated": Fleet(
        what="a fleet of simulated replicas",
        start=simulated,
        workload=Workload(
            conversations=100,
            concurrency=16,
            contexts=24,
            context_tokens=6000,
            turn_tokens=2000,
            turn_tokens_stddev=500,
            answer_tokens=64,
            ttft_bound_ms=1000,
            seed=1,
        ),
        settings=asdict(OPTIONS),
    ),
    "real": Fleet(
        what="two vLLM replicas with the cache engine inside",
        start=real,
        workload=Workload(
            conversations=16,
            concurrency=4,
            contexts=6,
            context_tokens=2000,
            turn_tokens=500,
            turn_tokens_stddev=125,
            answer_tokens=16,
            ttft_bound_ms=2000,
            seed=1,
        ),
        settings={
            "replicas": len(NAMES),
            "gpu_tokens": MACHINE.shape.gpu_tokens,
            "cpu_tokens": MACHINE.cpu_tokens,
            "disk_tokens": MACHINE.disk_tokens,
        },
    ),
}
