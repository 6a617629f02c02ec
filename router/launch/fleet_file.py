"""The file of ``warmroute up``: what it may say, and the processes that it means.

The file's ``router`` section has the keys of ``router.yaml``, without its
replicas: those are the ones started here. Each becomes an ordinary
``warmroute`` command, so what runs is what a person would start by hand.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from router.config import (
    ConfigError,
    RouterConfig,
    build,
    is_loopback,
    load_router_config,
    read_yaml,
    router_config,
    setting,
)

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
    log_dir: str = ".warmroute/logs"
    """Where each process's output goes; relative to where the command runs."""
    ready_timeout_s: float = setting(900.0, above=0)
    """How long a replica may take to load its model."""


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

    @property
    def processes(self) -> tuple[PlannedProcess, ...]:
        """All processes, in the order in which they are started."""
        return (*self.replicas, self.router)


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
        raise ConfigError(
            str(path),
            "",
            "this is a replica's file",
            f"check it with: warmroute replica --config {path} --print-command -- --model MODEL",
        )
    if "model" not in value and "router" not in value:
        return load_router_config(path)
    load_fleet_file(path)
    return build(FleetFile, value, path=str(path))


def load_fleet_file(path: Path | str) -> FleetPlan:
    """Read ``fleet.yaml`` and plan its processes; raise `ConfigError`."""
    path = Path(path)
    file = build(FleetFile, read_yaml(path), path=str(path))
    if not file.replicas:
        raise ConfigError(str(path), "replicas", "names no replica", "add at least one")
    log_dir = Path(file.log_dir).expanduser()
    planned = [_planned_replica(file, index, path, log_dir) for index in range(len(file.replicas))]
    return _with_router(file, planned, path, log_dir)


def _with_router(
    file: FleetFile, planned: list[_PlannedReplica], path: Path, log_dir: Path
) -> FleetPlan:
    if "replicas" in file.router:
        raise ConfigError(
            str(path),
            "router.replicas",
            "is not set here",
            "leave it out: the replicas above are used",
        )
    settings = {**file.router, "replicas": [_router_entry(each) for each in planned]}
    # Two replicas on one port are told of in the words of this file, not of the router's.
    alone = {**file.router, "replicas": [{"url": "http://127.0.0.1"}]}
    router = router_config(alone, path=str(path), key="router", base=path.parent)
    _check_unique(file, planned, router, path)
    _check_controller(planned, router, path)
    checked = router_config(settings, path=str(path), key="router", base=path.parent)
    if checked.port == 0:
        raise ConfigError(str(path), "router.port", "0 is no port to wait at", "name one")
    if checked.tokenizer.path is not None or checked.tokenizer.chat_template is not None:
        settings["tokenizer"] = {
            **settings["tokenizer"],
            "path": checked.tokenizer.path,
            "chat_template": checked.tokenizer.chat_template,
        }
    host = "127.0.0.1" if checked.host in ("0.0.0.0", "::", "") else checked.host
    router_process = PlannedProcess(
        name="router",
        argv=(*_warmroute(), "serve", "--config", str(log_dir / "router.yaml")),
        env={},
        url=f"http://{host}:{checked.port}",
        log_path=log_dir / "router.log",
    )
    return FleetPlan(
        replicas=tuple(each.process for each in planned),
        router=router_process,
        router_settings=settings,
        log_dir=log_dir,
        ready_timeout_s=file.ready_timeout_s,
    )


def _warmroute() -> tuple[str, ...]:
    return (sys.executable, "-m", "router")


def _planned_replica(file: FleetFile, index: int, path: Path, log_dir: Path) -> _PlannedReplica:
    """Return a replica's process and ports."""
    replica = file.replicas[index]
    key = f"replicas[{index}]"
    engine_path = (path.parent / Path(replica.config).expanduser()).resolve()
    if not engine_path.is_file():
        raise ConfigError(
            str(path), f"{key}.config", f"no such file: {engine_path}", "check the path"
        )
    engine = read_yaml(engine_path)
    name = str(engine.get(_NAME_KEY) or f"replica{index + 1}")
    gpus = replica.gpus
    cuda = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    process = PlannedProcess(
        name=name,
        argv=(
            *_warmroute(),
            "replica",
            "--config",
            str(engine_path),
            "--",
            "--model",
            file.model,
            "--port",
            str(replica.port),
            *file.vllm_args,
            *replica.vllm_args,
        ),
        env={**file.env, **replica.env, **cuda},
        url=f"http://127.0.0.1:{replica.port}",
        log_path=log_dir / f"{name.replace('/', '_')}.log",
    )
    return _PlannedReplica(
        process=process,
        agent_port=_agent_port(engine, engine_path),
        transfer_port=_transfer_port(engine),
        controller_port=_controller_port(engine),
    )


def _agent_port(engine: Mapping[str, Any], path: Path) -> int | None:
    port = engine.get(_AGENT_PORT_KEY)
    if port is None or (isinstance(port, int) and 0 < port < 1 << 16):
        return port
    raise ConfigError(str(path), _AGENT_PORT_KEY, f"{port!r} is no port", "write 1 to 65535")


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
        return urlsplit(url).port if is_loopback(url) else None
    except ValueError:
        return None  # what is wrong with it the replica says


def _router_entry(planned: _PlannedReplica) -> dict[str, Any]:
    entry: dict[str, Any] = {"url": planned.process.url, "instance_id": planned.process.name}
    if planned.agent_port is not None:
        entry["agent_url"] = f"http://127.0.0.1:{planned.agent_port}"
    return entry


def _check_unique(
    file: FleetFile, planned: Sequence[_PlannedReplica], router: RouterConfig, path: Path
) -> None:
    """Raise `ConfigError` where two processes would have the same port or the same name."""
    users: dict[int | str, str] = {router.port: "router.port", "router": "the router"}
    if router.controller is not None:
        users[router.controller.port] = "router.controller.port"
        users[router.controller.monitor_port] = "router.controller.monitor_port"
    for index, each in enumerate(planned):
        key = f"replicas[{index}]"
        claims: list[tuple[int | str | None, str]] = [
            (file.replicas[index].port, f"{key}.port"),
            (each.agent_port, f"{key}.config: {_AGENT_PORT_KEY}"),
            (each.transfer_port, f"{key}.config: {_TRANSFER_KEY}"),
            (each.process.name, f"{key}.config: {_NAME_KEY}"),
        ]
        for value, where in claims:
            if value in users:
                raise ConfigError(
                    str(path), where, f"{value} is also {users[value]}", "choose another"
                )
            if value is not None:
                users[value] = where


def _check_controller(planned: Sequence[_PlannedReplica], router: RouterConfig, path: Path) -> None:
    """Raise `ConfigError` where a replica would register with another router's controller."""
    if router.controller is None:
        return
    monitor_port = router.controller.monitor_port
    for index, each in enumerate(planned):
        if each.controller_port not in (None, monitor_port):
            raise ConfigError(
                str(path),
                f"replicas[{index}].config: {_CONTROLLER_KEY}",
                f"names port {each.controller_port}, where router.controller.monitor_port is "
                f"{monitor_port}",
                "make them the same",
            )
