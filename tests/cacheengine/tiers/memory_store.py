"""A blob store that is a dictionary, and fails when told."""

from collections.abc import Sequence

from cacheengine.tiers.store import Blob, BlobStore, ReadTarget, StoreError


class MemoryStore(BlobStore):
    """Keeps blobs; while ``error`` is set, every call raises it."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.error: StoreError | None = None
        self.calls = 0
        self.is_closed = False

    def _begin(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._begin()
        return [name in self.blobs for name in names]

    def get_many(self, targets: Sequence[ReadTarget]) -> list[int | None]:
        self._begin()
        return [self._get(target) for target in targets]

    def _get(self, target: ReadTarget) -> int | None:
        blob = self.blobs.get(target.name)
        if blob is None:
            return None
        rest = blob
        for part in target.parts:
            piece = rest[: len(part)]
            part[: len(piece)] = piece
            rest = rest[len(piece) :]
        return len(blob)

    def put_many(self, blobs: Sequence[Blob]) -> list[bool]:
        self._begin()
        self.blobs.update({blob.name: b"".join(blob.parts) for blob in blobs})
        return [True] * len(blobs)

    def remove(self, names: Sequence[str]) -> None:
        self._begin()
        for name in names:
            self.blobs.pop(name, None)

    def remove_all(self, prefix: str) -> int:
        self._begin()
        names = [name for name in self.blobs if name.startswith(prefix)]
        for name in names:
            del self.blobs[name]
        return len(names)

    def close(self) -> None:
        self.is_closed = True
