"""The router's own port: odd bodies, headers, paths, and what is hardly HTTP."""

import gzip
import json
import zlib
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.bodies import BY_PATH, CHAT
from tests.fuzz.exchange import Got, request
from tests.fuzz.json_text import HUGE, dump, nearly
from tests.fuzz.servers import Fleet
from tests.fuzz.streams import HEADER_NAMES, HEADER_VALUES, METHODS, SEGMENTS, STREAMS

JSON: Final = (b"Content-Type", b"application/json")
CHAT_PATH: Final = "/v1/chat/completions"
VALID: Final = dump(CHAT[0] | {"stream": False})


def check(got: Got, *, path: str = "") -> None:
    """Raise AssertionError for what a client must never get."""
    assert got.status is not None, "closed without an answer"
    assert got.status != 500, got
    assert got.status < 500 or got.status in (501, 503), got
    by_replica = got.body.startswith((b"404: ", b"405: ")) or "x-warmroute-replica" in got.headers
    if got.status >= 400 and got.body and not by_replica:
        error = got.json()["error"]
        assert isinstance(error["message"], str) and error["type"], got
        assert path.startswith("/v1/messages") or {"param", "code"} <= set(error), got


@pytest.mark.parametrize("path", BY_PATH)
@given(data=st.data())
def test_bodies_that_are_nearly_right(router: Fleet, path: str, data: st.DataObject) -> None:
    body = data.draw(nearly(BY_PATH[path]))
    if data.draw(st.booleans()):
        body = body.replace(b'"sim"', b'"other"')  # an alias of it
    check(router.api.send(request(path, body, headers=[JSON])), path=path)


@given(path=st.sampled_from([*BY_PATH]), body=st.binary(max_size=200))
def test_bodies_that_are_nothing(router: Fleet, path: str, body: bytes) -> None:
    check(router.api.send(request(path, body, headers=[JSON])), path=path)


@given(
    path=st.sampled_from([CHAT_PATH, "/v1/files", "/v1/audio/transcriptions", "/explain"]),
    method=st.sampled_from(["POST", "POST", "POST", "GET"]),
    headers=st.lists(st.tuples(st.sampled_from(HEADER_NAMES), HEADER_VALUES), max_size=4),
)
@example(path=CHAT_PATH, method="POST", headers=[(b"Content-Encoding", b"gzip")])
@example(path=CHAT_PATH, method="POST", headers=[(b"X-Request-Id", b"\xff\x00")])
def test_headers(router: Fleet, path: str, method: str, headers: list[tuple[bytes, bytes]]) -> None:
    got = router.api.send(request(path, VALID, method=method, headers=headers), closes=True)
    if got.status is not None:  # such headers may end the connection within the body
        assert got.status < 500 or got.status in (501, 503), got


@given(
    method=st.sampled_from(METHODS),
    segments=st.lists(SEGMENTS, max_size=5),
    query=st.one_of(st.none(), st.binary(max_size=30)),
)
@example(method="GET", segments=[b"v1", b"models", b"%ff"], query=None)
@example(method="OPTIONS", segments=[], query=b"*")
@example(method="POST", segments=[b"explain"], query=b"endpoint=%ff")
def test_paths(router: Fleet, method: str, segments: list[bytes], query: bytes | None) -> None:
    target = b"/" + b"/".join(segments) + (b"" if query is None else b"?" + query)
    got = router.api.send(request(target, b"{}", method=method), method=method, closes=True)
    if got.status is not None:
        assert got.status < 500 or got.status in (501, 503), got


