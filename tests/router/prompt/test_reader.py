"""The reader as the proxy uses it: what is exact, what is not, and what that costs."""

import asyncio
import re
import subprocess
import sys
import threading
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.prompt.chat_messages import chat_tools
from router.prompt.chat_template import ChatTemplate
from router.prompt.prompt import Prompt
from router.prompt.prompt_reader import PromptReader
from router.prompt.token_cache import Memo, Piece
from router.proxy.upstream import client_session
from tests.router.prompt.chat_shapes import CALL, TEMPLATES, USER, WEATHER
from tests.router.prompt.helpers import LONG
from tests.router.prompt.tokenizer_makers import gpt2, llama3, write_model
from warmroute_common.api_errors import BadRequestError
from warmroute_common.config_reader import ConfigError
from warmroute_common.keys import TEXT_PIECE_CHARS, HashScheme, prompt_extra_keys

CHAT = "/v1/chat/completions"
SCHEME = HashScheme("xxhash")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), llama3(), TEMPLATES["parts"])


@pytest.fixture
def reader(model: Path) -> PromptReader:
    return PromptReader.load(model)


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


async def test_a_chat_has_exact_tokens_and_text(reader: PromptReader) -> None:
    prompt = await reader.read(CHAT, chat(USER))
    assert prompt.exact
    assert (
        list(prompt.token_ids or ()) == llama3().encode(prompt.text, add_special_tokens=False).ids
    )
    assert prompt.token_count == len(prompt.token_ids or ())
    assert prompt.text.endswith("</s><|assistant|>")


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, chat({"role": "user", "content": [IMAGE]})),
        (CHAT, chat(USER, chat_template="{{ 1 }}")),
        (CHAT, chat(USER, chat_template_kwargs={"chat_template": "x"})),
        (CHAT, chat(USER, chat_template_kwargs={"messages": []})),
        (CHAT, chat(USER, kv_transfer_params={"prompt_token_ids": [1]})),
        (CHAT, chat(USER, tools=[WEATHER], tool_choice="none")),
        (CHAT, chat(USER, truncate_prompt_tokens=-1)),
        (CHAT, chat(USER, truncate_prompt_tokens=3, add_special_tokens=True)),
        (CHAT, chat(USER, continue_final_message=True)),
        (CHAT, chat(said("user", "x\ud800"))),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/v1/completions", {"prompt": "a", "prompt_embeds": "AAAA"}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": "a", "padding": "max_length"}),
        ("/v1/embeddings", {"input": [{"role": "user", "content": "a"}]}),
        ("/v1/embeddings", {"input": [[{"role": "user", "content": "a"}]]}),
        ("/v1/embeddings", {"messages": [[{"role": "user", "content": "a"}]]}),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
        ("/v1/responses", {"input": "a", "previous_input_messages": []}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("/v1/responses", {"input": "a", "tools": [{"type": "custom", "name": "x"}]}),
        ("/v1/responses", {"input": "a", "truncation": "auto"}),
        ("/v1/messages", chat({"role": "user", "content": [{"type": "image", "source": {}}]})),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_what_is_not_certain_is_not_exact(
    reader: PromptReader, endpoint: str, body: dict[str, Any]
) -> None:
    prompt = await reader.read(endpoint, body)
    assert not prompt.exact
    assert prompt.doubt
    prompt.text_chain()
    prompt.chain(SCHEME, 16)


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": ["hello"]}, "messages[0]"),
        (CHAT, {"messages": [USER, {"content": "x"}]}, "messages[1].role"),
        (CHAT, chat({"role": "user", "content": 5}), "messages[0].content"),
        (CHAT, chat(USER, tools={}), "tools"),
        (CHAT, chat(USER, tools=[1]), "tools[0]"),
        (CHAT, chat(USER, chat_template_kwargs=[]), "chat_template_kwargs"),
        (CHAT, chat(USER, reasoning_effort=1), "reasoning_effort"),
        (CHAT, chat(USER, documents="x"), "documents"),
        (CHAT, chat(USER, documents=[{"a": 1}]), "documents[0]"),
        (CHAT, chat(USER, add_generation_prompt=[]), "add_generation_prompt"),
        (CHAT, chat(USER, truncate_prompt_tokens=-2), "truncate_prompt_tokens"),
        (CHAT, chat(USER, truncate_prompt_tokens=2, truncation_side="up"), "truncation_side"),
        (CHAT, chat(USER, cache_salt=""), "cache_salt"),
        (CHAT, chat(USER, cache_salt=5), "cache_salt"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": 5}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
        ("/v1/completions", {"prompt": [1, -2]}, "prompt"),
        ("/v1/completions", {"prompt": [1 << 40]}, "prompt"),
        ("/v1/embeddings", {"input": 5}, "input"),
        ("/v1/responses", {"input": 5}, "input"),
        ("/v1/responses", {"input": ["a"]}, "input[0]"),
        ("/v1/responses", {"input": "a", "tools": 5}, "tools"),
        ("/v1/messages", {"messages": 5}, "messages"),
        ("/v1/messages", chat({"role": "robot", "content": "x"}), "messages[0].role"),
        ("/v1/messages", chat({"role": "user"}), "messages[0].content"),
        ("/v1/messages", {"messages": [USER], "system": 5}, "system"),
        ("/v1/messages", {"messages": [USER], "tools": [5]}, "tools[0]"),
        ("/tokenize", {}, "prompt"),
    ],
)
@pytest.mark.parametrize("with_tokenizer", [True, False])
async def test_wrong_types_are_a_clear_error(
    reader: PromptReader, endpoint: str, body: dict[str, Any], param: str, with_tokenizer: bool
) -> None:
    used = reader if with_tokenizer else PromptReader(None)
    with pytest.raises(BadRequestError) as caught:
        await used.read(endpoint, body)
    assert caught.value.param == param
    assert re.split(r"[\[.]", param)[0] in caught.value.message


