"""A vLLM that renders chats in its own code: the router asks it for their tokens."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.replica.tiers import call, wait_until
from cacheengine.launch.vllm_launch import free_ports
from router.launch.processes import ProcessGroup
from tests.e2e.serving import (
    BLOCK_TOKENS,
    MODEL,
    Replica,
    Router,
    prometheus,
    replica_on_free_ports,
)
from tests.e2e.test_tokenize_exact import CALL, TOOLS

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = ("import", "return", "value", "the", "of", "and", "length", "string", "list", "number")
ANSWERED = 'warmroute_replica_tokenize_results_total{result="answered"}'


@dataclass
class Serving:
    """A replica, and a router before it."""

    replica: Replica
    router: Router

    def metric(self, name: str) -> float:
        """Return the sum of one of the router's metrics; ``name`` may have its first labels."""
        samples = prometheus(f"{self.router.url}/metrics")
        return sum(value for key, value in samples.items() if key.startswith(name))


@pytest.fixture(scope="module")
def serving(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The replica renders chats as DeepSeek V3.2 wants them, not with the model's template."""
    directory = tmp_path_factory.mktemp("own-rendering")
    arguments = ["--tokenizer-mode", "deepseek_v32", "--enable-scale-out"]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with ProcessGroup() as group:
        replica = replica_on_free_ports(group, "own", model_dir, directory, vllm_args=arguments)
        replica.start()
        replica.wait_ready()
        entry = {"url": replica.url, "agent_url": replica.agent_url, "instance_id": "own"}
        settings = {"port": free_ports(1)[0], "replicas": [entry]}
        router = Router(group, "router", directory, settings)
        router.start()
        made = Serving(replica, router)
        wait_until("its tokens are compared", lambda: made.metric("warmroute_tokens_exact") == 1.0)
        yield made


def text(seed: int, chars: int = 9000) -> str:
    """Return a text that is long enough to be asked about."""
    generator = random.Random(seed)
    words = ""
    while len(words) < chars:
        words += " ".join(generator.choices(WORDS, k=50)) + ".\n"
    return words


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_its_chats_are_matched_by_its_own_tokens(serving: Serving) -> None:
    names = (ANSWERED, "warmroute_matched_tokens_total", "warmroute_prompt_tokens_total")
    before = [serving.metric(name) for name in names]
    messages = [user(text(1))]
    body = {"model": MODEL, "messages": messages, "max_tokens": 2}
    first = call(f"{serving.router.url}/v1/chat/completions", body, timeout_s=300)
    messages += [first["choices"][0]["message"], user("And then?")]
    second = call(f"{serving.router.url}/v1/chat/completions", body, timeout_s=300)
    after = [serving.metric(name) for name in names]
    asked, matched, prompts = (new - old for new, old in zip(after, before, strict=True))
    whole = first["usage"]["prompt_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole
    assert asked == 2 and matched >= whole > 0, "the router knew it"
    counted = [each["usage"]["prompt_tokens"] for each in (first, second)]
    assert prompts == sum(counted), "and how long each prompt is"


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
def test_what_it_tells_is_what_it_computes(serving: Serving, name: str) -> None:
    """By the tokens that vLLM's /render gives for the request, and the count of the answer."""
    body = {"model": MODEL, "max_tokens": 1, **BODIES[name]}
    rendered = call(f"{serving.replica.url}/v1/chat/completions/render", body)["token_ids"]
    names = (ANSWERED, "warmroute_prompt_tokens_total")
    before = [serving.metric(name) for name in names]
    answer = call(f"{serving.router.url}/v1/chat/completions", body, timeout_s=300)
    after = [serving.metric(name) for name in names]
    assert answer["usage"]["prompt_tokens"] == len(rendered)
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, len(rendered)]
