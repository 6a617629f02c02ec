"""``warmroute explain`` and ``warmroute why``: ask a running router, and show what it answers."""

import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import quote

import click

from router.cli.router_client import RouterClient, asks_router
from warmroute_common.command_line import counted

_COLUMNS: Final = 100
_INDENT: Final = 11
_LEFT: Final = ("", "replica")


@click.command(short_help="Ask a running router where a prompt would go.")
@click.argument("prompt", required=False)
@asks_router
@click.option("--model", help="The model. By default any that the replicas serve.")
@click.option("--session", help="Ask as this session.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON.")
def explain(
    *,
    prompt: str | None,
    router: RouterClient,
    model: str | None,
    session: str | None,
    as_json: bool,
) -> None:
    """Ask a running router where it would send PROMPT, and why.

    PROMPT is a user's message, or a whole request body as JSON if it begins
    with '{'. Without PROMPT it is read from standard input. Nothing is sent to
    a replica.
    """
    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        where = "standard input" if prompt is None else "PROMPT"
        raise click.UsageError(f"{where} is empty; give the text of a prompt")
    answer = ask(router, text, model=model, session=session)
    click.echo(json.dumps(answer, indent=2) if as_json else table(answer))


@click.command(short_help="Say why a request took as long as it did.")
@click.argument("request_id", metavar="REQUEST_ID")
@asks_router
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer as JSON.")
def why(*, request_id: str, router: RouterClient, as_json: bool) -> None:
    """Say where the time of a request went, and which part was unexpected.

    REQUEST_ID is the x-request-id of its answer. The router that carried the
    request knows it once it has ended, among its last 1,000 requests.
    """
    answer = router.ask(f"/requests/{quote(request_id, safe='')}")
    click.echo(json.dumps(answer, indent=2) if as_json else sections(answer["why"]))


def sections(lines: dict[str, list[str]]) -> str:
    """Return lines below their headings, without what a terminal takes for a command."""
    shown = [
        "\n".join([heading.capitalize(), *(f"  {_printable(each)}" for each in below)])
        for heading, below in lines.items()
    ]
    return "\n\n".join(shown)


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "\ufffd" for each in text)


def ask(
    router: RouterClient, text: str, *, model: str | None, session: str | None
) -> dict[str, Any]:
    """Return the answer of the router's ``/explain``; raise as `RouterClient.ask` does."""
    body = _body(text, model)
    if session is not None:
        # The router reads this key before the others that can name a session.
        body["prompt_cache_key"] = session
    return router.ask("/explain", json.dumps(body).encode())


