"""Sending a request to one replica: headers, connection, first content, the rest of the answer.

aiohttp's exceptions are mapped here, once: to `AttemptFailedError` (no content of the answer was
seen, so another replica may be asked) and `AnswerCutError` (the answer had begun). A cancelled
call closes its connection, which tells the replica that its answer is no longer wanted.
"""

import asyncio
import re
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

import aiohttp
import orjson
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from router.config.settings import TimeoutsConfig
from router.policy import PREFILLER_HEADER
from router.priority import VLLM_PRIORITY_HEADER
from router.prompt.request_body import BodyBytes
from router.proxy.sse import StreamOpening
from router.record.records import Cause
from warmroute_common.admin_token import HEADER as ADMIN_HEADER
from warmroute_common.config_reader import describe
from warmroute_common.connection_errors import connection_problem, is_exhausted, is_unresolved

_SWITCHING_PROTOCOLS: Final = 101
RETRYABLE: Final = MappingProxyType(
    {
        429: Cause.BUSY,
        500: Cause.ERROR,
        502: Cause.STATUS,
        503: Cause.STATUS,
        504: Cause.STATUS,
    }
)
"""Statuses of a replica that could not answer, where another may."""
_LARGE_BODY_BYTES: Final = 1 << 20
"""A larger body is written piece by piece."""
_WRITTEN_BYTES: Final = 64 << 10

_KEEPALIVE_S: Final = 3.0
"""Shorter than the 5 s after which vLLM's server closes an idle connection, so that no request is
sent into a connection that is being closed."""
_FAILURE_BODY_BYTES: Final = 64 << 10
_DEFAULT_TIMEOUT_S: Final = 30.0
_OWN_HEADERS: Final = ("x-warmroute-", "access-control-")
"""Prefixes of headers that only the router sets: about the request, and for CORS."""

_CONTROLS: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# The client's Host names the router, and aiohttp has decoded the body (Content-Encoding), so
# its length has changed.
_NOT_FORWARDED: Final = _HOP_BY_HOP | {
    *("host", "content-length", "content-encoding", "expect", ADMIN_HEADER.lower()),
    *(PREFILLER_HEADER, VLLM_PRIORITY_HEADER),
}


class AttemptFailedError(Exception):
    """A replica gave no answer that could be passed on; another may be tried."""

    def __init__(self, cause: Cause, detail: str, answer: web.Response | None = None) -> None:
        super().__init__(cause, detail)
        self.cause = cause
        self.detail = detail
        self.answer = answer
        """The replica's error answer, for the client if no other replica is left."""

    @property
    def retry_after_s(self) -> float | None:
        """The replica's ``Retry-After``, if it is in seconds."""
        header = "" if self.answer is None else self.answer.headers.get("Retry-After", "")
        return float(header) if header.isascii() and header.isdecimal() else None


class AnswerCutError(Exception):
    """The replica's answer broke off after it had begun."""


class Wait:
    """A request's wait for its answer's first byte, which may be given up early."""

    def __init__(self) -> None:
        self.failure: AttemptFailedError | None = None
        """Why the wait was given up."""
        self._bound: asyncio.Timeout | None = None

    def within(self, seconds: float | None) -> asyncio.Timeout:
        """Return the timeout of the wait; enter it at once. None for no limit."""
        self._bound = asyncio.timeout(0.0 if self.failure is not None else seconds)
        return self._bound

    def give_up(self, failure: AttemptFailedError) -> None:
        """End the wait. Does nothing if it has ended."""
        if self.failure is None:
            self.failure = failure
            if self._bound is not None and not self._bound.expired():
                self._bound.reschedule(asyncio.get_running_loop().time())

    def end(self) -> None:
        """Note that the wait is over: `give_up` has no effect from now on."""
        self._bound = None


