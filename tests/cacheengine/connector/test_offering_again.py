"""The connector on vLLM's own scheduler side: what was refused is offered in the next step."""

from dataclasses import fields
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.slow,
    # Importing vLLM and its dependencies warns about their own deprecations.
    pytest.mark.filterwarnings("default"),
]

CHUNK_TOKENS = 256


def test_vllm_still_has_what_the_connector_sets_back() -> None:
    """These names are private to vLLM: a release that renames one must be looked at."""
    import inspect

    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
    from vllm.v1.kv_offload.base import ReqContext

    state = scheduler.RequestGroupState()
    assert state.next_stored_chunk_idx == 0
    assert {"group_idx", "tokens_per_chunk"} <= set(scheduler.GroupOffloadConfig._fields)
    assert {"group_states", "req_context"} <= {
        field.name for field in fields(scheduler.RequestOffloadState)
    }
    source = inspect.getsource(scheduler.OffloadingConnectorScheduler)
    assert "self._req_status: dict[ReqId, RequestOffloadState]" in source
    assert "group_state.next_stored_chunk_idx = max(" in source
    assert ReqContext("request").get_offload_key_position(b"unknown") is None


def _connector(chunks: int, next_chunk: int) -> tuple[Any, Any, list[Any]]:
    """A connector over one request of this many chunks; its state and its keys."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestGroupState
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key

    from cacheengine.connector.connector import WarmrouteConnector

    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(chunks)]
    context = ReqContext("request")
    for number, key in enumerate(keys):
        context.set_offload_key_position(key, (number + 1) * CHUNK_TOKENS)
    state = RequestGroupState(offload_keys=keys, next_stored_chunk_idx=next_chunk)
    connector = WarmrouteConnector.__new__(WarmrouteConnector)
    connector.connector_scheduler = SimpleNamespace(
        config=SimpleNamespace(
            kv_group_configs=[SimpleNamespace(group_idx=0, tokens_per_chunk=CHUNK_TOKENS)]
        ),
        _req_status={"request": SimpleNamespace(req_context=context, group_states=[state])},
    )
    return connector, state, keys


def test_a_request_is_set_back_to_the_first_refused_chunk() -> None:
    connector, state, keys = _connector(10, next_chunk=10)
    connector._offer_again("request", keys[4])
    assert state.next_stored_chunk_idx == 4


def test_a_request_is_never_set_forward() -> None:
    connector, state, keys = _connector(10, next_chunk=2)
    connector._offer_again("request", keys[4])
    assert state.next_stored_chunk_idx == 2


def test_a_request_that_has_ended_is_left_alone() -> None:
    connector, state, keys = _connector(10, next_chunk=10)
    connector._offer_again("another", keys[4])
    assert state.next_stored_chunk_idx == 10
