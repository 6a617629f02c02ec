"""What tests here share."""

import base64
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.prompt.prompt_reader import PromptReader
from tests.router.prompt.tokenizer_makers import TEXT

VISION = """\
{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>
{%- if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}
{%- if part.type == 'image' %}<|vision|><|pad|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}</s>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def image(content: bytes = b"one", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content)}, **more}


WORDS = sorted({word for line in TEXT for word in line.split()})


# No two stretches of it are alike.
LONG = " ".join(random.Random(7).choices(WORDS, k=2000))


def limit_questions(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set how long the answer to any question for tokens may take."""
    for name in ("_LEAST_S", "_MOST_S"):
        monkeypatch.setattr(f"router.prompt.replica_tokenizer.{name}", seconds)


class Replica:
    """A scripted replica: it tokenizes with ``model``, renders by its template, tells a version."""

    def __init__(self, model: Path) -> None:
        self.reader = PromptReader.load(model)
        self.version = "1"
        self.paths: list[str] = []
        self.renders = 200
        """The status of vLLM's ``/render``; 0: it answers as older versions do."""
        self.status = 200
        self.url = ""

    @property
    def asked(self) -> int:
        """How often it was asked for tokens."""
        return len(self.paths)

    async def tokenize(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        if self.status != 200:
            return web.json_response({}, status=self.status)
        prompt = self.reader.read_now("/tokenize", await request.json())
        ids = list(prompt.token_ids or ())
        if request.path == "/tokenize":
            return web.json_response({"tokens": ids, "max_model_len": 4096})
        if not self.renders:
            return web.json_response([[], [{"prompt_token_ids": ids}]])
        return web.json_response({"token_ids": ids}, status=self.renders)

    async def tell_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/v1/chat/completions/render", self.tokenize)
        app.router.add_get("/version", self.tell_version)
        async with TestServer(app) as server:
            self.url = str(server.make_url("")).rstrip("/")
            yield
