"""Two real replicas as a stage, and the router with its shipped configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.aiperf.stage import Stage
from bench.calibration.replica import MACHINE, start_real_fleet
from bench.calibration.under_load.stage import start_router
from bench.replica.text import real_text
from bench.replica.tiers import ReplicaTiers, call
from router.launch.processes import ProcessGroup

NAMES: Final = ("replica1", "replica2")

_ROUTER: Final = "router"
_WARM_UP_TOKENS: Final = 2048


@contextmanager
def real(directory: Path) -> Iterator[Stage]:
    """Run two real replicas."""
    with ProcessGroup() as group:
        fleet = start_real_fleet(group, directory, MACHINE, names=NAMES)
        for replica in fleet.replicas:
            _warm_up(replica)
        yield Stage(
            group=group,
            model=fleet.replicas[0].model,
            tokenizer=directory / "model",
            replicas=fleet.replicas,
            start_router=lambda: start_router(group, directory, _ROUTER, fleet, None),
            router=_ROUTER,
        )


def _warm_up(replica: ReplicaTiers) -> None:
    """Have a replica compute, store and load once: its first time of each is slower."""
    text = real_text(_WARM_UP_TOKENS, seed=0)
    messages = [{"role": "user", "content": text}]
    body = {"model": replica.model, "messages": messages, "max_tokens": 8}
    for _ in range(2):
        call(f"{replica.url}/v1/chat/completions", body)
        replica.wait_stored(replica.chat_tokens(text), "cpu")
        replica.empty_gpu()
