"""The result, for people and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from bench.decode_cost.figures import Window, summary
from bench.decode_cost.pressure import Situation
from bench.decode_cost.run import Settings

HOW_TO_READ: Final = (
    "step: between the ends of the scheduler's steps, inside vLLM's engine core: a step has a "
    "token of each running answer. gap: between tokens of one answer, at its client; it has in it "
    "what vLLM's other processes and the client take. Medians over the rounds.",
    "A ratio is the geometric mean over rounds of two windows of the same round, its interval "
    "(95%) by drawing rounds again and again.",
    "On a machine without a GPU the model computes on the cores that the engine's threads want, "
    "too: there the gaps suffer by that, as a GPU's do not. What a GPU's decode suffers is in the "
    "figures of vLLM's engine-core process: thread_woke_late, less of_it_without_core, is the wait "
    "for the interpreter's lock (GIL), which the scheduler's thread has in the same way each time "
    "that it comes back from a call that gave the lock away.",
    "share_of_time_without_gil is what part of its time a thread that always wants to run a little "
    "waits so. Its difference to vLLM without the engine is the engine's.",
    "lock.waited_by_main: what the scheduler's thread has waited for the engine's own lock; "
    "lock.held has in it what the holder waited for the GIL or a core, lock.computed has not.",
    "beyond_5_percent: yes, where the whole interval is above 1.05; no, where all of it is below.",
)


def report(settings: Settings, windows: Sequence[Window]) -> dict[str, Any]:
    """Return all figures, ready for JSON."""
    return {
        "what": "time between tokens of running decodes, and what delays threads of vLLM's process",
        **asdict(settings),
        "how_to_read": HOW_TO_READ,
        "situations": [summary(windows, situation) for situation in Situation],
    }


def table(told: dict[str, Any]) -> str:
    """Return the figures of a report as lines."""
    head = (
        *(
            "ms between steps",
            "p50",
            "p99",
            "p99 over plain",
            "p99 at client",
            "GB/s",
            "woke late p99",
        ),
        *("max", "no core p99", "no GIL p99", "max", "share", "lock p99.9"),
    )
    lines = [
        "{:<26}{:>8}{:>8}{:>24}{:>14}{:>7}{:>14}{:>8}{:>13}{:>12}{:>8}{:>8}{:>12}".format(*head)
    ]
    lines += [_line(each) for each in told["situations"]]
    return "\n".join(lines)


def _line(each: dict[str, Any]) -> str:
    over = each["step_p99_over_plain"]
    waited = each["lock"].get("waited_by_main", {}).get("p99.9_ms", 0.0)
    return (
        f"{each['situation']:<26}{each['step_p50_ms']:>8.2f}{each['step_p99_ms']:>8.2f}"
        f"{over['ratio']:>10.2f} ({over['low']:.2f} to {over['high']:.2f})"
        f"{each['gap_p99_ms']:>14.2f}{each['moved_gb_per_s']:>6.2f}{each['thread_woke_late']['p99_ms']:>14.2f}"
        f"{each['thread_woke_late']['max_ms']:>8.1f}{each['of_it_without_core']['p99_ms']:>13.2f}"
        f"{each['of_it_without_gil']['p99_ms']:>12.2f}{each['of_it_without_gil']['max_ms']:>8.1f}"
        f"{each['share_of_time_without_gil']:>8.1%}{waited:>12.3f}"
    )
