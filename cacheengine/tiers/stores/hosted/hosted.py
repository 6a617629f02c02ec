"""A blob store whose client library runs in a process of its own."""

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from cacheengine.tiers.stores.base import (
    Blob,
    BlobStore,
    StoreError,
    StoreFullError,
    StoreRestingError,
    Target,
)
from cacheengine.tiers.stores.hosted.client_process import (
    ClientProcess,
    HostedLibrary,
    result_in_time,
)
from cacheengine.tiers.stores.hosted.client_wire import ABSENT, FULL, STORED, UNREAD, Verb
from cacheengine.tiers.stores.redis.channels import Deadline
from cacheengine.tiers.stores.server_backoff import ServerBackoff

logger = logging.getLogger("vllm.warmroute")

T = TypeVar("T", Blob, Target)

_LANES: Final = 4
"""Calls under way at once, each with its share of the memory."""
_ALIGNMENT_BYTES: Final = 64
_NAMES_AT_ONCE: Final = 256
"""Of four lanes' questions, all must fit into a socket's buffer."""
_SLOWEST_BYTES_S: Final = 10e6
"""So slow may the network be at worst before a batch is given up."""
_GIVE_UP_S: Final = 30.0
"""So long after its deadline a call may still end by itself; then the process is killed.

Not sooner: what the process has contributed to a distributed store dies with it.
"""
_CLOSE_S: Final = 4.0


@dataclass(frozen=True, slots=True)
class _Span(Generic[T]):
    """Where in a lane a blob lies, or is to lie."""

    blob: T
    offset: int


