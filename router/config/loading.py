"""Reading the router's settings, and checking what no single value shows to be wrong."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from router.config.addresses import host_port, is_loopback
from router.config.errors import ConfigError
from router.config.schema import build, read_yaml
from router.config.settings import ReplicaConfig, RouterConfig, TokenizerConfig


def load_router_config(path: Path | str) -> RouterConfig:
    """Read ``router.yaml``; raise `ConfigError` for anything that cannot work."""
    path = Path(path)
    return router_config(read_yaml(path), path=str(path), base=path.parent)


def router_config(value: object, *, path: str, key: str = "", base: Path = Path()) -> RouterConfig:
    """Build and check the settings in a mapping; relative files are relative to ``base``."""
    prefix = f"{key}." if key else ""
    if isinstance(value, Mapping) and "controller" in value and value["controller"] is None:
        raise ConfigError(
            path,
            f"{prefix}controller",
            "is empty",
            "write 'controller: {}' for its defaults, or leave it out for no controller",
        )
    config = build(RouterConfig, value, path=path, key=key)
    replicas = _checked_replicas(config.replicas, path, f"{prefix}replicas")
    tokenizer = _checked_tokenizer(config.tokenizer, path, f"{prefix}tokenizer", base)
    _check_ports(config, path, prefix)
    _check_controller(config, path, prefix)
    stock, where = config.lmcache_coordinator, f"{prefix}lmcache_coordinator"
    stock = stock and _normal_url(stock, path, where)
    return replace(config, replicas=replicas, tokenizer=tokenizer, lmcache_coordinator=stock)


def _check_ports(config: RouterConfig, path: str, prefix: str) -> None:
    """Raise `ConfigError` where one process would listen on a port twice."""
    if config.controller is None:
        return
    users = {config.port: "port"} if config.port else {}
    for name in ("port", "monitor_port"):
        port, key = getattr(config.controller, name), f"controller.{name}"
        if port in users:
            raise ConfigError(
                path, f"{prefix}{key}", f"{port} is also {prefix}{users[port]}", "choose another"
            )
        if port:
            users[port] = key


def _check_controller(config: RouterConfig, path: str, prefix: str) -> None:
    """Raise `ConfigError` for a controller open to anyone, or none where LMCache needs it."""
    settings = config.controller
    with_lmcache = [at for at, each in enumerate(config.replicas) if each.lmcache is not None]
    if settings is None:
        if with_lmcache and config.lmcache_coordinator is None:
            raise ConfigError(
                path,
                f"{prefix}replicas[{with_lmcache[0]}].lmcache",
                "is set, and there is no controller for LMCache to report to",
                "add 'controller: {}', and start LMCache with --coordinator-url "
                "http://host:9000 --coordinator-event-reporting",
            )
        return
    if settings.secret is None and not is_loopback(f"http://{host_port(settings.host, 1)}"):
        raise ConfigError(
            path,
            f"{prefix}controller.host",
            f"{settings.host} is open to other machines, and there is no secret",
            "set controller.secret, or host: 127.0.0.1",
        )


def _checked_replicas(
    replicas: Sequence[ReplicaConfig], path: str, key: str
) -> tuple[ReplicaConfig, ...]:
    if not replicas:
        raise ConfigError(
            path, key, "names no replica", "add at least one '- url: http://host:port'"
        )
    checked = []
    seen: dict[str, int] = {}
    for index, replica in enumerate(replicas):
        where = f"{key}[{index}]"
        url = _normal_url(replica.url, path, f"{where}.url")
        agent_url = replica.agent_url and _normal_url(replica.agent_url, path, f"{where}.agent_url")
        _check_endpoint(replica.kv_events, path, f"{where}.kv_events")
        _check_endpoint(replica.kv_replay, path, f"{where}.kv_replay")
        lmcache = replica.lmcache and _normal_url(replica.lmcache, path, f"{where}.lmcache")
        if lmcache and agent_url:
            raise ConfigError(
                path,
                f"{where}.lmcache",
                "is set beside agent_url",
                "a replica has either our engine or LMCache: take one of them out",
            )
        whole = replace(replica, url=url, agent_url=agent_url, lmcache=lmcache)
        for name in (url, whole.name):
            if name in seen:
                raise ConfigError(
                    path,
                    where,
                    f"is the same as {key}[{seen[name]}] ('{name}')",
                    "give each replica its own url and instance_id",
                )
            seen[name] = index
        checked.append(whole)
    return tuple(checked)


def _normal_url(url: str, path: str, key: str) -> str:
    """Return a base URL without trailing slash or ``/v1``; raise `ConfigError` if it is none."""
    parts = urlsplit(url)
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # raises when it is no number or out of range
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ConfigError(
            path, key, f"'{url}' is not an HTTP base URL", "write it like http://host:8000"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _check_endpoint(endpoint: str | None, path: str, key: str) -> None:
    if endpoint is None:
        return
    scheme, separator, rest = endpoint.partition("://")
    _, _, port = rest.rpartition(":")
    is_tcp = scheme == "tcp" and port.isdigit() and 0 < int(port) < 1 << 16
    if not separator or not (is_tcp or (scheme in ("ipc", "inproc") and rest)):
        raise ConfigError(
            path, key, f"'{endpoint}' is not a ZMQ endpoint", "write it like tcp://host:5557"
        )
    if is_tcp and rest.startswith(("*", "0.0.0.0")):
        raise ConfigError(
            path,
            key,
            f"'{endpoint}' is an address to listen on",
            "name the replica's host, like tcp://127.0.0.1:5557",
        )


def _checked_tokenizer(
    tokenizer: TokenizerConfig, path: str, key: str, base: Path
) -> TokenizerConfig:
    """Make the tokenizer's paths absolute (``~`` and the file's own folder understood)."""
    return replace(
        tokenizer,
        path=_existing(tokenizer.path, "directory", path, f"{key}.path", base),
        chat_template=_existing(
            tokenizer.chat_template, "file", path, f"{key}.chat_template", base
        ),
    )


def _existing(value: str | None, kind: str, path: str, key: str, base: Path) -> str | None:
    if value is None:
        return None
    found = (base / Path(value).expanduser()).resolve()
    if not found.exists():
        raise ConfigError(path, key, f"'{value}' does not exist", f"name an existing {kind}")
    return str(found)
