"""The OpenAI server of one simulated replica, with vLLM's answers, errors and metrics.

`CallReader` parses requests and refuses what vLLM refuses. `CompletionBody` builds answers with
vLLM's fields in vLLM's order. `render` writes ``/metrics`` under vLLM's names. `OpenAiServer` has
the handlers; other paths get a 404 in OpenAI's error format.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from simulator.nixl import Pull
from simulator.openai_prompts import BadPromptError, Prompts, SimPrompt, chat_text, text_of
from simulator.simulated_replica import RunningRequest, SimulatedReplica
from simulator.simulator_settings import SimulatorSettings

DONE: Final = b"data: [DONE]\n\n"


class CompletionBody:
    """The answer to one request: its chunks when streamed, or all of it at once."""

    def __init__(self, *, request_id: str, model: str, is_chat: bool, prompt_tokens: int) -> None:
        self._is_chat = is_chat
        self._prompt_tokens = prompt_tokens
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        chunk = dict(self._head)
        if is_chat:
            chunk["object"] = "chat.completion.chunk"
        self._chunk_head = orjson.dumps(chunk)[:-1]

    def role(self) -> bytes:
        """Return a chat stream's first chunk."""
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])

    def chunk(self, output_ids: Sequence[int], *, is_first: bool, is_last: bool) -> bytes:
        """Return the event that tells the next tokens."""
        text = _text(output_ids, is_first=is_first)
        what = {"delta": {"content": text}} if self._is_chat else {"text": text}
        reason = "length" if is_last else None
        return self._event(
            [{"index": 0, **what, "logprobs": None, "finish_reason": reason, "stop_reason": None}]
        )

    def usage_event(self, output_tokens: int, cached_tokens: int) -> bytes:
        """Return the event that ends a stream whose caller wants to know its usage."""
        return self._event([], self._usage(output_tokens, cached_tokens))

    def whole(
        self,
        output_ids: Sequence[int],
        cached_tokens: int,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> bytes:
        """Return the body of an answer that is not streamed."""
        text = _text(output_ids, is_first=True)
        what: dict[str, Any] = {"text": text}
        if self._is_chat:
            what = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, **what, "logprobs": None, "finish_reason": "length"}
        return orjson.dumps(
            {
                **self._head,
                "choices": [choice | {"stop_reason": None}],
                "usage": self._usage(len(output_ids), cached_tokens),
                "kv_transfer_params": kv_transfer_params,
            }
        )

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        body = b'%s,"choices":%s' % (self._chunk_head, orjson.dumps(choices))
        if usage is not None:
            body += b',"usage":%s' % orjson.dumps(usage)
        return b"data: %s}\n\n" % body

    def _usage(self, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "total_tokens": self._prompt_tokens + output_tokens,
            "completion_tokens": output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


def _text(output_ids: Sequence[int], *, is_first: bool) -> str:
    text = text_of(output_ids)
    return text if is_first else f" {text}"


def error_body(message: str, status: int, *, kind: str, param: str | None = None) -> bytes:
    """Return an error as vLLM answers it."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return orjson.dumps({"error": error})


_PULL_FAILED: Final = error_body(
    "Internal server error: the KV could not be loaded", 500, kind="InternalServerError"
)


class SimulatedCallError(Exception):
    """A request that vLLM would refuse, too."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        kind: str = "BadRequestError",
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.kind = kind


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A completion that is asked for."""

    prompt: SimPrompt
    is_chat: bool
    streams: bool
    wants_usage: bool
    lends: bool = False
    """Whether another replica shall be able to pull its KV."""
    pull: Pull | None = None


class CallReader:
    """Reads bodies for the replicas of one fleet, and remembers their prompts for all of them."""

    def __init__(self, settings: SimulatorSettings, prompts: Prompts) -> None:
        self._settings = settings
        self._prompts = prompts

    def read(self, body: Mapping[str, Any], *, is_chat: bool) -> CompletionCall:
        """Return what is asked for; raise `SimulatedCallError`."""
        self._check_model(body.get("model"))
        if body.get("n", 1) != 1:
            raise SimulatedCallError("only one answer is given: leave 'n' out", param="n")
        options = body.get("stream_options") or {}
        params = transfer_params(body)
        return CompletionCall(
            prompt=self._prompt(body, is_chat=is_chat),
            is_chat=is_chat,
            streams=body.get("stream") is True,
            wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
            lends=params.get("do_remote_decode") is True,
            pull=Pull.of(params),
        )

    def token_ids(self, body: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a ``/tokenize`` request."""
        try:
            if "messages" in body:
                prompt = self._prompts.of_text(_chat(body), 1)
            else:
                text = body.get("prompt")
                if not isinstance(text, str):
                    raise SimulatedCallError("'prompt' must be a string", param="prompt")
                if not text.strip():
                    return []
                prompt = self._prompts.of_text(text, 1)
        except BadPromptError as error:
            raise SimulatedCallError(str(error)) from None
        return prompt.token_ids.tolist()

    def _check_model(self, model: object) -> None:
        known = (None, self._settings.model, str(self._settings.tokenizer_directory))
        if model not in known:
            raise SimulatedCallError(
                f"The model `{model if isinstance(model, str) else type(model)}` does not exist.",
                param="model",
                status=404,
                kind="NotFoundError",
            )

    def _prompt(self, body: Mapping[str, Any], *, is_chat: bool) -> SimPrompt:
        salt = body.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise SimulatedCallError(
                "'cache_salt' must be a string that is not empty", param="cache_salt"
            )
        output_tokens = self._output_tokens(body)
        try:
            prompt = self._made(body, output_tokens, salt, is_chat=is_chat)
        except BadPromptError as error:
            param = "messages" if is_chat else "prompt"
            raise SimulatedCallError(str(error), param=param) from None
        most, given = self._settings.max_model_tokens, len(prompt.token_ids)
        if given + output_tokens > most:
            raise SimulatedCallError(
                f"This model's maximum context length is {most} tokens. However, you requested "
                f"{output_tokens} output tokens and your prompt contains {given} input tokens, "
                f"for a total of {given + output_tokens} tokens.",
                param="input_tokens",
            )
        return prompt

    def _made(
        self, body: Mapping[str, Any], output_tokens: int, salt: str | None, *, is_chat: bool
    ) -> SimPrompt:
        if is_chat:
            return self._prompts.of_text(_chat(body), output_tokens, salt)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._prompts.of_text(prompt, output_tokens, salt)
        if isinstance(prompt, list):
            return self._prompts.of_ids(prompt, output_tokens, salt)
        raise BadPromptError("'prompt' must be a string or a list of token ids")

    def _output_tokens(self, body: Mapping[str, Any]) -> int:
        for name in ("max_completion_tokens", "max_tokens"):
            tokens = body.get(name)
            if tokens is None:
                continue
            if not isinstance(tokens, int) or tokens < 1:
                raise SimulatedCallError(f"{name} must be a number, at least 1.", param=name)
            # Checked before such a long answer is made.
            if tokens > (most := self._settings.max_model_tokens):
                raise SimulatedCallError(
                    f"This model's maximum context length is {most} tokens. However, you "
                    f"requested {tokens} output tokens.",
                    param=name,
                )
            return tokens
        return self._settings.output_tokens


def transfer_params(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``kv_transfer_params`` of a request; empty if it has none."""
    params = body.get("kv_transfer_params")
    return params if isinstance(params, dict) else {}


def _chat(body: Mapping[str, Any]) -> str:
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise SimulatedCallError("'messages' must be a list", param="messages")
    generation = body.get("add_generation_prompt", True) is not False
    return chat_text(messages, add_generation_prompt=generation)


def render(replica: SimulatedReplica) -> str:
    """Return Prometheus' text format."""
    model, totals = replica.model, replica.model.totals
    below = totals.cached.cpu + totals.cached.disk
    waiting = len(model.waiting) + len(model.loading)
    usage = model.cache.held_blocks / model.cache.num_blocks
    families: list[tuple[str, str, float]] = [
        ("num_requests_running", "gauge", len(model.running)),
        ("num_requests_waiting", "gauge", waiting),
        ("kv_cache_usage_perc", "gauge", usage),
        ("prefix_cache_queries_total", "counter", totals.queries),
        ("prefix_cache_hits_total", "counter", totals.cached.gpu),
        ("external_prefix_cache_queries_total", "counter", totals.queries - totals.cached.gpu),
        ("external_prefix_cache_hits_total", "counter", below),
        ("prompt_tokens_total", "counter", totals.queries),
        ("generation_tokens_total", "counter", totals.generated),
        ("num_preemptions_total", "counter", totals.preempted),
        ("request_success_total", "counter", totals.finished),
    ]
    shape = model.shape
    cache = (
        f'vllm:cache_config_info{{block_size="{shape.block_tokens}",engine="0",'
        f'num_gpu_blocks="{shape.gpu_blocks}"}} 1.0\n'
    )
    labels = f'{{engine="0",model_name="{replica.settings.model}"}}'
    return cache + "".join(
        f"# TYPE vllm:{name} {kind}\nvllm:{name}{labels} {float(value)}\n"
        for name, kind, value in families
    )


_MAX_BODY_BYTES: Final = 64 * 1024**2


@web.middleware
async def _not_found_as_openai(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer an unknown path or method in OpenAI's error format."""
    try:
        return await handler(request)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        message = f"a simulated replica does not serve {request.method} {request.path}"
        return web.Response(
            body=error_body(message, error.status, kind="NotFoundError"),
            status=error.status,
            content_type="application/json",
        )


class OpenAiServer:
    """Handlers of the paths that vLLM serves and that something reads."""

    def __init__(self, replica: SimulatedReplica, reader: CallReader) -> None:
        self._replica = replica
        self._reader = reader
        self._settings = replica.settings
        self._created = int(time.time())

    def app(self) -> web.Application:
        """Return the application, to be served once."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_not_found_as_openai])
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
        body: dict[str, Any] = {}
        try:
            body = await _body(request)
            call = self._reader.read(body, is_chat=is_chat)
        except SimulatedCallError as error:
            self._replica.refuse(Pull.of(transfer_params(body)))
            return _refusal(error)
        answer = CompletionBody(
            request_id=name,
            model=self._settings.model,
            is_chat=is_chat,
            prompt_tokens=len(call.prompt.token_ids),
        )
        if self._settings.rates.request_s:
            await asyncio.sleep(self._settings.rates.request_s / self._settings.speed)
        every = self._settings.stream_interval_tokens if call.streams else 0
        running = self._replica.submit(
            call.prompt, name=name, emit_every=every, lends=call.lends, pull=call.pull
        )
        try:
            if call.streams:
                response = web.StreamResponse(
                    headers={"Content-Type": "text/event-stream; charset=utf-8"}
                )
                with contextlib.suppress(ConnectionResetError):  # whoever asked has gone
                    await _stream(request, response, call, answer, running)
                return response
            if not await running.news.get():
                return web.Response(body=_PULL_FAILED, status=500, content_type="application/json")
            whole = answer.whole(
                running.output_ids, _cached_tokens(call, running), running.kv_transfer_params
            )
            return web.Response(body=whole, content_type="application/json")
        finally:
            # Whoever went away leaves its place in the batch to others.
            self._replica.cancel(running)


def _cached_tokens(call: CompletionCall, running: RunningRequest) -> int:
    """Return what ``usage`` says; as in vLLM, of pulled KV what its lender had cached."""
    if call.pull is not None and call.pull.cached_tokens is not None:
        return call.pull.cached_tokens
    return running.request.cached.total


async def _stream(
    request: web.Request,
    response: web.StreamResponse,
    call: CompletionCall,
    answer: CompletionBody,
    running: RunningRequest,
) -> None:
    first = await running.news.get()
    await response.prepare(request)
    if not first:
        await response.write(b"data: %s\n\n" % _PULL_FAILED + DONE)
        return
    output, sent = running.output_ids, 0
    generated = first
    while True:
        is_last = generated == len(output)
        data = answer.chunk(output[sent:generated], is_first=sent == 0, is_last=is_last)
        if sent == 0 and call.is_chat:
            data = answer.role() + data
        if is_last:
            if call.wants_usage:
                data += answer.usage_event(len(output), _cached_tokens(call, running))
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
