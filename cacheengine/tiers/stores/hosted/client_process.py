"""One process that hosts a client library, as the replica sees it."""

import contextlib
import itertools
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec

import cacheengine
from cacheengine.bulk import copy
from cacheengine.tiers.stores.base import StoreError
from cacheengine.tiers.stores.hosted.client_wire import READY_ID, Answer, Ask, Setup, Verb
from cacheengine.tiers.stores.redis.channels import Deadline

_LOOK_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class HostedLibrary:
    """Which library a process hosts, and how it is set up."""

    module: str
    """Of the adapter, imported in the process only."""
    settings: Mapping[str, Any]
    """As plain values."""
    environment: Mapping[str, str]
    """For the library; what the operator has set goes first."""
    log_variable: str
    """With this in the environment what the library prints is shown."""


class SharedMemory:
    """Memory without a name that the process maps, and that is read and written here.

    It stays mapped as long as this object is referenced: so no thread can be left
    copying to unmapped memory, or to memory mapped anew.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("warmroute-store")
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, size_bytes)
        self._bytes = memoryview(mmap.mmap(self.fd, size_bytes))

    def write(self, offset: int, parts: Sequence[memoryview | bytes]) -> None:
        """Put the parts one after the other from the offset on."""
        for part in parts:
            end = offset + len(part)
            copy(self._bytes[offset:end], part)
            offset = end

    def read(self, offset: int, parts: Sequence[memoryview], size_bytes: int) -> None:
        """Fill the parts one after the other, with as many bytes as they are told."""
        for part in parts:
            end = offset + min(len(part), size_bytes)
            copy(part[: end - offset], self._bytes[offset:end])
            size_bytes -= end - offset
            offset = end


class ClientProcess:
    """A process, its memory, and the calls that wait for it.

    When the process dies all calls fail, and no more are taken. One that
    leaves a call without an answer for ``give_up_s`` is killed.
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
        """Start it. ``on_end`` is called once, from another thread, with this and the reason."""
        self.memory = SharedMemory(memory_bytes)
        self.ready: Future[None] = Future()
        self._started_s = time.monotonic()
        self._give_up_s = give_up_s
        self._on_end = on_end
        self._ids = itertools.count(READY_ID + 1)
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Future[list[int]], float]] = {}
        self._ended = ""
        self.was_ready = False
        """Whether the library has ever connected."""
        self._socket, self._process = self._spawn(library, threads)
        threading.Thread(target=self._receive, name="store-answers", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def age_s(self) -> float:
        """Return how long ago it was started."""
        return time.monotonic() - self._started_s

    def ask(
        self, verb: Verb, names: list[str], offsets: list[int], sizes: list[int]
    ) -> "Future[list[int]]":
        """Send a call; the future fails with `StoreError`, and has no deadline but `give_up_s`."""
        future: Future[list[int]] = Future()
        ask = Ask(next(self._ids), verb, names, offsets, sizes)
        with self._lock:  # messages must not mix; and `_end` empties `_waiting` once
            if self._ended:
                raise StoreError(self._ended)
            self._waiting[ask.id] = (future, time.monotonic())
            # If it has died `_receive` finds out as well, and fails the future.
            with contextlib.suppress(OSError):
                self._socket.send_bytes(msgspec.msgpack.encode(ask))
        return future

    def close(self, wait_s: float) -> None:
        """Ask the process to leave the server, and end it in any case."""
        with contextlib.suppress(StoreError):
            self.ask("close", [], [], [])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self.kill()

    def kill(self) -> None:
        """End the process; `_receive` tidies up."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def _spawn(
        self, library: HostedLibrary, threads: int
    ) -> tuple[Connection, "subprocess.Popen[bytes]"]:
        ours, theirs = socket.socketpair()
        setup = Setup(
            module=library.module,
            settings=dict(library.settings),
            socket_fd=theirs.fileno(),
            memory_fd=self.memory.fd,
            memory_bytes=self.memory.size_bytes,
            threads=threads,
            parent_pid=os.getpid(),
        )
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            process = subprocess.Popen(
                [sys.executable, "-m", "cacheengine.tiers.stores.hosted.client_host"],
                stdin=subprocess.PIPE,
                stdout=None if library.log_variable in os.environ else subprocess.DEVNULL,
                stderr=None if library.log_variable in os.environ else subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self.memory.fd),
                env={**library.environment, **os.environ, "PYTHONPATH": _import_path()},
                start_new_session=True,  # a Ctrl-C is the replica's to deal with
            )
            assert process.stdin is not None
            # Not an argument: those are seen by all of the machine, and there may be a password.
            with contextlib.suppress(BrokenPipeError), process.stdin:  # it has died: seen later
                process.stdin.write(msgspec.json.encode(setup))
            undo.pop_all()
        return Connection(ours.detach()), process

    def _receive(self) -> None:
        """Hand out answers until the process is gone."""
        reason = ""
        try:
            while True:
                if self._socket.poll(_LOOK_S):
                    self._hand_out(msgspec.msgpack.decode(self._socket.recv_bytes(), type=Answer))
                elif self._is_stuck():
                    reason = f"its client did not answer for {self._give_up_s:.0f} s"
                    break
        except (EOFError, OSError):
            pass
        except StoreError as error:
            reason = str(error)
        self.kill()
        self._end(reason or f"its client's process has died ({self._process.returncode})")

    def _hand_out(self, answer: Answer) -> None:
        if answer.id == READY_ID:
            if answer.error:
                raise StoreError(answer.error)
            self.was_ready = True
            self.ready.set_result(None)
            return
        with self._lock:
            future, _ = self._waiting.pop(answer.id)
        if answer.error:
            future.set_exception(StoreError(answer.error))
        else:
            future.set_result(answer.values)

    def _is_stuck(self) -> bool:
        with self._lock:
            began = [since_s for _, since_s in self._waiting.values()]
        if not self.was_ready:
            began.append(self._started_s)
        return bool(began) and time.monotonic() - min(began) > self._give_up_s

    def _end(self, reason: str) -> None:
        with self._lock:
            # Under the lock: `ask` either sees this or is seen here.
            self._ended = reason
            waiting, self._waiting = self._waiting, {}
            self._socket.close()
        self._on_end(self, reason)
        if not self.ready.done():
            self.ready.set_exception(StoreError(reason))
        for future, _ in waiting.values():
            future.set_exception(StoreError(reason))


def result_in_time(future: "Future[list[int]]", deadline: Deadline) -> list[int]:
    """Return what a call came to; raise `StoreError` when it failed or the deadline passed."""
    try:
        return future.result(deadline.left_s())
    except TimeoutError:  # the deadline's, or the future's
        raise StoreError(f"no answer in {deadline.timeout_s:.1f} s") from None


def _import_path() -> str:
    """Return where this very package is found, also when it is not installed."""
    root = str(Path(cacheengine.__file__).parent.parent)
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
