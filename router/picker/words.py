"""What the gateway tells, read from messages of Envoy's external processing, and what it is told.

Messages: ``envoy.service.ext_proc.v3``. Names of headers and metadata: endpoint picker protocol
1.0.0 (proposal 004 of the Gateway API Inference Extension).
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from router.envoy import DESTINATION, LB_METADATA, SERVED, SUBSET, SUBSET_METADATA
from warmroute_common.api_errors import ApiError
from warmroute_common.http_server import error_body

Message = Any
"""The generated classes have no types."""

_UNTOLD: Final = -1
_FULL_DUPLEX: Final = ProcessingMode.FULL_DUPLEX_STREAMED
_WHOLE: Final = (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL, _UNTOLD)


# --- what the gateway tells


def headers_of(told: Message) -> dict[str, str]:
    """Return the headers of an ``HttpHeaders``, names in lower case; of equal ones the last."""
    return {
        each.key: each.raw_value.decode("utf-8", "surrogateescape") or each.value
        for each in told.headers.headers
    }


def has_whole_body(request: Message) -> bool:
    """Whether the body follows these headers in one message."""
    return not request.request_headers.end_of_stream and _body_mode(request) in _WHOLE


def has_streamed_body(request: Message) -> bool:
    """Whether the body follows in parts, and each is to be sent back."""
    return not request.request_headers.end_of_stream and _body_mode(request) == _FULL_DUPLEX


def tells_answer(request: Message) -> bool:
    """Whether the answer's body will be told in this call."""
    return bool(request.protocol_config.response_body_mode != ProcessingMode.NONE)


def is_streamed_back(request: Message) -> bool:
    """Whether each part of the answer's body is to be sent back."""
    return bool(request.protocol_config.response_body_mode == _FULL_DUPLEX)


def named_endpoints(request: Message, headers: Mapping[str, str]) -> list[str] | None:
    """Return the endpoints to choose from, None where the gateway names none."""
    told = request.metadata_context.filter_metadata
    if SUBSET_METADATA in told and SUBSET in told[SUBSET_METADATA].fields:
        value = told[SUBSET_METADATA].fields[SUBSET]
        if value.HasField("list_value"):
            return [each.string_value.strip() for each in value.list_value.values]
        return listed(value.string_value)
    return listed(headers[SUBSET]) if SUBSET in headers else None


def served_endpoint(request: Message) -> str | None:
    """Return the endpoint that answered, if the gateway tells."""
    return metadata_of(request.metadata_context, LB_METADATA, SERVED)


def metadata_of(context: Message, namespace: str, key: str) -> str | None:
    """Return a text of Envoy's dynamic metadata, None where it is not there."""
    told = context.filter_metadata
    if namespace not in told or key not in (fields := told[namespace].fields):
        return None
    return str(fields[key].string_value)


def _body_mode(request: Message) -> int:
    told = request.HasField("protocol_config")
    return int(request.protocol_config.request_body_mode) if told else _UNTOLD


def listed(value: str) -> list[str]:
    """Return the endpoints of a header."""
    return [each.strip() for each in value.split(",") if each.strip()]


# --- what the gateway is told


def go_on(kind: str) -> Message:
    """Return an answer to a message of that kind that changes nothing."""
    answer = ext_proc.ProcessingResponse()
    getattr(answer, kind).SetInParent()
    return answer


def destination(kind: str, endpoints: Iterable[str], headers: Mapping[str, str]) -> Message:
    """Return where the request goes, as the answer to its headers or body (``kind``).

    ``headers`` are set on the request.
    """
    value = ",".join(endpoints)
    answer = ext_proc.ProcessingResponse()
    common = getattr(answer, kind).response
    _set_headers(common.header_mutation, {DESTINATION: value, **headers})
    common.clear_route_cache = True
    answer.dynamic_metadata.update({LB_METADATA: {DESTINATION: value}})
    return answer


def same_body(kind: str, told: Message) -> Message:
    """Return a part of a body unchanged, as parts must be that come streamed both ways."""
    answer = ext_proc.ProcessingResponse()
    same = getattr(answer, kind).response.body_mutation.streamed_response
    same.body, same.end_of_stream = told.body, told.end_of_stream
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


def refusal(path: str, error: ApiError) -> Message:
    """Return an error as the gateway's own answer, in the shape that the path's clients parse."""
    answer = ext_proc.ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = error.status
    _set_headers(immediate.headers, {"content-type": "application/json", **error.headers})
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
