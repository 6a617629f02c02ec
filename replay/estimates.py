"""When a replica whose state is known would give a new request its first token. Pure.

The router of `bounds` decides by these estimates. They use the model's own times; the only guess is
how long the requests that run now will continue to decode next to the new one.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simulator.model.lower_tier_view import LowerTiers
from simulator.model.replica_model import ReplicaModel
from simulator.model.sim_request import SimRequest


class Foresight:
    """Knows a replica's tiers, and the blocks that its present requests will have computed.

    `expect` notes a request right before it arrives at the model, `forget` when it is over.
    """

    def __init__(self, model: ReplicaModel, tiers: LowerTiers) -> None:
        self.model = model
        self._shape = model.shape
        self._cache = model.cache
        self._tiers = tiers
        self._promised: dict[bytes, int] = {}
        self._expected_tokens: dict[SimRequest, int] = {}

    def expect(self, request: SimRequest) -> None:
        """Note a request that arrives now, and how many prompt tokens it will have to compute."""
        self._expected_tokens[request] = request.prompt_tokens - self.known_tokens(request)
        for key in self._prompt_keys(request):
            self._promised[key] = self._promised.get(key, 0) + 1

    def forget(self, request: SimRequest) -> None:
        """Note that a request is over, once after `expect`."""
        del self._expected_tokens[request]
        for key in self._prompt_keys(request):
            left = self._promised[key] - 1
            if left:
                self._promised[key] = left
            else:
                del self._promised[key]

    def remaining_prefill(self, request: SimRequest) -> int:
        """Return the prompt tokens left to compute: expected ones before the request runs."""
        return request.remaining_prefill if request.num_blocks else self._expected_tokens[request]

    def known_tokens(self, request: SimRequest) -> int:
        """Return the prompt tokens that are in any tier or that other requests will compute."""
        most = (request.prompt_tokens - 1) // self._shape.block_tokens
        blocks = 0
        for key in request.block_keys[:most]:
            if key not in self._promised and key not in self._cache:
                break
            blocks += 1
        gpu_tokens = blocks * self._shape.block_tokens
        first = gpu_tokens // self._shape.chunk_tokens
        end = (first + len(self.lower_tiers_of(request, first))) * self._shape.chunk_tokens
        # The replica does not load less than a chunk.
        known = end if end - gpu_tokens >= self._shape.chunk_tokens else gpu_tokens
        return min(known, request.prompt_tokens - 1)

    def lower_tiers_of(self, request: SimRequest, first_chunk: int) -> Sequence[str]:
        """Return the lower tier of each leading chunk of the prompt, from ``first_chunk`` on."""
        end = request.prompt_tokens // self._shape.chunk_tokens
        return self._tiers.tiers_of(request.chunk_keys[first_chunk:end])

    def _prompt_keys(self, request: SimRequest) -> Sequence[bytes]:
        return request.block_keys[: request.prompt_tokens // self._shape.block_tokens]

    def check(self, requests: Iterable[SimRequest]) -> None:
        """Raise AssertionError unless exactly these requests are expected."""
        expected = Counter(key for each in requests for key in self._prompt_keys(each))
        assert self._promised == expected


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted times in model seconds."""

    ttft_s: float
    busy_s: float
    """Replica time that the request uses: its load and its prefill."""
    queue_s: float
    """Time until the replica could start it, if its KV were there."""


def estimate(foresight: Foresight, request: SimRequest, now_s: float) -> Estimate:
    """Estimate the times of ``request`` if it arrived now; changes nothing."""
    model = foresight.model
    rates, chunk_tokens = model.rates, model.shape.chunk_tokens
    known = foresight.known_tokens(request)
    own_tokens = request.prompt_tokens - known
    gpu_blocks = model.cache.match(
        request.block_keys, (request.prompt_tokens - 1) // model.shape.block_tokens
    )
    gpu_tokens = gpu_blocks * model.shape.block_tokens
    tiers = foresight.lower_tiers_of(request, gpu_tokens // chunk_tokens)
    # Blocks that other requests will have computed by then will be on the GPU.
    loaded = min(len(tiers) * chunk_tokens, max(0, known - gpu_tokens)) if tiers else 0
    load_s = loaded / rates.load_tokens_per_s
    decode_s = _decode_s(model)
    ahead = [*model.running, *model.waiting, *(each for _, each in model.loading)]
    left = {each: foresight.remaining_prefill(each) for each in ahead}
    ahead_tokens = sum(left.values()) - model.tokens_in_step
    ahead_s = sum(
        rates.prefill_s(tokens, each.prefill_end - tokens)
        for each, tokens in left.items()
        if tokens
    )
    ahead_s += _steps(model, ahead_tokens) * decode_s - rates.prefill_s(model.tokens_in_step)
    queue_s = max(_step_rest_s(model, now_s) + ahead_s, _room_s(model, request, gpu_blocks))
    prefill_s = rates.prefill_s(own_tokens, known)
    own_s = prefill_s + _steps(model, own_tokens) * decode_s
    return Estimate(
        ttft_s=queue_s + load_s + own_s,
        busy_s=load_s + prefill_s,
        queue_s=queue_s,
    )


def _step_rest_s(model: ReplicaModel, now_s: float) -> float:
    return 0.0 if model.step_end_s is None else max(0.0, model.step_end_s - now_s)


def _steps(model: ReplicaModel, tokens: int) -> int:
    """Return how many steps ``tokens`` take while the present sequences decode."""
    decoding = sum(not each.is_prefilling for each in model.running)
    return math.ceil(tokens / max(1, model.shape.max_batched_tokens - decoding))


def _decode_s(model: ReplicaModel) -> float:
    """Return the time that the present decodes add to each step."""
    decoding = [each for each in model.running if not each.is_prefilling]
    return model.rates.decode_s(len(decoding), sum(each.computed for each in decoding))


def _room_s(model: ReplicaModel, request: SimRequest, gpu_blocks: int) -> float:
    """Return the time until enough running requests end for this one to find blocks."""
    size = model.shape.block_tokens
    missing = -(-request.prompt_tokens // size) - gpu_blocks - model.cache.free_blocks
    if missing <= 0:
        return 0.0
    step_s = model.rates.decode_s(len(model.running))
    for each in sorted(model.running, key=lambda one: one.output_tokens - one.generated):
        missing -= each.num_blocks
        if missing <= 0:
            return (each.output_tokens - each.generated) * step_s
    return 0.0
