"""The result, for people and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from bench.decode_cost.figures import FIGURES, Window, as_json, summary, together
from bench.decode_cost.run import Settings
from bench.decode_cost.situations import MODERATE_BYTES_S, SITUATIONS, Pace

HOW_TO_READ: Final = (
    "step: between the ends of the scheduler's steps, inside vLLM's engine core: a step has a "
    "token of each running answer. gap: between tokens of one answer, at its client; it has in it "
    "what vLLM's other processes and the client take. Medians over the rounds.",
    "The model is driven from the engine core's main thread, in the process where the engine is, "
    "as with one GPU. Without a GPU it computes there too, on the cores that the engine's threads "
    "want: step has in it what the thread waited for a core, which a GPU's decode does not, as "
    "long as cores are free. with_core is the step less that wait, by the kernel's count for this "
    "very thread: slower memory, the wait for the interpreter's lock (GIL), and what else the "
    "process costs. A thread that has the lock and loses its core keeps the others waiting for "
    "it: with free cores that does not happen, so that with_core says too much rather than too "
    "little.",
    "inside vLLM: the engine in vLLM's process does the work. outside: an engine in a process of "
    "its own on the same machine does the same, with tiers of its own, while that inside is idle: "
    "what a cache daemon would cost. Their ratio is what the daemon would save; moved_over_outside "
    "says whether both moved as much, and a ratio of times is to be read only where that is near "
    "1. moderate: both at moderate_bytes_per_s, all chunks of a prompt in one call. cores apart: "
    "the engine core's main thread has a core, and all else of this bench the others; where the "
    "bench may ask for that (root) it goes before the machine's other work, and the threads of "
    "vLLM's process before the rest of it: as with free cores, no thread that has the lock, or is "
    "given it, waits for a core that another process has. There the kernel takes the core from "
    "such threads for 50 ms of each second, where other work wants it: p99 of step and "
    "gap is that pause, in every situation, and says nothing; with_core is without it.",
    "A ratio is the geometric mean over rounds of two windows of the same round, its interval "
    "(95%) by drawing rounds again and again; inside_over_outside draws from all rounds and kinds "
    "of work together.",
    "step_is_made_of: means of what the main thread computed, waited for a core, and slept, of "
    "that also the 99th percentile: the wait for the GIL is in asleep.",
    "thread_woke_late, less of_it_without_core, is the wait for the GIL of another thread of the "
    "process, which always wants to run a little; share_of_time_without_gil is what part of its "
    "time it waits so.",
    "lock.waited_by_main: what the scheduler's thread has waited for the engine's own lock; "
    "lock.held has in it what the holder waited for the GIL or a core, lock.computed has not.",
    "beyond_5_percent: yes, where the whole interval is above 1.05; no, where all of it is below.",
)
_COLUMNS: Final = (
    "{:<56}{:>7}{:>7}{:>17}{:>17}{:>10}{:>17}{:>17}" + "{:>6}{:>7}{:>8}{:>7}{:>6}{:>7}{:>11}"
)
_TWINS: Final = {
    "full speed": (Pace.FULL, False),
    "moderate": (Pace.MODERATE, False),
    "moderate, cores apart": (Pace.MODERATE, True),
}


def report(settings: Settings, windows: Sequence[Window]) -> dict[str, Any]:
    """Return all figures, ready for JSON."""
    return {
        "what": "time between tokens of running decodes, and what delays threads of vLLM's process",
        **asdict(settings),
        "moderate_bytes_per_s": dict(MODERATE_BYTES_S),
        "how_to_read": HOW_TO_READ,
        "inside_over_outside": {
            name: _together(windows, pace, is_parted) for name, (pace, is_parted) in _TWINS.items()
        },
        "situations": [summary(windows, situation) for situation in SITUATIONS],
    }


def _together(windows: Sequence[Window], pace: Pace, is_parted: bool) -> dict[str, Any]:
    found = {
        name: together(windows, pace, is_parted=is_parted, figure=figure)
        for name, figure in FIGURES.items()
    }
    return {name.removesuffix("_ms"): as_json(each) for name, each in found.items() if each}


def table(told: dict[str, Any]) -> str:
    """Return the figures of a report as lines."""
    head = (
        *("ms between steps", "p50", "p99", "p99/plain", "p99/outside"),
        *("with core", "p99/plain", "p99/outside"),
        *("GB/s", "comp.", "no core", "asleep", "p99", "no GIL", "lock p99.9"),
    )
    lines = [_COLUMNS.format(*head), *map(_line, told["situations"])]
    lines.append("inside over outside, all work together")
    for name, each in told["inside_over_outside"].items():
        words = [f"{key} {_ratio(value)}" for key, value in each.items() if "gap" not in key]
        lines.append(f"{name}: {', '.join(words)}")
    return "\n".join(lines)


def _line(each: dict[str, Any]) -> str:
    parts = each["step_is_made_of"]
    waited = each["lock"].get("waited_by_main", {}).get("p99.9_ms", 0.0)
    return _COLUMNS.format(
        each["situation"],
        *(f"{each[key]:.1f}" for key in ("step_p50_ms", "step_p99_ms")),
        *(_ratio(each.get(f"step_p99_over_{other}")) for other in ("plain", "outside")),
        f"{each['with_core_p99_ms']:.1f}",
        *(_ratio(each.get(f"with_core_p99_over_{other}")) for other in ("plain", "outside")),
        f"{each['moved_gb_per_s']:.2f}",
        *(f"{value:.1f}" for value in parts.values()),
        f"{each['share_of_time_without_gil']:.1%}",
        f"{waited:.3f}",
    )


def _ratio(told: dict[str, float] | None) -> str:
    return f"{told['ratio']:.2f} ({told['low']:.2f}-{told['high']:.2f})" if told else ""
