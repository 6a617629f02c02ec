"""What a decision rests on, for ``POST /explain``: as JSON values, and in one sentence."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from router.config.cost_weights import CostWeights
from router.config.settings import PolicyName
from router.fleet.cost_model import CostModel, CostPart
from router.fleet.decision import Candidate, Decision, Reason
from router.fleet.fleet import Fleet
from router.fleet.replica import ReplicaState
from router.index.prompt_keys import KvTier
from router.prompt.prompt import Prompt
from router.record.time_account import seconds_text
from warmroute_common.addresses import without_password

SHOWN: Final = 16
"""How many candidates are shown, fastest first, besides the pick and the session's home."""

_NO_LATER_S: Final = 0.0005
"""Differences that are not worth a word."""

_WHERE: Final[Mapping[str, str]] = {
    "gpu": "in its GPU",
    "cpu": "in its CPU RAM",
    "disk": "on its disk",
    "remote": "in the remote store",
}

_FIXED: Final[Mapping[Reason, str]] = {
    Reason.ONLY_REPLICA: "is the only replica that can take it",
    Reason.BOUND: "holds the response that this request continues",
    Reason.RETRY: "is the best of the replicas that were not tried yet",
    Reason.ROUND_ROBIN: "is next in turn",
}

_OTHER_POLICIES: Final[Mapping[str, str]] = {
    "longest-prefix": "holds the longest match; ties go to the replica with the fewest requests",
    "session": "is chosen by a hash of the session's name or of the prompt's beginning",
    "least-loaded": "has the fewest requests in flight",
}


def explanation(
    prompt: Prompt | None, decision: Decision, fleet: Fleet, *, model: str | None
) -> dict[str, Any]:
    """Return a decision as JSON values; candidates soonest first, `SHOWN` of them at most.

    ``left_out`` counts the other replicas that could take the request.
    """
    shown = _shown(decision)
    names = {each.replica_id for each in shown}
    able = {
        each.id
        for each in fleet.replicas.values()
        if each.state is ReplicaState.UP and each.serves(model)
    }
    return {
        "replica": decision.replica_id,
        "url": without_password(decision.url),
        "reason": str(decision.reason),
        "why": why(decision, fleet.config.policy, fleet.weights),
        "prompt_tokens": decision.prompt_tokens,
        "exact_tokens": prompt is not None and prompt.exact,
        "matched_tokens": _by_name(decision.matched_tokens),
        "predicted_ttft_s": decision.predicted_ttft_s,
        "home": decision.home,
        "prefetch_chunks": len(decision.prefetch_keys),
        "expected_gain_s": decision.expected_gain_s,
        "copy": _copy(decision),
        "candidates": [_candidate(each, fleet) for each in shown],
        "left_out": len(able - names),
    }


def why(decision: Decision, policy: PolicyName, weights: CostWeights) -> str:
    """Return one sentence for a person that says why the pick was made."""
    picked = decision.picked
    holds = _holds(picked, decision.prompt_tokens)
    if decision.reason in _FIXED:
        return f"{picked.replica_id} {_FIXED[decision.reason]}: {holds}."
    if policy != "ttft":
        about = f"(policy {policy}, which ignores times)"
        return f"{picked.replica_id} {_OTHER_POLICIES[policy]} {about}: {holds}."
    others = [each for each in decision.candidates if each is not picked]
    soonest = other = min(others, key=lambda each: each.ttft_s)
    name = f"{other.replica_id}, the next,"
    if decision.reason is Reason.SESSION_SPILL and decision.home is not None:
        other = next(each for each in others if each.replica_id == decision.home)
        name = f"the session's home {other.replica_id}"
    if decision.reason is Reason.SESSION_HOME:
        head = "is the session's home"
    elif picked.ttft_s - soonest.ttft_s < _NO_LATER_S:
        head = "answers first"
    else:
        head = "is nearly as fast as the fastest"
    contrast = _against(picked, other, name, weights)
    return f"{picked.replica_id} {head}: {holds}; {contrast}."


def _holds(picked: Candidate, prompt_tokens: int) -> str:
    found = {_WHERE[tier]: count for tier, count in picked.matched_tokens.items() if count}
    if (source := picked.source) is not None:
        found[f"to be copied from {source.replica.id}"] = source.tokens
    if not found:
        return f"it holds none of the {prompt_tokens:,} tokens"
    (where, count), *others = found.items()
    parts = [f"{count:,} of {prompt_tokens:,} tokens are {where}"]
    parts += [f"{count:,} {where}" for where, count in others]
    if picked.replica.reads_late(picked.matched_tokens):
        parts.append("read when the replica starts the request, because it accepts no prefetch")
    return ", ".join(parts)


