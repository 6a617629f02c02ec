"""``remote_url``: from what a person wrote to a server's address.

Nothing here connects, and no message repeats a password.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeVar
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from warmroute_common.addresses import join_host_port
from warmroute_common.config_reader import BadValueError, suggestion

T = TypeVar("T")

Address = tuple[str, int]

_DEFAULT_PORTS: Final[Mapping[str, int]] = {
    "redis": 6379,
    "rediss": 6379,
    "valkey": 6379,
    "valkeys": 6379,
    "unix": 0,
    "redis-sentinel": 26379,
    "valkey-sentinel": 26379,
    "redis-cluster": 6379,
    "valkey-cluster": 6379,
    "mooncakestore": 50051,
    "infinistore": 12345,
}
SCHEMES: Final = tuple(_DEFAULT_PORTS)
"""The schemes that are served."""

SENTINEL_SCHEMES: Final = ("redis-sentinel", "valkey-sentinel")
CLUSTER_SCHEMES: Final = ("redis-cluster", "valkey-cluster")
_OBJECT_STORE: Final = "run a Redis or Valkey server, or Mooncake Store, near the replicas"

_REFUSALS: Final[Mapping[str, tuple[str, str]]] = {
    "lm": ("LMCache's own server is not spoken to", "run Redis or Valkey: redis://host:6379"),
    "rediss-sentinel valkeys-sentinel": (
        "Sentinels are asked without TLS only",
        "write redis-sentinel://host:port, or rediss://host:port of the master",
    ),
    "rediss-cluster valkeys-cluster": (
        "clusters are served without TLS only",
        "write redis-cluster://host:port, or rediss://host:port of one server",
    ),
    "s3 gs azure": ("object stores are not served", _OBJECT_STORE),
    "fs file": ("a file system is the disk tier", "set local_disk and max_local_disk_size"),
    "blackhole mock": ("a store that keeps nothing is none", "remove remote_url"),
    "audit": ("remote tiers are not audited", "write the URL of the server itself"),
    "plugin external": ("LMCache's plugins cannot be loaded", "write the URL of a server"),
    "eic sagemaker-hyperpod": ("there is no adapter for it", _OBJECT_STORE),
}
"""Schemes of LMCache, and ones that people try: why not, and what instead."""


@dataclass(frozen=True, kw_only=True)
class RemoteUrl:
    """A server's address, checked as far as it can be without the server."""

    scheme: str
    host: str = ""
    """Empty for a unix socket only."""
    port: int = 0
    more_hosts: tuple[Address, ...] = ()
    """The further ones of a list, where the scheme takes a list."""
    user: str = ""
    password: str = field(default="", repr=False)
    path: str = ""
    """Without the leading slash; for a unix socket the socket's path, with it."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What stood behind the question mark."""

    def __str__(self) -> str:
        """Return the address without password and options, for messages."""
        if self.scheme == "unix":
            return f"unix://{self.path}"
        user = f"{self.user}@" if self.user else ""
        path = f"/{self.path}" if self.path else ""
        addresses = [(self.host, self.port), *self.more_hosts]
        hosts = ",".join(join_host_port(host, port) for host, port in addresses)
        return f"{self.scheme}://{user}{hosts}{path}"

    def option(self, name: str, parse: Callable[[object], T], default: T) -> T:
        """Return an option that one of `values`' parsers reads; raise `BadValueError` naming it."""
        try:
            return parse(self.options[name]) if name in self.options else default
        except BadValueError as error:
            raise BadValueError(f"{name}: {error.problem}", error.fix) from None

    def check_is_bare(self, fix: str) -> None:
        """Raise `BadValueError` for more than a host, a port and options."""
        if self.user or self.password or self.path:
            raise BadValueError(f"{self} has more than a host and a port", fix)

    def check_options(self, known: Sequence[str]) -> None:
        """Raise `BadValueError` for an option that the scheme does not have."""
        for name in self.options:
            if name not in known:
                raise BadValueError(
                    f"{self.scheme}:// has no option {name!r}", suggestion(name, known)
                )


