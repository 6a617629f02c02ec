"""Which weights a request's KV belongs to.

vLLM's block hashes identify an adapter by its name and path, and know nothing of weights that
change while vLLM runs. A chunk's key in our tiers covers both: adapters by the content of their
files, weights updated in place by an epoch.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import xxhash

_LARGE_FILE_BYTES: Final = 1 << 20
"""The digest of a file of this size is kept for the next start."""
_HASH_THREADS: Final = 4
_SETTLED_NS: Final = 2_000_000_000
"""A file that was changed more recently may change again without a new time of change."""
_MOST_KEPT: Final = 4096
_MOST_KEPT_BYTES: Final = 1 << 20
_KEEPING: Final = threading.Lock()

FileStates = tuple[tuple[str, int, int, int, int], ...]
"""Name, size, inode, modification time (ns) and change time (ns) of each file."""


@dataclass(frozen=True)
class WeightFiles:
    """The files of a model or an adapter: all files directly in a directory, or one file."""

    path: Path

    @property
    def hub_name(self) -> str | None:
        """The model's name on a hub, if this is a snapshot in a hub's cache; otherwise None."""
        repository, folder = self.path.parent.parent.name, self.path.parent.name
        if folder != "snapshots" or not repository.startswith("models--"):
            return None
        return repository.removeprefix("models--").replace("--", "/")

    def digest(self) -> str:
        """Return a text that changes when the content of a file changes. Raises OSError.

        Whole files are hashed, so copies on other machines have the same text. For a hub's
        snapshot it is the revision, plus a digest of the files that are not as the hub names them.
        """
        files = self._own_files()
        digest = hashlib.sha256()
        with ThreadPoolExecutor(_HASH_THREADS) as threads:
            for path, content in zip(files, threads.map(_content_digest, files), strict=True):
                digest.update(f"{path.name}\0{content}\0".encode())
        if self.hub_name is None:
            return digest.hexdigest()[:32]
        own = f"+{digest.hexdigest()[:32]}" if files else ""
        return f"{self.hub_name}@{self.path.name}{own}"

    def states(self) -> FileStates:
        """Return values that differ after any change of the files. Fast. Raises OSError."""
        states = ((path.name, path.stat()) for path in self._files())
        return tuple(
            (name, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
            for name, stat in states
        )

    def changed_since(self, time_s: float) -> bool:
        """Whether a file was changed or added since. Raises OSError.

        In a hub's snapshot, the files that are as the hub names them do not count.
        """
        return any(path.stat().st_ctime > time_s for path in self._own_files())

    def _own_files(self) -> list[Path]:
        """Return the files that the name of a hub's snapshot does not identify."""
        is_of_hub = self.hub_name is not None
        return [path for path in self._files() if not (is_of_hub and _is_of_hub(path))]

    def _files(self) -> list[Path]:
        found = [self.path] if self.path.is_file() else sorted(self.path.iterdir())
        return [path for path in found if path.is_file()]


def _is_of_hub(path: Path) -> bool:
    """Whether a snapshot's file is a link to a blob that has the content of its name."""
    blob = path.resolve()
    if blob.parent.name != "blobs":
        return False
    link, stat = path.lstat(), blob.stat()
    if stat.st_ctime_ns <= link.st_ctime_ns and stat.st_mtime_ns <= link.st_mtime_ns:
        return True  # the hub's client writes the blob before the link
    if len(blob.name) == hashlib.sha256().digest_size * 2:
        return blob.name == _content_digest(blob, "sha256")
    git = b"blob %d\0" % stat.st_size + blob.read_bytes()
    return blob.name == hashlib.sha1(git, usedforsecurity=False).hexdigest()


def _content_digest(path: Path, algorithm: str = "xxh3_128") -> str:
    """Return the digest of a whole file; that of a large file is kept for later processes."""
    before = path.stat()
    times = f"{before.st_mtime_ns}:{before.st_ctime_ns}"
    name = f"{algorithm}:{before.st_dev}:{before.st_ino}:{before.st_size}:{times}"
    # A file system that was built as an image may have the same inodes and times for other content:
    # builders write one time, of whole seconds, everywhere.
    is_kept = (
        before.st_size >= _LARGE_FILE_BYTES
        and before.st_ctime_ns % 1_000_000_000 != 0
        and time.time_ns() - before.st_ctime_ns > _SETTLED_NS
    )
    kept = _kept_digests() if is_kept else {}
    if name in kept:
        return kept[name]
    with path.open("rb", buffering=0) as file:
        new = xxhash.xxh3_128 if algorithm == "xxh3_128" else algorithm
        digest = hashlib.file_digest(file, new).hexdigest()
        after = os.fstat(file.fileno())
    if is_kept and (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns):
        _keep_digest(name, digest)
    return digest


def _digests_file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache) / "warmroute" / "weights.json"


