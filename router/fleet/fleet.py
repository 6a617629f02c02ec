"""All that the router knows and may change: replicas, index, sessions, what is in flight.

The only mutable centre, and synchronous: between two awaits of its callers no caller sees it
half changed. It does no I/O and reads no clock: feeds, health checks and proxy tell it of events.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from router.config import DEFAULT, Judgment, ReplicaConfig, RouterConfig
from router.fleet.decision import Decision, Reason
from router.fleet.eligibility import Roster
from router.fleet.holdings import Holdings
from router.fleet.in_flight import Ticket
from router.fleet.placement import Ask, decide
from router.fleet.replica import Replica, Replicas, Signal, State
from router.fleet.sessions import Sessions
from router.index import (
    PrefixIndex,
    PromptKeyCache,
    PromptView,
)
from router.latency import Promised, RecentWork

_EXPIRED_KEYS_PER_PLACE: Final = 20
"""Keys whose claims are ended by the way, the last claim whole: never fewer claims than the
one that a request makes, so that they cannot pile up, and few, so that no request pays for many."""


class Fleet(Holdings):
    """The replicas of one router; see the module."""

    def __init__(
        self,
        config: RouterConfig,
        judgment: Judgment = DEFAULT,
        *,
        jitter: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``jitter`` returns random numbers from 0 to 1, for the times that breakers are open."""
        self.config = config
        self.judgment = judgment
        replicas = Replicas()
        for each in config.replicas:
            replicas.add(each, config.rates, judgment)
        roster = Roster(replicas, config.model_aliases, config.breaker, jitter)
        super().__init__(replicas, roster, PrefixIndex(config.index.max_keys))
        self.sessions = Sessions(config.sessions.max_sessions, config.sessions.ttl_s, judgment)
        self._turn = 0
        self._recent = RecentWork(judgment)

    # --- which replicas there are

    def add(self, config: ReplicaConfig) -> Replica:
        """Take in a replica; raise ValueError where another is configured by that name."""
        replica = self.replicas.add(config, self.config.rates, self.judgment)
        self._roster.changed()
        return replica

    def remove(self, replica_id: str) -> None:
        """Forget a replica; raise KeyError if there is none. Requests under way there go on."""
        replica = self.replicas.remove(replica_id)
        self.index.forget(replica.slot)
        self._roster.changed()

    @property
    def aliases(self) -> Mapping[str, str]:
        """By further names that clients may use, the models that replicas get asked for."""
        return self._roster.aliases

    @aliases.setter
    def aliases(self, aliases: Mapping[str, str]) -> None:
        """Use others from now on."""
        self._roster.aliases = aliases

    # --- requests

    def place(
        self,
        prompt: PromptView | PromptKeyCache | None,
        *,
        model: str | None,
        session: str | None,
        bound_to: str | None = None,
        exclude: Collection[str] = (),
        among: Collection[str] | None = None,
        promised: Promised | None = None,
        streamed: bool = True,
        now_s: float,
    ) -> Decision:
        """Say which replica a request should go to, and change nothing but what time has ended.

        A prompt that may be placed more than once comes as its keyring: its keys are then made
        once. ``bound_to`` is the only replica that can answer, ``exclude`` are replicas that have
        failed to, ``among`` all that may be asked, ``promised`` are requests that wait in the
        router and go before this one, ``streamed`` says whether the answer's first token will be
        seen. Raises `UnknownModelError`, or `NoReplicaError` when no replica of the model takes requests.
        """
        self.unseen.pass_time(now_s)
        self.index.expire(now_s, _EXPIRED_KEYS_PER_PLACE)
        self._roster.pass_time(now_s)
        ask = Ask(
            keyring=prompt if isinstance(prompt, PromptKeyCache) else PromptKeyCache(prompt),
            session=session,
            home=self._home(session, now_s),
            turn=self._turn,
            busy_share=self._recent.share(now_s) / max(1, len(self.replicas)),
            promised=promised or Promised(),
            streamed=streamed,
            now_s=now_s,
        )
        eligible = self._roster.eligible(model, exclude, bound_to, among)
        decision = decide(ask, eligible, self.index, self.config, self.judgment)
        if bound_to is not None:
            return replace(decision, reason=Reason.BOUND)
        return replace(decision, reason=Reason.RETRY) if exclude else decision

    @property
    def roster_version(self) -> int:
        """Another whenever the replicas that can answer may have changed."""
        return self._roster.version

    def start(self, decision: Decision, now_s: float) -> Ticket:
        """Count a request as in flight, and its prompt as arriving on its replica's GPU."""
        replica, keys = decision.picked.replica, decision.picked.keys
        claim = None
        if keys.keys and not replica.is_removed:
            ttl_s = self._claim_ttl_s(replica, by_tokens=bool(keys.chain))
            claim = self.index.believe(replica.slot, keys.keys, now_s + ttl_s)
        if decision.session is not None:
            self._note_turn(decision.session, replica, now_s)
        self._turn += 1
        for recent in (self._recent, replica.recent):
            recent.note(decision.picked.cost.busy_s, now_s)
        trial = self._roster.begin(replica, now_s)
        return Ticket(
            decision,
            self.index,
            claim,
            now_s,
            learned=self.replicas.teach,
            unseen=self.unseen,
            judgment=self.judgment,
            trial=trial,
            ended=partial(self._roster.end_trial, replica, trial) if trial else None,
        )

    def note_result(self, ticket: Ticket, now_s: float, *, ok: bool) -> bool:
        """Note whether a request was answered as it should be, or failed by its replica's fault.

        Returns whether that opened or closed the replica's breaker.
        """
        return self._roster.note_result(ticket.replica, now_s, ok=ok, trial=ticket.trial)

    def tick(self, now_s: float) -> None:
        """End what time has ended; to be called about once a second."""
        self.unseen.pass_time(now_s)
        self.index.tick(now_s)
        self.replicas.release(self.index.is_clear, now_s)

    def _home(self, session: str | None, now_s: float) -> int | None:
        """Return the slot of a session's home, None if it has none in the fleet (any more)."""
        serial = None if session is None else self.sessions.home(session, now_s)
        home = self.replicas.with_serial(serial)
        return None if home is None else home.slot

    def _note_turn(self, session: str, replica: Replica, now_s: float) -> None:
        """Note that a turn of a session goes to a replica; a home that was removed is none."""
        if self._home(session, now_s) is None:
            self.sessions.forget(session)
        self.sessions.note(session, replica.serial, now_s)

    def _claim_ttl_s(self, replica: Replica, *, by_tokens: bool) -> float:
        """Return how long a claim holds; one by text can never be confirmed by an event."""
        index = self.config.index
        confirmed = replica.has_events and by_tokens
        return index.speculative_ttl_s if confirmed else index.history_ttl_s

    # --- what health checks find

    def up(self, replica_id: str) -> None:
        """Note that a replica answers."""
        replica = self.replicas[replica_id]
        if replica.state is State.DOWN:
            self._roster.came_back(replica)
        replica.is_silent = False
        self._receive(replica, Signal.ANSWERED, why_down="")

    def down(self, replica_id: str, why: str = "it does not answer") -> None:
        """Note that a replica does not answer, and why.

        One that tells nothing is forgotten, since it may come back empty; feeds know of the others.
        """
        replica = self.replicas[replica_id]
        self._receive(replica, Signal.FAILED, why_down=why)
        if not (replica.has_events or replica.has_agent):
            # An LMCache server is a process of its own, and may well go on.
            self.index.forget(replica.slot, replica.event_tiers)

    def drain(self, replica_id: str) -> None:
        """Give a replica nothing new."""
        self._receive(self.replicas[replica_id], Signal.DRAIN)

    def resume(self, replica_id: str) -> None:
        """End `drain`."""
        self._receive(self.replicas[replica_id], Signal.RESUME)

    def set_models(
        self, replica_id: str, models: Mapping[str, str | None], roots: Collection[str] = ()
    ) -> None:
        """Note which models a replica serves, and of LoRA adapters the path; None for others.

        ``roots`` is where it has these others from.
        """
        replica = self.replicas[replica_id]
        replica.roots = frozenset(roots)
        names = frozenset(models)
        adapters = {name: path for name, path in models.items() if path is not None}
        if (names, adapters) != (replica.models, replica.adapters):
            replica.models, replica.adapters = names, adapters
            self._roster.changed()

    def match_by_text(self, replica_ids: Collection[str]) -> None:
        """Match prompts by their text at these replicas, where tokens differ from the router's."""
        differing = {self.replicas[each].slot for each in replica_ids}
        for replica in self.replicas.values():
            if replica.tokens_differ is not (replica.slot in differing):
                replica.tokens_differ = not replica.tokens_differ
                self._roster.changed()

    def set_kv_capacity(self, replica_id: str, tokens: int) -> None:
        """Note how many tokens of KV a replica's GPU holds in all."""
        self.replicas[replica_id].queue.set_capacity(tokens)

    def _receive(self, replica: Replica, signal: Signal, why_down: str | None = None) -> None:
        was_leaving = replica.is_leaving
        if why_down is not None:
            replica.why_down = why_down
        # Whether a draining replica answers changes no state, but what others may copy.
        if replica.receive(signal) or replica.is_leaving is not was_leaving:
            self._roster.changed()
