"""``warmroute explain``: asking a running router, and showing its answer as a table."""

import json
import urllib.error
import urllib.request
from typing import Any


class ExplainFailed(Exception):  # noqa: N818  (what happened, in words for a person)
    """The router could not be asked, or refused to answer."""


def ask(url: str, text: str, *, model: str | None, session: str | None) -> dict[str, Any]:
    """POST to the router's ``/explain`` and return its answer; raise `ExplainFailed`."""
    body = _body(text, model)
    headers = {"Content-Type": "application/json"}
    if session is not None:
        body.setdefault("session_id", session)
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
    """Return the answer as lines for a terminal."""
    exact = "" if answer["exact_tokens"] else " (estimated)"
    lines = [
        f"replica   {answer['replica']}  ({answer['reason']})",
        f"prompt    {answer['prompt_tokens']} tokens{exact}",
        "matched   "
        + (", ".join(f"{n} {tier}" for tier, n in answer["matched_tokens"].items() if n) or "none"),
        f"predicted {answer['predicted_ttft_s'] * 1000:.0f} ms to the first token",
    ]
    if answer["prefetch_chunks"]:
        lines.append(
            f"prefetch  {answer['prefetch_chunks']} chunks, "
            f"gains {answer['expected_gain_s'] * 1000:.0f} ms"
        )
    return "\n".join([*lines, *_candidate_lines(answer["candidates"])])


def _candidate_lines(candidates: list[dict[str, Any]]) -> list[str]:
    """Return a table with a row for each replica considered, times in ms."""
    if not candidates:
        return []
    names = list(candidates[0])
    rows = [[_cell(name, each.get(name)) for name in names] for each in candidates]
    heads = [f"{name.removesuffix('_s')}_ms" if name.endswith("_s") else name for name in names]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return [""] + [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [heads, *rows]
    ]


def _cell(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}:{each}" for key, each in value.items() if each) or "-"
    if isinstance(value, int | float) and name.endswith("_s"):
        return f"{value * 1000:.1f}"
    return str(value)
