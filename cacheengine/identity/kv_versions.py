"""Which weights a request's KV belongs to.

vLLM's block hashes identify an adapter by its name and path, and know nothing of weights that
change while vLLM runs. A chunk's key in our tiers covers both: adapters by the content of their
files, weights updated in place by an epoch.
"""

import hashlib
import logging
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SMALL_FILE_BYTES: Final = 1 << 20
_INDEX_FILE_BYTES: Final = 64 << 20
"""JSON files (the configuration, the index of a model's weights) may be longer."""
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096

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
        """Return a text that changes when the files change. Raises OSError.

        For a hub's snapshot it is the revision, plus a digest of files that are not links into
        the hub's store: the same on every machine. For other files it is a digest of names and
        sizes, of the content of small files, and of the modification time and samples of large
        files (weights). Copying such a model may change the text, which costs a cold cache.
        Replacing a model in place must change it.
        """
        digest = hashlib.sha256()
        for path in self._files():
            if self.hub_name is None or path.resolve().parent.name != "blobs":
                _add_file(digest, path)
        if self.hub_name is None:
            return digest.hexdigest()[:32]
        own = "" if digest.digest() == hashlib.sha256().digest() else f"+{digest.hexdigest()[:32]}"
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

        False for a hub's snapshot: another revision is in another directory.
        """
        if self.hub_name is not None:
            return False
        return any(path.stat().st_ctime > time_s for path in self._files())

    def _files(self) -> Iterator[Path]:
        if self.path.is_file():
            yield self.path
            return
        for path in sorted(self.path.iterdir()):
            if path.is_file():
                yield path


def _add_file(digest: "hashlib._Hash", path: Path) -> None:
    stat = path.stat()
    digest.update(f"{path.name}\0{stat.st_size}\0".encode())
    is_index = path.suffix == ".json" and stat.st_size <= _INDEX_FILE_BYTES
    if is_index or stat.st_size <= _SMALL_FILE_BYTES:
        digest.update(path.read_bytes())
        return
    digest.update(str(stat.st_mtime_ns).encode())
    with path.open("rb", buffering=0) as file:
        for sample in range(_SAMPLES):
            offset = sample * (stat.st_size - _SAMPLE_BYTES) // (_SAMPLES - 1)
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))


logger = logging.getLogger("vllm.warmroute")

_KEY64_BYTES: Final = 8
_MOST_ADAPTERS: Final = 65_536


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

    ``locate`` returns the files of an adapter, given its path; None if it cannot find them.
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
        self.empty_gpu: Callable[[], bool] = lambda: True
        """Clears vLLM's own cache; returns False if that is in use."""

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
        try:
            files = self._locate(adapter.path)
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
            self._remember(adapter, self._read(adapter.path))
        loaded = self._loaded[load]
        if loaded is None:
            return None
        # vLLM reads the files again after it has dropped the adapter to free memory.
        if self.adapter_states(adapter) != loaded.states:
            logger.warning(
                "LoRA adapter %s: its files in %s have changed since it was loaded. Its KV is "
                "cached in the GPU only; unload the adapter and load it again",
                *(adapter.name, adapter.path),
            )
            self._loaded[load] = None
            return None
        return loaded.digest

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
