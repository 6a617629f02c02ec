"""Records of a result, in their own file: a line of JSON for each contender, a column per field."""

import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from bench.proof.figures import answered
from replay.record import Record

_NONE: Final = -1


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The reported requests of one run, in order of their numbers; columns of equal length.

    Columns with nothing to tell are empty. Times are whole milliseconds, -1 where a request
    failed.
    """

    contender: str
    seed: int
    number: list[int]
    """Number in the workload: the same for every contender."""
    turn: list[int]
    due_s: list[float]
    """To a tenth of a second."""
    prompt_tokens: list[int]
    ttft_ms: list[int]
    replicas: list[str]
    """Names, to which ``replica`` points."""
    replica: list[int]
    """-1: no replica served it."""
    gpu: list[int]
    """Tokens found in this tier, and in those below; what is left of the prompt was computed."""
    cpu: list[int]
    disk: list[int]
    failed: dict[int, int]
    """Status by number, of the requests that failed; 0 where there was none."""
    reasons: list[str]
    """The router's words for its choice, to which ``reason`` points (ours alone tells)."""
    reason: list[int]
    predicted_ms: list[int]
    """What the router predicted for the first token."""
    before_ms: list[int]
    """From sending the request to its arrival at a replica: held, or waiting for KV there."""
    total_ms: list[int] = field(default_factory=list)
    """From sending the request to the end of its answer."""
    output_tokens: list[int] = field(default_factory=list)

    @property
    def sessions(self) -> list[int]:
        """The session of each request: the number of its first turn."""
        return [number - turn for number, turn in zip(self.number, self.turn, strict=True)]

    @property
    def ttfts_s(self) -> list[float]:
        """Times to first token, infinite where a request failed."""
        return [each / 1000 if each >= 0 else float("inf") for each in self.ttft_ms]

    def row(self, at: int) -> dict[str, Any]:
        """Return all that is kept of the request at an index."""
        return {
            "turn": self.turn[at],
            "due_s": self.due_s[at],
            "prompt_tokens": self.prompt_tokens[at],
            "ttft_ms": self.ttft_ms[at],
            "replica": _named(self.replicas, self.replica, at),
            "gpu": self.gpu[at],
            "cpu": self.cpu[at],
            "disk": self.disk[at],
            "computed": self.prompt_tokens[at] - self.gpu[at] - self.cpu[at] - self.disk[at],
            "status": self.failed.get(self.number[at], 200),
            "reason": _named(self.reasons, self.reason, at),
            "predicted_ms": self.predicted_ms[at] if self.predicted_ms else None,
            "before_ms": self.before_ms[at] if self.before_ms else None,
            "total_ms": self.total_ms[at] if self.total_ms else None,
            "output_tokens": self.output_tokens[at] if self.output_tokens else None,
        }


def columns(contender: str, seed: int, told: Iterable[Record]) -> Columns:
    """Return the columns of some records."""
    records = sorted(told, key=lambda each: each.number)
    replicas = sorted({each.instance_id for each in records if each.instance_id is not None})
    reasons = sorted({each.headers["reason"] for each in records if "reason" in each.headers})
    return Columns(
        contender=contender,
        seed=seed,
        number=[each.number for each in records],
        turn=[each.turn for each in records],
        due_s=[round(each.due_s, 1) for each in records],
        prompt_tokens=[each.prompt_tokens for each in records],
        ttft_ms=[_answer_ms(each, each.ttft_s) for each in records],
        replicas=replicas,
        replica=_indices([each.instance_id for each in records], replicas),
        gpu=[each.cached_tokens.get("gpu", 0) for each in records],
        cpu=[each.cached_tokens.get("cpu", 0) for each in records],
        disk=[each.cached_tokens.get("disk", 0) for each in records],
        failed={each.number: each.status or 0 for each in records if not answered(each)},
        reasons=reasons,
        reason=_indices([each.headers.get("reason") for each in records], reasons),
        predicted_ms=_milliseconds([each.predicted_ttft_s for each in records]),
        before_ms=_milliseconds([_before_s(each) for each in records]),
        total_ms=[_answer_ms(each, each.total_s) for each in records],
        output_tokens=[each.output_tokens for each in records],
    )


def packed(kept: Sequence[Columns]) -> bytes:
    """Return a compressed file of one line for each contender."""
    return lzma.compress(b"\n".join(msgspec.json.encode(each) for each in kept) + b"\n", preset=9)


def unpacked(data: bytes) -> list[Columns]:
    """Read such a file."""
    lines = lzma.decompress(data).splitlines()
    return [msgspec.json.decode(line, type=Columns) for line in lines]


def _answer_ms(record: Record, time_s: float | None) -> int:
    return _NONE if time_s is None or not answered(record) else round(time_s * 1000)


def _indices(values: Sequence[str | None], names: Sequence[str]) -> list[int]:
    if not names:
        return []
    index = {name: at for at, name in enumerate(names)}
    return [_NONE if each is None else index[each] for each in values]


def _milliseconds(seconds: Sequence[float | None]) -> list[int]:
    """Return whole milliseconds, -1 for None; nothing where there is nothing but zeros."""
    if not any(seconds):
        return []
    return [_NONE if each is None else round(each * 1000) for each in seconds]


def _before_s(record: Record) -> float | None:
    if record.ttft_s is None or record.replica_ttft_s is None:
        return None
    return max(0.0, record.ttft_s - record.replica_ttft_s)


def _named(names: Sequence[str], column: Sequence[int], at: int) -> str | None:
    return names[column[at]] if column and column[at] >= 0 else None
