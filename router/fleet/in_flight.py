"""One request in flight: counted once at its start, released once at its end."""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from router.config import Judgment
from router.fleet.decision import Decision
from router.fleet.phases import NEXT, WAITING, Event, Phase, Prefill, Unseen
from router.fleet.replica import Replica
from router.index import PrefixIndex, SpeculativeEntry


class Ticket:
    """Held by the forwarder of the request; made by `Fleet.start`.

    `finish` must be called on every way out, and may be called more than once.
    """

    def __init__(
        self,
        decision: Decision,
        index: PrefixIndex,
        claim: SpeculativeEntry | None,
        now_s: float,
        *,
        learned: Callable[[Replica], None],
        unseen: Unseen,
        judgment: Judgment,
        trial: int = 0,
        ended: Callable[[], None] | None = None,
    ) -> None:
        """``learned`` is told when the replica's rates have learned from the request.

        ``unseen`` ends its prefill where the answer will not be streamed. ``trial`` is its number
        as a trial of a replica whose breaker is half open, 0 if it is none; ``ended`` is called
        once, at its end.
        """
        picked = decision.picked
        self.replica = replica = picked.replica
        self.trial = trial
        self._ended = ended
        self._work = picked.work
        self._kv = picked.kv
        self._predicted_ttft_s = decision.predicted_ttft_s
        self._last_block = picked.keys.keys[-1] if picked.keys.chain else None
        self._cost = picked.cost
        self._judgment = judgment
        self._learned = learned
        self._index = index
        self._claim = claim
        self._unseen = None if decision.streamed else unseen
        self._unseen_number: int | None = None
        self._queue_token: int | None = None
        self.started_s = now_s
        self._lag_s = 0.0
        self._ttft_s: float | None = None
        """Of an answer that is streamed."""
        self._stored_s: float | None = None
        """When the replica told of the prompt's last block; up to a step before the first token."""
        self._has_begun = False
        self._was_alone = not replica.waiting
        replica.waiting += 1
        replica.fetching += 1
        replica.started += 1
        replica.note_work(self._cost.busy_s)
        self._number = replica.started
        self._ready_s = 0.0
        """When its KV will be there."""
        # The replica has nothing to compute of a request whose KV is being fetched: taken for
        # work before them, it held other requests in the router while replicas were idle.
        self.phase = Phase.FETCHING
        if decision.is_staged:
            self._ready_s = replica.fetch(self._cost.fetch_s, now_s)
        else:
            self._move(Event.SENT, now_s)

    def sent(self, now_s: float, *, is_staged: bool = True) -> None:
        """Note that the replica is asked only now: others may have been in the meantime.

        ``is_staged``: whether its KV is in the replica's CPU RAM; else the replica lets others
        go first until it is.
        """
        if is_staged:
            self._ready_s = 0.0
        if self.phase is Phase.PREFILLING:
            self._leave_queue(now_s)
            self._join_queue(now_s)
        else:
            self._move(Event.SENT, now_s)

    def first_byte(
        self,
        began_s: float,
        *,
        streamed: bool = True,
        lag_s: float = 0.0,
        told_s: float | None = None,
    ) -> None:
        """Note that the answer has begun; later calls change nothing.

        ``streamed``: whether this was the first token. The headers of an
        answer that is not streamed come with its last, and teach nothing.
        ``lag_s``: what the router itself took to send the request, beside what it waited
        for; that is not the replica's. ``told_s`` is now, where that is later than ``began_s``.
        """
        if self.phase is Phase.ENDED or self._has_begun:
            return
        self._has_begun = True
        self._lag_s = max(0.0, lag_s)
        self._was_alone &= self.replica.started == self._number
        if streamed:
            self._ttft_s = began_s - self.started_s
        now_s = began_s if told_s is None else told_s
        self._move(Event.FIRST_TOKEN, now_s)
        self._leave_prefill(now_s, just_now=streamed and told_s is None)

    def finish(
        self,
        now_s: float,
        *,
        ok: bool,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """Release the request and learn from it; later calls change nothing.

        The numbers of tokens are what the replica's ``usage`` said, if it did.
        """
        if not self._move(Event.END, now_s):
            return
        if self._ended is not None:
            self._ended()
        if not self._has_begun:
            # Nothing was computed, as far as is known: a request that is sent
            # elsewhere now must not be drawn back by its own claim.
            if self._claim is not None:
                self._index.withdraw(self._claim)
        elif ok:
            ttft_s = self._ttft_s
            if ttft_s is None and output_tokens == 1:
                # Lengths of longer answers tell too little: what a token took is off by the
                # prefills that ran beside, and slow fleets were learned as four times slower.
                # KV events, up to a step early, teach that short prompts take no time.
                ttft_s = now_s - self.started_s
            self._note_answer(now_s)
            if ttft_s is not None:
                # Whatever made the prediction wrong is counted, a match that was not
                # there and rates not learned yet too; the rates learn from what is
                # known by now.
                self.replica.errors.note(self._predicted_ttft_s, ttft_s)
                self._learn(cached_tokens, ttft_s)

    # --- phases

    def _move(self, event: Event, now_s: float) -> bool:
        """Move to the next phase; return whether that is another one."""
        before, after = self.phase, NEXT.get((self.phase, event))
        if after is None:
            return False
        self.phase = after
        replica = self.replica
        replica.fetching -= before is Phase.FETCHING
        if before in WAITING and after not in WAITING:
            replica.waiting -= 1
            if self._unseen is not None and self._unseen_number is not None:
                self._unseen.remove(replica.slot, self._unseen_number)
        if after is Phase.PREFILLING:
            self._join_queue(now_s)
        replica.decoding += (after is Phase.DECODING) - (before is Phase.DECODING)
        if after is Phase.ENDED:
            self._leave_queue(now_s)
        return True

    def _join_queue(self, now_s: float) -> None:
        self._queue_token = self.replica.queue.join(
            self._cost.busy_s, now_s, kv=self._kv, ready_s=self._ready_s
        )
        if self._unseen is not None and self._unseen_number is None:
            prefill = Prefill(
                last_block=self._last_block, due_s=self._due_s, ended=self._ended_unseen
            )
            self._unseen_number = self._unseen.add(self.replica.slot, prefill, now_s)

    def _leave_queue(self, now_s: float) -> None:
        if self._queue_token is not None:
            self.replica.queue.end(self._queue_token, now_s)

    def _due_s(self, now_s: float) -> float:
        """Return when the first token is to come, as predicted now; at once if it has, unseen."""
        token = self._queue_token
        end_s = None if token is None else self.replica.queue.end_s(token, now_s)
        return -inf if end_s is None else end_s + self._cost.base_s

    def _ended_unseen(self, event: Event, now_s: float) -> None:
        if event is Event.PROMPT_STORED:
            self._stored_s = now_s
        self._move(event, now_s)
        self._leave_prefill(now_s, just_now=event is Event.PROMPT_STORED)

    def _leave_prefill(self, now_s: float, *, just_now: bool) -> None:
        if self._queue_token is not None:
            self.replica.queue.leave(self._queue_token, now_s, just_now=just_now)

    # --- learning

    def _note_answer(self, now_s: float) -> None:
        """Tell the replica how long the answer took after its prefill, where its end was told."""
        if self._ttft_s is not None:
            self.replica.note_answer(now_s - self.started_s - self._ttft_s)
        elif self._stored_s is not None:
            self.replica.note_answer(now_s - self._stored_s)

    def _learn(self, cached_tokens: int | None, ttft_s: float) -> None:
        if not self._judgment.learns:
            return
        work = self._work
        planned = work.new_tokens
        if cached_tokens is not None:
            work = work.with_cached(cached_tokens, self.replica.kv_bytes_per_token)
        low, high = sorted((planned, work.new_tokens))
        if not self._was_alone and high > self._judgment.learning.other_work * low:
            # In a burst of one prompt one may compute what it was to wait for, and another
            # wait for what it was to compute: queues that were not there, or not foreseen.
            # Taken for real, they would make prefills look twice as fast, or as slow.
            return
        queue_s = max(0.0, work.queue_s - self._lag_s)
        self.replica.rates.observe(replace(work, queue_s=queue_s), ttft_s - self._lag_s)
        self._learned(self.replica)

    def __repr__(self) -> str:
        return f"<Ticket {self.replica.id} {self.phase}>"
