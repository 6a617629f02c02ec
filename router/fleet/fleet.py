"""The router's state: replicas, prefix index, sessions, requests in flight.

`Fleet` is the only mutable centre, and synchronous: between two awaits no caller sees it half
changed. It does no I/O and reads no clock. Feeds, health checks and the proxy report events to it;
`router.scheduling` reads it to decide where a request goes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from types import MappingProxyType
from typing import Final

from router.config.cost_weights import DEFAULT_WEIGHTS, CostWeights
from router.config.settings import ReplicaConfig, RouterConfig
from router.fleet.cost_model import RecentWork
from router.fleet.decision import Decision
from router.fleet.in_flight import PrefillTracker, Ticket
from router.fleet.output_lengths import OutputLengths
from router.fleet.replica import Replica, ReplicaState, Signal
from router.fleet.replicas import Replicas
from router.fleet.sessions import Sessions
from router.index.departed import DepartedKeys
from router.index.kv_events import (
    BlocksRemoved,
    BlocksStored,
    FirstBlocks,
    GpuCleared,
    GroupChanged,
    KvBatch,
    KvEvent,
)
from router.index.lmcache_keys import LmcacheKeys
from router.index.prefix_index import PrefixIndex
from router.index.prompt_keys import LOWER_TIERS, KvTier
from warmroute_common.agent_protocol import EventBatch, InstanceInfo, Snapshot, unpack_keys

_EXPIRED_KEYS: Final = 20
"""Keys whose speculative entries end per decision, the last entry as a whole: at least as many
entries as a request makes, so that they do not pile up, and few, so that no request is slow."""

_MOST_POOLED: Final = 10_000
"""Names of models that are remembered after their last replica has left."""
_LEAST_KEYS: Final = 4_000_000
_KEYS_PER_REPLICA: Final = 50_000
"""The index's default limit: an 8B model on a GPU of 80 GB has some 28,000 blocks there."""
_KEYS_PER_DEPARTED: Final = 16
"""For this many keys of the index one key that replicas have lost is remembered."""