@given(pieces=STREAMS)
@example(pieces=[b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"] * 200)
@example(pieces=[b"POST /explain HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"zz\r\n"])
def test_what_is_hardly_http(router: Fleet, pieces: list[bytes]) -> None:
    answered = router.api.all_answers(b"".join(pieces))
    assert b" 500 " not in answered, answered[-2000:]


@given(at=st.integers(0, 400), body=nearly(CHAT))
def test_clients_that_leave(router: Fleet, at: int, body: bytes) -> None:
    router.api.leave(request(CHAT_PATH, body, headers=[JSON])[:at])


def chat(content: Any) -> bytes:
    return json.dumps(
        {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    ).encode()


BOMB: Final = zlib.compress(b" " * (64 << 20), 9)

LARGE: Final[dict[str, tuple[bytes, list[tuple[bytes, bytes]]]]] = {
    "a word of a million letters": (chat("x" * HUGE), []),
    "a million words": (chat("x " * (HUGE // 2)), []),
    "a million NULs": (chat("\x00" * (HUGE // 8)), []),
    "a role of a million letters": (
        VALID.replace(b'"user"', b'"' + b"u" * HUGE + b'"'),
        [],
    ),
    "a model of a million letters": (VALID.replace(b'"sim"', b'"' + b"m" * HUGE + b'"'), []),
    "a session of a million letters": (VALID[:-1] + b',"user":"' + b"s" * HUGE + b'"}', []),
    "a million lists in each other": (b"[" * HUGE, []),
    "many objects in each other": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, []),
    "a hundred thousand messages": (
        json.dumps(
            {"model": "sim", "messages": [{"role": "user", "content": "x"}] * 60_000}
        ).encode(),
        [],
    ),
    "a hundred thousand keys": (
        json.dumps({f"key{n}_id": str(n) for n in range(100_000)}).encode(),
        [],
    ),
    "a number of a million digits": (VALID.replace(b'"max_tokens": 2', b'"n": ' + b"9" * HUGE), []),
    "token ids": (
        json.dumps({"model": "sim", "prompt": [5] * 400_000, "max_tokens": 1}).encode(),
        [],
    ),
    "a gzip bomb": (gzip.compress(b" " * (64 << 20), 9), [(b"Content-Encoding", b"gzip")]),
    "a deflate bomb": (BOMB, [(b"Content-Encoding", b"deflate")]),
    "too much": (b" " * (5 << 20), []),
}


@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/completions", "/v1/rerank", "/explain"])
@pytest.mark.parametrize("what", LARGE)
def test_large_bodies(router: Fleet, path: str, what: str) -> None:
    body, headers = LARGE[what]
    check(router.api.send(request(path, body, headers=[JSON, *headers])), path=path)


@pytest.mark.parametrize(
    "head",
    [
        b"X-Many: 1\r\n" * 30_000,
        b"X-Long: " + b"a" * HUGE + b"\r\n",
        b"Cookie: " + b"a=b; " * 100_000 + b"\r\n",
        b"Transfer-Encoding: chunked\r\n" * 50,
        b"Content-Length: 5\r\n" * 50,
    ],
    ids=["many", "long", "cookies", "encodings", "lengths"],
)
def test_floods_of_headers(router: Fleet, head: bytes) -> None:
    got = router.api.send(b"POST /v1/rerank HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
    assert got.status is None or 400 <= got.status < 500, got


def test_a_body_in_chunks_of_one_byte(router: Fleet) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in VALID * 1) + b"0\r\n\r\n"
    head = [JSON, (b"Transfer-Encoding", b"chunked")]
    got = router.api.send(request(CHAT_PATH, chunks, headers=head))
    assert got.status == 200, got


def test_a_chunk_with_an_endless_extension_is_not_kept(router: Fleet) -> None:
    head = [JSON, (b"Transfer-Encoding", b"chunked")]
    before = router.router.resident_bytes()
    got = router.api.send(request(CHAT_PATH, b"5;" + b"x" * (20 << 20), headers=head))
    assert got.status is None or got.status < 500, got
    assert router.router.resident_bytes() - before < 10 << 20


@pytest.mark.parametrize("length", [0, 5, len(VALID) - 1, len(VALID) + 1, 10**18])
def test_wrong_lengths(router: Fleet, length: int) -> None:
    got = router.api.send(request(CHAT_PATH, VALID, headers=[JSON], length=length))
    assert got.status is None or got.status < 500, got


def test_the_router_still_works(router: Fleet) -> None:
    got = router.api.send(request(CHAT_PATH, VALID, headers=[JSON]))
    assert got.status == 200 and got.json()["usage"]["completion_tokens"] == 2, got
