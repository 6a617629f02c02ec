"""Reading the router's file, and checks that concern several settings, files or addresses."""

import re
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from router.config.credentials import client_context, load_fleet_secret, server_context
from router.config.settings import (
    AccessConfig,
    ControllerConfig,
    DiscoveredConfig,
    KeyConfig,
    ModelTokenizerConfig,
    PickerConfig,
    ReplicaConfig,
    ReplicaTlsConfig,
    RequestLogConfig,
    RouterConfig,
    TlsConfig,
    TokenizerConfig,
    TracingConfig,
)
from warmroute_common.addresses import is_loopback
from warmroute_common.config_reader import ConfigError, ConfigLocation, build, check_kind, read_yaml
from warmroute_common.fleet_secret import VARIABLE

_SHA256: Final = re.compile("[0-9a-f]{64}")
_Tls = TypeVar("_Tls", TlsConfig, ReplicaTlsConfig)


@dataclass(frozen=True, kw_only=True)
class _KeysFile:
    keys: tuple[KeyConfig, ...]


def load_router_config(path: Path | str) -> RouterConfig:
    """Read ``router.yaml``; raise `ConfigError` for anything that cannot work."""
    path = Path(path)
    return router_config(read_yaml(path), path=str(path), base=path.parent)


def router_config(value: object, *, path: str, key: str = "", base: Path = Path()) -> RouterConfig:
    """Build and check the settings in a mapping; relative files are relative to ``base``."""
    at = ConfigLocation(path, key)
    for name in ("controller", "lmcache_workers", "tracing"):
        if isinstance(value, Mapping) and name in value and value[name] is None:
            fix = f"write '{name}: {{}}' for its defaults, or leave it out for none"
            raise at.at(name).error("is empty", fix)
    if isinstance(value, Mapping):
        check_kind(value, "router", at)
    config = build(RouterConfig, value, at)
    config = _with_secrets(config, at, base)
    replicas = _checked_replicas(config.replicas, at.at("replicas"))
    if not replicas and not config.discovery.is_on:
        fix = "add at least one '- url: http://host:port', or the section discovery"
        raise at.at("replicas").error("names no replica", fix)
    tokenizer = _checked_tokenizer(config.tokenizer, at.at("tokenizer"), base)
    check_unique(((port, at.at(name).key) for name, port in _ports(config)), path)
    picker = _checked_picker(config.picker, at.at("picker"), base)
    config = replace(
        config,
        access=_checked_access(config.access, at.at("access"), base),
        tls=config.tls and _checked_tls(config.tls, server_context, at.at("tls"), base),
        replica_tls=_checked_tls(config.replica_tls, client_context, at.at("replica_tls"), base),
        fleet_secret_file=_existing(
            config.fleet_secret_file, "file", at.at("fleet_secret_file"), base
        ),
    )
    config = replace(
        config,
        request_log=_checked_log(config.request_log, at.at("request_log"), base),
        tracing=config.tracing and _checked_tracing(config.tracing, at.at("tracing")),
    )
    if config.max_bodies_bytes < config.max_body_bytes:
        found = f"{config.max_bodies_bytes} is less than one body may have"
        raise at.at("max_bodies_bytes").error(found, "give at least max_body_bytes")
    _check_controller(config, at)
    _check_clients(config, at)
    _check_discovery(config, at.at("discovery"))
    return replace(config, replicas=replicas, tokenizer=tokenizer, picker=picker)


_Secretive = TypeVar("_Secretive", ReplicaConfig, DiscoveredConfig, ControllerConfig)


def _with_secrets(config: RouterConfig, at: ConfigLocation, base: Path) -> RouterConfig:
    """Return the settings with the secrets that files have."""
    controller, discovery = config.controller, config.discovery
    each = _with_secret(discovery.each, "api_key", at.at("discovery.each"), base)
    return replace(
        config,
        replicas=tuple(
            _with_secret(replica, "api_key", at.at("replicas").item(index), base)
            for index, replica in enumerate(config.replicas)
        ),
        discovery=replace(discovery, each=each),
        controller=controller and _with_secret(controller, "secret", at.at("controller"), base),
    )


