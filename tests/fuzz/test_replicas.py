"""Replicas that answer anything: the router stays as it is."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cacheengine.launch.vllm_launch import free_ports
from tests.fuzz.bodies import CHAT
from tests.fuzz.exchange import ANSWERS_S, Port, request
from tests.fuzz.json_text import dump, nearly
from tests.fuzz.servers import Server, running

JSON: Final = (b"Content-Type", b"application/json")
CHAT_PATH: Final = "/v1/chat/completions"
_LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


def answer(body: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (kind, len(body)) + body


MODELS: Final = answer(b'{"object":"list","data":[{"id":"sim","object":"model"}]}')
WELL: Final = answer(b"")


class Odd:
    """A server that sends what it is told to, byte for byte, and closes."""

    def __init__(self) -> None:
        self.says: dict[str, bytes] = {}
        """By path; what begins with no such path is answered by ``""``."""
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.asked = threading.Semaphore(0)
        """Released when anything but ``/health`` was answered."""
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(ANSWERS_S)
            data = b""
            while b"\r\n\r\n" not in data:
                if not (piece := connection.recv(65536)):
                    return
                data += piece
            head, _, body = data.partition(b"\r\n\r\n")
            length = int(found[1]) if (found := _LENGTH.search(head)) else 0
            while len(body) < length and (piece := connection.recv(65536)):
                body += piece
            path = head.split(b" ", 2)[1].decode().partition("?")[0]
            connection.sendall(self.says.get(path, self.says.get("", b"")))
            if path != "/health":
                self.asked.release()


@contextmanager
def routing(directory: Path, **replica: Any) -> Iterator[tuple[Server, Port]]:
    (port,) = free_ports(1)
    config = {
        "port": port,
        "replicas": [replica],
        "timeouts": {"health_interval_s": 0.05, "first_byte_s": 2.0, "drain_s": 1.0},
    }
    path = directory / "router.yaml"
    path.write_text(json.dumps(config))
    argv = ("-m", "router", "serve", "--config", str(path))
    url = f"http://127.0.0.1:{port}/health"
    with running(directory / "router.log", *argv, url=url) as server:
        yield server, Port("127.0.0.1", port)


@pytest.fixture(scope="module")
def odd() -> Iterator[Odd]:
    made = Odd()
    made.says = {"/health": WELL, "/v1/models": MODELS}
    yield made
    made.close()


@pytest.fixture(scope="module")
def before_odd(odd: Odd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Port]]:
    with routing(tmp_path_factory.mktemp("odd"), url=odd.url, instance_id="odd") as made:
        yield made


@pytest.fixture(autouse=True)
def clean(before_odd: tuple[Server, Port]) -> Iterator[None]:
    yield
    server, port = before_odd
    server.check()
    got = port.send(request("/metrics", method="GET"), method="GET")
    assert b"warmroute_in_flight" in got.body
    assert not re.search(rb"^warmroute_in_flight\{[^}]*\} [1-9]", got.body, re.M), got.body


CHUNK: Final = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}],
    "usage": {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
}
EVENTS: Final = st.lists(
    st.one_of(
        nearly([CHUNK]).map(lambda text: b"data: " + text + b"\n\n"),
        st.sampled_from(
            [
                *(b"data: [DONE]\n\n", b"event: error\n", b"\n\n", b"\r\n", b":\n\n", b"data:"),
                *(b'"usage":{', b'"usage":{"completion_tokens":1e999}', b'"id":"' + b"x" * 300),
                *(b"\xff\xfe", b"data: " + b"x" * 100_000 + b"\n\n", b"\x00" * 10),
            ]
        ),
    ),
    max_size=5,
).map(b"".join)
STATUS: Final = st.sampled_from(
    [
        *(b"HTTP/1.1 200 OK", b"HTTP/1.1 200", b"HTTP/1.0 200 OK", b"HTTP/1.1 500 x"),
        *(b"HTTP/1.1 404 Not Found", b"HTTP/1.1 429 x", b"HTTP/1.1 503 x", b"HTTP/1.1 999 x"),
        *(b"HTTP/1.1 099 x", b"HTTP/1.1 -1 x", b"HTTP/1.1 100 Continue", b"HTTP/1.1 204 x"),
        *(b"HTTP/1.1 304 x", b"HTTP/1.1 101 x", b"HTTP/2 200", b"ICY 200 OK", b"", b"\xff\xff"),
        *(b"HTTP/1.1 200 \xff\xff", b"HTTP/1.1 302 x\r\nLocation: http://[", b"HTTP/1.1 1e2 x"),
    ]
)
HEADERS: Final = st.lists(
    st.sampled_from(
        [
            *(b"Content-Type: text/event-stream", b"Content-Type: application/json", b"X: \xff"),
            *(b"Content-Type: \xff/\x00", b"Content-Type:", b"Content-Length: 5", b"NoColon"),
            *(b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Connection: close"),
            *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Content-Encoding: gzip"),
            *(
                b"X-Long: " + b"a" * 20_000,
                b": x",
                b"X: y\r\n z",
                b"Set-Cookie: \x00",
                b"Keep-Alive",
            ),
            *(b"Connection: content-type, x", b"X-Warmroute-Replica: other", b"Trailer: X"),
            *(b"Content-Type: text/event-stream; charset=\xff", b"Retry-After: never", b"X: \x01"),
        ]
    ),
    max_size=4,
)
ANSWERS: Final = st.one_of(
    st.builds(
        lambda status, headers, body: b"\r\n".join([status, *headers]) + b"\r\n\r\n" + body,
        STATUS,
        HEADERS,
        EVENTS,
    ),
    EVENTS.map(lambda body: answer(body, b"text/event-stream")),
    nearly([CHUNK]).map(answer),
    st.binary(max_size=60),
)


CHUNKED: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@given(says=ANSWERS, body=st.sampled_from(CHAT))
@example(says=b"HTTP/1.1 200 OK\r\n" + b"X-Many: 1\r\n" * 100_000, body=CHAT[0])
@example(says=b"HTTP/1.1 200 OK\r\nX: " + b"a" * 10_000_000, body=CHAT[0])
@example(says=b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, body=CHAT[0])
@example(
    says=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;" + b"x" * 10**7, body=CHAT[0]
)
def test_answers_that_are_hardly_http(
    odd: Odd, before_odd: tuple[Server, Port], says: bytes, body: Any
) -> None:
    odd.says[CHAT_PATH] = says
    got = before_odd[1].send(request(CHAT_PATH, dump(body), headers=[JSON]))
    assert b"the router failed" not in got.body, got


PROBED: Final = ("/health", "/v1/models", "/version", "/kv_event_sources", "/metrics", "/tokenize")
_MODEL: Final = {"object": "list", "data": [{"id": "sim", "root": "/x", "max_model_len": 5}]}
_SOURCES: Final = {"0": {"enable_kv_cache_events": True, "endpoint": "tcp://*:5", "topic": "x"}}
METRICS: Final = (
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="5",engine="0"} 1.0\n'
    b"vllm:num_requests_running 1\n"
)
PROBES: Final = st.one_of(
    ANSWERS,
    nearly([_MODEL, _SOURCES, {"version": "0.32.0"}, {"count": 1, "tokens": [5]}]).map(answer),
    st.sampled_from([METRICS, METRICS.replace(b"5", b"x"), METRICS.replace(b'"', b"")]).map(answer),
)


@given(path=st.sampled_from(PROBED), says=PROBES)
def test_what_is_asked_of_a_replica_is_answered_oddly(
    odd: Odd, before_odd: tuple[Server, Port], path: str, says: bytes
) -> None:
    usual = dict(odd.says)
    odd.says[path] = says
    try:
        odd.asked.acquire(timeout=0.1)  # of some it is asked all the time, of others seldom
        got = before_odd[1].send(request("/v1/models", method="GET"), method="GET")
        assert b"the router failed" not in got.body, got
    finally:
        odd.says = usual
