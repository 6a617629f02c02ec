"""The keys of a request's chunks: vLLM's, and in them which weights make its KV."""

from collections.abc import Iterable
from dataclasses import dataclass

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_block_hash

from cacheengine.identity import Adapter, KvVersion, KvVersions


@dataclass(frozen=True, slots=True)
class _Weights:
    """Which weights make a request's KV; for all its life."""

    adapter: Adapter | None
    version: KvVersion


_LOADED_AT_START = _Weights(None, KvVersion())


class RequestKeys:
    """Each request's keys in the engine, from vLLM's, and whether they may be used now."""

    def __init__(self, versions: KvVersions) -> None:
        self.versions = versions
        self._arriving: dict[str, Adapter | None] = {}

    def expect(self, req_id: str, adapter: Adapter | None) -> None:
        """Note which adapter a request uses that is about to `begin`."""
        self._arriving[req_id] = adapter

    def begin(self, req_context: ReqContext) -> None:
        """Note which weights make the KV of a new request."""
        adapter = self._arriving.pop(req_context.req_id, None)
        req_context.set_state(_Weights(adapter, self.versions.of_request(adapter)))

    def may_load(self, req_context: ReqContext) -> bool:
        """Whether chunks of its weights may be found."""
        version = _weights(req_context).version
        return version.is_cached and version.epoch == self.versions.epoch

    def may_store(self, req_context: ReqContext) -> bool:
        """Whether what vLLM computes for it now is of the weights that its keys say."""
        weights = _weights(req_context)
        return self.versions.is_current(weights.version, weights.adapter)

    def stored_key(self, key: OffloadKey, req_context: ReqContext) -> bytes:
        """Return the key of one of its chunks."""
        return _weights(req_context).version.stored_key(get_offload_block_hash(key))

    def stored(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> list[bytes]:
        """Return the keys of some of its chunks."""
        stored_key = _weights(req_context).version.stored_key
        return [stored_key(get_offload_block_hash(key)) for key in keys]


def _weights(req_context: ReqContext) -> _Weights:
    return req_context.get_state(_Weights) or _LOADED_AT_START
