"""One replica as the router knows it: configuration, state, tiers, rates and load.

`Fleet` changes it, for the feeds, the health checks and the requests. No I/O, no clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from types import MappingProxyType
from typing import Final

from router.config.cost_weights import DEFAULT_WEIGHTS, CostWeights
from router.config.settings import NixlRole, RatesConfig, ReplicaConfig
from router.fleet.breaker import Breaker, Circuit
from router.fleet.cost_model import CostModel, CostPart, PredictionErrors, RecentWork
from router.fleet.replica_queue import ReplicaQueue
from router.index.kv_events import FirstBlocks, explains, find_shape
from router.index.lmcache_keys import LmcacheKeys
from router.index.prompt_keys import LOWER_TIERS, KeyShape, KvTier
from warmroute_common.agent_protocol import MAX_PINNED_SHARE, InstanceInfo
from warmroute_common.keys import HashScheme

SLOW_TIERS: Final = (KvTier.DISK, KvTier.REMOTE)
"""KV in these tiers is first brought to CPU RAM: fetched."""
_TIERS: Final = (KvTier.GPU, *LOWER_TIERS)
_MEASURED_TIERS: Final = {
    KvTier.CPU: CostPart.LOAD,
    KvTier.DISK: CostPart.DISK,
    KvTier.REMOTE: CostPart.REMOTE,
}
_UNKNOWN_KEYS: Final = (
    "no known hash gives the keys in its KV events: most likely its hash is an xxhash one and "
    "PYTHONHASHSEED is not set there; set PYTHONHASHSEED on the replica, and the same value as "
    "hash_seed here. Until then prompts are matched by text there"
)
UNKNOWN_POOL: Final = "unknown"
"""The pool of replicas whose models are not known."""
_MANY_UNTOLD: Final = 8
"""Answered prompts with new blocks, and no KV event: one or two may have found others' blocks."""
_NIXL_PAUSE_S: Final = 1.0
_LONGEST_NIXL_PAUSE_S: Final = 300.0


class ReplicaState(StrEnum):
    """Whether a replica takes requests."""

    UNKNOWN = "unknown"
    """Not probed yet: used only if no replica is known to be up."""
    UP = "up"
    DOWN = "down"
    DRAINING = "draining"
    """Finishes its requests and gets no new ones."""
    REMOVED = "removed"
    """Not in the fleet; requests that are in flight there run to their ends."""


class Stall(StrEnum):
    """Why a replica will not answer the requests that it has accepted."""

    SILENT = "silent"
    """It accepted several health checks in a row, and answered neither these nor any request."""
    ASLEEP = "asleep"
    """It sleeps or is paused: it answers health checks and computes nothing."""
    STUCK = "stuck"
    """It answers health checks and computes nothing, and does not say why."""


class Signal(StrEnum):
    """What can change a replica's state."""

    ANSWERED = "answered"
    FAILED = "failed"
    DRAIN = "drain"
    RESUME = "resume"
    REMOVE = "remove"


TRANSITIONS: Final[Mapping[tuple[ReplicaState, Signal], ReplicaState]] = MappingProxyType(
    {
        (ReplicaState.UNKNOWN, Signal.ANSWERED): ReplicaState.UP,
        (ReplicaState.UNKNOWN, Signal.FAILED): ReplicaState.DOWN,
        (ReplicaState.UNKNOWN, Signal.DRAIN): ReplicaState.DRAINING,
        (ReplicaState.UP, Signal.FAILED): ReplicaState.DOWN,
        (ReplicaState.UP, Signal.DRAIN): ReplicaState.DRAINING,
        (ReplicaState.DOWN, Signal.ANSWERED): ReplicaState.UP,
        (ReplicaState.DOWN, Signal.DRAIN): ReplicaState.DRAINING,
        # A draining replica stays so, whether it answers or not, until resumed.
        (ReplicaState.DRAINING, Signal.RESUME): ReplicaState.UNKNOWN,
        **{(each, Signal.REMOVE): ReplicaState.REMOVED for each in ReplicaState},
    }
)
"""The next state; a pair that is not listed changes nothing."""


