"""Noticing that vLLM's weights, or an adapter's, are replaced while it runs.

vLLM tells a connector of neither. Both reach its workers by two methods of its engine core,
which runs in the process of the manager and does one thing after the other.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore

from cacheengine.connector.manager import WarmrouteManager
from cacheengine.identity import Adapter

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
        adapter = Adapter(lora_request.lora_name, lora_request.lora_path, lora_request.lora_int_id)
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
