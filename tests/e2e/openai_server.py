"""A server that answers each endpoint of the OpenAI API in the shapes of vLLM and OpenAI."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
TOKEN = {"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": []}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "model": "large",
    "output": [
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "hi", "annotations": []}],
        }
    ],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
FILE = {
    "id": "file-1",
    "object": "file",
    "bytes": 4,
    "created_at": 1,
    "filename": "f",
    "purpose": "batch",
    "status": "processed",
}
BATCH = {
    "id": "batch_1",
    "object": "batch",
    "endpoint": "/v1/chat/completions",
    "input_file_id": "file-1",
    "completion_window": "24h",
    "status": "validating",
    "created_at": 1,
}
SOUND = bytes(range(256)) * 40
RESULT = {"index": 0, "relevance_score": 0.9, "document": {"text": "b"}}
WHOLE: dict[tuple[str, str], Any] = {
    ("GET", "/health"): {},
    ("POST", "/v1/embeddings"): {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -0.25]}],
        "model": "embedder",
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    },
    ("POST", "/v1/audio/translations"): {"text": "translated"},
    ("POST", "/v1/images/generations"): {"created": 1, "data": [{"b64_json": "AAAA"}]},
    ("POST", "/v1/images/edits"): {"created": 1, "data": [{"b64_json": "BBBB"}]},
    ("POST", "/v1/moderations"): {"id": "modr-1", "model": "large", "results": []},
    ("GET", "/v1/responses/resp_1"): RESPONSE,
    ("POST", "/v1/responses/resp_1/cancel"): {**RESPONSE, "status": "cancelled"},
    ("POST", "/v1/files"): FILE,
    ("GET", "/v1/files"): {"object": "list", "data": [FILE], "has_more": False},
    ("GET", "/v1/files/file-1"): FILE,
    ("DELETE", "/v1/files/file-1"): {"id": "file-1", "object": "file", "deleted": True},
    ("POST", "/v1/batches"): BATCH,
    ("GET", "/v1/batches/batch_1"): BATCH,
    ("POST", "/v1/batches/batch_1/cancel"): {**BATCH, "status": "cancelling"},
    ("POST", "/v1/rerank"): {"id": "rerank-1", "model": "embedder", "results": [RESULT]},
    ("POST", "/score"): {"id": "score-1", "data": [{"index": 0, "score": 0.75}]},
    ("POST", "/tokenize"): {"count": 2, "tokens": [1, 2], "max_model_len": 64},
}


def _completion(body: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = {"finish_reason": "stop", "text": "hi", "logprobs": None}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": body["model"],
        "choices": [{**choice, "index": each} for each in range(body.get("n", 1))],
        "usage": USAGE,
    }


def _chat(body: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "hi"}
    if "tools" in body:
        message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    if "response_format" in body:
        message["content"] = '{"city": "Paris"}'
    if any(isinstance(each["content"], list) for each in body["messages"]):
        message["content"] = "an image"
    choice = {
        "message": message,
        "finish_reason": "stop",
        "logprobs": {"content": [TOKEN]} if body.get("logprobs") else None,
    }
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": [{**choice, "index": each} for each in range(body.get("n", 1))],
        "usage": USAGE,
    }


def _chat_events(body: dict[str, Any]) -> list[str]:
    head = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
    deltas: list[dict[str, Any]] = [{"content": "h"}, {"content": "i"}]
    if "tools" in body:
        deltas = [{"tool_calls": [{"index": 0, **CALL}]}]
    events: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, "delta": each, "finish_reason": None}]} for each in deltas
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append({**head, "choices": [], "usage": USAGE})
    return [f"data: {json.dumps(each)}\n\n" for each in events] + ["data: [DONE]\n\n"]


def _response_events(body: dict[str, Any]) -> list[str]:
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**RESPONSE, "status": "in_progress"}},
        {"type": "response.output_text.delta", "delta": "hi", "item_id": "msg_1"},
        {"type": "response.completed", "response": RESPONSE},
    ]
    numbered = ({**each, "sequence_number": at} for at, each in enumerate(events))
    return [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in numbered]


async def _sent(request: web.Request, events: Sequence[str]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for each in events:
        await response.write(each.encode())
    return response


class OpenAIServer:
    """Answers for some models; what has a body of another shape than it should is refused."""

    def __init__(self, *models: str) -> None:
        self._models = models
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        path = request.path
        if path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            return await self._generated(request, path)
        if path == "/v1/audio/transcriptions":
            return await self._transcribed(request)
        if path in ("/v1/audio/speech", "/v1/files/file-1/content"):
            return web.Response(body=SOUND, content_type="audio/mpeg")
        if path == "/v1/models":
            data = [{"id": each, "object": "model", "owned_by": "vllm"} for each in self._models]
            return web.json_response({"object": "list", "data": data})
        if (answer := WHOLE.get((request.method, path))) is not None:
            return web.json_response(answer)
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _generated(self, request: web.Request, path: str) -> web.StreamResponse:
        body = await request.json()
        if (refusal := self._refusal(body["model"])) is not None:
            return refusal
        if body.get("temperature", 0) > 2:
            error = {"message": "temperature", "type": "BadRequestError", "code": 400}
            return web.json_response({"error": error}, status=400)
        if path == "/v1/completions":
            return web.json_response(_completion(body))
        is_chat = path == "/v1/chat/completions"
        if body.get("stream"):
            return await _sent(request, (_chat_events if is_chat else _response_events)(body))
        return web.json_response(_chat(body) if is_chat else RESPONSE)

    async def _transcribed(self, request: web.Request) -> web.StreamResponse:
        form = await request.post()
        if (refusal := self._refusal(str(form["model"]))) is not None:
            return refusal
        file = form["file"]
        assert isinstance(file, web.FileField)
        if form.get("stream") == "true":
            delta = {"type": "transcript.text.delta", "delta": "heard"}
            done = {"type": "transcript.text.done", "text": "heard"}
            return await _sent(request, [f"data: {json.dumps(each)}\n\n" for each in (delta, done)])
        return web.json_response({"text": f"heard {len(file.file.read())} bytes"})

    def _refusal(self, model: str) -> web.Response | None:
        if model in self._models:
            return None
        return web.json_response({"error": {"message": f"no model {model}"}}, status=404)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["OpenAIServer"]:
        """Serve on a free port."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()
