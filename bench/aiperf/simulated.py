"""A simulated fleet as a stage, at the clock's own speed: AIPerf knows no other."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.aiperf.stage import Stage
from bench.replay.contenders import ours
from bench.replay.contenders.contender import CannotRunError, start
from bench.replay.fleet import FleetOptions, running_fleet
from bench.replica.tiers import ReplicaTiers
from bench.ttft import BenchError

OPTIONS: Final = FleetOptions(replicas=4, speed=1.0, cpu="ample", gpu_tokens=100_000)

_OURS: Final = ours.contenders()[0]


@contextmanager
def simulated(directory: Path) -> Iterator[Stage]:
    """Run a simulated fleet."""
    with running_fleet(OPTIONS, directory) as (group, fleet):

        def start_router() -> str:
            try:
                running = start(_OURS, group, fleet, directory)
            except CannotRunError as error:
                raise BenchError(str(error)) from None
            return str(running.url)

        yield Stage(
            group=group,
            model=fleet.model,
            tokenizer=fleet.tokenizer,
            replicas=[
                ReplicaTiers(
                    name=each.instance_id,
                    url=each.url,
                    agent_url=each.agent_url,
                    model=fleet.model,
                    disk=directory,
                )
                for each in fleet.replicas
            ],
            start_router=start_router,
            router=_OURS.name,
        )
