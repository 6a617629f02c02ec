"""Make the pictures of the UI and of ``warmroute top``: ``python -m bench.screenshots``.

Starts a simulated fleet of four behind a router and sends it sessions of chats for some minutes.
Then it makes one replica busy, ends another, and takes the pictures. Needs Chromium and the
Playwright of requirements/dev.lock.
"""

import asyncio
import contextlib
import io
import json
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
import click
import yaml
from playwright.async_api import Browser, Page, Playwright, async_playwright
from rich.console import Console
from rich.terminal_theme import MONOKAI

from router.cli.router_client import RouterClient
from router.cli.top_frame import frame
from warmroute_common.admin_token import admin_token_headers

_OPTIONS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def program() -> str | None:
    """Return where Chromium is; None: it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@asynccontextmanager
async def launched(playwright: Playwright) -> AsyncIterator[Browser]:
    """Run a browser for the block; FileNotFoundError without one."""
    path = program()
    if path is None:
        raise FileNotFoundError("chromium is not installed: python -m tools.servers")
    browser = await playwright.chromium.launch(executable_path=path, args=list(_OPTIONS))
    try:
        yield browser
    finally:
        await browser.close()


_IMAGES: Final = Path(__file__).parent.parent / "docs" / "images"
_WARMROUTE: Final = (sys.executable, "-m", "router")
_SIMULATED: Final = {
    "gpu-tokens": 48_000,
    "cpu-tokens": 80_000,
    "disk-tokens": 400_000,
    "prefill-tokens-per-s": 8_000,
    "step-s": 0.012,
}
_SESSIONS: Final = 30
_THINKING_S: Final = 5.0
_BURST: Final = 26
_COLUMNS: Final = 118
_SHOWN: Final[Sequence[tuple[str, int, Literal["light", "dark"]]]] = (
    ("ui", 1280, "light"),
    ("ui-dark", 1280, "dark"),
    ("ui-narrow", 400, "light"),
)
_FADED_MS: Final = 1_500
"""Rows that arrive fade in."""
_BUSY_MS: Final = 1_300
_NOTICED_S: Final = 8.0
"""So long may it take until a replica that has ended is seen to be down."""


@click.command()
@click.option("--seconds", default=180.0, show_default=True, help="How long to send requests.")
@click.option(
    "--directory", type=click.Path(path_type=Path), default=_IMAGES, help="Where pictures go."
)
@click.option("--seed", default=1, show_default=True, help="Of the requests.")
def main(seconds: float, directory: Path, seed: int) -> None:
    """Make docs/images: the page at /ui (ui-*.png) and ``warmroute top`` (top.png)."""
    directory.mkdir(parents=True, exist_ok=True)
    asyncio.run(_take(seconds, directory, random.Random(seed)))


async def _take(seconds: float, directory: Path, chance: random.Random) -> None:
    async with contextlib.AsyncExitStack() as stack:
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroute-")))
        three = await stack.enter_async_context(_simulated(3, made / "three"))
        fourth = contextlib.AsyncExitStack()
        stack.push_async_exit(fourth)
        one = await fourth.enter_async_context(_simulated(1, made / "one"))
        url = await stack.enter_async_context(_router(three, one, made / "router.yaml"))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        traffic = Traffic(session, url, chance)
        async with traffic.flowing():
            await asyncio.sleep(seconds)
            await fourth.aclose()
            await asyncio.sleep(_NOTICED_S)
            await _pictures(traffic, directory)


@contextlib.asynccontextmanager
async def _simulated(replicas: int, directory: Path) -> AsyncIterator[dict[str, Any]]:
    """Run a simulated fleet; yield where its parts are."""
    options = [f"--{name}={value}" for name, value in _SIMULATED.items()]
    command = [*_WARMROUTE, "simulate", "--json", f"--replicas={replicas}", *options]
    async with _process(*command, f"--directory={directory}") as process:
        assert process.stdout is not None
        told: dict[str, Any] = json.loads(await process.stdout.readline())
        yield told


@contextlib.asynccontextmanager
async def _router(three: dict[str, Any], one: dict[str, Any], path: Path) -> AsyncIterator[str]:
    """Run a router before both; yield its base URL."""
    replicas = [
        {"url": each["url"], "agent_url": each["agent_url"], "instance_id": f"replica-{number}"}
        for number, each in enumerate([*three["replicas"], *one["replicas"]], start=1)
    ]
    config = {"port": 0, "replicas": replicas, "rates": three["router_rates"]}
    path.write_text(yaml.safe_dump(config))
    async with _process(*_WARMROUTE, "serve", f"--config={path}", errors=True) as process:
        assert process.stderr is not None
        line = b""
        while b"OPENAI_BASE_URL=" not in line:
            line = await process.stderr.readline()
            if not line:
                raise click.ClickException("the router has ended")
        drained = asyncio.create_task(process.stderr.read())
        yield line.split(b"OPENAI_BASE_URL=")[1].strip().decode().removesuffix("/v1")
    await drained


@contextlib.asynccontextmanager
async def _process(
    *command: str, errors: bool = False
) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdout=pipe, stderr=pipe if errors else None
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@dataclass
class Traffic:
    """Sessions of chats, which end and begin again."""

    session: aiohttp.ClientSession
    url: str
    chance: random.Random
    last: dict[str, Any] = field(default_factory=dict)
    """The body that was sent last."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """Send requests for the block."""
        systems = [self._text(words) for words in (400, 1_000, 2_500)]
        for number in range(_SESSIONS):
            self._begin(self._sessions(number, systems))
        try:
            yield
        finally:
            for each in self._tasks:
                each.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def burst(self) -> None:
        """Ask much about one long document at once."""
        document = [{"role": "user", "content": self._text(5_000)}]
        for number in range(_BURST):
            question = {"role": "user", "content": self._text(20)}
            self._begin(self._ask([*document, question], f"burst-{number}", 500))

    async def stamped(self) -> str:
        """Send a chat of two turns with a time stamp in its system prompt; return the last's id."""
        system = self._text(2_500)
        messages = [{"role": "system", "content": ""}]
        for minute in range(2):
            messages[0] = {"role": "system", "content": f"It is 09:{30 + minute}. {system}"}
            messages.append({"role": "user", "content": self._text(20)})
            await self._ask(messages, "stamped", 40, request_id=f"stamped-{minute}")
            messages.append({"role": "assistant", "content": self._text(40)})
        return f"stamped-{minute}"

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)

    async def _sessions(self, number: int, systems: list[str]) -> None:
        await asyncio.sleep(self.chance.uniform(0, 8))
        for turn in range(10_000):
            await self._chat(f"chat-{number}-{turn}", self.chance.choice(systems))

    async def _chat(self, name: str, system: str) -> None:
        messages = [{"role": "system", "content": system}]
        document = self._text(self.chance.choice((200, 500, 1_500)))
        messages.append({"role": "user", "content": document})
        for _ in range(self.chance.randint(3, 9)):
            words = self.chance.choice((20, 60, 150))
            messages.append({"role": "user", "content": self._text(words)})
            await self._ask(messages, name, self.chance.choice((40, 90, 160)))
            messages.append({"role": "assistant", "content": self._text(80)})
            await asyncio.sleep(self.chance.expovariate(1 / _THINKING_S))

    async def _ask(
        self,
        messages: list[dict[str, str]],
        name: str,
        tokens: int,
        *,
        request_id: str | None = None,
    ) -> None:
        body = {"model": "sim", "messages": messages, "max_tokens": tokens, "stream": True}
        self.last, headers = body, {"x-session-id": name}
        if request_id is not None:
            headers["x-request-id"] = request_id
        with contextlib.suppress(aiohttp.ClientError):
            async with self.session.post(
                f"{self.url}/v1/chat/completions", json=body, headers=headers
            ) as response:
                await response.read()

    def _text(self, words: int) -> str:
        letters = "abcdefghijklmnopqrst"
        return " ".join("".join(self.chance.choices(letters, k=4)) for _ in range(words))


