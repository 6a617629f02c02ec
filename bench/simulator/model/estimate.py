"""When a replica in a known state would give a new request its first token. Pure.

What the fleet's oracle decides by: the model's own times, and nothing guessed
but how long the requests that run now will go on decoding beside it.
"""

import math
from dataclasses import dataclass

from bench.simulator.model.request import SimRequest
from bench.simulator.model.scheduler import ReplicaModel


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Model seconds from now on."""

    ttft_s: float
    busy_s: float
    """Time of the replica that the request takes: its load and its prefill."""


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
    ahead = sum(each.remaining_prefill for each in model.running if each.is_prefilling)
    ahead -= model.tokens_in_step
    ahead += sum(each.remaining_prefill for each in model.waiting)
    ahead += sum(each.remaining_prefill for _, each in model.loading)
    queue_s = max(
        _step_rest_s(model, now_s) + _prefill_s(model, ahead), _room_s(model, request, gpu_blocks)
    )
    own_s = _prefill_s(model, ahead + own_tokens) - _prefill_s(model, ahead)
    return Estimate(
        ttft_s=max(queue_s, fetch_s) + load_s + own_s,
        busy_s=load_s + own_tokens / rates.prefill_tokens_per_s,
    )


def _step_rest_s(model: ReplicaModel, now_s: float) -> float:
    return 0.0 if model.step_end_s is None else max(0.0, model.step_end_s - now_s)


def _prefill_s(model: ReplicaModel, tokens: int) -> float:
    """Return how long it takes to compute so many tokens beside the present decodes."""
    decoding = sum(not each.is_prefilling for each in model.running)
    per_step = max(1, model.shape.max_batched_tokens - decoding)
    steps = math.ceil(tokens / per_step)
    return steps * model.rates.decode_s(decoding) + model.rates.prefill_s(tokens)


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
