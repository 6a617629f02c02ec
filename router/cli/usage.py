"""``warmroute usage``: what keys have used of a running router's models, and their limits."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

from router.cli.router_client import RouterClient, RouterRefusedError, asks_router

_SHOWN: Final = ("usage", "limits", "since", "day")
_COUNTS: Final = (
    ("requests", "requests"),
    ("failed", "failed_requests"),
    ("input", "input_tokens"),
    ("output", "output_tokens"),
    ("cached", "cached_tokens"),
    ("computed", "computed_tokens"),
)
"""A heading and a field of each count."""
_LIMITS: Final = (
    ("requests/min", "requests_per_minute"),
    ("tokens/min", "tokens_per_minute"),
    ("tokens/day", "tokens_per_day"),
)
_MS: Final = 1000


@click.command(short_help="Show what keys have used of a running router.")
@asks_router
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON.")
def usage(router: RouterClient, as_json: bool) -> None:
    """Show what each key has used of each model, today and since the start.

    Days begin at 00:00 UTC. Tokens are those of the replicas' usage. Below are
    the limits of keys, with what is left of each. With a client's key as
    --admin-key it shows this key only.
    """
    answer = router.ask("/usage")
    if missing := [name for name in _SHOWN if name not in answer]:
        raise RouterRefusedError(
            f"the server at {router.url} is not a Warmroute router, or is another version: its "
            f"answer has no {', '.join(missing)}"
        )
    click.echo(json.dumps(answer, indent=2) if as_json else tables(answer))


def tables(answer: Mapping[str, Any]) -> str:
    """Return the answer as text: today, since the start, and the limits."""
    parts = [
        _usage_table(f"today, {answer['day']} (UTC)", "today", answer["usage"]),
        _usage_table(f"since the start, {answer['since']}", "since_start", answer["usage"]),
    ]
    if answer["limits"]:
        parts.append(_limit_table(answer["limits"]))
    return "\n\n".join(parts)


def _usage_table(title: str, period: str, usage: Sequence[Mapping[str, Any]]) -> str:
    rows = [["key", "model", *(heading for heading, _ in _COUNTS), "TTFT ms", "TPOT ms"]]
    for each in usage:
        counts = each[period]
        if counts["requests"]:
            numbers = [f"{counts[field]:,}" for _, field in _COUNTS]
            times = [_ms(counts["mean_ttft_s"], 0), _ms(counts["mean_tpot_s"], 1)]
            rows.append([each["key"] or "-", each["model"] or "-", *numbers, *times])
    if len(rows) == 1:
        return f"{title}\nno requests"
    return f"{title}\n{_aligned(rows)}"


def _limit_table(limits: Sequence[Mapping[str, Any]]) -> str:
    headings = [heading for heading, _ in _LIMITS]
    rows = [["key", "priority", "valid until", "parallel", *headings]]
    for each in limits:
        most = each["max_parallel_requests"]
        running = str(each["running_requests"])
        rows.append(
            [
                *(each["key"], each["priority"], each["valid_until"] or "-"),
                running if most is None else f"{running} of {most:,}",
                *(_left(each.get(field)) for _, field in _LIMITS),
            ]
        )
    return f"limits of this router: what is left\n{_aligned(rows)}"


def _left(limit: Mapping[str, Any] | None) -> str:
    return "-" if limit is None else f"{limit['remaining']:,} of {limit['limit']:,}"


def _ms(seconds: float | None, digits: int) -> str:
    return "-" if seconds is None else f"{seconds * _MS:,.{digits}f}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first two columns are aligned left, and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
