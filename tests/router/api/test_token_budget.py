"""Ways past a key's tokens per minute: none works."""

import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.api.access import new_key, sha256_of
from router.config.settings import AccessConfig, KeyConfig, TokenizerConfig
from tests.router.conftest import Fleet
from tests.router.prompt.chat_shapes import TEMPLATES
from tests.router.prompt.tokenizer_makers import llama3, write_model
from tests.router.scripted import CHAT_ANSWER, chat_events, json_answer, scripted, stream

KEY = new_key()
CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
WORDS = "word " * 5000
IDS = [7] * 5000
"""Each of one byte and a comma: the fewest bytes that a token can have."""
HI = [{"role": "user", "content": "hi"}]
LIMIT = 1000

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "one prompt": (TEXT, {"prompt": IDS}),
    "a short prompt first": (TEXT, {"prompt": ["hi", WORDS]}),
    "short ids first": (TEXT, {"prompt": [[3, 4], IDS]}),
    "an empty prompt first": (TEXT, {"prompt": ["", WORDS]}),
    "many prompts": (TEXT, {"prompt": ["hello you"] * 1000}),
    "a suffix": (TEXT, {"prompt": "a", "suffix": WORDS}),
    "prompt_embeds": (
        TEXT,
        {"prompt": "a", "prompt_embeds": base64.b64encode(b"x" * 9000).decode()},
    ),
    "many lists to embed": (VECTORS, {"input": [[7] * 50] * 100}),
    "many texts to embed": (VECTORS, {"input": ["hello you"] * 1000}),
    "conversations to embed": (VECTORS, {"messages": [HI, [{"role": "user", "content": WORDS}]]}),
    "tools": (
        CHAT,
        {
            "messages": HI,
            "tools": [{"type": "function", "function": {"name": "f", "description": WORDS}}],
        },
    ),
    "its own template": (CHAT, {"messages": HI, "chat_template": WORDS}),
    "its own template's variables": (
        CHAT,
        {"messages": HI, "chat_template": "{{ x }}", "chat_template_kwargs": {"x": WORDS}},
    ),
    "a medium that its own template writes": (
        CHAT,
        {
            "messages": HI,
            "chat_template": "{{ x.image_url }}",
            "chat_template_kwargs": {"x": {"type": "image_url", "image_url": WORDS}},
        },
    ),
    "documents": (CHAT, {"messages": HI, "documents": [{"text": WORDS}], "chat_template": "x"}),
    "instructions": ("/v1/responses", {"input": "hi", "instructions": WORDS}),
    "after a response": ("/v1/responses", {"input": WORDS, "previous_response_id": "resp_1"}),
    "a system text": ("/v1/messages", {"messages": HI, "system": WORDS, "max_tokens": 1}),
    **{
        path: (path, {"model": "m", "prompt": WORDS})
        for path in (
            *("/inference/v1/generate", "/invocations", "/cohere/v2/chat", "/rerank", "/score"),
            *("/v1/chat/completions/batch", "/pooling", "/classify", "/v1/completions/render"),
            *("/v1/score", "/v1/rerank", "/v2/embed", "/v2/rerank", "/generative_scoring"),
            *("/v1/moderations", "/v1/audio/speech", "/v1/images/generations", "/v1/unheard/of"),
        )
    },
    "ids to generate from": ("/inference/v1/generate", {"token_ids": IDS}),
    "a list": ("/pooling", {"input": [[7] * 50] * 100}),
}


async def statuses(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    path: str,
    body: dict[str, Any] | bytes,
    *,
    model: Path | None = None,
    content_type: str = "application/json",
) -> tuple[int, int]:
    """Return the status of a large request, and of a small one after it."""
    keys = (KeyConfig(name="k", sha256=sha256_of(KEY), tokens_per_minute=LIMIT),)
    router = await fleet.router(
        access=AccessConfig(keys=keys),
        tokenizer=TokenizerConfig(path=None if model is None else str(model)),
    )
    bearer = {"Authorization": f"Bearer {KEY}"}
    sent: dict[str, Any] = {"json": body} if isinstance(body, dict) else {"data": body}
    headers = bearer if isinstance(body, dict) else {**bearer, "Content-Type": content_type}
    async with client.post(router.url + path, headers=headers, **sent) as response:
        await response.read()
        first = response.status
    await router.record()
    small = {"model": "m", "messages": HI}
    async with client.post(router.url + CHAT, headers=bearer, json=small) as response:
        return first, response.status


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    """It may block its loop: to read a tokenizer."""
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(scripted())
        two = await stack.enter_async_context(scripted())
        yield Fleet(one=one, two=two, stack=stack)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("m") / "model", llama3(), TEMPLATES["agent"])


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("is_tokenized", [False, True])
async def test_what_is_computed_is_charged(
    fleet: Fleet, client: aiohttp.ClientSession, model: Path, name: str, is_tokenized: bool
) -> None:
    """The answer says nothing of what it took."""
    path, body = WAYS[name]
    fleet.one.will(json_answer({"id": "x", "choices": []}))
    found = await statuses(
        fleet, client, path, {"model": "m", **body}, model=model if is_tokenized else None
    )
    assert found == (200, 429)


