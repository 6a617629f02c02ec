"""The file of ``warmroute up``, and the processes that it describes.

The file's ``router`` section has the keys of ``router.yaml`` except ``replicas``: those are the
replicas started here. Each becomes an ordinary ``warmroute`` command, as a person would start it.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from router.config.loading import check_unique, load_router_config, router_config
from router.config.settings import RouterConfig
from router.gateway.envoy_config import envoy_configuration, envoy_program, merge
from router.policy import check_gateway
from warmroute_common.addresses import is_loopback_url, join_host_port, reachable
from warmroute_common.config_reader import ConfigLocation, build, check_kind, read_yaml, setting

WARMROUTE: Final = (sys.executable, "-m", "router")
"""The beginning of each ``warmroute`` command line."""
_AGENT_PORT_KEY: Final = "lmcache_worker_port"
_TRANSFER_KEY: Final = "distributed_url"
_NAME_KEY: Final = "lmcache_instance_id"
_CONTROLLER_KEY: Final = "controller_url"


@dataclass(frozen=True, kw_only=True)
class PlannedProcess:
    """One process of the fleet."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Added to this process's environment."""
    url: str
    """Base URL; its ``/health`` answers 200 once the process is ready."""
    log_path: Path


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """All processes that `run` starts."""

    replicas: tuple[PlannedProcess, ...]
    router: PlannedProcess
    router_settings: dict[str, Any]
    log_dir: Path
    ready_timeout_s: float
    gateway: PlannedProcess | None = None
    """Envoy, if it carries the requests; the router is then its endpoint picker."""
    gateway_settings: dict[str, Any] | None = None

    @property
    def processes(self) -> tuple[PlannedProcess, ...]:
        """All processes, in the order in which they are started."""
        gateway = () if self.gateway is None else (self.gateway,)
        return (*self.replicas, self.router, *gateway)

    @property
    def url(self) -> str:
        """The URL for clients."""
        return (self.gateway or self.router).url


def router_process(command: str, url: str, log_dir: Path) -> PlannedProcess:
    """Return the process of ``warmroute serve`` or ``warmroute picker``."""
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
    """Return the plan with Envoy at the router's port, and the router as its endpoint picker.

    ``own`` is a file with more settings for Envoy, relative to the fleet's file (``at``). Raises
    `ConfigError`.
    """
    check_gateway(router, at.at("router"))
    picker = router.picker
    assert picker is not None
    if 0 in (picker.port, picker.http_port):
        raise at.at("router.picker").error("0 means any free port", "set a fixed port")
    if (found := envoy_program()) is None:
        fix = "install it: pip install '.[gateway]' in a clone of the repository"
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


@dataclass(frozen=True, kw_only=True)
class StartedReplica:
    """One replica to start."""

    config: str
    """File of its cache engine, with LMCache's keys (``configs/instance1.yaml``)."""
    port: int = setting(at_least=1, at_most=65535)
    """Port of its OpenAI server."""
    gpus: tuple[int, ...] | None = None
    """GPUs that it uses (CUDA_VISIBLE_DEVICES). By default all."""
    vllm_args: tuple[str, ...] = ()
    """More vLLM arguments, after those for all replicas."""
    env: dict[str, str] = field(default_factory=dict)
    """More environment variables; they override those for all replicas."""


@dataclass(frozen=True, kw_only=True)
class FleetFile:
    """All settings of ``fleet.yaml``."""

    model: str
    """vLLM's ``--model``: a name on the model hub, or a directory."""
    replicas: tuple[StartedReplica, ...]
    vllm_args: tuple[str, ...] = ()
    """vLLM arguments for all replicas."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables for all replicas, in addition to this process's."""
    router: dict[str, Any] = field(default_factory=dict)
    """The keys of `router.yaml` except ``replicas``."""
    envoy: str | None = None
    """File with Envoy settings that override those of ``--gateway envoy``."""
    log_dir: str = ".warmroute/logs"
    """Directory for the processes' output, relative to the working directory."""
    ready_timeout_s: float = setting(900.0, above=0)
    """How long a replica may take until it is ready."""


