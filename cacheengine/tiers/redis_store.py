"""Redis and Valkey as a remote store: one server, or the master that Sentinels name.

valkey-py connects. Chunks are sent from the pool and received into the pool by
`redis_connection`, with one system call for most of a chunk.
"""

import contextlib
import os
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import valkey.exceptions
from valkey.connection import Connection, UnixDomainSocketConnection
from valkey.sentinel import Sentinel

from cacheengine.tiers.redis_connection import (
    MAX_VALUE_BYTES,
    Conversation,
    Refusal,
    RefusedError,
    RespError,
    TlsConnection,
    command,
    set_command,
)
from cacheengine.tiers.remote_url import CLUSTER_SCHEMES, SENTINEL_SCHEMES, Address, RemoteUrl
from cacheengine.tiers.store import (
    Blob,
    BlobStore,
    Deadline,
    ReadTarget,
    ServerBackoff,
    StoreError,
    StoreFullError,
    StorePausedError,
)
from warmroute_common.addresses import resolve
from warmroute_common.config_reader import BadValueError, parse_bool, parse_int, parse_seconds

REDIS_SCHEMES: Final = (
    *("redis", "rediss", "valkey", "valkeys", "unix"),
    *SENTINEL_SCHEMES,
    *CLUSTER_SCHEMES,
)
_TLS_SCHEMES: Final = ("rediss", "valkeys")
_TLS_OPTIONS: Final = ("tls_verify", "tls_ca_file", "tls_cert_file", "tls_key_file")
_LMCACHE_SERVICE: Final = "redismaster"
"""LMCache's default of REDIS_SERVICE_NAME."""
_OPTIONS: Final = ("connect_timeout_s", "timeout_s", "connections")


@dataclass(frozen=True, kw_only=True)
class TlsSettings:
    """Certificates of the server and, if the server asks for one, of this replica."""

    verify: bool = True
    """Whether the certificate must be valid, and for this host."""
    ca_file: Path | None = None
    """The certificate authorities to trust; None: those of the system."""
    cert_file: Path | None = None
    """The replica's own certificate."""
    key_file: Path | None = None
    """Its key, when that is not in the same file."""


@dataclass(frozen=True, kw_only=True)
class RedisServer:
    """A server's address, credentials and timeouts; or those of Sentinels, or of a cluster."""

    host: str = ""
    port: int = 6379
    more_hosts: tuple[Address, ...] = ()
    """Further Sentinels, or nodes of the cluster. They are asked while the first is down."""
    socket_path: str = ""
    """A unix socket, instead of host and port."""
    user: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    tls: TlsSettings | None = None
    connect_timeout_s: float = 2.0
    timeout_s: float = 2.0
    """Timeout of an answer, plus the time for its bytes."""
    connections: int = 8
    """The most connections at a time, to each node of a cluster."""
    service_name: str = ""
    """The master's name in the configuration of the Sentinels; empty without Sentinels."""
    is_cluster: bool = False
    ttl_s: int = 0
    """Seconds that the server keeps a chunk; 0: until it is full."""

    @classmethod
    def from_url(
        cls, url: RemoteUrl, *, ttl_s: int = 0, environment: Mapping[str, str] = os.environ
    ) -> "RedisServer":
        """Read a URL's path and options.

        The database is the path, or for a unix socket the option ``database``. The master that
        Sentinels are asked for is the option ``service_name``, otherwise LMCache's variable.
        Raises `BadValueError` for what cannot be meant.
        """
        is_unix, is_tls = url.scheme == "unix", url.scheme in _TLS_SCHEMES
        is_sentinel, is_cluster = url.scheme in SENTINEL_SCHEMES, url.scheme in CLUSTER_SCHEMES
        extra: tuple[str, ...]
        extra = ("database",) if is_unix else _TLS_OPTIONS if is_tls else ()
        extra += ("service_name",) if is_sentinel else ()
        url.check_options((*_OPTIONS, *extra))
        if is_cluster and url.path not in ("", "0"):
            raise BadValueError("a cluster has database 0 only", "remove the path")
        service_name = url.options.get("service_name") or environment.get("REDIS_SERVICE_NAME")
        if url.user and not url.password:
            raise BadValueError(
                "names a user without a password", "write user:password@, or neither"
            )
        return cls(
            host=url.host,
            port=url.port,
            more_hosts=url.more_hosts,
            socket_path=url.path if is_unix else "",
            user=url.user,
            password=url.password,
            database=_database(url.options.get("database", "0") if is_unix else url.path or "0"),
            tls=_tls(url) if is_tls else None,
            connect_timeout_s=url.option("connect_timeout_s", parse_seconds, 2.0),
            timeout_s=url.option("timeout_s", parse_seconds, 2.0),
            connections=url.option("connections", parse_int(minimum=1, maximum=1024), 8),
            service_name=(service_name or _LMCACHE_SERVICE) if is_sentinel else "",
            is_cluster=is_cluster,
            ttl_s=ttl_s,
        )

    @property
    def addresses(self) -> list[Address]:
        """The server; the Sentinels; or the nodes of the cluster that the URL names."""
        return [(self.host, self.port), *self.more_hosts]

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
        raise BadValueError(f"{text!r} is not a database number", "write redis://host:port/0")
    return int(text)


