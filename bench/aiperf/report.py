"""AIPerf's report: what is read from it, and how it is kept without a word of this machine."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from bench.ttft import BenchError

KEPT: Final = {"json": "profile_export_aiperf.json", "csv": "profile_export_aiperf.csv"}
"""AIPerf's files that are kept, by the ending of what they are kept as."""
_CONSOLE: Final = "profile_export_console.txt"
_TITLE: Final = "NVIDIA AIPerf | LLM Metrics"

# A path begins where no name and no other path goes on: "tokens/sec" and a URL have none.
_PATH: Final = re.compile(r"(?<![\w/.:)])/(?:[\w.+-]+/)+[\w.+-]*")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One run, in AIPerf's own figures: its client's view of every request."""

    requests: int
    """Answered ones."""
    errors: int
    duration_s: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    latency_p90_ms: float
    between_tokens_mean_ms: float
    requests_per_s: float
    good_per_s: float
    """Goodput: answers a second whose first token came within the bound."""
    good_share: float
    cached_share: float | None
    """Of the prompts' tokens, as the replicas told in their answers' usage; None: untold."""

    @classmethod
    def read(cls, report: Mapping[str, Any]) -> Self:
        """Read AIPerf's JSON; raises `BenchError` for one without answers."""

        def value(metric: str, statistic: str = "avg") -> float:
            try:
                return float(report[metric][statistic])
            except (KeyError, TypeError):
                told = report.get("error_summary") or "no request was answered"
                raise BenchError(f"AIPerf reports no {metric}: {told}") from None

        answered = round(value("request_count"))
        cached = report.get("overall_usage_prompt_cache_read_pct")
        return cls(
            requests=answered,
            errors=round(value("completed_request_count")) - answered,
            duration_s=value("benchmark_duration"),
            ttft_mean_ms=value("time_to_first_token"),
            ttft_p50_ms=value("time_to_first_token", "p50"),
            ttft_p90_ms=value("time_to_first_token", "p90"),
            ttft_p99_ms=value("time_to_first_token", "p99"),
            latency_p90_ms=value("request_latency", "p90"),
            between_tokens_mean_ms=value("inter_token_latency"),
            requests_per_s=value("request_throughput"),
            good_per_s=value("goodput"),
            good_share=value("good_request_fraction"),
            cached_share=None if cached is None else float(cached["avg"]) / 100,
        )


def read_report(artifacts: Path) -> tuple[Figures, str]:
    """Return what a run's report says, and the version of AIPerf that says it."""
    path = artifacts / KEPT["json"]
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"AIPerf left no report: {error}") from None
    if report.get("was_cancelled") or not report.get("is_complete", True):
        raise BenchError(f"AIPerf did not finish: {report.get('error_summary')}")
    return Figures.read(report), str(report["aiperf_version"])


def own_table(artifacts: Path) -> str:
    """Return AIPerf's table of what matters most, as it shows it in a terminal."""
    text = (artifacts / _CONSOLE).read_text(encoding="utf-8")
    lines = text.splitlines()
    # Those before it are of single aspects, which their titles name.
    begin = next((i for i, line in enumerate(lines) if line.strip() == _TITLE), 0)
    return "\n".join(lines[begin:]).rstrip()


def kept_texts(artifacts: Path, work: Path) -> dict[str, str]:
    """Return the texts of AIPerf's report that are kept, by their endings.

    Paths in ``work`` are made relative to it; raises `BenchError` for any other.
    """
    texts = {
        ending: relative((artifacts / name).read_text(encoding="utf-8"), work)
        for ending, name in KEPT.items()
    }
    for text in texts.values():
        check_nameless(text)
    return texts


def relative(text: str, work: Path) -> str:
    """Return a text with paths in ``work`` relative to it."""
    return re.sub(rf"{re.escape(str(work))}(?:/|(?![\w.-]))", "", text)


def check_nameless(text: str) -> None:
    """Raise `BenchError` where a text names a path: what is kept says nothing of the machine."""
    if found := _PATH.search(text):
        raise BenchError(f"{found.group()} is a path of this machine: it must not be kept")


def table(title: str, runs: Mapping[str, Figures]) -> str:
    """Return the runs beside each other, as text for a terminal."""
    lines = [title, _row("", _HEADS), "-" * len(_row("", _HEADS))]
    lines += [_row(name, _cells(each)) for name, each in runs.items()]
    return "\n".join(lines)


_HEADS: Final = (
    *("requests", "errors", "TTFT ms", "p50", "p90", "p99", "latency p90", "ms a token"),
    *("cached", "req/s", "good/s", "good"),
)


def _cells(figures: Figures) -> list[str]:
    return [
        *(str(figures.requests), str(figures.errors)),
        *(f"{each:.0f}" for each in (figures.ttft_mean_ms, figures.ttft_p50_ms)),
        *(f"{each:.0f}" for each in (figures.ttft_p90_ms, figures.ttft_p99_ms)),
        *(f"{figures.latency_p90_ms:.0f}", f"{figures.between_tokens_mean_ms:.1f}"),
        "-" if figures.cached_share is None else f"{figures.cached_share:.1%}",
        *(f"{figures.requests_per_s:.2f}", f"{figures.good_per_s:.2f}"),
        f"{figures.good_share:.1%}",
    ]


def _row(name: str, cells: Sequence[str]) -> str:
    widths = (max(8, len(head)) for head in _HEADS)
    shown = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{name:<20} {' '.join(shown)}"
