"""One request in flight: its phases, and what it shows about its replica.

A `Ticket` is counted once at its start and released once at its end. The first token of an answer
that is not streamed is not seen: its headers come with its last token. `PrefillTracker` ends the
prefill of such a request by whichever comes first: the replica's KV event for the last block of the
prompt, the answer itself, or the predicted time. Otherwise seconds of decoding would look like a
prefill that never ends.
"""

import heapq
from collections.abc import Iterable, Mapping
from enum import StrEnum
from math import inf
from types import MappingProxyType
from typing import Final

from router.config.cost_weights import CostWeights
from router.fleet.cost_model import CostPart
from router.fleet.decision import Decision
from router.fleet.replica import SecondLeg
from router.fleet.replicas import Replicas
from router.fleet.sessions import Sessions
from router.index.prefix_index import PrefixIndex, SpeculativeEntry


class Phase(StrEnum):
    """Where a request in flight is."""

    FETCHING = "fetching"
    """Its KV is being brought to the replica's CPU RAM; it has not been sent."""
    PREFILLING = "prefilling"
    """Sent: in the replica's queue, or being computed."""
    DECODING = "decoding"
    """Its first token has come, or should have come."""
    ENDED = "ended"


class PhaseEvent(StrEnum):
    """What moves a request to its next phase."""

    SENT = "sent"
    FIRST_TOKEN = "first token"
    """The first token of a streamed answer, or the last token of another one."""
    PROMPT_STORED = "prompt stored"
    """A KV event: the last block of the prompt is on the GPU."""
    DUE = "due"
    """No event came; the predicted time of the first token has passed."""
    END = "end"


NEXT_PHASE: Final[Mapping[tuple[Phase, PhaseEvent], Phase]] = MappingProxyType(
    {
        (Phase.FETCHING, PhaseEvent.SENT): Phase.PREFILLING,
        (Phase.FETCHING, PhaseEvent.FIRST_TOKEN): Phase.DECODING,
        (Phase.PREFILLING, PhaseEvent.FIRST_TOKEN): Phase.DECODING,
        (Phase.PREFILLING, PhaseEvent.PROMPT_STORED): Phase.DECODING,
        (Phase.PREFILLING, PhaseEvent.DUE): Phase.DECODING,
        (Phase.FETCHING, PhaseEvent.END): Phase.ENDED,
        (Phase.PREFILLING, PhaseEvent.END): Phase.ENDED,
        (Phase.DECODING, PhaseEvent.END): Phase.ENDED,
    }
)
"""The next phase; a pair that is not listed changes nothing."""

_SHARED_AT_ONCE: Final = 16
"""First measurements of a replica that count for the others at once, and not at the next tick: an
unknown replica would look faster than this one."""
_LEAST_OVERDUE_S: Final = 60.0
_OVERDUE: Final = 10.0
"""A request is overdue after this many times its predicted TTFT, at least `_LEAST_OVERDUE_S`."""
_CLEARLY_TOKENS: Final = 256
"""An answer contradicts the index if more tokens, and more than a block, were computed than should
have been: vLLM computes up to a block that it holds."""
_WAITING: Final = frozenset({Phase.FETCHING, Phase.PREFILLING})
"""Phases before the first token."""


