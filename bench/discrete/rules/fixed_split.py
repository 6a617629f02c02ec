"""Fixed roles: some replicas prefill, the others decode (`xPyD`)."""

from collections.abc import Callable, Sequence

from bench.discrete.rules.rule import Asked, ReplicaMetrics, Rule
from router.index.prompt_keys import KvTier


class FixedSplit:
    """The first replicas prefill, the others decode; each role has a rule of its own.

    llm-d router, `disagg-profile-handler`: the decode profile picks first. The decider
    `always-disagg-pd-decider` of the guide `pd-disaggregation` prefills each prompt elsewhere;
    `prefix-based-pd-decider` only one of which the picked replica lacks `non_cached_tokens`.
    vllm-router 0.1.17, `docs/model-routing/pd-disaggregation.md`: each prompt, with a policy for
    each role. Where no replica that prefills is healthy, the prompt is prefilled where it decodes.
    """

    def __init__(
        self,
        prefillers: int,
        *,
        prefill: Rule,
        decode: Rule,
        matched: Callable[[Asked, int, float], int] | None = None,
        non_cached_tokens: int = 0,
    ) -> None:
        """``matched`` returns how many of a prompt's blocks a replica holds."""
        self._prefillers = prefillers
        self._prefill = prefill
        self._decode = decode
        self._matched = matched
        self._non_cached_tokens = non_cached_tokens
        self._lacking_tokens = 0
        """Tokens of the last pick's prompt that its replica lacks."""

    def pick(self, asked: Asked, healthy: Sequence[int], now_s: float) -> int:
        """Send a request to a replica that decodes, or to any where none is healthy."""
        decoders = [each for each in healthy if each >= self._prefillers] or healthy
        # Before the pick: afterwards the prompt may count as held where it was sent.
        matched = self._matched or (lambda *_: 0)
        held = {each: matched(asked, each, now_s) for each in decoders}
        decoder = self._decode.pick(asked, decoders, now_s)
        self._lacking_tokens = asked.prompt_tokens - held[decoder] * asked.block_tokens
        return decoder

    def prefiller(
        self, asked: Asked, decoder: int, healthy: Sequence[int], now_s: float
    ) -> int | None:
        """Return the replica that prefills the prompt of the last pick; None: nobody else does."""
        prefillers = [each for each in healthy if each < self._prefillers]
        if not prefillers or decoder < self._prefillers:
            return None
        if self._lacking_tokens < self._non_cached_tokens:
            return None
        return self._prefill.pick(asked, prefillers, now_s)

    def prefilled(self, request_id: int, now_s: float) -> None:
        """Note the end of a first leg."""
        self._prefill.first_token(request_id, now_s)
        self._prefill.finished(request_id, now_s)

    def first_token(self, request_id: int, now_s: float) -> None:
        """Note the first token of an answer."""
        self._decode.first_token(request_id, now_s)

    def finished(self, request_id: int, now_s: float) -> None:
        """Note the end of an answer."""
        self._prefill.finished(request_id, now_s)
        self._decode.finished(request_id, now_s)

    def stored(self, replica: int, tier: KvTier, blocks: Sequence[int]) -> None:
        """Note what a replica's KV events say."""
        self._prefill.stored(replica, tier, blocks)
        self._decode.stored(replica, tier, blocks)

    def removed(self, replica: int, tier: KvTier, blocks: Sequence[int]) -> None:
        """Note what a replica's KV events say."""
        self._prefill.removed(replica, tier, blocks)
        self._decode.removed(replica, tier, blocks)

    def cleared(self, replica: int) -> None:
        """Note that a replica holds nothing."""
        self._prefill.cleared(replica)
        self._decode.cleared(replica)

    def scraped(self, replica: int, metrics: ReplicaMetrics, now_s: float) -> None:
        """Note what a replica's metrics say."""
        self._prefill.scraped(replica, metrics, now_s)
        self._decode.scraped(replica, metrics, now_s)
