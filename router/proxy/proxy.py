"""One request from end to end: read, admit, prefetch, forward, learn.

The in-flight `Ticket` comes from `Admission` to `Proxy._try` and is given back
there, in one ``finally``, whether the answer was passed on, cut, refused or not
waited for.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from aiohttp import web

from router.admission import Admission, Admitted
from router.config import (
    ApiError,
    NoReplica,
    RateLimited,
    RouterConfig,
    UpstreamFailed,
    UpstreamTimeout,
)
from router.fleet import Decision, Fleet
from router.http import read_body
from router.latency import Promised
from router.prompt import Prompt, PromptSource
from router.proxy.one_per_tick import Turnstile
from router.proxy.relay import relay
from router.proxy.request import Asked, max_wait_s, parse, request_id
from router.proxy.response_owners import Bindings
from router.proxy.upstream import TryFailed, Upstream, forwarded_headers
from router.proxy.usage import UsageReader
from router.record import Cause, Exchange, FailedTry, Outcome, RequestRecord
from router.residency import PromptKeyring, Tier
from router.staging import Preparation, Preparer

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Sinks:
    """Who hears of what happens."""

    record: Callable[[RequestRecord], None]
    """Called once for each request, at its end."""
    trouble: Callable[[str, Cause], None]
    """Called when a try at a replica (its id) has failed."""


class Proxy:
    """Handles the endpoints that are answered by one replica."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        fleet: Fleet,
        admission: Admission,
        prompts: PromptSource,
        preparer: Preparer,
        upstream: Upstream,
        bindings: Bindings,
        sinks: Sinks,
        clock: Clock = time.monotonic,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._admission = admission
        self._prompts = prompts
        self._preparer = preparer
        self._upstream = upstream
        self._bindings = bindings
        self._sinks = sinks
        self._clock = clock
        self._turnstile = Turnstile()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for generation; raise `ApiError` for what the router refuses."""
        exchange = Exchange(
            request_id=request_id(request.headers),
            endpoint=request.path,
            started_s=self._clock(),
        )
        try:
            return await self._serve(request, exchange)
        except ApiError as error:
            exchange.outcome = Outcome.REFUSED
            exchange.status, exchange.error = error.status, error.message
            if isinstance(error, RateLimited):
                exchange.rejected = error.cause
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            # aiohttp cancels the handler when the client's connection is lost;
            # a write that was under way may notice it first.
            exchange.outcome = Outcome.CLIENT_GONE
            raise
        finally:
            self._sinks.record(exchange.record(self._clock()))

    async def decide(self, asked: Asked) -> tuple[Prompt | None, Decision]:
        """Return where a request would go, without sending it or changing any state."""
        prompt = await self._read(asked)
        return prompt, self._place(asked, PromptKeyring(prompt), (), Promised(), self._clock())

    async def _serve(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        body = await read_body(request, self._config.max_body_bytes)
        await self._turnstile.enter()
        asked = parse(request.path, body, request.headers, self._config.sessions.header)
        exchange.model, exchange.session = asked.model, asked.session
        began_s = self._clock()
        prompt = await self._read(asked)
        exchange.read_s = self._clock() - began_s
        return await self._try_replicas(request, asked, prompt, exchange)

    async def _read(self, asked: Asked) -> Prompt | None:
        if not asked.has_prompt:
            return None
        return await self._prompts.reader_for(asked.model).read(asked.endpoint, dict(asked.fields))

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
            bound_to=self._bindings.replica_of(asked.previous_response_id),
            exclude=exclude,
            promised=promised,
            streamed=asked.streamed,
            now_s=now_s,
        )

    async def _try_replicas(
        self, request: web.Request, asked: Asked, prompt: Prompt | None, exchange: Exchange
    ) -> web.StreamResponse:
        """Try the best replica, then the next best, until one begins to answer."""
        failed: TryFailed | None = None
        for _ in range(self._config.retries + 1):
            try:
                return await self._try(request, asked, prompt, exchange)
            except TryFailed as failure:
                failed = failure
            except NoReplica:
                if failed is None:
                    raise
                break
        assert failed is not None
        return self._give_up(failed, exchange)

    async def _admit(
        self, request: web.Request, asked: Asked, prompt: Prompt | None, exchange: Exchange
    ) -> Admitted:
        """Wait until the request may go; a retry does not wait again.

        Nor does what only one replica can answer, or what no replica computes a prompt for.
        """
        excluded = tuple(each.replica_id for each in exchange.failed_tries)
        bound_to = self._bindings.replica_of(asked.previous_response_id)
        keyring = PromptKeyring(prompt)

        def place(now_s: float, promised: Promised) -> Decision:
            began_s = self._clock()
            decision = self._place(asked, keyring, excluded, promised, now_s)
            exchange.place_s = self._clock() - began_s
            return decision

        return await self._admission.admit(
            place,
            at_once=bool(excluded) or bound_to is not None or prompt is None,
            max_wait_s=max_wait_s(request.headers),
        )

    async def _try(
        self, request: web.Request, asked: Asked, prompt: Prompt | None, exchange: Exchange
    ) -> web.StreamResponse:
        """Send the request to one replica and pass its answer on.

        Raises `TryFailed` while another replica may still be asked.
        """
        reader = UsageReader()
        ok = False
        admitted = await self._admit(request, asked, prompt, exchange)
        # In flight from there, not from after the prefetch: a burst of the same
        # prompt that comes while this one waits must see it. Nothing may be
        # awaited before the ``try``: a client that leaves then would leave the ticket.
        decision, ticket = admitted.decision, admitted.ticket
        try:
            _note_admitted(exchange, admitted)
            prepared = await self._preparer.prepare(decision)
            _note_prepared(exchange, prepared)
            if decision.is_staged or prepared.waited_s > 0:
                ticket.sent(self._clock())
            async with self._upstream.open(
                request.method,
                decision.url + request.path_qs,
                headers=self._headers(request, decision, exchange),
                body=asked.body,
            ) as answer:
                exchange.streamed = answer.streamed
                exchange.first_byte_s = answer.began_s
                ok = answer.status < 400
                if ok:
                    lag_s = answer.sent_s - ticket.started_s - prepared.waited_s
                    ticket.first_byte(answer.began_s, streamed=answer.streamed, lag_s=lag_s)
                    self._admission.wake()
                return await relay(
                    request,
                    answer,
                    extra_headers=_decision_headers(decision, prepared, exchange),
                    reader=reader,
                    exchange=exchange,
                )
        except TryFailed as failure:
            self._note_failure(exchange, decision.replica_id, failure)
            raise
        finally:
            usage = reader.read()
            exchange.cached_tokens = usage.cached_tokens
            exchange.output_tokens = usage.output_tokens
            ticket.finish(
                self._clock(),
                ok=ok,
                cached_tokens=usage.cached_tokens,
                output_tokens=usage.output_tokens,
            )
            self._admission.wake()
            if ok and usage.response_id is not None:
                self._bindings.bind(usage.response_id, decision.replica_id)

    def _headers(
        self, request: web.Request, decision: Decision, exchange: Exchange
    ) -> Mapping[str, str]:
        replica = self._fleet.replicas[decision.replica_id]
        return forwarded_headers(
            request.headers, request_id=exchange.request_id, api_key=replica.config.api_key
        )

    def _note_failure(self, exchange: Exchange, replica_id: str, failure: TryFailed) -> None:
        exchange.failed_tries.append(
            FailedTry(replica_id=replica_id, cause=failure.cause, detail=failure.detail)
        )
        self._sinks.trouble(replica_id, failure.cause)

    def _give_up(self, failure: TryFailed, exchange: Exchange) -> web.Response:
        """Answer with the last replica's own refusal if it had one, else with ours."""
        if failure.answer is not None:
            exchange.outcome, exchange.status = Outcome.OK, failure.answer.status
            return web.Response(
                status=failure.answer.status,
                headers=failure.answer.headers,
                body=failure.answer.body,
            )
        tried = "; ".join(f"{each.replica_id}: {each.detail}" for each in exchange.failed_tries)
        match failure.cause:
            case Cause.CONNECT:
                retry_after_s = max(1, ceil(self._config.timeouts.health_interval_s))
                raise NoReplica(
                    f"no replica could be reached ({tried})", retry_after_s=retry_after_s
                )
            case Cause.TIMEOUT:
                raise UpstreamTimeout(f"no replica began to answer in time ({tried})")
        raise UpstreamFailed(f"every replica tried broke off before its first byte ({tried})")


