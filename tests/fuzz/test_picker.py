"""The picker's gRPC port: calls of gateways in any order, and bytes that are not messages."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.bodies import BY_PATH
from tests.fuzz.json_text import nearly
from tests.fuzz.servers import Fleet, fleet
from tests.fuzz.streams import HEADER_NAMES, HEADER_VALUES, STREAMS
from tests.servers import missing

METHOD: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CALL_S: Final = 20.0
ODD_BYTES: Final = st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"\xff", b"0", b"-5"]))


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A picker, whose own endpoints tell what a router's do."""
    if importlib.util.find_spec("grpc_health") is None:
        missing("grpcio-health-checking")
    with fleet(Path(tmp_path_factory.mktemp("picker")), "picker") as made:
        yield made


@pytest.fixture(scope="module")
def channel(router: Fleet) -> Iterator[Any]:
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{router.ports['picker'].port}") as made:
        yield made


Headers = list[tuple[bytes, bytes]]


def _header_map(headers: Headers) -> Any:
    from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue

    values = [HeaderValue(key=name.decode("latin-1"), raw_value=value) for name, value in headers]
    return HeaderMap(headers=values)


def _headers(kind: str, headers: Headers, *, is_last: bool = False) -> Any:
    from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

    message = ext_proc.ProcessingRequest()
    getattr(message, kind).headers.CopyFrom(_header_map(headers))
    getattr(message, kind).end_of_stream = is_last
    return message


def _body(kind: str, body: bytes, *, is_last: bool) -> Any:
    from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

    message = ext_proc.ProcessingRequest()
    getattr(message, kind).body = body
    getattr(message, kind).end_of_stream = is_last
    return message


def _trailers(kind: str) -> Any:
    from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

    message = ext_proc.ProcessingRequest()
    getattr(message, kind).SetInParent()
    return message


ODD_HEADERS: Final = st.lists(
    st.tuples(
        st.sampled_from([*HEADER_NAMES, b":path", b":method", b":status", b":authority", b""]),
        st.one_of(HEADER_VALUES, ODD_BYTES),
    ),
    max_size=3,
)
REQUEST_HEADERS: Final = st.builds(
    lambda path, method, odd: [(b":path", path), (b":method", method), *odd],
    st.one_of(st.sampled_from([path.encode() for path in BY_PATH]), st.binary(max_size=12)),
    st.sampled_from([b"POST", b"POST", b"GET", b"", b"\xff"]),
    ODD_HEADERS,
)
ANSWER_HEADERS: Final = st.builds(
    lambda status, kind, odd: [(b":status", status), (b"content-type", kind), *odd],
    st.one_of(st.sampled_from([b"200", b"503", b"404"]), ODD_BYTES),
    st.sampled_from([b"text/event-stream", b"application/json", b"\xff"]),
    ODD_HEADERS,
)


@st.composite
def _messages(draw: st.DrawFn) -> list[Any]:
    """Return the messages of a whole exchange; some left out, doubled, moved or changed."""
    path = draw(st.sampled_from([*BY_PATH]))
    body = draw(st.one_of(nearly(BY_PATH[path]), st.binary(max_size=20)))
    usual: list[tuple[bytes, bytes]] = [(b":path", path.encode()), (b":method", b"POST")]
    asked = draw(st.one_of(st.just(usual), REQUEST_HEADERS))
    messages = [
        _headers("request_headers", asked, is_last=draw(st.integers(0, 9)) == 0),
        *(_body("request_body", each, is_last=last) for each, last in _parts(draw, body)),
        _headers("response_headers", draw(ANSWER_HEADERS)),
        *(_body("response_body", draw(ODD_BYTES), is_last=False) for _ in range(2)),
        _body("response_body", b'data: {"usage":{"completion_tokens":"x"}}\n\n', is_last=True),
    ]
    for _ in range(draw(st.integers(0, 3))):
        at, to = (draw(st.integers(0, len(messages))) for _ in range(2))
        match draw(st.sampled_from(["without", "twice", "moved", "trailers", "empty"])):
            case "without":
                del messages[at : at + 1]
            case "twice":
                messages[at:at] = messages[at : at + 1]
            case "moved":
                messages[to:to] = messages[at : at + 1]
            case "trailers":
                kind = draw(st.sampled_from(["request_trailers", "response_trailers"]))
                messages.insert(at, _trailers(kind))
            case "empty":
                from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

                messages.insert(at, ext_proc.ProcessingRequest())
    for each in messages[:2]:
        _tell(draw, each)
    return messages


