"""Reports as AIPerf 0.13 writes them, cut to what is read of them."""

import json
from pathlib import Path
from typing import Any

from bench.aiperf.report import KEPT

CONSOLE = """
                 NVIDIA AIPerf | LLM Metrics: Usage
  Usage Prompt Tokens (tokens)   6,284.16
                    NVIDIA AIPerf | LLM Metrics
  Time to First Token (ms)         276.52

"""


def report(**changes: Any) -> dict[str, Any]:
    """Return one; None takes a metric out."""
    percentiles = {"p50": 262.0, "p90": 395.0, "p99": 522.0}
    made: dict[str, Any] = {
        "schema_version": "1.4",
        "aiperf_version": "0.13.0",
        "request_count": {"unit": "requests", "avg": 185.0},
        "completed_request_count": {"unit": "requests", "avg": 187.0},
        "benchmark_duration": {"unit": "sec", "avg": 6.37},
        "time_to_first_token": {"unit": "ms", "avg": 276.5, **percentiles},
        "request_latency": {"unit": "ms", "avg": 476.5, **percentiles},
        "inter_token_latency": {"unit": "ms", "avg": 3.2},
        "request_throughput": {"unit": "requests/sec", "avg": 29.3},
        "goodput": {"unit": "requests/sec", "avg": 28.0},
        "good_request_fraction": {"unit": "ratio", "avg": 0.96},
        "overall_usage_prompt_cache_read_pct": {"unit": "%", "avg": 65.5},
        "was_cancelled": False,
        "is_complete": True,
        "error_summary": [],
    }
    return {name: value for name, value in (made | changes).items() if value is not None}


def leave(artifacts: Path, **changes: Any) -> None:
    """Write a report's files as AIPerf does."""
    artifacts.mkdir(parents=True, exist_ok=True)
    told = report(**changes) | {"artifacts": {"dir": str(artifacts)}}
    (artifacts / KEPT["json"]).write_text(json.dumps(told))
    (artifacts / KEPT["csv"]).write_text("Metric,Value\nGoodput (requests/sec),28.0\n")
    (artifacts / "profile_export_console.txt").write_text(CONSOLE)
