"""The serde that changes nothing."""

from collections.abc import Sequence

from cacheengine.tiers.serde.base import Part, Serde, SerdeError


class NaiveSerde(Serde):
    """Bytes as they are: nothing is computed, and nothing copied to encode."""

    name = "naive"
    code = 0
    is_exact = True
    is_identity = True

    def encode(self, payload: memoryview) -> Sequence[Part]:
        """Return the payload itself."""
        return (payload,)

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        """Copy."""
        if len(encoded) != len(into):
            raise SerdeError(f"{len(encoded)} bytes for a chunk of {len(into)}")
        into[:] = encoded
