"""NixlConnector and our engine in one vLLM: `warmroute replica --nixl`."""

import asyncio
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from bench.nixl.environment import path, server_environment
from bench.nixl.server import shake_hands
from bench.replica.text import real_text
from cacheengine.launch.vllm_launch import free_ports
from router.config.settings import ReplicaConfig
from router.launch.processes import ProcessGroup
from tests.e2e.serving import Replica, start_together
from tests.nixl.routed import routed

pytestmark = pytest.mark.nixl
TOKENS = 2500


@pytest.fixture(scope="module")
def replicas(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    if (nixl := path()) is None:
        pytest.skip("NIXL is not there: make test-nixl installs it")
    assert "warmroute" in entry_points(group="vllm.general_plugins").names, "run make venv"
    directory = tmp_path_factory.mktemp("engines")
    ports = free_ports(6)
    with ProcessGroup() as group:
        made = [
            Replica(
                group,
                name,
                model_dir,
                directory,
                port=ports[index],
                agent_port=ports[2 + index],
                index=index,
                of=2,
                options=["--nixl"],
                environment=server_environment(nixl, ports[4 + index]),
            )
            for index, name in enumerate(("one", "two"))
        ]
        start_together(*made)
        shake_hands(*made)
        yield made


async def test_kv_of_a_tier_below_the_gpu_goes_to_another_replica_and_stays_there(
    replicas: list[Replica], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home has it in CPU RAM only; afterwards the other has it in its own CPU RAM, too."""
    one, two = replicas
    text = real_text(TOKENS, seed=6)
    configs = [
        ReplicaConfig(
            url=each.url, agent_url=each.agent_url, instance_id=each.name, nixl_role="both"
        )
        for each in replicas
    ]
    async with routed(configs, model_dir, monkeypatch) as made:
        expected, _ = await made.ask(text)
        await asyncio.to_thread(one.empty_gpu)
        made.decoder, made.prefiller = "two", "one"
        moved, record = await made.ask(text)
        assert (moved, record.replica_id, record.failed_tries) == (expected, "two", [])
        assert record.first_leg is not None
        assert (record.first_leg.cached_tokens or 0) > 0.8 * TOKENS, "from its CPU RAM"
        made.prefiller = None
        await asyncio.to_thread(two.empty_gpu)
        again, record = await made.ask(text)
        assert (again, record.replica_id) == (expected, "two")
        assert (record.cached_tokens or 0) > 0.8 * TOKENS, "what it pulled was stored"
