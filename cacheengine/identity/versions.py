"""Which weights a request's KV is of: adapters by their files, in-place updates by an epoch.

vLLM's block hashes know an adapter by its name and path, and nothing of weights that change
while it runs. A chunk's key in our tiers knows both.
"""

import hashlib
import logging
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cacheengine.identity.files import FileStates, WeightFiles

logger = logging.getLogger("vllm.warmroute")

_KEY64_BYTES: Final = 8
_MOST_ADAPTERS: Final = 65_536


@dataclass(frozen=True, slots=True)
class KvVersion:
    """Which weights made the KV, beside the model's as it was loaded."""

    epoch: str = ""
    """"" for the weights loaded at the start, else unique to one update of one replica."""
    adapter: str = ""
    """Digest of the adapter's files, "" without one."""
    is_cached: bool = True
    """False: it is not known well enough to be stored, nor anything loaded for it."""

    def stored_key(self, key: bytes) -> bytes:
        """Return a chunk's key in the tiers from vLLM's; their low 64 bits are the same.

        By those routers know chunks, which learn them from vLLM's hashes.
        """
        if not self.epoch and not self.adapter:
            return key
        version = f"{self.epoch}\0{self.adapter}\0".encode()
        digest = hashlib.sha256(version + key).digest()
        return digest[: len(key) - _KEY64_BYTES] + key[-_KEY64_BYTES:]


UNCACHED: Final = KvVersion(is_cached=False)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as vLLM names it."""

    name: str
    path: str
    load_id: int
    """vLLM's number of it: another after each load under a name that was unloaded."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    files: WeightFiles
    states: FileStates
    digest: str


class KvVersions:
    """The versions of one replica's KV, from one request to the next. Thread-safe.

    ``locate`` finds the files of an adapter by its path, None if it cannot.
    """

    def __init__(self, locate: Callable[[str], WeightFiles | None] | None = None) -> None:
        self._locate = locate or (lambda path: WeightFiles(Path(path)))
        self._epoch = ""
        # Chunks of these are not to be found, nor stored, as vLLM may still have KV in its own
        # cache that earlier weights made: it would be offered as that of the present ones.
        self._is_gpu_stale = False
        self._stale_adapters: set[tuple[str, str]] = set()
        # vLLM's cache may hold KV of what is in here.
        self._in_gpu: dict[tuple[str, str], str] = {}
        self._loaded: OrderedDict[tuple[int, str, str], _Loaded | None] = OrderedDict()
        # Adapters are loaded and asked for by vLLM's thread, named by the agent's.
        self._lock = threading.Lock()
        self.empty_gpu: Callable[[], bool] = lambda: True
        """Has vLLM forget what its own cache holds; False if it is in use and cannot."""

    def weights_changed(self) -> None:
        """Begin an epoch: nothing stored so far is found any more, in any tier."""
        with self._lock:
            self._epoch = uuid.uuid4().hex
            self._is_gpu_stale = True
            self._try_to_empty_gpu()
            stale = self._is_gpu_stale
        if stale:
            logger.warning(
                "the model's weights were changed while vLLM keeps KV that the old ones made. "
                "Until no request is running, or its cache is cleared (pause with clear_cache), "
                "new prompts are neither loaded from the cache engine's tiers nor stored there"
            )

    def adapter_loaded(
        self, adapter: Adapter, before: FileStates | None, *, in_place: bool = False
    ) -> None:
        """Note that vLLM has loaded an adapter; ``before``: its `adapter_states` before that.

        One that it had is loaded again only ``in_place``.
        """
        with self._lock:
            if (adapter.load_id, adapter.name, adapter.path) in self._loaded and not in_place:
                return
            loaded = self._read(adapter.path)
            if loaded is not None and loaded.states != before:
                loaded = None  # changed meanwhile: either may be what was loaded
            self._remember(adapter, loaded)

    def adapter_states(self, adapter: Adapter) -> FileStates | None:
        """Return the state of an adapter's files now; None where they cannot be read."""
        try:
            files = self._locate(adapter.path)
            return files.states() if files else None
        except OSError:
            return None

    def of_request(self, adapter: Adapter | None) -> KvVersion:
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

    def is_current(self, version: KvVersion, adapter: Adapter | None) -> bool:
        """Whether KV made now for a request is still of the version it arrived with."""
        with self._lock:
            if not version.is_cached or version.epoch != self._epoch or self._is_gpu_stale:
                return False
            return adapter is None or self._digest(adapter) == version.adapter

    @property
    def epoch(self) -> str:
        """The epoch of requests that arrive now."""
        return self._epoch

    def of_name(self, lora: tuple[str, str] | None) -> KvVersion:
        """Return the version that a base prompt, or one with an adapter (name, path), has now.

        Reads the adapter's files if vLLM has not loaded it yet.
        """
        if lora is None:
            return KvVersion(self._epoch)
        with self._lock:
            digest = self._in_gpu.get(lora)
        if digest is None:  # read without the lock, for which vLLM's thread would wait
            loaded = self._read(lora[1])
            digest = loaded.digest if loaded else ""
        return KvVersion(self._epoch, digest) if digest else UNCACHED

    def _digest(self, adapter: Adapter) -> str | None:
        """Return which files vLLM made the adapter of; None: not known."""
        load = (adapter.load_id, adapter.name, adapter.path)
        if load not in self._loaded:
            self._remember(adapter, self._read(adapter.path))
        loaded = self._loaded[load]
        if loaded is None:
            return None
        # vLLM reads them again whenever it has dropped the adapter for want of room.
        if self.adapter_states(adapter) != loaded.states:
            logger.warning(
                "LoRA adapter %s: its files in %s have changed since it was loaded. Its KV is not "
                "cached below the GPU until it is unloaded and loaded again",
                *(adapter.name, adapter.path),
            )
            self._loaded[load] = None
            return None
        return loaded.digest

    def _remember(self, adapter: Adapter, loaded: _Loaded | None) -> None:
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
                raise FileNotFoundError("its files are not found")
            states = files.states()
            digest = files.digest()
            return _Loaded(files, states, digest) if files.states() == states else None
        except OSError as error:
            logger.warning("LoRA adapter %s: %s; its KV stays in vLLM's own cache", path, error)
            return None

    def _try_to_empty_gpu(self) -> None:
        if self.empty_gpu():
            self._is_gpu_stale = False
            self._stale_adapters.clear()
