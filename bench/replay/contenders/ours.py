"""Ours, started as a user starts it: `warmroute serve --config FILE`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.replay.contenders.contender import Contender, Launch, fetch
from bench.replay.fleet import Fleet
from bench.replica.local import router_command
from cacheengine.launch.launch import free_ports
from router.config.settings import (
    AdmissionConfig,
    IndexConfig,
    PrefetchConfig,
    RatesConfig,
    SessionConfig,
)

_TIMED: Final = {
    "prefetch": PrefetchConfig(),
    "admission": AdmissionConfig(),
    "sessions": SessionConfig(),
    "index": IndexConfig(),
}
"""Sections of the configuration whose times are the model's, not the network's."""

POLICIES: Final = ("ttft", "longest-prefix", "session", "least-loaded", "round-robin")


def contenders() -> list[Contender]:
    """Return ours with each policy, and the default one with a thing less or more."""
    made = [_ours(f"ours-{policy}", policy=policy) for policy in POLICIES]
    without = _ours("ours-ttft-no-prefetch", policy="ttft", prefetch={"enabled": False})
    told = _ours("ours-true-rates", true_rates=True)
    return [made[0], without, told, *made[1:]]


def config(fleet: Fleet, port: int, chunk_token_bytes: float, **settings: Any) -> dict[str, Any]:
    """Return the router's configuration for a fleet.

    The model's time runs faster than the router's clock, so the times of the
    configuration are the defaults divided by the speed, and the rates to start
    from are the defaults times the speed.
    """
    speed = fleet.speed
    made: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "log_level": "warning",
        "tokenizer": {"path": str(fleet.tokenizer)},
        "replicas": [
            {"url": each.url, "agent_url": each.agent_url, "instance_id": each.instance_id}
            for each in fleet.replicas
        ],
        "rates": _default_rates(chunk_token_bytes, speed),
        **{name: _faster(section, speed) for name, section in _TIMED.items()},
    }
    for key, value in settings.items():
        made[key] = made[key] | value if isinstance(value, dict) else value
    return made


def _default_rates(chunk_token_bytes: float, speed: float) -> dict[str, float]:
    """Return the rates that nobody measured, as fast in tokens as they are by default.

    A simulated token's KV has few bytes: as many tokens a second are fewer bytes.
    """
    default = RatesConfig()
    in_tokens = chunk_token_bytes / default.kv_bytes_per_token
    rates = {
        name: rate * speed * (in_tokens if "bytes" in name else 1.0)
        for name, rate in asdict(default).items()
        if name.endswith("_per_s")
    }
    return rates | {"kv_bytes_per_token": chunk_token_bytes}


def measured_rates(fleet: Fleet, chunk_token_bytes: float) -> dict[str, float]:
    """Return the fleet's own rates by the router's clock, as an operator would measure them."""
    speed, options = fleet.speed, fleet.options
    per_token = chunk_token_bytes * speed
    return {
        "prefill_tokens_per_s": options.prefill_tokens_per_s * speed,
        "cpu_load_bytes_per_s": options.load_tokens_per_s * per_token,
        "disk_bytes_per_s": options.disk_tokens_per_s * per_token,
        "peer_bytes_per_s": options.peer_tokens_per_s * per_token,
    }


def _faster(section: Any, speed: float) -> dict[str, float]:
    """Return a section's default times, divided by the speed."""
    return {name: value / speed for name, value in asdict(section).items() if name.endswith("_s")}


def _ours(name: str, *, true_rates: bool = False, **settings: Any) -> Contender:
    def launch(fleet: Fleet, directory: Path) -> Launch:
        info = fetch(f"{fleet.replicas[0].agent_url}/info")
        (port,) = free_ports(1)
        path = directory / f"{name}.yaml"
        # JSON is YAML.
        chunk_token_bytes = info["chunk_bytes"] / info["chunk_tokens"]
        rates = {"rates": measured_rates(fleet, chunk_token_bytes)} if true_rates else {}
        made = config(fleet, port, chunk_token_bytes, **settings, **rates)
        path.write_text(json.dumps(made, indent=2), encoding="utf-8")
        url = f"http://127.0.0.1:{port}"
        return Launch(
            command=router_command(path), url=url, is_ready=lambda: _knows_fleet(url, fleet)
        )

    return Contender(name=name, launch=launch)


def _knows_fleet(url: str, fleet: Fleet) -> bool:
    """Whether it has read the tokenizer and has every replica as a candidate."""
    answer = fetch(f"{url}/explain", {"model": fleet.model, "prompt": "Who is there?"})
    return bool(answer["exact_tokens"]) and len(answer["candidates"]) == len(fleet.replicas)
