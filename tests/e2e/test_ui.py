"""The page and `warmroute top` as people use them: a router process, simulated replicas."""

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from playwright.async_api import Locator, async_playwright, expect

from bench.screenshots import launched, program
from tests.servers import missing
from warmroute_common.admin_token import admin_token_headers

SIZES = ("--gpu-tokens", "65536", "--cpu-tokens", "8192", "--disk-tokens", "0")
PATIENT_MS = 60_000
TURNS = 3
LONG = " ".join(f"w{number:04}" for number in range(2800))
expect.set_options(timeout=PATIENT_MS)


@dataclass(frozen=True)
class Stage:
    """A router before two replicas, of which the second can be ended."""

    url: str
    second: Process


@asynccontextmanager
async def process(
    *module: str, stdout: int | None = None, stderr: int | None = None
) -> AsyncIterator[Process]:
    command = (sys.executable, "-m", *module)
    started = await asyncio.create_subprocess_exec(*command, stdout=stdout, stderr=stderr)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.terminate()
        await started.wait()


async def line_with(stream: asyncio.StreamReader | None, text: bytes) -> bytes:
    assert stream is not None
    while text not in (line := await stream.readline()):
        assert line, f"ended without {text!r}"
    return line


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        replicas, simulators = [], []
        for name in ("first", "second"):
            simulator = await stack.enter_async_context(
                process("simulator", "--json", "--replicas", "1", *SIZES, stdout=PIPE)
            )
            (told,) = json.loads(await line_with(simulator.stdout, b"{"))["replicas"]
            replicas.append(
                {key: told[key] for key in ("url", "agent_url")} | {"instance_id": name}
            )
            simulators.append(simulator)
        path = tmp_path / "router.yaml"
        # With copies the chat's home is a matter of milliseconds, which a busy machine may take.
        settings = {"port": 0, "replicas": replicas, "prefetch": {"enabled": False}}
        path.write_text(json.dumps(settings))  # JSON is YAML
        router = await stack.enter_async_context(
            process("router", "serve", "--config", str(path), stderr=PIPE)
        )
        line = await line_with(router.stderr, b"OPENAI_BASE_URL=")
        url = line.split(b"OPENAI_BASE_URL=")[1].strip().decode().removesuffix("/v1")
        assert router.stderr is not None
        log = asyncio.create_task(router.stderr.read())
        yield Stage(url, simulators[1])
        router.terminate()
        assert "Traceback" not in (await log).decode()


async def chat(url: str, client: aiohttp.ClientSession) -> str:
    """Ask the same twice and more; return the replica that answered each time."""
    body: dict[str, Any] = {
        "model": "sim",
        "messages": [{"role": "user", "content": LONG}],
        "stream": True,
        "max_tokens": 4,
    }
    went_to = set()
    for _ in range(TURNS):
        headers = {"x-session-id": "a chat"}
        chat = client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
        async with chat as response:
            assert response.status == 200
            await response.read()
            went_to.add(response.headers["x-warmroute-replica"])
    (home,) = went_to
    return home


async def top_once(url: str) -> str:
    async with process("router", "top", "--once", "--router", url, stdout=PIPE) as top:
        assert top.stdout is not None
        return (await top.stdout.read()).decode()


async def percent(cell: Locator) -> int:
    await expect(cell).to_have_text(re.compile(r"^[1-9][0-9]*%$"))
    return int((await cell.inner_text()).rstrip("%"))


async def test_a_chat_warms_its_home_and_all_of_it_is_seen(stage: Stage) -> None:
    if program() is None:
        missing("chromium")
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        browser = await stack.enter_async_context(
            launched(await stack.enter_async_context(async_playwright()))
        )
        page = await browser.new_page()
        errors: list[str] = []
        hosts: set[str] = set()
        page.on("console", lambda told: errors.extend([told.text] * (told.type == "error")))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda asked: hosts.add("/".join(asked.url.split("/")[:3])))
        await page.set_extra_http_headers(admin_token_headers(stage.url))
        await page.goto(f"{stage.url}/ui")
        rows = page.locator("#fleet tr")
        await expect(rows.locator(".note")).to_have_text(["KV events, agent"] * 2)

        home = await chat(stage.url, client)
        row = rows.filter(has_text=home)
        await expect(page.locator("#requests tr")).to_have_count(TURNS)
        await expect(page.locator("#requests .swatch.gpu")).to_have_count(TURNS - 1)
        await expect(row.locator("td").last).to_have_text("1")
        await expect(page.locator("#chart .dot.warm, #chart .dot.cold").nth(1)).to_be_visible()
        assert await percent(row.locator(".warmth .figure")) > 50
        assert await percent(row.locator(".tier.gpu .figure")) > 0
        assert await percent(row.locator(".tier.cpu .figure")) > 0

        await page.fill("#explain-prompt", LONG)
        await page.click("#explain button")
        await expect(page.locator("#explained .verdict strong")).to_have_text(home)
        await expect(page.locator("#explained .facts")).to_contain_text("tokens: GPU ")

        seen = await top_once(stage.url)
        assert "2 of 2 replicas up" in seen and "session-home" in seen

        stage.second.kill()
        await expect(rows.filter(has_text="second").locator(".state")).to_have_text("down")
        await expect(page.locator("#about")).to_contain_text("1 of 2 replicas up")
        assert re.search(r"second +down", await top_once(stage.url))
        assert (errors, hosts) == ([], {stage.url})
