"""The KV connector that vLLM loads: its own offloading connector, with what the engine also needs.

``--kv-transfer-config`` names it (see ``cacheengine.launch``): ``{"kv_connector":
"WarmrouteConnector", "kv_connector_module_path": "cacheengine.connector.connector",
"kv_role": "kv_both"}``. All other settings come from LMCache's configuration and from vLLM's own.

vLLM's offloading interface knows only the model's name. It does not report a request's adapter,
an update of the weights or the time of a step, and it offers each chunk for storing only once.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypedDict

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from cacheengine.connector.manager import WarmrouteManager
from cacheengine.connector.model_identity import IDENTITY_KEY, identify
from cacheengine.identity.kv_versions import LoraAdapter
from cacheengine.settings.lmcache_file import load_engine_config
from cacheengine.step_meter import StepMeter

_HARMLESS: Final = frozenset(
    {
        *("compute_weight_checksums", "init_weight_transfer_engine"),
        *("shutdown_weight_transfer_engine", "save_sharded_state", "save_tensorized_model"),
        *("profile", "check_health", "synchronize_device", "report_device_id"),
        *("get_supported_tasks", "get_kv_cache_spec", "list_loras"),
    }
)
"""Worker methods that do not change the weights. Any other method may: it can be a user's code."""

_SLEEP_LEVEL_KEEPING_WEIGHTS: Final = 1
_MOST_STEPS_UNDER_WAY: Final = 16
"""Steps that were scheduled and have not ended: vLLM schedules a few ahead at most."""


class StepContents(TypedDict):
    """The amounts that `StepMeter.add` takes."""

    prefill_tokens: int
    attended: float
    decoding: int


class MethodWatch:
    """Wraps methods of vLLM's classes. After `end` they only call the originals."""

    _is_on = True

    def end(self) -> None:
        """Stop watching."""
        self._is_on = False

    def _wrap(self, owner: type, name: str, watched: Callable[..., Any]) -> None:
        """Have ``watched`` called instead of a method: with the original, then its arguments.

        Raises AttributeError in a vLLM version that does not have the method.
        """
        original = getattr(owner, name)

        # vLLM reads the method's signature to decode the arguments.
        @wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return watched(original, *args, **kwargs) if self._is_on else original(*args, **kwargs)

        setattr(owner, name, method)


