"""All that the router knows and may change: replicas, index, sessions, what is in flight.

The only mutable centre, and synchronous: between two awaits of its callers
nobody sees it half changed. It does no I/O and reads no clock; the feeds, the
health checks and the proxy tell it what happened and when.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final

from cacheengine.keys import HashScheme
from cacheengine.wire import EventBatch, InstanceInfo, Snapshot, unpack_keys
from router.assess import Assessment, PromptKeyring, PromptView, assess
from router.config import RouterConfig
from router.costs import Part
from router.errors import NoReplica, UnknownModel
from router.kv_events import (
    BlocksRemoved,
    BlocksStored,
    FirstBlocks,
    GpuCleared,
    KvBatch,
    KvEvent,
    explains,
    find_shape,
)
from router.policy import CandidateCost, Decision, Plan, Question, Reason, pick
from router.prefix_index import LOWER_TIERS, PrefixIndex
from router.replica import KeyShape, Replica, Signal, State, Tier
from router.sessions import Sessions
from router.ticket import Ticket

_EXPIRED_PER_PLACE: Final = 4
"""Claims ended by the way; more than the one that a request makes, so that they
cannot pile up, and few, so that no request pays for many."""

_MEASURED_TIERS: Final = {Tier.CPU: Part.LOAD, Tier.DISK: Part.DISK, Tier.REMOTE: Part.REMOTE}


class Replicas(dict[str, Replica]):
    """Replicas by id. One that was renamed is found by its former ids too."""

    def __init__(self) -> None:
        super().__init__()
        # The replicas themselves: another may have taken the name that followed.
        self._former: dict[str, Replica] = {}

    def __missing__(self, replica_id: str) -> Replica:
        return self._former[replica_id]

    def rename(self, old: str, new: str) -> None:
        """Give a replica another id; it keeps its place in the order."""
        renamed = [(new if key == old else key, each) for key, each in self.items()]
        self.clear()
        self.update(renamed)
        self._former[old] = self[new]
        self[new].id = new


class Fleet:
    """The replicas of one router; see the module."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.replicas = Replicas()
        for slot, each in enumerate(config.replicas):
            self.replicas[each.name] = Replica.new(slot, each, config.rates)
        self.index = PrefixIndex(config.index.max_keys)
        self.sessions = Sessions(config.sessions.max_sessions, config.sessions.ttl_s)
        self._turn = 0

    # --- requests

    def place(
        self,
        prompt: PromptView | None,
        *,
        model: str | None,
        session: str | None,
        bound_to: str | None = None,
        exclude: Collection[str] = (),
        now_s: float,
    ) -> Decision:
        """Say which replica a request should go to, and change nothing but what time has ended.

        ``bound_to`` is the only replica that can answer, ``exclude`` those
        that have failed to. Raises `UnknownModel`, or `NoReplica` when none of
        those that serve the model takes requests.
        """
        self.index.expire(now_s, _EXPIRED_PER_PLACE)
        eligible = self._eligible(model, exclude, bound_to)
        keyring = PromptKeyring(prompt)
        tokens = 0 if prompt is None else prompt.token_count
        assessed = [
            assess(each, tokens, keyring.of(each.shape), self.index, now_s) for each in eligible
        ]
        candidates = tuple(each.candidate for each in assessed)
        home = None if session is None else self.sessions.home(session, now_s)
        question = Question(
            affinity=keyring.affinity(session),
            home=next((each.id for each in eligible if each.slot == home), None),
            spill_margin_s=self.config.sessions.spill_margin_s,
            turn=self._turn,
        )
        picked, reason = pick(self.config.policy, candidates, question)
        if bound_to is not None:
            reason = Reason.BOUND
        elif exclude:
            reason = Reason.RETRY
        chosen = next(each for each in assessed if each.candidate is picked)
        return _decision(chosen, reason, tokens, candidates, session)

    def start(self, decision: Decision, now_s: float) -> Ticket:
        """Count a request as in flight, and its prompt as arriving on its replica's GPU."""
        plan = decision.plan
        replica = self.replicas[decision.replica_id]
        claim = None
        if plan.claim_keys:
            ttl_s = self._claim_ttl_s(replica)
            claim = self.index.believe(plan.slot, plan.claim_keys, now_s + ttl_s)
        if plan.session is not None:
            self.sessions.note(plan.session, plan.slot, now_s)
        self._turn += 1
        return Ticket(replica, self.index, claim, decision, now_s)

    def tick(self, now_s: float) -> None:
        """End what time has ended; to be called about once a second."""
        self.index.expire(now_s)

    def _eligible(
        self, model: str | None, exclude: Collection[str], bound_to: str | None
    ) -> list[Replica]:
        serving = [each for each in self.replicas.values() if each.serves(model)]
        if not serving:
            raise UnknownModel(f"no replica serves the model '{model}'", param="model")
        # By replica, not by id: one may have got its name since it was tried.
        tried = [self.replicas[each] for each in exclude]
        left = [each for each in serving if each not in tried]
        if bound_to is not None:
            bound = self.replicas[bound_to]
            left = [each for each in left if each is bound]
        for state in (State.UP, State.UNKNOWN):
            if eligible := [each for each in left if each.state is state]:
                return eligible
        raise NoReplica(_why_none(serving, tried, bound_to))

    def _claim_ttl_s(self, replica: Replica) -> float:
        index = self.config.index
        return index.speculative_ttl_s if replica.has_events else index.history_ttl_s

    # --- what health checks find

    def up(self, replica_id: str) -> None:
        """Note that a replica answers."""
        self.replicas[replica_id].receive(Signal.ANSWERED)

    def down(self, replica_id: str) -> None:
        """Note that a replica does not answer.

        One that tells nothing is forgotten, since it may come back empty; of
        the others their feeds know.
        """
        replica = self.replicas[replica_id]
        replica.receive(Signal.FAILED)
        if not (replica.has_events or replica.has_agent):
            self.index.forget(replica.slot)

    def drain(self, replica_id: str) -> None:
        """Give a replica nothing new."""
        self.replicas[replica_id].receive(Signal.DRAIN)

    def resume(self, replica_id: str) -> None:
        """End `drain`."""
        self.replicas[replica_id].receive(Signal.RESUME)

    def set_models(self, replica_id: str, models: Collection[str]) -> None:
        """Note which models a replica serves."""
        self.replicas[replica_id].models = frozenset(models)

    # --- what agents tell

    def apply_info(self, replica_id: str, info: InstanceInfo) -> bool:
        """Take over what an agent says of its replica; return whether it has started anew.

        A replica that has is forgotten. One without a configured name gets the
        agent's, unless that is taken.
        """
        replica = self.replicas[replica_id]
        restarted = replica.incarnation != info.incarnation
        if restarted:
            self.index.forget(replica.slot)
            replica.incarnation = info.incarnation
            replica.shape = KeyShape(
                scheme=HashScheme(info.hash_algorithm, info.hash_seed),
                block_tokens=info.block_tokens,
                blocks_per_chunk=info.chunk_tokens // info.block_tokens,
            )
            replica.shape_checked, replica.shape_problem = False, None
        replica.kv_bytes_per_token = info.chunk_bytes / info.chunk_tokens
        for tier, part in _MEASURED_TIERS.items():
            if measured := info.tiers.get(tier.value):
                replica.rates.measured(part, measured.read_bytes_per_s)
        if replica.config.instance_id is None and info.instance_id not in self.replicas:
            self.replicas.rename(replica.id, info.instance_id)
        return restarted

    def apply_snapshot(self, replica_id: str, snapshot: Snapshot) -> None:
        """Replace what is known of a replica's lower tiers."""
        slot = self.replicas[replica_id].slot
        self.index.forget(slot, LOWER_TIERS)
        for name, packed in snapshot.tiers.items():
            self.index.add(slot, _lower_tier(name), unpack_keys(packed))

    def apply_events(self, replica_id: str, batch: EventBatch) -> None:
        """Take over what has changed in a replica's lower tiers."""
        slot = self.replicas[replica_id].slot
        for event in batch.events:
            change = self.index.add if event.stored else self.index.remove
            change(slot, _lower_tier(event.tier), unpack_keys(event.keys))

    # --- what KV events tell

    def following_kv(self, replica_id: str) -> None:
        """Note that a replica's KV events are being followed from now on."""
        self.replicas[replica_id].has_events = True

    def apply_kv(self, replica_id: str, batch: KvBatch) -> None:
        """Take over a message of vLLM's KV events.

        Of a replica with an agent only those of the GPU: of the lower tiers
        the agent knows better.
        """
        replica = self.replicas[replica_id]
        for event in batch.events:
            if isinstance(event, FirstBlocks):
                self._check_shape(replica, event)
            else:
                self._apply_kv_event(replica, event)

    def lost_kv(self, replica_id: str) -> None:
        """Forget what KV events told: their publisher is gone, began anew, or left a gap."""
        replica = self.replicas[replica_id]
        replica.has_events = False
        self.index.forget(replica.slot, (Tier.GPU,) if replica.config.agent_url else None)
        # A stock vLLM may come back with another random seed.
        replica.shape_checked = False

    def _apply_kv_event(self, replica: Replica, event: KvEvent) -> None:
        lower_too = replica.config.agent_url is None
        match event:
            case GpuCleared():
                self.index.forget(replica.slot, (Tier.GPU,))
            case BlocksStored(tier, keys) if lower_too or tier is Tier.GPU:
                self.index.add(replica.slot, tier, keys, counted=True)
            case BlocksRemoved(tier, keys) if lower_too or tier is Tier.GPU:
                self.index.remove(replica.slot, tier, keys)

    def _check_shape(self, replica: Replica, first: FirstBlocks) -> None:
        """See that the replica's keys are those that its tokens give; find out how if not."""
        if replica.shape_checked:
            return
        known = replica.shape
        if known is not None and explains(known, first):
            replica.shape_checked = True
            return
        found = find_shape(first, replica.config.hash_seed)
        replica.shape_checked = True
        if found is None:
            replica.shape = None
            replica.shape_problem = (
                "its KV events have keys that no known hash gives: most likely PYTHONHASHSEED is "
                "not set there and the hash is an xxhash one; set it on the replica, and as "
                "hash_seed here. Until then what it was sent is remembered by text"
            )
            return
        step = known.blocks_per_chunk if known is not None else 1
        replica.shape = replace(found, blocks_per_chunk=step)
        replica.shape_problem = None


