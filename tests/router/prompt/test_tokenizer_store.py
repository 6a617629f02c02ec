"""Tokenizers that agents send: kept, verified, bounded; used where ours is missing or another."""

import hashlib
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.agent_client import AgentError
from router.config.settings import ModelTokenizerConfig, TokenizerConfig
from router.prompt.prompt_reader import PromptReader
from router.prompt.prompt_source import PromptSource, ServedModel
from router.prompt.tokenizer_store import TokenizerStore, TokenizerStoreError
from router.proxy.upstream import client_session
from tests.router.prompt.chat_shapes import TEMPLATES, USER
from tests.router.prompt.helpers import Replica
from tests.router.prompt.tokenizer_makers import llama3, write_model
from warmroute_common.agent_protocol import GIVEN_TEMPLATE, TokenizerFile, TokenizerManifest

CHAT = "/v1/chat/completions"


class Agent:
    """Sends the files of a directory, and perhaps a given template."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.sent: list[str] = []
        self.fails = False

    @classmethod
    def of(cls, directory: Path, template: str | None = None) -> "Agent":
        files = {path.name: path.read_bytes() for path in directory.iterdir()}
        return cls(files | ({} if template is None else {GIVEN_TEMPLATE: template.encode()}))

    async def tokenizer(self) -> TokenizerManifest:
        if self.fails:
            raise AgentError("it is down")
        files = {
            name: TokenizerFile(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
            for name, data in self.files.items()
        }
        return TokenizerManifest(files=files)

    async def tokenizer_file(self, file: TokenizerFile) -> bytes:
        self.sent.append(file.sha256)
        every = self.files.values()
        return next(each for each in every if hashlib.sha256(each).hexdigest() == file.sha256)


def store(tmp_path: Path, **changes: Any) -> TokenizerStore:
    return TokenizerStore(TokenizerConfig(cache_directory=str(tmp_path / "cache"), **changes))


async def test_files_are_sent_once_and_again_if_they_are_damaged(tmp_path: Path) -> None:
    agent = Agent({"tokenizer.json": b"1", "additional_chat_templates/a.jinja": b"2"})
    manifest = await agent.tokenizer()
    for _ in range(2):  # a router that starts again
        directory = await store(tmp_path).fetch(agent, manifest)
        assert (directory / "additional_chat_templates" / "a.jinja").read_bytes() == b"2"
    assert len(agent.sent) == 2
    (directory / "tokenizer.json").write_bytes(b"3")
    assert await store(tmp_path).fetch(agent, manifest) == directory
    assert (directory / "tokenizer.json").read_bytes() == b"1"
    (directory / "chat_template.jinja").write_bytes(b"not sent")
    await store(tmp_path).fetch(agent, manifest)
    assert not (directory / "chat_template.jinja").exists()
    assert [directory] == [*directory.parent.iterdir()], "nothing unfinished is left"


async def test_the_least_recently_used_go_when_there_is_no_room(tmp_path: Path) -> None:
    kept = store(tmp_path, cache_bytes=25)
    agents = [Agent({"tokenizer.json": bytes([at]) * 10}) for at in range(3)]
    first = await kept.fetch(agents[0], await agents[0].tokenizer())
    second = await kept.fetch(agents[1], await agents[1].tokenizer())
    for at_s, each in enumerate((first, second)):
        os.utime(each, (at_s, at_s))  # the file system's clock is too coarse to tell them apart
    await kept.fetch(agents[0], await agents[0].tokenizer())
    third = await kept.fetch(agents[2], await agents[2].tokenizer())
    assert {first, third} == {*first.parent.iterdir()}
    assert not second.exists()


@pytest.mark.parametrize("name", ["../../escaped", "model.safetensors"])
async def test_files_that_are_not_a_tokenizers_are_not_asked_for(tmp_path: Path, name: str) -> None:
    agent = Agent({name: b"x"})
    with pytest.raises(TokenizerStoreError, match="not a file of a tokenizer"):
        await store(tmp_path).fetch(agent, await agent.tokenizer())
    assert not agent.sent


async def test_more_than_a_tokenizer_has_is_not_asked_for(tmp_path: Path) -> None:
    file = TokenizerFile(sha256="0" * 64, size=50 << 20)
    names = ("tokenizer.json", "tekken.json", "config.json")
    manifest = TokenizerManifest(files=dict.fromkeys(names, file))
    with pytest.raises(TokenizerStoreError, match="too much"):
        await store(tmp_path).fetch(Agent({}), manifest)


async def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = TokenizerStore(TokenizerConfig(cache_directory=str(tmp_path / "file" / "below")))
    agent = Agent({"tokenizer.json": b"x"})
    with pytest.raises(TokenizerStoreError, match=r"tokenizer\.cache_directory"):
        await kept.fetch(agent, await agent.tokenizer())


async def test_without_a_home_the_directory_for_temporary_files_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    agent = Agent({"tokenizer.json": b"x"})
    directory = await TokenizerStore(TokenizerConfig()).fetch(agent, await agent.tokenizer())
    assert directory.parent.parent == tmp_path


# --- what readers are made of


class Router:
    """A source of readers that sees no model's directory but the configured ones."""

    def __init__(self, tmp_path: Path, session: aiohttp.ClientSession, **config: Any) -> None:
        cache = str(tmp_path / "cache")
        self.now_s = 0.0
        self.source = PromptSource(
            TokenizerConfig(cache_directory=cache, **config), clock=lambda: self.now_s
        )
        self.session = session

    async def learn(self, replica: Replica, *models: ServedModel, agent: Agent | None) -> None:
        await self.source.learn(
            models, session=self.session, url=replica.url, headers={}, agent=agent
        )

    def chat(self, model: str) -> int:
        body = {"messages": [USER]}
        return self.source.reader_for(model).read_now(CHAT, body).token_count


