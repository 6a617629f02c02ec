"""Real vLLM replicas with the engine inside, and routers, for the tests to use and to break."""

import json
import os
import random
import signal
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bench.replica.local import (
    REPLICA_READY_TIMEOUT_S,
    ROUTER_READY_TIMEOUT_S,
    find_platform,
    platform_arguments,
    replica_command,
    replica_environment,
    router_command,
    taken_ports,
)
from bench.replica.tiers import ReplicaTiers, call, wait_until
from cacheengine.launch.vllm_launch import free_ports, ranks_of
from router.launch.processes import ChildNotReadyError, ProcessGroup
from warmroute_common.admin_token import admin_token_headers
from warmroute_common.keys import HashScheme, chunk_keys

MODEL = "m"
MAX_MODEL_TOKENS = 4096
GPU_BLOCKS = 36
BLOCK_TOKENS = 128
CHUNK_TOKENS = 256


@dataclass(frozen=True)
class Answer:
    """What a replica said, to the last bit of its log probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[tuple[str, float], ...], ...]
    cached_tokens: int

    @property
    def said(self) -> tuple[object, ...]:
        """Everything but how much was cached."""
        return (self.token_ids, self.logprobs, self.top_logprobs)


class Replica(ReplicaTiers):
    """One vLLM process group, which can be killed and started again on the same disk."""

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        model_dir: Path,
        directory: Path,
        *,
        port: int,
        agent_port: int,
        index: int = 0,
        of: int = 1,
        vllm_args: Sequence[str] = (),
        config: Mapping[str, object] | None = None,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``options`` are those of ``warmroute replica`` itself."""
        super().__init__(
            name=name,
            url=f"http://127.0.0.1:{port}",
            agent_url=f"http://127.0.0.1:{agent_port}",
            model=MODEL,
            disk=directory / f"disk-{name}",
        )
        self._group = group
        self._log_path = directory / f"{name}.log"
        self._config_path = directory / f"{name}.yaml"
        settings = {
            "chunk_size": CHUNK_TOKENS,
            "max_local_cpu_size": 0.25,
            "local_disk": str(self.disk),
            "max_local_disk_size": 2.0,
            "lmcache_instance_id": name,
            "lmcache_worker_port": agent_port,
            **(config or {}),
        }
        self._config_path.write_text(json.dumps(settings))  # JSON is YAML
        platform = find_platform()
        self._environment = {**replica_environment(platform, index, of=of), **(environment or {})}
        self._options = options
        self._arguments = [
            *platform_arguments(platform, of=of),
            *("--model", str(model_dir), "--served-model-name", MODEL, "--port", str(port)),
            *("--max-model-len", str(MAX_MODEL_TOKENS), "--block-size", str(BLOCK_TOKENS)),
            *("--num-gpu-blocks-override", str(GPU_BLOCKS)),
            *vllm_args,
        ]

    def start(self) -> None:
        """Start the process; `wait_ready` follows."""
        # Chosen here, and not by the command: other processes choose at the same time.
        events_port, replay_port = free_ports(2, in_a_row=ranks_of(self._arguments).everywhere)
        ports = ("--kv-events-port", str(events_port), "--kv-replay-port", str(replay_port))
        command = replica_command(self._config_path, self._arguments, *ports, *self._options)
        self._pid = self._group.start(self.name, command, self._environment, self._log_path)

    def wait_ready(self) -> None:
        """Return when it serves; where it does not in time, fail with its log and its stacks."""
        try:
            self._group.wait_ready(self.name, f"{self.url}/health", REPLICA_READY_TIMEOUT_S)
        except ChildNotReadyError as error:
            os.kill(self._pid, signal.SIGABRT)
            time.sleep(2.0)
            raise AssertionError(f"{error}\n{self.log[-8000:]}") from error

    def kill(self) -> None:
        """SIGKILL its server process alone, as a person would; its engine must follow by itself."""
        os.kill(self._pid, signal.SIGKILL)
        agent_port = int(self.agent_url.rpartition(":")[2])
        wait_until(f"{self.name}: its engine has ended", lambda: not taken_ports([agent_port]))
        self._group.stop(self.name, kill=True)

    def kill_all(self) -> None:
        """SIGKILL all its processes at once, its engine and workers included."""
        self._group.stop(self.name, kill=True)

    def stop(self) -> None:
        """End it in order."""
        self._group.stop(self.name)

    @property
    def log(self) -> str:
        """Everything it printed."""
        return self._log_path.read_text(errors="replace")

    # --- requests ---

    def ask(
        self,
        prompt: Sequence[int] | str,
        *,
        max_tokens: int = 64,
        headers: Mapping[str, str] | None = None,
        **more: object,
    ) -> Answer:
        """Complete a text, or a prompt of token ids, at temperature 0."""
        body = {
            "model": MODEL,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 5,
            "return_token_ids": True,
            "ignore_eos": True,
            **more,
        }
        answer = call(f"{self.url}/v1/completions", body, headers=headers, timeout_s=300)
        (choice,) = answer["choices"]
        details = answer["usage"]["prompt_tokens_details"] or {}
        return Answer(
            token_ids=tuple(choice["token_ids"]),
            logprobs=tuple(choice["logprobs"]["token_logprobs"]),
            top_logprobs=tuple(
                tuple(sorted(top.items())) for top in choice["logprobs"]["top_logprobs"]
            ),
            cached_tokens=details.get("cached_tokens") or 0,
        )

    # --- tiers ---

    def empty_cpu(self) -> None:
        """Leave on disk alone what is in the CPU tier."""
        self.settle()
        call(f"{self.agent_url}/clear", {"tiers": ["cpu"]})

    def settle(self) -> None:
        """Return when nothing is being stored, loaded or written."""

        def idle() -> bool:
            metrics = self.metrics()
            return not (
                metrics["warmroute_engine_put_queue_bytes"]
                or metrics["warmroute_engine_cpu_held_bytes"]
            )

        wait_until(f"{self.name} settled", idle)

    def wait_stored(
        self, tokens: Sequence[int], tier: str = "cpu", *, timeout_s: float = 60.0
    ) -> None:
        """Wait as `ReplicaTiers` does, and until it is at rest."""
        super().wait_stored(tokens, tier, timeout_s=timeout_s)
        self.settle()

    def prefetch(self, prompt: Sequence[int], *, chunks: int | None = None) -> dict[str, int]:
        """Promote the first chunks of a prompt, and wait for them."""
        wanted = chunk_hexes(prompt)[:chunks]
        reply: dict[str, int] = call(
            f"{self.agent_url}/prefetch", {"keys": wanted, "wait_s": 20.0, "pin_s": 20.0}
        )
        return reply

    def metrics(self) -> dict[str, float]:
        """Return the engine's metrics, names without ``_total`` too."""
        return prometheus(f"{self.agent_url}/metrics")

    def vllm_metric(self, name: str) -> float:
        """Return the sum of one of vLLM's own counters."""
        metrics = prometheus(f"{self.url}/metrics")
        return sum(v for k, v in metrics.items() if k.split("{")[0] == name)


