"""The life of one request, whether the embedded proxy or a gateway carries its bytes.

In this order: `RequestLifecycle.read` renders and tokenizes the prompt, `admit` holds the request
until a replica can soon begin with it and places it, `prepare` stages its KV, `began` records the
first byte, and `finish` or `release` gives the ticket back. From `admit` to `release` the request
counts as in flight. Its caller owns the ticket and must release it on every exit.
"""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from router.config.settings import RouterConfig
from router.fleet.decision import Decision
from router.fleet.fleet import Fleet
from router.fleet.in_flight import Ticket
from router.index.prompt_keys import PromptKeyCache
from router.policy import ParsedRequest, Plane, Policy
from router.priority import Priority
from router.prompt.prompt import Prompt
from router.prompt.prompt_source import PromptSource
from router.prompt.request_body import BodyBytes, off_loop
from router.proxy.relay import NO_USAGE, Usage
from router.record.prompt_hashes import PromptHashes, session_hash
from router.record.records import (
    Cause,
    FailedTry,
    Outcome,
    RecordReader,
    RequestRecord,
)
from router.scheduling.admission import AdmissionController, Admitted
from router.scheduling.request_scheduler import PlacementRequest, RequestScheduler
from router.staging.stager import Stager, StagingResult
from router.waste.uncached_causes import PendingUncached, UncachedCauses
from warmroute_common.api_errors import ApiError, BadRequestError, RateLimitedError

log = logging.getLogger("warmroute.replicas")

_AT_FAULT: Final = frozenset(
    {Cause.CUT, Cause.ERROR, Cause.STATUS, Cause.GATEWAY, Cause.TIMEOUT, Cause.SILENT}
)
"""Causes that count for a replica's breaker. CONNECT does not: health checks find a replica that
refuses connections. HUNG does not: the replica only waits for its LMCache server. BUSY does not:
the replica is well."""
MAY_BE_REQUESTS: Final = frozenset({Cause.CUT, Cause.ERROR, Cause.GATEWAY})
"""Causes that may lie in the request: a prompt that kills one engine kills the next one too.
vLLM's server answers 500 when its engine has died."""
_OF_LEGS: Final = frozenset({Cause.PREFILL, Cause.PULL})
"""Causes that lie in two replicas' transfer of KV: each may still answer by itself."""
_LONG_PROMPT_TOKENS: Final = 65_536
"""The keys of a longer prompt are made in a thread: they take 0.1 ms per thousand new tokens."""


class HealthSource(Protocol):
    """Checks replicas' health, and asks them for their models, before that is due."""

    def suspect(self, replica_id: str, cause: Cause) -> None:
        """Take note that a request failed at a replica."""

    async def look_for_model(self) -> None:
        """Ask the replicas for their models, unless they were asked just now."""


class KvLocator(Protocol):
    """Finds KV of which the prefix index may not know."""

    async def look_up(self, prompt_keys: PromptKeyCache) -> None:
        """Add to the index where a prompt's KV is, within a bounded time."""


