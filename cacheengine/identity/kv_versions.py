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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

_LARGE_FILE_BYTES: Final = 1 << 20
"""The digest of a file of this size is kept for the next start."""
_PART_BYTES: Final = 8 << 20
_HASH_THREADS: Final = 4
_SETTLED_NS: Final = 2_000_000_000
"""A file that was changed more recently may change again without a new time of change."""
_MOST_KEPT: Final = 4096
_MOST_KEPT_BYTES: Final = 1 << 20

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
        if self.hub_name is None:
            return [*self._files()]
        return [path for path in self._files() if not _is_of_hub(path)]

    def _files(self) -> Iterator[Path]:
        if self.path.is_file():
            yield self.path
            return
        for path in sorted(self.path.iterdir()):
            if path.is_file():
                yield path


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
    digest: Any = xxhash.xxh3_128() if algorithm == "xxh3_128" else hashlib.new(algorithm)
    part = memoryview(bytearray(min(_PART_BYTES, before.st_size + 1)))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(part):
            digest.update(part[:length])
        after = os.fstat(file.fileno())
    if is_kept and (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns):
        _keep_digest(name, digest.hexdigest())
    return str(digest.hexdigest())


def _digests_file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache) / "warmroute" / "weights.json"


def _kept_digests() -> dict[str, str]:
    """Return the digests that earlier processes have kept, the oldest first."""
    try:
        text = _digests_file().read_bytes()[: _MOST_KEPT_BYTES + 1]
        kept = json.loads(text)
    except (OSError, ValueError):
        return {}
    is_sound = isinstance(kept, dict) and all(isinstance(each, str) for each in kept.values())
    return kept if is_sound else {}


def _keep_digest(name: str, digest: str) -> None:
    path = _digests_file()
    kept = [*_kept_digests().items(), (name, digest)][-_MOST_KEPT:]
    draft = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    with contextlib.suppress(OSError, RuntimeError):  # then the next start reads the file again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_text(json.dumps(dict(kept)))
        draft.replace(path)


logger = logging.getLogger("vllm.warmroute")

_KEY64_BYTES: Final = 8
_MOST_ADAPTERS: Final = 65_536
_CHECK_S: Final = 1.0
_LEAST_CHECK_S: Final = 0.05
_CHECK_SHARE: Final = 0.05
"""The most of one processor that checks of many adapters' files may take."""


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
    files: WeightFiles
    states: FileStates
    digest: str


class KvVersions:
    """The versions of one replica's KV over time. Thread-safe.

    ``locate`` returns the files of an adapter, given its path; None if it cannot find them. A
    thread looks at the files of loaded adapters (`start_checking`): the scheduler must not wait for
    a file system.
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
        self._loaded: OrderedDict[tuple[int, str, str], _Loaded | None] = OrderedDict()
        # vLLM's thread loads and uses adapters; the agent's thread looks them up by name.
        self._lock = threading.Lock()
        self._is_wanted = threading.Event()
        self._stopped = threading.Event()
        self.empty_gpu: Callable[[], bool] = lambda: True
        """Clears vLLM's own cache; returns False if that is in use."""

    def start_checking(self) -> None:
        """Call `check_adapters` on a thread until `stop_checking`.

        That is once a second, and when a request with an adapter arrives: before its first chunk is
        computed, as a rule.
        """
        threading.Thread(target=self._check, name="kv-adapters", daemon=True).start()

    def stop_checking(self) -> None:
        """End that; a thread that waits for a file system is not waited for."""
        self._stopped.set()
        self._is_wanted.set()

    def _check(self) -> None:
        took_s = 0.0
        while not self._stopped.wait(max(_LEAST_CHECK_S, took_s / _CHECK_SHARE)):
            self._is_wanted.wait(_CHECK_S)
            self._is_wanted.clear()
            began_s = time.monotonic()
            self.check_adapters()
            took_s = time.monotonic() - began_s

    def check_adapters(self) -> None:
        """Stop caching for adapters whose files have changed since they were loaded.

        vLLM reads the files again after it has dropped an adapter to free memory.
        """
        with self._lock:
            loaded = [each for each in self._loaded.items() if each[1] is not None]
        for load, before in loaded:
            _, name, path = load
            if before is None or self._states(path) == before.states:
                continue
            with self._lock:
                if self._loaded.get(load) is not before:
                    continue
                self._loaded[load] = None
            logger.warning(
                "LoRA adapter %s: its files in %s have changed since it was loaded. Its KV is "
                "cached in the GPU only; unload the adapter and load it again",
                *(name, path),
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
            if (adapter.load_id, adapter.name, adapter.path) in self._loaded and not in_place:
                return
            loaded = self._read(adapter.path)
            if loaded is not None and loaded.states != before:
                loaded = None  # changed during the load: vLLM may have loaded either
            self._remember(adapter, loaded)

    def adapter_states(self, adapter: LoraAdapter) -> FileStates | None:
        """Return the state of an adapter's files now; None if they cannot be read."""
        return self._states(adapter.path)

    def _states(self, path: str) -> FileStates | None:
        try:
            files = self._locate(path)
            return files.states() if files else None
        except OSError:
            return None

    def of_request(self, adapter: LoraAdapter | None) -> KvVersion:
        """Return the version of the KV of a request that arrives now."""
        with self._lock:
            if self._is_gpu_stale or self._stale_adapters:
                self._try_to_empty_gpu()
            if self._is_gpu_stale:
                return UNCACHED
            if adapter is None:
                return KvVersion(self._epoch)
            name = (adapter.name, adapter.path)
            digest = self._digest(adapter)
            self._is_wanted.set()
            if digest is None or name in self._stale_adapters:
                return UNCACHED
            return KvVersion(self._epoch, digest)

    def is_current(self, version: KvVersion, adapter: LoraAdapter | None) -> bool:
        """Whether KV that is made now for a request has the version it had on arrival."""
        with self._lock:
            if not version.is_cached or version.epoch != self._epoch or self._is_gpu_stale:
                return False
            return adapter is None or self._digest(adapter) == version.adapter

    @property
    def epoch(self) -> str:
        """The present epoch."""
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
        load = (adapter.load_id, adapter.name, adapter.path)
        if load not in self._loaded:
            # Nobody has announced it: vLLM's workers read its files in this step, too.
            self._remember(adapter, self._read(adapter.path))
        loaded = self._loaded[load]
        return None if loaded is None else loaded.digest

    def _remember(self, adapter: LoraAdapter, loaded: _Loaded | None) -> None:
        name = (adapter.name, adapter.path)
        self._loaded[adapter.load_id, *name] = loaded
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
            return _Loaded(files, states, digest) if files.states() == states else None
        except OSError as error:
            logger.warning("LoRA adapter %s: %s; its KV is cached in the GPU only", path, error)
            return None

    def _try_to_empty_gpu(self) -> None:
        if self.empty_gpu():
            self._is_gpu_stale = False
            self._stale_adapters.clear()
