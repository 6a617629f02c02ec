"""A replica's settings, and the checks that concern several of them or this machine."""

import importlib.util
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cacheengine.kept_pool import check_keep_directory
from cacheengine.memory import HugePagesMissingError, check_huge_pages
from warmroute_common.addresses import is_loopback, split_host_port
from warmroute_common.config_reader import (
    BadValueError,
    ConfigError,
    parse_bool,
    parse_directories,
    parse_file,
    parse_gb,
    parse_host_port,
    parse_http_address,
    parse_int,
    parse_mapping,
    parse_own_address,
    parse_port,
    parse_seconds,
    parse_share,
    parse_text,
    setting,
    suggestion,
)
from warmroute_common.fleet_secret import HOW_TO_SET, FleetSecret
from warmroute_common.keys import CRYPTOGRAPHIC

logger = logging.getLogger("vllm.warmroute")

_GB: Final = 1024**3
_WEEK_S: Final = 7 * 24 * 3600
_MOST_TTL_S: Final = 10 * 365 * 24 * 3600
_PACKAGES: Final[Mapping[str, tuple[str, str]]] = {
    "mooncakestore": ("mooncake", "mooncake-transfer-engine-non-cuda"),
    "infinistore": ("infinistore", "infinistore"),
}
"""What a scheme needs: the module to import, and the package that has it. Chunks are read from and
written to CPU memory, so Mooncake's build for CUDA has no advantage."""


