"""Prompts whose tokens a replica tells: of which models, which replicas, and which prompts."""

import json
import shutil
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from router.config.settings import TokenizerConfig
from router.prompt.prompt import Prompt
from router.prompt.prompt_source import PromptSource, ServedModel
from router.prompt.replica_tokenizer import TokenizingReplica
from router.prompt.request_body import LARGE_BODY_BYTES
from router.proxy.upstream import client_session
from tests.router.prompt.helpers import LONG, Replica, image, limit_questions

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": LONG}]
ASK = {"model": "m", "messages": MESSAGES}


class Router:
    """A source of prompts that asks replicas."""

    def __init__(self, session: Any, **config: Any) -> None:
        self.now_s = 0.0
        self.session = session
        self.urls: list[str] = []
        self.source = PromptSource(TokenizerConfig(**config), clock=lambda: self.now_s)
        self.source.ask_replicas(
            session, lambda: [TokenizingReplica(url=each, load=0) for each in self.urls]
        )

    async def learn(self, replica: Replica, *models: ServedModel) -> None:
        if replica.url not in self.urls:
            self.urls.append(replica.url)
        await self.source.learn(models, session=self.session, url=replica.url, headers={})

    async def read(self, body: dict[str, Any], endpoint: str = CHAT) -> Prompt:
        return await self.source.read(endpoint, body, 0, body.get("model"), is_cut=False)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine changes nothing."""
    limit_questions(monkeypatch, 30.0)


@pytest.fixture
async def router(stack: AsyncExitStack) -> Router:
    return Router(await stack.enter_async_context(client_session()))


async def started(stack: AsyncExitStack, path: Path) -> Replica:
    replica = Replica(path)
    await stack.enter_async_context(replica.serving())
    return replica


def theirs(replica: Replica, body: dict[str, Any] = ASK, endpoint: str = CHAT) -> list[int]:
    return list(replica.reader.read_now(endpoint, body).token_ids or ())


async def test_chats_that_the_replicas_render_otherwise(
    stack: AsyncExitStack, router: Router, model: Path, other: Path
) -> None:
    replica = await started(stack, other)
    await router.learn(replica, ServedModel(id="m", root=str(model)))
    asked = replica.asked
    for options in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        if options.get("continue_final_message"):
            options["add_generation_prompt"] = False
        prompt = await router.read({**ASK, **options})
        assert prompt.exact
        assert list(prompt.token_ids or ()) == theirs(replica, {**ASK, **options})
    assert replica.asked == asked + 3
    assert (await router.read({"model": "m", "prompt": LONG}, "/v1/completions")).exact
    short = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    assert (await router.read(short)).token_ids is None
    assert replica.asked == asked + 3, (
        "texts are the router's own, and a short chat is not worth it"
    )
    assert router.source.inexact() == {"m": None}
    assert "tokens of its chats" in router.source.asked()["m"]


async def test_a_model_without_a_tokenizer(
    stack: AsyncExitStack, router: Router, model: Path
) -> None:
    """The same prompt of two tenants has no key in common; its tokens are asked for once."""
    replica = await started(stack, model)
    await router.learn(replica, ServedModel(id="m", root="not/here"))
    asked = replica.asked
    first = await router.read({**ASK, "cache_salt": "one"})
    second = await router.read({**ASK, "cache_salt": "two"})
    assert replica.asked == asked + 1
    assert first.exact and list(first.token_ids or ()) == theirs(replica)
    assert first.affinity != second.affinity
    text = {"model": "m", "prompt": LONG}
    prompt = await router.read(text, "/v1/completions")
    prompt_ids = list(prompt.token_ids or ())
    assert prompt_ids == theirs(replica, text, "/v1/completions")
    body = {"model": "m", "system": "Be brief.", "messages": MESSAGES}
    prompt = await router.read(body, "/v1/messages")
    assert list(prompt.token_ids or ()) == theirs(replica, body, "/v1/messages")
    cut = await router.read({**text, "truncate_prompt_tokens": 10}, "/v1/completions")
    assert not cut.exact, "special tokens at the ends may survive"
    assert list(cut.token_ids or ()) == list(prompt_ids[-10:])
    assert router.source.inexact() == {"m": None}


@pytest.mark.parametrize("size", [LARGE_BODY_BYTES, 5 << 20])
async def test_of_a_large_body_only_the_question_is_kept(
    stack: AsyncExitStack,
    router: Router,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
) -> None:
    replica = await started(stack, model)
    await router.learn(replica, ServedModel(id="m", root="not/here"))
    asker = router.source.replica_tokenizer
    assert asker is not None
    ask, content, held = asker.tokens, (LONG * (size // len(LONG) + 1))[: size + 1], []

    async def tokens(*given: Any) -> Any:
        held.append(sys.getrefcount(content))
        return await ask(*given)

    monkeypatch.setattr(asker, "tokens", tokens)
    references = sys.getrefcount(content)
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    prompt = await router.source.read(CHAT, body, len(content), "m", is_cut=False)
    assert body == {}
    assert sys.getrefcount(content) == references
    if size == LARGE_BODY_BYTES:
        assert held == [references]
        body = {"messages": [{"role": "user", "content": content}]}
        assert list(prompt.token_ids or ()) == theirs(replica, body)
    else:
        assert held == [] and prompt.token_ids is None, "too long to be asked about"


async def test_no_media_are_sent(stack: AsyncExitStack, router: Router, model: Path) -> None:
    replica = await started(stack, model)
    await router.learn(replica, ServedModel(id="m", root="not/here"))
    asked = replica.asked
    for part in (image(b"x"), {"image_url": "http://host/1.png"}, {"type": "input_audio"}):
        content = [{"type": "text", "text": LONG}, part]
        prompt = await router.read(
            {"model": "m", "messages": [{"role": "user", "content": content}]}
        )
        assert prompt.token_ids is None
    assert replica.asked == asked


async def test_several_models_are_told_by_their_own_replicas(
    stack: AsyncExitStack, router: Router, model: Path, other: Path
) -> None:
    one, two = await started(stack, model), await started(stack, other)
    await router.learn(one, ServedModel(id="m", root="a"))
    await router.learn(two, ServedModel(id="n", root="b"))
    for name, replica in (("m", one), ("n", two)):
        prompt = await router.read({**ASK, "model": name})
        assert list(prompt.token_ids or ()) == theirs(replica)
    assert not router.source.differs(one.url) and not router.source.differs(two.url)


async def test_replicas_that_disagree_with_each_other(
    stack: AsyncExitStack, router: Router, model: Path, other: Path
) -> None:
    """The most alike are asked, and the others are matched by text, which is a fault."""
    served = ServedModel(id="m", root="not/here")
    one, two, three = [await started(stack, each) for each in (other, model, model)]
    for each in (one, two, three):
        await router.learn(each, served)
    asked = one.asked
    for at in range(4):
        body = {"model": "m", "messages": [{"role": "user", "content": f"{at} {LONG}"}]}
        assert list((await router.read(body)).token_ids or ()) == theirs(two, body)
    assert one.asked == asked
    assert [each for each in (one, two, three) if router.source.differs(each.url)] == [one]
    assert one.url in (router.source.inexact()["m"] or "")
    # When all of them change, as templates do that write the date, none stays behind.
    for each in (two, three):
        each.reader = one.reader
    router.source.compare_again(two.url)
    for _ in range(2):
        for each in (one, two, three):
            await router.learn(each, served)
    assert not any(router.source.differs(each.url) for each in (one, two, three))
    assert router.source.inexact() == {"m": None}


async def test_no_answer_is_a_fault(
    stack: AsyncExitStack, router: Router, model: Path, other: Path
) -> None:
    replica = await started(stack, other)
    await router.learn(replica, ServedModel(id="m", root=str(model)))
    replica.status = 500
    for _ in range(3):
        assert router.source.inexact() == {"m": None}
        prompt = await router.read(ASK)
        assert prompt.token_ids is None and LONG in prompt.text, "it is matched by text"
        router.now_s += 60.0
    assert "does not tell them in time" in (router.source.inexact()["m"] or "")


async def test_a_setting_turns_it_off(stack: AsyncExitStack, model: Path, other: Path) -> None:
    router = Router(await stack.enter_async_context(client_session()), ask_replicas=False)
    replica = await started(stack, other)
    await router.learn(replica, ServedModel(id="m", root=str(model)))
    asked = replica.asked
    assert (await router.read(ASK)).token_ids is None
    assert replica.asked == asked
    assert "differ" in (router.source.inexact()["m"] or "")
    assert router.source.asked() == {}


def of_kind(model: Path, path: Path, kind: str) -> Path:
    """Return a copy of a model's directory for another type of model."""
    shutil.copytree(model, path)
    (path / "config.json").write_text(json.dumps({"model_type": kind}))
    return path


