"""The tokenizer's files over the agent's HTTP, and which files these are."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from cacheengine.agent.agent import Agent
from cacheengine.agent.served_tokenizer import ServedTokenizer
from cacheengine.settings.engine_config import EngineConfig
from tests.cacheengine.conftest import MakeBench
from tests.cacheengine.helpers import config
from tests.cacheengine.whole_replica import identity
from warmroute_common import agent_protocol as wire
from warmroute_common.api_errors import NotFoundError
from warmroute_common.fleet_secret import FleetSecret

SECRET = "known-to-the-fleet-alone"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "additional_chat_templates").mkdir(parents=True)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_text("weights")
    (directory / "private.pem").write_text("a key")
    (directory / "additional_chat_templates" / "rag.jinja").write_text("rag")
    return directory


@asynccontextmanager
async def asking(
    tmp_path: Path, make_bench: MakeBench, tokenizer: ServedTokenizer, shown: str = SECRET
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    bench = make_bench(8, config(tmp_path))
    settings = EngineConfig(lmcache_worker_port=0, fleet_secret=FleetSecret(SECRET))
    agent = Agent(bench.engine, identity("r"), settings, tokenizer=tokenizer)
    await asyncio.to_thread(agent.start)
    assert agent.address is not None
    base = "http://{}:{}".format(*agent.address)
    headers = {"Authorization": f"Bearer {shown}"}
    async with aiohttp.ClientSession(base, headers=headers) as session:
        yield session, base
    await asyncio.to_thread(agent.stop)


async def test_files_are_served_by_their_digests(
    tmp_path: Path, make_bench: MakeBench, model: Path
) -> None:
    """The tokenizer's, the model's templates and the one given to vLLM; and no others."""
    given = tmp_path / "given.jinja"
    given.write_text("given")
    served = ServedTokenizer(model, str(given))
    async with asking(tmp_path, make_bench, served) as (session, _):
        async with session.get("/tokenizer") as response:
            manifest = msgspec.json.decode(await response.read(), type=wire.TokenizerManifest)
        got = {}
        for name, file in manifest.files.items():
            async with session.get(f"/tokenizer/{file.sha256}") as response:
                got[name] = await response.read()
                assert (response.status, len(got[name])) == (200, file.size)
        async with session.get(f"/tokenizer/{'0' * 64}") as response:
            assert response.status == 404
    assert got == {
        "tokenizer.json": b"{}",
        "additional_chat_templates/rag.jinja": b"rag",
        wire.GIVEN_TEMPLATE: b"given",
    }


@pytest.mark.parametrize("path", ["/tokenizer", f"/tokenizer/{'0' * 64}"])
async def test_the_files_need_the_fleet_secret(
    tmp_path: Path, make_bench: MakeBench, model: Path, path: str
) -> None:
    served = ServedTokenizer(model)
    async with (
        asking(tmp_path, make_bench, served, shown="another") as (session, _),
        session.get(path) as response,
    ):
        assert response.status == 401


def test_a_file_that_changes_has_another_digest(model: Path) -> None:
    served = ServedTokenizer(model)
    before = served.manifest()
    (model / "tokenizer.json").write_text('{"version": "2"}')
    after = served.manifest()
    assert before.digest() != after.digest()
    assert served.content(after.files["tokenizer.json"].sha256) == b'{"version": "2"}'
    with pytest.raises(NotFoundError):
        served.content(before.files["tokenizer.json"].sha256)


def test_files_that_are_too_large_are_not_read(model: Path) -> None:
    with (model / "tokenizer.json").open("wb") as file:
        file.truncate(wire.MAX_TOKENIZER_FILE_BYTES + 1)
    with pytest.raises(NotFoundError, match="too large"):
        ServedTokenizer(model).manifest()


@pytest.mark.parametrize("directory", [None, "/no/such/directory"])
def test_a_replica_without_a_tokenizer_says_so(directory: str | None) -> None:
    with pytest.raises(NotFoundError, match="no tokenizer"):
        ServedTokenizer(None if directory is None else Path(directory)).manifest()


@pytest.mark.parametrize(
    ("given", "sent"), [("{{ messages }}", b"{{ messages }}"), ("template_alpaca.jinja", None)]
)
def test_a_template_that_is_not_a_file(model: Path, given: str, sent: bytes | None) -> None:
    """vLLM takes the template itself, too, and names of its own ones."""
    served = ServedTokenizer(model, given)
    file = served.manifest().files.get(wire.GIVEN_TEMPLATE)
    assert (None if file is None else served.content(file.sha256)) == sent


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "additional_chat_templates/../x.jinja", "tokenizer.json/x", "", "a.py"],
)
def test_names_that_no_tokenizer_has(name: str) -> None:
    assert not wire.is_tokenizer_file(name)
