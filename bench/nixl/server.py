"""A stock vLLM server with NixlConnector, as a process of this machine."""

import json
import os
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, permutations
from pathlib import Path
from typing import Any, Final

from bench.nixl.environment import server_environment
from bench.replica.local import (
    REPLICA_READY_TIMEOUT_S,
    platform_arguments,
    replica_environment,
)
from bench.replica.text import real_text
from bench.replica.tiers import Vllm, wait_until
from cacheengine.launch.vllm_launch import free_ports
from router.config.settings import ReplicaConfig
from router.launch.processes import ProcessGroup
from router.prompt.request_body import REMOTE_DECODE

_HANDSHAKE_TOKENS: Final = 300
_HANDSHAKE_SEED: Final = 1_000_000
"""The first of seeds that no prompt of a test or benchmark has."""

_SAMPLE: Final = r"^vllm:{name}(?:_total)?\{{[^}}]*{labels}[^}}]*\}} (\S+)$"


class NixlServer(Vllm):
    """A vLLM that pulls KV from others, and lends its own for ``lease_s``."""

    def __init__(
        self,
        group: ProcessGroup,
        name: str,
        *,
        nixl: Path,
        python: str,
        model: Path,
        served_name: str,
        directory: Path,
        index: int,
        of: int,
        max_model_tokens: int,
        lease_s: int,
    ) -> None:
        """``nixl`` is the directory that has NIXL."""
        port, side_port, events_port, replay_port = free_ports(4)
        super().__init__(name=name, url=f"http://127.0.0.1:{port}", model=served_name)
        self._group = group
        self._log = directory / f"{name}.log"
        self._environment = {
            **replica_environment("cpu", index, of=of),
            **server_environment(nixl, side_port),
        }
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kv_lease_duration": lease_s},
        }
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events_port}",
            "replay_endpoint": f"tcp://*:{replay_port}",
        }
        self._command = [
            *(python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", served_name),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", str(max_model_tokens), "--enable-prompt-tokens-details"),
            *platform_arguments("cpu", of=of),
            *("--kv-transfer-config", json.dumps(transfer)),
            *("--kv-events-config", json.dumps(events)),
        ]

    @property
    def config(self) -> ReplicaConfig:
        """The replica in a router's configuration."""
        return ReplicaConfig(url=self.url, instance_id=self.name, nixl_role="both")

    def start(self) -> None:
        """Start the process; `wait_ready` follows."""
        self._pid = self._group.start(self.name, self._command, self._environment, self._log)

    def wait_ready(self) -> None:
        """Return when it answers."""
        self._group.wait_ready(self.name, f"{self.url}/health", REPLICA_READY_TIMEOUT_S)

    def kill(self) -> None:
        """End all its processes as by ``kill -9``."""
        os.killpg(self._pid, signal.SIGKILL)
        self._group.stop(self.name, kill=True)

    def sample(self, name: str, labels: str = "") -> float:
        """Return the sum of a metric's samples that have some labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        pattern = _SAMPLE.format(name=name, labels=re.escape(labels))
        return sum(map(float, re.findall(pattern, text, re.MULTILINE)))


def started_pair(
    group: ProcessGroup,
    *,
    nixl: Path,
    model: Path,
    served_name: str,
    directory: Path,
    max_model_tokens: int,
    lease_s: int,
) -> dict[str, NixlServer]:
    """Return two servers that answer, ``one`` and ``two``, which have pulled from each other."""
    made = {
        name: NixlServer(
            group,
            name,
            nixl=nixl,
            python=sys.executable,
            model=model,
            served_name=served_name,
            directory=directory,
            index=index,
            of=2,
            max_model_tokens=max_model_tokens,
            lease_s=lease_s,
        )
        for index, name in enumerate(("one", "two"))
    }
    for each in made.values():
        each.start()
    for each in made.values():
        each.wait_ready()
    shake_hands(*made.values())
    return made


def shake_hands(*servers: Vllm) -> None:
    """Have each server pull from each other one.

    On a busy machine the first handshake may take longer than the 5 s that vLLM waits for it.
    """
    for lender, puller in permutations(servers, 2):
        pulls = partial(_pulls, puller, lender, count())
        wait_until(f"{puller.name} pulls from {lender.name}", pulls, timeout_s=120.0)


def _pulls(puller: Vllm, lender: Vllm, seeds: Iterator[int]) -> bool:
    """Whether one server pulls the KV of a new prompt from another one."""
    try:
        pull(puller, lender, real_text(_HANDSHAKE_TOKENS, seed=_HANDSHAKE_SEED + next(seeds)))
    except OSError:
        return False
    return True


def pull(puller: Vllm, lender: Vllm, prompt: str | Sequence[int]) -> dict[str, Any]:
    """Have one vLLM prefill a prompt, and return the answer of another one that pulls its KV.

    Raises OSError (urllib's own).
    """
    lent = lender.complete(prompt, kv_transfer_params=REMOTE_DECODE)
    return puller.complete(prompt, kv_transfer_params=lent["kv_transfer_params"])
