"""Which replica keeps what: a response, a file, a batch.

It lives with the replica that made it, so what names its id can be answered nowhere else.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from router.config import RouterConfig
from router.fleet import Decision, Fleet, Ticket
from router.index import PromptKeyCache
from router.policy import ParsedRequest, Policy
from router.prompt import Prompt, PromptSource
from router.proxy.relay import NO_USAGE, Usage
from router.record import Cause, FailedTry, Outcome, RequestRecord
from router.scheduling import AdmissionController, Admitted, PlacementRequest, RequestScheduler
from router.staging import Stager, StagingResult
from warmroute_common.api_errors import ApiError, BadRequestError, RateLimitedError


class ResponseOwners:
    """A bounded table from such an id to its replica's; the least recently used goes first."""

    def __init__(self, max_entries: int = 100_000) -> None:
        self._max_entries = max_entries
        self._replicas: OrderedDict[str, str] = OrderedDict()

    def bind(self, kept_id: str, replica_id: str) -> None:
        """Remember which replica keeps a thing; forget the oldest beyond the limit."""
        self._replicas[kept_id] = replica_id
        self._replicas.move_to_end(kept_id)
        if len(self._replicas) > self._max_entries:
            self._replicas.popitem(last=False)

    def replica_of(self, ids: Iterable[str]) -> str | None:
        """Return the replica that keeps the first that is known, None where none is (any more)."""
        for each in ids:
            if (replica_id := self._replicas.get(each)) is not None:
                self._replicas.move_to_end(each)
                return replica_id
        return None

    def __len__(self) -> int:
        return len(self._replicas)


# TODO of router.proxy.lifecycle: What becomes of any request, whether the proxy or a gateway carries its bytes.
#
# `RequestLifecycle` reads its prompt, places it when it may go, has its KV staged, and learns from its answer.
# A request counts as in flight from `RequestLifecycle.admit` on. Its `Ticket` is given back by
# `RequestLifecycle.release`, whether the answer was passed on, cut, refused or not waited for.

log = logging.getLogger("warmroute.replicas")

_AT_FAULT: Final = frozenset({Cause.CUT, Cause.STATUS, Cause.GATEWAY, Cause.TIMEOUT, Cause.SILENT})
"""Causes that a replica's breaker counts. Where nobody listens it is down; one that waits for its
LMCache server rests."""
_SERVER_ERROR: Final = 500
"""502, 503 and 504 are retried: they have failed already."""


