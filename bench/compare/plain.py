"""No engine at all as a contender: what the machine itself gives the same bytes.

    python -m bench.compare.plain WORKLOAD

One `memcpy` per chunk between two buffers, one buffered write or read per file
of a chunk, one thread, nothing checked.
"""

import hashlib
from pathlib import Path

import numpy as np

from bench.compare.rounds import Workload, serve


class PlainContender:
    """Two arrays ``[chunks, chunk_bytes]`` and a file per chunk."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        shape = (workload.chunks, workload.chunk_bytes)
        self._kv = np.zeros(shape, dtype=np.uint8)
        self._pool = np.zeros(shape, dtype=np.uint8)
        self._slots: dict[bytes, int] = {}
        self._keys: list[bytes] = []
        self._digest = b""

    @property
    def includes(self) -> dict[str, str]:
        """What a figure of this engine contains that another's may not."""
        return {
            "checksum": "none",
            "copy": "one memcpy per chunk",
            "disk": "buffered, one thread, written under the final name",
        }

    def begin(self, number: int) -> None:
        """Have a new prompt: fresh keys, fresh bytes in the KV cache."""
        words = np.random.default_rng(number).integers(
            0, 1 << 63, size=self._kv.nbytes // 8, dtype=np.uint64
        )
        self._kv.reshape(-1).view(np.uint64)[:] = words
        self._digest = self._kv_digest()
        self._keys = [
            hashlib.sha256(f"{number} {i}".encode()).digest() for i in range(len(self._kv))
        ]

    def store(self) -> None:
        """Copy chunk after chunk."""
        for slot, key in enumerate(self._keys):
            self._pool[slot] = self._kv[slot]
            self._slots[key] = slot

    def finish_put(self) -> None:
        """Write file after file."""
        for slot in range(len(self._keys)):
            with self._path(slot).open("wb", buffering=0) as file:
                file.write(self._pool[slot])

    def lookup(self) -> int:
        """Ask a dictionary."""
        return sum(key in self._slots for key in self._keys)

    def load(self) -> None:
        """Copy chunk after chunk."""
        for key in self._keys:
            slot = self._slots[key]
            self._kv[slot] = self._pool[slot]

    def empty_cpu(self) -> None:
        """Forget where the chunks were, and what they were."""
        self._slots.clear()
        self._pool.fill(0)

    def get(self) -> None:
        """Read file after file."""
        for slot, key in enumerate(self._keys):
            with self._path(slot).open("rb", buffering=0) as file:
                file.readinto(self._pool[slot])
            self._slots[key] = slot

    def blank(self) -> None:
        """Overwrite the KV cache with zeros."""
        self._kv.fill(0)

    def is_intact(self) -> bool:
        """Whether the KV cache holds the prompt's bytes."""
        return self._kv_digest() == self._digest

    def forget(self) -> None:
        """Delete the files."""
        self._slots.clear()
        for slot in range(len(self._keys)):
            self._path(slot).unlink()

    def close(self) -> None:
        """Nothing is left."""

    def _path(self, slot: int) -> Path:
        return self._workload.directory / f"{slot}.bin"

    def _kv_digest(self) -> bytes:
        return hashlib.blake2b(self._kv.data).digest()


if __name__ == "__main__":
    serve(PlainContender)