def replica_on_free_ports(
    group: ProcessGroup,
    name: str,
    model_dir: Path,
    directory: Path,
    *,
    vllm_args: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
) -> Replica:
    """Make a replica that takes half of the machine; it is not started yet."""
    port, agent_port = free_ports(2)
    return Replica(
        group,
        name,
        model_dir,
        directory,
        port=port,
        agent_port=agent_port,
        of=2,
        vllm_args=vllm_args,
        config=config,
    )


def in_one_process() -> dict[str, str]:
    """Return the environment of a vLLM whose engine, and so its agent, is in the same process."""
    return {
        **replica_environment("cpu", 0, of=1),
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def start_together(*replicas: Replica) -> None:
    """Start replicas at once and return when all serve.

    That takes most of the time of these tests, and each by itself one core for long: vLLM is
    imported by three processes, one after the other.
    """
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.wait_ready()


class Router:
    """One router process, which serves within the block."""

    def __init__(
        self, group: ProcessGroup, name: str, directory: Path, settings: Mapping[str, Any]
    ) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{settings['port']}"
        self._group = group
        self._config_path = directory / f"{name}.yaml"
        self._log_path = directory / f"{name}.log"
        self._config_path.write_text(json.dumps(settings))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it and return when it serves."""
        self._group.start(self.name, router_command(self._config_path), None, self._log_path)
        self._group.wait_ready(self.name, f"{self.url}/health", ROUTER_READY_TIMEOUT_S)

    def stop(self) -> None:
        """End it in order."""
        self._group.stop(self.name)

    @property
    def log(self) -> str:
        """Everything it printed."""
        return self._log_path.read_text(errors="replace")


def wait_no_shared_memory() -> None:
    """Wait until no pool has a name: a starting replica's has one until its ranks have it open."""
    wait_until("no pool has a name", lambda: not list(Path("/dev/shm").glob("vllm_offload_*")))


def chunk_hexes(prompt: Sequence[int]) -> list[str]:
    """Return the chunk keys of a prompt, as the agent takes them."""
    chain = HashScheme().chain(prompt, BLOCK_TOKENS)
    return [key.hex() for key in chunk_keys(chain, CHUNK_TOKENS // BLOCK_TOKENS)]


def prometheus(url: str) -> dict[str, float]:
    """Return the samples of a metrics page by name (with labels)."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=admin_token_headers(url))
    with opener.open(request, timeout=30) as response:
        lines = response.read().decode().splitlines()
    samples: dict[str, float] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            samples[name] = float(value)
            samples[name.replace("_total", "")] = float(value)
    return samples


def fresh_prompt(length: int, *, seed: int) -> list[int]:
    """Return token ids that no other seed gives, none of them special."""
    generator = random.Random(seed)
    return [generator.randrange(200, 4000) for _ in range(length)]
