"""The two Rust routers, from an environment of their own, started as their users start them.

The environment is made on demand, once, under a cache folder; or the user
names the Python of one that is there.
"""

from pathlib import Path
from typing import Final

from bench.environments import NotInstalled, installed
from bench.replay.contenders.contender import CannotRun, Contender, Launch, fetch
from bench.replay.fleet import Fleet
from cacheengine.launch import free_ports

PACKAGES: Final = ("sglang-router==0.3.2", "vllm-router==0.1.17")
NEEDS: Final = ("setproctitle", "fastapi", "uvicorn", "requests", "aiohttp", "orjson")
DEFAULT_DIRECTORY: Final = Path.home() / ".cache" / "warmroute-peers"

_TREE_EVICTION_S: Final = 120
"""The two routers' own default of the time between cuts of their prefix trees."""


class PeersPython:
    """The interpreter that has the peers; installs them when it is first asked for."""

    def __init__(self, python: Path | None, directory: Path = DEFAULT_DIRECTORY) -> None:
        self._python = python
        self._directory = directory

    def path(self) -> Path:
        """Return it; raises `CannotRun` when the peers cannot be installed."""
        if self._python is None:
            self._python = self._installed()
        return self._python

    def _installed(self) -> Path:
        try:
            return installed(self._directory, PACKAGES, ("--no-deps", *PACKAGES), NEEDS)
        except NotInstalled as error:
            raise CannotRun(str(error)) from None


def contenders(python: PeersPython) -> list[Contender]:
    """Return the peers with the policies that are compared."""

    def sglang(fleet: Fleet, directory: Path) -> Launch:
        (port,) = free_ports(1)
        command = [str(python.path()), "-m", "sglang_router", "launch", *_common(fleet, port)]
        command += ["--policy", "cache_aware", "--log-level", "warn"]
        return _launch(command, port, fleet)

    def vllm(policy: str, *, with_events: bool = False, sends_token_ids: bool = False) -> Contender:
        def launch(fleet: Fleet, directory: Path) -> Launch:
            (port,) = free_ports(1)
            command = [str(python.path()), "-m", "vllm_router.launch_router", *_common(fleet, port)]
            command += ["--policy", policy, "--log-level", "warning"]
            command += _events(fleet) if with_events else []
            return _launch(command, port, fleet)

        name = f"vllm-{policy.replace('_', '-')}"
        return Contender(name=name, launch=launch, sends_token_ids=sends_token_ids)

    return [
        # It refuses token ids, and knows prompts by their characters.
        Contender(name="sglang-cache-aware", launch=sglang),
        # It knows prompts by their tokens: for a text it first asks a replica.
        vllm("cache_aware", sends_token_ids=True),
        vllm("kv_aware", with_events=True, sends_token_ids=True),
        vllm("consistent_hash"),
        vllm("round_robin"),
    ]


def _common(fleet: Fleet, port: int) -> list[str]:
    """Return what both routers call by the same names.

    Their one time that matters, between cuts of the prefix tree, is divided by
    the fleet's speed, as ours are.
    """
    urls = [each.url for each in fleet.replicas]
    eviction_s = max(1, round(_TREE_EVICTION_S / fleet.speed))
    return [
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", *urls),
        *("--prometheus-port", *map(str, free_ports(1))),
        *("--eviction-interval-secs", str(eviction_s)),
        *("--worker-startup-check-interval", "1"),
    ]


def _events(fleet: Fleet) -> list[str]:
    """Return the options that let kv_aware hear the replicas' KV events."""
    options = ["--kv-event-block-size", str(fleet.options.block_tokens)]
    options += ["--kv-event-model", fleet.model]
    for each in fleet.replicas:
        options += ["--kv-event-source", f"{each.url}={each.kv_events}"]
        options += ["--kv-event-replay-source", f"{each.url}={each.kv_replay}"]
    return options


def _launch(command: list[str], port: int, fleet: Fleet) -> Launch:
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        fetch(f"{url}/health")
        workers = fetch(f"{url}/workers")["workers"]
        return sum(bool(each["is_healthy"]) for each in workers) == len(fleet.replicas)

    return Launch(command=command, url=url, is_ready=is_ready)