class ReplicaAnswer:
    """A replica's answer that has begun: its status, headers and first content have arrived."""

    def __init__(
        self, response: aiohttp.ClientResponse, first: bytes, *, sent_s: float, headers_s: float
    ) -> None:
        self.status = response.status
        self.is_ok = response.status < 400
        """Whether the status is a success."""
        self.headers = kept_headers(response.headers)
        self.streamed = _is_streamed(response)
        self.has_events = _has_events(response)
        """Whether the body is a stream of events that can be read."""
        self.began_s = time.monotonic() if self.streamed else headers_s
        """When it began, for TTFT: its first content if it is streamed, else its headers."""
        self.sent_s = sent_s
        """When the request was written."""
        self._response = response
        self._first = first

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body's bytes as they arrive; raise `AnswerCutError` if they break off."""
        if self._first:
            yield self._first
        try:
            while chunk := await self._response.content.readany():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise AnswerCutError(describe(error)) from error

    async def read_start(self) -> bytes:
        """Return as much of the body as an error may have; empty if it breaks off."""
        body = bytearray()
        with suppress(AnswerCutError):
            async with aclosing(self.chunks()) as chunks:
                async for chunk in chunks:
                    body += chunk
                    if len(body) >= _FAILURE_BODY_BYTES:
                        break
        return bytes(body)

    def cut(self, why: str) -> None:
        """End `chunks` as if the replica had broken off."""
        self._response.content.set_exception(TimeoutError(why))

    def close(self) -> None:
        """Close the connection, unless the answer was read whole and the pool has it back."""
        self._response.close()


def _is_streamed(response: aiohttp.ClientResponse) -> bool:
    return response.content_type == "text/event-stream"


def _has_events(response: aiohttp.ClientResponse) -> bool:
    return _is_streamed(response) and "Content-Encoding" not in response.headers


class KeepAlives(Protocol):
    """Takes what a replica sends before its answer begins, so that no connection looks idle."""

    async def keep_alive(self, status: int, headers: CIMultiDict[str], events: bytes) -> None:
        """Pass on keep-alives; must not raise if the client has left."""


class _Body(aiohttp.Payload):
    """A request's body, which notes when it is written."""

    sent_s: float | None = None

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        """Write the body; called by aiohttp."""
        self.sent_s = time.monotonic()
        await super().write_with_length(writer, content_length)


class _SmallBody(_Body, aiohttp.BytesPayload):
    """Written at once."""


class _LargeBody(_Body):
    """Written piece by piece, without a copy."""

    def __init__(self, body: BodyBytes) -> None:
        super().__init__(memoryview(body))
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text; aiohttp does not ask for it."""
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the body; called by `write_with_length`."""
        for at in range(0, len(self._value), _WRITTEN_BYTES):
            await writer.write(self._value[at : at + _WRITTEN_BYTES])
            # A replica that reads as fast as this writes never makes the writer wait.
            await asyncio.sleep(0)


def _body(body: BodyBytes) -> _Body | None:
    if not body:
        return None
    return _SmallBody(body) if len(body) <= _LARGE_BODY_BYTES else _LargeBody(body)


