"""``host:port`` as people write it, and where to listen for it."""

import socket


def split_host_port(text: str) -> tuple[str, int]:
    """Return the host and the port of ``host:port`` or ``[ipv6]:port``.

    Raises ValueError, saying what is wrong, for anything else.
    """
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
    """Return a URL as it may stand in a log: without the name and password before its host."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def listening_family(host: str, port: int) -> socket.AddressFamily:
    """Return in which family to listen on a host; IPv4 if it has addresses of both.

    Addresses given to other machines are mostly of that family. Raises OSError
    for a host that cannot be found.
    """
    found = [each[0] for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    return socket.AF_INET if socket.AF_INET in found else found[0]