RENDERED = {
    "deepseek_v32": "/tokenize",
    "gpt_oss": "/v1/chat/completions/render",
    "kimi_k3": None,
}


@pytest.mark.parametrize("kind", RENDERED)
async def test_models_that_vllm_renders_in_its_own_code(
    stack: AsyncExitStack, router: Router, model: Path, tmp_path: Path, kind: str
) -> None:
    """Where /tokenize renders a chat otherwise than chats are, its answer is not used."""
    replica = await started(stack, model)
    here, path = of_kind(model, tmp_path / kind, kind), RENDERED[kind]
    await router.learn(replica, ServedModel(id="m", root=str(here)))
    before = len(replica.paths)
    prompt = await router.read({**ASK, "reasoning_effort": "high"})
    if path is None:
        assert prompt.token_ids is None and len(replica.paths) == before
        assert "in a way of its own" in (router.source.inexact()["m"] or "")
        return
    assert prompt.exact and replica.paths[before:] == [path]
    assert router.source.inexact() == {"m": None}
    assert kind in router.source.asked()["m"]


@pytest.mark.parametrize("renders", [403, 404, 0])
async def test_gpt_oss_needs_a_replica_that_renders(
    stack: AsyncExitStack, router: Router, model: Path, tmp_path: Path, renders: int
) -> None:
    replica = await started(stack, model)
    replica.renders = renders
    here = of_kind(model, tmp_path / "oss", "gpt_oss")
    await router.learn(replica, ServedModel(id="m", root=str(here)))
    assert router.source.reader_for("m").compared(replica.url)[0] is True, "texts are compared"
    assert (await router.read(ASK)).token_ids is None
    assert "--enable-scale-out" in (router.source.inexact()["m"] or "")


async def test_what_a_replica_may_tell_wrongly_is_not_called_exact(
    stack: AsyncExitStack, router: Router, model: Path
) -> None:
    """vLLM shortens long ids of tool calls for Mistral's tokenizers in chats only."""
    replica = await started(stack, model)
    await router.learn(replica, ServedModel(id="m", root="not/here"))
    for name, exact in (("call00001", True), ("call_of_more_characters", False)):
        call = {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [
            *MESSAGES,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": name, "content": "rain"},
        ]
        prompt = await router.read({"model": "m", "messages": messages})
        assert prompt.token_ids is not None
        assert prompt.exact is exact
