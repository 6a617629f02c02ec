"""Hosts, ports and URLs: how they are written, compared and listened on."""

import re
import socket
import threading
from concurrent.futures import Future
from ipaddress import IPv6Address, ip_address
from typing import Final
from urllib.parse import urlsplit

_CREDENTIALS: Final = re.compile(r"://[^/@\s\"']*@")
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def split_host_port(text: str) -> tuple[str, int]:
    """Return the host and the port of ``host:port`` or ``[ipv6]:port``; raise ValueError."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} does not end in a colon and a port (0 to 65535)")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r} has an IPv6 address without brackets")
    if not host or any(each in host for each in "/@[] "):
        raise ValueError(f"{text!r} has no host name or address before the port")
    return host, int(port)


def join_host_port(host: str, port: int) -> str:
    """Return ``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_password(url: str) -> str:
    """Return a URL for a log: without the user name and password."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def without_passwords(text: str) -> str:
    """Return a text with the user names and passwords of all URLs in it replaced by ``***``."""
    return _CREDENTIALS.sub("://***@", text)


def listening_family(host: str, port: int) -> socket.AddressFamily:
    """Return the family to listen with on a host: IPv4 if the host has addresses of both.

    Other machines mostly know the IPv4 address. Raises OSError for an unknown host.
    """
    found = [each[0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    return socket.AF_INET if socket.AF_INET in found else found[0]


def resolve(host: str, port: int, timeout_s: float) -> list[tuple[str, int]]:
    """Return the addresses of a host, IPv4 or IPv6, for a TCP connection.

    `socket.getaddrinfo` has no deadline: a resolver that does not answer may take minutes. A thread
    waits for it. Raises `TimeoutError`, and OSError for an unknown host.
    """
    found: Future[list[tuple[str, int]]] = Future()

    def ask() -> None:
        try:
            infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found.set_result([(str(each[4][0]), port) for each in infos])
        except BaseException as error:  # noqa: BLE001  (it is raised below)
            found.set_exception(error)

    threading.Thread(target=ask, name="resolve", daemon=True).start()
    return found.result(timeout_s)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on, or a caller's address, belongs to this machine alone."""
    if host == "localhost":
        return True
    try:
        address = ip_address(host.partition("%")[0].strip("[]"))
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback


def reachable(host: str) -> str:
    """Return the host at which this machine reaches its own server that listens at ``host``."""
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


def is_loopback_url(url: str) -> bool:
    """Whether a URL names the loopback interface."""
    return server_key(url)[1] == "loopback"


def is_same_url(first: str, second: str) -> bool:
    """Whether two base URLs name the same server; all loopback addresses count as one."""
    return server_key(first) == server_key(second)


def server_key(url: str) -> tuple[str, str, int | None, str]:
    """Return a server's identity: scheme, host (or "loopback"), port and path."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return (parts.scheme, "loopback" if host in _LOOPBACK else host, port, parts.path.rstrip("/"))
