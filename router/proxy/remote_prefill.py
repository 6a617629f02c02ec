"""Prefill at one replica and decode at another, by vLLM's NixlConnector.

The first leg sends the prompt to the prefiller, which computes it and answers with
``kv_transfer_params``: where its KV is. The second leg is the client's request with these
parameters: its replica pulls the KV and decodes. The prefiller keeps the KV until it was pulled, or
until its lease ends.

A prefiller does not notice that the KV it lends was lent twice, and the one that pulls does not
notice that a lease has ended: it would decode from other prompts' KV. So parameters are sent to one
replica only, unless none has received them, and not after `_LEASE_S`, even if the router itself
stood still meanwhile. After any other failure the prompt is prefilled again, which costs little
where its KV still is.
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

from router.config.settings import DECODING_ROLES
from router.fleet.in_flight import Ticket
from router.fleet.replica import Replica
from router.index.prompt_keys import PromptKeyCache
from router.policy import ParsedRequest
from router.prompt.request_body import BodyBytes, off_loop, prefill_body, with_new_member
from router.proxy.first_byte_waits import FirstByteWaits
from router.proxy.lifecycle import RequestLifecycle
from router.proxy.relay import ClientAnswer, Usage, UsageReader
from router.proxy.upstream import (
    AnswerCutError,
    AttemptFailedError,
    ReplicaAnswer,
    Upstream,
    forwarded_headers,
)
from router.record.records import Cause, FirstLeg
from router.scheduling.admission import Admitted

log = logging.getLogger("warmroute.replicas")

_LEASE_S: Final = 20.0
"""vLLM keeps KV that nobody pulls for 30 s (``kv_lease_duration``); the replica that pulls renews
the lease as soon as it has the request."""
_MOST_FAILED: Final = 2
"""First legs of a request that may fail; then it is prefilled where it is decoded."""
_MOST_ANSWER_BYTES: Final = 8 << 20
"""A million tokens in blocks of 16 are about half a MiB of block ids."""
_NOT_RECEIVED: Final = (Cause.CONNECT, Cause.LOCAL)
"""Causes after which a replica has certainly not seen the second leg."""


class PrefillFailedError(AttemptFailedError):
    """The first leg failed: the fault is the prefiller's, and nothing was sent elsewhere."""


