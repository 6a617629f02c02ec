"""One request that a gateway carries: asked, picked, answered, ended."""

import asyncio
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from router.config import PROMPTED
from router.fleet import Decision, Reason, Replica, Ticket
from router.index import PromptKeyCache
from router.picker.answers import Told
from router.picker.endpoints import Endpoints
from router.proxy import (
    RETRYABLE,
    ParsedRequest,
    RequestLifecycle,
    UsageReader,
    check_passes,
    keeps,
    label,
    parse,
    passed,
)
from router.record import Cause, Outcome, RequestRecord, answer_headers, trace_context
from warmroute_common.api_errors import ApiError, NoReplicaError

_HEALTH: Final = "/health"
"""Asked of a gateway, it tells whether a request gets through to a replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Where a request goes."""

    endpoints: tuple[str, ...]
    """The replica's, then those of the next best, which are tried if it cannot be reached."""
    api_key: str | None
    """Sent to all of them instead of the client's own."""
    replicas: tuple[str, ...]
    """Their ids."""


class Exchange:
    """One request, from its headers to the end of its answer; `close` must be called at its end."""

    def __init__(
        self,
        judge: RequestLifecycle,
        endpoints: Endpoints,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        named: Iterable[str] | None,
        sees_tokens: bool,
    ) -> None:
        """``headers`` finds theirs by names in lower case; ``path`` is as it came, with a query.

        ``named`` are the endpoints to choose from, None for all.

        ``sees_tokens``: whether the gateway will tell when a streamed answer's first bytes come.
        """
        self.method = method
        raw_path = path.partition("?")[0]
        self.path = unquote(raw_path)
        self.record = RequestRecord(
            request_id=headers.get("x-request-id") or uuid.uuid4().hex,
            method=self.method,
            endpoint=label(self.path),
            path=raw_path,
            trace=trace_context(headers.get("traceparent"), _sample_ratio(judge)),
            started_s=time.monotonic(),
        )
        self._judge = judge
        self._endpoints = endpoints
        self._headers = headers
        self._named = named
        self._sees_tokens = sees_tokens
        self._asked: tuple[ParsedRequest, PromptKeyCache] | None = None
        """Until the answer begins: another replica than the picked one may give it."""
        self._ticket: Ticket | None = None
        self._replica: Replica | None = None
        self._asked_s = self._picked_s = 0.0
        self._streamed = False
        self._was_moved = False
        """Whether another replica than the picked one answers."""
        self.is_told = False
        """Whether all of the answer has been told by Envoy's log."""
        self.told_s = 0.0
        """When that told of it last, or the request was picked for."""
        self._reader = UsageReader(any_id=keeps(self.method, self.path))

    # --- the request

    async def pick(self, body: bytes) -> Picked:
        """Return where the request goes, once it may; raise `ApiError`."""
        self._asked_s = time.monotonic()
        await self._judge.turnstile.enter()
        asked = self._parse(body)
        keyring = await self._judge.read(asked, self.record)
        among = self._endpoints.eligible(self._named)
        if among is not None and not among:
            raise NoReplicaError("none of the endpoints that the gateway names is a replica's")
        admitted = await self._judge.admit(
            asked, keyring, self.record, among=among, sees_tokens=self._sees_tokens
        )
        self._ticket, self._asked = admitted.ticket, (asked, keyring)
        self._replica = admitted.decision.picked.replica
        await self._judge.prepare(admitted, self.record)
        self._picked_s = self.told_s = time.monotonic()
        return self._picked(admitted.decision)

    def _parse(self, body: bytes) -> ParsedRequest:
        """Return what routing needs of the request. No alias is replaced: the gateway has the body.

        Raises `ApiError` for what no replica is to be asked.
        """
        config, headers = self._judge.config, self._headers
        check_passes(self.method, self.path, headers, (_HEALTH, *self._judge.passthrough))
        header = config.sessions.header.lower()
        if self.path in PROMPTED and self.method == "POST":
            return parse(self.path, body, headers, header, {})
        return passed(self.method, self.path, headers, body, session_header=header, aliases={})

    def _picked(self, decision: Decision) -> Picked:
        """Return the decision's replica and the next best, by their scores."""
        picked, judgment = decision.picked, self._judge.fleet.judgment
        api_key = picked.replica.config.api_key
        others = [
            each
            for each in decision.candidates
            if each is not picked and each.replica.config.api_key == api_key
            if decision.reason is not Reason.BOUND
        ]
        others.sort(key=lambda each: each.score_s(judgment))
        found = [self._endpoints.known(each.replica) for each in (picked, *others)]
        known = [each for each in found if each is not None][: self._judge.config.retries + 1]
        return Picked(
            endpoints=tuple(endpoint for endpoint, _ in known),
            replicas=tuple(replica_id for _, replica_id in known),
            api_key=api_key,
        )

    def answer_headers(self) -> dict[str, str]:
        """Return the headers in which the answer tells of the decision."""
        return answer_headers(self.record)

    # --- the answer

    async def answered(self, headers: Mapping[str, str], served: str | None) -> dict[str, str]:
        """Note the headers of the answer; return those to be added.

        ``served`` is the endpoint that gave it, None where the gateway does not tell.
        """
        told = headers.get(":status", "")
        status = int(told) if told.isascii() and told.isdecimal() else 0
        await self._note_status(status, served)
        self._streamed = headers.get("content-type", "").startswith("text/event-stream")
        if self._is_ok and not self._streamed:
            self._began(time.monotonic())
        return self.answer_headers()

    def came(self, part: bytes, *, is_last: bool) -> None:
        """Note a part of the answer's body."""
        if part and not self.record.response_bytes and self._is_ok and self._streamed:
            self._began(time.monotonic())
        self._reader.feed(part)
        self.record.response_bytes += len(part)
        if is_last:
            self.record.end(Outcome.OK)

    async def told(self, told: Told) -> None:
        """Note what the log of our own Envoy tells, which it does late."""
        record = self.record
        now_s = self.told_s = record.ended_s = time.monotonic()
        if record.status is None and told.status:
            await self._note_status(told.status, told.served)
        if self._is_ok and told.first_byte_after_s is not None:
            self._streamed = not self._was_moved  # else it is not known when it was sent there
            self._began(self._asked_s + told.first_byte_after_s, told_s=now_s)
        if told.outcome is not None:
            self.is_told = True
            if self._is_ok:
                self._began(now_s, told_s=now_s)
            if told.outcome is Outcome.CUT and self._ticket is not None:
                self._judge.cut(self._ticket)
            self._reader.feed(told.envelope)
            record.response_bytes = told.response_bytes
            record.end(told.outcome)
            if told.ended_after_s is not None:
                record.ended_s = min(now_s, self._asked_s + told.ended_after_s)

    @property
    def is_picked(self) -> bool:
        """Whether the request has gone to a replica."""
        return self._ticket is not None

    @contextmanager
    def noting_end(self) -> Iterator[None]:
        """Note when the call for the whole request ends, and by what where none was picked.

        What became of an answer is known once all of it has been told: `close` notes the rest.
        """
        ended: BaseException | None = None
        with self._judge.noting_end(self.record):
            try:
                yield
            except (asyncio.CancelledError, ConnectionResetError) as error:
                if not self.is_picked:
                    raise
                ended = error
        if ended is not None:
            raise ended

    def close(self) -> None:
        """Release the request, whatever its end is, and hand out its record."""
        record, ticket = self.record, self._ticket
        record.end(Outcome.CLIENT_GONE if record.status is None else Outcome.ENDED)
        if ticket is not None and record.status is None:
            self._judge.release(ticket)
        elif ticket is not None:
            if self._is_ok:
                # Of an answer whose first token was not seen: it did begin, but when is not known.
                ticket.first_byte(time.monotonic(), streamed=False)
            self._judge.finish(ticket, record, self._reader.read(), ok=self._is_ok)
        self._judge.hand_out(record)

    @property
    def _is_ok(self) -> bool:
        return self.record.status is not None and 0 < self.record.status < 400

    def _began(self, began_s: float, *, told_s: float | None = None) -> None:
        if self._ticket is not None:
            lag_s = self._picked_s - self._ticket.started_s - self.record.prepared.waited_s
            self._judge.began(
                self._ticket,
                self.record,
                began_s=began_s,
                streamed=self._streamed,
                lag_s=lag_s,
                told_s=told_s,
            )

    async def _note_status(self, status: int, served: str | None) -> None:
        await self._note_served(served)
        self._asked = None
        record = self.record
        record.status = status
        if self._ticket is None:
            return
        if status in RETRYABLE:
            self._judge.failed(self._ticket, record, Cause.STATUS, f"answered {status}")
        else:
            self._judge.answered(self._ticket, status)

    async def _note_served(self, served: str | None) -> None:
        """Move the request to the replica that answers, where that is not the picked one."""
        replica = None if served is None else self._endpoints.at(served)
        ticket = self._ticket
        # By replica, not by id: it may have got its name since it was picked.
        if replica is None or replica is self._replica or ticket is None or self._asked is None:
            return
        self._ticket, self._was_moved = None, True
        detail = f"the gateway went on to {replica.id}"
        self._judge.failed(ticket, self.record, Cause.GATEWAY, detail)
        self._judge.release(ticket)
        asked, keyring = self._asked
        try:
            admitted = await self._judge.admit(
                asked, keyring, self.record, among=(replica.id,), sees_tokens=self._sees_tokens
            )
        except ApiError:
            return  # believed to be down, and yet it answers: not counted
        self._ticket, self._replica = admitted.ticket, replica
        self._picked_s = admitted.ticket.started_s


def _sample_ratio(judge: RequestLifecycle) -> float | None:
    tracing = judge.config.tracing
    return None if tracing is None else tracing.sample_ratio