async def test_a_second_turn_costs_only_its_new_text(reader: PromptReader) -> None:
    turns = [said("system", "You are brief."), said("user", LONG)]
    first = await reader.read(CHAT, chat(*turns))
    first.chain(SCHEME, 16)
    before = (reader.memo.tokens_tokenized, reader.memo.blocks_hashed)
    turns += [said("assistant", "So it is."), said("user", "And why?")]
    second = await reader.read(CHAT, chat(*turns))
    keys = second.chain(SCHEME, 16)
    new = second.token_count - first.token_count
    assert reader.memo.tokens_tokenized - before[0] <= new < 80
    assert reader.memo.blocks_hashed - before[1] <= len(keys) - len(first.chain(SCHEME, 16)) + 1
    assert keys == SCHEME.chain(second.token_ids or [], 16)
    reader.memo.check()


async def test_keys_are_those_of_the_scheme_salt_and_adapter(reader: PromptReader) -> None:
    prompt = await reader.read("/v1/completions", {"prompt": LONG, "cache_salt": "pepper"})
    assert prompt.token_ids is not None
    lora = ("name", "/path")
    every, first = prompt_extra_keys(cache_salt="pepper", lora=lora)
    assert prompt.chain(SCHEME, 128, lora=lora) == SCHEME.chain(
        prompt.token_ids, 128, extra_keys=every, first_extra_keys=first
    )
    plain = await reader.read("/v1/completions", {"prompt": LONG})
    assert not set(plain.chain(SCHEME, 16)) & set(prompt.chain(SCHEME, 16))
    assert not set(plain.text_chain()) & set(prompt.text_chain())


async def test_text_keys_stand_for_all_that_is_before() -> None:
    reader = PromptReader(None)
    first = await reader.read("/v1/completions", {"prompt": LONG})
    other = await reader.read("/v1/completions", {"prompt": LONG[:3000] + "X" + LONG[3001:]})
    assert len(first.text_chain()) == len(LONG) // TEXT_PIECE_CHARS
    same = [a == b for a, b in zip(first.text_chain(), other.text_chain(), strict=True)]
    assert same == [True, True] + [False] * (len(same) - 2)


