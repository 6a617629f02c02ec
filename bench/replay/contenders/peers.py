"""The two Rust routers, from an environment of their own, started as their users start them.

The environment is made on demand, once, under a cache folder; or the user
names the Python of one that is there.
"""

import os
import re
from pathlib import Path
from typing import Final

from bench.environments import NotInstalledError, installed
from bench.replay.contenders.contender import CannotRunError, Contender, Launch, fetch
from bench.replay.fleet import Fleet
from cacheengine.launch.launch import free_ports

PACKAGES: Final = ("sglang-router==0.3.2", "vllm-router==0.1.17")
NEEDS: Final = ("setproctitle", "fastapi", "uvicorn", "requests", "aiohttp", "orjson")
DEFAULT_DIRECTORY: Final = Path.home() / ".cache" / "warmroute-peers"

_VLLM: Final = ("-m", "vllm_router.launch_router", "--log-level", "warning")
_SGLANG: Final = ("-m", "sglang_router", "launch", "--log-level", "warn")
_VLLM_EVICTION_S: Final = 120
_SGLANG_EVICTION_S: Final = 60
"""Each router's own default of the time between cuts of its prefix trees."""
_RECOMMENDED: Final = (
    *("--cache-threshold", "0.5"),
    *("--balance-abs-threshold", "32", "--balance-rel-threshold", "1.1"),
)
"""What vllm-router's documentation of its policies starts cache_aware with."""
_PROXY: Final = re.compile(r"(all|https?)_proxy", re.IGNORECASE)
_SESSION_TTL_S: Final = 600
"""How long kv_aware keeps to a session's replica; its documentation names no time."""


class PeersPython:
    """The interpreter that has the peers; installs them when it is first asked for."""

    def __init__(self, python: Path | None, directory: Path = DEFAULT_DIRECTORY) -> None:
        self._python = python
        self._directory = directory

    def path(self) -> Path:
        """Return it; raises `CannotRunError` when the peers cannot be installed."""
        if self._python is None:
            self._python = self._installed()
        return self._python

    def _installed(self) -> Path:
        try:
            return installed(self._directory, PACKAGES, ("--no-deps", *PACKAGES), NEEDS)
        except NotInstalledError as error:
            raise CannotRunError(str(error)) from None


def contenders(python: PeersPython) -> list[Contender]:
    """Return the peers with the policies that are compared."""

    def sglang(policy: str, *options: str, session_header: str = "x-session-id") -> Contender:
        def launch(fleet: Fleet, directory: Path) -> Launch:
            command = [str(python.path()), *_SGLANG, "--policy", policy, *options]
            return _launch(command, fleet, _SGLANG_EVICTION_S)

        # It refuses token ids, and knows prompts by their characters.
        name = f"sglang-{policy.replace('_', '-')}"
        return Contender(name=name, launch=launch, session_header=session_header)

    def vllm(policy: str, *options: str, finish_path: str | None = None) -> Contender:
        def launch(fleet: Fleet, directory: Path) -> Launch:
            command = [str(python.path()), *_VLLM, "--policy", policy, *options]
            return _launch(command, fleet, _VLLM_EVICTION_S)

        name = f"vllm-{policy.replace('_', '-')}"
        return Contender(
            name=name,
            launch=launch,
            # Where it knows prompts by their tokens it first asks a replica for those of a text.
            sends_token_ids=policy == "cache_aware",
            finish_path=finish_path,
        )

    def kv_aware(name: str, *, keeps_sessions: bool) -> Contender:
        def launch(fleet: Fleet, directory: Path) -> Launch:
            command = [str(python.path()), *_VLLM, "--policy", "kv_aware", *_events(fleet)]
            if keeps_sessions:
                ttl_s = max(1, round(_SESSION_TTL_S / fleet.speed))
                command += ["--kv-aware-session-affinity-ttl-secs", str(ttl_s)]
            return _launch(command, fleet, _VLLM_EVICTION_S)

        return Contender(name=name, launch=launch, sends_token_ids=True)

    return [
        sglang("cache_aware"),
        sglang("power_of_two"),
        sglang("manual", "--assignment-mode", "min_group", session_header="x-smg-routing-key"),
        vllm("cache_aware", *_RECOMMENDED),
        kv_aware("vllm-kv-aware", keeps_sessions=False),
        kv_aware("vllm-kv-aware-sessions", keeps_sessions=True),
        vllm("power_of_two"),
        vllm("consistent_hash"),
        vllm("sticky_least_loaded", finish_path="/finish_session"),
        vllm("round_robin"),
    ]


def _events(fleet: Fleet) -> list[str]:
    """Return the options that let kv_aware hear the replicas' KV events."""
    options = ["--kv-event-block-size", str(fleet.options.block_tokens)]
    options += ["--kv-event-model", fleet.model]
    for each in fleet.replicas:
        options += ["--kv-event-source", f"{each.url}={each.kv_events}"]
        options += ["--kv-event-replay-source", f"{each.url}={each.kv_replay}"]
    return options


def _launch(command: list[str], fleet: Fleet, eviction_s: float) -> Launch:
    """Add what both routers call by the same names.

    Their one time that matters, between cuts of the prefix tree, is divided by
    the fleet's speed, as ours are. The interval of checks is also that at which
    power_of_two asks for loads.
    """
    port, metrics_port = free_ports(2)
    command = [
        *command,
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)),
        *("--worker-urls", *(each.url for each in fleet.replicas)),
        *("--eviction-interval-secs", str(max(1, round(eviction_s / fleet.speed)))),
        *("--worker-startup-check-interval", "1"),
    ]
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        fetch(f"{url}/health")
        workers = fetch(f"{url}/workers")["workers"]
        return sum(bool(each["is_healthy"]) for each in workers) == len(fleet.replicas)

    return Launch(command=command, url=url, is_ready=is_ready, environment=_without_proxies())


def _without_proxies() -> dict[str, str]:
    """Return the environment without its HTTP proxies: both would ask them for the replicas."""
    return {name: value for name, value in os.environ.items() if not _PROXY.fullmatch(name)}
