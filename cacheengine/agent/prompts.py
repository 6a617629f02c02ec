"""From what a call names to the keys of chunks."""

from typing import Final

from cacheengine import wire
from cacheengine.agent.answers import BadCallError
from cacheengine.keys import HashScheme, chunk_keys, prompt_extra_keys

MAX_CHUNKS: Final = 65_536
"""Most chunks of one call that moves or changes them."""


class Prompts:
    """Computes keys as the replica's vLLM does."""

    def __init__(self, identity: wire.ReplicaIdentity) -> None:
        self._scheme = HashScheme(identity.hash_algorithm, identity.hash_seed)
        self._block_tokens = identity.block_tokens
        self._blocks_per_chunk = identity.chunk_tokens // identity.block_tokens

    def keys_of(self, call: wire.ChunkSelection) -> list[bytes]:
        """Return the keys of the chunks that a call names.

        Raises `BadCallError` unless it names them in exactly one way.
        """
        if (call.tokens is None) == (call.keys is None):
            raise BadCallError("give either 'tokens' or 'keys', one of them")
        if call.keys is not None:
            return digests(call.keys)
        extra, first = prompt_extra_keys(cache_salt=call.cache_salt)
        chain = self._scheme.chain(
            call.tokens or [], self._block_tokens, extra_keys=extra, first_extra_keys=first
        )
        return chunk_keys(chain, self._blocks_per_chunk)

    def some_keys_of(self, call: wire.ChunkSelection) -> list[bytes]:
        """Return `keys_of`, each key once; raise `BadCallError` for too many, or none of ours."""
        keys = list(dict.fromkeys(self.keys_of(call)))
        if len(keys) > MAX_CHUNKS:
            raise BadCallError(f"{len(keys)} chunks; one call may name {MAX_CHUNKS}")
        size = len(self._scheme.root)
        if any(len(key) != size for key in keys):
            raise BadCallError(f"'keys' of this replica are digests of {size} bytes")
        return keys


def digests(keys: list[str]) -> list[bytes]:
    """Return keys given in hex; raise `BadCallError` for anything else."""
    try:
        return [bytes.fromhex(key) for key in keys]
    except ValueError:
        raise BadCallError("'keys' are whole digests in hex, two digits a byte") from None
