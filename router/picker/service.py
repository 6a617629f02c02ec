"""The calls of a gateway: what each message asks, and what answers it."""

from contextlib import closing
from typing import Any

from grpc import StatusCode

from router.picker import words
from router.picker.endpoints import Endpoints
from router.picker.exchange import Exchange
from router.picker.stream import Stream
from router.picker.words import Message
from router.proxy import RequestLifecycle
from warmroute_common.api_errors import ApiError, TooLargeError
from warmroute_common.http_server import defect


class Processor:
    """Serves ``envoy.service.ext_proc.v3.ExternalProcessor``: one call for each request."""

    def __init__(self, judge: RequestLifecycle, endpoints: Endpoints) -> None:
        self._judge = judge
        self._endpoints = endpoints

    async def Process(self, _: object, context: Any) -> None:  # noqa: N802  (the protocol's name)
        """Answer one call."""
        with closing(Stream(context)) as stream:
            first = await stream.read()
            if first is not None:
                await self._serve(first, stream)
            if stream.is_broken:
                await context.abort(StatusCode.INVALID_ARGUMENT, "that is no ProcessingRequest")

    async def _serve(self, first: Message, stream: Stream) -> None:
        headers = words.headers_of(first.request_headers)
        exchange = Exchange(
            self._judge,
            self._endpoints,
            headers.get(":method", ""),
            headers.get(":path", ""),
            headers,
            named=words.named_endpoints(first, headers),
            sees_tokens=words.tells_answer(first),
        )
        try:
            with closing(exchange), exchange.noting_end():
                await _Conversation(self._judge, exchange, first, stream).run()
        except ConnectionResetError:
            pass  # the client has gone: no answer reaches it
        except ApiError as error:
            await stream.write(words.refusal(exchange.path, error))
        except Exception as error:  # noqa: BLE001  (the client gets an answer in its own shape)
            await stream.write(words.refusal(exchange.path, defect(exchange.path, error)))


class _Conversation:
    """One call for a whole request."""

    def __init__(
        self, judge: RequestLifecycle, exchange: Exchange, first: Message, stream: Stream
    ) -> None:
        self._judge = judge
        self._exchange = exchange
        self._first = first
        self._stream = stream

    async def run(self) -> None:
        """Answer all messages of the call."""
        if words.has_streamed_body(self._first):
            await self._pick_by_parts()
        else:
            await self._pick()
        while (message := await self._stream.read()) is not None:
            await self._stream.write(await self._reply(message))

    async def _pick(self) -> None:
        """Answer the request's last message with where it goes."""
        kind, body = "request_headers", b""
        if self._first.HasField("request_body"):
            kind, body = "request_body", self._first.request_body.body
        elif words.has_whole_body(self._first):
            await self._stream.write(words.go_on(kind))
            kind = "request_body"
            body = (await self._stream.must_read(kind)).request_body.body
        await self._send_on(kind, body)

    async def _pick_by_parts(self) -> None:
        """Take the body in parts; answer with where it goes and, after that, the parts."""
        parts: list[Message] = []
        left_bytes = self._judge.config.max_body_bytes
        is_last = False
        while not is_last:
            message = await self._stream.must_read("request_body", "request_trailers")
            if is_last := message.HasField("request_trailers"):
                parts.append(words.go_on("request_trailers"))
                break
            parts.append(words.same_body("request_body", message.request_body))
            left_bytes -= len(message.request_body.body)
            if left_bytes < 0:
                raise TooLargeError(
                    "the body is too large (max_body_bytes in the router's settings)"
                )
            is_last = message.request_body.end_of_stream
        await self._send_on("request_headers", words.whole_body(parts))
        for each in parts:
            await self._stream.write(each)

    async def _send_on(self, kind: str, body: bytes) -> None:
        picked = await self._stream.unless_ended(self._exchange.pick(body))
        headers = {} if picked.api_key is None else {"authorization": f"Bearer {picked.api_key}"}
        await self._stream.write(words.destination(kind, picked.endpoints, headers))

    async def _reply(self, message: Message) -> Message:
        kind = message.WhichOneof("request")
        if kind == "response_headers":
            headers = words.headers_of(message.response_headers)
            served = words.served_endpoint(message)
            return words.answer_headers(await self._exchange.answered(headers, served))
        if kind == "response_body":
            told = message.response_body
            self._exchange.came(told.body, is_last=told.end_of_stream)
            if words.is_streamed_back(self._first):
                return words.same_body(kind, told)
        return words.go_on(kind)