def _parse_policy(value: object) -> str:
    from cacheengine.residency.eviction_policies import POLICY_NAMES  # noqa: PLC0415  (it loads slowly)

    name = str(value).strip().upper()
    if name in ("FIFO", "LFU", "MRU"):
        raise BadValueError(
            f"{value!r} is not supported",
            "use ARC (the default: it keeps chunks that are used again) or LRU",
        )
    if name not in POLICY_NAMES:
        raise BadValueError(f"{value!r} is unknown", f"use {' or '.join(POLICY_NAMES)}")
    return name


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of a replica's engine. Names and defaults are LMCache's unless stated otherwise.

    Raises `ConfigError` when the values contradict each other.
    """

    chunk_size: int = setting(256, parse=parse_int(minimum=1))
    """Tokens per chunk. Must be a multiple of vLLM's block size."""
    local_cpu: bool = setting(True, parse=parse_bool)
    """Keep chunks in CPU RAM after their use. If false, CPU RAM only stages chunks for the other
    tiers."""
    max_local_cpu_size: float = setting(5.0, parse=parse_gb)
    """Size of the CPU pool in GB, reserved at start. Must be more than 0 in every case."""
    local_cpu_use_hugepages: bool = setting(False, parse=parse_bool)
    """Use 2 MiB pages for the pool. If too few are free, ordinary pages are used, with a
    warning."""
    local_disk: tuple[Path, ...] = setting((), parse=parse_directories)
    """Directories of the disk tier; chunks are spread over them. Off without any."""
    max_local_disk_size: float = setting(0.0, parse=parse_gb)
    """Size of the disk tier in GB, for all directories together."""
    remote_url: str | None = setting(None, repr=False, parse=parse_text)
    """Server of the remote tier, ``scheme://host:port``. Off without one. May contain a
    password."""
    remote_serde: str = setting("naive", parse=parse_text)
    """Encoding of chunks in the remote tier (`tiers.serde` lists the names)."""
    remote_ttl: int = setting(_WEEK_S, parse=parse_int(minimum=0, maximum=_MOST_TTL_S))
    """Seconds that a Redis or Valkey server keeps a chunk; 0: until the server needs the memory.
    (LMCache's default has no limit.)"""
    save_decode_cache: bool = setting(True, parse=parse_bool)
    """Store the KV of generated tokens too (LMCache's default is false)."""
    cache_policy: str = setting("ARC", parse=_parse_policy)
    """Which chunks leave the CPU pool and the disk first: ARC, which keeps chunks that are used
    again, or LRU (LMCache's default)."""
    lmcache_instance_id: str = setting("", parse=parse_text)
    """The replica's name. By default host:port of its agent."""
    enable_controller: bool = setting(False, parse=parse_bool)
    """Register with the controller (the router's monitor port) and send it heartbeats."""
    controller_url: str | None = setting(None, repr=False, parse=parse_http_address)
    """Address of the controller: ``host:port`` or ``http://host:port``. If the router requires its
    secret there, ``http://any:SECRET@host:port``."""
    lmcache_worker_port: int = setting(8090, parse=parse_port)
    """Port of the agent. 0 picks a free port."""
    distributed_url: str | None = setting(None, parse=parse_host_port)
    """``host:port`` where other replicas fetch chunks from this one; port 0 picks a free port.
    Without it they cannot. An address beyond loopback requires a fleet secret."""
    lmcache_worker_heartbeat_time: float = setting(10.0, parse=parse_seconds)
    """Seconds between heartbeats."""
    extra_config: Mapping[str, Any] = setting(default_factory=dict, repr=False, parse=parse_mapping)
    """Further settings of the remote store (Mooncake)."""

    # Ours, not LMCache's.
    openai_url: str | None = setting(None, parse=parse_own_address)
    """URL where the router reaches this replica's OpenAI server, ``http://host:port``. The agent
    sends it when it registers: a router with ``discovery.registration`` then sends requests there.
    Without a host (``http://:8000``) the router uses the address that the registration comes from.
    ``warmroute replica`` derives it from vLLM's options."""
    fleet_secret_file: Path | None = setting(None, parse=parse_file)
    """File with the secret that router and replicas share. The variable WARMROUTE_FLEET_SECRET can
    hold the secret instead. With a secret the agent answers only callers that know it, and replicas
    exchange chunks only with replicas that prove it."""
    fleet_secret: FleetSecret | None = field(default=None, repr=False, compare=False)
    """The secret, read with the configuration."""
    agent_host: str = setting("127.0.0.1", parse=parse_text)
    """Address that the agent listens on. An address beyond loopback requires a fleet secret."""
    keep_cpu_dir: Path | None = setting(None, parse=parse_file)
    """Directory on a tmpfs, such as one below /dev/shm, for the CPU pool's file. The pool outlives
    vLLM, also a killed one: the next start serves its chunks again. Each replica needs a directory
    of its own. Off without one. The memory stays in use until the file is deleted."""
    disk_direct_io: bool = setting(True, parse=parse_bool)
    """Read and write files with O_DIRECT, bypassing the page cache. Without it Linux keeps copies
    of them in memory that it does not need."""
    disk_read_threads: int = setting(4, parse=parse_int(minimum=1, maximum=256))
    """Threads that read from each path of the disk tier, at most 256."""
    disk_write_threads: int = setting(4, parse=parse_int(minimum=1, maximum=256))
    """Threads that write to each path of the disk tier, at most 256."""
    put_queue_share: float = setting(0.5, parse=parse_share)
    """Share of the CPU pool that may wait to be written to disk and remote store. Beyond it chunks
    are not written. Chunks that are stored for the first time get three quarters of it."""

    single_tenant: bool = setting(False, parse=parse_bool)
    """All prompts of this replica, and of the replicas that it shares KV with, come from one
    tenant. This permits vLLM's ``--prefix-caching-hash-algo xxhash``, with which one can construct
    a prompt that is answered from another prompt's KV."""

    source: str = field(default="", compare=False)
    """File or environment that the settings come from, for messages."""

    def __post_init__(self) -> None:
        if not self.lmcache_instance_id:
            name = f"{socket.gethostname()}:{self.lmcache_worker_port}"
            object.__setattr__(self, "lmcache_instance_id", name)
        if self.max_local_cpu_size <= 0:
            raise self._error(
                "max_local_cpu_size",
                f"{self.max_local_cpu_size:g} GB is too little to stage chunks",
                "give it some GB, at least a few chunks, even with local_cpu: false",
            )
        if self.local_disk and self.max_local_disk_size <= 0:
            raise self._error(
                "max_local_disk_size",
                f"is {self.max_local_disk_size:g} although local_disk is set",
                "give the disk tier some GB, or remove local_disk",
            )
        if not self.local_cpu and not self.local_disk and not self.remote_url:
            raise self._error(
                "local_cpu",
                "is false and there is no other tier, so nothing would be cached",
                "set local_cpu: true, or local_disk and max_local_disk_size, or remote_url",
            )
        if self.keep_cpu_dir and self.local_cpu_use_hugepages:
            raise self._error(
                "keep_cpu_dir",
                "cannot be used with local_cpu_use_hugepages, whose memory ends with vLLM",
                "remove one of them; a tmpfs that is mounted with huge=within_size has large pages",
            )
        if self.keep_cpu_dir and not self.local_cpu:
            raise self._error(
                "keep_cpu_dir",
                "is set although local_cpu is false, so the pool has no chunks to keep",
                "remove keep_cpu_dir, or set local_cpu: true",
            )
        if self.remote_url:
            self._check("remote_url", _check_remote_url, self.remote_url, self.extra_config)
        if self.remote_serde != EngineConfig.remote_serde:
            self._check("remote_serde", _check_serde_name, self.remote_serde)
        self._check_listening()
        if self.enable_controller and not self.controller_url:
            raise self._error(
                "enable_controller",
                "is true, but controller_url is not set",
                "set controller_url, such as localhost:9001, or remove enable_controller",
            )

    def _check_listening(self) -> None:
        """Raise `ConfigError` if anyone on the network could read and change KV."""
        if self.fleet_secret is not None:
            return
        transfer_host = self.transfer_address[0] if self.transfer_address else "localhost"
        for key, host in (("agent_host", self.agent_host), ("distributed_url", transfer_host)):
            if not is_loopback(host):
                found = f"{host} can be reached from other machines, and there is no fleet secret"
                raise self._error(key, found, f"{HOW_TO_SET}, or listen on 127.0.0.1")

    def check_ready(self, *, ranks: int = 1) -> None:
        """Raise `ConfigError` for memory, directories or packages that this machine lacks.

        ``ranks`` is how many data parallel ranks have a pool of this size here. Creates the disk
        tier's directories. Logs a warning if huge pages are missing; the pool works without them.
        """
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if ranks * self.max_local_cpu_bytes > memory_bytes:
            of_each = f" for each of {ranks} data parallel ranks" if ranks > 1 else ""
            raise self._error(
                "max_local_cpu_size",
                f"{self.max_local_cpu_size:g} GB{of_each} is more than this machine's memory",
                f"set less than {memory_bytes / ranks / _GB:.1f}; sizes are in GB",
            )
        if self.local_cpu_use_hugepages:
            try:
                check_huge_pages(self.max_local_cpu_bytes)
            except HugePagesMissingError as missing:
                logger.warning(
                    "%s: local_cpu_use_hugepages: %s. Until then ordinary pages are used",
                    self.source,
                    missing,
                )
        if self.keep_cpu_dir:
            self._check("keep_cpu_dir", check_keep_directory, self.keep_cpu_dir)
        for directory in self.local_disk:
            self._check_directory(directory)
        self.check_remote_ready()

    def check_hash_algorithm(self, algorithm: str) -> None:
        """Raise `ConfigError` for hash keys that can be forged, unless there is a single tenant."""
        if algorithm not in CRYPTOGRAPHIC and not self.single_tenant:
            raise self._error(
                "single_tenant",
                f"is false, and with vLLM's --prefix-caching-hash-algo {algorithm} one can "
                "construct a prompt that is answered from another tenant's KV",
                f"start vLLM with {' or '.join(CRYPTOGRAPHIC)}, or set single_tenant: true where "
                "all prompts are one tenant's",
            )

    def check_remote_ready(self) -> None:
        """Raise `ConfigError` for packages and files of the remote tier that this machine lacks."""
        if self.remote_url:
            self._check("remote_url", _check_remote_ready, self.remote_url)

    def _check(self, key: str, check: Callable[..., None], *given: object) -> None:
        try:
            check(*given)
        except BadValueError as error:
            raise self._error(key, error.problem, error.fix) from None

    def _check_directory(self, directory: Path) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Permission bits are not enough: read-only mounts, the superuser.
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
        """The controller's URL; None without registration."""
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