@dataclass(frozen=True, slots=True)
class SecondLeg:
    """A request whose prompt another replica prefills now; it will be sent here then."""

    prompt_tokens: int
    due_s: float
    """When the prompt should be prefilled."""


@dataclass(slots=True)
class PulledAnswers:
    """The answers of a replica whose prompts it had pulled, since the router's start."""

    ended: int = 0
    counted_tokens: int = 0
    """Tokens of them that vLLM's metrics count as computed there."""
    uncounted: int = 0
    """Those of them of which that is not known."""


@dataclass(eq=False, kw_only=True)
class Replica:
    """One replica: its configuration, state, tiers, rates and load."""

    id: str
    slot: int
    """Its number in the index; unlike the id it never changes. Another replica may get it after
    this one was removed and nothing refers to the slot."""
    config: ReplicaConfig
    rates: CostModel
    kv_bytes_per_token: float
    weights: CostWeights = DEFAULT_WEIGHTS
    serial: int = 0
    """Its number among all replicas that were ever in the fleet: unique."""
    state: ReplicaState = ReplicaState.UNKNOWN
    models: frozenset[str] | None = None
    """Names that requests may use; None until the replica reports them."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Paths of its LoRA adapters, by the names that requests use."""
    contexts: Mapping[str, int] = field(default_factory=dict)
    """How many tokens the context of its models takes, by these names, as far as reported."""
    roots: frozenset[str] = frozenset()
    """Paths of its other models (``--model``); empty until the replica reports them."""
    shape: KeyShape | None = None
    """How it makes keys; None if unknown: then prompts sent there are remembered by text."""
    lmcache_keys: LmcacheKeys | None = None
    """The keys of its LMCache; None if it has none, or if they are not known yet."""
    tokens_differ: bool = False
    """Whether it tokenizes differently than the router: prompts are matched by text there."""
    shape_checked: bool = False
    """Whether the shape was found to give the keys in its events."""
    shape_problem: str | None = None
    """Why its keys are not known, for a person; None if there is no such problem."""
    events_problem: str | None = None
    """Why its KV events are not known, for a person; None if they are, or if it has none."""
    untold: int = 0
    """Answered prompts with new blocks since a KV event last reported blocks on the GPU."""
    stored_s: float = -inf
    """When that event came."""
    ranks: int = 1
    """Data-parallel ranks behind its URL; the KV events of the first are followed."""
    incarnation: str | None = None
    """The agent's; None without an agent, or before it answered."""
    transfer_port: int | None = None
    """The port where other replicas fetch its chunks, if its agent allows that."""
    capacity_bytes: Mapping[str, int] = field(default_factory=dict)
    """Capacities of its lower tiers by name, as far as reported."""
    layout: str = ""
    """Fingerprint of its chunks: only replicas with equal ones can exchange chunks."""
    max_staged_tokens: float = inf
    """How many tokens of one prompt it can bring through its CPU RAM to the GPU."""
    staged_tokens: int = 0
    """Tokens brought to its CPU RAM, or under way, for requests without a first token."""
    no_copies_until_s: float = 0.0
    """No copies from or to it until then, since one failed."""
    nixl_role: NixlRole | None = None
    """What it may do by NixlConnector: prefill for others, decode for others, or both. None also
    while that is paused, since it failed."""
    nixl_due_s: float = inf
    """When such a pause ends."""
    _nixl_pause_s: float = 0.0
    rests: bool = False
    """Whether it gets no requests while another is up, since they would hang."""
    breaker: Breaker = field(default_factory=Breaker)
    why_down: str = ""
    """What a health check or a request found wrong; empty while it answers. Also set for a draining
    replica, whose state does not show it."""
    stall: Stall | None = None
    """Why it will not answer pending requests; None if it may. A health check found that."""
    is_overdue: bool = False
    """Whether a request waits there for much longer than predicted (`Ticket.is_overdue`)."""
    heard_s: float = -inf
    """When it last sent a part of an answer or a KV event."""
    has_events: bool = False
    """Whether the router receives its KV events now."""
    fetching_until_s: float = 0.0
    """Predicted end of all fetches requested so far: the next fetch begins then."""
    queue: ReplicaQueue = field(default_factory=ReplicaQueue)
    errors: PredictionErrors = field(default_factory=PredictionErrors)
    """Errors of its predicted TTFTs."""
    started: int = 0
    """Requests ever sent there."""
    recent: RecentWork = field(default_factory=RecentWork)
    """Work of the requests sent there recently."""
    work_s: float = 0.0
    """Mean predicted work of the last requests (`CostWeights.recent_requests`)."""
    waiting: int = 0
    """Requests in flight without a first token."""
    fetching: int = 0
    """Those of them whose KV is being brought to its CPU RAM."""
    second_legs: dict[int, SecondLeg] = field(default_factory=dict)
    """Requests whose prompts other replicas prefill for it now, by their numbers."""
    pulled: PulledAnswers = field(default_factory=PulledAnswers)
    decoding: int = 0
    """Requests in flight after their first token."""
    context_tokens: int = 0
    """Tokens of the prompts of these requests."""
    others_waiting: int = 0
    """Requests of other routers that it has not begun, as last reported."""
    others_running: int = 0
    """Requests of other routers that it has begun."""
    answers: int = 0
    """Ended answers whose end of prefill is known."""
    _answer_s: float = 0.0
    """Mean time from end of prefill to end of answer, of the last `CostWeights.recent_requests`."""

    @classmethod
    def new(
        cls,
        slot: int,
        config: ReplicaConfig,
        rates: RatesConfig,
        weights: CostWeights = DEFAULT_WEIGHTS,
        *,
        serial: int = 0,
    ) -> "Replica":
        """Return a replica with nothing known except its configuration."""
        return cls(
            id=config.name,
            slot=slot,
            serial=serial,
            config=config,
            nixl_role=config.nixl_role,
            weights=weights,
            rates=CostModel(rates, weights),
            kv_bytes_per_token=rates.kv_bytes_per_token,
            recent=RecentWork(weights),
        )

    @property
    def in_flight(self) -> int:
        """Requests of this router in flight there."""
        return self.waiting + self.decoding

    @property
    def incoming_tokens(self) -> int:
        """Tokens of prompts that others prefill for it now: their KV will take its memory."""
        return sum(each.prompt_tokens for each in self.second_legs.values())

    @property
    def is_removed(self) -> bool:
        """Whether it has left the fleet: then the index records nothing about it."""
        return self.state is ReplicaState.REMOVED

    @property
    def only_prefills(self) -> bool:
        """Whether it answers nothing while another replica can."""
        return self.config.nixl_role == "prefill"

    @property
    def key_shape(self) -> KeyShape | None:
        """How prompts' keys are made; None if prompts are matched by text."""
        if self.tokens_differ:
            return None
        lmcache = self.lmcache_keys
        if lmcache is None:
            return self.shape
        if self.shape is None:
            return KeyShape(scheme=None, block_tokens=lmcache.chunk_tokens, lmcache=lmcache)
        # LMCache makes chunks of whole blocks.
        step = max(1, lmcache.chunk_tokens // self.shape.block_tokens)
        return replace(self.shape, blocks_per_chunk=step, lmcache=lmcache)

    @property
    def event_tiers(self) -> tuple[KvTier, ...]:
        """The tiers taken from KV events: an agent or LMCache reports the lower ones better."""
        config = self.config
        has_lmcache = config.lmcache is not None or self.lmcache_keys is not None
        return (KvTier.GPU,) if has_lmcache or config.agent_url is not None else _TIERS

    @property
    def can_prefetch(self) -> bool:
        """Whether it accepts requests to bring KV to CPU RAM."""
        lmcache = self.lmcache_keys
        return self.has_agent or (lmcache is not None and lmcache.is_server)

    def reads_late(self, matched: Mapping[KvTier, int]) -> bool:
        """Whether it reads some of these tokens only when it begins with their request."""
        return not self.can_prefetch and any(matched.get(tier) for tier in SLOW_TIERS)

    @property
    def has_agent(self) -> bool:
        """Whether it has an agent that has answered."""
        return self.incarnation is not None

    def can_stage(self, tokens: int) -> bool:
        """Whether its CPU RAM can take these tokens too, and keep them until they are used."""
        return self.staged_tokens + tokens <= self.max_staged_tokens

    def can_give(self, now_s: float) -> bool:
        """Whether other replicas can copy chunks from it."""
        return self.transfer_port is not None and self.no_copies_until_s <= now_s

    def pause_nixl(self, now_s: float) -> float | None:
        """Take no part in remote prefills for a while; return the seconds, None if it is paused.

        Each pause is twice as long as the one before, until `resume_nixl` says that it works.
        """
        if self.nixl_role is None:
            return None
        self._nixl_pause_s = min(2 * self._nixl_pause_s or _NIXL_PAUSE_S, _LONGEST_NIXL_PAUSE_S)
        self.nixl_role, self.nixl_due_s = None, now_s + self._nixl_pause_s
        return self._nixl_pause_s

    def resume_nixl(self, *, works: bool) -> None:
        """End a pause, if there is one; ``works``: the next one is short again."""
        if self.nixl_due_s < inf:
            self.nixl_role, self.nixl_due_s = self.config.nixl_role, inf
        if works:
            self._nixl_pause_s = 0.0

    def take_info(self, info: InstanceInfo) -> bool:
        """Apply an agent's report; return whether the replica has restarted."""
        restarted = self.incarnation != info.incarnation
        if restarted:
            self.incarnation = info.incarnation
            self.shape = KeyShape(
                scheme=HashScheme(info.hash_algorithm, info.hash_seed),
                block_tokens=info.block_tokens,
                blocks_per_chunk=info.chunk_tokens // info.block_tokens,
            )
            self.shape_checked, self.shape_problem = False, None
            self.fetching_until_s = self.no_copies_until_s = 0.0
        self.kv_bytes_per_token = info.chunk_bytes / info.chunk_tokens
        self.transfer_port, self.layout = info.transfer_port, info.layout
        if (cpu := info.tiers.get(KvTier.CPU.value)) and cpu.capacity_bytes:
            pinned_bytes = MAX_PINNED_SHARE * cpu.capacity_bytes
            self.max_staged_tokens = pinned_bytes / self.kv_bytes_per_token
        self.capacity_bytes = {name: each.capacity_bytes for name, each in info.tiers.items()}
        for tier, part in _MEASURED_TIERS.items():
            if measured := info.tiers.get(tier.value):
                self.rates.report(part, measured.read_bytes_per_s, measured.read_bytes)
        if info.compute is not None:
            self.rates.report_compute(info.compute)
        return restarted

    def check_shape(self, first: FirstBlocks) -> bool:
        """Verify the key shape by a KV event, or find the right one; return whether it changed."""
        if self.shape_checked:
            return False
        known = self.shape
        if known is not None and explains(known, first):
            self.shape_checked = True
            return False
        found = find_shape(first, self.config.hash_seed)
        if found is None and first.cache_salt is not None:
            return False  # not conclusive: vLLM versions differ in how salts enter keys
        self.shape_checked = True
        step = known.blocks_per_chunk if known is not None else 1
        self.shape = None if found is None else replace(found, blocks_per_chunk=step)
        self.shape_problem = _UNKNOWN_KEYS if found is None else None
        return True

    def events_fault(self) -> str | None:
        """Return why the router does not know all of its KV from its events, for a person."""
        if self.events_problem is not None:
            return self.events_problem
        if self.has_events and self.untold >= _MANY_UNTOLD:
            return (
                f"no KV event came for its last {self.untold} answered prompts: see that its "
                "prefix caching is on, and that the topic and port are those of its own publisher"
            )
        if self.ranks > 1:
            return (
                f"has {self.ranks} data-parallel ranks behind one URL, and only the KV of the "
                "first is known: give each rank its own URL (--data-parallel-external-lb)"
            )
        return None

    def note_stored(self, now_s: float) -> None:
        """Note that a KV event reported new blocks on the GPU."""
        self.untold, self.stored_s = 0, now_s

    def fetch(self, seconds: float, now_s: float) -> float:
        """Note a requested fetch of KV; return its predicted end."""
        self.fetching_until_s = max(self.fetching_until_s, now_s) + seconds
        return self.fetching_until_s

    def note_answer(self, seconds: float) -> None:
        """Note how long an answer took, from its first token to its end."""
        self.answers += 1
        self._answer_s += (seconds - self._answer_s) / min(
            self.answers, self.weights.recent_requests
        )
        self.queue.set_answer_s(self._answer_s)

    def note_output_tokens(self, tokens: int, seconds: float, now_s: float) -> None:
        """Note how long an answer took for the tokens after its first one.

        The rate is that of an answer which runs alone: so a replica that computes much, or writes
        many answers, counts as slow only while it does, whatever its last answers took.
        """
        self.rates.note_output_tokens(tokens, seconds / self._slowed(now_s))

    def report_output_tokens(self, tokens_per_s: float, tokens: float, now_s: float) -> None:
        """Note how fast answers were written recently, as its server says.

        ``tokens`` is how many it has computed since its start.
        """
        self.rates.report_output_tokens(tokens_per_s * self._slowed(now_s), tokens)

    def _slowed(self, now_s: float) -> float:
        """Return the factor by which an answer takes longer there than one that runs alone."""
        share = min(self.weights.most_prefill_share, self.recent.share(now_s))
        longer = 1.0 + self.context_tokens / self.weights.doubling_tokens
        return longer / (1.0 - share)

    def note_work(self, busy_s: float, now_s: float) -> None:
        """Note the predicted work of the request that was just sent there."""
        self.recent.note(busy_s, now_s)
        self.work_s += (busy_s - self.work_s) / min(self.started, self.weights.recent_requests)

    def note_load(self, running: int, waiting: int, now_s: float) -> None:
        """Note how many requests it has in all: those beyond this router's come from others.

        It does not report which ones: their share is assumed equal in both states, and their work
        equal to the mean of this router's requests.
        """
        share = max(0.0, 1.0 - self.in_flight / (running + waiting)) if running + waiting else 0.0
        self.others_waiting, self.others_running = round(share * waiting), round(share * running)
        self.queue.set_others(share * waiting * self.work_s, now_s)

    def receive(self, signal: Signal) -> bool:
        """Apply a signal; return whether the state changed."""
        before = self.state
        self.state = TRANSITIONS.get((before, signal), before)
        return self.state is not before

    @property
    def is_leaving(self) -> bool:
        """Whether it is draining and answers."""
        return self.state is ReplicaState.DRAINING and not self.why_down

    @property
    def is_held_off(self) -> bool:
        """Whether it gets no requests while another replica can answer."""
        return self.rests or not self.breaker.admits

    def why_idle(self, now_s: float) -> str | None:
        """Return why it gets no requests now, for a person; None if it gets some."""
        breaker = self.breaker
        match self.state:
            case ReplicaState.UNKNOWN:
                return "it has not been probed yet"
            case ReplicaState.DOWN:
                return self.why_down
            case ReplicaState.DRAINING:
                also = f"; {self.why_down}" if self.why_down else ""
                return f"it is draining{also}"
        if breaker.state is Circuit.OPEN:
            return f"{breaker.why}; it is tried again in {max(0.0, breaker.due_s - now_s):.1f} s"
        if breaker.state is Circuit.HALF_OPEN:
            return f"{breaker.why}; one request at a time is tried"
        return "its LMCache server has ended" if self.rests else None

    @property
    def pool(self) -> str:
        """The pool that it belongs to: the first of its models that is not an adapter."""
        models = self.models or ()
        bases = [each for each in models if each not in self.adapters]
        return min(bases or models, default=UNKNOWN_POOL)

    def serves(self, model: str | None) -> bool:
        """Whether a request for a model may go there; yes if its models are not known."""
        return model is None or self.models is None or model in self.models

    def has_keys_of(self, other: "Replica") -> bool:
        """Whether both make equal keys of one prompt."""
        return self.key_shape == other.key_shape and self.adapters == other.adapters

    def __repr__(self) -> str:
        return (
            f"<Replica {self.id} {self.state} waiting={self.waiting} decoding={self.decoding} "
            f"shape={self.shape} events={self.has_events}>"
        )
