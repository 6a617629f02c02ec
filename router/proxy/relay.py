"""Passing a replica's answer on to the client, and ending it honestly.

A stream that the replica breaks off is not dressed up as a complete one: SSE
clients get an error event, others see their connection close short of the
announced end.
"""

import time
from contextlib import aclosing
from functools import partial

from aiohttp import web

from router.fleet import Replica
from router.proxy.idle import IdleTimer
from router.proxy.upstream import Answer, AnswerCutError
from router.proxy.usage import UsageReader
from router.record import Outcome, RequestRecord, answer_headers
from warmroute_common.api_errors import UpstreamFailedError
from warmroute_common.http import error_body, is_anthropic


async def relay(
    request: web.Request,
    answer: Answer,
    *,
    reader: UsageReader,
    record: RequestRecord,
    replica: Replica,
    idle_s: float | None,
) -> web.StreamResponse:
    """Stream ``answer`` to the client as it comes; note in ``record`` how it ended.

    ``replica`` is noted to be alive. Where nothing moves for ``idle_s``, because the replica says
    nothing or the client takes nothing, the answer is cut or the client's connection ended.
    Raises ConnectionResetError when the client has gone.
    """
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.headers.update(answer_headers(record))
    await response.prepare(request)
    record.status = answer.status
    last = b""
    on_idle = partial(_end_idle, request, answer)
    try:
        with IdleTimer(idle_s, on_idle) as idle:
            async with aclosing(answer.chunks()) as chunks:
                async for chunk in chunks:
                    idle.is_writing = True
                    idle.moved_s = replica.heard_s = time.monotonic()
                    reader.feed(chunk)
                    await response.write(chunk)
                    record.response_bytes += len(chunk)
                    last = chunk
                    idle.is_writing = False
                    idle.moved_s = time.monotonic()
    except AnswerCutError as cut:
        record.end(Outcome.CUT, error=str(cut))
        await _end_cut(request, response, answer, last)
        return response
    await response.write_eof()
    record.end(Outcome.OK)
    return response


def _end_idle(request: web.Request, answer: Answer, is_writing: bool) -> None:
    if not is_writing:
        answer.cut("nothing came for too long (timeouts.stream_idle_s)")
    elif request.transport is not None:
        request.transport.abort()  # its handler is cancelled


async def _end_cut(
    request: web.Request, response: web.StreamResponse, answer: Answer, last: bytes
) -> None:
    if not answer.streamed or "Content-Encoding" in answer.headers:
        response.force_close()
        if request.transport is not None:
            request.transport.abort()
        return
    error = UpstreamFailedError("the replica's answer broke off; the text so far is incomplete")
    # An event cut in half would swallow this one: end it first.
    gap = b"" if last.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
    name = b"event: error\n" if is_anthropic(request.path) else b""
    await response.write(gap + name + b"data: " + error_body(request.path, error) + b"\n\n")
    await response.write_eof()