# Stores and serdes are slow to import, so these functions import them: they run only where there
# is a remote tier. None of them contacts a server: one that is down now may be up later.


def _check_remote_url(text: str, extra: Mapping[str, Any]) -> None:
    """Raise `BadValueError`, without any password in it, for a URL that is not supported.

    ``extra`` is ``extra_config``, which holds the settings of some stores.
    """
    from cacheengine.tiers.mooncake_store import mooncake_settings  # noqa: PLC0415
    from cacheengine.tiers.redis_store import REDIS_SCHEMES, RedisServer  # noqa: PLC0415
    from cacheengine.tiers.remote_url import parse_remote_url  # noqa: PLC0415

    url = parse_remote_url(text)
    if url.scheme in REDIS_SCHEMES:
        RedisServer.from_url(url)
    elif url.scheme == "mooncakestore":
        mooncake_settings(text, extra, os.environ)


def _check_remote_ready(text: str) -> None:
    """Raise `BadValueError` for packages and files that the URL needs and this machine lacks."""
    from cacheengine.tiers.redis_store import REDIS_SCHEMES, RedisServer  # noqa: PLC0415
    from cacheengine.tiers.remote_url import parse_remote_url  # noqa: PLC0415

    url = parse_remote_url(text)
    if url.scheme in REDIS_SCHEMES:
        RedisServer.from_url(url).check_files()
    elif url.scheme in _PACKAGES:
        module, package = _PACKAGES[url.scheme]
        if importlib.util.find_spec(module) is None:
            raise BadValueError(f"{url.scheme}:// needs a package", f"pip install {package}")


def _check_serde_name(name: str) -> None:
    from cacheengine.tiers.remote import SERDE_NAMES  # noqa: PLC0415

    if name not in SERDE_NAMES:
        raise BadValueError(f"{name!r} is unknown", suggestion(name.lower(), SERDE_NAMES))