class OnePerTick:
    """Lets one request through in each turn of the event loop, in the order of their arrival.

    Reading and placing a prompt takes a millisecond or two, sending it several turns of the loop.
    Without this, a hundred requests that arrive together would all be read and placed in one
    turn, before the first of them is sent and before any token of a running answer is relayed.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def enter(self) -> None:
        """Return at once, or in a later turn if a request was let through in this one."""
        if self._taken:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._take()

    def _take(self) -> None:
        self._taken = True
        asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._taken = False
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # done: its client has left, and its handler was cancelled
                turn.set_result(None)
                self._take()
                return


class RequestLifecycle:
    """The judgment of one router, as the proxy and the picker ask it."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        fleet: Fleet,
        scheduler: RequestScheduler,
        admission: AdmissionController,
        prompts: PromptSource,
        preparer: Stager,
        observe: Callable[[RequestRecord], None],
        suspect: Callable[[str, Cause], None],
        locate: Callable[[PromptKeyCache], Awaitable[None]],
    ) -> None:
        """``observe`` is called once for each request, at its end; ``suspect`` when a try at a
        replica (its id) has failed. ``locate`` finds out where a prompt's KV is, where that is not
        known.
        """
        self.config = config
        self.fleet = fleet
        self.policy = Policy(config)
        self.turnstile = OnePerTick()
        self._scheduler = scheduler
        self._admission = admission
        self._prompts = prompts
        self._preparer = preparer
        self._bindings = ResponseOwners()
        self._observe = observe
        self._suspect = suspect
        self._locate = locate

    @contextmanager
    def recording(self, record: RequestRecord) -> Iterator[None]:
        """Hand out the record at the end, with what the request ended by."""
        try:
            with self.noting_end(record):
                yield
        finally:
            self.hand_out(record)

    @contextmanager
    def noting_end(self, record: RequestRecord) -> Iterator[None]:
        """Note when and by what a request ends."""
        try:
            yield
        except ApiError as error:
            record.status = error.status
            record.end(Outcome.REFUSED, error=error.logged)
            if isinstance(error, RateLimitedError):
                record.rejected = error.cause
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            # aiohttp cancels the handler when the client's connection is lost;
            # a write that was under way may notice it first.
            record.end(Outcome.CLIENT_GONE)
            raise
        finally:
            record.ended_s = time.monotonic()

    def hand_out(self, record: RequestRecord) -> None:
        """Tell of a request that has ended; once for each."""
        self._observe(record)

    async def read(self, asked: ParsedRequest, record: RequestRecord) -> PromptKeyCache:
        """Return the prompt of a request, as its keys are made of it."""
        record.model = asked.model
        began_s = time.monotonic()
        keyring = PromptKeyCache(await self._prompt(asked))
        record.read_s = time.monotonic() - began_s
        record.step("read", began_s)
        await self._locate(keyring)
        return keyring

    async def decide(self, asked: ParsedRequest) -> tuple[Prompt | None, Decision]:
        """Return where a request would go, without sending it."""
        prompt = await self._prompt(asked)
        keyring = PromptKeyCache(prompt)
        await self._locate(keyring)
        request = self._to_place(asked, keyring)
        return prompt, self._scheduler.place(request, time.monotonic())

    async def admit(
        self,
        asked: ParsedRequest,
        keyring: PromptKeyCache,
        record: RequestRecord,
        *,
        among: Collection[str] | None = None,
        sees_tokens: bool = True,
        forgiven: int = 0,
    ) -> Admitted:
        """Wait until the request may go, to one ``among`` these replicas; a retry does not wait.

        Nor does what only one replica can answer, or what no replica computes a prompt for.
        ``sees_tokens``: whether the first token of a streamed answer will be seen.
        ``forgiven``: so many of its first tries have failed at replicas that may be asked again.
        Nothing may be awaited between this and a ``try`` that releases the ticket.
        """
        asked_s = time.monotonic()
        failed = tuple(each.replica_id for each in record.failed_tries[forgiven:])
        request = replace(
            self._to_place(asked, keyring),
            exclude=failed,
            among=among,
            streamed=asked.streamed and sees_tokens,
        )
        admitted = await self._admission.admit(
            request,
            at_once=bool(record.failed_tries)
            or request.bound_to is not None
            or not asked.has_prompt,
            max_wait_s=asked.max_wait_s,
        )
        record.place_s = admitted.decision.made_in_s
        record.held_s = (record.held_s or 0.0) + admitted.waited_s
        record.decided(admitted.decision)
        record.step("wait", asked_s)
        return admitted

    def bound_to(self, asked: ParsedRequest) -> str | None:
        """Return the replica that keeps what a request names, if one of the fleet is known to."""
        replica_id = self._bindings.replica_of(asked.ids)
        replica = None if replica_id is None else self.fleet.replicas.find(replica_id)
        return None if replica is None or replica.is_removed else replica.id

    async def prepare(self, admitted: Admitted, record: RequestRecord) -> None:
        """Have the KV brought to the replica, while waiting for it gains time."""
        decision, ticket = admitted.decision, admitted.ticket
        began_s = time.monotonic()
        record.prepared = await self._preparer.prepare(decision)
        record.step("stage", began_s)
        if decision.is_staged or record.prepared.waited_s > 0:
            ticket.sent(time.monotonic(), is_staged=record.prepared.is_staged)

    def began(
        self,
        ticket: Ticket,
        record: RequestRecord,
        *,
        began_s: float,
        streamed: bool,
        lag_s: float = 0.0,
    ) -> None:
        """Note when an answer began: its first token if it is ``streamed``, else its headers.

        ``lag_s`` is the time that the router took to send the request, without intended waits.
        Later calls for the same request change nothing.
        """
        if record.first_byte_s is not None:
            return
        record.streamed, record.first_byte_s = streamed, began_s
        # Without a prompt, neither the time to the first byte nor `usage` tells of prefills.
        is_token = streamed and bool(record.prompt_tokens)
        ticket.first_byte(began_s, streamed=is_token, lag_s=lag_s)
        self._note_result(ticket, ok=True)
        self._admission.wake()

    def failed(
        self,
        ticket: Ticket,
        record: RequestRecord,
        cause: Cause,
        detail: str,
        *,
        retry_after_s: float | None = None,
    ) -> None:
        """Note that a try has failed, at the replica that was asked last; releases nothing.

        ``retry_after_s`` is when it would take the request, if it said so.
        """
        assert record.replica_id is not None
        if cause in _AT_FAULT:
            self._note_result(ticket, ok=False)
        record.failed_tries.append(
            FailedTry(
                replica_id=record.replica_id,
                cause=cause,
                detail=detail,
                retry_after_s=retry_after_s,
            )
        )
        record.prepared = StagingResult()  # what was prepared was for that replica
        if cause is not Cause.ABSENT:
            self._suspect(record.replica_id, cause)

    def answered(self, ticket: Ticket, status: int) -> None:
        """Note the status of an answer that is passed on: a replica that says 500 has failed."""
        if status == _SERVER_ERROR:
            self._note_result(ticket, ok=False)

    def cut(self, ticket: Ticket) -> None:
        """Note that a replica has broken off its answer after it had begun."""
        self._note_result(ticket, ok=False)
        self._suspect(ticket.replica.id, Cause.CUT)

    def finish(self, ticket: Ticket, record: RequestRecord, usage: Usage, *, ok: bool) -> None:
        """Release a request whose answer had begun, with what that told of itself."""
        record.cached_tokens, record.output_tokens = usage.cached_tokens, usage.output_tokens
        self.release(ticket, ok=ok, usage=usage if record.prompt_tokens else NO_USAGE)
        if ok and usage.kept_id is not None and record.replica_id is not None:
            self._bindings.bind(usage.kept_id, record.replica_id)

    def release(self, ticket: Ticket, *, ok: bool = False, usage: Usage = NO_USAGE) -> None:
        """Give back a ticket: the one place for it, whatever the request's end was."""
        ticket.finish(
            time.monotonic(),
            ok=ok,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
        )
        self._admission.wake()

    def _note_result(self, ticket: Ticket, *, ok: bool) -> None:
        replica, now_s = ticket.replica, time.monotonic()
        if not self.fleet.note_result(ticket, now_s, ok=ok):
            return
        if ok:
            log.info("%s answers again: its breaker is closed", replica.id)
        else:
            log.warning(
                "%s gets no requests for %.1f s while others answer: %s",
                replica.id,
                replica.breaker.due_s - now_s,
                replica.breaker.why,
            )

    async def _prompt(self, asked: ParsedRequest) -> Prompt | None:
        if not asked.has_prompt:
            return None
        reader = self._prompts.reader_for(asked.model)
        try:
            return await reader.read(asked.endpoint, dict(asked.fields), len(asked.body))
        except RecursionError:  # orjson reads values that are nested deeper than templates may walk
            raise BadRequestError("the body's values are nested too deeply") from None

    def _to_place(self, asked: ParsedRequest, keys: PromptKeyCache) -> PlacementRequest:
        return PlacementRequest(
            keys=keys,
            model=asked.model,
            session=asked.session,
            bound_to=self.bound_to(asked),
            streamed=asked.streamed,
        )