def _decision(
    chosen: Assessment,
    reason: Reason,
    prompt_tokens: int,
    candidates: tuple[CandidateCost, ...],
    session: str | None,
) -> Decision:
    replica = chosen.replica
    prefetched = chosen.gain_s > 0 and replica.has_agent
    return Decision(
        replica_id=replica.id,
        url=replica.config.url,
        reason=reason,
        prompt_tokens=prompt_tokens,
        matched_tokens=chosen.candidate.matched_tokens,
        predicted_ttft_s=chosen.candidate.ttft_s,
        prefetch_keys=chosen.slow_keys() if prefetched else (),
        expected_gain_s=chosen.gain_s if prefetched else 0.0,
        candidates=candidates,
        plan=Plan(
            slot=replica.slot,
            work=chosen.work,
            claim_keys=chosen.keys.keys,
            session=session,
        ),
    )


def _lower_tier(name: str) -> Tier:
    """Return the tier that an agent names; one that is not known is the slowest."""
    return Tier(name) if name in LOWER_TIERS else Tier.REMOTE


def _why_none(serving: Sequence[Replica], tried: Sequence[Replica], bound_to: str | None) -> str:
    states = ", ".join(
        f"{each.id} {'was tried' if each in tried else each.state}" for each in serving
    )
    if bound_to is not None:
        return f"only '{bound_to}' has what this request goes on from, and it is not up ({states})"
    return f"no replica can take the request ({states})"
