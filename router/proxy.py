"""One request from end to end: read, place, prefetch, forward, learn.

The in-flight `Ticket` is taken in `Proxy._try` and given back there, in one
``finally``, whether the answer was passed on, cut, refused or not waited for.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from aiohttp import web

from router.accept import Asked, parse, read_body, request_id
from router.bindings import Bindings
from router.config import RouterConfig
from router.errors import ApiError, NoReplica, UpstreamFailed, UpstreamTimeout
from router.fleet import Fleet
from router.policy import Decision
from router.prefetch import Prefetcher, PrefetchOutcome
from router.prompt_source import PromptSource
from router.records import Cause, Exchange, FailedTry, Outcome, RequestRecord
from router.relay import relay
from router.replica import Tier
from router.tokens import Prompt
from router.upstream import TryFailed, Upstream, forwarded_headers
from router.usage import UsageReader

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
        prompts: PromptSource,
        prefetcher: Prefetcher,
        upstream: Upstream,
        bindings: Bindings,
        sinks: Sinks,
        clock: Clock = time.monotonic,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._prompts = prompts
        self._prefetcher = prefetcher
        self._upstream = upstream
        self._bindings = bindings
        self._sinks = sinks
        self._clock = clock

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
        return prompt, self._place(asked, prompt, ())

    async def _serve(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        body = await read_body(request, self._config.max_body_bytes)
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

    def _place(self, asked: Asked, prompt: Prompt | None, exclude: tuple[str, ...]) -> Decision:
        return self._fleet.place(
            prompt,
            model=asked.model,
            session=asked.session,
            bound_to=self._bindings.replica_of(asked.previous_response_id),
            exclude=exclude,
            now_s=self._clock(),
        )

    async def _try_replicas(
        self, request: web.Request, asked: Asked, prompt: Prompt | None, exchange: Exchange
    ) -> web.StreamResponse:
        """Try the best replica, then the next best, until one begins to answer."""
        failed: TryFailed | None = None
        for _ in range(self._config.retries + 1):
            excluded = tuple(each.replica_id for each in exchange.failed_tries)
            began_s = self._clock()
            try:
                decision = self._place(asked, prompt, excluded)
            except NoReplica:
                if failed is None:
                    raise
                break
            exchange.place_s = self._clock() - began_s
            try:
                return await self._try(request, asked, decision, exchange)
            except TryFailed as failure:
                failed = failure
                exchange.failed_tries.append(
                    FailedTry(
                        replica_id=decision.replica_id, cause=failure.cause, detail=failure.detail
                    )
                )
                self._sinks.trouble(decision.replica_id, failure.cause)
        assert failed is not None
        return self._give_up(failed, exchange)

    async def _try(
        self, request: web.Request, asked: Asked, decision: Decision, exchange: Exchange
    ) -> web.StreamResponse:
        """Send the request to one replica and pass its answer on.

        Raises `TryFailed` while another replica may still be asked.
        """
        _note_decision(exchange, decision)
        reader = UsageReader()
        ok = False
        # In flight from here, not from after the prefetch: a burst of the same
        # prompt that comes while this one waits must see it.
        ticket = self._fleet.start(decision, self._clock())
        try:
            prefetched = await self._prefetch(decision, exchange)
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
                    ticket.first_byte(answer.began_s, streamed=answer.streamed)
                return await relay(
                    request,
                    answer,
                    extra_headers=_decision_headers(decision, prefetched, exchange),
                    reader=reader,
                    exchange=exchange,
                )
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
            if ok and usage.response_id is not None:
                self._bindings.bind(usage.response_id, decision.replica_id)

    async def _prefetch(self, decision: Decision, exchange: Exchange) -> PrefetchOutcome | None:
        if not decision.prefetch_keys or not self._config.prefetch.enabled:
            return None
        outcome = await self._prefetcher.run(decision)
        exchange.prefetch = _prefetch_text(outcome)
        exchange.prefetch_wait_s = outcome.waited_s
        exchange.prefetch_chunks = {
            "promoted": outcome.promoted,
            "pending": outcome.pending,
            "missing": outcome.missing,
        }
        exchange.prefetch_bytes = outcome.promoted_bytes
        return outcome

    def _headers(
        self, request: web.Request, decision: Decision, exchange: Exchange
    ) -> Mapping[str, str]:
        replica = self._fleet.replicas[decision.replica_id]
        return forwarded_headers(
            request.headers, request_id=exchange.request_id, api_key=replica.config.api_key
        )

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


def _note_decision(exchange: Exchange, decision: Decision) -> None:
    exchange.replica_id = decision.replica_id
    exchange.reason = str(decision.reason)
    exchange.prompt_tokens = decision.prompt_tokens
    exchange.matched_tokens = {str(tier): n for tier, n in decision.matched_tokens.items()}
    exchange.predicted_ttft_s = decision.predicted_ttft_s


def _decision_headers(
    decision: Decision, prefetched: PrefetchOutcome | None, exchange: Exchange
) -> dict[str, str]:
    headers = {
        "x-request-id": exchange.request_id,
        "x-warmroute-replica": decision.replica_id,
        "x-warmroute-reason": str(decision.reason),
        "x-warmroute-prompt-tokens": str(decision.prompt_tokens),
        "x-warmroute-predicted-ttft-ms": f"{decision.predicted_ttft_s * 1000:.1f}",
        "x-warmroute-retries": str(len(exchange.failed_tries)),
    }
    for tier in Tier:
        headers[f"x-warmroute-matched-{tier}"] = str(decision.matched_tokens.get(tier, 0))
    if prefetched is not None:
        headers["x-warmroute-prefetch"] = _prefetch_text(prefetched)
    return headers


def _prefetch_text(outcome: PrefetchOutcome) -> str:
    return (
        f"asked={outcome.asked};promoted={outcome.promoted};"
        f"pending={outcome.pending};missing={outcome.missing}"
    )


def explanation(prompt: Prompt | None, decision: Decision) -> dict[str, Any]:
    """Return a decision as JSON values, for ``POST /explain``."""
    return {
        "replica": decision.replica_id,
        "url": decision.url,
        "reason": str(decision.reason),
        "prompt_tokens": decision.prompt_tokens,
        "exact_tokens": prompt is not None and prompt.exact,
        "matched_tokens": {str(tier): n for tier, n in decision.matched_tokens.items()},
        "predicted_ttft_s": decision.predicted_ttft_s,
        "prefetch_chunks": len(decision.prefetch_keys),
        "expected_gain_s": decision.expected_gain_s,
        "candidates": list(decision.candidates),
    }