def _with_secret(settings: _Secretive, name: str, at: ConfigLocation, base: Path) -> _Secretive:
    """Return settings with the secret ``name`` from the file that ``name_file`` names, if any."""
    at = at.at(f"{name}_file")
    file = _existing(getattr(settings, f"{name}_file"), "file", at, base)
    if file is None:
        return settings
    if getattr(settings, name) is not None:
        raise at.error(f"is set, and {name} too", "remove one of the two")
    try:
        text = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError):
        text = ""
    if not text or not text.isprintable():
        raise at.error(f"is not one line of text ({file})", "write the secret, and nothing else")
    changed: dict[str, Any] = {name: text, f"{name}_file": file}
    return replace(settings, **changed)


def _ports(config: RouterConfig) -> Iterator[tuple[str, int]]:
    yield "port", config.port
    if config.picker is not None:
        yield "picker.port", config.picker.port
        yield "picker.http_port", config.picker.http_port
    if config.controller is not None:
        yield "controller.port", config.controller.port
        yield "controller.monitor_port", config.controller.monitor_port


def check_unique(claims: Iterable[tuple[int | str | None, str]], path: str) -> None:
    """Raise `ConfigError` if two settings have the same port or name; None and 0 do not count."""
    users: dict[int | str, str] = {}
    for value, key in claims:
        if value in users:
            raise ConfigLocation(path, key).error(
                f"{value} is also {users[value]}", "choose another"
            )
        if value:
            users[value] = key


def _check_controller(config: RouterConfig, at: ConfigLocation) -> None:
    """Raise `ConfigError` for an unprotected controller, or a missing one that LMCache needs."""
    controller, fleet_secret = config.controller, load_fleet_secret(config, at)
    if controller is not None:
        if controller.secret == "":
            raise at.at("controller.secret").error("is empty", "set one, or leave it out")
        is_guarded = controller.secret or config.access.admin_sha256 or fleet_secret
        if not is_guarded and not is_loopback(controller.host):
            found = f"{controller.host} is open to other machines, and there is no secret"
            fix = (
                f"set {VARIABLE} (the fleet's secret), controller.secret or access.admin_sha256, "
                "or host: 127.0.0.1"
            )
            raise at.at("controller.host").error(found, fix)
    else:
        for index, each in enumerate(config.replicas):
            if each.lmcache is not None:
                raise (
                    at.at("replicas")
                    .item(index)
                    .at("lmcache")
                    .error(
                        "is set, but there is no controller for LMCache to report to",
                        "add 'controller: {}', and start LMCache with --coordinator-url "
                        "http://host:9000 --coordinator-event-reporting",
                    )
                )


