"""What tests here share."""

from typing import Final

from hypothesis import strategies as st

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


HEADER_NAMES: Final = (
    *(b"X-Session-Id", b"X-Request-Id", b"X-Warmroute-Max-Wait-S", b"Authorization", b"X-Api-Key"),
    *(b"Content-Type", b"Content-Encoding", b"Transfer-Encoding", b"Content-Length", b"Expect"),
    *(b"Accept", b"Origin", b"Traceparent", b"Connection", b"Upgrade", b"TE", b"Cookie", b"Host"),
    *(b"Access-Control-Request-Method", b"X-Forwarded-For", b"Range", b"Sec-WebSocket-Key"),
)


HEADER_VALUES: Final = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            *(
                b"",
                b"nan",
                b"-1",
                b"1e400",
                b"inf",
                b"gzip",
                b"deflate",
                b"br",
                b"zstd",
                b"gzip, x",
            ),
            *(b"chunked", b"chunked, chunked", b"identity", b"100-continue", b"websocket", b"\xff"),
            *(b"Bearer ", b"Bearer \xc3\xa4", b"close, x-session-id", b"multipart/form-data"),
            *(b"multipart/form-data; boundary=", b'multipart/form-data; boundary="\xff"'),
            *(b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"a" * 7000, b"0", b"+5", b"5, 5"),
        ]
    ),
)


SEGMENTS: Final = st.one_of(
    st.text(max_size=12).map(lambda text: text.encode(errors="surrogatepass")),
    st.sampled_from(
        [
            *(
                b"v1",
                b"models",
                b"files",
                b"..",
                b".",
                b"",
                b"%2e%2e",
                b"%00",
                b"%ff",
                b"%",
                b"%zz",
            ),
            *(b"a" * 3000, b"\xff\xfe", b"*", b"//", b"?a=b", b"#x", b";x", b"chat%2Fcompletions"),
            *(b"health", b"metrics", b"explain", b"ui", b"replicas", b"@host", b"http://x/"),
        ]
    ),
)


LINES: Final = st.sampled_from(
    [
        *(
            b"POST /v1/chat/completions HTTP/1.1\r\n",
            b"GET /health HTTP/1.1\r\n",
            b"GET / HTTP/9\r\n",
        ),
        *(b"Host: x\r\n", b"Content-Length: 5\r\n", b"Content-Length: -5\r\n", b": x\r\n", b"\r\n"),
        *(b"Content-Length: 99999999999999999999\r\n", b"Transfer-Encoding: chunked\r\n", b"\n"),
        *(
            b"5\r\nhello\r\n",
            b"0\r\n\r\n",
            b"fffffffffffffffff\r\n",
            b"-1\r\n",
            b"5;x=y\r\nhello\r\n",
        ),
        *(b"{}", b"\x00", b"\xff" * 20, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02"),
        *(b"X: " + b"a" * 9000 + b"\r\n", b"X: y\r\n z\r\n", b"X\r\n", b"Expect: 100-continue\r\n"),
        *(
            b"Upgrade: h2c\r\nConnection: Upgrade\r\n",
            b"CONNECT a:1 HTTP/1.1\r\n",
            b"Trailer: X\r\n",
        ),
    ]
)


STREAMS: Final = st.lists(st.one_of(LINES, LINES, st.binary(max_size=20)), max_size=12)