def _tls(url: RemoteUrl) -> TlsSettings:
    ca_file, cert_file, key_file = (_file(url.options.get(name)) for name in _TLS_OPTIONS[1:])
    if key_file and not cert_file:
        raise BadValueError("tls_key_file without tls_cert_file", "set both, or neither")
    return TlsSettings(
        verify=url.option("tls_verify", parse_bool, True),
        ca_file=ca_file,
        cert_file=cert_file,
        key_file=key_file,
    )


def _file(text: str | None) -> Path | None:
    return Path(text).expanduser().absolute() if text else None


class ConnectionPool:
    """At most ``limit`` connections, each lent to one thread at a time.

    ``connect`` opens one within the deadline. A connection is closed after any exception: a late
    answer would be taken for the answer to the next command. While the server fails, calls fail
    fast.
    """

    def __init__(
        self, connect: Callable[[Deadline], Conversation], limit: int, backoff: ServerBackoff
    ) -> None:
        self._connect = connect
        self._backoff = backoff
        self._condition = threading.Condition()
        self._idle: list[Conversation] = []
        self._lent: list[Conversation] = []
        self._free = limit
        self._closed = False

    @contextlib.contextmanager
    def lend(self, deadline: Deadline) -> Iterator[Conversation]:
        """Lend a connection for the time of the block.

        Raises `StorePausedError` while the server is left alone after a failure, `StoreError`
        when no connection came free in time; what ``connect`` raises otherwise.
        """
        self._take_place(deadline)
        connection: Conversation | None = None
        is_sound = False
        # Taken after the wait: a call that began before the last failure does not count again.
        began_s = self._backoff.now_s()
        try:
            connection = self._sound_connection(deadline)
            yield connection
            is_sound = True
        finally:
            self._give_back(connection, is_sound)
            if is_sound:
                self._backoff.succeeded()
            else:
                self._backoff.failed(began_s)

    def _take_place(self, deadline: Deadline) -> None:
        with self._condition:
            while not self._free and not self._closed:
                if not self._condition.wait(deadline.wait_s()):
                    raise StoreError("all connections were in use until the deadline")
            if self._closed:
                raise StoreError("closed")
            rest_s = self._backoff.admit()
            if rest_s:
                # The other waiters need not wait either: the next one wakes and finds the same.
                self._condition.notify()
                raise StorePausedError(f"failed a short time ago; tried again in {rest_s:.1f} s")
            self._free -= 1

    def _sound_connection(self, deadline: Deadline) -> Conversation:
        connection = self._from_idle() or self._connect(deadline)
        with self._condition:
            if self._closed:
                # `close` ran while it was being opened, and has not closed it.
                connection.close()
                raise StoreError("closed")
            self._lent.append(connection)
        return connection

    def _from_idle(self) -> Conversation | None:
        while True:
            with self._condition:
                if not self._idle:
                    return None
                # The one used last: the server's idle timeout closes the others.
                connection = self._idle.pop()
            if not connection.is_stale():
                return connection
            connection.close()

    def _give_back(self, connection: Conversation | None, is_sound: bool) -> None:
        with self._condition:
            self._free += 1
            self._condition.notify()
            if connection is None:
                return
            self._lent.remove(connection)
            if is_sound and not self._closed and not connection.must_close:
                self._idle.append(connection)
                return
            # Connections to the same server, which would fail one after the other.
            idle, self._idle = self._idle, []
        for each in (connection, *idle):
            each.close()

    @property
    def size(self) -> int:
        """How many connections there are, idle and in use."""
        with self._condition:
            return len(self._idle) + len(self._lent)

    def close(self) -> None:
        """Close the idle connections and make running calls fail. Idempotent."""
        with self._condition:
            self._closed = True
            idle, self._idle = self._idle, []
            lent = list(self._lent)
            # Under the lock: later its borrower may have closed it, and its descriptor may belong
            # to another file.
            for connection in lent:
                connection.abort()
            self._condition.notify_all()
        for connection in idle:
            connection.close()


T = TypeVar("T")

