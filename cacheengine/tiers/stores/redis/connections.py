"""A bounded pool of connections to one server, which fails fast while the server does."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from cacheengine.tiers.stores.base import StoreError, StoreRestingError
from cacheengine.tiers.stores.redis.channels import Deadline
from cacheengine.tiers.stores.redis.resp import Conversation
from cacheengine.tiers.stores.server_backoff import ServerBackoff


class ConnectionPool:
    """At most ``limit`` connections, each lent to one thread at a time.

    ``connect`` makes one within the deadline. A connection in whose use
    anything was raised is closed, never lent again: an answer that comes late
    would be taken for the answer to the next question.
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

        Raises `StoreRestingError` while the server is left alone after a failure, `StoreError`
        when no connection came free in time; what ``connect`` raises otherwise.
        """
        self._take_place(deadline)
        connection: Conversation | None = None
        is_sound = False
        # After the wait for a place: a call that began before a failure does not count as another.
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
                if not self._condition.wait(deadline.patience_s()):
                    raise StoreError("all connections were in use until the deadline")
            if self._closed:
                raise StoreError("closed")
            rest_s = self._backoff.admit()
            if rest_s:
                # Further waiters for a place need not wait: wake the next to find the same.
                self._condition.notify()
                raise StoreRestingError(f"failed lately; asked again in {rest_s:.1f} s")
            self._free -= 1

    def _sound_connection(self, deadline: Deadline) -> Conversation:
        connection = self._from_idle() or self._connect(deadline)
        with self._condition:
            if self._closed:
                # `close` came while it was made, and knows nothing of it.
                connection.close()
                raise StoreError("closed")
            self._lent.append(connection)
        return connection

    def _from_idle(self) -> Conversation | None:
        while True:
            with self._condition:
                if not self._idle:
                    return None
                # The one used last: those beyond need are left to the server's idle timeout.
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
            if is_sound and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    @property
    def size(self) -> int:
        """How many connections there are, idle and in use."""
        with self._condition:
            return len(self._idle) + len(self._lent)

    def close(self) -> None:
        """Close the idle connections, and make the calls under way fail. Idempotent."""
        with self._condition:
            self._closed = True
            idle, self._idle = self._idle, []
            lent = list(self._lent)
            # Under the lock: afterwards its borrower may have closed it, and the
            # system may have given its number to another file.
            for connection in lent:
                connection.abort()
            self._condition.notify_all()
        for connection in idle:
            connection.close()
