"""Noticing that vLLM's weights, or an adapter's, are replaced while it runs.

vLLM tells a connector of neither. Both reach its workers by two methods of its engine core,
which runs in the process of the manager and does one thing after the other.
"""

import dataclasses
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx
from vllm.v1.request import Request

from cacheengine.connector.manager import ComputeRate, WarmrouteManager
from cacheengine.connector.model_identity import IDENTITY_KEY, identify
from cacheengine.identity import LoraAdapter
from cacheengine.settings import load_engine_config

_HARMLESS: Final = frozenset(
    {
        *("compute_weight_checksums", "init_weight_transfer_engine"),
        *("shutdown_weight_transfer_engine", "save_sharded_state", "save_tensorized_model"),
        *("profile", "check_health", "synchronize_device", "report_device_id"),
        *("get_supported_tasks", "get_kv_cache_spec", "list_loras"),
    }
)
"""Calls to the workers that leave the weights as they are; of all others, whose code may be a
user's own, that is not known."""

_LEVEL_THAT_KEEPS_WEIGHTS: Final = 1


class WeightWatch:
    """Tells a manager of changed weights, from now on to `end`.

    Wraps methods of vLLM's engine core; raises AttributeError in a vLLM that has none of them.
    """

    def __init__(self, manager: WarmrouteManager) -> None:
        self._manager = manager
        self._is_on = True
        self._wrap("collective_rpc", self._collective_rpc)
        self._wrap("add_lora", self._add_lora)
        self._wrap("sleep", self._sleep)

    def end(self) -> None:
        """Tell no more; the methods only pass calls on."""
        self._is_on = False

    def _wrap(self, name: str, watched: Callable[..., Any]) -> None:
        original = getattr(EngineCore, name)

        # vLLM reads from its signature what the arguments are.
        @wraps(original)
        def method(core: EngineCore, *args: Any, **kwargs: Any) -> Any:
            call = watched if self._is_on else _plainly
            return call(original, core, *args, **kwargs)

        setattr(EngineCore, name, method)

    def _collective_rpc(
        self, original: Callable[..., Any], core: EngineCore, method: Any, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            return original(core, method, *args, **kwargs)
        finally:
            # One that failed may have changed some of them.
            if not (isinstance(method, str) and method in _HARMLESS):
                self._manager.weights_changed()

    def _add_lora(
        self, original: Callable[..., Any], core: EngineCore, lora_request: LoRARequest
    ) -> Any:
        adapter = LoraAdapter(
            lora_request.lora_name, lora_request.lora_path, lora_request.lora_int_id
        )
        before = self._manager.keys.versions.adapter_states(adapter)
        added = original(core, lora_request)
        self._manager.keys.versions.adapter_loaded(
            adapter, before, in_place=lora_request.load_inplace
        )
        return added

    def _sleep(
        self, original: Callable[..., Any], core: EngineCore, *args: Any, **kwargs: Any
    ) -> Any:
        level = args[0] if args else kwargs.get("level", 1)
        try:
            return original(core, *args, **kwargs)
        finally:
            # Deeper sleep drops the weights; which are loaded after it is not known.
            if level > _LEVEL_THAT_KEEPS_WEIGHTS:
                self._manager.weights_changed()


def _plainly(original: Callable[..., Any], core: EngineCore, *args: Any, **kwargs: Any) -> Any:
    return original(core, *args, **kwargs)


# TODO of cacheengine.connector.connector: What vLLM loads: its own offloading connector, which tells the engine what it must know.
#
# Named to vLLM by ``--kv-transfer-config`` (see ``cacheengine.launch``): ``{"kv_connector":
# "WarmrouteConnector", "kv_connector_module_path": "cacheengine.connector.connector",
# "kv_role": "kv_both"}``. The rest comes from LMCache's configuration and from vLLM's own.
#
# vLLM's offloading interface says of a model no more than its name, of a request not which
# adapter it uses, and of an update of the weights nothing: that is added here. And vLLM offers
# each chunk once; what found no room is offered again.


class WarmrouteConnector(OffloadingConnector):  # type: ignore[misc]
    """Loads the engine, tells it of models, adapters and weights, and offers chunks again."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        extra_config.update(
            spec_name="WarmrouteSpec",
            spec_module_path="cacheengine.connector.spec",
        )
        if "blocks_per_chunk" not in extra_config:
            extra_config.setdefault("block_size", load_engine_config().chunk_size)
        extra_config[IDENTITY_KEY] = dataclasses.asdict(identify(vllm_config, kv_cache_config))
        super().__init__(vllm_config, role, kv_cache_config)
        self._rate = ComputeRate()
        self._watch: WeightWatch | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._manager.keys.versions.empty_gpu = self._empty_gpu
            self._watch = WeightWatch(self._manager)

    @property
    def _manager(self) -> WarmrouteManager:
        manager = self.scheduler.manager
        assert isinstance(manager, WarmrouteManager)
        return manager

    def on_new_request(self, request: Request) -> None:
        """Note which adapter the request uses."""
        self._manager.keys.expect(request.request_id, adapter_of(request.lora_request))
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look up a prompt, but one that waits only by what it waits for."""
        compute_s = self._rate.seconds(request.num_tokens - num_computed_tokens)
        if self._manager.waits.must_wait(request.request_id, num_computed_tokens, compute_s):
            return None, False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return matched

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Do as vLLM does, then set each request back to the first chunk that was refused."""
        scheduled = scheduler_output.num_scheduled_tokens
        self._rate.begin_step(sum(scheduled.values()) - len(scheduled), time.monotonic())
        offers = self._manager.stores.offers
        offers.hurry(scheduler_output.finished_req_ids or ())
        metadata = super().build_connector_meta(scheduler_output)
        for req_id, first in offers.take_news().items():
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

    def _empty_gpu(self) -> bool:
        """Have vLLM forget the KV in its own cache, unless requests use some of it."""
        cache: Any = self._kv_cache_manager
        # Asked first: a reset that cannot be is a warning in vLLM's log.
        return cache is not None and cache.usage == 0 and bool(cache.reset_prefix_cache())

    def shutdown(self) -> None:
        """End the watch, then the engine."""
        if self._watch is not None:
            self._watch.end()
        super().shutdown()


def adapter_of(lora: LoRARequest | None) -> LoraAdapter | None:
    """Return vLLM's adapter as the engine names it."""
    return LoraAdapter(lora.lora_name, lora.lora_path, lora.lora_int_id) if lora else None