async def test_an_answer_without_usage_is_charged(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.one.will(json_answer({"choices": [{"token_ids": IDS}]}))
    body = {"model": "m", "token_ids": [1], "sampling_params": {"max_tokens": 5000}}
    assert await statuses(fleet, client, "/inference/v1/generate", body) == (200, 429)


async def test_a_stream_that_its_client_leaves_is_charged(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.one.will(stream(*chat_events(*["word"] * 4000)))
    body = {"model": "m", "messages": HI, "stream": True}
    assert await statuses(fleet, client, CHAT, body) == (200, 429)


@pytest.mark.parametrize(
    ("usage", "status"),
    [
        ({"prompt_tokens": 100, "total_tokens": 100}, 200),
        ({"total_tokens": 100}, 200),
        ({"prompt_tokens": 100, "completion_tokens": 2000}, 429),
        ({"prompt_tokens": 5000, "total_tokens": 5000}, 429),
        ({"prompt_tokens": 0, "total_tokens": 0}, 429),
        ({}, 429),
    ],
)
@pytest.mark.parametrize("path", ["/v1/rerank", TEXT])
async def test_an_estimate_is_corrected_by_usage(
    fleet: Fleet, client: aiohttp.ClientSession, path: str, usage: dict[str, int], status: int
) -> None:
    fleet.one.will(json_answer({"usage": usage}))
    body = {"model": "m", "prompt": ["a", "x" * 20_000]}
    assert await statuses(fleet, client, path, body) == (200, status)


async def test_usage_charges_more_than_an_estimate(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.one.will(json_answer({"usage": {"prompt_tokens": 3000, "completion_tokens": 1}}))
    picture = {"type": "image_url", "image_url": {"url": "https://example.com/large.png"}}
    body = {"model": "m", "messages": [{"role": "user", "content": [picture]}]}
    assert await statuses(fleet, client, CHAT, body) == (200, 429)


async def test_exact_tokens_are_never_given_back(
    fleet: Fleet, client: aiohttp.ClientSession, model: Path
) -> None:
    """Some answers repeat what the client sent: it could hold a ``usage``."""
    fleet.one.will(json_answer({"usage": {"prompt_tokens": 1, "completion_tokens": 1}}))
    body = {"model": "m", "prompt": WORDS}
    assert await statuses(fleet, client, TEXT, body, model=model) == (200, 429)


@pytest.mark.parametrize(
    ("path", "body", "content_type"),
    [
        ("/tokenize", b'{"prompt": "%s"}' % (b"x" * 9000), "application/json"),
        ("/v1/messages/count_tokens", b'{"a": "%s"}' % (b"x" * 9000), "application/json"),
        # Half a minute of speech.
        ("/v1/audio/transcriptions", b"x" * 120_000, "multipart/form-data; boundary=x"),
    ],
)
async def test_little_work_is_charged_little(
    fleet: Fleet, client: aiohttp.ClientSession, path: str, body: bytes, content_type: str
) -> None:
    fleet.one.will(json_answer({"text": "hello"}))
    found = await statuses(fleet, client, path, body, content_type=content_type)
    assert found == (200, 200)


async def test_the_bytes_of_pictures_are_not_charged_as_text(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    """Though a stream does not say what they took."""
    fleet.one.will(stream(*chat_events("a")))
    url = "data:image/png;base64," + "A" * 100_000
    picture = {"type": "image_url", "image_url": {"url": url}}
    body = {"model": "m", "messages": [{"role": "user", "content": [picture]}], "stream": True}
    keys = (KeyConfig(name="k", sha256=sha256_of(KEY), tokens_per_minute=2 * LIMIT),)
    router = await fleet.router(access=AccessConfig(keys=keys))
    for _ in range(2):
        fleet.two.will(json_answer(CHAT_ANSWER))
        bearer = {"Authorization": f"Bearer {KEY}"}
        async with client.post(router.url + CHAT, headers=bearer, json=body) as response:
            await response.read()
            assert response.status == 200
