"""Our tokens are those of a running replica, by its own ``/tokenize``."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.agent_client import AgentClient
from router.config.settings import TokenizerConfig
from router.prompt.prompt_reader import PromptReader
from router.prompt.prompt_source import PromptSource, ServedModel
from router.proxy.upstream import client_session
from tests.e2e.serving import Replica

pytestmark = pytest.mark.vllm

USER = {"role": "user", "content": "Hello, who are you?"}
SYSTEM = {"role": "system", "content": " Be brief.\n"}
ANSWER = {"role": "assistant", "content": " I am a fox. "}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"place": "Zürich", "days": [1, 2.0]}'},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
            "name": "weather",
            "description": "Wetter für <einen> Ort",
        },
    }
]


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": one} for one in texts]


BODIES: dict[str, dict[str, Any]] = {
    "many turns": {"messages": [SYSTEM, *[USER, ANSWER] * 20, USER]},
    "calls": {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": text("rain", "later sun")},
        ],
        "tools": TOOLS,
    },
    "like special tokens": {
        "messages": [{"role": "user", "content": "<|begin|><|end|> <|user|>\n<|pad|><s>[INST]"}]
    },
    "prompt": {"prompt": "日本語 café e\u0301 👩‍👩‍👧 \u3000 ﬁ İ"},
}
"""Every other shape is compared in `tests/router/prompt/test_reader_vllm.py`, without a model."""


@pytest.fixture
def reader(model_dir: Path) -> PromptReader:
    return PromptReader.load(model_dir)


@pytest.mark.parametrize("name", BODIES)
async def test_tokens_are_those_of_the_replica(
    vllm_url: str, reader: PromptReader, name: str
) -> None:
    body = BODIES[name]
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{vllm_url}/tokenize", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        theirs = (await response.json())["tokens"]
    for _ in range(2):  # computed, and remembered
        prompt = await reader.read("/tokenize", body)
        assert prompt.exact, prompt.doubt
        assert list(prompt.token_ids or ()) == theirs


async def test_chat_completions_are_read_as_tokenize_is(
    vllm_url: str, reader: PromptReader
) -> None:
    # What the replica counts when it really generates.
    body = {"messages": BODIES["calls"]["messages"], "max_tokens": 1}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{vllm_url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        usage = (await response.json())["usage"]
    prompt = await reader.read("/v1/chat/completions", body)
    assert prompt.exact
    assert prompt.token_count == usage["prompt_tokens"]


async def test_the_replica_confirms_the_reader(vllm_url: str, reader: PromptReader) -> None:
    async with client_session() as session:
        assert await reader.verify(session, vllm_url)
    body = {"messages": [USER], "truncate_prompt_tokens": -1}
    assert reader.read_now("/v1/chat/completions", body).exact, "it told how long its context is"


async def test_the_agent_sends_what_the_replica_tokenizes_with(
    replica: Replica, tmp_path: Path
) -> None:
    """A router that sees nothing of its disk has its exact tokens."""
    source = PromptSource(TokenizerConfig(cache_directory=str(tmp_path)))
    elsewhere = ServedModel(id="m", root="on/another/machine")
    async with client_session() as session:
        agent = AgentClient(session, replica.agent_url)
        await source.learn([elsewhere], session=session, url=replica.url, headers={}, agent=agent)
    assert source.inexact() == {"m": None}
    assert source.reader_for("m").compared(replica.url) == (True, True)
