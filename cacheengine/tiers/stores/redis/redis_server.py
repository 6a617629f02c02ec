"""Where a Redis or Valkey server is, and how it is spoken to."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cacheengine.tiers.stores.url import RemoteUrl
from warmroute_common.config_reader import BadValueError, parse_bool, parse_int, parse_seconds

REDIS_SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys", "unix")
_TLS_SCHEMES: Final = ("rediss", "valkeys")
_TLS_OPTIONS: Final = ("tls_verify", "tls_ca_file", "tls_cert_file", "tls_key_file")
_OPTIONS: Final = ("connect_timeout_s", "timeout_s", "connections")


@dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """How the server proves its identity, and the replica its own if asked."""

    verify: bool = True
    """Whether the certificate must be valid, and for this host."""
    ca_file: Path | None = None
    """The authorities that are trusted; None: the system's."""
    cert_file: Path | None = None
    """The replica's own certificate."""
    key_file: Path | None = None
    """Its key, when that is not in the same file."""


@dataclass(frozen=True, kw_only=True)
class RedisServer:
    """A server and the limits of what is waited for."""

    host: str = ""
    port: int = 6379
    socket_path: str = ""
    """A unix socket, instead of host and port."""
    user: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    tls: TlsSettings | None = None
    connect_timeout_s: float = 2.0
    timeout_s: float = 2.0
    """For an answer; the time that its bytes take is added."""
    connections: int = 8
    """At most so many at once."""
    ttl_s: int = 0
    """How long it keeps what is put; 0: until it has no room."""

    @classmethod
    def from_url(cls, url: RemoteUrl, *, ttl_s: int = 0) -> "RedisServer":
        """Read a URL's path and options.

        The database is the path, or for a unix socket the option
        ``database``. Raises `BadValueError` for what cannot be meant.
        """
        is_unix, is_tls = url.scheme == "unix", url.scheme in _TLS_SCHEMES
        extra = ("database",) if is_unix else _TLS_OPTIONS if is_tls else ()
        url.check_options((*_OPTIONS, *extra))
        if url.user and not url.password:
            raise BadValueError("names a user and no password", "write user:password@, or neither")
        return cls(
            host=url.host,
            port=url.port,
            socket_path=url.path if is_unix else "",
            user=url.user,
            password=url.password,
            database=_database(url.options.get("database", "0") if is_unix else url.path or "0"),
            tls=_tls(url) if is_tls else None,
            connect_timeout_s=url.option("connect_timeout_s", parse_seconds, 2.0),
            timeout_s=url.option("timeout_s", parse_seconds, 2.0),
            connections=url.option("connections", parse_int(minimum=1, maximum=1024), 8),
            ttl_s=ttl_s,
        )

    def check_files(self) -> None:
        """Raise `BadValueError` for a file of certificates or keys that cannot be read."""
        for path in (self.tls.ca_file, self.tls.cert_file, self.tls.key_file) if self.tls else ():
            if path is None:
                continue
            try:
                path.open("rb").close()
            except OSError as error:
                problem = f"{path} cannot be read ({error.strerror})"
                raise BadValueError(problem, "name a PEM file that this user may read") from None


def _database(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise BadValueError(f"{text!r} is no database number", "write redis://host:port/0")
    return int(text)


def _tls(url: RemoteUrl) -> TlsSettings:
    ca_file, cert_file, key_file = (_file(url.options.get(name)) for name in _TLS_OPTIONS[1:])
    if key_file and not cert_file:
        raise BadValueError("tls_key_file without tls_cert_file", "name both, or none")
    return TlsSettings(
        verify=url.option("tls_verify", parse_bool, True),
        ca_file=ca_file,
        cert_file=cert_file,
        key_file=key_file,
    )


def _file(text: str | None) -> Path | None:
    return Path(text).expanduser().absolute() if text else None
