"""The engine's configuration: its values, and which of them cannot go together."""

import logging
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from cacheengine.memory import HugePagesMissingError, check_huge_pages
from warmroute_common import config_values as values
from warmroute_common.addresses import split_host_port
from warmroute_common.fleet_secret import HOW_TO_SET, FleetSecret, is_loopback
from warmroute_common.keys import CRYPTOGRAPHIC

logger = logging.getLogger("vllm.warmroute")

_T = TypeVar("_T")

_GB: Final = 1024**3
_WEEK_S: Final = 7 * 24 * 3600
_MOST_TTL_S: Final = 10 * 365 * 24 * 3600


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


def _parse_policy(value: object) -> str:
    from cacheengine.residency import POLICY_NAMES  # noqa: PLC0415  (it loads slowly)

    name = str(value).strip().upper()
    if name not in POLICY_NAMES:
        raise values.BadValueError(f"{value!r} is unknown", f"use {', '.join(POLICY_NAMES)}")
    return name


def _key(default: _T, parse: Callable[[object], _T]) -> _T:
    """Return the field of a key that people write, and what reads it."""
    return field(default=default, metadata={"parse": parse})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a replica's engine is told. Names and defaults are LMCache's unless said otherwise.

    Raises `ConfigError` when the values contradict each other.
    """

    chunk_size: int = _key(256, values.parse_int(minimum=1))
    """Tokens in a chunk; a multiple of vLLM's block size."""
    local_cpu: bool = _key(True, values.parse_bool)
    """Keep chunks in CPU RAM after their use; else it only stages for the disk tier."""
    max_local_cpu_size: float = _key(5.0, values.parse_gb)
    """GB of the CPU pool, reserved at start; more than 0 in every case."""
    local_cpu_use_hugepages: bool = _key(False, values.parse_bool)
    """Make the pool of 2 MiB pages; of ordinary ones, with a warning, where too few are free."""
    local_disk: tuple[Path, ...] = _key((), values.parse_directories)
    """Directories of the disk tier, chunks spread over them; off without any."""
    max_local_disk_size: float = _key(0.0, values.parse_gb)
    """GB of files under them together."""
    remote_url: str | None = field(default=None, repr=False, metadata={"parse": values.parse_text})
    """Server of the remote tier, ``scheme://host:port``; off without one. May hold a password."""
    remote_serde: str = _key("naive", values.parse_text)
    """How chunks are written for the remote tier (`tiers.serde` has the names)."""
    remote_ttl: int = _key(_WEEK_S, values.parse_int(minimum=0, maximum=_MOST_TTL_S))
    """Seconds that a Redis or Valkey server keeps what is put there; 0: as long as it has room.
    (LMCache's default is for ever.)"""
    save_decode_cache: bool = _key(True, values.parse_bool)
    """Store generated tokens too (LMCache's default is false)."""
    cache_policy: str = _key("LRU", _parse_policy)
    """Which chunks leave the CPU pool first: LRU, LFU, FIFO, MRU, ARC."""
    lmcache_instance_id: str = _key("", values.parse_text)
    """The replica's name; by default its host and agent port."""
    enable_controller: bool = _key(False, values.parse_bool)
    """Register with the controller (the router's monitor port) and send it heartbeats."""
    controller_url: str | None = field(
        default=None, repr=False, metadata={"parse": values.parse_http_address}
    )
    """Where that is: ``host:port``, or ``http://host:port``. Where the router asks for its
    secret there, ``http://any:SECRET@host:port``."""
    lmcache_worker_port: int = _key(8090, values.parse_port)
    """Port of the agent; 0 takes any free one."""
    distributed_url: str | None = _key(None, values.parse_host_port)
    """``host:port`` on which other replicas fetch chunks from this one (port 0: any
    free one); without it they cannot. Beyond loopback it wants a fleet secret."""
    lmcache_worker_heartbeat_time: float = _key(10.0, values.parse_seconds)
    """Seconds between heartbeats."""
    extra_config: Mapping[str, Any] = field(
        default_factory=dict, metadata={"parse": values.parse_mapping}
    )
    """Further settings, of the remote store (Mooncake)."""

    # Ours, not LMCache's.
    openai_url: str | None = _key(None, values.parse_own_address)
    """Where the router reaches this replica's OpenAI server, ``http://host:port``, told when it
    registers: a router with ``discovery.registration`` then sends requests there. Without a host
    (``http://:8000``), the address that the registration comes from. ``warmroute replica`` knows
    it from vLLM's options."""
    fleet_secret_file: Path | None = field(default=None, metadata={"parse": values.parse_file})
    """File with the secret that router and replicas share, or the variable WARMROUTE_FLEET_SECRET
    instead: with it the agent answers callers that know it, and chunks are exchanged with
    replicas that prove it."""
    fleet_secret: FleetSecret | None = field(default=None, repr=False, compare=False)
    """What is in it; read with the configuration."""
    agent_host: str = _key("127.0.0.1", values.parse_text)
    """Address the agent listens on; beyond loopback it wants a fleet secret."""
    disk_direct_reads: bool = _key(True, values.parse_bool)
    """Read files that are not in the page cache past it (O_DIRECT), where that works."""
    disk_direct_writes: bool = _key(False, values.parse_bool)
    """Write files past the page cache (O_DIRECT), where that works: less processor time,
    and memory stays free, but a put takes as long as the device, and what has left the CPU pool
    is never read from the page cache. With four ``disk_write_threads``."""
    disk_read_threads: int = _key(4, values.parse_int(minimum=1, maximum=256))
    """Threads that read from the disk tier, 256 at most."""
    disk_write_threads: int = _key(2, values.parse_int(minimum=1, maximum=256))
    """Threads that write to the disk tier, 256 at most."""
    put_queue_share: float = _key(0.5, values.parse_share)
    """Share of the CPU pool that may wait for the disk at once; beyond it puts are dropped."""

    single_tenant: bool = _key(False, values.parse_bool)
    """All prompts, of this replica and of those it shares KV with, come from one tenant. Permits
    vLLM's ``--prefix-caching-hash-algo xxhash``, with which a prompt can be made that is answered
    from another's KV."""

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
        self._check_remote()
        self._check_listening()
        if self.enable_controller and not self.controller_url:
            raise self._error(
                "enable_controller",
                "true, and controller_url does not say where the controller is",
                "set controller_url, such as localhost:9001, or remove enable_controller",
            )

    def _check_listening(self) -> None:
        """Raise `ConfigError` where anyone on a network could take and change KV."""
        if self.fleet_secret is not None:
            return
        transfer_host = self.transfer_address[0] if self.transfer_address else "localhost"
        for key, host in (("agent_host", self.agent_host), ("distributed_url", transfer_host)):
            if not is_loopback(host):
                found = f"{host} is open to other machines, and there is no fleet secret"
                raise self._error(key, found, f"{HOW_TO_SET}, or listen on 127.0.0.1")

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
            except HugePagesMissingError as missing:
                logger.warning(
                    "%s: local_cpu_use_hugepages: %s. Until then the pool is of ordinary pages",
                    self.source,
                    missing,
                )
        for directory in self.local_disk:
            self._check_directory(directory)
        self.check_remote_ready()

    def check_hash_algorithm(self, algorithm: str) -> None:
        """Raise `ConfigError` for keys that can be forged, unless there is nobody to forge them."""
        if algorithm not in CRYPTOGRAPHIC and not self.single_tenant:
            raise self._error(
                "single_tenant",
                f"false, and vLLM's --prefix-caching-hash-algo is {algorithm}, with which a prompt "
                "can be made that is answered from another tenant's KV",
                f"start vLLM with {' or '.join(CRYPTOGRAPHIC)}, or set single_tenant: true where "
                "all prompts are one tenant's",
            )

    def check_remote_ready(self) -> None:
        """Raise `ConfigError` for what the remote tier needs and this machine has not."""
        if self.remote_url:
            from cacheengine.settings import remote_check  # noqa: PLC0415

            self._check("remote_url", remote_check.check_remote_ready, self.remote_url)

    def _check_remote(self) -> None:
        if self.remote_url or self.remote_serde != EngineConfig.remote_serde:
            # Stores and serdes load slowly: only where there is a remote tier.
            from cacheengine.settings import remote_check  # noqa: PLC0415

            if self.remote_url:
                check = remote_check.check_remote_url
                self._check("remote_url", check, self.remote_url, self.extra_config)
            self._check("remote_serde", remote_check.check_serde_name, self.remote_serde)

    def _check(self, key: str, check: Callable[..., None], *given: object) -> None:
        try:
            check(*given)
        except values.BadValueError as error:
            raise self._error(key, error.problem, error.fix) from None

    def _check_directory(self, directory: Path) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
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