async def test_without_a_tokenizer_a_conversation_still_begins_alike() -> None:
    reader = PromptReader(None)
    turns = [said("system", "x" * 3000), said("user", "hello")]
    first = await reader.read(CHAT, chat(*turns))
    second = await reader.read(CHAT, chat(*turns, said("assistant", "y" * 3000)))
    assert first.token_ids is None
    assert first.token_count == -(-len(first.text) // 4)
    assert not first.exact
    assert second.text.startswith(first.text)
    assert first.chain(SCHEME, 16) == []


async def test_tokens_given_by_the_client_need_no_tokenizer() -> None:
    reader = PromptReader(None)
    ids = list(range(5000))
    prompt = await reader.read("/v1/completions", {"prompt": ids})
    assert prompt.exact
    assert list(prompt.token_ids or ()) == ids
    assert prompt.chain(SCHEME, 16) == SCHEME.chain(ids, 16)
    assert prompt.text_chain()


async def test_images_make_different_texts(reader: PromptReader) -> None:
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}
    texts = {
        (await reader.read(CHAT, chat({"role": "user", "content": [one]}))).text
        for one in (IMAGE, other)
    }
    assert len(texts) == 2


async def test_threads_read_the_same(reader: PromptReader) -> None:
    # Many at once find the memo empty, and fill it side by side.
    bodies = [chat(said("system", LONG), said("user", f"question {n % 5}")) for n in range(40)]
    prompts = await asyncio.gather(*(reader.read(CHAT, body) for body in bodies))
    fresh = PromptReader(None)
    for prompt in prompts:
        assert (
            list(prompt.token_ids or ())
            == llama3().encode(prompt.text, add_special_tokens=False).ids
        )
        assert prompt.chain(SCHEME, 16) == SCHEME.chain(prompt.token_ids or [], 16)
    assert fresh.memo.used_bytes == 0
    reader.memo.check()


def distinct(name: str) -> str:
    """Return a long text that shares nothing with one of another name."""
    return " ".join(f"{name}{number}words go on" for number in range(6000))


