"""One request from end to end, through the embedded proxy.

`Proxy.handle` opens the record, `_answer` relays, `_begin` reads the body and the prompt, `_send`
tries replicas until one begins to answer, and `_try` admits, stages and sends once.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from math import ceil
from typing import Final, NoReturn

import aiohttp
from aiohttp import web

from router.api.access import GRANT
from router.api.charge import Charge
from router.fleet.in_flight import Ticket
from router.fleet.replica import Replica
from router.index.prompt_keys import PromptKeyCache
from router.policy import PROMPTED, ParsedRequest, Plane, endpoint_label, stores
from router.proxy.first_byte_waits import FirstByteWaits
from router.proxy.lifecycle import MAY_BE_REQUESTS, RequestLifecycle
from router.proxy.relay import ClientAnswer, UsageReader, relay
from router.proxy.remote_prefill import PrefillFailedError, RemotePrefill
from router.proxy.upstream import (
    AttemptFailedError,
    ReplicaAnswer,
    Upstream,
    Wait,
    forwarded_headers,
)
from router.record.records import Cause, FailedTry, Outcome, RequestRecord, trace_context
from warmroute_common.api_errors import (
    ApiError,
    NoReplicaError,
    RateLimitedError,
    UpstreamFailedError,
    UpstreamTimeoutError,
)
from warmroute_common.http_server import BODIES, error_body, read_body, release_body, request_id

_SHARE: Final = 0.2
"""Retries, as a share of the requests that wait for their answer to begin. If more are retries,
most requests fail, and sending them to yet another replica makes that worse."""
_AT_LEAST: Final = 10
"""Retries that may always go: a fifth of a few requests is less than one."""
_LEAST_S: Final = 0.025
_MOST_S: Final = 0.25


class RetryBudget:
    """Counts the requests that wait for their answer to begin, and the retries among them."""

    def __init__(self) -> None:
        self.requests = 0
        self.retries = 0

    @property
    def has_capacity(self) -> bool:
        """Whether one more request may be retried now."""
        return self.retries < max(_AT_LEAST, _SHARE * self.requests)

    def check(self) -> None:
        """Raise AssertionError if the counts contradict each other."""
        assert 0 <= self.retries <= self.requests

    def __repr__(self) -> str:
        return f"<RetryBudget {self.retries} of {self.requests}>"


def pause_s(retry: int, jitter: float) -> float:
    """Return how long the n-th retry of a request (from 1 on) waits; ``jitter`` is from 0 to 1.

    The first goes at once, to another replica. If that fails too, the cause may be common to all
    replicas; then a random pause keeps requests that failed together from returning together.
    """
    return 0.0 if retry <= 1 else _LEAST_S + (_MOST_S - _LEAST_S) * jitter


class Retries:
    """The retries of one router. Retries beyond the budget wait, first come, first served."""

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        """``jitter`` returns random numbers from 0 to 1."""
        self.budget = RetryBudget()
        self._jitter = jitter
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count a request as one that waits for its answer to begin."""
        self.budget.requests += 1
        self._admit_next()
        try:
            yield
        finally:
            self.budget.requests -= 1

    async def enter(self, retry: int, within_s: float) -> bool:
        """Wait until the n-th retry of a request may go; return False if it may not ``within_s``.

        After True the caller must call `leave`.
        """
        if not await self._reserve(within_s):
            return False
        try:
            await asyncio.sleep(pause_s(retry, self._jitter()))
        except BaseException:
            self.leave()
            raise
        return True

    def leave(self) -> None:
        """End a retry, so that the next may go."""
        self.budget.retries -= 1
        self._admit_next()

    async def _reserve(self, within_s: float) -> bool:
        if not self._waiting and self.budget.has_capacity:
            self.budget.retries += 1
            return True
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(within_s):
                await turn
        except BaseException as error:
            # The turn may have come in the same tick of the loop in which the time ran out or the
            # client left: then only this code can end the retry.
            if turn.done() and not turn.cancelled():
                self.leave()
            if isinstance(error, TimeoutError):
                return False
            raise
        return True

    def _admit_next(self) -> None:
        while self._waiting and self.budget.has_capacity:
            turn = self._waiting.popleft()
            if not turn.done():  # done: it no longer waits
                self.budget.retries += 1
                turn.set_result(None)


