"""Two real replicas as a stage: the shipped configurations on ports and disks of their own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.aiperf.stage import Stage
from bench.replica import local
from bench.replica.model import make_model
from bench.replica.text import real_text
from bench.replica.tiers import ReplicaTiers, call, wait_until
from cacheengine.launch import free_ports
from router.processes import ProcessGroup

REPLICAS: Final = 2

_CONFIGS: Final = Path(__file__).parents[2] / "configs"
_MODEL: Final = "served"
_ROUTER: Final = "router"
_CPU_GB: Final = 1.0
"""More than the conversations' KV: 8 KiB a token."""
_WARM_UP_TOKENS: Final = 2048


@contextmanager
def real(directory: Path) -> Iterator[Stage]:
    """Run two real replicas with the shipped configurations, on ports and disks of their own."""
    model = make_model(directory / "model")
    with ProcessGroup() as group:
        made = [_start_replica(group, directory, model, index) for index in range(REPLICAS)]
        for replica in made:
            url = f"{replica.url}/health"
            group.wait_ready(replica.name, url, local.REPLICA_READY_TIMEOUT_S)
        for replica in made:
            _warm_up(replica)
        yield Stage(
            group=group,
            model=_MODEL,
            tokenizer=model,
            replicas=made,
            start_router=lambda: _start_router(group, directory, made),
            router=_ROUTER,
        )


def _start_replica(group: ProcessGroup, directory: Path, model: Path, index: int) -> ReplicaTiers:
    name = f"replica{index + 1}"
    port, agent_port, copies_port = free_ports(3)
    disk = directory / f"disk{index + 1}"
    config = local.variant(
        _CONFIGS / f"instance{index + 1}.yaml",
        directory / f"{name}.yaml",
        max_local_cpu_size=_CPU_GB,
        local_disk=str(disk),
        lmcache_instance_id=name,
        lmcache_worker_port=agent_port,
        distributed_url=f"127.0.0.1:{copies_port}",
        enable_controller=None,
        controller_url=None,
    )
    platform = local.find_platform()
    vllm_args = [
        *local.platform_arguments(platform, of=REPLICAS),
        *("--model", str(model), "--served-model-name", _MODEL),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", str(local.MAX_MODEL_TOKENS)),
    ]
    environment = local.replica_environment(platform, index, of=REPLICAS)
    # vLLM's sockets, too, go with the directory.
    environment |= {"TMPDIR": str(directory)}
    command = local.replica_command(config, vllm_args)
    group.start(name, command, environment, directory / f"{name}.log")
    return ReplicaTiers(
        name=name,
        url=f"http://127.0.0.1:{port}",
        agent_url=f"http://127.0.0.1:{agent_port}",
        model=_MODEL,
        disk=disk,
    )


def _warm_up(replica: ReplicaTiers) -> None:
    """Have a replica compute, store and load once: its first time of each is slower."""
    text = real_text(_WARM_UP_TOKENS, seed=0)
    body = {
        "model": replica.model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 8,
    }
    for _ in range(2):
        call(f"{replica.url}/v1/chat/completions", body)
        replica.wait_stored(replica.chat_tokens(text), "cpu")
        replica.empty_gpu()


def _start_router(group: ProcessGroup, directory: Path, replicas: Sequence[ReplicaTiers]) -> str:
    (port,) = free_ports(1)
    entries = [
        {"url": each.url, "agent_url": each.agent_url, "instance_id": each.name}
        for each in replicas
    ]
    config = local.variant(
        _CONFIGS / "router.yaml",
        directory / "router.yaml",
        port=port,
        replicas=entries,
        controller=None,
    )
    url = f"http://127.0.0.1:{port}"
    group.start(_ROUTER, local.router_command(config), None, directory / "router.log")
    group.wait_ready(_ROUTER, f"{url}/health", local.ROUTER_READY_TIMEOUT_S)
    asked = {"model": _MODEL, "prompt": "Who is there?"}

    def knows_replicas() -> bool:
        answer = call(f"{url}/explain", asked)
        return bool(answer["exact_tokens"]) and len(answer["candidates"]) == len(replicas)

    wait_until("the router knows its replicas", knows_replicas)
    return url
