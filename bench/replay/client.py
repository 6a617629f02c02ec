"""The load generator: sends a workload's requests when they are due, and times the answers.

It shares the machine with the fleet and the router, so it does little: bodies
are put together from ready bytes before they are due, answers are not parsed
while they come. Sessions of one turn are an open loop (each request at its
time, whatever became of the others); inside a session the next turn comes
after the answer and a pause.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import orjson

from bench.record import Record
from bench.workloads.session import Session, Span, Turn
from bench.workloads.texts import Texts, as_numbers
from simulator.api.vocabulary import tokens_of

PREFIX: Final = "x-warmroute-"

_TIMEOUT_S: Final = 600.0
"""Of one request, in model seconds: far beyond what a fleet takes that keeps up."""
_ERROR_CHARS: Final = 200
_ID: Final = re.compile(rb'"id": ?"([^"]*)"')
_END: Final = b"data: [DONE]"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a request is sent."""

    url: str
    instance_id: str | None = None
    predicted_ttft_s: float | None = None


Choose = Callable[[bytes], Awaitable[Place]]
"""From a prompt's token ids (as JSON's numbers) to where it goes."""


def always(url: str) -> Choose:
    """Send everything to a router."""
    place = Place(url=url)

    async def choose(numbers: bytes) -> Place:
        return place

    return choose


def ask_oracle(http: aiohttp.ClientSession, control_url: str) -> Choose:
    """Ask the fleet itself, each time, and send to the replica directly."""

    async def choose(numbers: bytes) -> Place:
        body = b'{"sends":true,"token_ids":[' + numbers + b"]}"
        async with http.post(f"{control_url}/oracle", data=body, headers=_JSON) as answer:
            answer.raise_for_status()
            told = orjson.loads(await answer.read())
        return Place(
            url=told["url"],
            instance_id=told["instance_id"],
            predicted_ttft_s=told["predicted_ttft_s"],
        )

    return choose


_STREAMED: Final = b'"stream":true,"stream_options":{"include_usage":true}}'
_WHOLE: Final = b'"stream":false}'
_JSON: Final = {"Content-Type": "application/json"}


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """How prompts and answers are written for one contender."""

    texts: Texts
    model: str
    sends_token_ids: bool
    """Whether prompts are token ids; else text."""
    needs_token_ids: bool = False
    """Whether the token ids are needed beside the text, to choose a replica."""

    def of_spans(self, spans: Sequence[Span]) -> tuple[bytes, bytes]:
        """Return the text and the token ids, each only where it is needed."""
        text = b"" if self.sends_token_ids else self.texts.text(spans)
        wanted = self.sends_token_ids or self.needs_token_ids
        return text, self.texts.numbers(spans) if wanted else b""

    def of_answer(self, answer: str) -> tuple[bytes, bytes]:
        """Return the same of an answer."""
        return answer.strip().encode(), as_numbers(tokens_of(answer))

    def body(self, prompt: tuple[bytes, bytes], turn: Turn) -> bytes:
        """Return the body of a turn's request."""
        text, numbers = prompt
        shown = b"[" + numbers + b"]" if self.sends_token_ids else b'"' + text + b'"'
        return (
            b'{"model":"%s","prompt":' % self.model.encode()
            + shown
            + b',"max_tokens":%d,"ignore_eos":true,"temperature":0,' % turn.output_tokens
            + (_STREAMED if turn.streamed else _WHOLE)
        )


