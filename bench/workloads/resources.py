"""How much of a fleet's resources an ideal run takes, besides prefill. Pure.

All are means over the window, as shares of what the fleet has, and optimistic:
no request waits, load is spread evenly, and what several requests of one
replica have in common lies there once. Texts count by their numbers: equal
numbers after different beginnings, which no workload here has, would be taken
for the same KV.
"""

import itertools
import math
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench.workloads.pacing import Due, Window
from simulator.model.replica_machine import Machine, Rates, Shape

PREFILL: Final = "prefill"
KV_MEMORY: Final = "kv_memory"
DECODE_SLOTS: Final = "decode_slots"
DISK: Final = "disk"
REPLICA_TIME: Final = "replica_time"

_INSTANTS: Final = 64
"""At which the requests under way are counted."""
_SPANS_OF_TIME: Final = 16
"""In which the tokens in use are counted."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What is taken of each resource; 1 is all that the fleet has."""

    offered: Mapping[str, float]
    crowded: Mapping[str, float]
    working_set_s: float
    working_set_tokens: int


def measure(window: Window, *, replicas: int, machine: Machine) -> Usage:
    """Measure an ideal run on a fleet of equal machines."""
    rates, shape = machine.rates, machine.shape
    contents = Contents(window)
    per_s = 1 / (window.length_s * replicas)
    answered_per_s = sum(window.turn(due).output_tokens for due in window.reported) * per_s
    turns = [window.turn(due) for due in window.reported]
    prefill = sum(rates.prefill_s(t.computed_tokens, t.matched_tokens) for t in turns) * per_s
    decodes = decoding(answered_per_s, rates)
    crowded = crowded_decoding(answered_per_s, prefill, rates, shape)
    cache_tokens = replicas * (shape.gpu_tokens + machine.cpu_tokens)
    reads = disk_reads(window, contents, cache_tokens)
    lengths_s = [each.length_s for each in window.planned]
    # Requests that stand alone have no session to take the time from.
    alone = all(len(each.turns) == 1 for each in window.planned)
    working_set_s = max(sum(lengths_s) / len(lengths_s), reads.reused_after_s if alone else 0.0)

    def kv_memory(sequences: float) -> float:
        step_s = sequences / answered_per_s
        held = held_tokens(window, contents, step_s=step_s, replicas=replicas)
        return held / (shape.gpu_tokens * replicas)

    disk = reads.tokens * per_s / rates.disk_tokens_per_s
    return Usage(
        offered={
            PREFILL: prefill,
            KV_MEMORY: kv_memory(decodes),
            DECODE_SLOTS: decodes / shape.max_sequences,
            DISK: disk,
        },
        crowded={
            REPLICA_TIME: window.load,
            KV_MEMORY: kv_memory(crowded),
            DECODE_SLOTS: crowded / shape.max_sequences,
            DISK: disk,
        },
        working_set_s=working_set_s,
        working_set_tokens=working_set_tokens(window, contents, working_set_s),
    )


# --- decodes


def decoding(tokens_per_s: float, rates: Rates, *, time_left: float = 1.0) -> float:
    """Return how many sequences decode at once on a replica that gives this many tokens.

    ``time_left`` is the share of its time that prefill leaves to the steps
    themselves. Infinite where decodes take longer than they come.
    """
    if time_left <= 0:
        return math.inf
    left = time_left - tokens_per_s * rates.decode_s_per_sequence
    return tokens_per_s * rates.step_s / left if left > 0 else math.inf


def crowded_decoding(tokens_per_s: float, load: float, rates: Rates, shape: Shape) -> float:
    """Return the same next to prefill of a load: each step takes the longer, at most a full one."""
    full_s = shape.max_batched_tokens / rates.prefill_tokens_per_s
    left = 1 - tokens_per_s * rates.decode_s_per_sequence
    at_most = tokens_per_s * (full_s + rates.step_s) / left if left > 0 else math.inf
    return min(decoding(tokens_per_s, rates, time_left=1 - load), at_most)


# --- what requests hold


class Contents:
    """Which texts the sessions' first prompts are of, and how much the sessions grow."""

    def __init__(self, window: Window) -> None:
        self.tokens: dict[int, int] = {}
        """Tokens of each text, by its number; text of a single session has negative numbers."""
        self.first: list[Sequence[int]] = []
        """The texts of each session's first prompt."""
        self.grown: list[Sequence[int]] = []
        """What each later turn adds: an answer and what is said after it."""
        numbers = itertools.count(-1, -1)
        for planned in window.planned:
            spans = planned.session.turns[0].spans
            for span in spans:
                known = self.tokens.get(span.number, 0)
                self.tokens[span.number] = max(known, span.tokens)
            self.first.append([span.number for span in spans])
            self.grown.append([next(numbers) for _ in planned.turns[1:]])
            pairs = itertools.pairwise(planned.turns)
            for number, (before, after) in zip(self.grown[-1], pairs, strict=True):
                self.tokens[number] = after.prompt_tokens - before.prompt_tokens


