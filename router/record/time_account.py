"""Where a request's time went, in seconds and in words: measured parts, and what was expected.

Pure: everything comes from the request's record. `told_of` joins all that is said of a request.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Final

from router.record.records import FailedTry, Outcome, RequestRecord

_LEAST_UNEXPECTED_S: Final = 0.02
"""A part that took this much longer than expected, or less, is as expected."""
_LEAST_UNEXPECTED_SHARE: Final = 0.2
"""The same, as a share of what was expected."""
_NO_TIME_S: Final = 0.0005
"""Shorter predicted parts are not named."""


def seconds_text(seconds: float) -> str:
    """Return a time as people write it: 12.3 s, 0.25 s, 31 ms."""
    if seconds >= 1:
        return f"{seconds:,.1f} s"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.0f} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePart:
    """A part of a request's time."""

    name: str
    seconds: float
    expected_s: float | None = 0.0
    """None if nothing says how long it should have taken."""
    text: str

    @property
    def excess_s(self) -> float:
        """By how much it took longer than expected; 0 if that is unknown or not much."""
        if self.expected_s is None:
            return 0.0
        excess_s = self.seconds - self.expected_s
        least_s = max(_LEAST_UNEXPECTED_S, _LEAST_UNEXPECTED_SHARE * self.expected_s)
        return excess_s if excess_s > least_s else 0.0


class TimeAccount:
    """The parts of one request's time. Together they are all of it, except for overlaps in tries.

    Between sending a request and its first token only the sum is measured: a replica does not tell
    its queue from its prefill. These are named as they were predicted.
    """

    def __init__(self, record: RequestRecord) -> None:
        """``record`` must have ended."""
        self._record = record
        self._lasted = {
            name: sum(each.ended_s - each.began_s for each in record.steps if each.name == name)
            for name in ("read", "wait", "stage", "prefill", "retry")
        }
        self._sent_s, self._failed = self._tries()
        self.parts = tuple(each for each in self._parts() if each.seconds >= _NO_TIME_S)

    @property
    def most_unexpected(self) -> TimePart | None:
        """The part that took the most time beyond what was expected; None if all went as it was."""
        found = max(self.parts, key=lambda each: each.excess_s, default=None)
        return found if found is not None and found.excess_s else None

    def lines(self) -> list[str]:
        """Return a line for each part, and one for the most unexpected part."""
        lines = [
            f"{each.name:<12}{seconds_text(each.seconds):>9}   {each.text}" for each in self.parts
        ]
        found = self.most_unexpected
        if found is None:
            return [*lines, "No part took much longer than expected."]
        instead = f" instead of {seconds_text(found.expected_s)}" if found.expected_s else ""
        took = f"it took {seconds_text(found.seconds)}{instead}"
        return [*lines, f"The most unexpected part: {found.name}; {took}."]

    def _tries(self) -> tuple[float | None, list[tuple[FailedTry, float]]]:
        """Return when the last try was sent, if it did not fail, and how long failed ones took."""
        failures, failed, sent_s = iter(self._record.failed_tries), [], None
        for each in self._record.tries:
            if each.prefilled_s is not None:
                continue
            if (failure := next(failures, None)) is None:
                sent_s = each.began_s
            else:
                failed.append((failure, max(0.0, failure.ended_s - each.began_s)))
        # Behind a gateway no tries are known: it sends the request after the last step.
        failed += [(each, 0.0) for each in failures]
        if sent_s is None and self._record.replica_id and not self._record.tries:
            sent_s = self._record.steps[-1].ended_s if self._record.steps else None
        return sent_s, failed

    def _parts(self) -> Iterator[TimePart]:
        record = self._record
        read = next((each for each in record.steps if each.name == "read"), None)
        yield TimePart(
            name="receive",
            seconds=(record.ended_s if read is None else read.began_s) - record.started_s,
            text="until its prompt could be read: its body, requests before it, its model",
        )
        yield TimePart(name="read", seconds=self._lasted["read"], text="template and tokens")
        held_s = record.held_s or 0.0
        yield TimePart(
            name="held",
            seconds=held_s,
            text="in the router's queue, until a replica could soon begin with it",
        )
        yield TimePart(
            name="place", seconds=max(0.0, self._lasted["wait"] - held_s), text="keys, match, costs"
        )
        yield self._staged()
        if record.first_leg is not None or self._lasted["prefill"]:
            yield self._prefilled()
        for failure, seconds in self._failed:
            yield TimePart(
                name="failed try",
                seconds=seconds,
                text=f"at {failure.replica_id}: {failure.cause} ({failure.detail})",
            )
        yield TimePart(
            name="retry wait",
            seconds=self._lasted["retry"],
            text="between the tries: for a turn, a pause, or a replica's Retry-After",
        )
        yield from self._answered()

    def _staged(self) -> TimePart:
        cost, prepared = self._record.cost, self._record.prepared
        words = []
        if (prefetch := prepared.prefetch) is not None:
            words.append(
                f"prefetch to CPU RAM {prefetch.timing} "
                f"({prefetch.promoted} of {prefetch.asked} chunks)"
            )
        if (copy := prepared.copy) is not None:
            words.append(
                f"copy from {copy.source_id} {copy.timing} ({copy.arrived} of {copy.asked} chunks)"
            )
        return TimePart(
            name="staged",
            seconds=self._lasted["stage"],
            expected_s=0.0 if cost is None else cost.fetched_s,
            text="; ".join(words) or "preparing the KV at the replica",
        )

    def _prefilled(self) -> TimePart:
        record = self._record
        by = "another replica" if record.first_leg is None else record.first_leg.replica_id
        expected_s = None if record.cost is None else record.cost.prefilled_s
        predicted = "" if not expected_s else f"; predicted {seconds_text(expected_s)}"
        return TimePart(
            name="prefill at",
            seconds=self._lasted["prefill"],
            expected_s=expected_s,
            text=f"{by} computed the prompt{predicted}",
        )

    def _answered(self) -> Iterator[TimePart]:
        """Yield what came after the last try was sent."""
        record, sent_s = self._record, self._sent_s
        if sent_s is None:
            return
        expected_s, words = self._predicted()
        if record.first_byte_s is None:
            waited_s = record.ended_s - sent_s
            yield TimePart(
                name="no answer",
                seconds=waited_s,
                expected_s=None if expected_s is None else min(waited_s, expected_s),
                text=f"no first token came{words}",
            )
            return
        first_s = record.first_byte_s - sent_s
        tokens_after = max(0, (record.answer_tokens or 0) - 1)
        tpot_s = record.expected_tpot_s
        if not record.streamed:
            decode_s = None if tpot_s is None else tpot_s * tokens_after
            known = expected_s is not None and decode_s is not None
            more = f"; {tokens_after + 1} tokens of output" if tokens_after else ""
            if known and decode_s:
                more += f", expected to take {seconds_text(decode_s)}"
            yield TimePart(
                name="whole answer",
                seconds=first_s,
                expected_s=(expected_s or 0.0) + (decode_s or 0.0) if known else None,
                text=f"not streamed{words}{more}",
            )
            yield TimePart(
                name="body",
                seconds=record.ended_s - record.first_byte_s,
                expected_s=None,
                text="passing it on",
            )
            return
        yield TimePart(
            name="first token", seconds=first_s, expected_s=expected_s, text=f"measured{words}"
        )
        yield self._decoded(record.ended_s - record.first_byte_s, tokens_after)

    def _decoded(self, seconds: float, tokens_after: int) -> TimePart:
        expected_tpot_s = self._record.expected_tpot_s
        if not tokens_after:
            return TimePart(
                name="answer", seconds=seconds, expected_s=None, text="after the first token"
            )
        about = "about " if self._record.output_tokens is None else ""
        text = (
            f"{about}{tokens_after:,} tokens after the first one, "
            f"{_tpot_text(seconds / tokens_after)}"
        )
        if self._record.outcome is not Outcome.OK:
            text += f", until it ended ({self._record.outcome})"
        if expected_tpot_s is not None:
            text += f"; expected {_tpot_text(expected_tpot_s)}"
        return TimePart(
            name="answer",
            seconds=seconds,
            expected_s=None if expected_tpot_s is None else expected_tpot_s * tokens_after,
            text=text,
        )

    def _predicted(self) -> tuple[float | None, str]:
        """Return how long a first token should have taken once sent, and of which parts."""
        cost = self._record.cost
        if cost is None or not isfinite(cost.ttft_s) or not self._record.prompt_tokens:
            return None, ""
        spent_s = self._lasted["stage"] + self._lasted["prefill"]
        parts = {
            "queue": max(0.0, cost.queue_s - spent_s),
            "pull": cost.pull_s,
            "load": cost.load_s,
            "prefill": cost.prefill_s,
            "base": cost.base_s,
        }
        named = ", ".join(
            f"{name} {seconds_text(seconds)}"
            for name, seconds in parts.items()
            if seconds >= _NO_TIME_S
        )
        expected_s = sum(parts.values())
        return expected_s, f"; predicted {seconds_text(expected_s)}" + (
            f" ({named})" if named else ""
        )


