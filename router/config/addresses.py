"""Hosts, ports and URLs as they are written and compared."""

from typing import Final
from urllib.parse import urlsplit

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def host_port(host: str, port: int) -> str:
    """Return ``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(host: str) -> str:
    """Return where a server on this machine is reached that listens at an address."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


def is_loopback(url: str) -> bool:
    """Whether a URL means the machine that uses it, whichever that is."""
    return server_key(url)[1] == "loopback"


def is_same_url(first: str, second: str) -> bool:
    """Whether two base URLs name the same server (loopback addresses all being one)."""
    return server_key(first) == server_key(second)


def server_key(url: str) -> tuple[str, str, int | None, str]:
    """Return what tells servers apart: scheme, host ("loopback" for any such), port and path."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return (parts.scheme, "loopback" if host in _LOOPBACK else host, port, parts.path.rstrip("/"))