async def started(stack: AsyncExitStack, model: Path, template: Path | None = None) -> Replica:
    replica = Replica(model)
    if template is not None:
        replica.reader = PromptReader.load(model, template)
    await stack.enter_async_context(replica.serving())
    return replica


async def test_an_agents_template_goes_before_the_models_own(
    tmp_path: Path, model: Path, stack: AsyncExitStack
) -> None:
    """Also where the tokenizer is on this machine: it is refuted, and the agent is asked."""
    template = tmp_path / "given.jinja"
    template.write_text(TEMPLATES["chatml"])
    replica = await started(stack, model, template)
    router = Router(tmp_path, await stack.enter_async_context(client_session()))
    agent = Agent.of(model, TEMPLATES["chatml"])
    for name, root in (("m", "somewhere/else"), ("m", str(model))):
        await router.learn(replica, ServedModel(id=name, root=root), agent=agent)
        assert router.source.inexact() == {"m": None}
        theirs = replica.reader.read_now(CHAT, {"messages": [USER]}).token_count
        assert router.chat("m") == theirs


async def test_several_models_have_several_tokenizers(
    tmp_path: Path, model: Path, stack: AsyncExitStack
) -> None:
    """One configured for a name, whose adapters use it too; one of an agent; and one missing."""
    other = write_model(tmp_path / "other", llama3(), TEMPLATES["chatml"])
    named = {"named": ModelTokenizerConfig(path=str(other))}
    session = await stack.enter_async_context(client_session())
    router = Router(tmp_path, session, models=named, ask_replicas=False)
    first, second, third = [await started(stack, each) for each in (other, model, model)]
    adapter = ServedModel(id="lora", root="a/named", adapter_path="/a")
    await router.learn(first, ServedModel(id="named", root="a/named"), adapter, agent=None)
    await router.learn(second, ServedModel(id="sent", root="a/sent"), agent=Agent.of(model))
    await router.learn(third, ServedModel(id="lost", root="a/lost"), agent=None)
    inexact = router.source.inexact()
    assert [*inexact] == ["named", "sent", "lost"]
    assert inexact["named"] is inexact["sent"] is None
    assert "no agent sends it" in (inexact["lost"] or "")
    assert router.source.reader_for("lora") is router.source.reader_for("named")
    assert not router.source.reader_for("lost").has_tokenizer
    assert router.chat("named") != router.chat("sent")


async def test_a_replica_that_other_replicas_contradict_does_not_change_their_tokenizer(
    tmp_path: Path, model: Path, stack: AsyncExitStack
) -> None:
    """Half way through an upgrade the old one counts; when no replica has it, the new one."""
    other = write_model(tmp_path / "other", llama3(), TEMPLATES["chatml"])
    old, new = await started(stack, model), await started(stack, other)
    router = Router(tmp_path, await stack.enter_async_context(client_session()))
    served = ServedModel(id="m", root="a/model")
    await router.learn(old, served, agent=Agent.of(model))
    await router.learn(new, served, agent=Agent.of(other))
    assert router.source.differs(new.url) and not router.source.differs(old.url)
    assert "differ" in (router.source.inexact()["m"] or "")
    router.source.forget(old.url)
    router.now_s += 3600
    await router.learn(new, served, agent=Agent.of(other))
    assert router.source.inexact() == {"m": None}


async def test_an_agent_that_fails_is_asked_again(
    tmp_path: Path, model: Path, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    replica, agent = await started(stack, model), Agent.of(model)
    session = await stack.enter_async_context(client_session())
    router = Router(tmp_path, session, ask_replicas=False)
    served, agent.fails = ServedModel(id="m", root="a/model"), True
    for _ in range(3):
        await router.learn(replica, served, agent=agent)
        assert "it is down" in (router.source.inexact()["m"] or "")
    assert caplog.text.count("no tokenizer of 'a/model'") == 1
    agent.fails = False
    await router.learn(replica, served, agent=agent)
    assert router.source.inexact() == {"m": None}


async def test_tokens_that_are_not_compared_are_not_called_exact_unless_the_files_are_known(
    tmp_path: Path, model: Path, stack: AsyncExitStack
) -> None:
    replica = await started(stack, model)
    replica.status = 500
    router = Router(tmp_path, await stack.enter_async_context(client_session()))
    served = ServedModel(id="m", root="a/model")
    agent = Agent.of(model)
    await router.learn(replica, served, agent=agent)
    assert router.source.inexact() == {"m": None}, "a class that is tested to be equal"
    router.source.forget(replica.url)
    agent.files["tokenizer_config.json"] = b'{"tokenizer_class": "StrangeTokenizer"}'
    await router.learn(replica, ServedModel(id="m", root="a/strange"), agent=agent)
    assert "not confirmed" in (router.source.inexact()["m"] or "")
