"""One request from end to end: accept, read, admit, stage, send, relay, record.

A request counts as in flight from `Proxy._admit` on. Its `Ticket` is given back by
`Proxy._release`, whether the answer was passed on, cut, refused or not waited for.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from math import ceil
from typing import Final, NoReturn

import aiohttp
from aiohttp import web

from router.access import GRANT
from router.admission import Admission, Admitted
from router.config import (
    ApiError,
    NoReplica,
    RateLimited,
    RouterConfig,
    UpstreamFailed,
    UpstreamTimeout,
)
from router.fleet import Decision, Fleet, Ticket
from router.http import read_body, release_body
from router.latency import Promised
from router.prompt import Prompt, PromptSource
from router.proxy.hanging import unless_hung
from router.proxy.passing import keeps, label, passed
from router.proxy.relay import relay
from router.proxy.request import PROMPTED, Asked, Turnstile, parse
from router.proxy.response_owners import Bindings
from router.proxy.upstream import Answer, TryFailed, Upstream, forwarded_headers
from router.proxy.usage import NO_USAGE, Usage, UsageReader
from router.record import Cause, FailedTry, Outcome, RequestRecord
from router.residency import PromptKeyring
from router.staging import Preparation, Preparer

_Begun = tuple[Answer, Ticket]
"""A replica's answer that has begun, and what is to be given back at its end."""
_NOT_BEGUN: Final = (Cause.CONNECT, Cause.ABSENT)
_MOST_ABSENT: Final = 32
"""After so many replicas without it, what none is known to keep is looked for no further: one
request of a client is not to become hundreds."""