def told_of(record: RequestRecord) -> dict[str, list[str]]:
    """Return all that is said of a request that has ended: lines by their heading.

    This is what ``warmroute why`` and the page show.
    """
    told = {
        "request": _request_lines(record),
        f"where {seconds_text(record.total_s)} went": TimeAccount(record).lines(),
    }
    if record.uncached is not None:
        told["why tokens were computed"] = record.uncached.lines()
    return told


def _request_lines(record: RequestRecord) -> list[str]:
    model = record.model or "none"
    if record.requested_model not in (None, record.model):
        model += f" (asked for as {record.requested_model})"
    known = {"model": model, "client": record.client, "key": record.key}
    if record.session_hash is not None:
        known["session"] = record.session_hash
    asked = ", ".join(f"{name} {value}" for name, value in known.items() if value is not None)
    status = "no status" if record.status is None else f"status {record.status}"
    ended = f"{status}, {record.outcome}"
    if record.replica_id is not None:
        ended += f", by {record.replica_id} ({record.reason})"
    if record.error is not None:
        ended += f": {record.error}"
    lines = [f"{record.method} {record.path or record.endpoint}: {asked}", ended]
    if record.prompt_tokens:
        lines.append(_prompt_line(record))
    return lines


def _prompt_line(record: RequestRecord) -> str:
    matched = {str(tier): count for tier, count in record.matched_tokens.items() if count}
    found = ", ".join(f"{count:,} {tier}" for tier, count in matched.items()) or "none"
    line = f"prompt of {record.prompt_tokens:,} tokens, matched: {found}"
    if record.cached_tokens is not None:
        line += f", cached according to the replica: {record.cached_tokens:,}"
    if record.output_tokens is not None:
        line += f"; answer of {record.output_tokens:,} tokens"
    return line


def _tpot_text(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms each"