def joined(one: tuple[bytes, bytes], other: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    """Return two parts of a prompt as one; a form that is not used stays empty."""
    return (
        b" ".join(part for part in (one[0], other[0]) if part),
        b",".join(part for part in (one[1], other[1]) if part),
    )


@dataclass(frozen=True, kw_only=True)
class Telling:
    """How a contender is told of sessions."""

    header: str = "x-session-id"
    """Names a request's session."""
    finish_url: str | None = None
    """Where the end of one is told; None: nowhere."""


class Client:
    """Sends one workload to one contender."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        prompts: Prompts,
        choose: Choose,
        *,
        speed: float,
        telling: Telling | None = None,
    ) -> None:
        self._http = http
        self._prompts = prompts
        self._choose = choose
        self._speed = speed
        self._telling = telling or Telling()
        self._clock = asyncio.get_running_loop().time
        self._began_s = 0.0
        self.records: list[Record] = []

    async def run(self, sessions: Sequence[Session]) -> list[Record]:
        """Send all sessions (in order of their starts); return a record of each request."""
        self._began_s = self._clock() - sessions[0].start_s / self._speed
        number = 0
        async with asyncio.TaskGroup() as running:
            for session in sessions:
                first = self._prompts.of_spans(session.turns[0].spans)
                body = self._prompts.body(first, session.turns[0])
                await self._sleep_until(session.start_s)
                running.create_task(self._session(session, number, first, body))
                number += len(session.turns)
        return sorted(self.records, key=lambda each: each.number)

    async def _session(
        self, session: Session, number: int, prompt: tuple[bytes, bytes], body: bytes
    ) -> None:
        await self._turns(session, number, prompt, body)
        if session.name is not None and self._telling.finish_url is not None:
            await self._tell_end(session.name, self._telling.finish_url)

    async def _tell_end(self, session: str, url: str) -> None:
        # Told as a courtesy: what becomes of it shows in the answers to other sessions.
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._http.post(url, params={"session_id": session}) as answer:
                await answer.read()

    async def _turns(
        self, session: Session, number: int, prompt: tuple[bytes, bytes], body: bytes
    ) -> None:
        """Send a session's turns, each after the answer before; stop at the first that fails."""
        tokens = session.turns[0].tokens
        due_s = session.start_s
        for index, turn in enumerate(session.turns):
            record = Record(
                number=number + index,
                session=session.name,
                turn=index,
                prompt_tokens=tokens,
                due_s=due_s,
                streamed=turn.streamed,
                output_tokens=turn.output_tokens,
            )
            self.records.append(record)
            answer = await self._send(record, prompt[1], body)
            if not record.ok or index + 1 == len(session.turns):
                return
            upcoming = session.turns[index + 1]
            due_s = self._now_s() + upcoming.pause_s
            said = self._prompts.of_answer(_text_of(answer))
            prompt = joined(joined(prompt, self._kept(said)), self._spans(upcoming))
            body = self._prompts.body(prompt, upcoming)
            tokens += turn.output_tokens + upcoming.tokens
            await self._sleep_until(due_s)

    def _spans(self, turn: Turn) -> tuple[bytes, bytes]:
        return self._prompts.of_spans(turn.spans)

    def _kept(self, said: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
        """Leave out the form of an answer that this contender's prompts do not have."""
        prompts = self._prompts
        return (
            b"" if prompts.sends_token_ids else said[0],
            said[1] if prompts.sends_token_ids or prompts.needs_token_ids else b"",
        )

    async def _send(self, record: Record, numbers: bytes, body: bytes) -> bytes:
        """Send a request and fill in its record; return the answer's body."""
        headers = dict(_JSON)
        if record.session is not None:
            headers[self._telling.header] = record.session
        began_s = self._now_s()
        record.sent_s = began_s
        parts: list[bytes] = []
        try:
            place = await self._choose(numbers)
            record.instance_id = place.instance_id
            record.predicted_ttft_s = place.predicted_ttft_s
            if place.instance_id is not None:
                # What asking costs is the bench's, not the oracle's.
                began_s = self._now_s()
            async with self._http.post(
                f"{place.url}/v1/completions", data=body, headers=headers
            ) as answer:
                async for part in answer.content.iter_any():
                    if not parts:
                        record.ttft_s = self._now_s() - began_s
                    parts.append(part)
                _note_headers(record, answer)
                self._check(record, answer.status, parts)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            record.error = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
        record.total_s = self._now_s() - began_s
        if not record.ok:
            record.ttft_s = None
            record.error = record.error or "an empty answer"
        return b"".join(parts)

    def _check(self, record: Record, status: int, parts: list[bytes]) -> None:
        body = b"".join(parts)
        record.status = status
        if status != 200:
            record.error = f"{status}: {body[:_ERROR_CHARS].decode(errors='replace')}"
        elif not (_END in body[-64:] if record.streamed else body.endswith(b"}")):
            record.error = "the answer broke off"
        found = _ID.search(body, 0, 1000)
        record.answer_id = found.group(1).decode() if found else None

    def _now_s(self) -> float:
        return (self._clock() - self._began_s) * self._speed

    async def _sleep_until(self, due_s: float) -> None:
        await asyncio.sleep(max(0.0, self._began_s + due_s / self._speed - self._clock()))


def client_session(speed: float) -> aiohttp.ClientSession:
    """Return a session for as many requests at once as come."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S / speed),
        read_bufsize=1 << 18,
    )


def _note_headers(record: Record, answer: aiohttp.ClientResponse) -> None:
    for name, value in answer.headers.items():
        lower = name.lower()
        if lower.startswith(PREFIX):
            record.headers[lower.removeprefix(PREFIX)] = value


def _text_of(body: bytes) -> str:
    """Return the text of an answer, streamed or whole."""
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    pieces = []
    for each in events or [body]:
        told: dict[str, Any] = orjson.loads(each)
        pieces += [choice.get("text", "") for choice in told.get("choices") or []]
    return "".join(pieces)
