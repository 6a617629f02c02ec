"""Where a request should go: the candidates, the pick, and what the pick entails.

Pure: what it is told in, a `Decision` out.
"""

from dataclasses import dataclass

import xxhash

from router.config import Judgment, PolicyName, RouterConfig
from router.fleet.assessment import Assessor
from router.fleet.candidate import Candidate
from router.fleet.decision import Decision, KvCopy, Reason
from router.fleet.eligibility import Eligible
from router.fleet.policy import Question, pick, rendezvous_score, salt_of
from router.fleet.replica import Replica
from router.fleet.shortlist import MAX_WEIGHED, Field, shortlist
from router.index import PrefixIndex, PromptKeyCache, Tier
from router.latency import Promised, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request to be placed."""

    keyring: PromptKeyCache
    session: str | None
    home: int | None
    """Slot of the session's home."""
    turn: int
    """How many requests were sent before."""
    busy_share: float
    """Share of the fleet's time that recent requests took; above 1 it falls behind."""
    promised: Promised
    """What replicas will be given before this, beside what they have."""
    streamed: bool
    """Whether the answer will be streamed."""
    now_s: float


def decide(
    ask: Ask,
    eligible: Eligible,
    index: PrefixIndex,
    config: RouterConfig,
    judgment: Judgment,
) -> Decision:
    """Return where a request should go; ``eligible`` must not be empty."""
    keyring, now_s = ask.keyring, ask.now_s
    field = Field(eligible, keyring, index)
    affinity = xxhash.xxh3_64_intdigest(keyring.affinity(ask.session))
    home = None if ask.home is None else eligible.by_slot.get(ask.home)
    if home is None and ask.session is not None and config.shares_replicas:
        # Another router may have had its turns: all of them take this one for its home.
        home = max(eligible, key=lambda each: rendezvous_score(affinity, salt_of(each.id)))
    question = Question(
        affinity=affinity,
        home=None if home is None else home.id,
        turn=ask.turn,
        judgment=judgment,
    )
    weighed, foreseen = eligible.replicas, None
    if len(eligible) > MAX_WEIGHED:
        if config.policy != "ttft":
            foreseen = _foreseen(field, config.policy, question)
        also = home if foreseen is None else foreseen[0]
        weighed = shortlist(field, question.affinity, also, now_s)
    assessor = Assessor(
        index,
        keyring.prompt_tokens,
        judgment=judgment,
        sources=field.sources(now_s) if config.prefetch.enabled else (),
        promised=ask.promised,
        busy_share=ask.busy_share,
        now_s=now_s,
    )
    candidates = tuple(
        assessor.assess(each, field.keys(each), field.depth(each).gpu_blocks) for each in weighed
    )
    if foreseen is None:
        picked, reason = pick(config.policy, candidates, question)
    else:
        replica, reason = foreseen
        picked = next(each for each in candidates if each.replica is replica)
    prefetches = picked.prefetch_gain_s > 0 and picked.replica.can_prefetch
    return Decision(
        picked=picked,
        reason=reason,
        prompt_tokens=keyring.prompt_tokens,
        candidates=candidates,
        prefetch_keys=picked.slow_keys() if prefetches else (),
        copy=_copy(picked),
        home=question.home,
        session=ask.session,
        streamed=ask.streamed,
    )


def _copy(picked: Candidate) -> KvCopy | None:
    if (source := picked.source) is None:
        return None
    return KvCopy(
        source_id=source.replica.id,
        keys=picked.keys.chunks(source.runs),
        nbytes=round(source.nbytes),
        expected_gain_s=source.gain_s,
    )


def _foreseen(field: Field, policy: PolicyName, question: Question) -> tuple[Replica, Reason]:
    """Return what a policy picks that asks for no costs, and why."""
    nothing = Work(new_tokens=0)
    candidates = [
        Candidate(
            replica=each,
            keys=field.keys(each),
            matched_tokens={Tier.GPU: field.matched_tokens(each)},
            work=nothing,
            cost=each.rates.cost(nothing),
        )
        for each in field.eligible.replicas
    ]
    picked, reason = pick(policy, candidates, question)
    return picked.replica, reason