def _note_admitted(exchange: Exchange, admitted: Admitted) -> None:
    decision = admitted.decision
    exchange.admission_wait_s = (exchange.admission_wait_s or 0.0) + admitted.waited_s
    exchange.replica_id = decision.replica_id
    exchange.reason = str(decision.reason)
    exchange.prompt_tokens = decision.prompt_tokens
    exchange.matched_tokens = {str(tier): n for tier, n in decision.matched_tokens.items()}
    exchange.predicted_ttft_s = decision.predicted_ttft_s


def _note_prepared(exchange: Exchange, prepared: Preparation) -> None:
    prefetch, copy = prepared.prefetch, prepared.copy
    if prefetch is not None or copy is not None:
        exchange.prefetch_wait_s = prepared.waited_s
    if prefetch is not None:
        exchange.prefetch, exchange.prefetch_result = str(prefetch), prefetch.timing
        exchange.prefetch_chunks = {
            "promoted": prefetch.promoted,
            "pending": prefetch.pending,
            "missing": prefetch.missing,
        }
        exchange.prefetch_bytes = prefetch.promoted_bytes
    if copy is not None:
        exchange.copy, exchange.copy_result = str(copy), copy.timing
        exchange.copy_bytes = copy.moved_bytes


def _decision_headers(
    decision: Decision, prepared: Preparation, exchange: Exchange
) -> dict[str, str]:
    headers = {
        "x-request-id": exchange.request_id,
        "x-warmroute-replica": decision.replica_id,
        "x-warmroute-reason": str(decision.reason),
        "x-warmroute-prompt-tokens": str(decision.prompt_tokens),
        "x-warmroute-predicted-ttft-ms": f"{decision.predicted_ttft_s * 1000:.1f}",
        "x-warmroute-held-ms": f"{(exchange.admission_wait_s or 0.0) * 1000:.1f}",
        "x-warmroute-retries": str(len(exchange.failed_tries)),
    }
    for tier in Tier:
        headers[f"x-warmroute-matched-{tier}"] = str(decision.matched_tokens.get(tier, 0))
    return headers | prepared.headers()
