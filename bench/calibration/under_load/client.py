"""The client of both fleets: sessions in a closed loop, prompts as token ids.

A turn's prompt is all that was said before, the replica's own answers included,
and what is asked next.
"""

import asyncio
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final

import aiohttp
import orjson

from bench.calibration.under_load.workload import token_ids
from bench.record import Record
from bench.workloads.session import Session, Turn
from simulator.api.vocabulary import tokens_of

_TIMEOUT_S: Final = 300.0
_SESSION_HEADER: Final = "x-session-id"
_PREFIX: Final = "x-warmroute-"
_ERROR_CHARS: Final = 200
_EVENT: Final = b"data: {"
_END: Final = b"data: [DONE]"


def send(url: str, model: str, sessions: Sequence[Session], *, seed: int) -> list[Record]:
    """Send sessions to a router and wait for the last answer; return a record of each request.

    The requests of a session that come after one that failed are not sent, and have no record.
    """
    return asyncio.run(_send(url, model, sessions, seed))


async def _send(url: str, model: str, sessions: Sequence[Session], seed: int) -> list[Record]:
    firsts = accumulate((len(each.turns) for each in sessions), initial=0)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        client = _Client(http, url, model, seed)
        async with asyncio.TaskGroup() as running:
            for session, first in zip(sessions, firsts, strict=False):
                running.create_task(client.session(session, first))
    return sorted(client.records, key=lambda each: each.number)


class _Client:
    def __init__(self, http: aiohttp.ClientSession, url: str, model: str, seed: int) -> None:
        self._http = http
        self._url = f"{url}/v1/completions"
        self._model = model
        self._seed = seed
        self._clock = asyncio.get_running_loop().time
        self._began_s = self._clock()
        self.records: list[Record] = []

    async def session(self, session: Session, first_number: int) -> None:
        """Send a session's turns, each after the answer before and a pause."""
        said: list[int] = []
        due_s = session.start_s
        for index, turn in enumerate(session.turns):
            if index:
                due_s = self._now_s() + turn.pause_s
            said += self._asked(turn)
            body = self._body(said, turn.output_tokens)
            await asyncio.sleep(max(0.0, due_s - self._now_s()))
            record = Record(
                number=first_number + index,
                session=session.name,
                turn=index,
                prompt_tokens=len(said),
                due_s=due_s,
                output_tokens=turn.output_tokens,
            )
            self.records.append(record)
            stream = await self._ask(record, body)
            if not record.ok:
                return
            said += answer_ids(stream)

    def _asked(self, turn: Turn) -> list[int]:
        return [token for span in turn.spans for token in token_ids(span, seed=self._seed)]

    def _body(self, prompt: list[int], output_tokens: int) -> bytes:
        return orjson.dumps(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": output_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                # vLLM's: its text could be tokenized otherwise than it was made.
                "return_token_ids": True,
            }
        )

    async def _ask(self, record: Record, body: bytes) -> bytes:
        """Send a request and fill in its record; return the answer's stream."""
        headers = {"content-type": "application/json", _SESSION_HEADER: str(record.session)}
        parts: list[bytes] = []
        record.sent_s = self._now_s()
        try:
            async with self._http.post(self._url, data=body, headers=headers) as answer:
                async for part in answer.content.iter_any():
                    if not parts:
                        record.ttft_s = self._now_s() - record.sent_s
                    parts.append(part)
                record.status = answer.status
                record.headers = _told(answer.headers.items())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            record.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
        record.total_s = self._now_s() - record.sent_s
        stream = b"".join(parts)
        note_answer(record, stream)
        return stream

    def _now_s(self) -> float:
        return self._clock() - self._began_s


def note_answer(record: Record, stream: bytes) -> None:
    """Note what an answer's stream tells, or why it is none."""
    record.instance_id = record.headers.get("replica")
    if record.error is None and record.status != 200:
        record.error = f"{record.status}: {stream[:_ERROR_CHARS].decode(errors='replace')}"
    elif record.error is None and not stream.rstrip().endswith(_END):
        record.error = "the answer broke off"
    if record.error is not None:
        record.ttft_s = None
        return
    for event in _events(stream):
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        if "cached_tokens" in details:
            record.cached_tokens = {"all": int(details["cached_tokens"] or 0)}


def answer_ids(stream: bytes) -> list[int]:
    """Return the token ids of an answer: told by vLLM, and by the simulator as words."""
    ids: list[int] = []
    for event in _events(stream):
        for choice in event.get("choices") or []:
            told = choice.get("token_ids")
            ids += tokens_of(choice.get("text", "")) if told is None else told
    return ids


def _events(stream: bytes) -> Iterable[dict[str, Any]]:
    for line in stream.split(b"\n"):
        if line.startswith(_EVENT):
            yield orjson.loads(line[len(_EVENT) - 1 :])


def _told(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    lower = ((name.lower(), value) for name, value in headers)
    return {name.removeprefix(_PREFIX): value for name, value in lower if name.startswith(_PREFIX)}