def _kept_digests() -> dict[str, str]:
    """Return the digests that earlier processes have kept, the oldest first."""
    try:
        text = _digests_file().read_bytes()[: _MOST_KEPT_BYTES + 1]
        kept = json.loads(text)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home directory
        return {}
    is_sound = isinstance(kept, dict) and all(isinstance(each, str) for each in kept.values())
    return kept if is_sound else {}


def _keep_digest(name: str, digest: str) -> None:
    # The lock is for two threads that both read before one of them has written: that digest would
    # be lost. Without a digest the next start reads the file again.
    with _KEEPING, contextlib.suppress(OSError, RuntimeError):
        path = _digests_file()
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        kept = [*_kept_digests().items(), (name, digest)][-_MOST_KEPT:]
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_text(json.dumps(dict(kept)))
        draft.replace(path)


logger = logging.getLogger("vllm.warmroute")

_KEY64_BYTES: Final = 8
_MOST_ADAPTERS: Final = 65_536
_PATIENCE_S: Final = 0.05
"""How long vLLM's scheduler waits for a file system; usually it takes 0.1 to 0.2 ms."""


@dataclass(frozen=True, slots=True)
class KvVersion:
    """The weights that made KV, if not only those loaded at the start."""

    epoch: str = ""
    """"" for the weights loaded at the start; otherwise unique to one update of one replica."""
    adapter: str = ""
    """Digest of the adapter's files; "" without an adapter."""
    is_cached: bool = True
    """False if the weights are not known exactly: then nothing is stored and nothing loaded."""

    def stored_key(self, key: bytes) -> bytes:
        """Return a chunk's key in the tiers, given vLLM's key.

        The low 64 bits are the same: routers know chunks by these bits of vLLM's hashes.
        """
        if not self.epoch and not self.adapter:
            return key
        version = f"{self.epoch}\0{self.adapter}\0".encode()
        digest = hashlib.sha256(version + key).digest()
        return digest[: len(key) - _KEY64_BYTES] + key[-_KEY64_BYTES:]


UNCACHED: Final = KvVersion(is_cached=False)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter as vLLM names it."""

    name: str
    path: str
    load_id: int
    """vLLM's number of the adapter. It differs after each load under an unloaded name."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    states: FileStates
    digest: str


