"""``warmroute waste``: what tokens that need not have been computed cost, by cause and key."""

import json
import textwrap
from typing import Any, Final

import click

from router.cli.router_client import RouterClient, asks_router
from warmroute_common.command_line import counted

_COLUMNS: Final = 100
_AVOIDABLE: Final = ("changed", "evicted", "elsewhere", "declined")


@click.command(short_help="Show why prompts were computed again, and what that costs.")
@asks_router
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON.")
def waste(router: RouterClient, as_json: bool) -> None:
    """Show which prompt tokens need not have been computed, why, and what they cost.

    It covers the last 30 to 60 minutes of a running router. Tokens are those
    that replicas computed because they were not cached. Seconds are predicted
    seconds of prefill; replicas are how many were busy with it all the time.
    """
    report = router.ask("/waste")
    click.echo(json.dumps(report, indent=2) if as_json else table(report))


def table(report: dict[str, Any]) -> str:
    """Return the report as text: one sentence, the causes, the worst ones, the keys."""
    if not report["requests"]:
        return f"no prompts in the last {_duration(report['window_s'])}"
    return "\n".join(
        [
            *_head(report),
            "",
            *_cause_lines(report["causes"]),
            *_worst_lines(report),
            *_key_lines(report),
        ]
    )


def _head(report: dict[str, Any]) -> list[str]:
    avoidable = report["avoidable"]
    head = (
        f"{avoidable['share']:.0%} of the prefill in the last {_duration(report['window_s'])} was "
        f"avoidable: {avoidable['tokens']:,} of {report['computed_tokens']:,} computed tokens, "
        f"{_duration(avoidable['seconds'])} of prefill, {avoidable['replicas']:.2f} replicas. "
        f"{_cached(report):.0%} of {report['prompt_tokens']:,} prompt tokens were cached."
    )
    if report["unreported_tokens"]:
        share = report["unreported_tokens"] / max(1, report["computed_tokens"])
        head += (
            f" For {share:.0%} of the computed tokens the replica did not report what was cached."
        )
    return textwrap.wrap(head, _COLUMNS)


def _cached(report: dict[str, Any]) -> float:
    prompt: int = report["prompt_tokens"]
    computed: int = report["computed_tokens"]
    return (prompt - computed) / max(1, prompt)


def _cause_lines(causes: dict[str, dict[str, Any]]) -> list[str]:
    lines = [f"{'cause':<12}{'tokens':>14}{'share':>8}{'seconds':>10}{'replicas':>10}"]
    for name, each in causes.items():
        mark = "" if name in _AVOIDABLE else "  (not avoidable)"
        lines.append(
            f"{name:<12}{each['tokens']:>14,}{each['share']:>8.0%}{each['seconds']:>10,.1f}"
            f"{each['replicas']:>10.2f}{mark}"
        )
    return lines


def _worst_lines(report: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for number, each in enumerate(report["worst"], 1):
        text = (
            f"{each['cause']}: {each['words']}: {each['tokens']:,} tokens ({each['share']:.0%}) in "
            f"{counted(each['requests'], 'request')}, {_duration(each['seconds'])}"
        )
        indent = f"{number:>2}. "
        lines += textwrap.wrap(text, _COLUMNS, initial_indent=indent, subsequent_indent="    ")
    if left := report["left_out"]["causes"]:
        lines.append(f"    and {left:,} more, not shown")
    return ["", "The most expensive avoidable causes:", *lines] if lines else []


def _key_lines(report: dict[str, Any]) -> list[str]:
    keys = report["keys"]
    if [each["key"] for each in keys] == [""]:
        return []
    width = max(len(_key(each)) for each in keys)
    head = (
        f"{'key':<{width}}{'requests':>10}{'computed':>14}{'avoidable':>14}{'share':>8}  by cause"
    )
    lines = ["", head]
    for each in keys:
        share = each["avoidable_tokens"] / max(1, each["computed_tokens"])
        causes = ", ".join(
            f"{name} {cost['share']:.0%}"
            for name, cost in each["causes"].items()
            if name in _AVOIDABLE
        )
        lines.append(
            f"{_key(each):<{width}}{each['requests']:>10,}{each['computed_tokens']:>14,}"
            f"{each['avoidable_tokens']:>14,}{share:>8.0%}  {causes or '-'}"
        )
    if left := report["left_out"]["keys"]:
        lines.append(f"and {left:,} more, not shown")
    return lines


def _key(each: dict[str, Any]) -> str:
    return each["key"] or "(without a key)"


def _duration(seconds: float) -> str:
    if seconds >= 120:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
