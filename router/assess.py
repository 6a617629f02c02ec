"""What one prompt would cost at one replica: its keys, their match, the seconds.

Pure. Keys are shared between replicas that make them alike, so a fleet of one
kind computes them once per prompt.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from cacheengine.keys import HashScheme
from router.costs import Cost, Part, Work
from router.policy import CandidateCost
from router.prefix_index import Match, PrefixIndex, keys64
from router.replica import KeyShape, Replica, Tier

TEXT_PIECE_CHARS: Final = 1024
"""Length of the pieces in a `PromptView.text_chain`."""

_SLOW: Final = {Tier.DISK: Part.DISK, Tier.REMOTE: Part.REMOTE}
_AFFINITY_TOKENS: Final = 256


class PromptView(Protocol):
    """What of a prompt placing needs (`router.tokens.Prompt`)."""

    @property
    def token_ids(self) -> Sequence[int] | None:
        """The tokens that the replica will see; None where they cannot be known."""

    @property
    def text(self) -> str:
        """The prompt as text."""

    @property
    def token_count(self) -> int:
        """How many tokens it has, or an estimate."""

    def chain(self, scheme: HashScheme, block_tokens: int) -> list[bytes]:
        """Return the keys of its full blocks."""

    def text_chain(self) -> list[int]:
        """Return 64-bit keys of its text, in pieces of `TEXT_PIECE_CHARS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKeys:
    """A prompt's keys in one scheme."""

    keys: Sequence[int] = field(default=(), repr=False)
    chain: Sequence[bytes] = field(default=(), repr=False)
    """The whole digests; empty in the text scheme."""
    block_tokens: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """A replica, weighed for one prompt."""

    replica: Replica
    candidate: CandidateCost
    keys: PromptKeys
    match: Match
    work: Work
    gain_s: float
    """What using the chunks on disk and remote saves over computing them."""

    def slow_keys(self) -> tuple[bytes, ...]:
        """Return the whole keys of the matched chunks that lie only on disk or remote."""
        if not self.keys.chain or self.replica.shape is None:
            return ()
        step = self.replica.shape.blocks_per_chunk
        return tuple(
            self.keys.chain[(chunk + 1) * step - 1]
            for run in self.match.runs
            if run.tier in _SLOW
            for chunk in range(run.start, run.stop)
        )


class PromptKeyring:
    """The keys of one prompt in each scheme asked for, each made once."""

    def __init__(self, prompt: PromptView | None) -> None:
        self._prompt = prompt
        self._made: dict[tuple[HashScheme, int] | None, PromptKeys] = {}

    def of(self, shape: KeyShape | None) -> PromptKeys:
        """Return the prompt's keys at a replica; by text where its tokens or scheme are unknown."""
        if self._prompt is None:
            return PromptKeys()
        by_text = shape is None or self._prompt.token_ids is None
        name = None if by_text or shape is None else (shape.scheme, shape.block_tokens)
        if name not in self._made:
            self._made[name] = _make_keys(self._prompt, name)
        return self._made[name]

    def affinity(self, session: str | None) -> bytes:
        """Return what equal prompts have in common, whatever the scheme: their beginning."""
        if self._prompt is None:
            # A header's bytes need not be UTF-8; aiohttp gives the others as surrogates.
            return (session or "").encode(errors="surrogatepass")
        if ids := self._prompt.token_ids:
            return array("q", ids[:_AFFINITY_TOKENS]).tobytes()
        return self._prompt.text[:TEXT_PIECE_CHARS].encode(errors="surrogatepass")


def assess(
    replica: Replica, prompt_tokens: int, keys: PromptKeys, index: PrefixIndex, now_s: float
) -> Assessment:
    """Return what a prompt would cost at a replica, given what the index says of it."""
    by_tokens = bool(keys.chain) and replica.shape is not None
    blocks_per_chunk = replica.shape.blocks_per_chunk if by_tokens and replica.shape else 1
    match = index.match(replica.slot, keys.keys, blocks_per_chunk)
    matched = _capped(match.tokens(keys.block_tokens, blocks_per_chunk), prompt_tokens)
    work, cost, gain_s = _cheaper(replica, prompt_tokens, matched, now_s)
    candidate = CandidateCost(
        replica_id=replica.id,
        matched_tokens={tier.value: count for tier, count in matched.items()},
        in_flight=replica.in_flight,
        ttft_s=cost.ttft_s,
        base_s=cost.base_s,
        queue_s=cost.queue_s,
        fetch_s=cost.fetch_s,
        load_s=cost.load_s,
        prefill_s=cost.prefill_s,
    )
    return Assessment(
        replica=replica, candidate=candidate, keys=keys, match=match, work=work, gain_s=gain_s
    )


def actual(work: Work, cached_tokens: int, kv_bytes_per_token: float) -> Work:
    """Return what a request asked in truth, now that its cached tokens are known.

    Matched tokens that were not there are missing from the end: the slowest
    tiers first.
    """
    prompt_tokens = work.new_tokens + work.matched_tokens
    matched = min(cached_tokens, prompt_tokens - 1)
    lost_bytes = max(0, work.matched_tokens - matched) * kv_bytes_per_token
    load_bytes = max(0.0, work.load_bytes - lost_bytes)
    remote_bytes = max(0.0, work.remote_bytes - lost_bytes)
    disk_bytes = max(0.0, work.disk_bytes - max(0.0, lost_bytes - work.remote_bytes))
    return Work(
        new_tokens=prompt_tokens - matched,
        matched_tokens=matched,
        load_bytes=load_bytes,
        disk_bytes=disk_bytes,
        remote_bytes=remote_bytes,
        queue_s=work.queue_s,
        stretch=work.stretch,
    )


def _make_keys(prompt: PromptView, name: tuple[HashScheme, int] | None) -> PromptKeys:
    if name is None:
        characters = max(1, len(prompt.text))
        piece_tokens = max(1, round(prompt.token_count * TEXT_PIECE_CHARS / characters))
        return PromptKeys(keys=prompt.text_chain(), block_tokens=piece_tokens)
    scheme, block_tokens = name
    chain = prompt.chain(scheme, block_tokens)
    return PromptKeys(keys=keys64(chain), chain=chain, block_tokens=block_tokens)


def _capped(matched: dict[Tier, int], prompt_tokens: int) -> dict[Tier, int]:
    """Cut off what exceeds the prompt: token counts of texts are estimates."""
    left = prompt_tokens
    capped: dict[Tier, int] = {}
    for tier, count in matched.items():
        capped[tier] = min(count, left)
        left -= capped[tier]
    return capped


def _cheaper(
    replica: Replica, prompt_tokens: int, matched: dict[Tier, int], now_s: float
) -> tuple[Work, Cost, float]:
    """Return the work and cost with the slow tiers or without, and what the former saves.

    Without is believed only when the slow tier's speed is known: a guess that
    never let it be used would never be put right.
    """
    deep = _work(replica, prompt_tokens, matched, now_s)
    deep_cost = replica.rates.cost(deep)
    slow = [tier for tier in _SLOW if matched.get(tier)]
    if not slow:
        return deep, deep_cost, 0.0
    # Tiers may alternate along a prefix. What of a faster tier lies behind a
    # slow one would be lost too; that is rare enough not to be told apart here.
    shallow = _work(replica, prompt_tokens, _before(matched, slow), now_s)
    shallow_cost = replica.rates.cost(shallow)
    gain_s = max(0.0, shallow_cost.busy_s - deep_cost.busy_s)
    known = all(replica.rates.knows(_SLOW[tier]) for tier in slow)
    if known and shallow_cost.ttft_s < deep_cost.ttft_s:
        return shallow, shallow_cost, 0.0
    return deep, deep_cost, gain_s


def _before(matched: dict[Tier, int], slow: Sequence[Tier]) -> dict[Tier, int]:
    first = min(list(matched).index(tier) for tier in slow)
    return dict(list(matched.items())[:first])


def _work(replica: Replica, prompt_tokens: int, matched: dict[Tier, int], now_s: float) -> Work:
    total = sum(matched.values())
    per_token = replica.kv_bytes_per_token
    return Work(
        # The last token is computed in any case: it gives the first answer.
        new_tokens=max(1, prompt_tokens - total),
        matched_tokens=total,
        load_bytes=(total - matched.get(Tier.GPU, 0)) * per_token,
        disk_bytes=matched.get(Tier.DISK, 0) * per_token,
        remote_bytes=matched.get(Tier.REMOTE, 0) * per_token,
        queue_s=replica.line.queue_s(now_s),
        stretch=replica.rates.stretch(replica.decoding),
    )