def _check_clients(config: RouterConfig, at: ConfigLocation) -> None:
    """Raise `ConfigError` for impossible aliases, paths and origins."""
    for name, model in config.model_aliases.items():
        if config.model_aliases.get(model, model) != model:
            found = f"'{model}' is an alias itself"
            raise at.at("model_aliases").at(name).error(found, "name a model that replicas serve")
    for index, path in enumerate(config.passthrough):
        if not path.startswith("/") or "*" in path[:-1]:
            here = at.at("passthrough").item(index)
            raise here.error(
                f"'{path}' is not a path", "write it like /path, or /path/* for all below"
            )
    for index, origin in enumerate(config.cors.allow_origins if config.cors else ()):
        parts = urlsplit(origin)
        if origin != "*" and (not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"):
            here = at.at("cors.allow_origins").item(index)
            raise here.error(f"'{origin}' is not an origin", "write it like https://host, or '*'")


def _check_discovery(config: RouterConfig, at: ConfigLocation) -> None:
    """Raise `ConfigError` for incomplete sources of replicas."""
    discovery = config.discovery
    if discovery.registration and config.controller is None:
        fix = "add 'controller: {}', where they register"
        raise at.at("registration").error("is on, but there is no controller", fix)
    names = ((f"{each.name}:{each.port}", i) for i, each in enumerate(discovery.dns))
    check_unique(((name, at.at("dns").item(index).key) for name, index in names), at.path)
    kubernetes = discovery.kubernetes
    if kubernetes is None:
        return
    here = at.at("kubernetes")
    if (kubernetes.service is None) is (kubernetes.selector is None):
        raise here.error("needs either a service or a selector", "set one of the two")
    if kubernetes.api_url is not None:
        _normal_url(kubernetes.api_url, here.at("api_url"))


def _checked_replicas(
    replicas: Sequence[ReplicaConfig], at: ConfigLocation
) -> tuple[ReplicaConfig, ...]:
    checked = []
    seen: dict[str, ConfigLocation] = {}
    for index, replica in enumerate(replicas):
        here = at.item(index)
        url = _normal_url(replica.url, here.at("url"))
        agent_url = replica.agent_url and _normal_url(replica.agent_url, here.at("agent_url"))
        _check_endpoint(replica.kv_events, here.at("kv_events"))
        _check_endpoint(replica.kv_replay, here.at("kv_replay"))
        lmcache = replica.lmcache and _normal_url(replica.lmcache, here.at("lmcache"))
        if lmcache and agent_url:
            fix = "a replica has either our engine or LMCache: remove one of the two"
            raise here.at("lmcache").error("is set together with agent_url", fix)
        whole = replace(replica, url=url, agent_url=agent_url, lmcache=lmcache)
        for kind, name in (("url", url), ("instance_id", whole.name)):
            if name in seen:
                found = f"has the same {kind} as {seen[name].key} ('{name}')"
                raise here.error(found, f"give each replica its own {kind}")
            seen[name] = here
        checked.append(whole)
    return tuple(checked)


def _normal_url(url: str, at: ConfigLocation) -> str:
    """Return a base URL without trailing slash or ``/v1``; raise `ConfigError`."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError if it is not a valid port
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_base = is_http and not (parts.query or parts.fragment)
    except ValueError:
        is_base = False
    if not is_base:
        raise at.error(f"'{url}' is not an HTTP base URL", "write it like http://host:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _check_endpoint(endpoint: str | None, at: ConfigLocation) -> None:
    if endpoint is None:
        return
    scheme, separator, rest = endpoint.partition("://")
    _, _, port = rest.rpartition(":")
    is_tcp = scheme == "tcp" and port.isdigit() and 0 < int(port) < 1 << 16
    if not separator or not (is_tcp or (scheme in ("ipc", "inproc") and rest)):
        raise at.error(f"'{endpoint}' is not a ZMQ endpoint", "write it like tcp://host:5557")
    if is_tcp and rest.startswith(("*", "0.0.0.0")):
        fix = "name the replica's host, like tcp://127.0.0.1:5557"
        raise at.error(f"'{endpoint}' is an address to listen on, not to connect to", fix)


_Tokenizer = TypeVar("_Tokenizer", TokenizerConfig, ModelTokenizerConfig)


def _checked_tokenizer(
    tokenizer: TokenizerConfig, at: ConfigLocation, base: Path
) -> TokenizerConfig:
    """Make the tokenizer's paths absolute; they may begin with ``~`` or be relative to the file."""

    def checked(one: _Tokenizer, at: ConfigLocation) -> _Tokenizer:
        found: dict[str, Any] = {
            "path": _existing(one.path, "directory", at.at("path"), base),
            "chat_template": _existing(one.chat_template, "file", at.at("chat_template"), base),
        }
        return replace(one, **found)

    models = {
        name: checked(each, at.at("models").at(name)) for name, each in tokenizer.models.items()
    }
    cache = tokenizer.cache_directory
    return replace(
        checked(tokenizer, at),
        models=models,
        cache_directory=cache and str(base.absolute() / Path(cache).expanduser()),
    )


def _checked_access(access: AccessConfig, at: ConfigLocation, base: Path) -> AccessConfig:
    """Return the settings, with the keys of ``keys_file`` added."""
    places = [at.at("keys").item(index) for index in range(len(access.keys))]
    file = _existing(access.keys_file, "file", at.at("keys_file"), base)
    keys = access.keys
    if file is not None:
        more = build(_KeysFile, read_yaml(Path(file)), ConfigLocation(file)).keys
        if not more:  # an empty list would let every client in
            raise ConfigLocation(file, "keys").error(
                "names no key", "make one with 'warmroute key NAME'"
            )
        keys += more
        places += [ConfigLocation(file, "keys").item(index) for index in range(len(more))]
    admins = [(at.at("admin_sha256").item(i), each) for i, each in enumerate(access.admin_sha256)]
    shas = [
        (here.at(name), sha256)
        for here, each in zip(places, keys, strict=True)
        for name, sha256 in (("sha256", each.sha256), ("second_sha256", each.second_sha256))
        if sha256 is not None
    ]
    for here, sha256 in [*shas, *admins]:
        if not _SHA256.fullmatch(sha256):
            fix = "paste the hash that 'warmroute key' printed"
            raise here.error("is not a SHA-256 in lower-case hex digits", fix)
    check_unique(((sha256, here.key) for here, sha256 in [*shas, *admins]), at.path)
    named = zip(places, keys, strict=True)
    check_unique(((each.name, here.at("name").key) for here, each in named), at.path)
    return replace(access, keys=keys, keys_file=file)


def _checked_tls(tls: _Tls, load: Callable[[_Tls], object], at: ConfigLocation, base: Path) -> _Tls:
    """Make the files' paths absolute, and check that they can be loaded."""
    files = {name: value for name, value in vars(tls).items() if name.endswith("_file")}
    found: dict[str, Any] = {
        name: _existing(value, "file", at.at(name), base) for name, value in files.items()
    }
    tls = replace(tls, **found)
    try:
        load(tls)
    except OSError as error:
        raise _tls_error(tls, error, at) from None
    return tls


def _tls_error(
    tls: TlsConfig | ReplicaTlsConfig, error: OSError, at: ConfigLocation
) -> ConfigError:
    """Return which file cannot be used, and why."""
    if isinstance(tls, ReplicaTlsConfig):
        found = f"{tls.ca_file} has no certificate ({error.strerror})"
        return at.at("ca_file").error(found, "name a PEM file of the authority's certificates")
    name = "cert_file" if tls.key_file is None else "key_file"
    key_file = Path(tls.key_file or tls.cert_file)
    try:
        certificate, key = Path(tls.cert_file).read_text(), key_file.read_text()
    except (OSError, UnicodeDecodeError):
        found = f"the files cannot be read ({error.strerror or error})"
        return at.error(found, "name PEM files that this user may read")
    if "BEGIN CERTIFICATE" not in certificate:
        found = f"{tls.cert_file} has no certificate"
        return at.at("cert_file").error(found, "name a PEM file with 'BEGIN CERTIFICATE'")
    if "PRIVATE KEY" not in key:
        found, fix = f"{key_file} has no private key", "name the PEM file of the key as key_file"
    elif "ENCRYPTED" in key:
        found = f"the private key in {key_file} has a password"
        fix = "remove the password: openssl pkey -in KEY -out KEY.plain"
    elif isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        found = f"the private key in {key_file} does not belong to the certificate"
        fix = "give the certificate and the key that were made together"
    else:
        found, fix = f"cannot be used ({error.strerror or error})", "make the files again"
    return at.at(name).error(found, fix)


def _checked_log(log: RequestLogConfig, at: ConfigLocation, base: Path) -> RequestLogConfig:
    """Make the file's path absolute, and check that it can be created."""
    if log.path is None or log.path == "-":
        return log
    path = (base / Path(log.path).expanduser()).resolve()
    if not path.parent.is_dir():
        raise at.at("path").error(f"the directory {path.parent} does not exist", "create it")
    if path.is_dir():
        raise at.at("path").error(f"{path} is a directory", "name a file in it")
    return replace(log, path=str(path))


def _checked_tracing(tracing: TracingConfig, at: ConfigLocation) -> TracingConfig:
    """Return the settings with the full URL that traces are sent to."""
    url = _normal_url(tracing.endpoint, at.at("endpoint"))
    whole = url if urlsplit(url).path else f"{url}/v1/traces"
    return replace(tracing, endpoint=whole)


def _checked_picker(
    picker: PickerConfig | None, at: ConfigLocation, base: Path
) -> PickerConfig | None:
    """Make the paths of the certificate, the key and the authorities absolute."""
    if picker is None:
        return None
    if (picker.certificate is None) is not (picker.key is None):
        raise at.error("certificate and key need each other", "set both, or leave both out")
    if picker.client_ca is not None and picker.certificate is None:
        raise at.at("client_ca").error("needs a certificate", "set certificate and key too")
    return replace(
        picker,
        client_ca=_existing(picker.client_ca, "file", at.at("client_ca"), base),
        certificate=_existing(picker.certificate, "file", at.at("certificate"), base),
        key=_existing(picker.key, "file", at.at("key"), base),
    )


def _existing(value: str | None, kind: str, at: ConfigLocation, base: Path) -> str | None:
    if value is None:
        return None
    # Not resolved: a link's target may be replaced while the router runs.
    found = (base / Path(value).expanduser()).absolute()
    if not found.exists():
        where = "" if str(found) == value else f" ({found})"
        raise at.error(f"'{value}' does not exist{where}", f"name an existing {kind}")
    return str(found)
