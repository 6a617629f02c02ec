"""Two real vLLMs on this machine, one with the engine, a Redis, and two engines without vLLM."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.decode_cost import peer
from bench.decode_cost.peer import HOST
from bench.decode_cost.pressure import Place
from bench.decode_cost.probe import DIRECTORY, MEASURES_LOCK, PID
from bench.engine.redis_tier import server as redis_server
from bench.replica.local import (
    REPLICA_READY_TIMEOUT_S,
    find_platform,
    platform_arguments,
    replica_command,
    replica_environment,
)
from bench.replica.model import SHAPES, make_model
from bench.replica.tiers import call
from bench.ttft import BenchError
from cacheengine.launch.launch import free_ports
from router.launch.processes import ProcessGroup

_START: Final = Path(__file__).parent / "start"
_ROOT: Final = Path(__file__).resolve().parents[2]
_CONTEXT_TOKENS: Final = 8192
_BLOCK_TOKENS: Final = 128
_CHUNK_TOKENS: Final = 256
_KV_GB: Final = 2
_POOL_SETS: Final = 8
"""Sets of chunks that the CPU tier has room for, and twice as many the disk."""
_ONE_PROCESS: Final = (
    "--distributed-executor-backend",
    "vllm.v1.executor.uniproc_executor.UniProcExecutor",
)
"""As with one GPU: the model is driven from the engine core's main thread, in the process where the
engine is. Without a GPU vLLM by itself has the model in another process, which no lock here delays;
it asks for that since it could not bind threads to cores otherwise, and here it is not to."""
_PEER_SETS: Final = 2
"""The one that it holds, and the one that is copied to it."""
_GB: Final = 1024**3


@dataclass(frozen=True, kw_only=True)
class Vllm:
    """A running vLLM. ``probe`` is where its engine core writes what it measures."""

    url: str
    probe: Path

    def engine_core(self) -> int:
        """Return the process of its engine core; raise `BenchError` if that is not measured."""
        try:
            return int((self.probe / PID).read_text())
        except FileNotFoundError:
            raise BenchError("vLLM's engine core is not measured: was it started?") from None


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """What runs."""

    model: str
    plain: Vllm
    ours: Vllm
    inside: Place
    """Of the engine inside ``ours``."""
    outside: Place
    """Of the engine that has the same tiers and no vLLM."""
    peer: Place
    """Of the engine that both copy from and to."""
    info: dict[str, Any]
    """What the engine's agent says of it."""


@contextmanager
def running(work: Path, *, chunks: int, kv_bytes_per_token: int) -> Iterator[Replicas]:
    """Start all for the length of the block; raise `BenchError`, `ChildFailedError`, `CannotStartError`.

    ``chunks`` is how many a set has that is moved at once.
    """
    with ExitStack() as stack:
        redis_port = stack.enter_context(redis_server())
        group = stack.enter_context(ProcessGroup())
        model = str(make_model(work / "model", SHAPES[kv_bytes_per_token]).resolve())
        ports = free_ports(8)
        set_bytes = chunks * kv_bytes_per_token * _CHUNK_TOKENS
        config = _write_config(work, "ours", ports[2:4], redis_port, set_bytes)
        command = replica_command(config, _arguments(model, ports[1]))
        plain = _start(group, work, "plain", ports[0], _plain_command(model, ports[0]))
        ours = _start(group, work, "ours", ports[1], command)
        for name, each in (("plain", plain), ("ours", ours)):
            group.wait_ready(name, f"{each.url}/health", REPLICA_READY_TIMEOUT_S, print)
        agent_url = f"http://{HOST}:{ports[2]}"
        info = call(f"{agent_url}/info")
        own = _write_config(work, "outside", ports[6:8], redis_port, set_bytes)
        yield Replicas(
            model=model,
            plain=plain,
            ours=ours,
            inside=_place(ports[2:4]),
            outside=stack.enter_context(_engine(info, chunks, ports[6:8], config=str(own))),
            peer=stack.enter_context(_engine(info, chunks, ports[4:6])),
            info=info,
        )


def _start(group: ProcessGroup, work: Path, name: str, port: int, command: Sequence[str]) -> Vllm:
    probe = work / f"{name}-probe"
    probe.mkdir()
    platform = find_platform()
    environment = replica_environment(platform, 0, of=2)
    path = os.pathsep.join([str(_START), str(_ROOT)])
    environment |= {"PYTHONPATH": path, DIRECTORY: str(probe)}
    if name == "ours":
        environment[MEASURES_LOCK] = "1"
    if platform == "cpu":
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(_KV_GB)
        environment["OMP_NUM_THREADS"] = "1"
    group.start(name, command, environment, work / f"{name}.log")
    return Vllm(url=f"http://{HOST}:{port}", probe=probe)


def _arguments(model: str, port: int) -> list[str]:
    platform = find_platform()
    return [
        *platform_arguments(platform, of=2),
        *(_ONE_PROCESS if platform == "cpu" else ()),
        *("--model", model, "--host", HOST, "--port", str(port)),
        *("--block-size", str(_BLOCK_TOKENS), "--max-model-len", str(_CONTEXT_TOKENS)),
    ]


def _plain_command(model: str, port: int) -> list[str]:
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*server, *_arguments(model, port)]


def _write_config(
    work: Path, name: str, ports: Sequence[int], redis_port: int, set_bytes: int
) -> Path:
    path, set_gb = work / f"{name}.yaml", set_bytes / _GB
    settings = {
        "chunk_size": _CHUNK_TOKENS,
        "max_local_cpu_size": _POOL_SETS * set_gb,
        "local_disk": str(work / f"{name}-disk"),
        "max_local_disk_size": 2 * _POOL_SETS * set_gb,
        "remote_url": f"redis://{HOST}:{redis_port}",
        "lmcache_instance_id": name,
        "lmcache_worker_port": ports[0],
        "distributed_url": f"{HOST}:{ports[1]}",
    }
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


def _place(ports: Sequence[int]) -> Place:
    agent_port, transfer_port = ports
    return Place(
        agent_url=f"http://{HOST}:{agent_port}", transfer_address=f"{HOST}:{transfer_port}"
    )


@contextmanager
def _engine(
    info: dict[str, Any], chunks: int, ports: Sequence[int], *, config: str | None = None
) -> Iterator[Place]:
    """Start an engine without vLLM: with the tiers of a configuration, or a peer without any."""
    agent_port, transfer_port = ports
    told = peer.Told(
        layout=info["layout"],
        hash_algorithm=info["hash_algorithm"],
        hash_seed=info["hash_seed"],
        block_tokens=info["block_tokens"],
        chunk_tokens=info["chunk_tokens"],
        chunk_bytes=info["chunk_bytes"],
        chunks=chunks,
        conversations=(peer.ON_DISK, peer.IN_STORE) if config else (peer.AT_PEER,),
        sets=_POOL_SETS if config else _PEER_SETS,
        is_pinned=config is None,
        agent_port=agent_port,
        transfer_port=transfer_port,
        config=config,
    )
    command = [sys.executable, "-m", "bench.decode_cost.peer", json.dumps(asdict(told))]
    # A session of its own, as the vLLMs have: the kernel divides the cores among sessions first,
    # and in this one it would have but a part of what the engine inside vLLM has.
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=_ROOT,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != b"serves":
            raise BenchError("an engine without vLLM does not start")
        yield _place(ports)
    finally:
        process.kill()
        process.wait()