class KvVersions:
    """The versions of one replica's KV over time. Thread-safe.

    ``locate`` returns the files of an adapter, given its path; None if it cannot find them. A
    thread looks at the files of loaded adapters: the scheduler must not wait long for a file
    system. While it does not answer, the KV of its adapters is not cached.
    """

    def __init__(self, locate: Callable[[str], WeightFiles | None] | None = None) -> None:
        self._locate = locate or (lambda path: WeightFiles(Path(path)))
        self._epoch = ""
        # vLLM may still hold KV of earlier weights, or of earlier files of these adapters, in its
        # own cache. It would be offered as KV of the present ones, so nothing is found or stored.
        self._is_gpu_stale = False
        self._stale_adapters: set[tuple[str, str]] = set()
        # The digests of adapters whose KV vLLM's cache may hold.
        self._in_gpu: dict[tuple[str, str], str] = {}
        self._loaded: OrderedDict[LoraAdapter, _Loaded | None] = OrderedDict()
        # vLLM's thread loads and uses adapters; the agent's thread looks them up by name.
        self._lock = threading.Lock()
        self._questions: SimpleQueue[tuple[LoraAdapter, threading.Event] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last_answer: threading.Event | None = None
        self.empty_gpu: Callable[[], bool] = lambda: True
        """Clears vLLM's own cache; returns False if that is in use."""

    def close(self) -> None:
        """End the thread; one that waits for a file system is not waited for."""
        self._questions.put(None)

    def _knows_files(self, adapter: LoraAdapter) -> bool:
        """Look at a loaded adapter's files; return False if the file system is late.

        vLLM reads the files again after it has dropped an adapter to free memory. Nothing more is
        asked while an answer is late. Only the scheduler's thread calls this, without the lock.
        """
        if self._loaded.get(adapter) is None:
            return True
        if self._last_answer is not None and not self._last_answer.is_set():
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="kv-adapters", daemon=True)
            self._thread.start()
        self._last_answer = threading.Event()
        self._questions.put((adapter, self._last_answer))
        return self._last_answer.wait(_PATIENCE_S)

    def _look(self) -> None:
        while (question := self._questions.get()) is not None:
            adapter, answered = question
            self._look_at(adapter)
            answered.set()

    def _look_at(self, adapter: LoraAdapter) -> None:
        """Stop caching for an adapter whose files have changed since they were loaded."""
        before = self._loaded.get(adapter)
        if before is None or self.adapter_states(adapter) == before.states:
            return
        with self._lock:
            if self._loaded.get(adapter) is not before:
                return  # loaded again meanwhile
            self._loaded[adapter] = None
        logger.warning(
            "LoRA adapter %s: its files in %s have changed since it was loaded. Its KV is "
            "cached in the GPU only; unload the adapter and load it again",
            *(adapter.name, adapter.path),
        )

    def weights_changed(self) -> None:
        """Begin an epoch: chunks stored so far are no longer found, in any tier."""
        with self._lock:
            self._epoch = uuid.uuid4().hex
            self._is_gpu_stale = True
            self._try_to_empty_gpu()
            stale = self._is_gpu_stale
        if stale:
            logger.warning(
                "the model's weights were changed while vLLM's cache holds KV of the old weights. "
                "Until no request is running, or the cache is cleared (pause with clear_cache), "
                "KV of new prompts is neither loaded from the cache engine's tiers nor stored"
            )

    def adapter_loaded(
        self, adapter: LoraAdapter, before: FileStates | None, *, in_place: bool = False
    ) -> None:
        """Record that vLLM has loaded an adapter.

        ``before`` is the adapter's `adapter_states` before that. An adapter that vLLM had loaded
        is read again only with ``in_place``.
        """
        with self._lock:
            if adapter in self._loaded and not in_place:
                return
            loaded = self._read(adapter.path)
            if loaded is not None and loaded.states != before:
                loaded = None  # changed during the load: vLLM may have loaded either
            self._remember(adapter, loaded)

    def adapter_states(self, adapter: LoraAdapter) -> FileStates | None:
        """Return the state of an adapter's files now; None if they cannot be read."""
        try:
            files = self._locate(adapter.path)
            return files.states() if files else None
        except OSError:
            return None

    def of_request(self, adapter: LoraAdapter | None) -> KvVersion:
        """Return the version of the KV of a request that arrives now."""
        knows_files = adapter is None or self._knows_files(adapter)
        with self._lock:
            if self._is_gpu_stale or self._stale_adapters:
                self._try_to_empty_gpu()
            if self._is_gpu_stale:
                return UNCACHED
            if adapter is None:
                return KvVersion(self._epoch)
            name = (adapter.name, adapter.path)
            digest = self._digest(adapter)
            if digest is None or not knows_files or name in self._stale_adapters:
                return UNCACHED
            return KvVersion(self._epoch, digest)

    def is_current(self, version: KvVersion, adapter: LoraAdapter | None) -> bool:
        """Whether KV that is made now for a request has the version it had on arrival."""
        if adapter is not None and version.is_cached and not self._knows_files(adapter):
            return False
        with self._lock:
            if not version.is_cached or version.epoch != self._epoch or self._is_gpu_stale:
                return False
            return adapter is None or self._digest(adapter) == version.adapter

    @property
    def epoch(self) -> str:
        return self._epoch

    def of_name(self, lora: tuple[str, str] | None) -> KvVersion:
        """Return the present version for a prompt with an adapter (name, path), or without one.

        Reads the adapter's files if vLLM has not loaded it yet.
        """
        if lora is None:
            return KvVersion(self._epoch)
        with self._lock:
            digest = self._in_gpu.get(lora)
        if digest is None:  # read without the lock: vLLM's thread would wait for it
            loaded = self._read(lora[1])
            digest = loaded.digest if loaded else ""
        return KvVersion(self._epoch, digest) if digest else UNCACHED

    def _digest(self, adapter: LoraAdapter) -> str | None:
        """Return the digest of the files that vLLM loaded the adapter from; None if unknown."""
        if adapter not in self._loaded:
            # Nobody has announced it: vLLM's workers read its files in this step, too.
            self._remember(adapter, self._read(adapter.path))
        loaded = self._loaded[adapter]
        return None if loaded is None else loaded.digest

    def _remember(self, adapter: LoraAdapter, loaded: _Loaded | None) -> None:
        name = (adapter.name, adapter.path)
        self._loaded[adapter] = loaded
        while len(self._loaded) > _MOST_ADAPTERS:
            self._loaded.popitem(last=False)
        digest = loaded.digest if loaded else ""
        if self._in_gpu.setdefault(name, digest) != digest:
            self._in_gpu[name] = digest
            self._stale_adapters.add(name)
            self._try_to_empty_gpu()
        while len(self._in_gpu) > _MOST_ADAPTERS:
            del self._in_gpu[next(iter(self._in_gpu))]

    def _read(self, path: str) -> _Loaded | None:
        try:
            files = self._locate(path)
            if files is None:
                raise FileNotFoundError("its files were not found")
            states = files.states()
            digest = files.digest()
            return _Loaded(states, digest) if files.states() == states else None
        except OSError as error:
            logger.warning("LoRA adapter %s: %s; its KV is cached in the GPU only", path, error)
            return None

    def _try_to_empty_gpu(self) -> None:
        if self.empty_gpu():
            self._is_gpu_stale = False
            self._stale_adapters.clear()
