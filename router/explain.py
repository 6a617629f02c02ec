"""``warmroute explain``: asking a running router, and showing its answer as a table."""

import json
import textwrap
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, Final

_COLUMNS: Final = 100
_INDENT: Final = 11
_LEFT: Final = ("", "replica")


class ExplainFailed(Exception):  # noqa: N818  (what happened, in words for a person)
    """The router could not be asked, or refused to answer."""


def ask(url: str, text: str, *, model: str | None, session: str | None) -> dict[str, Any]:
    """POST to the router's ``/explain`` and return its answer; raise `ExplainFailed`."""
    body = _body(text, model)
    headers = {"Content-Type": "application/json"}
    if session is not None:
        # The first that is looked for in a body, so before one that stands there.
        body["prompt_cache_key"] = session
    request = urllib.request.Request(
        url.rstrip("/").removesuffix("/v1") + "/explain",
        data=json.dumps(body).encode(),
        headers=headers,
    )
    try:
        # Never through a proxy from the environment: routers are near.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        raise ExplainFailed(_refusal(error)) from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ExplainFailed(
            f"no router answers at {url} ({reason}); start one with 'warmroute serve', "
            "or name another with --router"
        ) from None
    return answer


def _body(text: str, model: str | None) -> dict[str, Any]:
    if not text.lstrip().startswith("{"):
        body: Any = {"messages": [{"role": "user", "content": text}]}
    else:
        try:
            body = json.loads(text)
        except ValueError as error:
            raise ExplainFailed(f"PROMPT begins with '{{' but is not JSON: {error}") from None
    if model is not None:
        body["model"] = model
    return dict(body)


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the router answered {error.code}"


def table(answer: dict[str, Any]) -> str:
    """Return the answer as lines for a terminal: the pick, why, what each replica would cost."""
    candidates = answer["candidates"]
    lines = [*_pick_lines(answer), "", *_cost_lines(candidates, answer["replica"])]
    if answer["left_out"]:
        lines.append(f"and {answer['left_out']:,} more, not shown")
    return "\n".join([*lines, "", *_rate_lines(candidates)])


def _pick_lines(answer: dict[str, Any]) -> list[str]:
    exact = "" if answer["exact_tokens"] else " (estimated)"
    told = {
        "replica": f"{answer['replica']}  ({answer['reason']})",
        "why": answer["why"],
        "prompt": f"{answer['prompt_tokens']:,} tokens{exact}",
        "predicted": f"{_ms(answer['predicted_ttft_s'])} ms to the first token",
    }
    picked = next(each for each in answer["candidates"] if each["replica_id"] == answer["replica"])
    told["so far"] = _trust(answer["replica"], picked["predictions"])
    if answer["prefetch_chunks"]:
        gain = _ms(answer["expected_gain_s"])
        told["prefetch"] = f"{answer['prefetch_chunks']:,} chunks, gains {gain} ms"
    if copy := answer["copy"]:
        told["copy"] = (
            f"{copy['chunks']:,} chunks ({_sized(copy['bytes'])}B) from {copy['source']}, "
            f"gains {_ms(copy['expected_gain_s'])} ms"
        )
    return [
        line
        for name, text in told.items()
        for line in textwrap.wrap(
            text, _COLUMNS, initial_indent=name.ljust(_INDENT), subsequent_indent=" " * _INDENT
        )
    ]


def _trust(replica: str, predictions: dict[str, Any] | None) -> str:
    if predictions is None:
        return f"no streamed answer of {replica} to compare its predictions with"
    ratio, count = predictions["ratio"], predictions["answers"]
    return (
        f"predictions of {replica} were within {ratio['p50']:.0%} half of the time, "
        f"{ratio['p90']:.0%} nine times in ten ({count:,} answers)"
    )


def _cost_lines(candidates: list[dict[str, Any]], picked: str) -> list[str]:
    """Return a table with a row for each replica; what is nothing everywhere is left out."""
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
    told = {name: cells for name, cells in columns.items() if set(cells) != {"0"}}
    return [
        "What each would take: ms (ttft = base + the longer of queue and fetch + load + prefill),",
        "tokens of the prompt that it holds or gets, requests under way (busy)",
        "",
        *_aligned(told),
    ]


def _rate_lines(candidates: list[dict[str, Any]]) -> list[str]:
    """Return a table with each replica's rates, and how good predictions from them were."""
    columns = {
        "replica": [each["replica_id"] for each in candidates],
        "prefill/s": [
            _rate(each, "prefill", "prefill_tokens_per_s", "{:,.0f}".format) for each in candidates
        ],
        "decode": [_slowdown(each) for each in candidates],
    }
    for name, part, key in (
        ("load B/s", "load", "cpu_load_bytes_per_s"),
        ("disk B/s", "disk", "disk_bytes_per_s"),
        ("remote B/s", "remote", "remote_bytes_per_s"),
        ("copy B/s", "peer", "peer_bytes_per_s"),
    ):
        columns[name] = [_rate(each, part, key, _sized) for each in candidates]
    columns["p50 off"] = [_off(each["predictions"], "p50") for each in candidates]
    columns["p90 off"] = [_off(each["predictions"], "p90") for each in candidates]
    return [
        "What was learned of each, from its answers: tokens/s, what one running decode adds to a",
        "prefill, bytes/s, how far predictions were off. In brackets: not learned yet",
        "",
        *_aligned(columns),
    ]


def _rate(candidate: dict[str, Any], part: str, key: str, text: Callable[[float], str]) -> str:
    rates = candidate["rates"]
    return _learned(text(rates[key]), part, rates["learned"])


def _sized(value: float) -> str:
    value = float(f"{value:.4g}")  # 999,999,999.9 is 1.0 G
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.1f} {name}"
    return f"{value:.1f}"


def _slowdown(candidate: dict[str, Any]) -> str:
    rates = candidate["rates"]
    return _learned(f"+{rates['decode_slowdown']:.1%}", "decode", rates["learned"])


def _learned(text: str, part: str, learned: list[str]) -> str:
    # A space, so that digits stand under digits.
    return f"{text} " if part in learned else f"({text})"


def _off(predictions: dict[str, Any] | None, quantile: str) -> str:
    return "-" if predictions is None else f"{predictions['ratio'][quantile]:.0%}"


def _aligned(columns: dict[str, list[str]]) -> list[str]:
    """Return columns under their names, the replicas' to the left and numbers to the right."""
    lines = [""] * (1 + len(next(iter(columns.values()))))
    for name, cells in columns.items():
        width = max(len(name), *map(len, cells))
        for row, cell in enumerate([name, *cells]):
            lines[row] += (cell.ljust(width) if name in _LEFT else cell.rjust(width)) + "  "
    return [line.rstrip() for line in lines]


def _ms(seconds: float) -> str:
    ms = seconds * 1000
    return f"{ms:,.0f}" if ms >= 10 or ms < 0.05 else f"{ms:.1f}"
