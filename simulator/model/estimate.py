"""When a replica in a known state would give a new request its first token. Pure.

What the fleet's oracle decides by: the model's own times, and nothing guessed
but how long the requests that run now will go on decoding beside it.
"""

import math
from dataclasses import dataclass

from simulator.model.machine_and_request import Rates, SimRequest
from simulator.model.replica_model import ReplicaModel


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Model seconds from now on."""

    ttft_s: float
    busy_s: float
    """Time of the replica that the request takes: its load and its prefill."""
    queue_s: float
    """Until the replica could begin with it, were its KV there."""


def estimate(model: ReplicaModel, request: SimRequest, now_s: float) -> Estimate:
    """Say what ``request`` would meet if it came now; changes nothing.

    Assumes that what it has on disk only is begun to be read at once.
    """
    rates, chunk_tokens = model.rates, model.shape.chunk_tokens
    known = model.known_tokens(request)
    own_tokens = request.prompt_tokens - known
    gpu_blocks = model.cache.match(
        request.block_keys, (request.prompt_tokens - 1) // model.shape.block_tokens
    )
    gpu_tokens = gpu_blocks * model.shape.block_tokens
    tiers = model.lower_tiers_of(request, gpu_tokens // chunk_tokens)
    # What others will have computed by then is on the GPU, wherever it is now.
    loaded = min(len(tiers) * chunk_tokens, max(0, known - gpu_tokens)) if tiers else 0
    load_s = loaded / rates.load_tokens_per_s
    fetch_s = sum(tier != "cpu" for tier in tiers) * chunk_tokens / rates.disk_tokens_per_s
    decode_s = _decode_s(model)
    ahead = [*model.running, *model.waiting, *(each for _, each in model.loading)]
    ahead_tokens = sum(each.remaining_prefill for each in ahead) - model.tokens_in_step
    ahead_s = sum(_prefill_s(rates, each) for each in ahead if each.remaining_prefill)
    ahead_s += _steps(model, ahead_tokens) * decode_s - rates.prefill_s(model.tokens_in_step)
    queue_s = max(_step_rest_s(model, now_s) + ahead_s, _room_s(model, request, gpu_blocks))
    prefill_s = rates.prefill_s(own_tokens, known)
    own_s = prefill_s + _steps(model, own_tokens) * decode_s
    return Estimate(
        ttft_s=max(queue_s, fetch_s) + load_s + own_s,
        busy_s=load_s + prefill_s,
        queue_s=queue_s,
    )


def _step_rest_s(model: ReplicaModel, now_s: float) -> float:
    return 0.0 if model.step_end_s is None else max(0.0, model.step_end_s - now_s)


def _prefill_s(rates: Rates, request: SimRequest) -> float:
    tokens = request.remaining_prefill
    return rates.prefill_s(tokens, request.prefill_end - tokens)


def _steps(model: ReplicaModel, tokens: int) -> int:
    """Return how many steps it takes to compute so many tokens beside the present decodes."""
    decoding = sum(not each.is_prefilling for each in model.running)
    return math.ceil(tokens / max(1, model.shape.max_batched_tokens - decoding))


def _decode_s(model: ReplicaModel) -> float:
    """Return what the present decodes add to each step."""
    decoding = [each for each in model.running if not each.is_prefilling]
    return model.rates.decode_s(len(decoding), sum(each.computed for each in decoding))


def _room_s(model: ReplicaModel, request: SimRequest, gpu_blocks: int) -> float:
    """Return how long until enough running requests end for this one to find blocks."""
    size = model.shape.block_tokens
    lacking = -(-request.prompt_tokens // size) - gpu_blocks - model.cache.free_blocks
    if lacking <= 0:
        return 0.0
    step_s = model.rates.decode_s(len(model.running))
    for each in sorted(model.running, key=lambda one: one.output_tokens - one.generated):
        lacking -= each.num_blocks
        if lacking <= 0:
            return (each.output_tokens - each.generated) * step_s
    return 0.0
