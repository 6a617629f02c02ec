"""One request in flight: counted once at its start, released once at its end."""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from router.config import Judgment
from router.fleet.decision import Decision
from router.fleet.replica import Replica
from router.fleet.unseen import Prefill, Unseen
from router.latency import Cost, Work
from router.residency import Claim, PrefixIndex


class Ticket:
    """Held by whoever forwards the request; made by `Fleet.start`.

    `finish` must be called on every way out, and may be called more than once.
    """

    def __init__(
        self,
        replica: Replica,
        index: PrefixIndex,
        claim: Claim | None,
        decision: Decision,
        now_s: float,
        *,
        cost: Cost,
        learned: Callable[[Replica], None],
        unseen: Unseen,
        judgment: Judgment,
    ) -> None:
        """``cost`` is that of the decision's work, as predicted now.

        ``learned`` is told when the replica's rates have learned from the request;
        ``unseen`` ends its prefill where the answer will not be streamed.
        """
        self._replica = replica
        self._judgment = judgment
        self._learned = learned
        self._index = index
        self._claim = claim
        self._decision = decision
        self.started_s = now_s
        self._lag_s = 0.0
        self._ttft_s: float | None = None
        self._streamed = False
        self._finished = False
        self._was_alone = not replica.waiting
        replica.waiting += 1
        replica.started += 1
        self._number = replica.started
        self._waits = True
        self._cost = cost
        self._unseen = unseen
        self._unseen_number: int | None = None
        self._line_token: int | None = None
        # While a request's KV is staged, its replica has nothing of it to compute: taken for
        # work before them, it held others in the router while replicas were idle.
        if not decision.is_staged:
            self._join(now_s)

    def _join(self, now_s: float) -> None:
        self._line_token = self._replica.line.join(self._cost.busy_s, now_s)
        if not self._decision.streamed and self._unseen_number is None:
            self._unseen_number = self._watch()

    def _watch(self) -> int:
        keys = self._decision.picked.keys
        last_block = keys.keys[-1] if keys.chain else None
        prefill = Prefill(last_block=last_block, due_s=self._due_s, ended=self._end_waiting)
        return self._unseen.add(self._replica.slot, prefill)

    def _due_s(self) -> float:
        """Return when the first token is to come, as predicted now; at once if it has, unseen."""
        end_s = None if self._line_token is None else self._replica.line.end_s(self._line_token)
        return -inf if end_s is None else end_s + self._cost.base_s

    def sent(self, now_s: float) -> None:
        """Note that the replica is asked only now: others may have been in the meantime."""
        if self._finished or self._ttft_s is not None:
            return
        if self._line_token is not None:
            self._replica.line.give_up(self._line_token, now_s)
        self._join(now_s)

    def _end_waiting(self) -> None:
        """Count the request as decoding from now on; later calls change nothing."""
        if not self._waits:
            return
        self._waits = False
        self._replica.waiting -= 1
        self._replica.decoding += 1
        if self._unseen_number is not None:
            self._unseen.remove(self._replica.slot, self._unseen_number)

    def first_byte(self, now_s: float, *, streamed: bool = True, lag_s: float = 0.0) -> None:
        """Note that the answer has begun; later calls change nothing.

        ``streamed``: whether this was the first token. The headers of an
        answer that is not streamed come with its last, and teach nothing.
        ``lag_s``: what the router itself took to send the request, beside what it waited
        for; that is not the replica's.
        """
        if self._finished or self._ttft_s is not None:
            return
        self._end_waiting()
        self._ttft_s = now_s - self.started_s
        self._lag_s = max(0.0, lag_s)
        self._was_alone &= self._replica.started == self._number
        self._streamed = streamed
        if self._line_token is not None:
            self._replica.line.leave(self._line_token, now_s, just_now=streamed)

    def finish(
        self,
        now_s: float,
        *,
        ok: bool,
        cached_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> None:
        """Release the request and learn from it; later calls change nothing.

        ``cached_tokens`` and ``output_tokens`` are what the replica's
        ``usage`` said, if it did.
        """
        if self._finished:
            return
        self._finished = True
        self._end_waiting()
        self._replica.decoding -= 1
        if self._ttft_s is None:
            if self._line_token is not None:
                self._replica.line.give_up(self._line_token, now_s)
            self._withdraw()
            return
        if ok and self._streamed:
            # Whatever made the prediction wrong is counted, a match that was not
            # there and rates not learned yet too; the rates learn from what is
            # known by now.
            self._replica.errors.note(self._decision.predicted_ttft_s, self._ttft_s)
            self._learn(self._work(cached_tokens), self._ttft_s)

    def _learn(self, work: Work, ttft_s: float) -> None:
        if not self._judgment.learns:
            return
        planned = self._decision.picked.work.new_tokens
        low, high = sorted((planned, work.new_tokens))
        if not self._was_alone and high > self._judgment.learning.other_work * low:
            # In a burst of one prompt one may compute what it was to wait for, and another
            # wait for what it was to compute: queues that were not there, or not foreseen.
            # Taken for real, they would make prefills look twice as fast, or as slow.
            return
        queue_s = max(0.0, work.queue_s - self._lag_s)
        self._replica.rates.observe(replace(work, queue_s=queue_s), ttft_s - self._lag_s)
        self._learned(self._replica)

    def _work(self, cached_tokens: int | None) -> Work:
        work = self._decision.picked.work
        if cached_tokens is None:
            return work
        return work.with_cached(cached_tokens, self._replica.kv_bytes_per_token)

    def _withdraw(self) -> None:
        # Nothing was computed, as far as anyone knows: a request that is sent
        # elsewhere now must not be drawn back by its own claim.
        if self._claim is not None:
            self._index.withdraw(self._claim)

    def __repr__(self) -> str:
        state = "finished" if self._finished else "waiting" if self._waits else "decoding"
        return f"<Ticket {self._replica.id} {state}>"
