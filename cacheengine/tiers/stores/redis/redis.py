"""Redis and Valkey, and what speaks their protocol.

A small client of our own: it sends chunks from where they lie and receives
them where they shall be, with one call to the system for most of a chunk.
"""

import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from cacheengine.tiers.stores.base import Blob, BlobStore, StoreError, StoreFullError, Target
from cacheengine.tiers.stores.redis.channels import (
    Deadline,
    PlainChannel,
    ServerChannel,
    TlsChannel,
)
from cacheengine.tiers.stores.redis.connections import ConnectionPool
from cacheengine.tiers.stores.redis.redis_server import RedisServer, TlsSettings
from cacheengine.tiers.stores.redis.resp import (
    MAX_VALUE_BYTES,
    Conversation,
    Refusal,
    RespError,
    command,
    set_command,
)
from cacheengine.tiers.stores.server_backoff import ServerBackoff

T = TypeVar("T")

_SLOWEST_BYTES_S: Final = 10e6
"""So slow may the network be at worst before a batch is given up."""
_NAMES_AT_ONCE: Final = 1024

_EXPLAINED: Final = {
    "NOAUTH": "wants a password: write scheme://:password@host:port",
    "WRONGPASS": "does not accept the user and the password",
    "NOPERM": "forbids it to this user: allow ping, set, get, exists, unlink on warmroute:*",
    "DENIED": "is in protected mode, and answers its own machine only",
    "MOVED": "is part of a cluster, which is not served: name one server",
    "ASK": "is part of a cluster, which is not served: name one server",
    "CLUSTERDOWN": "is part of a cluster, which is not served: name one server",
    "READONLY": "is a replica that takes no writes: name its master",
    "LOADING": "is still reading its data from disk",
    "OOM": "is at its maxmemory, and evicts nothing that would help",
    "MISCONF": "takes no writes while it cannot save to its disk: its log says why",
}
"""What the errors of a server mean here, by their first word."""

_NO_WRITES: Final = frozenset({"OOM", "READONLY", "MISCONF", "NOREPLICAS", "NOPERM"})
"""Refusals of a put by a server that can be read from all the same."""