class HostedStore(BlobStore):
    """Blobs by way of a library in another process, over memory that both share.

    Blobs are copied to and from that memory: so a call that is given up can
    never write into the pool later. A call that misses its deadline keeps its
    share of the memory until it ends or the process is killed. A process that
    died is started anew at a later call, after pauses that double.
    """

    def __init__(
        self,
        library: HostedLibrary,
        *,
        memory_bytes: int,
        memory_setting: str,
        timeout_s: float,
        prefix_bytes: int = 0,
        backoff: ServerBackoff | None = None,
        give_up_s: float = _GIVE_UP_S,
    ) -> None:
        """Start the process, and do not wait for it.

        ``memory_setting`` is what raises ``memory_bytes``, for messages.
        ``prefix_bytes`` before each blob are the library adapter's own.
        """
        self._library = library
        self._lane_bytes = memory_bytes // _LANES // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
        self._memory_setting = memory_setting
        self._timeout_s = timeout_s
        self._prefix_bytes = prefix_bytes
        self._give_up_s = give_up_s
        self._backoff = backoff or ServerBackoff()
        self._condition = threading.Condition()
        self._process: ClientProcess | None = None
        self._free_lanes: list[int] = []
        self._closed = False
        self._reason = ""
        self._start()

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Ask for some names at a time."""
        return list(map(bool, self._ask("exists", names)))

    def remove(self, names: Sequence[str]) -> None:
        """Remove some names at a time."""
        self._ask("remove", names)

    def _ask(self, verb: Verb, names: Sequence[str]) -> list[int]:
        deadline = self._deadline(0)
        answers: list[int] = []
        for start in range(0, len(names), _NAMES_AT_ONCE):
            with self._lane(deadline) as lane:
                some = list(names[start : start + _NAMES_AT_ONCE])
                answers += lane.ask(deadline, verb, some)
        return answers

    def put_many(self, blobs: Sequence[Blob]) -> list[bool]:
        """Copy as many as fit into a lane, have them stored, and so on."""
        deadline = self._deadline(sum(blob.size_bytes for blob in blobs))
        outcomes: list[int] = []
        for spans in self._rounds(blobs):
            with self._lane(deadline) as lane:
                for span in spans:
                    start = lane.offset + span.offset + self._prefix_bytes
                    lane.process.memory.write(start, span.blob.parts)
                outcomes += lane.ask(deadline, "put", [span.blob.name for span in spans], spans)
        if outcomes and STORED not in outcomes and FULL in outcomes:
            raise StoreFullError("it has no room, and can evict nothing now")
        return [outcome == STORED for outcome in outcomes]

    def get_many(self, targets: Sequence[Target]) -> list[int | None]:
        """Have as many read as fit into a lane, copy them out, and so on."""
        deadline = self._deadline(sum(target.size_bytes for target in targets))
        sizes: list[int] = []
        for spans in self._rounds(targets):
            with self._lane(deadline) as lane:
                found = lane.ask(deadline, "get", [span.blob.name for span in spans], spans)
                for span, size in zip(spans, found, strict=True):
                    if 0 < size <= span.blob.size_bytes:
                        start = lane.offset + span.offset + self._prefix_bytes
                        lane.process.memory.read(start, span.blob.parts, size)
                sizes += found
        if sizes and all(size == UNREAD for size in sizes):
            raise StoreError("none of the blobs could be read from where they lie")
        return [None if size in (ABSENT, UNREAD) else size for size in sizes]

    def _rounds(self, batch: Sequence[T]) -> Iterator[list[_Span[T]]]:
        """Lay blobs out in one lane, as many as fit at a time."""
        spans: list[_Span[T]] = []
        end = 0
        for blob in batch:
            span_bytes = _aligned(blob.size_bytes + self._prefix_bytes)
            if span_bytes > self._lane_bytes:
                needed_bytes = _LANES * span_bytes
                raise StoreError(
                    f"a blob of {blob.size_bytes} bytes is too large: {self._memory_setting} must "
                    f"be at least {needed_bytes}, which is {_LANES} of them"
                )
            if end + span_bytes > self._lane_bytes or len(spans) == _NAMES_AT_ONCE:
                yield spans
                spans, end = [], 0
            spans.append(_Span(blob, end))
            end += span_bytes
        if spans:
            yield spans

    def close(self) -> None:
        """Leave the server and end the process; calls under way fail."""
        with self._condition:
            self._closed = True
            process, self._process = self._process, None
            self._condition.notify_all()
        if process is not None:
            process.close(_CLOSE_S)

    def _deadline(self, size_bytes: int) -> Deadline:
        return Deadline(self._timeout_s + size_bytes / _SLOWEST_BYTES_S)

    @contextmanager
    def _lane(self, deadline: Deadline) -> Iterator["_Lane"]:
        """Lend a lane; it comes back when the block has ended and so has its call."""
        lane = self._take_lane(deadline)
        try:
            yield lane
        finally:
            # As soon as nothing in the process uses the lane any more.
            if lane.call is None:
                self._give_back(lane)
            else:
                lane.call.add_done_callback(lambda _: self._give_back(lane))

    def _take_lane(self, deadline: Deadline) -> "_Lane":
        process = self._living_process()
        self._await_ready(process, deadline)
        with self._condition:
            while process is self._process and not self._free_lanes:
                if not self._condition.wait(deadline.patience_s()):
                    raise StoreError("all calls allowed at once were under way until the deadline")
            if process is not self._process:
                raise StoreError("closed" if self._closed else "its client's process has died")
            number = self._free_lanes.pop()
        return _Lane(process, number, number * self._lane_bytes)

    def _give_back(self, lane: "_Lane") -> None:
        with self._condition:
            if lane.process is self._process:
                self._free_lanes.append(lane.number)
                self._condition.notify()

    def _await_ready(self, process: ClientProcess, deadline: Deadline) -> None:
        """Wait for a process that is young; one that takes longer than a call may is no use now."""
        patience_s = self._timeout_s - process.age_s()
        try:
            process.ready.result(max(0.0, min(deadline.patience_s(), patience_s)))
        except TimeoutError:
            raise StoreError("not connected yet") from None
        self._backoff.succeeded()

    def _living_process(self) -> ClientProcess:
        with self._condition:
            if self._closed:
                raise StoreError("closed")
            if self._process is None:
                rest_s = self._backoff.admit()
                if rest_s:
                    raise StoreRestingError(f"{self._reason}; tried again in {rest_s:.1f} s")
                self._start()
            if self._process is None:
                raise StoreError(self._reason)
            return self._process

    def _start(self) -> None:
        """Start the process; one that cannot be started is tried again by a later call."""
        with self._condition:  # `_ended` of this process must find it assigned
            began_s = self._backoff.now_s()
            try:
                self._process = ClientProcess(
                    self._library,
                    memory_bytes=self._lane_bytes * _LANES,
                    threads=_LANES,
                    give_up_s=self._timeout_s + self._give_up_s,
                    on_end=lambda process, reason: self._ended(process, reason, began_s),
                )
            except OSError as error:  # for want of memory, descriptors or processes
                self._reason = f"its client's process cannot be started: {error.strerror}"
                self._backoff.failed(began_s)
                return
            self._free_lanes = list(range(_LANES))

    def _ended(self, process: ClientProcess, reason: str, began_s: float) -> None:
        with self._condition:
            if process is not self._process:
                return
            self._process = None
            self._reason = reason
            self._condition.notify_all()
        self._backoff.failed(began_s)
        if process.was_ready:
            logger.warning("remote tier: %s; a new one is started", reason)


class _Lane:
    """One call's share of a process and its memory."""

    def __init__(self, process: ClientProcess, number: int, offset: int) -> None:
        self.process = process
        self.number = number
        self.offset = offset
        self.call: Future[list[int]] | None = None

    def ask(
        self, deadline: Deadline, verb: Verb, names: list[str], spans: Sequence[_Span[Any]] = ()
    ) -> list[int]:
        """Make the one call; raise `StoreError` when it fails or the deadline passes."""
        offsets = [self.offset + span.offset for span in spans]
        sizes = [span.blob.size_bytes for span in spans]
        self.call = self.process.ask(verb, names, offsets, sizes)
        return result_in_time(self.call, deadline)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
