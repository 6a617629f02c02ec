"""Requests of a log, as they can be played again: when they came, and how their prompts begin.

A prompt is known by hashes of its beginnings (`PromptHashes`), so two prompts share as many blocks
as they have equal hashes. Its end after the last hash is its own. Where a later request of its
session begins with all of its hashes and is longer than it and its answer, that prompt is taken to
contain both: so the KV of the answer is found, as it is in a fleet.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median_low
from typing import Any, Final

import orjson
import xxhash

from replay.requests import ModelPrompt
from router.record.prompt_hashes import PromptHashes

_REFUSED: Final = frozenset({429, 503})
"""Statuses of requests that another fleet might have answered."""
_OUTPUT_TOKENS: Final = 256
"""Length of an answer if no line of a log tells it."""


class LogError(ValueError):
    """A log cannot be played."""


@dataclass(eq=False, slots=True, kw_only=True)
class RecordedRequest:
    """One request of a log. Times in seconds; they count from the first one."""

    number: int
    model: str | None
    hashes: PromptHashes = field(repr=False)
    start_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int | None
    streamed: bool
    is_ok: bool
    """Whether its answer was passed on whole."""
    ttft_s: float | None
    tpot_s: float | None
    cached_tokens: int | None
    following: "RecordedRequest | None" = None
    """A later request whose prompt contains this one's prompt and answer."""
    before: "RecordedRequest | None" = None
    """The one before it in its session."""


@dataclass(frozen=True, kw_only=True)
class RecordedLog:
    """The requests that can be played, in the order of their beginnings."""

    requests: Sequence[RecordedRequest]
    left_out: Mapping[str, int]
    """How many lines are not played, by why."""


def read_log(lines: Iterable[bytes], model: str | None = None) -> RecordedLog:
    """Read the lines of a request log with ``prompt_hashes``; other lines are left out.

    ``model``: only its requests; None: those of all. Raises `LogError` if nothing can be played, or
    the requests are for several models.
    """
    left_out: dict[str, int] = {}
    requests: list[RecordedRequest] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            read = _read(number, orjson.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError):
            read = "not a line of the request log as JSON"
        if isinstance(read, RecordedRequest) and model not in (None, read.model):
            read = "another model"
        if isinstance(read, str):
            left_out[read] = left_out.get(read, 0) + 1
        else:
            requests.append(read)
    if not requests:
        raise LogError(
            f"no line can be played (left out: {told(left_out)}); let the router write its log "
            "with request_log: {format: json, path: requests.jsonl, prompt_hashes: true}"
        )
    if len(models := {each.model for each in requests}) > 1:
        named = ", ".join(sorted(map(str, models)))
        raise LogError(f"the log has requests for several models ({named}); choose one: --model")
    _connect(requests)
    return RecordedLog(requests=requests, left_out=left_out)


def told(left_out: Mapping[str, int]) -> str:
    """Return for a person how many lines are left out, and why."""
    return ", ".join(f"{count} {why}" for why, count in left_out.items()) or "no lines"


def _read(number: int, line: Mapping[str, Any]) -> RecordedRequest | str:
    """Return a line's request, or why it is left out."""
    if (keys := line["prompt_hashes"]) is None:
        return "without prompt_hashes"
    status = line["status"]
    if status is not None and status >= 400 and status not in _REFUSED:
        return "refused for what it asked"
    end_s = datetime.fromisoformat(line["time"]).timestamp()
    hashes = PromptHashes.from_json(keys)
    return RecordedRequest(
        number=number,
        model=line["model"],
        hashes=hashes,
        start_s=end_s - float(line["total_s"]),
        end_s=end_s,
        # A request that was refused while it waited has no count: its last hash tells the least.
        prompt_tokens=line["prompt_tokens"] or (hashes.ends[-1] if hashes.hashes else 1),
        output_tokens=line["output_tokens"] or None,
        streamed=bool(line["streamed"]) or status in _REFUSED,
        is_ok=line["outcome"] == "ok",
        ttft_s=line["ttft_s"],
        tpot_s=line["tpot_s"],
        cached_tokens=line["cached_tokens"],
    )


def _connect(requests: list[RecordedRequest]) -> None:
    """Sort requests, count their times from the first, and find what follows what."""
    requests.sort(key=lambda each: each.start_s)
    first_s = requests[0].start_s
    known = [each.output_tokens for each in requests if each.output_tokens]
    usual = median_low(known) if known else _OUTPUT_TOKENS
    last: dict[str, RecordedRequest] = {}
    for each in requests:
        each.start_s, each.end_s = each.start_s - first_s, each.end_s - first_s
        each.output_tokens = each.output_tokens or usual
        if (session := each.hashes.session) is not None:
            each.before, last[session] = last.get(session), each
    later: dict[tuple[str | None, int], RecordedRequest] = {}
    for each in reversed(requests):
        session, hashes = each.hashes.session, each.hashes.hashes
        following = later.get((session, hashes[-1])) if hashes and session is not None else None
        said = each.prompt_tokens + (each.output_tokens or 0)
        if following is not None and following.prompt_tokens >= said:
            each.following = following
        later |= dict.fromkeys(((session, key) for key in hashes), each)


def model_prompt(request: RecordedRequest, block_tokens: int) -> ModelPrompt:
    """Return a request's prompt and answer as keys of blocks of this size."""
    tokens = request.prompt_tokens
    # The last token of an answer is never computed: nothing follows it.
    end = (tokens + (request.output_tokens or 1) - 1) // block_tokens
    keys = _keys(request.hashes, block_tokens, end)
    following = request.following
    if following is not None:
        keys += _keys(following.hashes, block_tokens, end)[len(keys) :]
    own = (following or request).number.to_bytes(8, "big")
    keys += [
        xxhash.xxh3_64_digest(b"own" + own + at.to_bytes(4, "big")) for at in range(len(keys), end)
    ]
    return ModelPrompt(keys, tokens // block_tokens, tokens)


def _keys(hashes: PromptHashes, block_tokens: int, most: int) -> list[bytes]:
    """Return the keys of the blocks that end within some hash: made of it and their place."""
    keys: list[bytes] = []
    for end, each in zip(hashes.ends, hashes.hashes, strict=True):
        named = each.to_bytes(8, "big")
        for at in range(len(keys), min(most, end // block_tokens)):
            keys.append(xxhash.xxh3_64_digest(named + at.to_bytes(4, "big")))
    return keys