class Ticket:
    """A request in flight, held by its forwarder; made by `Fleet.start`.

    `finish` must be called on every way out, and may be called more than once.
    """

    first_leg: "Ticket | None" = None
    """The prefill of its prompt at another replica; it ends with this one at the latest."""
    is_pulling: bool = False
    """Whether its replica pulls the prompt's KV from another one."""
    _counted_tokens: int | None = None
    """How many of the pulled tokens the replica's metrics count as computed; None: not known."""
    _pulls_s: float | None = None
    """When it began to pull, if that says how long it takes."""

    def __init__(
        self,
        decision: Decision,
        now_s: float,
        *,
        replicas: Replicas,
        index: PrefixIndex,
        sessions: Sessions,
        speculative: SpeculativeEntry | None,
        speculative_ttl_s: float,
        prefills: "PrefillTracker",
        unanswered: "set[Ticket]",
        weights: CostWeights,
        history_ttl_s: float = 0.0,
        trial: int = 0,
    ) -> None:
        """``speculative`` is what the index assumes to be stored by this request: until
        ``speculative_ttl_s`` after its end.

        If it is answered and no KV event came meanwhile, that holds for ``history_ttl_s``.
        ``unanswered`` contains the ticket until its answer begins, or it ends.
        ``trial`` is its number as a trial of a replica whose breaker is half open, 0 if it is not
        a trial.
        """
        picked = decision.picked
        self.replica = replica = picked.replica
        self.trial = trial
        self._blocks = picked.keys.keys if picked.keys.chain else ()
        self._block_tokens = picked.keys.block_tokens
        self._work = picked.work
        self._kv = picked.kv
        self._cost = picked.cost
        self._predicted_ttft_s = decision.predicted_ttft_s
        self._replicas = replicas
        self._index = index
        self._session = decision.session
        self._sessions = sessions
        self._speculative = speculative
        self._history_ttl_s = history_ttl_s
        self._new_keys = speculative.keys if speculative and picked.keys.chain else ()
        """Keys of blocks that its GPU was not known to hold, so KV events should report them."""
        self._speculative_ttl_s = speculative_ttl_s
        self._prompt_tokens = decision.prompt_tokens
        self._prefills = None if decision.streamed else prefills
        self._is_tracked = False
        self._weights = weights
        self._queue_number: int | None = None
        self.started_s = now_s
        self._lag_s = 0.0
        self._ttft_s: float | None = None
        """TTFT of a streamed answer."""
        self._stored_s: float | None = None
        """Time of the KV event for the last block: up to a step before the first token."""
        self._has_begun = False
        self._was_alone = not replica.waiting
        replica.waiting += 1
        replica.fetching += 1
        replica.started += 1
        replica.note_work(self._cost.busy_s, now_s)
        self._number = replica.started
        self._unanswered = unanswered
        unanswered.add(self)
        self._ready_s = 0.0
        """When its KV will be in CPU RAM."""
        # The replica computes nothing of a request whose KV is being fetched: counted as work
        # before others, it held them in the router while replicas were idle.
        self.phase = Phase.FETCHING
        self._staged_tokens = decision.staged_tokens
        replica.staged_tokens += self._staged_tokens
        if picked.prefiller is not None:
            replica.second_legs[self._number] = SecondLeg(
                decision.prompt_tokens, due_s=now_s + picked.work.prefilled_s
            )
        if self._cost.fetch_s:
            # Staged or not: a replica reads one request's KV after the other's.
            self._ready_s = replica.fetch(self._cost.fetch_s, now_s)
        if not decision.is_staged:
            self._move(PhaseEvent.SENT, now_s)

    @property
    def session(self) -> str | None:
        """The session of the request, if it has one."""
        return self._session

    @property
    def last_block(self) -> int | None:
        """Key of the prompt's last whole block; None if no KV event can report it."""
        return self._blocks[-1] if self._blocks else None

    def sent(self, now_s: float, *, is_staged: bool = True) -> None:
        """Note that the request is sent only now: others may have been sent in the meantime.

        ``is_staged``: whether its KV is in the replica's CPU RAM. If not, the replica lets others
        overtake until it is.
        """
        if is_staged:
            self._ready_s = 0.0
        if self.phase is Phase.PREFILLING:
            self._leave_queue(now_s)
            self._join_queue(now_s)
        else:
            self._move(PhaseEvent.SENT, now_s)

    def prefilled(self) -> None:
        """Note that its first leg has ended: nobody must keep the time of its second one free."""
        self.replica.second_legs.pop(self._number, None)

    def pulls(self, now_s: float, counted_tokens: int | None = None) -> None:
        """Note that it is sent now, and that its replica pulls the KV of the whole prompt.

        ``counted_tokens``: how many of its tokens the replica's metrics count as computed there;
        None if that is not known.
        """
        self.is_pulling, self._counted_tokens = True, counted_tokens
        # Without others before it the wait for its first token is that for the KV.
        if self.replica.waiting - self.replica.fetching == 0:
            self._pulls_s = now_s
        self.sent(now_s)

    def first_byte(
        self,
        began_s: float,
        *,
        streamed: bool = True,
        lag_s: float = 0.0,
    ) -> None:
        """Note that the answer has begun; later calls change nothing.

        ``streamed``: whether this was the first token. The headers of an answer that is not
        streamed come with its last token.
        ``lag_s``: time that the router itself took to send the request, without intended waits.
        """
        if self.phase is Phase.ENDED or self._has_begun:
            return
        self._has_begun = True
        self._unanswered.discard(self)
        self._lag_s = max(0.0, lag_s)
        self._was_alone &= self.replica.started == self._number
        if streamed:
            self._ttft_s = began_s - self.started_s
            self._note_pull(began_s)
        self._move(PhaseEvent.FIRST_TOKEN, began_s)
        self._leave_prefill(began_s, just_now=streamed)

    def finish(
        self,
        now_s: float,
        *,
        ok: bool,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """Release the request; later calls change nothing.

        The numbers of tokens are those of the replica's ``usage``, if it reports them.
        """
        if not self._move(PhaseEvent.END, now_s):
            return
        self._unanswered.discard(self)
        if self.trial:
            self._replicas.end_trial(self.replica, self.trial)
        if self._has_begun:
            # Both last from the end of an answer on: it may take longer than they do.
            if self._speculative is not None:
                self._index.set_end(self._speculative, now_s + self._speculative_ttl_s)
            if self._session is not None and not self.replica.is_removed:
                self._sessions.answered(self._session, self.replica.serial, now_s)
        if not self._has_begun:
            # Nothing was computed, as far as known: the index must not draw this request, which
            # may be sent elsewhere now, back to this replica.
            if self._speculative is not None:
                self._index.withdraw(self._speculative)
        elif ok:
            if cached_tokens is not None and prompt_tokens == self._prompt_tokens:
                self._compare_with_index(cached_tokens)
            ttft_s = self._ttft_s
            if ttft_s is None and output_tokens == 1:
                # The duration of a longer answer is not used: the time per token contains
                # concurrent prefills, and slow fleets were learned as four times slower.
                # KV events come up to a step early: short prompts would seem to take no time.
                ttft_s = now_s - self.started_s
            self._note_answer(now_s, output_tokens)
            # With as many cached tokens it held all the same: vLLM computes the last block.
            most_cached = (len(self._blocks) - 1) * self._block_tokens
            if cached_tokens is None or cached_tokens < most_cached:
                self._note_untold(now_s)
            if ttft_s is not None:
                # The error counts whatever caused it, also a wrong match.
                self.replica.errors.note(self._predicted_ttft_s, ttft_s)
                self._note_alone(cached_tokens, ttft_s)

    def is_overdue(self, now_s: float) -> bool:
        """Whether the replica has sent nothing for much longer than this request should take.

        A part of another answer and a KV event count too. Whole answers come later than their
        first token, and other clients' requests delay this one: it is a doubt, not a verdict.
        """
        limit_s = max(_LEAST_OVERDUE_S, _OVERDUE * self._predicted_ttft_s)
        return now_s - max(self.started_s, self.replica.heard_s) > limit_s

    # --- phases

    def _move(self, event: PhaseEvent, now_s: float) -> bool:
        """Move to the next phase; return whether it changed."""
        before, after = self.phase, NEXT_PHASE.get((self.phase, event))
        if after is None:
            return False
        self.phase = after
        replica = self.replica
        if before is Phase.FETCHING:
            replica.fetching -= 1
            replica.second_legs.pop(self._number, None)
        if before in _WAITING and after not in _WAITING:
            replica.waiting -= 1
            replica.staged_tokens -= self._staged_tokens
            if self._prefills is not None and self._is_tracked:
                self._prefills.remove(self)
        if after is Phase.PREFILLING:
            self._join_queue(now_s)
        begun = (after is Phase.DECODING) - (before is Phase.DECODING)
        replica.decoding += begun
        replica.context_tokens += begun * self._prompt_tokens
        if after is Phase.ENDED:
            self._leave_queue(now_s)
            if self.first_leg is not None:
                self.first_leg.finish(now_s, ok=False)
        return True

    def _join_queue(self, now_s: float) -> None:
        self._queue_number = self.replica.queue.join(
            self._cost.busy_s, now_s, kv=self._kv, ready_s=self._ready_s
        )
        if self._prefills is not None and not self._is_tracked:
            self._is_tracked = True
            self._prefills.add(self, now_s)

    def _leave_queue(self, now_s: float) -> None:
        if self._queue_number is not None:
            self.replica.queue.end(self._queue_number, now_s)

    def _leave_prefill(self, now_s: float, *, just_now: bool) -> None:
        if self._queue_number is not None:
            self.replica.queue.leave(self._queue_number, now_s, just_now=just_now)

    # --- prefills whose end is not seen, for `PrefillTracker`

    def prefill_due_s(self, now_s: float) -> float:
        """Return the time of the first token as predicted now; minus infinity if it has come."""
        number = self._queue_number
        end_s = None if number is None else self.replica.queue.end_s(number, now_s)
        return -inf if end_s is None else end_s + self._cost.base_s

    def prefill_ended(self, event: PhaseEvent, now_s: float) -> None:
        """End the prefill by a KV event, or because it was due."""
        if event is PhaseEvent.PROMPT_STORED:
            self._stored_s = now_s
        self._move(event, now_s)
        self._leave_prefill(now_s, just_now=event is PhaseEvent.PROMPT_STORED)

    # --- what it shows about its replica

    def _note_untold(self, now_s: float) -> None:
        """If no KV event came since the start, keep what this request has left on the GPU.

        The events are late, or none come, or their connection was lost meanwhile and with it what
        was known: then the requests sent are all that is known.
        """
        replica = self.replica
        if (
            self._speculative is None
            or not self._new_keys
            or replica.is_removed
            or replica.stored_s >= self.started_s
        ):
            return
        replica.untold += replica.has_events
        self._index.withdraw(self._speculative)
        self._index.believe(replica.slot, self._new_keys, now_s + self._history_ttl_s)

    def _note_answer(self, now_s: float, output_tokens: int | None) -> None:
        """Note how long the answer took after its prefill, if the end of the prefill is known.

        An answer of one token says nothing about it, such as that of a first leg.
        """
        if self.is_pulling:
            self._note_pulled()
        if output_tokens == 1:
            return
        if self._ttft_s is not None:
            answer_s = now_s - self.started_s - self._ttft_s
            self.replica.note_answer(answer_s)
            if output_tokens is not None:
                self.replica.note_output_tokens(output_tokens - 1, answer_s, now_s)
        elif self._stored_s is not None:
            self.replica.note_answer(now_s - self._stored_s)

    def _note_pull(self, began_s: float) -> None:
        """Learn the rate of pulls; a small one says nothing about it."""
        nbytes = self._work.pull_bytes
        least_bytes = self._weights.least_telling_copy_tokens * self.replica.kv_bytes_per_token
        if self._pulls_s is not None and nbytes >= least_bytes:
            seconds = began_s - self._pulls_s - self._cost.base_s - self._cost.busy_s
            if seconds > 0:
                self.replica.rates.note_pull(round(nbytes), seconds)

    def _note_pulled(self) -> None:
        """Note what vLLM's metrics count of this answer; they leave out what was broken off."""
        pulled = self.replica.pulled
        pulled.ended += 1
        if self._counted_tokens is None:
            pulled.uncounted += 1
        else:
            pulled.counted_tokens += self._counted_tokens

    def _note_alone(self, cached_tokens: int | None, ttft_s: float) -> None:
        """Let the rates use the TTFT of a request that no other one delayed."""
        work = self._work
        if cached_tokens is not None:
            work = work.with_cached(cached_tokens, self.replica.kv_bytes_per_token)
        if self._was_alone and not work.queue_s and not self.is_pulling:
            rates = self.replica.rates
            was_used = rates.note_alone(work, ttft_s - self._lag_s)
            if was_used and rates.measured_on(CostPart.PREFILL) <= _SHARED_AT_ONCE:
                self._replicas.share_rates(rates)

    def _compare_with_index(self, cached_tokens: int) -> None:
        """Correct the index where the replica computed what its GPU was known to hold.

        Only of a replica that publishes KV events this number is known to mean vLLM's cache hits.
        """
        blocks, block_tokens = self._blocks, self._block_tokens
        if not (self.replica.has_events and blocks):
            return
        known = blocks.index(self._new_keys[0]) if self._new_keys else len(blocks)
        if known * block_tokens - cached_tokens > max(_CLEARLY_TOKENS, block_tokens):
            cached = -(-cached_tokens // block_tokens)
            self._index.contradicted(self.replica.slot, blocks[cached:known])

    def __repr__(self) -> str:
        return f"<Ticket {self.replica.id} {self.phase}>"


class PrefillTracker:
    """The prefills of one fleet whose answers are not streamed."""

    def __init__(self) -> None:
        self._by_slot: dict[int, dict[int, Ticket]] = {}
        self._numbers: dict[Ticket, int] = {}
        self._due: list[tuple[float, int, int]] = []
        self._last = 0

    def add(self, ticket: Ticket, now_s: float) -> None:
        """Call the ticket's `Ticket.prefill_ended` when its prefill ends."""
        self._last += 1
        slot = ticket.replica.slot
        self._by_slot.setdefault(slot, {})[self._last] = ticket
        self._numbers[ticket] = self._last
        heapq.heappush(self._due, (ticket.prefill_due_s(now_s), slot, self._last))

    def remove(self, ticket: Ticket) -> None:
        """Forget a prefill that has ended otherwise; nothing if it is not tracked."""
        if (number := self._numbers.pop(ticket, None)) is not None:
            del self._by_slot[ticket.replica.slot][number]

    def pass_time(self, now_s: float) -> None:
        """End the prefills that are due."""
        while self._due and self._due[0][0] <= now_s:
            _, slot, number = heapq.heappop(self._due)
            ticket = self._by_slot[slot].get(number)
            if ticket is None:
                continue
            due_s = ticket.prefill_due_s(now_s)
            if due_s > now_s:  # those before it took longer than predicted
                heapq.heappush(self._due, (due_s, slot, number))
            else:
                self._end(ticket, PhaseEvent.DUE, now_s)

    def stored(self, slot: int, keys: Iterable[int], now_s: float) -> None:
        """End the prefills whose last block is now on a replica's GPU."""
        if not (tickets := self._by_slot.get(slot)):
            return
        stored = frozenset(keys)
        for ticket in [each for each in tickets.values() if each.last_block in stored]:
            self._end(ticket, PhaseEvent.PROMPT_STORED, now_s)

    def _end(self, ticket: Ticket, event: PhaseEvent, now_s: float) -> None:
        self.remove(ticket)
        ticket.prefill_ended(event, now_s)

    def __repr__(self) -> str:
        return f"<PrefillTracker {len(self._numbers)}>"