async def test_what_is_known_is_not_sent_to_a_thread(
    reader: PromptReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []

    async def noted(work: Callable[..., Prompt], *args: Any) -> Prompt:
        sent.append(work)
        return work(*args)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    document = said("system", distinct("one"))
    first = chat(document, said("user", "one"))
    burst = await asyncio.gather(*(reader.read(CHAT, first) for _ in range(5)))
    assert len(sent) == 1, "the others of the burst wait for the first one's tokens"
    later = await reader.read(CHAT, chat(document, said("user", "two")))
    assert len(sent) == 1
    for prompt in (*burst, later):
        assert (
            list(prompt.token_ids or ())
            == llama3().encode(prompt.text, add_special_tokens=False).ids
        )
    await reader.read(CHAT, chat(said("system", distinct("two"))))
    assert len(sent) == 2


async def test_a_long_new_prompt_is_rendered_once_and_tokenized_off_the_loop(
    reader: PromptReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered, tokenized = Mock(wraps=ChatTemplate.render), []

    def render(*args: Any, **options: Any) -> str:
        text: str = rendered(*args, **options)
        return text

    def add(memo: Memo, *args: Any) -> Piece:
        tokenized.append(threading.current_thread())
        return remember(memo, *args)

    remember = Memo.add
    monkeypatch.setattr(ChatTemplate, "render", render)
    monkeypatch.setattr(Memo, "add", add)
    await reader.read(CHAT, chat(said("system", distinct("one"))))
    assert rendered.call_count == 1
    assert tokenized
    assert threading.current_thread() not in tokenized


@pytest.mark.parametrize(("body_bytes", "in_loop"), [(200_000, True), (300_000, False)])
async def test_a_large_body_is_rendered_off_the_loop(
    reader: PromptReader, monkeypatch: pytest.MonkeyPatch, body_bytes: int, in_loop: bool
) -> None:
    """Whatever it holds: a schema of nulls has few characters, and takes long to render."""
    threads: list[threading.Thread] = []

    def render(*args: Any, **more: Any) -> str:
        threads.append(threading.current_thread())
        return made(*args, **more)

    made = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", render)
    await reader.read(CHAT, chat(USER), body_bytes)
    assert [each is threading.main_thread() for each in threads] == [in_loop]


def test_the_schemas_of_tools_are_not_copied() -> None:
    made = chat_tools([WEATHER])
    assert made is not None
    given = WEATHER["function"]["parameters"]
    assert made[0]["function"]["parameters"]["properties"] is given["properties"]


def test_reading_leaves_the_body_alone(reader: PromptReader) -> None:
    body = chat(USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, tools=[WEATHER])
    before = repr(body)
    reader.read_now(CHAT, body)
    assert repr(body) == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: (path / "tokenizer.json").unlink(),
        lambda path: (path / "tokenizer.json").write_text("{}"),
        lambda path: (path / "tokenizer.json").write_text("no json"),
        lambda path: (path / "tokenizer_config.json").write_text("[]"),
        lambda path: (path / "chat_template.jinja").write_text("{% for %}"),
    ],
)
def test_a_directory_that_cannot_be_used_is_a_clear_error(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    path = write_model(tmp_path, llama3(), "x")
    spoil(path)
    with pytest.raises(ConfigError) as caught:
        PromptReader.load(path)
    assert str(caught.value).count(";") >= 1  # says how to fix it


@pytest.mark.parametrize(
    ("config", "model", "files", "exact"),
    [
        ({}, {}, (), True),
        ({"tokenizer_class": "T5Tokenizer"}, {}, (), False),
        ({"auto_map": {"AutoTokenizer": ["a", "b"]}}, {}, (), False),
        ({"split_special_tokens": True}, {}, (), False),
        ({}, {}, ("preprocessor_config.json",), False),
        ({}, {}, ("tekken.json",), False),
    ],
)
def test_only_known_kinds_are_exact_without_being_confirmed(
    tmp_path: Path, config: dict[str, Any], model: dict[str, Any], files: tuple[str], exact: bool
) -> None:
    path = write_model(tmp_path, llama3(), TEMPLATES["chatml"], config=config, model=model)
    for name in files:
        (path / name).write_text("{}")
    reader = PromptReader.load(path)
    assert reader.read_now(CHAT, chat(USER)).exact is exact
    assert reader.read_now("/v1/completions", {"prompt": "x"}).exact is exact


def test_models_that_vllm_renders_in_its_own_way_have_no_chat_tokens(tmp_path: Path) -> None:
    path = write_model(tmp_path, llama3(), TEMPLATES["chatml"], model={"model_type": "gpt_oss"})
    reader = PromptReader.load(path)
    assert reader.read_now(CHAT, chat(USER)).token_ids is None
    assert reader.read_now("/v1/completions", {"prompt": "x"}).exact


class Replica:
    """A scripted /tokenize: the tokens of ``model``'s reader, spoiled by ``spoil``.

    A body that does not say it is JSON is refused, as vLLM refuses it.
    """

    def __init__(self, model: Path, spoil: Callable[[dict[str, Any], list[int]], Any]) -> None:
        self.reader = PromptReader.load(model)
        self.spoil = spoil
        self.asked = 0
        self.keys: set[str | None] = set()

    async def tokenize(self, request: web.Request) -> web.Response:
        self.asked += 1
        self.keys.add(request.headers.get("Authorization"))
        if request.content_type != "application/json":
            return web.json_response({"error": {}}, status=400)
        body = await request.json()
        prompt: Prompt = self.reader.read_now("/tokenize", body)
        answer = self.spoil(body, list(prompt.token_ids or ()))
        if isinstance(answer, int):
            return web.json_response({"error": {}}, status=answer)
        return web.json_response({"tokens": answer, "max_model_len": 4096, "count": len(answer)})


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """The router's own, which adds no header by itself."""
    async with client_session() as opened:
        yield opened


async def verified(
    reader: PromptReader,
    replica: Replica,
    session: aiohttp.ClientSession,
    headers: dict[str, str] | None = None,
) -> bool:
    app = web.Application()
    app.router.add_post("/tokenize", replica.tokenize)
    async with TestServer(app) as server:
        return await reader.verify(session, str(server.make_url("")), headers=headers)


async def test_a_replica_that_agrees_makes_tokens_exact(
    model: Path, tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    path = write_model(
        tmp_path, llama3(), TEMPLATES["parts"], config={"tokenizer_class": "Unheard"}
    )
    reader = PromptReader.load(path)
    assert not reader.read_now(CHAT, chat(USER)).exact
    assert await verified(reader, Replica(model, lambda body, ids: ids), session)
    assert reader.read_now(CHAT, chat(USER)).exact
    assert reader.read_now(CHAT, chat(USER, truncate_prompt_tokens=-1)).exact
    long = {"prompt": [1] * 4096, "truncate_prompt_tokens": -1}
    assert not reader.read_now("/v1/completions", long).exact, "4096 is what the context has"


async def test_a_replica_with_a_key_is_asked_with_it(
    reader: PromptReader, model: Path, session: aiohttp.ClientSession
) -> None:
    replica = Replica(model, lambda body, ids: ids)
    assert await verified(reader, replica, session, {"Authorization": "Bearer secret"})
    assert replica.keys == {"Bearer secret"}


async def test_another_template_on_the_replica_ends_chat_tokens_only(
    reader: PromptReader,
    tmp_path: Path,
    session: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = write_model(tmp_path, llama3(), TEMPLATES["chatml"])
    assert not await verified(reader, Replica(other, lambda body, ids: ids), session)
    prompt = reader.read_now(CHAT, chat(USER))
    assert prompt.token_ids is None
    assert "fox" not in prompt.text
    assert prompt.text
    assert reader.read_now("/v1/completions", {"prompt": "x"}).exact
    assert "--chat-template" in caplog.text


async def test_another_tokenizer_on_the_replica_ends_all_tokens(
    reader: PromptReader, tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    other = write_model(tmp_path, gpt2(), TEMPLATES["parts"])
    assert not await verified(reader, Replica(other, lambda body, ids: ids), session)
    assert reader.read_now(CHAT, chat(USER)).token_ids is None
    assert reader.read_now("/v1/completions", {"prompt": "x"}).token_ids is None
    # Another that agrees makes up for it: only the first is matched by text then.
    same = Replica(other, lambda body, ids: reader._claim(body) or 400)
    assert await verified(reader, same, session)
    assert reader.read_now(CHAT, chat(USER)).exact


async def test_a_replica_that_refuses_some_shapes_can_still_agree(
    reader: PromptReader, model: Path, session: aiohttp.ClientSession
) -> None:
    def refuses_tools(body: dict[str, Any], ids: list[int]) -> Any:
        return 400 if "tools" in body else ids

    assert await verified(reader, Replica(model, refuses_tools), session)


@pytest.mark.parametrize("status", [404, 500, 503])
async def test_a_replica_that_cannot_say_changes_nothing(
    reader: PromptReader, model: Path, session: aiohttp.ClientSession, status: int
) -> None:
    assert not await verified(reader, Replica(model, lambda body, ids: status), session)
    assert reader.read_now("/v1/completions", {"prompt": "x"}).exact
    assert not await reader.verify(session, "http://127.0.0.1:1")
    assert reader.read_now(CHAT, chat(USER)).exact


async def test_without_a_tokenizer_there_is_nothing_to_verify(
    model: Path, session: aiohttp.ClientSession
) -> None:
    replica = Replica(model, lambda body, ids: ids)
    assert not await verified(PromptReader(None), replica, session)
    assert replica.asked == 0


def test_reading_prompts_needs_no_torch_and_no_transformers() -> None:
    code = (
        "import sys, router.prompt; "
        "print(sorted({'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize("tokens", [100, 101])
async def test_token_ids_that_no_context_takes_are_refused_before_they_are_looked_at(
    reader: PromptReader, endpoint: str, tokens: int
) -> None:
    name = "input" if endpoint == "/v1/embeddings" else "prompt"
    used_bytes = reader.memo.used_bytes
    body = {name: list(range(tokens))}
    if tokens <= 100:
        assert (await reader.read(endpoint, body, max_tokens=100)).token_count == tokens
        return
    with pytest.raises(BadRequestError, match=r"has 101 tokens, .* context takes 100") as refused:
        await reader.read(endpoint, body, max_tokens=100)
    assert refused.value.code == "context_length_exceeded"
    assert reader.memo.used_bytes == used_bytes
    cut = await reader.read(endpoint, {**body, "truncate_prompt_tokens": 50}, max_tokens=100)
    assert cut.token_count == 50


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/embeddings", "/v1/responses"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("suffix", [None, "x"])
async def test_ids_in_an_array_are_read_as_those_in_a_list(
    reader: PromptReader, endpoint: str, nested: bool, suffix: str | None
) -> None:
    """A long list of ids comes as an array (`LongStrings`)."""
    ids = [7, 0x7FFF_FFFF, 3] * 200
    found = []
    for given in (ids, array("I", ids)):
        body = {name: [given] if nested else given for name in ("prompt", "input")}
        try:
            prompt = await reader.read(endpoint, {**body, "suffix": suffix})
            found.append((list(prompt.token_ids or ()), prompt.doubt, prompt.text))
        except BadRequestError as error:
            found.append(([], error.code, ""))
    assert found[0] == found[1]


def test_a_word_that_takes_too_much_memory_is_matched_by_its_text(reader: PromptReader) -> None:
    before = reader.memo.tokens_tokenized
    for body in (
        chat(said("user", "a" * 40_000)),
        chat(said("user", "a" * 40_000), {"role": "user", "content": [IMAGE]}),
    ):
        prompt = reader.read_now(CHAT, body)
        assert prompt.token_ids is None and "memory" in (prompt.doubt or "")
        assert "a" * 40_000 in prompt.text
    assert reader.memo.tokens_tokenized == before


def test_the_place_of_what_is_wrong_in_a_long_list_is_named(reader: PromptReader) -> None:
    documents: list[object] = [{"title": "a"}] * 10_000
    documents[9_000] = None
    with pytest.raises(BadRequestError, match=r"'documents\[9000\]': Expected `object`"):
        reader.read_now(CHAT, {**chat(said("user", "a")), "documents": documents})


async def test_a_text_that_is_far_too_long_is_not_tokenized(reader: PromptReader) -> None:
    text = distinct("one")
    most = len(text) // 16
    before = reader.memo.tokens_tokenized
    for max_tokens, endpoint, body in (
        (most - 1, "/v1/completions", {"prompt": text}),
        (most - 1, CHAT, chat(said("system", text))),
        (most - 1, CHAT, chat(said("system", text), {"role": "user", "content": [IMAGE]})),
    ):
        prompt = await reader.read(endpoint, body, max_tokens=max_tokens)
        assert prompt.token_ids is None and text in prompt.text
        assert reader.memo.tokens_tokenized == before
    assert (await reader.read(CHAT, chat(said("system", text)))).token_ids is not None


async def test_an_exact_prompt_that_no_context_takes_is_refused(reader: PromptReader) -> None:
    prompt = await reader.read("/v1/completions", {"prompt": LONG})
    assert prompt.exact
    count = prompt.token_count
    await reader.read("/v1/completions", {"prompt": LONG}, max_tokens=count)
    with pytest.raises(BadRequestError, match=f"has {count} tokens"):
        await reader.read("/v1/completions", {"prompt": LONG}, max_tokens=count - 1)
