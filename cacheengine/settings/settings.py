"""The engine's configuration: LMCache's file, environment and keys.

A YAML file named by ``LMCACHE_CONFIG_FILE``, then ``LMCACHE_*`` variables over
it. Sizes are in GB (1024**3 bytes). Nothing is ignored in silence: a key that
no one knows is an error, one that LMCache knows and this engine does not
serve is an error or a warning (`lmcache_keys` has the lists).
"""

import difflib
import logging
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from cacheengine import values
from cacheengine.address import split_host_port
from cacheengine.memory import HugePagesMissing, check_huge_pages
from cacheengine.residency import POLICY_NAMES
from cacheengine.settings import check_remote_ready
from cacheengine.settings import lmcache_keys as keys
from cacheengine.settings.remote_check import check_remote_url, check_serde_name, reads_extra_config

logger = logging.getLogger("vllm.warmroute")

CONFIG_FILE_VARIABLE: Final = "LMCACHE_CONFIG_FILE"
_PREFIX: Final = "LMCACHE_"
_GB: Final = 1024**3

# Kubernetes gives every pod variables like these for each service in its
# namespace; a service called lmcache-server must not stop a replica.
_SERVICE_VARIABLE: Final = re.compile(
    r"LMCACHE_\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)"
)


class ConfigError(ValueError):
    """A configuration that cannot work: where, which key, what, and how to mend it.

    ``str()`` is one line: ``where: key: problem; fix``.
    """

    def __init__(self, where: str, key: str, problem: str, fix: str) -> None:
        super().__init__(where, key, problem, fix)
        self.where = where
        self.key = key
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.where, self.key) if part)
        return f"{place}: {self.problem}; {self.fix}"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a replica's engine is told. Names and defaults are LMCache's unless said otherwise.

    Raises `ConfigError` when the values contradict each other.
    """

    chunk_size: int = 256
    """Tokens in a chunk; a multiple of vLLM's block size."""
    local_cpu: bool = True
    """Keep chunks in CPU RAM after their use; else it only stages for the disk tier."""
    max_local_cpu_size: float = 5.0
    """GB of the CPU pool, reserved at start; more than 0 in every case."""
    local_cpu_use_hugepages: bool = False
    """Make the pool of 2 MiB pages; of ordinary ones, with a warning, where too few are free."""
    local_disk: tuple[Path, ...] = ()
    """Directories of the disk tier, chunks spread over them; off without any."""
    max_local_disk_size: float = 0.0
    """GB of files under them together."""
    remote_url: str | None = field(default=None, repr=False)
    """Server of the remote tier, ``scheme://host:port``; off without one. May hold a password."""
    remote_serde: str = "naive"
    """How chunks are written for the remote tier (`tiers.serde` has the names)."""
    save_decode_cache: bool = True
    """Store generated tokens too (LMCache's default is false)."""
    cache_policy: str = "LRU"
    """Which chunks leave the CPU pool first: LRU, LFU, FIFO, MRU."""
    lmcache_instance_id: str = ""
    """The replica's name; by default its host and agent port."""
    enable_controller: bool = False
    """Register with the controller (the router's monitor port) and send it heartbeats."""
    controller_url: str | None = None
    """Where that is: ``host:port``, or ``http://host:port``."""
    lmcache_worker_port: int = 8090
    """Port of the agent; 0 takes any free one."""
    distributed_url: str | None = None
    """``host:port`` on which other replicas fetch chunks from this one (port 0: any
    free one); without it they cannot. Unauthenticated: for a private network."""
    lmcache_worker_heartbeat_time: float = 10.0
    """Seconds between heartbeats."""
    extra_config: Mapping[str, Any] = field(default_factory=dict)

    # Ours, not LMCache's.
    agent_host: str = "127.0.0.1"
    """Address the agent listens on."""
    disk_direct_reads: bool = True
    """Read files that are not in the page cache past it (O_DIRECT), where that works."""
    disk_read_threads: int = 4
    disk_write_threads: int = 2
    put_queue_share: float = 0.5
    """Share of the CPU pool that may wait for the disk at once; beyond it puts are dropped."""

    source: str = field(default="", compare=False)
    """Where it came from, for messages."""

    def __post_init__(self) -> None:
        if not self.lmcache_instance_id:
            name = f"{socket.gethostname()}:{self.lmcache_worker_port}"
            object.__setattr__(self, "lmcache_instance_id", name)
        if self.max_local_cpu_size <= 0:
            raise self._error(
                "max_local_cpu_size",
                f"{self.max_local_cpu_size} leaves no room to stage chunks in",
                "give it some GB, at least a few chunks, even with local_cpu: false",
            )
        if self.local_disk and self.max_local_disk_size <= 0:
            raise self._error(
                "max_local_disk_size",
                f"{self.max_local_disk_size} although local_disk is set",
                "give the disk tier some GB, or remove local_disk",
            )
        if not self.local_cpu and not self.local_disk and not self.remote_url:
            raise self._error(
                "local_cpu",
                "false, and there is no other tier, so nothing would be cached",
                "set local_cpu: true, or local_disk and max_local_disk_size, or remote_url",
            )
        if self.remote_url:
            self._check("remote_url", check_remote_url, self.remote_url, self.extra_config)
        self._check("remote_serde", check_serde_name, self.remote_serde)

        if self.enable_controller and not self.controller_url:
            raise self._error(
                "enable_controller",
                "true, and controller_url does not say where the controller is",
                "set controller_url, such as localhost:9001, or remove enable_controller",
            )

    def check_ready(self) -> None:
        """Raise `ConfigError` for what this machine cannot do: memory, directory, packages.

        Creates the disk tier's directory. Warns when huge pages are missing:
        the pool does without them.
        """
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if self.max_local_cpu_bytes > memory_bytes:
            raise self._error(
                "max_local_cpu_size",
                f"{self.max_local_cpu_size} GB is more than this machine's memory",
                f"set less than {memory_bytes / _GB:.1f}; sizes are in GB",
            )
        if self.local_cpu_use_hugepages:
            try:
                check_huge_pages(self.max_local_cpu_bytes)
            except HugePagesMissing as missing:
                logger.warning(
                    "%s: local_cpu_use_hugepages: %s. Until then the pool is of ordinary pages",
                    self.source,
                    missing,
                )
        for directory in self.local_disk:
            self._check_directory(directory)
        if self.remote_url:
            self._check("remote_url", check_remote_ready, self.remote_url)

    def _check(self, key: str, check: Callable[..., None], *given: object) -> None:
        try:
            check(*given)
        except values.BadValue as error:
            raise self._error(key, error.problem, error.fix) from None

    def _check_directory(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Permission bits do not tell all (read-only mounts, the superuser).
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise self._error(
                "local_disk",
                f"{directory} cannot be written ({error.strerror})",
                "name a directory that this user may write",
            ) from None

    def _error(self, key: str, problem: str, fix: str) -> ConfigError:
        return ConfigError(self.source, key, problem, fix)

    @property
    def controller_base_url(self) -> str | None:
        """The controller's URL, or None when it is not to be registered with."""
        if not self.enable_controller or self.controller_url is None:
            return None
        return (
            self.controller_url if "://" in self.controller_url else f"http://{self.controller_url}"
        )

    @property
    def transfer_address(self) -> tuple[str, int] | None:
        """Host and port of ``distributed_url``."""
        return split_host_port(self.distributed_url) if self.distributed_url else None

    @property
    def max_local_cpu_bytes(self) -> int:
        """Bytes of the CPU pool."""
        return int(self.max_local_cpu_size * _GB)

    @property
    def max_local_disk_bytes(self) -> int:
        """Bytes of the disk tier's files; 0 without one."""
        return int(self.max_local_disk_size * _GB) if self.local_disk else 0


def _parse_policy(value: object) -> str:
    name = str(value).strip().upper()
    if name not in POLICY_NAMES:
        raise values.BadValue(f"{value!r} is unknown", f"use {', '.join(POLICY_NAMES)}")
    return name


_PARSERS: Final[Mapping[str, Callable[[object], object]]] = {
    "chunk_size": values.parse_int(minimum=1),
    "local_cpu": values.parse_bool,
    "max_local_cpu_size": values.parse_gb,
    "local_cpu_use_hugepages": values.parse_bool,
    "local_disk": values.parse_directories,
    "max_local_disk_size": values.parse_gb,
    "remote_url": values.parse_text,
    "remote_serde": values.parse_text,
    "save_decode_cache": values.parse_bool,
    "cache_policy": _parse_policy,
    "lmcache_instance_id": values.parse_text,
    "enable_controller": values.parse_bool,
    "controller_url": values.parse_http_address,
    "lmcache_worker_port": values.parse_port,
    "distributed_url": values.parse_host_port,
    "lmcache_worker_heartbeat_time": values.parse_seconds,
    "extra_config": values.parse_mapping,
    "agent_host": values.parse_text,
    "disk_direct_reads": values.parse_bool,
    "disk_read_threads": values.parse_int(minimum=1, maximum=256),
    "disk_write_threads": values.parse_int(minimum=1, maximum=256),
    "put_queue_share": values.parse_share,
}


@dataclass(frozen=True)
class _Given:
    """One value as a person wrote it, and where."""

    where: str
    written_key: str
    value: object

    def error(self, problem: str, fix: str) -> ConfigError:
        return ConfigError(self.where, self.written_key, problem, fix)


def load_engine_config(
    path: str | Path | None = None, environment: Mapping[str, str] | None = None
) -> EngineConfig:
    """Read the configuration file, if any, and the variables over it.

    ``path`` defaults to what ``LMCACHE_CONFIG_FILE`` names. Raises
    `ConfigError`; logs a warning for each key without effect. Looks at nothing
    else of the machine: that is `EngineConfig.check_ready`.
    """
    environment = os.environ if environment is None else environment
    path = path or environment.get(CONFIG_FILE_VARIABLE) or None
    given: dict[str, _Given] = {}
    if path is not None:
        given.update(_by_key(_from_file(Path(path))))
    given.update(_by_key(_from_environment(environment)))
    settings = {key: _parse(key, each) for key, each in given.items() if _is_setting(key, each)}
    known: dict[str, Any] = {key: value for key, value in settings.items() if value is not None}
    try:
        config = EngineConfig(source=str(path or "environment"), **known)
    except ConfigError as error:
        if error.key not in given:
            raise
        raise given[error.key].error(error.problem, error.fix) from None
    if config.max_local_disk_size > 0 and not config.local_disk:
        _warn(given["max_local_disk_size"], "has no effect without local_disk")
    if config.controller_url and not config.enable_controller:
        _warn(given["controller_url"], "has no effect without enable_controller: true")
    if config.remote_serde != EngineConfig.remote_serde and not config.remote_url:
        _warn(given["remote_serde"], "has no effect without remote_url")
    if config.extra_config and not reads_extra_config(config.remote_url):
        _warn(given["extra_config"], "has no effect but on mooncakestore:// and infinistore://")
    return config


def _from_file(path: Path) -> Iterator[_Given]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise ConfigError(str(path), "", problem, f"check {CONFIG_FILE_VARIABLE}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(f"is not YAML: {error}".split())
        raise ConfigError(str(path), "", problem, "correct that line") from None
    if content is None:
        return
    if not isinstance(content, dict):
        raise ConfigError(str(path), "", "has no keys", "write lines such as chunk_size: 256")
    for key, value in content.items():
        yield _Given(str(path), str(key), value)


def _from_environment(environment: Mapping[str, str]) -> Iterator[_Given]:
    for name, text in sorted(environment.items()):
        if not name.startswith(_PREFIX) or name in keys.OTHER_VARIABLES:
            continue
        if name.startswith(keys.OTHER_PREFIXES):
            logger.warning("%s has no effect: it is for another program of LMCache", name)
            continue
        key = name.removeprefix(_PREFIX).lower()
        if not _is_known(key) and _SERVICE_VARIABLE.fullmatch(name):
            continue
        yield _Given("environment", name, text)


def _by_key(all_given: Iterator[_Given]) -> dict[str, _Given]:
    result: dict[str, _Given] = {}
    for given in all_given:
        key = given.written_key.removeprefix(_PREFIX).lower()
        if not _is_known(key):
            raise given.error("is no known key", _nearest(given.written_key, key))
        key = keys.ALIASES.get(key, key)
        if key in result:
            raise given.error(f"says again what {result[key].written_key} says", "remove one")
        result[key] = given
    return result


def _is_known(key: str) -> bool:
    return any(key in known for known in (_PARSERS, keys.ALIASES, keys.REFUSED, keys.INERT))


def _nearest(written: str, key: str) -> str:
    nearest = difflib.get_close_matches(key, [*_PARSERS, *keys.REFUSED, *keys.INERT], n=1)
    if not nearest:
        return f"use one of {', '.join(_PARSERS)}"
    name = _PREFIX + nearest[0].upper() if written.startswith(_PREFIX) else nearest[0]
    return f"did you mean {name}?"


def _is_setting(key: str, given: _Given) -> bool:
    """Whether the engine serves the key; else warn, or raise `ConfigError`."""
    if key in _PARSERS:
        return True
    if values.is_null(given.value):
        return False
    if key in keys.INERT:
        _warn(given, f"has no effect here: {keys.INERT[key]}")
        return False
    harmless, reason = keys.REFUSED[key]
    if not any(_means(given.value, value) for value in harmless):
        allowed = f"remove it or set it to {_as_yaml(harmless[0])}" if harmless else "remove it"
        raise given.error(f"{given.value!r} is not supported: {reason}", allowed)
    return False


def _warn(given: _Given, text: str) -> None:
    logger.warning("%s: %s: %s", given.where, given.written_key, text)


def _means(value: object, harmless: object) -> bool:
    if isinstance(harmless, bool):
        try:
            return values.parse_bool(value) is harmless
        except values.BadValue:
            return False
    return value == harmless or str(value).strip().lower() == str(harmless)


def _as_yaml(value: object) -> str:
    return str(value).lower()


def _parse(key: str, given: _Given) -> object:
    if values.is_null(given.value):
        return None
    try:
        return _PARSERS[key](given.value)
    except values.BadValue as error:
        raise given.error(error.problem, error.fix) from None