class Fleet:
    """The replicas of one router, what each holds, and the requests in flight."""

    def __init__(
        self,
        config: RouterConfig,
        weights: CostWeights = DEFAULT_WEIGHTS,
        *,
        jitter: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``jitter`` returns random numbers from 0 to 1, for the times that breakers are open."""
        self.config = config
        self.weights = replace(weights, first_token_weight=config.first_token_weight)
        self.aliases: Mapping[str, str] = config.model_aliases
        """By further names that clients may use, the names of models."""
        self.replicas = Replicas(config.breaker, jitter)
        for each in config.replicas:
            self.replicas.add(each, config.rates, self.weights)
        departed = None
        if config.uncached_causes:
            departed = DepartedKeys(self._index_keys() // _KEYS_PER_DEPARTED)
        self.index = PrefixIndex(self._index_keys(), departed)
        self.sessions = Sessions(config.sessions.max_sessions, config.sessions.ttl_s, self.weights)
        self.output_lengths = OutputLengths(config.sessions.max_sessions, self.weights)
        self.pools: dict[str, str] = {}
        """By model or adapter, the pool (`Replica.pool`) that last served it; the oldest goes."""
        self.prefills = PrefillTracker()
        self.started = 0
        """Requests ever started."""
        self.awake_s = -inf
        """The last `tick` but one. What is read from a socket now had not arrived before, however
        long the process has stood still since: the last tick may have come just now, too."""
        self._ticked_s = -inf
        self._recent = RecentWork(self.weights)
        self._unanswered: set[Ticket] = set()
        self._contexts: dict[str, Sequence[tuple[int, str]]] = {}
        self._contexts_version = self.replicas.version
        """`Replicas.version` that ``_contexts`` belong to."""

    # --- replicas

    def add(self, config: ReplicaConfig) -> Replica:
        """Add a replica; raise ValueError if another is configured with that name."""
        replica = self.replicas.add(config, self.config.rates, self.weights)
        self.index.max_keys = self._index_keys()
        if self.index.departed is not None:
            self.index.departed.max_keys = self._index_keys() // _KEYS_PER_DEPARTED
        return replica

    def remove(self, replica_id: str) -> None:
        """Forget a replica; raise KeyError if there is none. Its requests in flight continue."""
        replica = self.replicas.remove(replica_id)
        self.index.forget(replica.slot)

    def _index_keys(self) -> int:
        fleets = max(_LEAST_KEYS, _KEYS_PER_REPLICA * len(self.replicas))
        return self.config.index.max_keys or fleets

    def models(self) -> set[str]:
        """Return the names of the models that replicas are known to serve, and their aliases."""
        names = set[str]().union(*(each.models or () for each in self.replicas.values()))
        return names | {alias for alias, real in self.aliases.items() if real in names}

    # --- requests

    def pass_time(self, now_s: float) -> None:
        """Apply what has become due; called before each decision, so it does little at a time."""
        self.prefills.pass_time(now_s)
        self.index.expire(now_s, _EXPIRED_KEYS)
        self.replicas.pass_time(now_s)

    def tick(self, now_s: float) -> None:
        """Apply what has become due; to be called about once a second."""
        self.awake_s, self._ticked_s = self._ticked_s, now_s
        self.prefills.pass_time(now_s)
        overdue = {each.replica for each in self._unanswered if each.is_overdue(now_s)}
        for replica in self.replicas.values():
            replica.is_overdue = replica in overdue
            if replica.nixl_due_s <= now_s:
                replica.resume_nixl(works=False)
        self.index.tick(now_s)
        self.replicas.tick()
        self.replicas.release(self.index.is_clear, now_s)

    def home(self, session: str | None, now_s: float) -> Replica | None:
        """Return a session's home, None if it has none in the fleet."""
        serial = None if session is None else self.sessions.home(session, now_s)
        return self.replicas.with_serial(serial)

    def busy_share(self, now_s: float) -> float:
        """Return the share of all replicas' time that recent requests take; above 1 at overload."""
        return self._recent.share(now_s) / max(1, len(self.replicas))

    def start(self, decision: Decision, now_s: float) -> Ticket:
        """Count a request as in flight, and its prompt as arriving on its replica's GPU.

        If another replica prefills the prompt, it is in flight there too (`Ticket.first_leg`).
        """
        self.started += 1
        ticket = self._start(decision, now_s)
        if (first_leg := decision.first_leg()) is not None:
            ticket.first_leg = self._start(first_leg, now_s)
        return ticket

    def _start(self, decision: Decision, now_s: float) -> Ticket:
        replica, keys = decision.picked.replica, decision.picked.keys
        speculative = None
        ttl_s = self._speculative_ttl_s(replica, by_tokens=bool(keys.chain))
        if keys.keys and not replica.is_removed:
            self.index.use(replica.slot, keys.keys, keys.chunk_keys)
            speculative = self.index.believe(replica.slot, keys.keys)
        if (session := decision.session) is not None:
            if self.home(session, now_s) is None:
                self.sessions.forget(session)  # its home may have been removed
            self.sessions.note(session, replica.serial, now_s)
        self._recent.note(decision.picked.cost.busy_s, now_s)
        return Ticket(
            decision,
            now_s,
            replicas=self.replicas,
            index=self.index,
            sessions=self.sessions,
            speculative=speculative,
            speculative_ttl_s=ttl_s,
            prefills=self.prefills,
            unanswered=self._unanswered,
            weights=self.weights,
            history_ttl_s=self.config.index.history_ttl_s,
            trial=self.replicas.begin(replica, now_s),
        )

    def note_result(self, ticket: Ticket, now_s: float, *, ok: bool) -> bool:
        """Note whether a request was answered, or failed because of its replica.

        Returns whether that opened or closed the replica's breaker.
        """
        return self.replicas.note_result(ticket.replica, now_s, ok=ok, trial=ticket.trial)

    def take_back_failure(self, replica_id: str, now_s: float) -> bool:
        """Forget a failure that turned out to be the request's; return whether requests may go."""
        replica = self.replicas.find(replica_id)
        return replica is not None and self.replicas.take_back_failure(replica, now_s)

    def _speculative_ttl_s(self, replica: Replica, *, by_tokens: bool) -> float:
        """Return how long a speculative entry holds after its answer's end.

        KV events never confirm one by text.
        """
        index = self.config.index
        confirmed = replica.has_events and by_tokens
        return index.speculative_ttl_s if confirmed else index.history_ttl_s

    # --- health checks and administration

    def up(self, replica_id: str) -> None:
        """Note that a replica answers."""
        replica = self.replicas[replica_id]
        if replica.state is ReplicaState.DOWN:
            self.replicas.came_back(replica)
        replica.stall = None
        self._receive(replica, Signal.ANSWERED, why_down="")

    def down(self, replica_id: str, why: str = "it does not answer") -> None:
        """Note that a replica does not answer, and why.

        If neither KV events nor an agent report its KV, that is forgotten: it may come back empty.
        Otherwise its feeds note that.
        """
        replica = self.replicas[replica_id]
        self._receive(replica, Signal.FAILED, why_down=why)
        if not (replica.has_events or replica.has_agent):
            # An LMCache server is another process, and may still run.
            self.index.forget(replica.slot, replica.event_tiers)

    def drain(self, replica_id: str) -> None:
        """Send a replica no new requests."""
        self._receive(self.replicas[replica_id], Signal.DRAIN)

    def resume(self, replica_id: str) -> None:
        """End `drain`."""
        self._receive(self.replicas[replica_id], Signal.RESUME)

    def rest(self, replica_id: str, rests: bool) -> None:
        """Send a replica no requests while another is up, or end that."""
        self.replicas[replica_id].rests = rests
        self.replicas.changed()

    def set_models(
        self,
        replica_id: str,
        models: Mapping[str, str | None],
        roots: Collection[str] = (),
        contexts: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Note which models a replica serves: LoRA adapters with their path, others with None.

        ``roots`` are the paths of the others, ``contexts`` the known lengths of contexts.
        """
        replica = self.replicas[replica_id]
        replica.roots = frozenset(roots)
        names = frozenset(models)
        adapters = {name: path for name, path in models.items() if path is not None}
        known = (replica.models, replica.adapters, replica.contexts)
        if (names, adapters, contexts) != known:
            replica.models, replica.adapters, replica.contexts = names, adapters, contexts
            self.replicas.changed()
        for name in names:
            self.pools.pop(name, None)
            self.pools[name] = replica.pool
        while len(self.pools) > _MOST_POOLED:
            del self.pools[next(iter(self.pools))]

    def too_short(self, model: str | None, prompt_tokens: int, output_tokens: int) -> Sequence[str]:
        """Return the ids of the replicas whose context is too short for a prompt and its answer.

        If no replica that takes both is up, replicas that take the prompt and a shorter answer
        remain. If even the longest context is too short, that replica refuses the request.
        """
        contexts = self._contexts_of(model)
        short: Sequence[str] = ()
        for tokens in (prompt_tokens + output_tokens, max(prompt_tokens, output_tokens)):
            if not contexts or tokens <= contexts[0][0]:
                return ()
            limit = min(tokens, contexts[-1][0])
            short = [replica_id for length, replica_id in contexts if length < limit]
            if not short or any(
                each.state is ReplicaState.UP and each.serves(model) and each.id not in short
                for each in self.replicas.values()
            ):
                break
        return short

    def _contexts_of(self, model: str | None) -> Sequence[tuple[int, str]]:
        """Return the lengths of a model's contexts and the ids of their replicas, sorted."""
        if self._contexts_version != self.replicas.version:
            self._contexts_version = self.replicas.version
            self._contexts.clear()
        if model is None or model in self._contexts:
            return self._contexts.get(model or "", ())
        found = sorted(
            (each.contexts[model], each.id)
            for each in self.replicas.values()
            if model in each.contexts
        )
        if found:  # clients choose other names
            self._contexts[model] = found
        return found

    def match_by_text(self, replica_ids: Collection[str]) -> None:
        """Match prompts by text at these replicas only, where tokens differ from the router's."""
        differing = {self.replicas[each].slot for each in replica_ids}
        for replica in self.replicas.values():
            if replica.tokens_differ is not (replica.slot in differing):
                replica.tokens_differ = not replica.tokens_differ
                self.replicas.changed()

    def set_kv_capacity(self, replica_id: str, tokens: int) -> None:
        """Note how many tokens of KV a replica's GPU holds."""
        self.replicas[replica_id].queue.set_capacity(tokens)

    def set_ranks(self, replica_id: str, ranks: int) -> None:
        """Note how many data-parallel ranks answer at a replica's URL."""
        self.replicas[replica_id].ranks = ranks

    def _receive(self, replica: Replica, signal: Signal, why_down: str | None = None) -> None:
        was_leaving = replica.is_leaving
        if why_down is not None:
            replica.why_down = why_down
        # Whether a draining replica answers does not change its state, but what others may copy.
        if replica.receive(signal) or replica.is_leaving is not was_leaving:
            self.replicas.changed()

    # --- agents and LMCache

    def apply_info(self, replica_id: str, info: InstanceInfo) -> bool:
        """Apply an agent's report about its replica; return whether the replica has restarted.

        The KV of a restarted replica is forgotten. A replica without a configured id gets the
        agent's, unless another replica has it.
        """
        replica = self.replicas[replica_id]
        if restarted := replica.take_info(info):
            self.index.forget(replica.slot)
            self.replicas.changed()
        if replica.config.instance_id is None and info.instance_id not in self.replicas:
            self.replicas.rename(replica.id, info.instance_id)
        return restarted

    def apply_snapshot(self, replica_id: str, snapshot: Snapshot) -> None:
        """Replace the known contents of a replica's lower tiers."""
        self.forget_lower(replica_id)
        for name, packed in snapshot.tiers.items():
            self.change_lower(replica_id, _lower_tier(name), unpack_keys(packed), stored=True)

    def apply_events(self, replica_id: str, batch: EventBatch) -> None:
        """Apply changes of a replica's lower tiers."""
        for event in batch.events:
            keys = unpack_keys(event.keys)
            self.change_lower(replica_id, _lower_tier(event.tier), keys, stored=event.stored)

    def change_lower(
        self, replica_id: str, tier: KvTier, keys: Sequence[int], *, stored: bool
    ) -> None:
        """Note that keys were stored in, or have left, one of a replica's lower tiers."""
        replica = self.replicas[replica_id]
        if not replica.is_removed:
            change = self.index.add if stored else self.index.remove
            change(replica.slot, tier, keys)

    def forget_lower(self, replica_id: str, *tiers: KvTier) -> None:
        """Forget the contents of some of a replica's lower tiers, by default of all."""
        self.index.forget(self.replicas[replica_id].slot, tiers or LOWER_TIERS)

    def add_store(self) -> int:
        """Return the slot of a new store that replicas may share; there must be few of them."""
        return self.replicas.take_slot()

    def change_store(self, store: int, keys: Sequence[int], *, stored: bool) -> None:
        """Note that keys were stored in, or have left, a store that replicas share."""
        change = self.index.add if stored else self.index.remove
        change(store, KvTier.REMOTE, keys)

    def mount(self, store: int, replica_ids: Iterable[str]) -> None:
        """Note which replicas read a store: they hold what it holds."""
        self.index.mount(store, sum({1 << self.replicas[each].slot for each in replica_ids}))

    def tie_lmcache(self, replica_id: str, keys: LmcacheKeys | None) -> None:
        """Match a replica's lower tiers by LMCache's chunks from now on; None: no LMCache."""
        replica = self.replicas[replica_id]
        replica.lmcache_keys = keys
        self.forget_lower(replica_id)
        self.replicas.changed()

    # --- copies between replicas

    def observed_copy(self, replica_id: str, nbytes: int, seconds: float) -> None:
        """Learn the rate of a replica's copies from another; small copies are ignored."""
        replica = self.replicas[replica_id]
        least_bytes = self.weights.least_telling_copy_tokens * replica.kv_bytes_per_token
        if nbytes >= least_bytes and seconds > 0:
            replica.rates.note_copy(nbytes, seconds)

    def copy_failed(self, replica_id: str, now_s: float) -> None:
        """Note that a copy failed: pause copies from and to that replica."""
        self.replicas[replica_id].no_copies_until_s = now_s + self.weights.copy_pause_s

    # --- KV events

    def following_kv(self, replica_id: str) -> None:
        """Note that the router receives a replica's KV events from now on."""
        self.replicas[replica_id].has_events = True

    def apply_kv(self, replica_id: str, batch: KvBatch, now_s: float) -> None:
        """Apply a message of vLLM's KV events, for the tiers of `Replica.event_tiers`."""
        replica = self.replicas[replica_id]
        replica.heard_s = now_s
        tiers = () if replica.is_removed else replica.event_tiers
        for event in batch.events:
            if not isinstance(event, FirstBlocks):
                self._apply_kv_event(replica, event, tiers, now_s)
            elif replica.check_shape(event):
                self.replicas.changed()

    def lost_kv(self, replica_id: str) -> None:
        """Forget what KV events reported: their publisher is gone, restarted, or left a gap."""
        replica = self.replicas[replica_id]
        replica.has_events = False
        self.index.forget(replica.slot, replica.event_tiers)
        # A stock vLLM may come back with another random seed.
        replica.shape_checked = False

    def _apply_kv_event(
        self, replica: Replica, event: KvEvent, tiers: Collection[KvTier], now_s: float
    ) -> None:
        match event:
            case GpuCleared():
                self.index.forget(replica.slot, (KvTier.GPU,))
            case GroupChanged():
                self.index.forget(replica.slot, replica.event_tiers)
                replica.shape_checked = False
            case BlocksStored(tier, keys, parent) if tier in tiers:
                self.index.add(replica.slot, tier, keys, parent=parent, counted=True)
                if tier is KvTier.GPU:
                    replica.note_stored(now_s)
                    self.prefills.stored(replica.slot, keys, now_s)
            case BlocksRemoved(tier, keys) if tier in tiers:
                self.index.remove(replica.slot, tier, keys)


def _lower_tier(name: str) -> KvTier:
    """Return the tier that an agent names; an unknown one counts as the slowest."""
    return KvTier(name) if name in LOWER_TIERS else KvTier.REMOTE