class WeightWatch(MethodWatch):
    """Reports changes of the model's or an adapter's weights to the manager.

    vLLM does not report them to a connector. They reach the workers through methods of vLLM's
    engine core, which runs in the manager's process, one call at a time.
    """

    def __init__(self, manager: WarmrouteManager) -> None:
        self._manager = manager
        self._wrap(EngineCore, "collective_rpc", self._collective_rpc)
        self._wrap(EngineCore, "add_lora", self._add_lora)
        self._wrap(EngineCore, "sleep", self._sleep)

    def _collective_rpc(
        self, original: Callable[..., Any], core: EngineCore, method: Any, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            return original(core, method, *args, **kwargs)
        finally:
            # A call that failed may have changed some weights.
            if not (isinstance(method, str) and method in _HARMLESS):
                self._manager.weights_changed()

    def _add_lora(
        self, original: Callable[..., Any], core: EngineCore, lora_request: LoRARequest
    ) -> Any:
        adapter, versions = adapter_of(lora_request), self._manager.keys.versions
        before = versions.adapter_states(adapter)
        added = original(core, lora_request)
        versions.adapter_loaded(adapter, before, in_place=lora_request.load_inplace)
        return added

    def _sleep(
        self, original: Callable[..., Any], core: EngineCore, *args: Any, **kwargs: Any
    ) -> Any:
        level = args[0] if args else kwargs.get("level", 1)
        try:
            return original(core, *args, **kwargs)
        finally:
            # Deeper sleep drops the weights; others may be loaded afterwards.
            if level > _SLEEP_LEVEL_KEEPING_WEIGHTS:
                self._manager.weights_changed()


@dataclasses.dataclass(frozen=True, slots=True)
class _ScheduledStep:
    output: SchedulerOutput
    contents: StepContents
    began_s: float


class StepWatch(MethodWatch):
    """Times the steps of vLLM's scheduler, and adds them to a `StepMeter`.

    A step's results come to ``Scheduler.update_from_output``, which no connector sees. With
    asynchronous scheduling a step is scheduled while the one before it runs. So a
    step began when it was scheduled or when the one before it ended, whichever was later.

    vLLM sends a step's kernels to the GPU before it looks for the results of the step before. For a
    step with prompt tokens that can take longer than a decode: the decode seems long then, and the
    step with prompt tokens short. Such a pair is timed together.
    """

    def __init__(self, meter: StepMeter, clock: Callable[[], float] = time.monotonic) -> None:
        self._meter = meter
        self._clock = clock
        self._scheduled: deque[_ScheduledStep] = deque(maxlen=_MOST_STEPS_UNDER_WAY)
        self._ended_s = 0.0
        self._overtaken: tuple[float, int] | None = None
        """When a decode began that is timed with the next step, and its sequences."""
        self._wrap(Scheduler, "update_from_output", self._update_from_output)

    def _update_from_output(
        self,
        original: Callable[..., Any],
        scheduler: Scheduler,
        scheduler_output: SchedulerOutput,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self.ended(scheduler_output)
        return original(scheduler, scheduler_output, *args, **kwargs)

    def scheduled(self, output: SchedulerOutput) -> None:
        if output.num_scheduled_tokens:
            self._scheduled.append(_ScheduledStep(output, step_contents(output), self._clock()))

    def ended(self, output: SchedulerOutput) -> None:
        # A step without tokens was not noted: it takes no time, and others may be under way.
        if not any(step.output is output for step in self._scheduled):
            return
        now_s, before_s = self._clock(), self._ended_s
        self._ended_s = now_s
        while (step := self._scheduled.popleft()).output is not output:
            self._overtaken = None  # its results never came
        contents, began_s = step.contents, max(step.began_s, before_s)
        if self._overtaken is not None:
            began_s, decoding = self._overtaken
            self._overtaken = None
            contents["decoding"] += decoding
            self._meter.add(now_s - began_s, **contents, steps=2)
        elif (
            self._scheduled
            and self._scheduled[0].contents["prefill_tokens"]
            and not contents["prefill_tokens"]
        ):
            self._overtaken = (began_s, contents["decoding"])
        else:
            self._meter.add(now_s - began_s, **contents)


def computed_before(output: SchedulerOutput) -> dict[str, int]:
    """Return how many tokens of each request of a step were computed before it."""
    computed = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    return computed | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def step_contents(output: SchedulerOutput) -> StepContents:
    """Return what a step computes. A request with one token, or with drafts, decodes."""
    computed = computed_before(output)
    prefill_tokens, attended, decoding = 0, 0.0, 0
    for req_id, tokens in output.num_scheduled_tokens.items():
        if tokens == 1 or req_id in output.scheduled_spec_decode_tokens:
            decoding += 1
        else:
            prefill_tokens += tokens
            attended += tokens * (computed.get(req_id, 0) + tokens / 2)
    return {"prefill_tokens": prefill_tokens, "attended": attended, "decoding": decoding}


class UncomputedPrompts:
    """The requests whose prompts vLLM has not computed to their ends."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        """Of the prompt, by request."""

    def add(self, req_id: str, prompt_tokens: int) -> None:
        """Note a new request."""
        self._tokens[req_id] = prompt_tokens

    def besides(self, req_id: str) -> int:
        """Return how many there are besides this request."""
        return len(self._tokens) - (req_id in self._tokens)

    def scheduled(self, output: SchedulerOutput) -> None:
        """Forget the prompts that a step computes to their ends, and those of ended requests."""
        for req_id in output.finished_req_ids or ():
            self._tokens.pop(req_id, None)
        found = self._tokens.keys() & output.num_scheduled_tokens.keys()
        if not found:
            return
        before = computed_before(output)
        for req_id in found:
            end = before.get(req_id, 0) + output.num_scheduled_tokens[req_id]
            if end >= self._tokens[req_id]:
                del self._tokens[req_id]


class WarmrouteConnector(OffloadingConnector):  # type: ignore[misc]
    """Gives the engine the model's identity and adapters, and offers refused chunks again."""

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
        is_scheduler = role == KVConnectorRole.SCHEDULER
        identity = identify(vllm_config, kv_cache_config, reads_weights=is_scheduler)
        extra_config[IDENTITY_KEY] = dataclasses.asdict(identity)
        super().__init__(vllm_config, role, kv_cache_config)
        self._watch: WeightWatch | None = None
        self._uncomputed = UncomputedPrompts()
        if is_scheduler:
            self._manager.keys.versions.empty_gpu = self._empty_gpu
            # Only 0.32 needs it: later versions report the flush.
            self._manager.expect_batches(getattr(vllm_config, "max_concurrent_batches", 0))
            self._watch = WeightWatch(self._manager)
            meter = self._manager.engine.steps
            meter.step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            self._steps = StepWatch(meter)
            parallel = vllm_config.parallel_config
            self._ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size

    @property
    def _manager(self) -> WarmrouteManager:
        manager = self.scheduler.manager
        assert isinstance(manager, WarmrouteManager)
        return manager

    def on_new_request(self, request: Request) -> None:
        lora = request.lora_request
        self._uncomputed.add(request.request_id, request.num_prompt_tokens)
        self._manager.keys.expect(request.request_id, adapter_of(lora) if lora else None)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look up a prompt; skip the lookup while the request waits for a promotion."""
        engine = self._manager.engine
        tokens = request.num_tokens - num_computed_tokens
        compute_s = engine.steps.prefill_s(tokens)
        chunk_s = compute_s * engine.layout.chunk_tokens / max(1, tokens)
        others = self._uncomputed.besides(request.request_id)
        if self._manager.waits.must_wait(
            request.request_id, num_computed_tokens, compute_s, chunk_s, others=others
        ):
            return None, False
        # What limits a load besides: without vLLM's answer to it nothing is remembered.
        limit = getattr(self, "_max_loadable_tokens", None)
        most = limit(request, num_computed_tokens) if limit is not None else object()
        asked = request.num_tokens, num_computed_tokens, most
        known = self._manager.looked_up(request.request_id, asked)
        if known is not None:
            return known
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        self._manager.note_lookup(request.request_id, asked, matched)
        return matched

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Build vLLM's metadata, then set each request back to its first refused chunk."""
        self._steps.scheduled(scheduler_output)
        self._uncomputed.scheduled(scheduler_output)
        refused = self._manager.stores.refused
        refused.end_backoff(scheduler_output.finished_req_ids or ())
        metadata = super().build_connector_meta(scheduler_output)
        for req_id, first in refused.take_refused().items():
            self._offer_again(req_id, first)
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Measure the loads that have ended, then let vLLM note them."""
        stats = getattr(connector_output.kv_connector_worker_meta, "transfer_stats", None)
        if stats is not None and not stats.load.is_empty():
            # Bytes and seconds are sums over the ranks, which copy at the same time.
            self._manager.engine.loads.add(stats.load.bytes, stats.load.time / self._ranks)
        super().update_connector_output(connector_output)

    def _offer_again(self, req_id: str, first: OffloadKey) -> None:
        """Set a request back to a chunk, in the same step, so that vLLM offers it again.

        A later step would be too late for a sliding window: vLLM keeps the blocks that it has still
        to offer, and may have reused the others.
        """
        status: Any = self.scheduler._req_status.get(req_id)
        if status is None:
            return  # the request has ended: this was its last offer
        groups = zip(self.scheduler.config.kv_group_configs, status.group_states, strict=True)
        for config, state in groups:
            end_tokens = status.req_context.get_offload_key_position(first)
            if config.group_idx == get_offload_group_idx(first) and end_tokens is not None:
                chunk_idx = end_tokens // config.tokens_per_chunk - 1
                state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, chunk_idx)

    def _empty_gpu(self) -> bool:
        """Reset vLLM's prefix cache; return False if requests use some of it."""
        cache: Any = self._kv_cache_manager
        # Usage is checked first, because a reset that fails logs a warning in vLLM.
        return cache is not None and cache.usage == 0 and bool(cache.reset_prefix_cache())

    def shutdown(self) -> None:
        if self._watch is not None:
            self._watch.end()
            self._steps.end()
        super().shutdown()


def adapter_of(lora: LoRARequest) -> LoraAdapter:
    return LoraAdapter(lora.lora_name, lora.lora_path, lora.lora_int_id)