def _against(picked: Candidate, other: Candidate, name: str, weights: CostWeights) -> str:
    """Contrast a pick with one that was not picked."""
    late_s = other.ttft_s - picked.ttft_s
    if late_s >= _NO_LATER_S:
        return f"{name} would take {seconds_text(late_s)} longer"
    faster = "be as fast" if late_s > -_NO_LATER_S else f"be {seconds_text(-late_s)} faster"
    others_s, picked_others_s = (
        each.others_s(weights) + each.slowed_s(weights) for each in (other, picked)
    )
    if others_s - picked_others_s >= _NO_LATER_S:
        return (
            f"{name} would {faster}, but delay other requests by {seconds_text(others_s)} "
            f"in total instead of {seconds_text(picked_others_s)}"
        )
    if picked.matched > other.matched:
        return f"{name} would {faster}, but holds fewer tokens of the prompt"
    if picked.in_flight < other.in_flight:
        return f"{name} would {faster}, but has more requests in flight"
    tie = "a tie: the session's home wins, then a hash of the prompt decides"
    return f"{name} would {faster} ({tie})"


def _shown(decision: Decision) -> list[Candidate]:
    ranked = sorted(decision.candidates, key=lambda each: each.ttft_s)
    kept = (decision.replica_id, decision.home)
    return ranked[:SHOWN] + [each for each in ranked[SHOWN:] if each.replica_id in kept]


def _copy(decision: Decision) -> dict[str, Any] | None:
    copy = decision.copy
    if copy is None:
        return None
    return {
        "source": copy.source_id,
        "chunks": len(copy.keys),
        "bytes": copy.nbytes,
        "expected_gain_s": copy.expected_gain_s,
    }


def _candidate(candidate: Candidate, fleet: Fleet) -> dict[str, Any]:
    replica, cost, source = candidate.replica, candidate.cost, candidate.source
    prefiller, errors = candidate.prefiller, replica.errors.figures()
    return {
        "replica_id": replica.id,
        "matched_tokens": _by_name(candidate.matched_tokens),
        "copied_tokens": 0 if source is None else source.tokens,
        "copied_from": None if source is None else source.replica.id,
        "in_flight": replica.in_flight,
        "waiting": candidate.waiting,
        "busy_share": candidate.busy_share,
        "own_share": candidate.own_share,
        "ttft_s": cost.ttft_s,
        "base_s": cost.base_s,
        "queue_s": cost.queue_s,
        "fetch_s": cost.fetched_s,
        "load_s": cost.load_s,
        "prefill_s": cost.prefill_s,
        "prefilled_by": None if prefiller is None else prefiller.replica.id,
        "prefilled_s": cost.prefilled_s,
        "pull_s": cost.pull_s,
        "decode_s": candidate.decode_s(fleet.weights),
        "slowed_s": candidate.slowed_s(fleet.weights),
        "beyond_home_s": candidate.beyond_home_s,
        "others_s": candidate.others_s(fleet.weights),
        "score_s": candidate.score_s(fleet.weights),
        "rates": _rates(replica.rates),
        "predictions": None if errors is None else asdict(errors),
    }


def _by_name(tokens: Mapping[KvTier, int]) -> dict[str, int]:
    return {str(tier): count for tier, count in tokens.items()}


def _rates(rates: CostModel) -> dict[str, Any]:
    """Return a replica's rates, by the names of the ``rates`` in the configuration.

    ``measured`` has, for each rate that is more than a start value, how much it was measured on:
    tokens (prefill, attention, decode, output) or bytes.
    """
    prefill_s, attention_s = rates.seconds(CostPart.PREFILL), rates.seconds(CostPart.ATTENTION)
    return {
        "base_s": rates.seconds(CostPart.BASE),
        "prefill_tokens_per_s": rates.per_second(CostPart.PREFILL),
        "attention_doubles_at_tokens": prefill_s / attention_s if attention_s else None,
        "decode_slowdown": rates.seconds(CostPart.DECODE) / prefill_s if prefill_s else 0.0,
        "cpu_load_bytes_per_s": rates.per_second(CostPart.LOAD),
        "disk_bytes_per_s": rates.per_second(CostPart.DISK),
        "remote_bytes_per_s": rates.per_second(CostPart.REMOTE),
        "peer_bytes_per_s": rates.per_second(CostPart.PEER),
        "pull_bytes_per_s": rates.per_second(CostPart.PULL),
        "output_token_s": rates.seconds(CostPart.OUTPUT_TOKEN),
        "measured": {part.name.lower(): rates.measured_on(part) for part in rates.measured()},
    }