class Proxy:
    """Handles the endpoints that are answered by one replica."""

    def __init__(
        self,
        config: RouterConfig,
        session: aiohttp.ClientSession,
        *,
        fleet: Fleet,
        admission: Admission,
        prompts: PromptSource,
        preparer: Preparer,
        observe: Callable[[RequestRecord], None],
        suspect: Callable[[str, Cause], None],
        locate: Callable[[PromptKeyring], Awaitable[None]],
        hung: Callable[[str], asyncio.Future[None] | None],
    ) -> None:
        """``observe`` is called once for each request, at its end; ``suspect`` when a try at a
        replica (its id) has failed. ``locate`` finds out where a prompt's KV is, where that is not
        known; ``hung`` returns what is done when a replica is known to hang.
        """
        self._config = config
        self._fleet = fleet
        self._admission = admission
        self._prompts = prompts
        self._preparer = preparer
        self._upstream = Upstream(session, config.timeouts)
        self._bindings = Bindings()
        self._observe = observe
        self._suspect = suspect
        self._locate = locate
        self._hung = hung
        self._turnstile = Turnstile()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request by a replica; raise `ApiError` for what the router refuses."""
        grant = request.get(GRANT)
        record = RequestRecord(
            request_id=request.headers.get("X-Request-Id") or uuid.uuid4().hex,
            key=None if grant is None else grant.name,
            endpoint=label(request.path),
            path=request.rel_url.raw_path,
            started_s=time.monotonic(),
        )
        try:
            return await self._answer(request, record)
        except ApiError as error:
            record.status = error.status
            record.end(Outcome.REFUSED, error=error.logged)
            if isinstance(error, RateLimited):
                record.rejected = error.cause
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            # aiohttp cancels the handler when the client's connection is lost;
            # a write that was under way may notice it first.
            record.end(Outcome.CLIENT_GONE)
            raise
        finally:
            record.ended_s = time.monotonic()
            if grant is not None:
                streamed_bytes = record.response_bytes if record.streamed else 0
                grant.take_answer(record.output_tokens, streamed_bytes, record.ended_s)
            self._observe(record)

    async def decide(self, asked: Asked) -> tuple[Prompt | None, Decision]:
        """Return where a request would go, without sending it."""
        prompt = await self._read(asked)
        keyring = PromptKeyring(prompt)
        await self._locate(keyring)
        return prompt, self._place(asked, keyring, (), Promised(), time.monotonic())

    async def _answer(self, request: web.Request, record: RequestRecord) -> web.StreamResponse:
        begun = await self._begin(request, record)
        # From here on no other replica is asked. The body, its fields and the prompt have been
        # released: an answer may take minutes, and thousands be under way.
        release_body(request)
        if isinstance(begun, web.Response):
            record.status = begun.status
            record.end(Outcome.OK)
            return begun
        answer, ticket = begun
        reader = UsageReader(any_id=keeps(request.method, request.path))
        try:
            return await relay(request, answer, reader=reader, record=record)
        finally:
            answer.close()
            self._finish(answer, ticket, reader.read(), record)

    async def _begin(self, request: web.Request, record: RequestRecord) -> _Begun | web.Response:
        """Try the best replica, then the next best, until one begins to answer.

        Returns the last one's refusal where none does.
        """
        body = await read_body(request)
        await self._turnstile.enter()
        asked = self._asked(request, body)
        if (grant := request.get(GRANT)) is not None:
            grant.check_model(asked.model)
        began_s = time.monotonic()
        prompt = await self._read(asked)
        record.read_s = time.monotonic() - began_s
        if grant is not None and prompt is not None:
            grant.take_prompt(prompt.token_count, time.monotonic())
        keyring = PromptKeyring(prompt)
        await self._locate(keyring)
        refusal: web.Response | None = None
        while True:
            try:
                return await self._try(request, asked, keyring, record)
            except TryFailed as failure:
                refusal = failure.answer
                self._note_failure(record, failure)
                if not self._goes_on(asked, record):
                    break
            except NoReplica:
                if not record.failed_tries:
                    raise
                break
        return self._give_up(record) if refusal is None else refusal

    def _goes_on(self, asked: Asked, record: RequestRecord) -> bool:
        """Whether a request whose last try has failed is sent to another replica."""
        causes = [each.cause for each in record.failed_tries]
        absent = causes.count(Cause.ABSENT)
        return (
            (asked.repeatable or causes[-1] in _NOT_BEGUN)
            and absent < _MOST_ABSENT
            and len(causes) - absent <= self._config.retries
        )

    def _asked(self, request: web.Request, body: bytes) -> Asked:
        header, aliases = self._config.sessions.header, self._config.model_aliases
        if request.path in PROMPTED and request.method == "POST":
            return parse(request.path, body, request.headers, header, aliases)
        return passed(request, body, header, aliases)

    async def _read(self, asked: Asked) -> Prompt | None:
        if not asked.has_prompt:
            return None
        return await self._prompts.reader_for(asked.model).read(asked.endpoint, dict(asked.fields))

    async def _try(
        self, request: web.Request, asked: Asked, keyring: PromptKeyring, record: RequestRecord
    ) -> _Begun:
        """Send the request to one replica; return its answer once it has begun.

        Raises `TryFailed` where another replica may be asked.
        """
        admitted = await self._admit(asked, keyring, record)
        # In flight from here on, not from after the prefetch: a burst of the same prompt that
        # comes while this one waits must see it. Nothing may be awaited before the ``try``: a
        # client that leaves then would leave the ticket.
        decision, ticket = admitted.decision, admitted.ticket
        try:
            record.prepared = await self._preparer.prepare(decision)
            if decision.is_staged or record.prepared.waited_s > 0:
                ticket.sent(time.monotonic(), is_staged=record.prepared.is_staged)
            sending = self._upstream.send(
                request.method,
                decision.url + request.path_qs,
                headers=forwarded_headers(
                    request.headers,
                    request_id=record.request_id,
                    api_key=decision.picked.replica.config.api_key,
                    is_keyed=GRANT in request,
                ),
                body=asked.body,
                seeks=asked.seeks and self._bindings.replica_of(asked.ids) is None,
            )
            answer = await unless_hung(self._hung(decision.replica_id), sending)
        except BaseException:
            self._release(ticket)
            raise
        record.streamed, record.first_byte_s = answer.streamed, answer.began_s
        if answer.is_ok:
            lag_s = answer.sent_s - ticket.started_s - record.prepared.waited_s
            # Without a prompt, neither the time to the first byte nor `usage` tells of prefills.
            streamed = answer.streamed and asked.has_prompt
            ticket.first_byte(answer.began_s, streamed=streamed, lag_s=lag_s)
            self._admission.wake()
        return answer, ticket

    async def _admit(self, asked: Asked, keyring: PromptKeyring, record: RequestRecord) -> Admitted:
        """Wait until the request may go; a retry does not wait again.

        Nor does what only one replica can answer, or what no replica computes a prompt for.
        """
        failed = tuple(each.replica_id for each in record.failed_tries)
        bound_to = self._bindings.replica_of(asked.ids)

        def place(now_s: float, promised: Promised) -> Decision:
            began_s = time.monotonic()
            decision = self._place(asked, keyring, failed, promised, now_s)
            record.place_s = time.monotonic() - began_s
            return decision

        admitted = await self._admission.admit(
            place,
            model=asked.model,
            at_once=bool(failed) or bound_to is not None or not asked.has_prompt,
            max_wait_s=asked.max_wait_s,
        )
        record.held_s = (record.held_s or 0.0) + admitted.waited_s
        record.decided(admitted.decision)
        return admitted

    def _place(
        self,
        asked: Asked,
        keyring: PromptKeyring,
        exclude: tuple[str, ...],
        promised: Promised,
        now_s: float,
    ) -> Decision:
        return self._fleet.place(
            keyring,
            model=asked.model,
            session=asked.session,
            bound_to=self._bindings.replica_of(asked.ids),
            exclude=exclude,
            promised=promised,
            streamed=asked.streamed,
            now_s=now_s,
        )

    def _note_failure(self, record: RequestRecord, failure: TryFailed) -> None:
        assert record.replica_id is not None
        record.failed_tries.append(
            FailedTry(replica_id=record.replica_id, cause=failure.cause, detail=failure.detail)
        )
        record.prepared = Preparation()  # what was prepared was for that replica
        if failure.cause is not Cause.ABSENT:
            self._suspect(record.replica_id, failure.cause)

    def _give_up(self, record: RequestRecord) -> NoReturn:
        """Raise what tells of the tries, none of which has got an answer."""
        tried = "; ".join(f"{each.replica_id}: {each.detail}" for each in record.failed_tries)
        match record.failed_tries[-1].cause:
            case Cause.CONNECT:
                retry_after_s = max(1, ceil(self._config.timeouts.health_interval_s))
                raise NoReplica(
                    f"no replica could be reached ({tried})", retry_after_s=retry_after_s
                )
            case Cause.TIMEOUT:
                raise UpstreamTimeout(f"no replica began to answer in time ({tried})")
        raise UpstreamFailed(f"every replica tried broke off before its first byte ({tried})")

    def _finish(self, answer: Answer, ticket: Ticket, usage: Usage, record: RequestRecord) -> None:
        record.cached_tokens, record.output_tokens = usage.cached_tokens, usage.output_tokens
        self._release(ticket, ok=answer.is_ok, usage=usage if record.prompt_tokens else NO_USAGE)
        if answer.is_ok and usage.kept_id is not None and record.replica_id is not None:
            self._bindings.bind(usage.kept_id, record.replica_id)

    def _release(self, ticket: Ticket, *, ok: bool = False, usage: Usage = NO_USAGE) -> None:
        """Give back a ticket: the one place for it, whatever the request's end was."""
        ticket.finish(
            time.monotonic(),
            ok=ok,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
        )
        self._admission.wake()
