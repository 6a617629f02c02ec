"""One request that a gateway carries, from its headers to the end of its answer."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from router.config.settings import DECODING_ROLES
from router.fleet.decision import Decision, Reason
from router.fleet.in_flight import Ticket
from router.fleet.replica import Replica
from router.gateway.endpoints import Endpoints
from router.index.prompt_keys import PromptKeyCache
from router.policy import ParsedRequest, Plane, endpoint_label, stores
from router.proxy.lifecycle import RequestLifecycle
from router.proxy.relay import NO_USAGE, UsageReader
from router.proxy.sse import StreamOpening, is_final
from router.proxy.upstream import RETRYABLE
from router.record.records import (
    Cause,
    FirstLeg,
    Outcome,
    RequestRecord,
    answer_headers,
    trace_context,
)
from warmroute_common.api_errors import ApiError, NoReplicaError
from warmroute_common.http_server import Bodies, request_id_from

_COPIED_BYTES: Final = 64 << 10
"""A whole answer is copied to the picker up to this size."""
_COPY_WAIT_S: Final = 0.5
"""How long an answer's copy may arrive after its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Destinations:
    """Where a request goes."""

    endpoints: tuple[str, ...]
    """The picked replica's, then those of the next best, which are tried if it fails."""
    api_key: str | None
    """Sent to all of them instead of the client's own."""
    prefiller: str | None
    """The endpoint of the replica that prefills the prompt for them; None: each does it itself."""
    vllm_priority: int
    """For their vLLMs, instead of the ``priority`` in header and body."""