@dataclass(frozen=True, kw_only=True)
class _PlannedReplica:
    """A replica's process, and the ports in its file."""

    process: PlannedProcess
    agent_port: int | None
    transfer_port: int | None
    """Port where other replicas fetch chunks."""
    controller_port: int | None
    """Port of the controller that it registers with, if that is on this machine."""


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

    ``by_envoy``: Envoy carries the requests, and the router is its picker.
    """
    path = Path(path)
    at = ConfigLocation(str(path))
    value = read_yaml(path)
    check_kind(value, "fleet", at)
    file = build(FleetFile, value, at)
    if not file.replicas:
        raise at.at("replicas").error("is empty", "add at least one replica")
    log_dir = Path(file.log_dir).expanduser()
    planned = [_planned_replica(file, index, path, log_dir) for index in range(len(file.replicas))]
    if by_envoy:
        file = replace(file, router={"picker": {}, **file.router})
    settings = _router_settings(file, planned, path)
    router = router_config(settings, path=str(path), key="router", base=path.parent)
    if router.port == 0:
        raise at.at("router.port").error("0 means any free port", "set a fixed port")
    # Its paths are relative to this file, not to the generated one.
    settings = _checked(settings, router)
    url = f"http{'s' if router.tls else ''}://{join_host_port(reachable(router.host), router.port)}"
    plan = FleetPlan(
        replicas=tuple(each.process for each in planned),
        router=router_process("serve", url, log_dir),
        router_settings=settings,
        log_dir=log_dir,
        ready_timeout_s=file.ready_timeout_s,
    )
    return behind_envoy(plan, router, at, own=file.envoy) if by_envoy else plan


def _checked(given: Mapping[str, Any], checked: object) -> dict[str, Any]:
    """Return what was given, each text as it is in the checked settings: paths are absolute there.

    ``checked``: a dataclass of settings, or a mapping of them by name.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        other = checked[name] if isinstance(checked, Mapping) else getattr(checked, name)
        if isinstance(value, Mapping):
            found[name] = _checked(value, other)
        else:
            found[name] = other if isinstance(value, str) else value
    return found


def _router_settings(
    file: FleetFile, planned: Sequence[_PlannedReplica], path: Path
) -> dict[str, Any]:
    """Return the router's settings; raise `ConfigError` if they contradict the replicas'."""
    at = ConfigLocation(str(path))
    if "replicas" in file.router:
        fix = "remove it: the router uses the replicas of this file"
        raise at.at("router.replicas").error("cannot be set here", fix)
    # Checked without the replicas: errors about those name this file's keys (`check_unique`).
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
    raise at.error(f"{port!r} is not a port", "write 1 to 65535")


def _transfer_port(engine: Mapping[str, Any]) -> int | None:
    """Return the port of ``distributed_url``; the replica checks the URL itself."""
    port = str(engine.get(_TRANSFER_KEY)).rpartition(":")[2]
    # 0 is any free port, so it cannot collide.
    return int(port) or None if port.isascii() and port.isdigit() else None


def _controller_port(engine: Mapping[str, Any]) -> int | None:
    """Return the port of ``controller_url`` if it is enabled and on this machine."""
    if str(engine.get("enable_controller")).lower() != "true":
        return None
    url = f"http://{str(engine.get(_CONTROLLER_KEY)).rpartition('://')[2]}"
    try:
        return urlsplit(url).port if is_loopback_url(url) else None
    except ValueError:
        return None  # the replica reports the error


def _router_entry(planned: _PlannedReplica) -> dict[str, Any]:
    entry: dict[str, Any] = {"url": planned.process.url, "instance_id": planned.process.name}
    if planned.agent_port is not None:
        entry["agent_url"] = f"http://127.0.0.1:{planned.agent_port}"
    return entry


def _claims(
    file: FleetFile, planned: Sequence[_PlannedReplica], router: RouterConfig
) -> Iterator[tuple[int | str | None, str]]:
    """Yield each port and name of a process, with its key in this file."""
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
    """Raise `ConfigError` if a replica would register with another router's controller."""
    for index, port in enumerate(each.controller_port for each in planned):
        if port not in (None, monitor_port):
            found = f"has port {port}, but router.controller.monitor_port is {monitor_port}"
            here = at.item(index).at(f"config: {_CONTROLLER_KEY}")
            raise here.error(found, "make them the same")