_Begun = tuple[ReplicaAnswer, Ticket]
"""A replica's answer that has begun, and the ticket to release at its end."""
_NOT_BEGUN: Final = (Cause.CONNECT, Cause.LOCAL, Cause.ABSENT, Cause.NO_MODEL)
"""Causes after which the replica has certainly not begun with the request."""
_NOT_TAKEN: Final = (*_NOT_BEGUN, Cause.BUSY, Cause.STATUS, Cause.PREFILL, Cause.PULL)
"""Causes after which the replica has most likely done nothing for the request."""
_WITH_EVENTS: Final = PROMPTED - {"/v1/embeddings"}
"""Endpoints whose streams are server-sent events."""
_MOST_PATIENCE_S: Final = 5.0
"""The router waits for a replica's ``Retry-After`` up to this; a longer one goes to the client."""
_MOST_ABSENT: Final = 32
"""A stored thing with an unknown owner is looked for at this many replicas: one request of a client
must not become hundreds."""


class Proxy:
    """Handles the endpoints that one replica answers."""

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        session: aiohttp.ClientSession,
        waits: FirstByteWaits,
        retries: Retries,
    ) -> None:
        self._lifecycle = lifecycle
        self._config = lifecycle.config
        self._upstream = Upstream(session, lifecycle.config.timeouts)
        self._waits = waits
        self._retries = retries
        tracing = lifecycle.config.tracing
        self._sample_ratio = None if tracing is None else tracing.sample_ratio

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request by a replica; raise `ApiError` for what the router refuses."""
        record = self._record_of(request)
        with self._lifecycle.recording(record):
            return await self._answer(request, record)

    async def pass_through(self, request: web.Request) -> web.StreamResponse:
        """Do the same for a path that may be one that is not forwarded."""
        record = self._record_of(request)
        with self._lifecycle.recording(record):
            record.is_admitted = False
            self._lifecycle.policy.check(Plane.PROXY, request.method, request.path, request.headers)
            record.is_admitted = True
            return await self._answer(request, record)

    def refuse(self, request: web.Request, error: ApiError) -> None:
        """Record a request that was refused before it was read."""
        record = self._record_of(request)
        record.is_admitted = False
        with suppress(ApiError), self._lifecycle.recording(record):
            raise error

    def _record_of(self, request: web.Request) -> RequestRecord:
        grant = request.get(GRANT)
        return RequestRecord(
            request_id=request_id(request),
            key=None if grant is None else grant.name,
            client=request.remote,
            method=request.method,
            endpoint=endpoint_label(request.path),
            path=request.rel_url.raw_path,
            trace=trace_context(request.headers.get("traceparent"), self._sample_ratio),
            started_s=time.monotonic(),
        )

    async def _answer(self, request: web.Request, record: RequestRecord) -> web.StreamResponse:
        client = ClientAnswer(request, record)
        charge = None if (grant := request.get(GRANT)) is None else Charge(grant)
        try:
            begun = await self._begin(client, charge)
        except ApiError as error:
            if not client.has_begun:
                raise
            record.end(Outcome.REFUSED, error=error.logged)
            if isinstance(error, RateLimitedError):
                record.rejected = error.cause
            return await client.end_with_error(error_body(request.path, error))
        # From here on no other replica is asked, so the body, its fields and the prompt are
        # released: an answer may take minutes, and thousands may be running.
        release_body(request)
        if isinstance(begun, web.Response):
            if client.has_begun:
                record.end(Outcome.REFUSED, error=f"the last replica answered {begun.status}")
                assert isinstance(begun.body, bytes)
                return await client.end_with_error(begun.body)
            record.status = begun.status
            record.end(Outcome.OK)
            return begun
        answer, ticket = begun
        reader = UsageReader(streamed=answer.streamed, any_id=stores(request.method, request.path))
        try:
            if client.has_begun and not answer.has_events:
                record.end(Outcome.REFUSED, error=f"the last replica answered {answer.status}")
                return await client.end_with_error(await answer.read_start())
            return await relay(
                client,
                answer,
                reader=reader,
                replica=ticket.replica,
                idle_s=self._config.timeouts.stream_idle_s,
            )
        finally:
            answer.close()
            if record.outcome is Outcome.CUT:
                self._lifecycle.cut(ticket)
            usage = reader.read()
            self._lifecycle.finish(ticket, record, usage, ok=answer.is_ok)
            if charge is not None:
                charge.settle(
                    prompt_tokens=usage.prompt_tokens,
                    output_tokens=usage.output_tokens,
                    answer_bytes=record.response_bytes,
                    is_json="json" in answer.headers.get("Content-Type", ""),
                    now_s=time.monotonic(),
                )

    async def _begin(self, client: ClientAnswer, charge: Charge | None) -> _Begun | web.Response:
        """Read a request, and send it until a replica begins to answer.

        Returns the last replica's refusal if none does.
        """
        request, record = client.request, client.record
        body = await read_body(request)
        await self._lifecycle.one_per_tick.enter()
        grant = request.get(GRANT)
        asked = await self._lifecycle.parse(
            *(Plane.PROXY, request.method, request.path, request.headers, body),
            record=record,
            salt_key=None if grant is None else grant.salt_key,
            best=None if grant is None else grant.priority,
        )
        if grant is not None:
            grant.check_model(asked.model)
            asked = replace(asked, session=grant.own_session(asked.session))
        if charge is not None:
            await charge.estimate(asked)
        with (
            request.app[BODIES].holding(asked.parsed_bytes),
            client.held(self._keep_alive_s(asked)),
        ):
            prompt_keys = await self._lifecycle.read(asked, record)
        if charge is not None:
            charge.take(prompt_keys.prompt_tokens, time.monotonic(), is_exact=record.is_exact)
        with self._retries.counting():
            return await self._send(client, asked, prompt_keys)

    async def _send(
        self, client: ClientAnswer, asked: ParsedRequest, prompt_keys: PromptKeyCache
    ) -> _Begun | web.Response:
        """Try the best replica, then the next best; at the end wait for one that said when."""
        record = client.record
        refusal: web.Response | None = None
        forgiven = 0
        prefill = RemotePrefill(
            client,
            asked,
            upstream=self._upstream,
            lifecycle=self._lifecycle,
            waits=self._waits,
            is_keyed=GRANT in client.request,
        )
        while True:
            try:
                if not self._counted(record):
                    return await self._try(client, asked, prompt_keys, prefill)
                async with self._retrying(asked, record):
                    return await self._try(client, asked, prompt_keys, prefill, forgiven=forgiven)
            except AttemptFailedError as failure:
                refusal = failure.answer
                if not self._may_retry(asked, record):
                    break
            except NoReplicaError:
                if not record.failed_tries:
                    raise
                if not await self._wait_retry_after(asked, record, forgiven):
                    break
                forgiven = len(record.failed_tries)
        return self._give_up(record) if refusal is None else refusal

    @asynccontextmanager
    async def _retrying(self, asked: ParsedRequest, record: RequestRecord) -> AsyncIterator[None]:
        """Wait for the retry's turn; raise `NoReplicaError` if it does not come in time."""
        began_s = time.monotonic()
        longest_s = min(asked.max_wait_s, self._config.admission.max_wait_s)
        has_turn = await self._retries.enter(len(self._counted(record)), longest_s)
        record.waited_to_retry(began_s)
        if not has_turn:
            raise NoReplicaError("too many requests are being retried; send it again later")
        try:
            yield
        finally:
            self._retries.leave()

    async def _wait_retry_after(
        self, asked: ParsedRequest, record: RequestRecord, forgiven: int
    ) -> bool:
        """Wait as long as a replica's ``Retry-After`` says, if that is short; else return False.

        For a request that no other replica is left to take.
        """
        tries = record.failed_tries[forgiven:]
        waits_s = [each.retry_after_s for each in tries if each.retry_after_s is not None]
        if not waits_s or min(waits_s) > min(_MOST_PATIENCE_S, asked.max_wait_s):
            return False
        began_s = time.monotonic()
        await asyncio.sleep(min(waits_s))
        record.waited_to_retry(began_s)
        return True

    def _may_retry(self, asked: ParsedRequest, record: RequestRecord) -> bool:
        """Whether a request whose last try failed may be sent to another replica."""
        absent = sum(each.cause is Cause.ABSENT for each in record.failed_tries)
        return (
            (asked.repeatable or record.failed_tries[-1].cause in _NOT_BEGUN)
            and absent < _MOST_ABSENT
            and self._tries_left(record) > 0
        )

    def _tries_left(self, record: RequestRecord) -> int:
        """Return how many more replicas may be asked; after one that it may have broken, one."""
        left = self._config.retries + 1 - len(self._counted(record))
        counted = [each for each in record.failed_tries if each.cause is not Cause.ABSENT]
        if any(each.cause in MAY_BE_REQUESTS for each in counted):
            left = min(left, 2 - sum(each.cause not in _NOT_TAKEN for each in counted))
        return left

    @staticmethod
    def _counted(record: RequestRecord) -> list[FailedTry]:
        """Return the failed tries that count against ``retries``: first legs have their own limit,
        and after them the request was sent nowhere else."""
        return [
            each
            for each in record.failed_tries
            if each.cause is not Cause.ABSENT and not each.is_prefill
        ]

    async def _try(
        self,
        client: ClientAnswer,
        asked: ParsedRequest,
        prompt_keys: PromptKeyCache,
        prefill: RemotePrefill,
        *,
        forgiven: int = 0,
    ) -> _Begun:
        """Send the request to one replica; return its answer once it has begun.

        Raises `AttemptFailedError` if another replica may be asked. ``forgiven``: see
        `RequestLifecycle.admit`.
        """
        request, record = client.request, client.record
        with client.held(self._keep_alive_s(asked)):
            admitted = await self._lifecycle.admit(
                asked, prompt_keys, record, forgiven=forgiven, may_split=prefill.is_possible
            )
        # In flight from here on, not from after the prefetch: requests with the same prompt that
        # arrive meanwhile must see it. Await nothing before the ``try``: if the client left
        # then, nobody would release the ticket.
        decision, ticket = admitted.decision, admitted.ticket
        try:
            await self._lifecycle.prepare(admitted, record)
            admitted = await prefill.first_leg(admitted, prompt_keys)
            decision, ticket = admitted.decision, admitted.ticket
            body = await prefill.body(ticket)
            with self._wait(asked, ticket.replica, record) as wait:
                answer = await self._upstream.send(
                    request.method,
                    decision.url + request.path_qs,
                    headers=forwarded_headers(
                        request.headers,
                        request_id=record.request_id,
                        api_key=ticket.replica.config.api_key,
                        is_keyed=GRANT in request,
                        vllm_priority=asked.vllm_priority,
                        traceparent=record.begin_try(decision.url),
                    ),
                    body=body,
                    wait=wait,
                    client=client,
                    # A replica that broke off may have pulled the KV already: not from there again.
                    repeatable=asked.repeatable and not ticket.is_pulling,
                    seeks=asked.seeks and self._lifecycle.bound_to(asked) is None,
                    has_model=asked.model is not None,
                )
        except AttemptFailedError as failure:
            first_leg = ticket.first_leg if isinstance(failure, PrefillFailedError) else None
            cause = failure.cause
            if first_leg is None:
                cause = prefill.second_leg_failed(ticket, failure)
            self._lifecycle.failed(
                *(first_leg or ticket, record, cause, failure.detail),
                retry_after_s=failure.retry_after_s,
                is_prefill=first_leg is not None,
            )
            self._lifecycle.release(ticket)
            raise
        except BaseException:
            self._lifecycle.release(ticket)
            raise
        if answer.is_ok:
            lag_s = answer.sent_s - ticket.started_s - record.prepared.waited_s
            self._lifecycle.began(
                ticket, record, began_s=answer.began_s, streamed=answer.streamed, lag_s=lag_s
            )
        else:
            record.streamed, record.first_byte_s = answer.streamed, answer.began_s
        return answer, ticket

    def _keep_alive_s(self, asked: ParsedRequest) -> float | None:
        """Return after how long a hold the client gets a keep-alive; None for no stream."""
        has_events = asked.streamed and asked.endpoint in _WITH_EVENTS
        return self._config.admission.keep_alive_s if has_events else None

    def _wait(
        self, asked: ParsedRequest, replica: Replica, record: RequestRecord
    ) -> AbstractContextManager[Wait]:
        """Make the wait for a first byte, which ends early if another replica can take over."""
        tried = [each.replica_id for each in record.failed_tries]
        may_move = (
            self._tries_left(record) > 1
            and asked.repeatable
            and self._lifecycle.bound_to(asked) is None
        )
        return self._waits.at(replica, model=asked.model, tried=tried, may_move=may_move)

    def _give_up(self, record: RequestRecord) -> NoReturn:
        """Raise the error of a request whose tries all failed."""
        tried = "; ".join(f"{each.replica_id}: {each.cause}" for each in record.failed_tries)
        match record.failed_tries[-1].cause:
            case Cause.CONNECT | Cause.LOCAL:
                retry_after_s = max(1, ceil(self._config.timeouts.health_interval_s))
                raise NoReplicaError(
                    f"no replica could be reached ({tried})", retry_after_s=retry_after_s
                )
            case Cause.TIMEOUT:
                raise UpstreamTimeoutError(f"no replica began to answer in time ({tried})")
        raise UpstreamFailedError(
            f"every replica tried failed or broke off before its answer began ({tried})"
        )
