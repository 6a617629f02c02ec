"""The clients that people use, unchanged, before a router process and all that replicas offer."""

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from tests.e2e.openai_server import SOUND, OpenAIServer
from tests.servers import missing

pytestmark = pytest.mark.asyncio(loop_scope="module")

NODE = Path(__file__).parent / "node"
LARGE = "gpt-4o"
"""An alias."""
HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CITY = {"type": "json_schema", "json_schema": {"name": "city", "schema": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def base_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A router process before two replicas of different models."""
    path = tmp_path_factory.mktemp("router") / "router.yaml"
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(OpenAIServer(*models).serving())
            for models in (["large"], ["embedder", "whisper"])
        ]
        settings = {
            "port": 0,
            "replicas": [{"url": each.url} for each in servers],
            "model_aliases": {LARGE: "large"},
        }
        path.write_text(json.dumps(settings))  # JSON is YAML
        router = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "router", "serve", "--config", str(path)),
            stderr=asyncio.subprocess.PIPE,
        )
        assert router.stderr is not None
        try:
            line = b""
            while b"OPENAI_BASE_URL=" not in line:
                line = await router.stderr.readline()
                assert line, "the router has ended"
            draining = asyncio.create_task(router.stderr.read())
            yield line.split(b"OPENAI_BASE_URL=")[1].strip().decode()
        finally:
            router.terminate()
            await router.wait()
        log = (await draining).decode()
        assert "Traceback" not in log, log


@pytest_asyncio.fixture(loop_scope="module")
async def client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as made:
        yield made


async def test_chat_and_completions(client: openai.AsyncOpenAI) -> None:
    chat = client.chat.completions.create
    whole = await chat(model=LARGE, messages=HELLO, n=2, logprobs=True)
    assert [each.message.content for each in whole.choices] == ["hi", "hi"]
    assert whole.choices[1].logprobs.content[0].token == "hi"
    called = await chat(model=LARGE, messages=HELLO, tools=[WEATHER])
    assert called.choices[0].message.tool_calls[0].function.name == "weather"
    structured = await chat(model=LARGE, messages=HELLO, response_format=CITY)
    assert json.loads(structured.choices[0].message.content) == {"city": "Paris"}
    seen = await chat(model=LARGE, messages=[{"role": "user", "content": [IMAGE]}])
    assert seen.choices[0].message.content == "an image"
    streamed = await chat(
        model=LARGE, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [each async for each in streamed]
    assert "".join(each.choices[0].delta.content for each in chunks[:-1]) == "hi"
    assert chunks[-1].usage.total_tokens == 11
    completion = await client.completions.create(model="large", prompt=["hello"], n=2)
    assert [each.text for each in completion.choices] == ["hi", "hi"]
    with pytest.raises(openai.BadRequestError):
        await chat(model=LARGE, messages=HELLO, temperature=3)


async def test_responses(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model="large", input="hello")
    assert made.output_text == "hi"
    again = await client.responses.create(
        model="large", input="more", previous_response_id=made.id, stream=True
    )
    assert [each.type async for each in again][-1] == "response.completed"
    assert (await client.responses.retrieve(made.id)).id == made.id
    assert (await client.responses.cancel(made.id)).status == "cancelled"


async def test_what_has_no_text_to_answer(client: openai.AsyncOpenAI) -> None:
    embedded = await client.embeddings.create(
        model="embedder", input="hello", encoding_format="float"
    )
    assert embedded.data[0].embedding == [0.5, -0.25]
    file = ("f.wav", SOUND, "audio/wav")
    heard = await client.audio.transcriptions.create(model="whisper", file=file)
    assert heard.text == f"heard {len(SOUND)} bytes"
    hearing = await client.audio.transcriptions.create(model="whisper", file=file, stream=True)
    assert [each.type async for each in hearing][-1] == "transcript.text.done"
    with pytest.deprecated_call():  # in the client: OpenAI has ended it, vLLM has it
        translated = await client.audio.translations.create(model="whisper", file=file)
    assert translated.text == "translated"
    async with client.audio.speech.with_streaming_response.create(
        model="whisper", voice="alloy", input="hello"
    ) as speech:
        assert await speech.read() == SOUND
    drawn = await client.images.generate(model="large", prompt="x")
    edited = await client.images.edit(model="large", prompt="x", image=file)
    assert (drawn.data[0].b64_json, edited.data[0].b64_json) == ("AAAA", "BBBB")
    assert (await client.moderations.create(model="large", input="x")).id == "modr-1"


async def test_files_and_batches(client: openai.AsyncOpenAI) -> None:
    file = await client.files.create(file=("f.jsonl", b"{}\n"), purpose="batch")
    assert [each.id async for each in client.files.list()] == [file.id]
    assert (await client.files.retrieve(file.id)).filename == "f"
    assert (await client.files.content(file.id)).content == SOUND
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert (await client.batches.retrieve(batch.id)).status == "validating"
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    assert (await client.files.delete(file.id)).deleted


async def test_models_and_what_vllm_adds(client: openai.AsyncOpenAI, base_url: str) -> None:
    assert {each.id async for each in client.models.list()} == {
        *("large", "embedder", "whisper", LARGE)
    }
    assert (await client.models.retrieve(LARGE)).id == LARGE
    with pytest.raises(openai.NotFoundError, match="served: embedder, gpt-4o, large, whisper"):
        await client.embeddings.create(model="none", input="x")
    ask = {"model": "embedder", "query": "a", "documents": ["b"]}
    ranked = await client.post("/rerank", body=ask, cast_to=object)
    assert isinstance(ranked, dict) and ranked["results"][0]["relevance_score"] == 0.9
    root = client.with_options(base_url=base_url.removesuffix("/v1"))
    for path, key in (("/score", "data"), ("/tokenize", "tokens")):
        assert key in await root.post(path, body={"model": "embedder"}, cast_to=dict)


async def run(*command: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def test_curl(base_url: str, tmp_path: Path) -> None:
    """Without a content type it says that its JSON is a form; of a form it sends the file first."""
    if shutil.which("curl") is None:
        missing("curl")
    (tmp_path / "f").write_bytes(SOUND)
    json_body = json.dumps({"model": LARGE, "messages": HELLO})
    code, out = await run("curl", "-sS", f"{base_url}/chat/completions", "-d", json_body)
    assert (code, json.loads(out)["choices"][0]["message"]["content"]) == (0, "hi")
    form = ("-F", f"file=@{tmp_path / 'f'}", "-F", "model=whisper")
    code, out = await run("curl", "-sS", f"{base_url}/audio/transcriptions", *form)
    assert (code, json.loads(out)["text"]) == (0, f"heard {len(SOUND)} bytes")


async def test_openais_client_for_node(base_url: str) -> None:
    code, out = await run("node", str(await asyncio.to_thread(node_script)), base_url)
    assert code == 0, out


def node_script() -> Path:
    """Return the script where its locked packages are installed: outside of the checkout."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        missing("Node with npm")
    locked = (NODE / "package-lock.json").read_bytes()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = home / f"warmroute-node-{hashlib.sha256(locked).hexdigest()[:12]}"
    if not directory.exists():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix="warmroute-node-") as made:
            whole = shutil.copytree(NODE, Path(made, "whole"))
            install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            done = subprocess.run(install, cwd=whole, capture_output=True, text=True, check=False)
            if done.returncode:
                missing("npm's openai", f"npm ci fails: {done.stderr.strip()[-300:]}")
            whole.rename(directory)
    shutil.copy(NODE / "client.mjs", directory)
    return directory / "client.mjs"