class ResponseOwners:
    """Which replica stores a response, a file or a batch, by its id: no other can answer for it.

    Bounded: the least recently used entry goes first.
    """

    def __init__(self, max_entries: int = 100_000) -> None:
        self._max_entries = max_entries
        self._replicas: OrderedDict[str, str] = OrderedDict()

    def bind(self, stored_id: str, replica_id: str) -> None:
        """Remember which replica stores a thing."""
        self._replicas[stored_id] = replica_id
        self._replicas.move_to_end(stored_id)
        if len(self._replicas) > self._max_entries:
            self._replicas.popitem(last=False)

    def replica_of(self, ids: Iterable[str]) -> str | None:
        """Return the replica that stores the first known id; None if none is known."""
        for each in ids:
            if (replica_id := self._replicas.get(each)) is not None:
                self._replicas.move_to_end(each)
                return replica_id
        return None

    def __len__(self) -> int:
        return len(self._replicas)


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
    """Takes the requests of one router through their lives, for the proxy and for the gateway."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        fleet: Fleet,
        scheduler: RequestScheduler,
        admission: AdmissionController,
        prompts: PromptSource,
        stager: Stager,
        records: RecordReader,
        health: HealthSource,
        locator: KvLocator,
        causes: UncachedCauses | None = None,
    ) -> None:
        """``causes`` finds out why tokens were not cached, if that is wanted. ``records`` gets each
        request's record once, at its end."""
        self.config = config
        self.fleet = fleet
        self.policy = Policy(config)
        self.one_per_tick = OnePerTick()
        self._scheduler = scheduler
        self._admission = admission
        self._prompts = prompts
        self._stager = stager
        self._owners = ResponseOwners()
        self._records = records
        self._health = health
        self._locator = locator
        self._causes = causes

    # The record

    @contextmanager
    def recording(self, record: RequestRecord) -> Iterator[None]:
        """Note how the request ends, and publish its record."""
        try:
            with self.noting_end(record):
                yield
        finally:
            self.publish(record)

    @contextmanager
    def noting_end(self, record: RequestRecord) -> Iterator[None]:
        """Note when and how a request ends."""
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
            # a write that is under way may notice it first.
            record.end(Outcome.CLIENT_GONE)
            raise
        finally:
            record.ended_s = time.monotonic()

    def publish(self, record: RequestRecord) -> None:
        """Hand the record of a request that has ended to metrics, log and traces; once for each."""
        if isinstance(record.uncached, PendingUncached):
            record.uncached = None  # nothing is known to have been computed
        self._records.observe(record)

    # Read, admit, place, stage

    async def parse(
        self,
        plane: Plane,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: BodyBytes,
        *,
        record: RequestRecord | None = None,
        salt_key: bytes | None = None,
        best: Priority | None = None,
    ) -> ParsedRequest:
        """Return what routing needs of a request; raise `BadRequestError`: see `Policy.parse`.

        The request's ``record``, if it has one, gets the model and the class.
        """
        most_chars = self._prompts.most_chars
        parse = partial(self.policy.parse, salt_key=salt_key, best=best, most_chars=most_chars)
        asked = await off_loop(len(body), parse, plane, method, path, headers, body)
        if record is not None:
            record.model, record.requested_model = asked.model, asked.requested_model
            record.priority = asked.priority.name.lower() if asked.has_prompt else None
        return asked

    async def read(self, asked: ParsedRequest, record: RequestRecord) -> PromptKeyCache:
        """Render and tokenize the prompt; return its keys, which are computed when asked for.

        Clears ``asked.fields``.

        Raises `RateLimitedError` before that if the request would be refused in any case.
        """
        record.session_hash = None if asked.session is None else session_hash(asked.session)
        if asked.has_prompt and self.bound_to(asked) is None:
            self._admission.refuse_if_full(record.key, asked.priority)
            await self._replica_up(asked, record)
        await self.look_for(asked.model)
        began_s = time.monotonic()
        prompt = await self._prompt(asked)
        prompt_keys, record.is_exact = PromptKeyCache(prompt), prompt is not None and prompt.exact
        asked.fields.clear()  # the request may wait for minutes
        if prompt_keys.prompt_tokens > _LONG_PROMPT_TOKENS:
            kinds = [(each.key_shape, each.adapters) for each in self.fleet.replicas.values()]
            await asyncio.to_thread(prompt_keys.make, kinds)
        record.read_s = time.monotonic() - began_s
        record.step("read", began_s)
        await self._locator.look_up(prompt_keys)
        return prompt_keys

    async def _replica_up(self, asked: ParsedRequest, record: RequestRecord) -> None:
        """Wait while no replica is up, if the configuration lets requests wait for one."""
        began_s = time.monotonic()
        waited_s = await self._admission.replica_up(asked.model, max_wait_s=asked.max_wait_s)
        if waited_s:
            record.held_s = waited_s
            record.step("wait", began_s)
            await self.one_per_tick.enter()  # many may have waited for the same replica

    async def look_for(self, model: str | None) -> None:
        """Ask the replicas for their models if none is known to serve this one."""
        replicas = self.fleet.replicas.values()
        if model is not None and replicas and not any(each.serves(model) for each in replicas):
            await self._health.look_for_model()

    async def decide(self, asked: ParsedRequest) -> tuple[Prompt | None, Decision]:
        """Return where a request would go, without sending it."""
        await self.look_for(asked.model)
        prompt = await self._prompt(asked)
        prompt_keys = PromptKeyCache(prompt)
        await self._locator.look_up(prompt_keys)
        request = self._to_place(
            asked, prompt_keys, key=None, streamed=asked.streamed, may_split=asked.may_split
        )
        return prompt, self._scheduler.place(request, time.monotonic())

    async def admit(
        self,
        asked: ParsedRequest,
        prompt_keys: PromptKeyCache,
        record: RequestRecord,
        *,
        among: Collection[str] | None = None,
        sees_tokens: bool = True,
        forgiven: int = 0,
        may_split: bool = False,
    ) -> Admitted:
        """Wait until the request may go; return its placement and its ticket.

        A retry does not wait, nor a request that only one replica can answer, nor one without a
        prompt. The request goes to a replica in ``among``, if that is given.
        ``sees_tokens``: whether the first token of a streamed answer will be seen.
        ``forgiven``: the replicas of this many first failed tries may be asked again.
        ``may_split``: whether another replica may prefill the prompt.
        Await nothing between this call and the ``try`` that releases the ticket.
        """
        asked_s = time.monotonic()
        if self.config.request_log.prompt_hashes and record.prompt_hashes is None:
            record.prompt_hashes = self._hashes(asked, prompt_keys)
        request = self._to_place(
            asked,
            prompt_keys,
            key=record.key,
            failed=_failed(record, forgiven),
            among=among,
            streamed=asked.streamed and sees_tokens,
            may_split=may_split and asked.may_split,
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
        picked = admitted.decision.picked
        if picked.output_tokens:
            record.expected_tpot_s = picked.decode_s(self.fleet.weights) / picked.output_tokens
        if self._causes is not None:
            record.uncached = self._causes.expect(
                admitted.decision,
                asked.outline,
                model=asked.model,
                client=record.key,
                now_s=time.monotonic(),
            )
        record.step("wait", asked_s)
        return admitted

    def _hashes(self, asked: ParsedRequest, prompt_keys: PromptKeyCache) -> PromptHashes | None:
        """Return a prompt's hashes, of the keys of the first replica that serves its model."""
        serving = (each for each in self.fleet.replicas.values() if each.serves(asked.model))
        first = next(serving, None)
        if first is None or not asked.has_prompt:
            return None
        return PromptHashes.of(prompt_keys.of(first.key_shape, first.adapters), asked.session)

    def bound_to(self, asked: ParsedRequest) -> str | None:
        """Return the replica that stores what a request names, if it is known and in the fleet."""
        replica_id = self._owners.replica_of(asked.ids)
        replica = None if replica_id is None else self.fleet.replicas.find(replica_id)
        return None if replica is None or replica.is_removed else replica.id

    async def prepare(self, admitted: Admitted, record: RequestRecord) -> None:
        """Stage the KV at the replica; wait for it only as long as waiting saves time."""
        decision, ticket = admitted.decision, admitted.ticket
        began_s = time.monotonic()
        record.prepared = await self._stager.prepare(decision)
        record.step("stage", began_s)
        if ticket.first_leg is None and (decision.is_staged or record.prepared.waited_s > 0):
            ticket.sent(time.monotonic(), is_staged=record.prepared.is_staged)

    def second_leg(
        self,
        admitted: Admitted,
        asked: ParsedRequest,
        prompt_keys: PromptKeyCache,
        record: RequestRecord,
    ) -> Admitted:
        """Return where a request is answered whose first leg has ended; its ticket is the one to
        release from now on."""
        former = admitted.ticket
        request = self._to_place(
            asked,
            prompt_keys,
            key=record.key,
            failed=_failed(record),
            streamed=admitted.decision.streamed,
            may_split=False,
        )
        decision, ticket = self._scheduler.second_leg(
            request, admitted.decision, former, time.monotonic()
        )
        if ticket is not former:
            self._admission.wake()
            record.moved(decision)
        return replace(admitted, decision=decision, ticket=ticket)

    # The answer

    def began(
        self,
        ticket: Ticket,
        record: RequestRecord,
        *,
        began_s: float,
        streamed: bool,
        lag_s: float = 0.0,
    ) -> None:
        """Note when an answer began: at its first token if it is ``streamed``, else at its headers.

        ``lag_s`` is the time that the router took to send the request, without intended waits.
        Later calls for the same request change nothing.
        """
        if record.first_byte_s is not None:
            return
        record.streamed, record.first_byte_s = streamed, began_s
        # Without a prompt, neither the time to the first byte nor `usage` describes a prefill.
        is_token = streamed and bool(record.prompt_tokens)
        ticket.first_byte(began_s, streamed=is_token, lag_s=lag_s)
        self._note_result(ticket, ok=True)
        if ticket.is_pulling:
            ticket.replica.resume_nixl(works=True)
        self._admission.wake()

    def prefilled(self, first_leg: Ticket, usage: Usage) -> None:
        """Note that a replica has prefilled a prompt for another one, and release its ticket."""
        first_leg.first_byte(time.monotonic())
        first_leg.replica.resume_nixl(works=True)
        self._note_result(first_leg, ok=True)
        self.release(first_leg, ok=True, usage=usage)

    def cut(self, ticket: Ticket) -> None:
        """Note that a replica broke off its answer after it had begun."""
        self._note_result(ticket, ok=False)
        self._health.suspect(ticket.replica.id, Cause.CUT)

    def failed(
        self,
        ticket: Ticket,
        record: RequestRecord,
        cause: Cause,
        detail: str,
        *,
        retry_after_s: float | None = None,
        is_prefill: bool = False,
    ) -> None:
        """Note that the last try failed before its answer began. Does not release the ticket.

        ``retry_after_s`` is the replica's ``Retry-After``, if it sent one. ``is_prefill``: the
        ticket is that of the first leg.
        """
        failed_id = ticket.replica.id
        before = [
            each.replica_id
            for each in record.failed_tries
            if each.cause in MAY_BE_REQUESTS and each.replica_id != failed_id
        ]
        if cause in MAY_BE_REQUESTS and before:
            # It failed so at two replicas: that shows nothing about either.
            self._take_back(before[-1])
        elif cause in _AT_FAULT:
            self._note_result(ticket, ok=False)
        record.failed_tries.append(
            FailedTry(
                replica_id=failed_id,
                cause=cause,
                detail=detail,
                retry_after_s=retry_after_s,
                is_prefill=is_prefill,
            )
        )
        record.prepared = StagingResult()  # the staged KV was for that replica
        if cause not in (Cause.ABSENT, Cause.BUSY, Cause.LOCAL, Cause.PREFILL):
            self._health.suspect(failed_id, cause)

    # The end

    def finish(self, ticket: Ticket, record: RequestRecord, usage: Usage, *, ok: bool) -> None:
        """Release a request whose answer had begun, with the answer's own counts."""
        leg = record.first_leg
        there = None if leg is None else leg.cached_tokens
        record.cached_tokens = usage.cached_tokens if there is None else there
        record.input_tokens = usage.prompt_tokens
        record.output_tokens, record.answer_tokens = usage.output_tokens, usage.tokens_about
        if ok and self._causes is not None and isinstance(record.uncached, PendingUncached):
            record.uncached = self._causes.settle(
                record.uncached,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=record.cached_tokens,
                now_s=time.monotonic(),
            )
        if ok and usage.tokens_about is not None:
            self.fleet.output_lengths.note(ticket.session, record.key, usage.tokens_about)
        self.release(ticket, ok=ok, usage=usage if record.prompt_tokens else NO_USAGE)
        if ok and usage.stored_id is not None and record.replica_id is not None:
            self._owners.bind(usage.stored_id, record.replica_id)

    def release(self, ticket: Ticket, *, ok: bool = False, usage: Usage = NO_USAGE) -> None:
        """Give back a ticket, however the request ended. Only `second_leg` does it too."""
        ticket.finish(
            time.monotonic(),
            ok=ok,
            prompt_tokens=usage.prompt_tokens,
            # Of KV that was pulled they say nothing about this replica.
            cached_tokens=None if ticket.is_pulling else usage.cached_tokens,
            output_tokens=usage.tokens_about,
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

    def _take_back(self, replica_id: str) -> None:
        if self.fleet.take_back_failure(replica_id, time.monotonic()):
            log.info("%s gets requests again: what failed there fails elsewhere too", replica_id)

    async def _prompt(self, asked: ParsedRequest) -> Prompt | None:
        if not asked.has_prompt:
            return None
        try:
            return await self._prompts.read(
                asked.endpoint,
                asked.fields,
                len(asked.body),
                asked.model,
                is_cut=asked.is_cut,
            )
        except RecursionError:  # what can be parsed may be deeper than templates can walk
            raise BadRequestError("the body's values are nested too deeply") from None

    def _to_place(
        self,
        asked: ParsedRequest,
        keys: PromptKeyCache,
        *,
        key: str | None,
        streamed: bool,
        may_split: bool,
        failed: Sequence[str] = (),
        among: Collection[str] | None = None,
    ) -> PlacementRequest:
        """Return what the scheduler needs; ``failed`` replicas do not get the request again.

        ``key`` is the name of the client's key.
        """
        bound_to = self.bound_to(asked)
        short: Sequence[str] = ()
        if asked.has_prompt and bound_to is None:
            short = self.fleet.too_short(asked.model, keys.prompt_tokens, asked.output_tokens)
        return PlacementRequest(
            keys=keys,
            model=asked.model,
            session=asked.session,
            bound_to=bound_to,
            exclude=(*failed, *short),
            among=among,
            streamed=streamed,
            client=key,
            priority=asked.priority,
            output_tokens=self.fleet.output_lengths.expected(
                asked.session, key, asked.output_tokens
            ),
            may_split=may_split and bound_to is None,
        )


def _failed(record: RequestRecord, forgiven: int = 0) -> tuple[str, ...]:
    """Return the replicas that do not get the request again, but for the first ``forgiven``."""
    tries = record.failed_tries[forgiven:]
    return tuple(each.replica_id for each in tries if each.cause not in _OF_LEGS)
