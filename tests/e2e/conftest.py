"""One fleet of real replicas for all end-to-end tests: starting it takes most of their time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.replica.model import make_model
from cacheengine.launch.vllm_launch import free_ports
from router.launch.processes import ProcessGroup
from tests.e2e.serving import Replica, Router, start_together


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model."""
    return make_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="session")
def processes() -> Iterator[ProcessGroup]:
    """Everything that the session starts; ended with it."""
    with ProcessGroup() as group:
        yield group


@dataclass
class Fleet:
    """Two replicas, and routers in front of them on demand."""

    replicas: tuple[Replica, Replica]
    make_router: Callable[..., Router]
    controller: dict[str, int]
    """Settings of the controller that the replicas look for; one router at a time may have it."""


@pytest.fixture(scope="session")
def fleet(
    model_dir: Path, processes: ProcessGroup, tmp_path_factory: pytest.TempPathFactory
) -> Fleet:
    """Start two replicas at once."""
    directory = tmp_path_factory.mktemp("fleet")
    ports = free_ports(8)
    controller = {"port": ports[6], "monitor_port": ports[7]}
    first, second = (
        Replica(
            processes,
            f"replica{i + 1}",
            model_dir,
            directory,
            port=ports[2 * i],
            agent_port=ports[2 * i + 1],
            index=i,
            of=2,
            config={
                "enable_controller": True,
                "controller_url": f"localhost:{ports[7]}",
                "distributed_url": f"localhost:{ports[4 + i]}",
                "lmcache_instance_id": f"lmcache_instance_{i + 1}",
                # The controller forgets an agent that is late by three of them.
                "lmcache_worker_heartbeat_time": 5,
                # Of which there are none: it serves all tests from ordinary ones.
                "local_cpu_use_hugepages": i == 0,
            },
        )
        for i in range(2)
    )
    start_together(first, second)

    def make_router(name: str, **settings: Any) -> Router:
        (port,) = free_ports(1)
        return Router(
            processes,
            name,
            directory,
            {
                "port": port,
                "replicas": [
                    {"url": each.url, "agent_url": each.agent_url, "instance_id": each.name}
                    for each in (first, second)
                ],
                **settings,
            },
        )

    return Fleet((first, second), make_router, controller)


@pytest.fixture(scope="session")
def replica(fleet: Fleet) -> Replica:
    """The first replica, asked directly."""
    return fleet.replicas[0]


@pytest.fixture(scope="session")
def vllm_url(replica: Replica) -> str:
    """A real vLLM server of the small model."""
    return replica.url
