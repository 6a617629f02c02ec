"""A blob store whose client library runs in a process of its own (`client_host`)."""

import contextlib
import itertools
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

import cacheengine
from cacheengine.bulk import copy
from cacheengine.tiers.client_host import (
    ABSENT,
    FULL,
    READY_ID,
    STORED,
    UNREAD,
    ClientCall,
    ClientReply,
    ClientSetup,
    Verb,
)
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
from warmroute_common.decoding import decode_msgpack

logger = logging.getLogger("vllm.warmroute")

T = TypeVar("T", Blob, ReadTarget)

_LANES: Final = 4
"""Transfers that run at once, each with its share of the memory."""
_ALIGNMENT_BYTES: Final = 64
_NAMES_AT_ONCE: Final = 256
"""The calls of all lanes must fit into a socket's buffer."""
_GIVE_UP_S: Final = 30.0
"""A process whose call takes this much longer than its deadline is killed.

Not earlier: the memory that it contributed to a distributed store is lost with it.
"""
_CLOSE_S: Final = 4.0
_POLL_S: Final = 1.0


class HostedStore(BlobStore):
    """Blobs through a library in another process, over memory that both share.

    Blobs are copied to and from that memory, so that an abandoned call can never write into the
    pool later. A transfer that misses its deadline keeps its lane until it ends or the process is
    killed. A later call replaces a process that died, after a growing pause. Calls by name need no
    memory, and questions have a thread of their own in the process: prompts wait for the answers,
    so they do not queue behind transfers.
    """

    def __init__(
        self,
        library: "HostedLibrary",
        *,
        memory_bytes: int,
        memory_setting: str,
        timeout_s: float,
        prefix_bytes: int = 0,
        backoff: ServerBackoff | None = None,
        give_up_s: float = _GIVE_UP_S,
    ) -> None:
        """Start the process without waiting for it.

        ``memory_setting`` names the setting of ``memory_bytes`` in messages. ``prefix_bytes``
        before each blob belong to the library's adapter.
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
        return list(map(bool, self._call_by_name("exists", names)))

    def remove(self, names: Sequence[str]) -> None:
        self._call_by_name("remove", names)

    def _call_by_name(self, verb: Verb, names: Sequence[str]) -> list[int]:
        deadline = Deadline(self._timeout_s)
        process = self._connected(deadline)
        answers: list[int] = []
        for start in range(0, len(names), _NAMES_AT_ONCE):
            some = list(names[start : start + _NAMES_AT_ONCE])
            answers += _result_in_time(process.call(verb, some, [], []), deadline)
        return answers

    def put_many(self, blobs: Sequence[Blob]) -> list[bool]:
        deadline = Deadline.for_batch(self._timeout_s, sum(blob.size_bytes for blob in blobs))
        outcomes: list[int] = []
        for spans in self._rounds(blobs):
            with self._lane(deadline) as lane:
                for blob, offset in spans:
                    start = lane.offset + offset + self._prefix_bytes
                    lane.process.memory.write(start, blob.parts)
                outcomes += lane.call(deadline, "put", spans)
        if outcomes and STORED not in outcomes and FULL in outcomes:
            raise StoreFullError("it is full, and can evict nothing now")
        return [outcome == STORED for outcome in outcomes]

    def get_many(self, targets: Sequence[ReadTarget]) -> list[int | None]:
        size_bytes = sum(target.size_bytes for target in targets)
        deadline = Deadline.for_batch(self._timeout_s, size_bytes)
        sizes: list[int] = []
        for spans in self._rounds(targets):
            with self._lane(deadline) as lane:
                found = lane.call(deadline, "get", spans)
                for (target, offset), size in zip(spans, found, strict=True):
                    if 0 < size <= target.size_bytes:
                        start = lane.offset + offset + self._prefix_bytes
                        lane.process.memory.read(start, target.parts, size)
                sizes += found
        if sizes and all(size == UNREAD for size in sizes):
            raise StoreError("it holds the blobs, but none could be read")
        return [None if size in (ABSENT, UNREAD) else size for size in sizes]

    def _rounds(self, batch: Sequence[T]) -> Iterator[list[tuple[T, int]]]:
        """Yield blobs with their offsets in a lane, as many as fit at a time."""
        spans: list[tuple[T, int]] = []
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
            spans.append((blob, end))
            end += span_bytes
        if spans:
            yield spans

    def close(self) -> None:
        with self._condition:
            self._closed = True
            process, self._process = self._process, None
            self._condition.notify_all()
        if process is not None:
            process.close(_CLOSE_S)

    @contextmanager
    def _lane(self, deadline: Deadline) -> Iterator["_Lane"]:
        """Lend a lane until both the block and its call have ended."""
        lane = self._take_lane(deadline)
        try:
            yield lane
        finally:
            # The process may still write to the lane of a call that missed its deadline.
            if lane.running is None:
                self._give_back(lane)
            else:
                lane.running.add_done_callback(lambda _: self._give_back(lane))

    def _take_lane(self, deadline: Deadline) -> "_Lane":
        process = self._connected(deadline)
        with self._condition:
            while process is self._process and not self._free_lanes:
                if not self._condition.wait(deadline.wait_s()):
                    raise StoreError(f"{_LANES} other calls were running until the deadline")
            if process is not self._process:
                raise StoreError("closed" if self._closed else "its client's process has died")
            number = self._free_lanes.pop()
        return _Lane(process, number, number * self._lane_bytes)

    def _give_back(self, lane: "_Lane") -> None:
        with self._condition:
            if lane.process is self._process:
                self._free_lanes.append(lane.number)
                self._condition.notify()

    def _connected(self, deadline: Deadline) -> "ClientProcess":
        """Return a process that is connected; a new one has as long as a call may take."""
        process = self._living_process()
        wait_s = self._timeout_s - process.age_s()
        try:
            process.ready.result(max(0.0, min(deadline.wait_s(), wait_s)))
        except TimeoutError:
            raise StoreError("not connected yet") from None
        self._backoff.succeeded()
        return process

    def _living_process(self) -> "ClientProcess":
        with self._condition:
            if self._closed:
                raise StoreError("closed")
            if self._process is None:
                pause_s = self._backoff.admit()
                if pause_s:
                    raise StorePausedError(f"{self._reason}; tried again in {pause_s:.1f} s")
                self._start()
            if self._process is None:
                raise StoreError(self._reason)
            return self._process

    def _start(self) -> None:
        """Start the process; if that fails, a later call tries again."""
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
            except OSError as error:  # memory, descriptors or processes are exhausted
                self._reason = f"its client's process cannot be started: {error.strerror}"
                self._backoff.failed(began_s)
                return
            self._free_lanes = list(range(_LANES))

    def _ended(self, process: "ClientProcess", reason: str, began_s: float) -> None:
        with self._condition:
            if process is not self._process:
                return
            self._process = None
            self._reason = reason
            self._condition.notify_all()
        self._backoff.failed(began_s)
        if process.ready.done():
            logger.warning("remote tier: %s; starting another one", reason)


@dataclass
class _Lane:
    """The share of a process and its memory that one call uses."""

    process: "ClientProcess"
    number: int
    offset: int
    running: Future[list[int]] | None = None

    def call(self, deadline: Deadline, verb: Verb, spans: Sequence[tuple[Blob, int]]) -> list[int]:
        """Make the call; raise `StoreError` if it fails or misses the deadline."""
        names = [blob.name for blob, _ in spans]
        offsets = [self.offset + offset for _, offset in spans]
        sizes = [blob.size_bytes for blob, _ in spans]
        self.running = self.process.call(verb, names, offsets, sizes)
        return _result_in_time(self.running, deadline)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True)
class HostedLibrary:
    """The library that a process hosts, and its settings."""

    module: str
    """The adapter's module; its ``make_client`` runs in the process only."""
    settings: Mapping[str, Any]
    """JSON values."""
    environment: Mapping[str, str]
    """Variables for the library. Variables that the operator set take precedence."""
    log_variable: str
    """The library's output is shown if this variable is set."""