class _Answer(msgspec.Struct):
    """What counts of a first leg's answer."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw()


class _Params(msgspec.Struct):
    """What counts of ``kv_transfer_params``."""

    remote_prefill_cached_tokens: int | None = None


_ANSWER: Final = msgspec.json.Decoder(_Answer)
_PARAMS: Final = msgspec.json.Decoder(_Params)


@dataclass(frozen=True, kw_only=True)
class _Lent:
    """KV of a prompt that a prefiller keeps until one replica has pulled it."""

    params: msgspec.Raw
    prefiller: Replica
    since_s: float
    """At the earliest."""
    leg: FirstLeg
    counted_tokens: int | None
    """How many of its tokens the replica that pulls it counts as computed; None: not known."""


class RemotePrefill:
    """The first legs of one request, over all its tries."""

    def __init__(
        self,
        client: ClientAnswer,
        asked: ParsedRequest,
        *,
        upstream: Upstream,
        lifecycle: RequestLifecycle,
        waits: FirstByteWaits,
        is_keyed: bool,
    ) -> None:
        """``is_keyed``: whether the router checks clients' keys."""
        self._client = client
        self._asked = asked
        self._upstream = upstream
        self._lifecycle = lifecycle
        self._waits = waits
        self._is_keyed = is_keyed
        self._lent: _Lent | None = None
        self._failed = 0

    @property
    def is_possible(self) -> bool:
        """Whether the next try may have a first leg."""
        return self._asked.may_split and self._failed < _MOST_FAILED

    async def first_leg(self, admitted: Admitted, prompt_keys: PromptKeyCache) -> Admitted:
        """Run the first leg, if there is one; return where the request goes then.

        The caller must release the returned ticket, and awaits nothing before that is certain.
        Raises `PrefillFailedError`; then the given ticket must be released, which owns the first
        leg's.
        """
        self._client.record.first_leg = None  # of an earlier try
        ticket, leg = admitted.ticket, admitted.ticket.first_leg
        if leg is None:
            return admitted
        if self._still_lent(ticket.replica) or not self._is_pair(leg.replica, ticket.replica):
            self._lifecycle.release(leg)
            return admitted
        self._lent = await self._prefill(leg)
        return self._lifecycle.second_leg(admitted, self._asked, prompt_keys, self._client.record)

    async def body(self, ticket: Ticket) -> BodyBytes:
        """Return the body for a ticket's replica, after the `first_leg`."""
        asked, record = self._asked, self._client.record
        lent = self._still_lent(ticket.replica)
        if lent is None:
            if ticket.first_leg is not None:
                ticket.sent(time.monotonic())
            return asked.body
        record.first_leg = lent.leg
        ticket.pulls(time.monotonic(), lent.counted_tokens)
        return await off_loop(
            len(asked.body), with_new_member, asked.body, "kv_transfer_params", lent.params
        )

    def second_leg_failed(self, ticket: Ticket, failure: AttemptFailedError) -> Cause:
        """Note that the replica of a try failed; return the cause to record."""
        if not ticket.is_pulling:
            return failure.cause
        if failure.cause not in _NOT_RECEIVED:
            self._lent = None
        if failure.cause is not Cause.ERROR:
            return failure.cause
        self._failed = _MOST_FAILED
        ticket.replica.pause_nixl(time.monotonic())
        return Cause.PULL

    def _still_lent(self, replica: Replica) -> _Lent | None:
        """Return the KV that this try or an earlier one left, if a replica can pull it.

        If not, it is forgotten.
        """
        lent = self._lent
        if lent is None:
            return None
        in_time = time.monotonic() - lent.since_s <= _LEASE_S
        can_pull = replica.nixl_role in DECODING_ROLES and self._is_pair(lent.prefiller, replica)
        if not (in_time and can_pull):
            self._lent = None
        return self._lent

    def _is_pair(self, prefiller: Replica, replica: Replica) -> bool:
        """Whether one can use the other's KV: with a LoRA adapter, if both load the same."""
        model = self._asked.model or ""
        paths = (prefiller.adapters.get(model), replica.adapters.get(model))
        return prefiller is not replica and paths[0] == paths[1]

    async def _prefill(self, leg: Ticket) -> _Lent:
        began_s = time.monotonic()
        try:
            answer, usage = await self._answer(leg)
        except AttemptFailedError as failure:
            # A replica that refuses the request (4xx) or does not lend is not asked again.
            is_final = failure.cause is Cause.PREFILL
            self._failed = _MOST_FAILED if is_final else self._failed + 1
            raise PrefillFailedError(failure.cause, failure.detail, failure.answer) from failure
        self._lifecycle.prefilled(leg, usage)
        now_s = time.monotonic()
        self._client.record.prefilled(began_s)
        return _Lent(
            params=answer.kv_transfer_params,
            prefiller=leg.replica,
            since_s=max(began_s, self._lifecycle.fleet.awake_s),
            leg=FirstLeg(
                replica_id=leg.replica.id,
                seconds=now_s - began_s,
                cached_tokens=usage.cached_tokens,
            ),
            counted_tokens=_counted_tokens(answer.kv_transfer_params, usage),
        )

    async def _answer(self, leg: Ticket) -> tuple[_Answer, Usage]:
        """Have the prefiller compute the prompt; return where its KV is. Raises
        `AttemptFailedError`."""
        asked, request, record = self._asked, self._client.request, self._client.record
        replica = leg.replica
        body = await off_loop(len(asked.body), prefill_body, asked.endpoint, asked.body)
        tried = [each.replica_id for each in record.failed_tries]
        with self._waits.at(replica, model=asked.model, tried=tried, may_move=True) as wait:
            answer = await self._upstream.send(
                "POST",
                replica.config.url + request.path_qs,
                headers=self._headers(request.headers, replica, len(record.tries)),
                body=body,
                wait=wait,
                client=self._client,
                repeatable=True,
                has_model=asked.model is not None,
            )
        try:
            whole = await self._read(answer)
        finally:
            answer.close()
        found = None
        if answer.is_ok:
            with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                found = _ANSWER.decode(whole)
        if not answer.is_ok:
            raise AttemptFailedError(Cause.PREFILL, f"refused to prefill: {answer.status}")
        if found is None or not bytes(found.kv_transfer_params).startswith(b"{"):
            self._lends_nothing(replica)
            raise AttemptFailedError(
                Cause.PREFILL,
                "its answer has no kv_transfer_params: NixlConnector does not run there",
            )
        reader = UsageReader(streamed=False)
        reader.feed(whole)
        return found, reader.read()

    async def _read(self, answer: ReplicaAnswer) -> bytes:
        """Return the whole body of an answer; raise `AttemptFailedError` if it does not come."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._lifecycle.config.timeouts.stream_idle_s):
                async for chunk in answer.chunks():
                    body += chunk
                    if len(body) > _MOST_ANSWER_BYTES:
                        raise AttemptFailedError(Cause.PREFILL, "its answer is too long")
        except TimeoutError:
            raise AttemptFailedError(Cause.TIMEOUT, "its answer did not end in time") from None
        except AnswerCutError as error:
            raise AttemptFailedError(Cause.CUT, str(error)) from error
        return bytes(body)

    def _headers(
        self, sent: CIMultiDictProxy[str], replica: Replica, number: int
    ) -> CIMultiDict[str]:
        record = self._client.record
        return forwarded_headers(
            sent,
            # vLLM names the KV that it lends by this id.
            request_id=f"{record.request_id}-prefill{number}",
            api_key=replica.config.api_key,
            is_keyed=self._is_keyed,
            vllm_priority=self._asked.vllm_priority,
            traceparent=record.begin_try(replica.config.url, replica.id),
        )

    def _lends_nothing(self, replica: Replica) -> None:
        if (pause_s := replica.pause_nixl(time.monotonic())) is not None:
            log.warning(
                "%s has nixl_role '%s', but its answers have no kv_transfer_params: start its vLLM "
                "with NixlConnector, or remove nixl_role; it prefills for no other replica for "
                "%g s",
                replica.id,
                replica.config.nixl_role,
                pause_s,
            )


def _counted_tokens(params: msgspec.Raw, usage: Usage) -> int | None:
    """Return how many tokens of a prompt vLLM counts as computed by the replica that pulls it.

    With ``remote_prefill_cached_tokens`` in the params it takes those for all that was cached
    (``OutputProcessor`` of 0.32 and 0.33), without them it counts what was pulled as cached.
    """
    try:
        cached = _PARAMS.decode(params).remote_prefill_cached_tokens
    except (msgspec.MsgspecError, ValueError):
        return None
    if cached is None:
        return 0
    return None if usage.prompt_tokens is None else max(0, usage.prompt_tokens - cached)