def held_tokens(window: Window, contents: Contents, *, step_s: float, replicas: int) -> float:
    """Return how many tokens the requests under way hold on all GPUs, on average.

    A text that m of the n requests hold has as many copies as m
    requests need that lie together, n/replicas on each; at least one.
    """
    if not math.isfinite(step_s):
        return math.inf
    held = 0.0
    for under_way in _under_way(window, step_s):
        held += sum(under_way.values())
        uses = Counter(
            itertools.chain.from_iterable(contents.first[session] for session in under_way)
        )
        each_holds = max(1.0, len(under_way) / replicas)
        held += sum(
            contents.tokens[number] * max(1.0, count / each_holds) for number, count in uses.items()
        )
    return held / _INSTANTS


def _under_way(window: Window, step_s: float) -> Sequence[Mapping[int, float]]:
    """Return, for each instant, the sessions that are answered: tokens beyond the first prompt."""
    every_s = window.length_s / _INSTANTS
    found: list[dict[int, float]] = [{} for _ in range(_INSTANTS)]
    for due in window.dues:
        turn = window.turn(due)
        before = window.planned[due.session].turns[0].prompt_tokens
        decodes_s = due.at_s + turn.ttft_s
        ends_s = decodes_s + turn.output_tokens * step_s
        first = max(0, math.ceil((due.at_s - window.begin_s) / every_s - 0.5))
        end = min(_INSTANTS, math.ceil((ends_s - window.begin_s) / every_s - 0.5))
        for instant in range(first, end):
            at_s = window.begin_s + (instant + 0.5) * every_s
            given = max(0.0, at_s - decodes_s) / step_s
            tokens = turn.prompt_tokens - before + given
            others = found[instant].get(due.session, 0.0)
            found[instant][due.session] = max(others, tokens)
    return found


# --- what is used again


@dataclass(slots=True)
class Reads:
    """What requests of the window find that was pushed out of GPU and CPU."""

    tokens: int = 0
    reused_tokens: int = 0
    waited_token_s: float = 0.0

    @property
    def reused_after_s(self) -> float:
        """Time since the use before of what is used again, over its tokens."""
        return self.waited_token_s / self.reused_tokens if self.reused_tokens else 0.0


def disk_reads(window: Window, contents: Contents, cache_tokens: int) -> Reads:
    """Return what a disk has to deliver that has everything, below one cache for all replicas.

    The cache keeps the texts that were used last, of one prompt its beginning longest.
    """
    reads = Reads()
    kept: OrderedDict[int, None] = OrderedDict()
    used_s: dict[int, float] = {}
    free_tokens = cache_tokens
    for index, due in enumerate(window.dues):
        keys = [*contents.first[due.session], *contents.grown[due.session][: due.turn]]
        if index >= window.first:
            for key, tokens in _found(window, contents, due):
                reads.tokens += 0 if key in kept else tokens
                reads.reused_tokens += tokens
                reads.waited_token_s += tokens * (due.at_s - used_s[key])
        for key in reversed(keys):
            if key in kept:
                kept.move_to_end(key)
            else:
                kept[key] = None
                free_tokens -= contents.tokens[key]
            used_s[key] = due.at_s
        while free_tokens < 0:
            free_tokens += contents.tokens[kept.popitem(last=False)[0]]
    return reads


def _found(window: Window, contents: Contents, due: Due) -> Iterator[tuple[int, int]]:
    """Yield the texts of a prompt that an infinite cache has, with the tokens that match."""
    if due.turn:
        for key in contents.first[due.session]:
            yield key, contents.tokens[key]
        for key in contents.grown[due.session][: due.turn - 1]:
            yield key, contents.tokens[key]
        return
    left = window.turn(due).matched_tokens
    for key in contents.first[due.session]:
        if left <= 0:
            return
        yield key, min(left, contents.tokens[key])
        left -= contents.tokens[key]


def working_set_tokens(window: Window, contents: Contents, length_s: float) -> int:
    """Return the distinct tokens that requests use within such a time, on average."""
    times_s = [due.at_s for due in window.dues]
    begin_s = max(window.begin_s, length_s)
    every_s = max(0.0, window.end_s - begin_s) / _SPANS_OF_TIME
    total = 0
    for number in range(1, _SPANS_OF_TIME + 1):
        end_s = begin_s + number * every_s
        first, end = (bisect_right(times_s, at_s) for at_s in (end_s - length_s, end_s))
        latest = {due.session: due for due in window.dues[first:end]}
        texts = set(itertools.chain.from_iterable(contents.first[each] for each in latest))
        total += sum(map(contents.tokens.__getitem__, texts))
        for due in latest.values():
            turn, opening = window.turn(due), window.planned[due.session].turns[0]
            total += turn.prompt_tokens + turn.output_tokens - opening.prompt_tokens
    return total // _SPANS_OF_TIME