def parse_remote_url(text: str) -> RemoteUrl:
    """Return the address that a URL names.

    Raises `BadValueError`, without any password in it, for a scheme that is not
    served and for what is no URL. What a scheme's own options mean is its
    adapter's to check.
    """
    scheme = _scheme(text)
    text, more = _first_host(text.strip())
    if more and scheme not in SENTINEL_SCHEMES + CLUSTER_SCHEMES:
        fix = f"write {scheme}://host:port of one server"
        if scheme in ("redis", "valkey"):
            fix += f", or {scheme}-cluster:// or {scheme}-sentinel:// before the hosts"
        raise BadValueError(f"{','.join([redacted(text), *more])} names several hosts", fix)
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise _unreadable(text) from None
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    # An @ so late belongs to a password that ends too soon: nothing of it may be shown.
    if parts.fragment or port == 0 or "@" in parts.path + parts.query:
        raise _unreadable(text)
    if scheme == "unix":
        return _unix(parts, user, password)
    if not host:
        raise BadValueError(f"{redacted(text)} names no host", f"write {scheme}://host:port")
    return RemoteUrl(
        scheme=scheme,
        host=host,
        port=_DEFAULT_PORTS[scheme] if port is None else port,
        more_hosts=_more_hosts(more, scheme),
        user=user,
        password=password,
        path=parts.path.strip("/"),
        options=_options(parts),
    )


def _first_host(text: str) -> tuple[str, list[str]]:
    """Return the URL with only the first of its hosts, and the others."""
    scheme, separator, rest = text.partition("://")
    login, at, hosts = rest.rpartition("@")
    end = next((place for place, char in enumerate(hosts) if char in "/?#"), len(hosts))
    first, *more = hosts[:end].split(",")
    return scheme + separator + login + at + first + hosts[end:], more


def _more_hosts(hosts: Sequence[str], scheme: str) -> tuple[Address, ...]:
    found = []
    for each in hosts:
        try:
            parts = urlsplit(f"//{each}")
            host, port = parts.hostname, parts.port
        except ValueError:
            raise _unreadable(each) from None
        if not host or port == 0 or parts.path or parts.query or parts.fragment:
            raise _unreadable(each)
        found.append((host, _DEFAULT_PORTS[scheme] if port is None else port))
    return tuple(found)


def _unix(parts: SplitResult, user: str, password: str) -> RemoteUrl:
    path = unquote(parts.path)
    if parts.hostname or not path.startswith("/") or path == "/":
        raise BadValueError("unix:// names no socket", "write unix:///path/of/the/server.sock")
    options = _options(parts)
    return RemoteUrl(scheme="unix", user=user, password=password, path=path, options=options)


def _options(parts: SplitResult) -> Mapping[str, str]:
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise BadValueError(
            "what follows the ? is not name=value", "write ?name=value&..."
        ) from None
    options = dict(pairs)
    if len(options) < len(pairs):
        raise BadValueError("an option behind the ? stands there twice", "write each once")
    return MappingProxyType(options)


def _scheme(text: str) -> str:
    scheme, separator, _ = text.strip().partition("://")
    scheme = scheme.lower()
    if not separator:
        raise BadValueError(f"{redacted(text)} has no scheme", "write redis://host:port")
    for schemes, (problem, fix) in _REFUSALS.items():
        if scheme in schemes.split():
            raise BadValueError(f"{scheme}:// is not served: {problem}", fix)
    if scheme not in SCHEMES:
        raise BadValueError(
            f"{scheme}:// is unknown",
            suggestion(f"{scheme}://", [f"{each}://" for each in SCHEMES]),
        )
    return scheme


def _unreadable(text: str) -> BadValueError:
    return BadValueError(
        f"{redacted(text)} cannot be read as a URL",
        "write scheme://user:password@host:port, the port from 1 to 65535, and "
        "/, ?, #, @ and : of a password as %2F, %3F, %23, %40 and %3A",
    )


def redacted(text: str) -> str:
    """Return a URL, or what should have been one, without what may be a password."""
    scheme, separator, rest = text.strip().rpartition("://")
    _, at, host = rest.rpartition("@")
    if not at and rest.startswith(":"):  # a password without a host
        return f"{scheme}{separator}..."
    return scheme + separator + ("...@" if at else "") + host.partition("?")[0]
