"""Settings of clients' access, and of how connections are protected."""

from dataclasses import dataclass
from typing import Literal

from router.config.schema import setting


@dataclass(frozen=True, kw_only=True)
class KeyConfig:
    """One client's key, which itself is not kept: ``warmroute key`` makes both."""

    name: str
    """For the log and the metrics."""
    sha256: str
    """Of the key, in hex digits."""
    models: tuple[str, ...] | None = None
    """The models that it may ask; by default all."""
    requests_per_minute: int | None = setting(None, at_least=1)
    """A bucket that holds a minute's worth and fills evenly; beyond it 429. By default no limit."""
    tokens_per_minute: int | None = setting(None, at_least=1)
    """Of prompts and answers together."""


@dataclass(frozen=True, kw_only=True)
class AccessConfig:
    """Which clients get in. Without ``keys`` and ``keys_file`` every one does."""

    keys: tuple[KeyConfig, ...] = ()
    keys_file: str | None = None
    """A YAML file with more ``keys:``."""
    admin_sha256: tuple[str, ...] = ()
    """Of the keys for ``/explain``, ``/metrics``, ``/replicas``, the data of ``/ui`` and the
    controller's API, and for what ``/health`` tells of each replica. Without one these answer
    this machine alone."""
    metrics: Literal["admin", "open"] = "admin"
    """Whether ``/metrics`` answers everyone."""


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """What the router shows its clients; PEM files."""

    cert_file: str
    """With its chain."""
    key_file: str | None = None
    """Without a password; by default in ``cert_file``."""


@dataclass(frozen=True, kw_only=True)
class ReplicaTlsConfig:
    """How ``https://`` replicas, and their agents, are known to be what they say."""

    ca_file: str | None = None
    """PEM file of the authorities that are trusted; by default the system's."""
    verify: bool = True
    """False: any certificate will do, and whoever is between can read all."""


@dataclass(frozen=True, kw_only=True)
class CorsConfig:
    """Pages in browsers that may ask the router; without the section, none of another origin."""

    allow_origins: tuple[str, ...]
    """Like ``https://chat.example.com``; ``*`` is any."""