class Exchange:
    """One request, from its headers to the end of its answer; `close` must be called at its end."""

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        endpoints: Endpoints,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        subset: Iterable[str] | None,
        sees_tokens: bool,
        gets_copies: bool,
    ) -> None:
        """``headers`` is looked up by names in lower case; ``path`` is raw, with its query.

        ``subset`` are the endpoints to choose from, None for all. ``sees_tokens``: whether the
        first bytes of a streamed answer will be seen. ``gets_copies``: whether they come by
        `copied`, that is in a call of their own.
        """
        self.method = method
        raw_path = path.partition("?")[0]
        self.path = unquote(raw_path)
        self.record = RequestRecord(
            request_id=request_id_from(headers.get("x-request-id")),
            client=headers.get("x-forwarded-for", "").rpartition(",")[2].strip() or None,
            method=self.method,
            endpoint=endpoint_label(self.path),
            path=raw_path,
            trace=trace_context(headers.get("traceparent"), _sample_ratio(lifecycle)),
            started_s=time.monotonic(),
        )
        self._lifecycle = lifecycle
        self._endpoints = endpoints
        self._headers = headers
        self._subset = subset
        self._sees_tokens = sees_tokens
        self._gets_copies = gets_copies
        self._asked: tuple[ParsedRequest, PromptKeyCache] | None = None
        """Until the answer begins: another replica than the picked one may give it."""
        self._ticket: Ticket | None = None
        self._replica: Replica | None = None
        self._picked_s = 0.0
        self._streamed = False
        self._opening = StreamOpening()
        self._has_failed = False
        """Whether the answer is, or begins with, an error of the replica."""
        self._was_moved = False
        """Whether another replica than the picked one answers."""
        self._has_headers = asyncio.Event()
        self._is_copied = asyncio.Event()
        self._reader: UsageReader | None = None

    # --- the request

    async def pick(self, body: bytes, bodies: Bodies) -> Destinations:
        """Return where the request goes, once it may go; raise `ApiError`.

        What is parsed of ``body`` counts in ``bodies`` until the prompt has been read.
        """
        await self._lifecycle.one_per_tick.enter()
        policy = self._lifecycle.policy
        self.record.is_admitted = False
        policy.check(Plane.GATEWAY, self.method, self.path, self._headers)
        self.record.is_admitted = True
        asked = await self._lifecycle.parse(
            Plane.GATEWAY, self.method, self.path, self._headers, body, record=self.record
        )
        with bodies.holding(asked.parsed_bytes):
            prompt_keys = await self._lifecycle.read(asked, self.record)
        among = self._endpoints.eligible(self._subset)
        if among is not None and not among:
            raise NoReplicaError("none of the endpoints in the gateway's subset is a replica")
        admitted = await self._lifecycle.admit(
            asked,
            prompt_keys,
            self.record,
            among=among,
            sees_tokens=self._sees_tokens,
            may_split=asked.may_split,
        )
        self._ticket, self._asked = admitted.ticket, (asked, prompt_keys)
        self._replica = admitted.decision.picked.replica
        await self._lifecycle.prepare(admitted, self.record)
        self._picked_s = time.monotonic()
        prefiller = self._first_leg(admitted.ticket)
        return self._destinations(admitted.decision, asked, prefiller)

    def _first_leg(self, ticket: Ticket) -> Replica | None:
        """Return the replica that prefills the prompt; the sidecar sends both legs."""
        if (leg := ticket.first_leg) is None:
            return None
        if self._endpoints.known(leg.replica) is None:
            self._lifecycle.release(leg)
            ticket.sent(self._picked_s)
            return None
        ticket.pulls(self._picked_s)
        self.record.first_leg = FirstLeg(
            replica_id=leg.replica.id, seconds=None, cached_tokens=None
        )
        return leg.replica

    def _destinations(
        self, decision: Decision, asked: ParsedRequest, prefiller: Replica | None
    ) -> Destinations:
        """Return the decision's replica and the next best, by their scores.

        Last come the replicas that get no requests now. They may be up again when the picked one
        fails, and the gateway does not ask for more destinations then.
        """
        most = self._lifecycle.policy.replicas(asked)
        picked, weights = decision.picked, self._lifecycle.fleet.weights
        api_key = picked.replica.config.api_key
        ranked = sorted(decision.candidates, key=lambda each: each.score_s(weights))
        others = [
            each
            for each in (*(candidate.replica for candidate in ranked), *decision.away)
            if each is not picked.replica and each.config.api_key == api_key
            # The header is the same for all of them.
            if prefiller is None or each.nixl_role in DECODING_ROLES
            if each is not prefiller
            if each.stall is None  # the client would wait for it, instead of being told
            if decision.reason is not Reason.BOUND
        ]
        found = [self._endpoints.known(each) for each in (picked.replica, *others)]
        known = [each for each in found if each is not None][:most]
        return Destinations(
            endpoints=tuple(known),
            api_key=api_key,
            prefiller=None if prefiller is None else self._endpoints.known(prefiller),
            vllm_priority=asked.vllm_priority,
        )

    # --- the answer

    async def answered(
        self, headers: Mapping[str, str], served: str | None, *, is_last: bool
    ) -> dict[str, str]:
        """Note the headers of the answer; return those to be added.

        ``served`` is the endpoint that gave it, None where the gateway does not say.
        """
        value = headers.get(":status", "")
        status = int(value) if value.isascii() and value.isdecimal() else 0
        try:
            await self._note_status(status, served)
            self._streamed = headers.get("content-type", "").startswith("text/event-stream")
            self._reader = UsageReader(
                streamed=self._streamed, any_id=stores(self.method, self.path)
            )
            # What is encoded cannot be read: it has begun with its first byte.
            self._opening.has_begun = "content-encoding" in headers
            if self._is_ok and not self._streamed:
                self._began(time.monotonic())
        finally:
            self._has_headers.set()
        if is_last:
            self.ended()
        return answer_headers(self.record, is_tenant=bool(self._lifecycle.config.access.keys))

    def came(self, part: bytes, *, is_last: bool) -> None:
        """Note a part of the answer's body."""
        if part and self._streamed and self._is_ok and self.record.first_byte_s is None:
            if not self._opening.has_begun:
                self._opening.feed(part)
            error = self._opening.error
            if error is not None and error.is_servers:
                self._note_failure(
                    RETRYABLE.get(error.status, Cause.ERROR),
                    f"its stream began with an error ({error.status})",
                )
            elif self._opening.has_begun:
                self._began(time.monotonic())
        if self._reader is not None:
            self._reader.feed(part)
        self.record.response_bytes += len(part)
        # Clients may close as soon as they have read the last event.
        if is_last or (self._streamed and self._is_ok and is_final(part)):
            self.record.end(Outcome.OK)

    async def copied(self, part: bytes, *, is_last: bool) -> bool:
        """Note a part that comes in a call of its own; return whether the next one is wanted."""
        await self._has_headers.wait()  # the copy may be faster than the reply to the headers
        self.came(part, is_last=is_last)
        has_token = self._streamed and (self._opening.has_begun or not self._is_ok)
        wants_more = not (is_last or has_token) and self.record.response_bytes < _COPIED_BYTES
        if not wants_more:
            self._is_copied.set()
        return wants_more

    def ended(self) -> None:
        """Note that the whole answer has been sent."""
        self.record.end(Outcome.OK)
        self._is_copied.set()

    async def copy_read(self) -> None:
        """Wait for the copy of an answer that has ended: the two calls may overtake each other."""
        if self._gets_copies and self._is_ok:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_copied.wait(), _COPY_WAIT_S)

    @property
    def is_picked(self) -> bool:
        """Whether the request has gone to a replica."""
        return self._ticket is not None

    @contextmanager
    def noting_end(self) -> Iterator[None]:
        """Note when the call for the request ends and, where no replica was picked, why.

        How an answer ended is known once all of it has passed: `close` notes the rest.
        """
        ended: BaseException | None = None
        with self._lifecycle.noting_end(self.record):
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
        self._has_headers.set()  # a copy's call must not wait for headers that never come
        record, ticket = self.record, self._ticket
        record.end(Outcome.CLIENT_GONE if record.status is None else Outcome.ENDED)
        if ticket is not None and record.status is None:
            self._lifecycle.release(ticket)
        elif ticket is not None:
            if self._is_ok:
                # Its first token was not seen: it did begin, but it is not known when.
                ticket.first_byte(time.monotonic(), streamed=False)
            usage = NO_USAGE if self._reader is None else self._reader.read()
            self._lifecycle.finish(ticket, record, usage, ok=self._is_ok)
        self._lifecycle.publish(record)

    @property
    def _is_ok(self) -> bool:
        status = self.record.status
        return status is not None and 0 < status < 400 and not self._has_failed

    def _began(self, began_s: float) -> None:
        if self._ticket is not None:
            if (leg := self._ticket.first_leg) is not None:
                self._lifecycle.prefilled(leg, NO_USAGE)
            lag_s = self._picked_s - self._ticket.started_s - self.record.prepared.waited_s
            # Where the gateway asked another replica, it is not known when: that teaches nothing.
            self._lifecycle.began(
                self._ticket,
                self.record,
                began_s=began_s,
                streamed=self._streamed and not self._was_moved,
                lag_s=lag_s,
            )

    async def _note_status(self, status: int, served: str | None) -> None:
        await self._note_served(served)
        self._asked = None
        record = self.record
        record.status = status
        if (cause := RETRYABLE.get(status)) is not None:
            if self._was_moved and cause is not Cause.BUSY:
                cause = Cause.GATEWAY  # the answer may be the gateway's own
            self._note_failure(cause, f"answered {status}")

    def _note_failure(self, cause: Cause, detail: str) -> None:
        """Note that the replica failed, although its answer goes to the client."""
        self._has_failed = True
        if self._ticket is not None:
            self._lifecycle.failed(self._ticket, self.record, cause, detail)

    async def _note_served(self, served: str | None) -> None:
        """Move the request to the replica that answers, where that is not the picked one."""
        replica = None if served is None else self._endpoints.at(served)
        ticket = self._ticket
        # By replica, not by id: it may have got its name since it was picked.
        if replica is None or replica is self._replica or ticket is None or self._asked is None:
            return
        self._ticket, self._was_moved = None, True
        detail = f"the gateway then tried {replica.id}"
        self._lifecycle.failed(ticket, self.record, Cause.GATEWAY, detail)
        self._lifecycle.release(ticket)
        asked, prompt_keys = self._asked
        try:
            admitted = await self._lifecycle.admit(
                asked, prompt_keys, self.record, among=(replica.id,), sees_tokens=self._sees_tokens
            )
        except ApiError:
            return  # it is believed to be down, and yet it answers: it is not counted
        self._ticket, self._replica = admitted.ticket, replica
        self._picked_s = admitted.ticket.started_s


def _sample_ratio(lifecycle: RequestLifecycle) -> float | None:
    tracing = lifecycle.config.tracing
    return None if tracing is None else tracing.sample_ratio
