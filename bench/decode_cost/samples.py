"""What was measured inside vLLM's engine cores, taken apart by window."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import orjson

from bench.decode_cost.decodes import Decodes
from bench.decode_cost.figures import Delay, Step, Window, difference
from bench.decode_cost.probe import LOCKS, SAMPLE, SAMPLES, STEP, STEPS
from bench.decode_cost.replicas import Replicas, Vllm
from bench.decode_cost.situations import Situation
from bench.stress.inside.lock import Durations
from bench.ttft import BenchError

_LOCK_PARTS: Final = ("held", "computed", "waited", "waited_by_main")


@dataclass(frozen=True, kw_only=True)
class Span:
    """A window before its samples are read."""

    situation: Situation
    round: int
    from_s: float
    to_s: float
    moved_bytes: int
    failures: int
    decodes: Decodes


def read_windows(spans: Sequence[Span], replicas: Replicas) -> list[Window]:
    """Return the windows, complete; raise `BenchError` where one has nothing."""
    delays = {each.url: _delays(each) for each in (replicas.plain, replicas.ours)}
    steps = {each.url: _steps(each) for each in (replicas.plain, replicas.ours)}
    locks = _locks(replicas.ours)
    found = []
    for span in spans:
        has_engine = span.situation.has_engine
        url = replicas.ours.url if has_engine else replicas.plain.url
        window = Window(
            situation=span.situation,
            round=span.round,
            seconds=span.to_s - span.from_s,
            gaps_s=[gap_s for at_s, gap_s in span.decodes.gaps if span.from_s <= at_s < span.to_s],
            steps=[step for at_s, step in steps[url] if span.from_s <= at_s < span.to_s],
            delays=[delay for at_s, delay in delays[url] if span.from_s <= at_s < span.to_s],
            moved_bytes=span.moved_bytes,
            failures=span.failures,
            lock=_of_span(locks, span) if has_engine else {},
        )
        if not window.gaps_s or not window.steps or not window.delays:
            raise BenchError(f"{span.situation}: no tokens, or nothing from vLLM's process")
        found.append(window)
    return found


def _delays(vllm: Vllm) -> list[tuple[float, Delay]]:
    try:
        told = (vllm.probe / SAMPLES).read_bytes()
    except FileNotFoundError:
        raise BenchError("vLLM's engine core has measured nothing: was it started?") from None
    whole = len(told) // SAMPLE.size * SAMPLE.size
    return [
        (at_s, Delay(late_s=late_s, without_core_s=core_s))
        for at_s, late_s, core_s in SAMPLE.iter_unpack(told[:whole])
    ]


def _steps(vllm: Vllm) -> list[tuple[float, Step]]:
    """Return when each step has ended, and what there was since the one before."""
    said = (vllm.probe / STEPS).read_bytes()
    whole = len(said) // STEP.size * STEP.size
    return [
        (
            after[0],
            Step(
                seconds=after[0] - before[0],
                computed_s=after[1] - before[1],
                without_core_s=after[2] - before[2],
            ),
        )
        for before, after in pairwise(STEP.iter_unpack(said[:whole]))
    ]


def _locks(vllm: Vllm) -> list[tuple[float, dict[str, Durations]]]:
    lines = (vllm.probe / LOCKS).read_bytes().splitlines()
    told = [orjson.loads(line) for line in lines]
    return [
        (each["at_s"], {part: Durations.from_json(each[part]) for part in _LOCK_PARTS})
        for each in told
    ]


def _of_span(
    locks: Sequence[tuple[float, dict[str, Durations]]], span: Span
) -> dict[str, Durations]:
    """Return what came between the readings next to a window's beginning and end."""
    within = [durations for at_s, durations in locks if span.from_s <= at_s < span.to_s]
    if not within:
        raise BenchError("the engine's lock was not measured")
    return {part: difference(within[-1][part], within[0][part]) for part in _LOCK_PARTS}