async def _pictures(traffic: Traffic, directory: Path) -> None:
    async with async_playwright() as playwright, launched(playwright) as browser:
        for name, width, scheme in _SHOWN:
            page = await browser.new_page(
                viewport={"width": width, "height": 900}, color_scheme=scheme
            )
            await page.set_extra_http_headers(admin_token_headers(traffic.url))
            await page.goto(f"{traffic.url}/ui")
            await page.wait_for_selector("#requests tr")
            await page.wait_for_timeout(_FADED_MS)
            traffic.burst()
            await page.wait_for_timeout(_BUSY_MS)
            await page.evaluate(
                "document.getElementById('explain-title').closest('.card').hidden = true"
            )
            await page.screenshot(path=directory / f"{name}.png", full_page=True)
            if name == "ui":
                state = await asyncio.to_thread(RouterClient(traffic.url).ask, "/ui/state")
        await _picture_request(await browser.new_page(), traffic, directory / "ui-request.png")
        await _picture_explained(await browser.new_page(), traffic, directory / "ui-explain.png")
        await _picture_terminal(await browser.new_page(), traffic.url, state, directory / "top.png")


async def _picture_request(page: Page, traffic: Traffic, path: Path) -> None:
    await page.set_viewport_size({"width": 1280, "height": 900})
    await page.set_extra_http_headers(admin_token_headers(traffic.url))
    request_id = await traffic.stamped()
    await page.goto(f"{traffic.url}/ui")
    await page.click(f"#requests tr[data-id='{request_id}']")
    await page.wait_for_selector("#why[open]")
    await page.locator("#why").screenshot(path=path)


async def _picture_explained(page: Page, traffic: Traffic, path: Path) -> None:
    await page.set_viewport_size({"width": 1280, "height": 900})
    await page.set_extra_http_headers(admin_token_headers(traffic.url))
    await page.goto(f"{traffic.url}/ui")
    await page.fill("#explain-prompt", json.dumps(traffic.last))
    await page.click("#explain button")
    await page.wait_for_selector(".candidates")
    await page.evaluate("document.getElementById('explain-prompt').scrollTop = 0")
    await page.locator("section", has=page.locator("#explain")).screenshot(path=path)


async def _picture_terminal(page: Page, url: str, state: dict[str, Any], path: Path) -> None:
    console = Console(width=_COLUMNS, record=True, file=io.StringIO(), color_system="truecolor")
    console.print(frame(state, url))
    await page.route("**/*", lambda route: route.abort())  # rich would have a font from elsewhere
    await page.set_viewport_size({"width": 1280, "height": 900})
    await page.set_content(console.export_svg(title="warmroute top", theme=MONOKAI))
    await page.locator("svg").screenshot(path=path, omit_background=True)


if __name__ == "__main__":
    main()