class SharedMemory:
    """Anonymous memory that the process maps, and that is read and written here.

    It stays mapped while this object is referenced, so no thread can copy to unmapped memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("warmroute-store")
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, size_bytes)
        self._bytes = memoryview(mmap.mmap(self.fd, size_bytes))

    def write(self, offset: int, parts: Sequence[memoryview | bytes]) -> None:
        """Copy the parts, one after the other, to the offset."""
        for part in parts:
            end = offset + len(part)
            copy(self._bytes[offset:end], part)
            offset = end

    def read(self, offset: int, parts: Sequence[memoryview], size_bytes: int) -> None:
        """Fill the parts, one after the other, with ``size_bytes`` from the offset."""
        for part in parts:
            end = offset + min(len(part), size_bytes)
            copy(part[: end - offset], self._bytes[offset:end])
            size_bytes -= end - offset
            offset = end


class ClientProcess:
    """A process, its memory, and the calls that wait for its replies.

    When the process dies, all calls fail and no more are accepted. A process that leaves a call
    without a reply for ``give_up_s`` is killed.
    """

    def __init__(
        self,
        library: HostedLibrary,
        *,
        memory_bytes: int,
        threads: int,
        give_up_s: float,
        on_end: Callable[["ClientProcess", str], None],
    ) -> None:
        """Start it. Another thread calls ``on_end`` once, with this object and the reason."""
        self.memory = SharedMemory(memory_bytes)
        self.ready: Future[None] = Future()
        self._started_s = time.monotonic()
        self._give_up_s = give_up_s
        self._on_end = on_end
        self._ids = itertools.count(READY_ID + 1)
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Future[list[int]], float]] = {}
        self._ended = ""
        self._socket, self._process = self._spawn(library, threads)
        threading.Thread(target=self._receive, name="store-replies", daemon=True).start()

    def age_s(self) -> float:
        return time.monotonic() - self._started_s

    def call(
        self, verb: Verb, names: list[str], offsets: list[int], sizes: list[int]
    ) -> "Future[list[int]]":
        """Send a call. The future fails with `StoreError`, at the latest after ``give_up_s``."""
        future: Future[list[int]] = Future()
        call = ClientCall(next(self._ids), verb, names, offsets, sizes)
        with self._lock:  # messages must not mix, and `_end` empties `_waiting` once
            if self._ended:
                raise StoreError(self._ended)
            self._waiting[call.id] = (future, time.monotonic())
            # If the process has died, `_receive` notices and fails the future.
            with contextlib.suppress(OSError):
                self._socket.send_bytes(msgspec.msgpack.encode(call))
        return future

    def close(self, wait_s: float) -> None:
        """Let the process disconnect from its server, then kill it if it still runs."""
        with contextlib.suppress(StoreError):
            self.call("close", [], [], [])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self.kill()

    def kill(self) -> None:
        """Kill the process; `_receive` then cleans up."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def _spawn(
        self, library: HostedLibrary, threads: int
    ) -> tuple[Connection, "subprocess.Popen[bytes]"]:
        ours, theirs = socket.socketpair()
        setup = ClientSetup(
            module=library.module,
            settings=dict(library.settings),
            socket_fd=theirs.fileno(),
            memory_fd=self.memory.fd,
            memory_bytes=self.memory.size_bytes,
            threads=threads,
            parent_pid=os.getpid(),
        )
        output = None if library.log_variable in os.environ else subprocess.DEVNULL
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            process = subprocess.Popen(
                [sys.executable, "-m", "cacheengine.tiers.client_host"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(), self.memory.fd),
                env={**library.environment, **os.environ, "PYTHONPATH": _import_path()},
                start_new_session=True,  # a Ctrl-C is for the replica only
            )
            assert process.stdin is not None
            # Not an argument: every user can read those, and the settings may contain a password.
            # If the process has died, `_receive` notices.
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(msgspec.json.encode(setup))
            undo.pop_all()
        return Connection(ours.detach()), process

    def _receive(self) -> None:
        """Hand out replies until the process has ended."""
        reason = ""
        try:
            while True:
                if self._socket.poll(_POLL_S):
                    self._complete(decode_msgpack(self._socket.recv_bytes(), ClientReply))
                elif self._is_stuck():
                    reason = f"its client did not answer for {self._give_up_s:.0f} s"
                    break
        except (EOFError, OSError):
            pass
        except StoreError as error:
            reason = str(error)
        self.kill()
        self._end(reason or f"its client's process has died ({self._process.returncode})")

    def _complete(self, reply: ClientReply) -> None:
        if reply.id == READY_ID:
            if reply.error:
                raise StoreError(reply.error)
            self.ready.set_result(None)
            return
        with self._lock:
            future, _ = self._waiting.pop(reply.id)
        if reply.error:
            future.set_exception(StoreError(reply.error))
        else:
            future.set_result(reply.values)

    def _is_stuck(self) -> bool:
        with self._lock:
            began = [since_s for _, since_s in self._waiting.values()]
        if not self.ready.done():
            began.append(self._started_s)
        return bool(began) and time.monotonic() - min(began) > self._give_up_s

    def _end(self, reason: str) -> None:
        with self._lock:
            # Under the lock: `call` either sees this, or its future is failed below.
            self._ended = reason
            waiting, self._waiting = self._waiting, {}
            self._socket.close()
        self._on_end(self, reason)
        if not self.ready.done():
            self.ready.set_exception(StoreError(reason))
        for future, _ in waiting.values():
            future.set_exception(StoreError(reason))


def _result_in_time(future: "Future[list[int]]", deadline: Deadline) -> list[int]:
    """Return the result of a call; raise `StoreError` if it failed or missed the deadline."""
    try:
        return future.result(deadline.left_s())
    except TimeoutError:  # the deadline's, or the future's
        raise StoreError(f"no answer in {deadline.timeout_s:.1f} s") from None


def _import_path() -> str:
    """Return an import path that finds this package, even if it is not installed."""
    root = str(Path(cacheengine.__file__).parent.parent)
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
