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

    def asked(self) -> float:
        """How many prompts' tokens it has told."""
        return prometheus(f"{self.router.url}/metrics").get(ANSWERED, 0.0)


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
        exact = f'warmroute_tokens_exact{{model="{MODEL}"}}'
        wait_until("its tokens are compared", lambda: exact in prometheus(f"{router.url}/metrics"))
        yield Serving(replica, router)


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
    assert (
        prometheus(f"{serving.router.url}/metrics")[f'warmroute_tokens_exact{{model="{MODEL}"}}']
        == 1.0
    )
    body = {"model": MODEL, "messages": [user(text(1))], "max_tokens": 2}
    first = call(f"{serving.router.url}/v1/chat/completions", body, timeout_s=300)
    body["messages"] += [first["choices"][0]["message"], user("And then?")]
    second = call(f"{serving.router.url}/v1/chat/completions", body, timeout_s=300)
    assert serving.asked() == 2.0
    whole = first["usage"]["prompt_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= whole
    samples = prometheus(f"{serving.router.url}/metrics")
    matched = sum(v for k, v in samples.items() if k.startswith("warmroute_matched_tokens_total{"))
    assert matched >= whole > 0, "the router knew it"
    prompts = sum(v for k, v in samples.items() if k.startswith("warmroute_prompt_tokens_total{"))
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
    before = serving.asked()
    headers = prometheus(f"{serving.router.url}/metrics")
    answer = call(f"{serving.router.url}/v1/chat/completions", body, timeout_s=300)
    samples = prometheus(f"{serving.router.url}/metrics")
    counted = 'warmroute_prompt_tokens_total{replica="own"}'
    assert serving.asked() == before + 1
    assert answer["usage"]["prompt_tokens"] == len(rendered)
    assert samples[counted] - headers.get(counted, 0.0) == len(rendered)