class Upstream:
    """Sends requests to replicas over one shared connection pool."""

    def __init__(self, session: aiohttp.ClientSession, timeouts: TimeoutsConfig) -> None:
        self._session = session
        self._timeouts = timeouts

    async def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: BodyBytes,
        wait: Wait,
        client: KeepAlives,
        repeatable: bool = False,
        seeks: bool = False,
        has_model: bool = False,
    ) -> ReplicaAnswer:
        """Send a request; return its answer once its content begins. The caller closes it.

        ``url`` is sent as it is encoded. Keep-alives before that go to ``client``. A request that
        is ``repeatable`` is sent again if it met a connection that the replica was closing.
        Raises `AttemptFailedError` if no answer came, if its status is in `RETRYABLE`, if its
        stream begins with such an error, if it is 404 and the request ``seeks`` the replica that
        stores something or the replica does not serve its model (``has_model``), or if ``wait`` was
        given up.
        """
        sent_s = time.monotonic()
        response: aiohttp.ClientResponse | None = None
        try:
            async with wait.within(self._timeouts.first_byte_s):
                response, data = await self._request(
                    method, url, headers, body, repeatable=repeatable
                )
                headers_s = time.monotonic()
                if response.status == _SWITCHING_PROTOCOLS:
                    raise AttemptFailedError(
                        Cause.CUT, "the replica switched protocols without being asked to"
                    )
                if response.status in RETRYABLE:
                    cause = RETRYABLE[response.status]
                    raise _failure_of(response, cause, await _start(response))
                if response.status == web.HTTPNotFound.status_code and (seeks or has_model):
                    cause = Cause.ABSENT if seeks else Cause.NO_MODEL
                    first = await _start(response)
                    if seeks or _misses_model(first):
                        raise _failure_of(response, cause, first)
                else:
                    # vLLM sends a stream's headers, and keep-alives, before it has
                    # computed anything: only the first content shows that the
                    # replica has survived the prefill.
                    first = await _first_content(response, client)
        except BaseException as error:
            if response is not None:
                response.close()
            if (failure := self._failure(error, wait, url)) is None:
                raise
            try:
                raise failure from error
            finally:
                del failure  # its traceback has this frame, and so the body
        if data is not None and data.sent_s is not None:
            # In a burst the router writes a request up to 0.3 s after it began to send it.
            sent_s = data.sent_s
        return ReplicaAnswer(response, first, sent_s=sent_s, headers_s=headers_s)

    async def _request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: BodyBytes,
        *,
        repeatable: bool,
    ) -> tuple[aiohttp.ClientResponse, _Body | None]:
        """Send a request; return its headers' response and its body as it was sent.

        A replica may close an idle connection just when it is used again. If one that was used
        before breaks without an answer, the request is sent once more on a new one.
        """
        data, use = _body(body), _ConnectionUse()
        try:
            return await self._request_on(use, method, url, headers, data), data
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if not (use.is_reused and repeatable):
                raise
            broke = error
        data, use = _body(body), _ConnectionUse(must_be_new=True)
        try:
            return await self._request_on(use, method, url, headers, data), data
        except aiohttp.ClientConnectorError:
            raise broke from None  # the replica has ended, perhaps because of this request
        finally:
            del broke  # its traceback has this frame, and so the body

    async def _request_on(
        self,
        use: "_ConnectionUse",
        method: str,
        url: str,
        headers: Mapping[str, str],
        data: _Body | None,
    ) -> aiohttp.ClientResponse:
        token = _CONNECTION_USE.set(use)
        try:
            return await self._session.request(
                method,
                URL(url, encoded=True),
                headers=headers,
                data=data,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect_s),
            )
        finally:
            _CONNECTION_USE.reset(token)

    def _failure(self, error: BaseException, wait: Wait, url: str) -> AttemptFailedError | None:
        """Map aiohttp's exceptions; None for an error that is not the replica's."""
        match error:
            case aiohttp.ConnectionTimeoutError():
                return AttemptFailedError(
                    Cause.CONNECT, "no connection in time (timeouts.connect_s)"
                )
            case TimeoutError() if wait.failure is not None:
                # Another one than the wait has: frames of its traceback have the wait.
                return AttemptFailedError(wait.failure.cause, wait.failure.detail)
            case TimeoutError():
                wait_s = self._timeouts.first_byte_s
                return AttemptFailedError(Cause.TIMEOUT, f"no first byte within {wait_s} s")
            case aiohttp.ClientConnectorError():
                is_own = is_exhausted(error) or is_unresolved(error)
                cause = Cause.LOCAL if is_own else Cause.CONNECT
                return AttemptFailedError(cause, connection_problem(error, url))
            case aiohttp.ClientError() | OSError():
                return AttemptFailedError(Cause.CUT, describe(error))
        return None


async def _first_content(response: aiohttp.ClientResponse, client: KeepAlives) -> bytes:
    if not _has_events(response):
        return await response.content.readany()
    opening = StreamOpening()
    while not opening.has_begun and (chunk := await response.content.readany()):
        if keep_alives := opening.feed(chunk):
            await client.keep_alive(response.status, kept_headers(response.headers), keep_alives)
    if (error := opening.error) is not None and error.is_servers:
        answer = None
        if error.body is not None:
            answer = web.Response(
                status=error.status, body=error.body, content_type="application/json"
            )
        cause = RETRYABLE.get(error.status, Cause.ERROR)
        raise AttemptFailedError(cause, f"its stream began with an error ({error.status})", answer)
    return bytes(opening.held)


