"""What tests here share."""

import re
import socket
import threading
from contextlib import suppress
from typing import Final

from hypothesis import strategies as st

from tests.fuzz.exchange import ANSWERS_S
from tests.fuzz.json_text import nearly

_LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


def answer(body: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (kind, len(body)) + body


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
