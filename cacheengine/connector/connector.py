"""vLLM's offloading connector, which offers again what found no room.

Named to vLLM by ``--kv-transfer-config`` with ``kv_connector_module_path``. With vLLM's own
``OffloadingConnector`` the engine works too, but a chunk that found no room once is not offered
again before another request has it.
"""

from typing import Any, Final

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from cacheengine.connector.manager import WarmrouteManager

CONNECTOR_NAME: Final = "WarmrouteConnector"


class WarmrouteConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's own but for the end of a scheduler's step."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._manager: WarmrouteManager | None = None
        if self.connector_scheduler is not None:
            manager = self.connector_scheduler.manager
            if not isinstance(manager, WarmrouteManager):
                raise ValueError(
                    f"spec_name: {CONNECTOR_NAME} needs WarmrouteSpec "
                    "(spec_module_path cacheengine.connector.spec)"
                )
            self._manager = manager
            manager.stores.are_offered_again = True

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Do as vLLM does, then set each request back to the first chunk that was refused."""
        assert self._manager is not None
        self._manager.stores.offers.hurry(scheduler_output.finished_req_ids or ())
        metadata = super().build_connector_meta(scheduler_output)
        for req_id, first in self._manager.stores.offers.take_news().items():
            self._offer_again(req_id, first)
        return metadata

    def _offer_again(self, req_id: str, first: OffloadKey) -> None:
        """Set a request back in the same step, as vLLM leaves one of which nothing was taken.

        Later would be too late for a window's blocks: vLLM looks after those
        that are still to be offered, and may have given away the others.
        """
        status: Any = self.scheduler._req_status.get(req_id)
        if status is None:
            return  # it has ended: this was its last offer
        groups = zip(self.scheduler.config.kv_group_configs, status.group_states, strict=True)
        for config, state in groups:
            end_tokens = status.req_context.get_offload_key_position(first)
            if config.group_idx == get_offload_group_idx(first) and end_tokens is not None:
                chunk_idx = end_tokens // config.tokens_per_chunk - 1
                state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, chunk_idx)