async def _start(response: aiohttp.ClientResponse) -> bytes:
    """Return as much of an answer as an error may have."""
    body = bytearray()
    while len(body) < _FAILURE_BODY_BYTES and (chunk := await response.content.readany()):
        body += chunk
    return bytes(body)


def _failure_of(response: aiohttp.ClientResponse, cause: Cause, body: bytes) -> AttemptFailedError:
    headers = kept_headers(response.headers)
    headers.popall("Content-Length", None)
    answer = web.Response(status=response.status, headers=headers, body=body)
    return AttemptFailedError(cause, f"answered {response.status}", answer)


def _misses_model(body: bytes) -> bool:
    """Whether an error says that its server does not have the model, as vLLM and OpenAI say it."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    if not isinstance(error, dict):
        return False
    is_named = error.get("param") == "model" or error.get("code") == "model_not_found"
    return is_named or str(error.get("message", "")).startswith("The model `")


@dataclass
class _ConnectionUse:
    """Which connection a request gets from the pool."""

    must_be_new: bool = False
    is_reused: bool = False
    """Whether it has got one that was used before."""


_CONNECTION_USE: Final[ContextVar[_ConnectionUse | None]] = ContextVar(
    "connection_use", default=None
)


class _Connector(aiohttp.TCPConnector):
    """A connection pool that says whether a connection was used before."""

    async def _get(self, key: ConnectionKey, traces: list[Trace]) -> Connection | None:
        """Return an idle connection, None to make a new one; called by aiohttp."""
        if (use := _CONNECTION_USE.get()) is None:
            return await super()._get(key, traces)
        found = None if use.must_be_new else await super()._get(key, traces)
        use.is_reused = found is not None
        return found


def client_session(tls: ssl.SSLContext | bool = True) -> aiohttp.ClientSession:
    """Make the session for requests to replicas: unlimited connections, bodies not decoded.

    ``tls`` verifies replicas' certificates. Requests without a timeout of their own get
    ``_DEFAULT_TIMEOUT_S``.
    """
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=_DEFAULT_TIMEOUT_S),
        connector=_Connector(limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=tls),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


# Headers


def forwarded_headers(
    headers: CIMultiDictProxy[str],
    *,
    request_id: str,
    api_key: str | None,
    is_keyed: bool,
    vllm_priority: int = 0,
    traceparent: str | None = None,
) -> CIMultiDict[str]:
    """Return the client's headers as the replica gets them.

    ``traceparent`` replaces the client's, if the router makes spans. The client's key is passed on
    only if neither the router checks keys (``is_keyed``) nor the replica has its own ``api_key``.
    """
    kept = _without(headers, _NOT_FORWARDED)
    kept["X-Request-Id"] = request_id
    if vllm_priority:
        kept[VLLM_PRIORITY_HEADER] = str(vllm_priority)
    if traceparent is not None:
        kept["Traceparent"] = traceparent
    if is_keyed or api_key is not None:
        for name in ("Authorization", "X-Api-Key"):
            kept.popall(name, None)
    if api_key is not None:
        kept["Authorization"] = f"Bearer {api_key}"
    return kept


def kept_headers(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return an answer's headers without connection headers and the router's own.

    Headers with control characters are dropped too: aiohttp's client accepts them, but its server
    refuses to send them.
    """
    return CIMultiDict(
        (name, value)
        for name, value in _without(headers, _HOP_BY_HOP).items()
        if not name.lower().startswith(_OWN_HEADERS) and not _CONTROLS.search(value)
    )


def _without(headers: CIMultiDictProxy[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    named = {
        name.strip().lower()
        for value in headers.getall("Connection", ())
        for name in value.split(",")
    }
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in dropped and name.lower() not in named
    )
