"""The OpenAI server of one simulated replica."""

import asyncio
import contextlib
import time
import uuid
from typing import Any, Final

import orjson
from aiohttp import web

from simulator.api.answers import DONE, Answer, error_body
from simulator.api.calls import Call, CallReader, SimulatedCallError
from simulator.api.metrics import render
from simulator.replica import Replica, Running

_MAX_BODY_BYTES: Final = 64 * 1024**2


class OpenAiServer:
    """Handlers of the paths that vLLM serves and that something reads."""

    def __init__(self, replica: Replica, reader: CallReader) -> None:
        self._replica = replica
        self._reader = reader
        self._settings = replica.settings
        self._created = int(time.time())

    def app(self) -> web.Application:
        """Return the application, to be served once."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.get("/kv_event_sources", self._kv_event_sources),
                web.post("/tokenize", self._tokenize),
                web.post("/reset_prefix_cache", self._reset),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat_completions),
            ]
        )
        return app

    # --- what is asked once

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": "0.32.0+simulated"})

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._settings.model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": str(self._settings.tokenizer_directory),
            "parent": None,
            "max_model_len": self._settings.max_model_tokens,
        }
        return _json({"object": "list", "data": [model]})

    async def _metrics(self, request: web.Request) -> web.Response:
        self._replica.bring_up_to_date()
        return web.Response(text=render(self._replica), content_type="text/plain")

    async def _kv_event_sources(self, request: web.Request) -> web.Response:
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._replica.stream.endpoint,
            "replay_endpoint": self._replica.stream.replay_endpoint,
            "topic": "",
        }
        return _json({"0": source})

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            ids = self._reader.token_ids(await _body(request))
        except SimulatedCallError as error:
            return _refusal(error)
        return _json(
            {
                "count": len(ids),
                "max_model_len": self._settings.max_model_tokens,
                "tokens": ids,
                "token_strs": None,
            }
        )

    async def _reset(self, request: web.Request) -> web.Response:
        """Empty the GPU tier alone, as vLLM does in its developer mode."""
        return _json({"success": self._replica.clear_gpu()})

    # --- completions

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, is_chat=False)

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, is_chat=True)

    async def _answer(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        name = request.headers.get("x-request-id") or uuid.uuid4().hex
        try:
            call = self._reader.read(await _body(request), is_chat=is_chat)
        except SimulatedCallError as error:
            return _refusal(error)
        answer = Answer(
            request_id=name,
            model=self._settings.model,
            is_chat=is_chat,
            prompt_tokens=len(call.prompt.token_ids),
        )
        if self._settings.rates.request_s:
            await asyncio.sleep(self._settings.rates.request_s / self._settings.speed)
        every = self._settings.stream_interval_tokens if call.streams else 0
        running = self._replica.submit(call.prompt, name=name, emit_every=every)
        try:
            if call.streams:
                response = web.StreamResponse(
                    headers={"Content-Type": "text/event-stream; charset=utf-8"}
                )
                with contextlib.suppress(ConnectionResetError):  # whoever asked has gone
                    await _stream(request, response, call, answer, running)
                return response
            await running.news.get()
            body = answer.whole(call.prompt.output_ids, running.request.cached.total)
            return web.Response(body=body, content_type="application/json")
        finally:
            # Whoever went away leaves its place in the batch to others.
            self._replica.cancel(running)


async def _stream(
    request: web.Request,
    response: web.StreamResponse,
    call: Call,
    answer: Answer,
    running: Running,
) -> None:
    first = await running.news.get()
    await response.prepare(request)
    output, sent = call.prompt.output_ids, 0
    generated = first
    while True:
        is_last = generated == len(output)
        data = answer.chunk(output[sent:generated], is_first=sent == 0, is_last=is_last)
        if sent == 0 and call.is_chat:
            data = answer.role() + data
        if is_last:
            if call.wants_usage:
                data += answer.usage_event(len(output), running.request.cached.total)
            data += DONE
        await response.write(data)
        sent = generated
        if is_last:
            return
        generated = await running.news.get()


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise SimulatedCallError(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise SimulatedCallError("the body is no JSON object")
    return body


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _refusal(error: SimulatedCallError) -> web.Response:
    return web.Response(
        body=error_body(str(error), error.status, kind=error.kind, param=error.param),
        status=error.status,
        content_type="application/json",
    )


async def serve_app(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Serve an application; return what ends it, and its URL. Raises OSError."""
    runner = web.AppRunner(
        app, access_log=None, handle_signals=False, handler_cancellation=True, shutdown_timeout=0.1
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    bound_host, bound_port = runner.addresses[0][:2]
    return runner, f"http://{bound_host}:{bound_port}"