_NAMES_AT_ONCE: Final = 1024

_EXPLAINED: Final = {
    "NOAUTH": "wants a password: write scheme://:password@host:port",
    "WRONGPASS": "does not accept the user and the password",
    "NOPERM": "forbids it to this user: allow ping, set, get, touch, unlink, scan on warmroute:*",
    "DENIED": "is in protected mode, and answers its own machine only",
    "MOVED": "is in a cluster, and another node has this chunk: write redis-cluster://host:port",
    "ASK": "is moving this chunk to another node of its cluster",
    "CLUSTERDOWN": "is part of a cluster of which nodes are missing",
    "READONLY": "is a replica that takes no writes: name its master",
    "LOADING": "is still reading its data from disk",
    "OOM": "is at its maxmemory, and evicts nothing that would help",
    "MISCONF": "takes no writes while it cannot save to its disk: its log says why",
}
"""Messages for the errors of a server, by their first word."""

_NO_WRITES: Final = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS", "NOPERM"})
"""Errors of a put by a server that can still be read."""


class RedisStore(BlobStore):
    """Blobs as string values of one Redis or Valkey server.

    Each call is one pipeline on one connection of a bounded pool. While the server fails, calls
    raise `StorePausedError` at once, except one after each pause.
    """

    def __init__(self, server: RedisServer, *, backoff: ServerBackoff | None = None) -> None:
        """Does not connect yet. Raises `StoreError` for TLS files that cannot be used."""
        self._server = server
        self._tls = _tls_context(server.tls) if server.tls else None
        self._pool = ConnectionPool(self._connect, server.connections, backoff or ServerBackoff())

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Send one TOUCH for each name: with several names it only returns their number.

        Unlike EXISTS it is a use, for a server that evicts by use.
        """
        return list(map(bool, self._for_each("TOUCH", names)))

    def _for_each(self, word: str, names: Sequence[str]) -> list[int]:
        """Send a command for each name: a cluster refuses one with names of several slots."""
        numbers: list[int] = []
        for start in range(0, len(names), _NAMES_AT_ONCE):
            some = names[start : start + _NAMES_AT_ONCE]

            def talk(server: Conversation, some: Sequence[str] = some) -> list[int]:
                server.send([b"".join(command(word, name) for name in some)])
                return [_granted(server.integer()) for _ in some]

            numbers += self._call(0, talk)
        return numbers

    def get_many(self, targets: Sequence[ReadTarget]) -> list[int | None]:
        if not targets:
            return []

        def talk(server: Conversation) -> list[int | None]:
            server.send([b"".join(command("GET", target.name) for target in targets)])
            return [_size(server.value(target.parts)) for target in targets]

        return self._call(sum(target.size_bytes for target in targets), talk)

    def put_many(self, blobs: Sequence[Blob]) -> list[bool]:
        if not blobs:
            return []
        largest_bytes = max(blob.size_bytes for blob in blobs)
        if largest_bytes > MAX_VALUE_BYTES:
            raise StoreFullError(
                f"a chunk of {largest_bytes} bytes is more than the {MAX_VALUE_BYTES} that a "
                "value may have: lower chunk_size"
            )

        def talk(server: Conversation) -> list[Refusal | None]:
            ttl_s = self._server.ttl_s
            sets = (set_command(blob.name, blob.parts, ttl_s=ttl_s) for blob in blobs)
            server.send([part for each in sets for part in each])
            refusals = [_stored(server.simple()) for _ in blobs]
            # After a failover the former master lives on as a replica. The next connection goes to
            # where the name, or Sentinel, then leads.
            server.must_close = any(each and each.code == "READONLY" for each in refusals)
            return refusals

        refusals = self._call(sum(blob.size_bytes for blob in blobs), talk)
        # Outside of `_call`: the connection is sound, and gets need no pause.
        if (refused := refusals[0]) and None not in refusals:
            raise StoreFullError(f"it {_EXPLAINED.get(refused.code, f'answers: {refused.text}')}")
        return [refusal is None for refusal in refusals]

    def remove(self, names: Sequence[str]) -> None:
        """Remove with UNLINK: a DEL of large values would block the server."""
        self._for_each("UNLINK", names)

    def remove_all(self, prefix: str) -> int:
        """Remove with SCAN and UNLINK, a portion at a time: others are served in between."""
        removed, cursor = 0, "0"
        while True:
            scan = command("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", str(_NAMES_AT_ONCE))

            def talk(server: Conversation, scan: bytes = scan) -> tuple[str, list[str]]:
                server.send([scan])
                return _granted(server.scanned())

            cursor, names = self._call(0, talk)
            removed += sum(self._for_each("UNLINK", names))
            if cursor == "0":
                return removed

    def close(self) -> None:
        self._pool.close()

    def _call(self, size_bytes: int, talk: Callable[[Conversation], T]) -> T:
        deadline = Deadline.for_batch(self._server.timeout_s, size_bytes)
        try:
            with self._pool.lend(deadline) as conversation:
                conversation.deadline = deadline
                return talk(conversation)
        except RespError as error:
            raise StoreError(f"does not answer like a Redis server: {error}") from None
        except TimeoutError:
            raise StoreError(f"no answer in {deadline.timeout_s:.1f} s") from None
        except (OSError, UnicodeError) as error:  # a host name may be invalid in DNS
            reason = error.strerror if isinstance(error, OSError) else None
            raise StoreError(reason or str(error)) from None

    def _connect(self, deadline: Deadline) -> Conversation:
        """Return a connection that has logged in and has answered."""
        sooner = Deadline(min(deadline.left_s(), self._server.connect_timeout_s))
        conversation = Conversation(sooner)
        try:
            try:
                self._log_in(conversation, sooner)
                self._choose_database(conversation)
            except BaseException:
                conversation.close()
                raise
        except RefusedError as error:
            code = error.refusal.code
            # Without the server's text: some servers repeat the password in it.
            reason = _EXPLAINED.get(code, "refuses the login: does it want a password?")
            raise StoreError(f"{reason} ({code})") from None
        except (TimeoutError, valkey.exceptions.TimeoutError):
            raise StoreError(f"no connection in {sooner.timeout_s:.1f} s") from None
        except valkey.exceptions.ConnectionError as error:
            raise StoreError(str(error)) from None
        return conversation

    def _log_in(self, conversation: Conversation, deadline: Deadline) -> None:
        server = self._server
        login = {"username": server.user or None, "password": server.password or None}
        if server.socket_path:
            left_s = deadline.left_s()
            times = {"socket_connect_timeout": left_s, "socket_timeout": left_s}
            conversation.open(UnixDomainSocketConnection, path=server.socket_path, **times, **login)
            return
        host, port = self._address(deadline)
        # valkey-py gives each address of a name the whole timeout. One that does not answer must
        # not use up the time of all.
        addresses = resolve(host, port, deadline.left_s())
        left_s = deadline.left_s()
        conversation.open(
            partial(TlsConnection, self._tls) if self._tls else Connection,
            host=host,
            port=port,
            socket_connect_timeout=left_s / max(1, len(addresses)),
            socket_timeout=left_s,
            **login,
        )

    def _address(self, deadline: Deadline) -> Address:
        """Return where the server is, which after a failover only the Sentinels know."""
        server = self._server
        if not server.service_name:
            return server.host, server.port
        return _find_master(server, deadline)

    def _choose_database(self, conversation: Conversation) -> None:
        """Choose the database, and wait for an answer."""
        if self._server.database:
            conversation.send([command("SELECT", str(self._server.database))])
            _granted(conversation.simple())
        conversation.send([command("PING")])
        _granted(conversation.simple())


def _find_master(server: RedisServer, deadline: Deadline) -> Address:
    """Ask the Sentinels, one after the other, for the address of the master."""
    share_s = deadline.left_s() / len(server.addresses)
    options = {"socket_timeout": share_s, "socket_connect_timeout": share_s}
    sentinel = Sentinel(server.addresses, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    try:
        host, port = sentinel.discover_master(server.service_name)  # type: ignore[no-untyped-call]
    except valkey.exceptions.ValkeyError:
        raise StoreError(
            f"none of the Sentinels names a master {server.service_name!r} that is up: check that "
            "they run and that service_name is the name in their configuration"
        ) from None
    finally:
        for each in sentinel.sentinels:
            each.close()  # type: ignore[no-untyped-call]
    return str(host), int(port)


def _tls_context(settings: TlsSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
        if settings.cert_file:
            context.load_cert_chain(settings.cert_file, settings.key_file)
    except (OSError, ssl.SSLError) as error:
        raise StoreError(f"its TLS files cannot be used: {error}") from None
    if not settings.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _granted(reply: T | Refusal) -> T:
    if isinstance(reply, Refusal):
        raise StoreError(_EXPLAINED.get(reply.code, f"answers: {reply.text}"))
    return reply


def _size(reply: int | Refusal | None) -> int | None:
    if isinstance(reply, Refusal) and reply.code == "WRONGTYPE":
        return 0  # another program stored another type under this name
    return _granted(reply)


def _stored(reply: str | Refusal) -> Refusal | None:
    if isinstance(reply, Refusal) and reply.code in _NO_WRITES:
        return reply
    _granted(reply)
    return None
