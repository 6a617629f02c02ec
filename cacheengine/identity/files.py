"""Weights told apart by their files: a hub's snapshot by its revision, others by what is there."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_SMALL_FILE_BYTES: Final = 1 << 20
_INDEX_FILE_BYTES: Final = 64 << 20
"""Configuration and the index of a model's weights are JSON, and may be longer."""
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096

FileStates = tuple[tuple[str, int, int, int, int], ...]
"""Name, size, inode, times of change of content and of anything else, of each file."""


@dataclass(frozen=True)
class WeightFiles:
    """The files of a model or an adapter: those directly in a directory, or one file."""

    path: Path

    @property
    def hub_name(self) -> str | None:
        """The model's name on its hub, if this is a snapshot in a hub's cache."""
        repository, folder = self.path.parent.parent.name, self.path.parent.name
        if folder != "snapshots" or not repository.startswith("models--"):
            return None
        return repository.removeprefix("models--").replace("--", "/")

    def digest(self) -> str:
        """Return a text that changes when the files do. Raises OSError.

        A hub's snapshot has its revision, and counts what is no link into the hub's store: the
        same on every machine. Of other files count name and size; of the small ones the
        content; of the large ones (weights) the time of modification and samples. Copying such
        a model may change it, and then costs a cold cache; replacing one in place must.
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
        """Return what is different after any change of the files; quick. Raises OSError."""
        states = ((path.name, path.stat()) for path in self._files())
        return tuple(
            (name, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
            for name, stat in states
        )

    def changed_since(self, time_s: float) -> bool:
        """Whether a file was changed or put there since. Raises OSError.

        False for a hub's snapshot: what another revision has is in another directory.
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