class RedisStore(BlobStore):
    """Blobs as string values of one Redis or Valkey server.

    Each call is one pipeline on one connection of a bounded pool. While the
    server fails, calls raise `StoreError` at once, but one now and then.
    """

    def __init__(self, server: RedisServer, *, backoff: ServerBackoff | None = None) -> None:
        """Connect to nothing yet. Raises `StoreError` for TLS files that cannot be used."""
        self._server = server
        self._tls = _tls_context(server.tls) if server.tls else None
        self._pool = ConnectionPool(self._connect, server.connections, backoff or ServerBackoff())

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Ask with one EXISTS for each name: that of several would only give their sum."""
        found: list[bool] = []
        for start in range(0, len(names), _NAMES_AT_ONCE):
            found += self._exists(names[start : start + _NAMES_AT_ONCE])
        return found

    def _exists(self, names: Sequence[str]) -> list[bool]:
        def talk(server: Conversation) -> list[bool]:
            server.send([b"".join(command("EXISTS", name) for name in names)])
            return [bool(_granted(server.integer())) for _ in names]

        return self._call(0, talk)

    def get_many(self, targets: Sequence[Target]) -> list[int | None]:
        """Read with one GET for each name."""
        if not targets:
            return []

        def talk(server: Conversation) -> list[int | None]:
            server.send([b"".join(command("GET", target.name) for target in targets)])
            return [_size(server.value(target.parts)) for target in targets]

        return self._call(sum(target.size_bytes for target in targets), talk)

    def put_many(self, blobs: Sequence[Blob]) -> list[bool]:
        """Store with one SET for each name; the server makes each visible when it is whole."""
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
            return [_stored(server.simple()) for _ in blobs]

        refusals = self._call(sum(blob.size_bytes for blob in blobs), talk)
        # Outside of the call: its connection is as sound as any, and gets need not rest.
        if (refused := refusals[0]) and None not in refusals:
            raise StoreFullError(f"it {_explained(refused.code, f'answers: {refused.text}')}")
        return [refusal is None for refusal in refusals]

    def remove(self, names: Sequence[str]) -> None:
        """Remove with UNLINK: a DEL of large values would halt the server for all others."""
        for start in range(0, len(names), _NAMES_AT_ONCE):
            self._remove(names[start : start + _NAMES_AT_ONCE])

    def _remove(self, names: Sequence[str]) -> None:
        def talk(server: Conversation) -> None:
            server.send([command("UNLINK", *names)])
            _granted(server.integer())

        self._call(0, talk)

    @property
    def open_connections(self) -> int:
        """How many connections there are, idle and in use."""
        return self._pool.size

    def close(self) -> None:
        """Close all connections; calls under way fail."""
        self._pool.close()

    def _call(self, size_bytes: int, talk: Callable[[Conversation], T]) -> T:
        deadline = Deadline(self._server.timeout_s + size_bytes / _SLOWEST_BYTES_S)
        try:
            with self._pool.lend(deadline) as conversation:
                conversation.deadline = deadline
                return talk(conversation)
        except RespError as error:
            raise StoreError(f"does not speak as a Redis server does: {error}") from None
        except TimeoutError:
            raise StoreError(f"no answer in {deadline.timeout_s:.1f} s") from None
        except (OSError, UnicodeError) as error:  # a host name may be none that DNS can hold
            reason = error.strerror if isinstance(error, OSError) else None
            raise StoreError(reason or str(error)) from None

    def _connect(self, deadline: Deadline) -> Conversation:
        """Return a connection that has been let in, and has answered."""
        sooner = deadline.at_most(self._server.connect_timeout_s)
        try:
            channel = self._channel(sooner)
            conversation = Conversation(channel, sooner, drain_bytes_s=_SLOWEST_BYTES_S)
            try:
                self._introduce(conversation)
            except BaseException:
                channel.close()
                raise
        except TimeoutError:
            raise StoreError(f"no connection in {sooner.timeout_s:.1f} s") from None
        return conversation

    def _introduce(self, conversation: Conversation) -> None:
        """Log in, choose the database, and wait for a sign of life."""
        server = self._server
        if server.password:
            user = [server.user] if server.user else []
            conversation.send([command("AUTH", *user, server.password)])
            answer = conversation.simple()
            if isinstance(answer, Refusal):
                # Without its text: some servers repeat in it what they were sent.
                reason = _explained(answer.code, "refuses the login: does it want a password?")
                raise StoreError(f"{reason} ({answer.code})")
        if server.database:
            conversation.send([command("SELECT", str(server.database))])
            _granted(conversation.simple())
        conversation.send([command("PING")])
        _granted(conversation.simple())

    def _channel(self, deadline: Deadline) -> ServerChannel:
        connected = self._dial(deadline)
        try:
            if self._tls is None:
                return PlainChannel(connected)
            connected.settimeout(deadline.left_s())
            return TlsChannel(self._tls.wrap_socket(connected, server_hostname=self._server.host))
        except BaseException:
            connected.close()
            raise

    def _dial(self, deadline: Deadline) -> socket.socket:
        if self._server.socket_path:
            return _connected(socket.AF_UNIX, self._server.socket_path, deadline.left_s())
        found = socket.getaddrinfo(self._server.host, self._server.port, type=socket.SOCK_STREAM)
        for number, (family, _, _, _, address) in enumerate(found):
            last = number == len(found) - 1
            # A share for each: one that does not answer must not take the time of all.
            share_s = deadline.left_s() / (len(found) - number)
            with contextlib.nullcontext() if last else contextlib.suppress(OSError):
                return _connected(family, address, share_s)
        raise StoreError("its name has no address")


def _connected(family: int, address: object, timeout_s: float) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.settimeout(timeout_s)
        made.connect(address)  # type: ignore[arg-type]  # whatever the family has
        if family != socket.AF_UNIX:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        made.close()
        raise
    return made


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
        raise StoreError(_explained(reply.code, f"answers: {reply.text}"))
    return reply


def _explained(code: str, otherwise: str) -> str:
    return _EXPLAINED.get(code, otherwise)


def _size(reply: int | Refusal | None) -> int | None:
    if isinstance(reply, Refusal) and reply.code == "WRONGTYPE":
        return 0  # something has this name that no put of ours made
    return _granted(reply)


def _stored(reply: str | Refusal) -> Refusal | None:
    if isinstance(reply, Refusal) and reply.code in _NO_WRITES:
        return reply
    _granted(reply)
    return None
