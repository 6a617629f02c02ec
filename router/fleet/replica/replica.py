"""One replica as the router knows it: its tiers, its life, its load.

Nothing here does I/O; `Fleet` changes it, on behalf of the feeds, the
health checks and the requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from router.config import DEFAULT, Judgment, RatesConfig, ReplicaConfig
from router.fleet.breaker import Breaker, Circuit
from router.fleet.replica.state import TRANSITIONS, Signal, State
from router.index import (
    LOWER_TIERS,
    FirstBlocks,
    KeyShape,
    LmcacheKeys,
    Tier,
    explains,
    find_shape,
)
from router.latency import Part, PredictionErrors, Rates, RecentWork, ReplicaQueue
from warmroute_common.agent_protocol import MAX_PINNED_SHARE, InstanceInfo
from warmroute_common.keys import HashScheme

_RECENT: Final = 50
"""So many requests averages are of, about."""


SLOW_TIERS: Final = (Tier.DISK, Tier.REMOTE)
"""KV in these is brought to CPU RAM first: fetched."""
_TIERS: Final = (Tier.GPU, *LOWER_TIERS)
_MEASURED_TIERS: Final = {Tier.CPU: Part.LOAD, Tier.DISK: Part.DISK, Tier.REMOTE: Part.REMOTE}
_UNKNOWN_KEYS: Final = (
    "its KV events have keys that no known hash gives: most likely PYTHONHASHSEED is "
    "not set there and the hash is an xxhash one; set it on the replica, and as "
    "hash_seed here. Until then what it was sent is remembered by text"
)


@dataclass(eq=False, kw_only=True)
class Replica:
    """One replica's configuration, what was learned of it, and what it is busy with."""

    id: str
    slot: int
    """Its number in the index; unlike the id it never changes. Another replica may get it when
    this one was removed and nothing names the slot any more."""
    config: ReplicaConfig
    rates: Rates
    kv_bytes_per_token: float
    serial: int = 0
    """Its number among all replicas that ever were in the fleet: no other one gets it."""
    state: State = State.UNKNOWN
    models: frozenset[str] | None = None
    """Names that requests may use; None until it told."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Where it has its LoRA adapters from, by the names that requests use."""
    roots: frozenset[str] = frozenset()
    """Where it has its other models from (``--model``); empty until it told."""
    shape: KeyShape | None = None
    """None: its keys are not known, what it was sent is remembered by text."""
    lmcache_keys: LmcacheKeys | None = None
    """Those of its LMCache; None where it has none, or none is known yet."""
    tokens_differ: bool = False
    """Whether it makes other tokens of prompts than the router: they are matched by text there."""
    shape_checked: bool = False
    """Whether the shape was seen to give the keys in its events."""
    shape_problem: str | None = None
    """Why its keys cannot be known, for a person; None while nothing speaks against it."""
    incarnation: str | None = None
    """The agent's; None without one, or before it answered."""
    transfer_port: int | None = None
    """Where other replicas fetch its chunks, if it has an agent that lets them."""
    capacity_bytes: Mapping[str, int] = field(default_factory=dict)
    """How much its lower tiers hold at most, by their names, of those that have told."""
    layout: str = ""
    """Fingerprint of its chunks: only replicas with equal ones can exchange them."""
    max_staged_tokens: float = inf
    """How much of one prompt it can bring through its CPU RAM to the GPU."""
    no_copies_until_s: float = 0.0
    """A copy from or to it has failed: it is left alone until then."""
    rests: bool = False
    """Whether it gets nothing while another is up, since it would hang."""
    breaker: Breaker = field(default_factory=Breaker)
    why_down: str = ""
    """What its health checks, or a request, found wrong when it was called down; empty while it
    answers. Of a draining one too, whose state does not tell."""
    is_silent: bool = False
    """Whether several health checks in a row were taken and not answered, nor anything else: what
    waits there for its first byte waits in vain. Of one that refuses them that is not known."""
    heard_s: float = -inf
    """When it gave a sign of life last: part of an answer, or a KV event."""
    has_events: bool = False
    """Whether its KV events are being followed right now."""
    fetching_until_s: float = 0.0
    """When the KV that it was told to fetch will be there, as predicted: more comes after that."""
    queue: ReplicaQueue = field(default_factory=ReplicaQueue)
    recent: RecentWork = field(default_factory=RecentWork)
    errors: PredictionErrors = field(default_factory=PredictionErrors)
    """Of its TTFTs."""
    started: int = 0
    """Requests that it was given, ever."""
    work_s: float = 0.0
    """What each of them was to take of its time, on average of the last `_RECENT`."""
    waiting: int = 0
    """Requests sent whose first token has not come."""
    fetching: int = 0
    """Those of them whose KV is being brought to its CPU RAM first."""
    decoding: int = 0
    """Requests between first token and end."""
    others_waiting: int = 0
    """Requests that other routers gave it, as it told last: those it has not begun."""
    others_running: int = 0
    """The others of those."""
    answers: int = 0
    """Answers that have ended, of which the prefill's end was told."""
    _answer_s: float = 0.0
    """How long they took after that, on average of the last `_RECENT`."""

    @classmethod
    def new(
        cls,
        slot: int,
        config: ReplicaConfig,
        rates: RatesConfig,
        judgment: Judgment = DEFAULT,
        *,
        serial: int = 0,
    ) -> "Replica":
        """Return a replica of which only the configuration is known."""
        return cls(
            id=config.name,
            slot=slot,
            serial=serial,
            config=config,
            rates=Rates(rates, judgment.learning),
            recent=RecentWork(judgment),
            kv_bytes_per_token=rates.kv_bytes_per_token,
        )

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return self.waiting + self.decoding

    @property
    def is_removed(self) -> bool:
        """Whether it is no part of the fleet any more: nothing is noted of what it holds."""
        return self.state is State.REMOVED

    @property
    def key_shape(self) -> KeyShape | None:
        """How the keys of prompts are made; None where they are matched by text."""
        if self.tokens_differ:
            return None
        lmcache = self.lmcache_keys
        if lmcache is None:
            return self.shape
        if self.shape is None:
            return KeyShape(scheme=None, block_tokens=lmcache.chunk_tokens, lmcache=lmcache)
        # Whole blocks: LMCache sees to it.
        step = max(1, lmcache.chunk_tokens // self.shape.block_tokens)
        return replace(self.shape, blocks_per_chunk=step, lmcache=lmcache)

    @property
    def event_tiers(self) -> tuple[Tier, ...]:
        """The tiers that KV events tell of: the lower ones an agent or LMCache knows better."""
        config = self.config
        has_lmcache = config.lmcache is not None or self.lmcache_keys is not None
        return (Tier.GPU,) if has_lmcache or config.agent_url is not None else _TIERS

    @property
    def can_prefetch(self) -> bool:
        """Whether it can be told to bring KV to CPU RAM."""
        lmcache = self.lmcache_keys
        return self.has_agent or (lmcache is not None and lmcache.is_server)

    def reads_late(self, matched: Mapping[Tier, int]) -> bool:
        """Whether it reads some of these tokens by itself, when it gets to their request."""
        return not self.can_prefetch and any(matched.get(tier) for tier in SLOW_TIERS)

    @property
    def has_agent(self) -> bool:
        """Whether an agent has told about it (and can be told to prefetch)."""
        return self.incarnation is not None

    def can_give(self, now_s: float) -> bool:
        """Whether other replicas can copy chunks from it."""
        return self.transfer_port is not None and self.no_copies_until_s <= now_s

    def take_info(self, info: InstanceInfo) -> bool:
        """Take over what an agent says; return whether the replica has started anew."""
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
        if (cpu := info.tiers.get(Tier.CPU.value)) and cpu.capacity_bytes:
            pinned_bytes = MAX_PINNED_SHARE * cpu.capacity_bytes
            self.max_staged_tokens = pinned_bytes / self.kv_bytes_per_token
        self.capacity_bytes = {name: each.capacity_bytes for name, each in info.tiers.items()}
        for tier, part in _MEASURED_TIERS.items():
            if measured := info.tiers.get(tier.value):
                self.rates.measured(part, measured.read_bytes_per_s)
        return restarted

    def check_shape(self, first: FirstBlocks) -> bool:
        """See that keys are made as is believed, or find out how; return whether that changes."""
        if self.shape_checked:
            return False
        known = self.shape
        if known is not None and explains(known, first):
            self.shape_checked = True
            return False
        found = find_shape(first, self.config.hash_seed)
        if found is None and first.cache_salt is not None:
            return False  # no proof: vLLM has put salts into keys in other ways too
        self.shape_checked = True
        step = known.blocks_per_chunk if known is not None else 1
        self.shape = None if found is None else replace(found, blocks_per_chunk=step)
        self.shape_problem = _UNKNOWN_KEYS if found is None else None
        return True

    def fetch(self, seconds: float, now_s: float) -> float:
        """Note that it was told to fetch KV; return when that will be there."""
        self.fetching_until_s = max(self.fetching_until_s, now_s) + seconds
        return self.fetching_until_s

    def note_answer(self, seconds: float) -> None:
        """Learn how long answers take, from their first tokens to their ends."""
        self.answers += 1
        self._answer_s += (seconds - self._answer_s) / min(self.answers, _RECENT)
        self.queue.set_answer_s(self._answer_s)

    def note_work(self, busy_s: float) -> None:
        """Note what one more of the requests that it is given takes of its time."""
        self.work_s += (busy_s - self.work_s) / min(self.started, _RECENT)

    def note_load(self, running: int, waiting: int, now_s: float) -> None:
        """Note how many requests it has in all: what this router did not give it others did.

        Which of the waiting ones those are it does not tell: in each state as many as of all. Each
        is taken for as much work as this router's own were on average.
        """
        share = max(0.0, 1.0 - self.in_flight / (running + waiting)) if running + waiting else 0.0
        self.others_waiting, self.others_running = round(share * waiting), round(share * running)
        self.queue.set_others(share * waiting * self.work_s, now_s)

    def receive(self, signal: Signal) -> bool:
        """Move to the next state; return whether that is another one."""
        before = self.state
        self.state = TRANSITIONS.get((before, signal), before)
        return self.state is not before

    @property
    def is_leaving(self) -> bool:
        """Whether it gets nothing new, and answers what it has."""
        return self.state is State.DRAINING and not self.why_down

    @property
    def is_held_off(self) -> bool:
        """Whether it gets nothing while another replica can answer."""
        return self.rests or not self.breaker.admits

    def why_idle(self, now_s: float) -> str | None:
        """Return why it gets no requests now, in words; None if it gets some."""
        breaker = self.breaker
        match self.state:
            case State.UNKNOWN:
                return "it has not been asked yet"
            case State.DOWN:
                return self.why_down
            case State.DRAINING:
                also = f"; {self.why_down}" if self.why_down else ""
                return f"it is drained{also}"
        if breaker.state is Circuit.OPEN:
            return f"{breaker.why}; it is tried again in {max(0.0, breaker.due_s - now_s):.1f} s"
        if breaker.state is Circuit.HALF_OPEN:
            return f"{breaker.why}; one request at a time is tried"
        return "its LMCache server has ended" if self.rests else None

    def serves(self, model: str | None) -> bool:
        """Whether a request for a model may go there; yes if that is not known."""
        return model is None or self.models is None or model in self.models

    def __repr__(self) -> str:
        return (
            f"<Replica {self.id} {self.state} waiting={self.waiting} decoding={self.decoding} "
            f"shape={self.shape} events={self.has_events}>"
        )
