"""A vLLM that renders chats in its own code: the router asks it for their tokens."""

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.config.settings import ReplicaConfig, RouterConfig
from router.launch.processes import ProcessGroup
from router.prompt.replica_tokenizer import Told
from tests.e2e.serving import BLOCK_TOKENS, MODEL, Replica, replica_on_free_ports
from tests.e2e.test_tokenize_exact import CALL, TOOLS
from tests.router.agent_server import until
from tests.router.conftest import Running, run_router
from tests.router.prompt.helpers import limit_questions

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

CHAT = "/v1/chat/completions"
WORDS = ("import", "return", "value", "the", "of", "and", "length", "string", "list", "number")


@pytest.fixture(scope="module")
def replica(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """It renders chats as DeepSeek V3.2 wants them, not with the model's template."""
    directory = tmp_path_factory.mktemp("own-rendering")
    arguments = ["--tokenizer-mode", "deepseek_v32", "--enable-scale-out"]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with ProcessGroup() as group:
        started = replica_on_free_ports(group, "own", model_dir, directory, vllm_args=arguments)
        started.start()
        started.wait_ready()
        yield started


@pytest.fixture
async def router(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    """A router in this process, so that a slow machine can be waited for."""
    limit_questions(monkeypatch, 60.0)
    entry = ReplicaConfig(url=replica.url, agent_url=replica.agent_url, instance_id="own")
    async with AsyncExitStack() as stack:
        running = await run_router(stack, RouterConfig(port=0, replicas=(entry,)))
        asked = running.parts.prompts.asked
        await until(lambda: MODEL in asked())
        yield running


def answered(router: Running) -> int:
    """Return how many prompts' tokens the replica has told."""
    tokenizer = router.parts.prompts.replica_tokenizer
    assert tokenizer is not None
    return tokenizer.counts[Told.ANSWERED]


async def post(url: str, body: dict[str, Any]) -> Any:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def text(seed: int, chars: int = 9000) -> str:
    """Return a text that is long enough to be asked about."""
    generator = random.Random(seed)
    words = ""
    while len(words) < chars:
        words += " ".join(generator.choices(WORDS, k=50)) + ".\n"
    return words


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def test_its_chats_are_matched_by_its_own_tokens(router: Running) -> None:
    assert router.parts.prompts.inexact() == {MODEL: None}
    messages = [user(text(1))]
    body = {"model": MODEL, "messages": messages, "max_tokens": 2}
    first = await post(router.url + CHAT, body)
    messages += [first["choices"][0]["message"], user("And then?")]
    second = await post(router.url + CHAT, body)
    assert answered(router) == 2
    whole = first["usage"]["prompt_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole
    record = await router.record(2)
    assert record.is_exact and record.prompt_tokens == second["usage"]["prompt_tokens"]
    assert sum(record.matched_tokens.values()) >= whole > 0, "the router knew it"


BODIES: dict[str, dict[str, Any]] = {
    "system": {"messages": [{"role": "system", "content": "Be brief."}, user(text(2))]},
    "thinking": {
        "messages": [user(text(3)), {"role": "assistant", "content": "x"}, user("y")],
        "reasoning_effort": "high",
    },
    "tools": {
        "messages": [
            user(text(4)),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ],
        "tools": TOOLS,
    },
    "kwargs": {"messages": [user(text(5))], "chat_template_kwargs": {"thinking": True}},
}


@pytest.mark.parametrize("name", BODIES)
async def test_what_it_tells_is_what_it_computes(
    router: Running, replica: Replica, name: str
) -> None:
    """By the tokens that vLLM's /render gives for the request, and the count of the answer."""
    body = {"model": MODEL, "max_tokens": 1, **BODIES[name]}
    rendered = (await post(f"{replica.url}{CHAT}/render", body))["token_ids"]
    prompt = await router.parts.prompts.read(CHAT, body, 0, MODEL, is_cut=False)
    assert prompt.exact and list(prompt.token_ids or ()) == rendered
    answer = await post(router.url + CHAT, body)
    assert answer["usage"]["prompt_tokens"] == len(rendered)
    assert answered(router) == 1, "the request needed no second question"
