"""The messages of Envoy's external processing protocol (``envoy.service.ext_proc.v3``).

Header and metadata names are those of endpoint picker protocol 1.0.0 (proposal 004 of the Gateway
API Inference Extension).
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, Final, TypeVar

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from google.protobuf.message import DecodeError
from grpc import aio

from router.gateway.envoy_config import (
    DESTINATION,
    EXCHANGE,
    LB_METADATA,
    MAX_RETRIES,
    OWN_METADATA,
    SERVED,
    SUBSET,
    SUBSET_METADATA,
)
from router.policy import PREFILLER_HEADER
from warmroute_common.api_errors import ApiError
from warmroute_common.http_server import error_body

T = TypeVar("T")

Message = Any
"""The generated classes have no types."""

_UNKNOWN_MODE: Final = -1
_FULL_DUPLEX: Final = ProcessingMode.FULL_DUPLEX_STREAMED
_WHOLE: Final = (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL, _UNKNOWN_MODE)
_ENDED: Final = "the gateway has ended the request"


class GatewayCall:
    """The messages of one gRPC call; `close` must be called at its end."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._reading: asyncio.Task[Message | None] | None = None
        """A read that `unless_ended` began."""
        self.is_broken = False
        """Whether a message came that is not one of the protocol: the call ends there."""

    def metadata(self, name: str) -> str | None:
        """Return a value of the call's gRPC metadata."""
        found = dict(self._context.invocation_metadata() or ())
        value = found.get(name)
        return None if value is None else str(value)

    async def read(self) -> Message | None:
        """Return the next message, None at the call's end."""
        reading, self._reading = self._reading, None
        return await (self._next() if reading is None else reading)

    async def _next(self) -> Message | None:
        try:
            message = await self._context.read()
        except DecodeError:
            self.is_broken = True
            return None
        if message is aio.EOF:
            return None
        if message.WhichOneof("request") is None:
            self.is_broken = True
            return None
        return message

    async def must_read(self, *kinds: str) -> Message:
        """Return the next message, which must be one of these kinds.

        Raises ConnectionResetError otherwise: the gateway has ended the call, or answers the
        request itself, for instance because its body is too large.
        """
        message = await self.read()
        if message is None or message.WhichOneof("request") not in kinds:
            raise ConnectionResetError(_ENDED)
        return message

    async def write(self, message: Message) -> None:
        """Send a message."""
        await self._context.write(message)

    async def unless_ended(self, picking: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns; raise ConnectionResetError if the call ends before.

        When a client leaves, its gateway ends the call, and the request must not be held any
        longer. The whole request has been read, so any message means that the gateway answers it
        itself.
        """
        task = asyncio.create_task(picking)
        self._reading = asyncio.create_task(self._next())
        try:
            await asyncio.wait({task, self._reading}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ConnectionResetError(_ENDED)
            return task.result()
        finally:
            # Also for a task that is done: the call may be cancelled before its error is read.
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        """Stop waiting for messages."""
        if self._reading is not None:
            self._reading.cancel()


# --- what the gateway sends


def headers_of(sent: Message) -> dict[str, str]:
    """Return the headers of an ``HttpHeaders``, names in lower case; the last of equal ones."""
    return {
        each.key: each.raw_value.decode("utf-8", "surrogateescape") or each.value
        for each in sent.headers.headers
    }


def has_whole_body(request: Message) -> bool:
    """Whether the body follows these headers in one message."""
    return not request.request_headers.end_of_stream and _body_mode(request) in _WHOLE


def has_streamed_body(request: Message) -> bool:
    """Whether the body follows in parts, each of which must be sent back."""
    return not request.request_headers.end_of_stream and _body_mode(request) == _FULL_DUPLEX


def sends_answer(request: Message) -> bool:
    """Whether the answer's body will be sent in this call."""
    return bool(request.protocol_config.response_body_mode != ProcessingMode.NONE)


def wants_answer_back(request: Message) -> bool:
    """Whether each part of the answer's body must be sent back."""
    return bool(request.protocol_config.response_body_mode == _FULL_DUPLEX)


def subset(request: Message) -> list[str] | None:
    """Return the endpoints to choose from, None where the gateway gives no subset.

    Only metadata count, which the gateway sets. A header could be the client's.
    """
    metadata = request.metadata_context.filter_metadata
    if SUBSET_METADATA not in metadata or SUBSET not in metadata[SUBSET_METADATA].fields:
        return None
    value = metadata[SUBSET_METADATA].fields[SUBSET]
    if value.HasField("list_value"):
        return [each.string_value.strip() for each in value.list_value.values]
    return [each.strip() for each in value.string_value.split(",") if each.strip()]


def served_endpoint(request: Message) -> str | None:
    """Return the endpoint that answered, if the gateway says so."""
    return _metadata_of(request, LB_METADATA, SERVED)


def exchange_name(request: Message) -> str | None:
    """Return the name of the exchange whose answer this is a part of."""
    return _metadata_of(request, OWN_METADATA, EXCHANGE)


def _metadata_of(request: Message, namespace: str, key: str) -> str | None:
    metadata = request.metadata_context.filter_metadata
    if namespace not in metadata or key not in (fields := metadata[namespace].fields):
        return None
    return str(fields[key].string_value)


def _body_mode(request: Message) -> int:
    is_known = request.HasField("protocol_config")
    return int(request.protocol_config.request_body_mode) if is_known else _UNKNOWN_MODE


# --- what the picker sends


def unchanged(kind: str) -> Message:
    """Return an answer to a message of that kind that changes nothing."""
    answer = ext_proc.ProcessingResponse()
    getattr(answer, kind).SetInParent()
    return answer


def destination(
    kind: str, endpoints: Iterable[str], headers: Mapping[str, str], exchange: str
) -> Message:
    """Return where the request goes, as the answer to its headers or body (``kind``).

    ``headers`` are set on the request; ``exchange`` is the name for `exchange_name`.
    """
    listed = list(endpoints)
    value = ",".join(listed)
    answer = ext_proc.ProcessingResponse()
    common = getattr(answer, kind).response
    retries = str(len(listed) - 1)
    _set_headers(common.header_mutation, {DESTINATION: value, MAX_RETRIES: retries, **headers})
    if PREFILLER_HEADER not in headers:
        common.header_mutation.remove_headers.append(PREFILLER_HEADER)  # the client's
    common.clear_route_cache = True
    answer.dynamic_metadata.update(
        {LB_METADATA: {DESTINATION: value}, OWN_METADATA: {EXCHANGE: exchange}}
    )
    return answer


def same_body(kind: str, sent: Message) -> Message:
    """Return a part of a body unchanged, as each part in full-duplex mode must be."""
    answer = ext_proc.ProcessingResponse()
    same = getattr(answer, kind).response.body_mutation.streamed_response
    same.body, same.end_of_stream = sent.body, sent.end_of_stream
    return answer


def whole_body(parts: Iterable[Message]) -> bytes:
    """Return the body whose parts these `same_body` of a request are."""
    bodies = (each.request_body.response.body_mutation for each in parts)
    return b"".join(each.streamed_response.body for each in bodies)


def answer_headers(headers: Mapping[str, str]) -> Message:
    """Return what is added to the answer's headers."""
    answer = ext_proc.ProcessingResponse()
    _set_headers(answer.response_headers.response.header_mutation, headers)
    return answer


def refusal(path: str, error: ApiError, request_id: str) -> Message:
    """Return an error as the gateway's own answer, in the shape that the path's clients parse."""
    answer = ext_proc.ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = error.status
    own = {"content-type": "application/json", "x-request-id": request_id}
    _set_headers(immediate.headers, {**own, **error.headers})
    immediate.body = error_body(path, error)
    immediate.details = f"warmroute_{error.code or error.status}"
    return answer


def _set_headers(mutation: Message, headers: Mapping[str, str]) -> None:
    mutation.set_headers.extend(
        HeaderValueOption(
            header=HeaderValue(
                key=name.lower(), raw_value=value.encode("utf-8", "surrogateescape")
            ),
            append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name, value in headers.items()
    )