def _parts(draw: st.DrawFn, body: bytes) -> list[tuple[bytes, bool]]:
    at = draw(st.integers(0, len(body)))
    return draw(st.sampled_from([[(body, True)], [(body[:at], False), (body[at:], True)]]))


def _tell(draw: st.DrawFn, message: Any) -> None:
    """Add what gateways send with a request: modes, endpoints, what they were told before."""
    modes = st.sampled_from([None, 0, 1, 2, 3, 4, 99])
    if (mode := draw(modes)) is not None:
        message.protocol_config.request_body_mode = mode
        message.protocol_config.response_body_mode = draw(modes) or 0
    if draw(st.integers(0, 3)) == 0:
        value = draw(st.sampled_from(["", "127.0.0.1:1", ",,", "x", ["a", 5, None], 7, {"a": 1}]))
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
            {"x-gateway-destination-endpoint-subset": value}
        )
    if draw(st.integers(0, 3)) == 0:
        served = draw(st.sampled_from(["", "127.0.0.1:1", "x"]))
        message.metadata_context.filter_metadata["envoy.lb"].update(
            {"x-gateway-destination-endpoint-served": served}
        )
    message.observability_mode = draw(st.integers(0, 5)) == 0


def exchange(channel: Any, sent: list[bytes], *, leaves_after: int | None) -> list[Any]:
    """Make a call, and end it, or leave it after N answers; return the answers.

    AssertionError for a call that does not end well, or not in time.
    """
    import grpc
    from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

    call = channel.stream_stream(
        METHOD, response_deserializer=ext_proc.ProcessingResponse.FromString
    )(iter(sent), timeout=CALL_S)
    answers = []
    try:
        for answer in call:
            answers.append(answer)
            if len(answers) == leaves_after:
                call.cancel()
    except grpc.RpcError as error:
        code = error.code()
        assert code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.INVALID_ARGUMENT), error
    return answers


@given(messages=_messages(), leaves_after=st.one_of(st.none(), st.integers(1, 3)))
def test_calls_that_are_nearly_right(
    router: Fleet, channel: Any, messages: list[Any], leaves_after: int | None
) -> None:
    sent = [each.SerializeToString() for each in messages]
    for answer in exchange(channel, sent, leaves_after=leaves_after):
        if answer.HasField("immediate_response"):
            refused = answer.immediate_response
            assert 400 <= refused.status.code < 500 or refused.status.code == 503, refused
            assert json.loads(refused.body)["error"]["message"], refused


@given(sent=st.lists(st.binary(max_size=30), max_size=3))
@example(sent=[b"\xff\xff\xff\xff"])
def test_bytes_that_are_no_message(router: Fleet, channel: Any, sent: list[bytes]) -> None:
    import grpc

    call = channel.stream_stream(METHOD)(iter(sent), timeout=CALL_S)
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        assert error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED


@given(pieces=STREAMS)
def test_what_is_no_grpc(router: Fleet, pieces: list[bytes]) -> None:
    router.ports["picker"].all_answers(b"".join(pieces))


def test_the_picker_still_picks(router: Fleet, channel: Any) -> None:
    body = json.dumps(BY_PATH["/v1/chat/completions"][0]).encode()
    headers = [(b":path", b"/v1/chat/completions"), (b":method", b"POST")]
    sent = [_headers("request_headers", headers), _body("request_body", body, is_last=True)]
    answers = exchange(channel, [each.SerializeToString() for each in sent], leaves_after=None)
    assert len(answers) == 2 and answers[1].HasField("request_body"), answers