def _body(text: str, model: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if text.lstrip().startswith("{"):
        try:
            body = json.loads(text)
        except ValueError as error:
            what = f"PROMPT begins with '{{' but is not JSON: {error}"
            raise click.ClickException(what) from None
    return body if model is None else {**body, "model": model}


def table(answer: dict[str, Any]) -> str:
    """Return the answer as text: the pick, the reason, and the cost of each replica."""
    candidates = answer["candidates"]
    lines = [*_pick_lines(answer), "", *_cost_lines(candidates, answer["replica"])]
    if answer["left_out"]:
        lines.append(f"and {answer['left_out']:,} more, not shown")
    return "\n".join([*lines, "", *_rate_lines(candidates)])


def _pick_lines(answer: dict[str, Any]) -> list[str]:
    exact = "" if answer["exact_tokens"] else " (estimated)"
    lines = {
        "replica": f"{answer['replica']}  ({answer['reason']})",
        "why": answer["why"],
        "prompt": f"{answer['prompt_tokens']:,} tokens{exact}",
        "predicted": f"{_ms(answer['predicted_ttft_s'])} ms to the first token",
    }
    picked = next(each for each in answer["candidates"] if each["replica_id"] == answer["replica"])
    lines["accuracy"] = _trust(answer["replica"], picked["predictions"])
    if answer["prefetch_chunks"]:
        gain = _ms(answer["expected_gain_s"])
        lines["prefetch"] = f"{answer['prefetch_chunks']:,} chunks, gains {gain} ms"
    if copy := answer["copy"]:
        lines["copy"] = (
            f"{copy['chunks']:,} chunks ({_sized(copy['bytes'])}B) from {copy['source']}, "
            f"gains {_ms(copy['expected_gain_s'])} ms"
        )
    return [
        line
        for name, text in lines.items()
        for line in textwrap.wrap(
            text, _COLUMNS, initial_indent=name.ljust(_INDENT), subsequent_indent=" " * _INDENT
        )
    ]


def _trust(replica: str, predictions: dict[str, Any] | None) -> str:
    if predictions is None:
        return f"{replica} has not streamed an answer yet"
    ratio, count = predictions["ratio"], predictions["answers"]
    return (
        f"error of the predictions for {replica}: median {ratio['p50']:.0%}, "
        f"p90 {ratio['p90']:.0%} ({counted(count, 'answer')})"
    )


def _cost_lines(candidates: list[dict[str, Any]], picked: str) -> list[str]:
    """Return a table with a row for each replica, without columns that are all zero."""
    columns = {
        "": ["*" if each["replica_id"] == picked else "" for each in candidates],
        "replica": [each["replica_id"] for each in candidates],
        "ttft": [_ms(each["ttft_s"]) for each in candidates],
    }
    for part in ("base", "queue", "fetch", "load", "prefill"):
        columns[part] = [_ms(each[f"{part}_s"]) for each in candidates]
    for tier in ("gpu", "cpu", "disk", "remote"):
        columns[tier] = [f"{each['matched_tokens'].get(tier, 0):,}" for each in candidates]
    columns["copied"] = [f"{each['copied_tokens']:,}" for each in candidates]
    columns["busy"] = [str(each["in_flight"]) for each in candidates]
    shown = {name: cells for name, cells in columns.items() if set(cells) != {"0"}}
    return [
        "Predicted ms (ttft = base + the longer of queue and fetch + load + prefill),",
        "the prompt's tokens by tier, tokens copied from a peer, requests in flight (busy)",
        "",
        *_aligned(shown),
    ]


def _rate_lines(candidates: list[dict[str, Any]]) -> list[str]:
    """Return a table with each replica's rates and prediction errors."""
    columns = {"replica": [each["replica_id"] for each in candidates]}
    for name, part, key, text in _RATES:
        columns[name] = [
            _rate(each["rates"], part, text(each["rates"][key])) for each in candidates
        ]
    for quantile in ("p50", "p90"):
        columns[f"{quantile} off"] = [_off(each["predictions"], quantile) for each in candidates]
    return [
        "Measured rates: prefill tokens/s, slowdown of a prefill by one running decode, bytes/s,",
        "and the error of predictions. In brackets: start values",
        "",
        *_aligned(columns),
    ]


def _rate(rates: dict[str, Any], part: str, text: str) -> str:
    # The space keeps digits below digits: other values end in a bracket.
    return f"{text} " if part in rates["measured"] else f"({text})"


def _off(predictions: dict[str, Any] | None, quantile: str) -> str:
    return "-" if predictions is None else f"{predictions['ratio'][quantile]:.0%}"


def _aligned(columns: dict[str, list[str]]) -> list[str]:
    """Return columns under their names: text left, numbers right."""
    lines = [""] * (1 + len(next(iter(columns.values()))))
    for name, cells in columns.items():
        width = max(len(name), *map(len, cells))
        for row, cell in enumerate([name, *cells]):
            lines[row] += (cell.ljust(width) if name in _LEFT else cell.rjust(width)) + "  "
    return [line.rstrip() for line in lines]


def _ms(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:,.0f}" if ms >= 10 or ms < 0.05 else f"{ms:.1f}"


def _sized(value: float) -> str:
    value = float(f"{value:.4g}")  # 999,999,999.9 is 1.0 G
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.1f} {name}"
    return f"{value:.1f}"


_RATES: Final[Sequence[tuple[str, str, str, Callable[[float], str]]]] = (
    ("prefill/s", "prefill", "prefill_tokens_per_s", "{:,.0f}".format),
    ("decode", "decode", "decode_slowdown", "+{:.1%}".format),
    ("load B/s", "load", "cpu_load_bytes_per_s", _sized),
    ("disk B/s", "disk", "disk_bytes_per_s", _sized),
    ("remote B/s", "remote", "remote_bytes_per_s", _sized),
    ("copy B/s", "peer", "peer_bytes_per_s", _sized),
)
"""Column, what is measured, the rate's key in the answer, its format."""
