"""The page in a real browser, before scripted replicas."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from bench.screenshots import launched, program
from router.api.access import new_key, sha256_of
from router.config.settings import AccessConfig, ReplicaConfig
from tests.router.conftest import ADMIN_TOKEN, Fleet, Running
from tests.router.scripted import CHAT_ANSWER, chat_events, json_answer, stream
from tests.servers import missing
from warmroute_common.admin_token import HEADER as ADMIN_HEADER

PATIENT_MS = 60_000
HACK = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"
ADMIN = new_key()
expect.set_options(timeout=PATIENT_MS)


@dataclass
class Seen:
    """What a page did besides showing itself."""

    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)


Open = Callable[..., Any]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    if program() is None:
        missing("chromium")
    async with async_playwright() as playwright, launched(playwright) as browser:
        yield browser


@pytest.fixture
async def seen() -> Seen:
    return Seen()


@pytest.fixture
async def page(browser: Browser, seen: Seen) -> Page:
    page = await browser.new_page()
    page.set_default_timeout(PATIENT_MS)
    await page.set_extra_http_headers({ADMIN_HEADER: ADMIN_TOKEN})
    page.on("console", lambda told: seen.errors.extend([told.text] * (told.type == "error")))
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("request", lambda asked: seen.hosts.add(asked.url.partition("/ui")[0]))
    return page


async def ask(router: Running, client: aiohttp.ClientSession, **more: Any) -> None:
    """Send a chat and wait for its record."""
    before = len(router.records)
    body = {"model": "m", "messages": [{"role": "user", "content": "hello " * 500}], **more}
    async with client.post(f"{router.url}/v1/chat/completions", json=body) as response:
        await response.read()
    await router.record(before + 1)


async def test_fleet_and_requests_are_shown_as_they_come(
    fleet: Fleet, client: aiohttp.ClientSession, page: Page, seen: Seen
) -> None:
    gate = asyncio.Event()
    fleet.one.will(stream(*chat_events("a", "b"), gates=(None, gate)))
    fleet.two.will(json_answer(CHAT_ANSWER))
    router = await fleet.router()
    await page.goto(f"{router.url}/ui")
    await expect(page.locator("#status")).to_have_text("live")
    await expect(page.locator("#fleet tr .name")).to_have_text(["one", "two"])
    await expect(page.locator("#fleet tr .state")).to_have_text(["up", "up"])
    await expect(page.locator("#no-requests")).to_be_visible()

    sent = asyncio.create_task(ask(router, client, stream=True))
    one = page.locator("#fleet tr").filter(has_text="one")
    await expect(one.locator("td[data-label=decoding]")).to_have_text("1")
    gate.set()
    await sent
    await ask(router, client)
    await expect(page.locator("#requests tr")).to_have_count(2)
    await expect(page.locator("#requests tr .replica")).to_have_text(["two", "one"])
    await expect(page.locator("#requests tr .why").first).to_have_text("round-robin")
    await expect(one.locator("td[data-label=decoding]")).to_have_text("0")
    await expect(page.locator("#chart .dot.cold")).to_have_count(1)
    await expect(page.locator("#totals div").first).to_contain_text("2 since start")
    assert (seen.errors, seen.hosts) == ([], {router.url})


async def test_a_replica_that_is_down_shows(fleet: Fleet, page: Page, seen: Seen) -> None:
    router = await fleet.router()
    await page.goto(f"{router.url}/ui")
    two = page.locator("#fleet tr").filter(has_text="two")
    await expect(two.locator(".state")).to_have_text("up")
    fleet.two.healthy = False
    await expect(two.locator(".state")).to_have_text("down")
    await expect(page.locator("#about")).to_contain_text("1 of 2 replicas up")
    assert seen.errors == []


async def test_names_from_replicas_are_text_and_nothing_runs(
    fleet: Fleet, client: aiohttp.ClientSession, page: Page, seen: Seen
) -> None:
    fleet.one.models = fleet.two.models = [HACK]
    replicas = (
        ReplicaConfig(url=fleet.one.url, instance_id=HACK),
        ReplicaConfig(url=fleet.two.url, instance_id="two"),
    )
    router = await fleet.router(replicas=replicas)
    await ask(router, client, model=HACK)
    await page.goto(f"{router.url}/ui")
    await expect(page.locator("#fleet tr .name")).to_have_text([HACK, "two"])
    await expect(page.locator("#requests tr .replica")).to_have_text(HACK)
    await expect(page.locator("#homes .name").first).to_have_text(HACK)
    await page.select_option("#explain-model", HACK)
    await page.fill("#explain-prompt", "hello")
    await page.click("#explain button")
    await expect(page.locator("#explained .verdict")).to_contain_text("two")
    await expect(page.locator("#explained")).to_contain_text(HACK)
    assert await page.evaluate("window.hacked") is None
    assert await page.locator("main img, main script").count() == 0
    assert (seen.errors, seen.hosts - {f"{router.url}/explain"}) == ([], {router.url})


async def test_inline_scripts_are_refused_by_the_browser_itself(fleet: Fleet, page: Page) -> None:
    """Should a name ever get into the page as HTML, it would still not run."""
    router = await fleet.router()
    await page.goto(f"{router.url}/ui")
    async with page.expect_console_message(lambda told: "Content Security" in told.text):
        await page.evaluate(
            "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.hacked=1>')"
        )
    assert await page.evaluate("window.hacked") is None


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("hello there", "one"),
        ('{"messages": [{"role": "user", "content": "hello"}], "model": "m"}', "one"),
        ("{nonsense", "This begins with { but is not JSON"),
        ('{"model": "m"}', "the body has neither 'messages' nor 'prompt' nor 'input'"),
        ('{"model": "x", "prompt": "hello"}', "'x'"),
    ],
)
async def test_the_explain_box_answers_or_says_why_not(
    fleet: Fleet, page: Page, prompt: str, said: str
) -> None:
    router = await fleet.router()
    await page.goto(f"{router.url}/ui")
    await page.fill("#explain-prompt", prompt)
    await page.press("#explain-prompt", "Control+Enter")
    await expect(page.locator("#explained")).to_contain_text(said)
    if said == "one":
        await expect(page.locator("#explained .verdict strong")).to_have_text("one")
        rows = page.locator("#explained .candidates").first.locator("tbody tr")
        await expect(rows).to_have_count(2)
        await expect(page.locator("#explained .pick .picked").first).to_be_visible()
    assert not fleet.one.seen and not fleet.two.seen


async def test_a_row_opens_where_its_time_went(
    fleet: Fleet, client: aiohttp.ClientSession, page: Page, seen: Seen
) -> None:
    fleet.one.will(stream(*chat_events("a", "b")))
    router = await fleet.router()
    async with client.post(
        f"{router.url}/v1/chat/completions",
        json={"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True},
        headers={"X-Request-Id": f"a/{HACK}"},
    ) as response:
        await response.read()
    await page.goto(f"{router.url}/ui")
    await page.locator("#requests tr .replica").click()
    told = page.locator("#why-told")
    await expect(page.locator("#why-id")).to_have_text(f"a/{HACK}")
    await expect(told.locator("pre").first).to_contain_text("POST /v1/chat/completions: model m")
    await expect(told.locator("h3").nth(1)).to_contain_text("went")
    await page.click("#why-close")
    await expect(page.locator("#why")).to_be_hidden()
    await page.locator("#requests button").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("#why")).to_be_visible()
    assert not seen.errors and not await page.evaluate("window.hacked")


async def test_a_key_is_asked_for_used_and_kept_in_the_tab(fleet: Fleet, page: Page) -> None:
    router = await fleet.router(access=AccessConfig(admin_sha256=(sha256_of(ADMIN),)))
    await page.set_extra_http_headers({})
    await page.goto(f"{router.url}/ui")
    await expect(page.locator("#key-label")).to_have_text("This router asks for an admin key.")
    await expect(page.locator("#main")).to_be_hidden()
    await page.fill("#key-input", "wr-wrong")
    await page.press("#key-input", "Enter")
    await expect(page.locator("#key-label")).to_contain_text("refused this key")
    await expect(page.locator("#status")).to_have_text("key refused")
    await page.fill("#key-input", ADMIN)
    await page.press("#key-input", "Enter")
    await expect(page.locator("#fleet tr .name")).to_have_text(["one", "two"])
    await expect(page.locator("#key")).to_be_hidden()
    await page.fill("#explain-prompt", "hello")
    await page.click("#explain button")
    await expect(page.locator("#explained .verdict strong")).to_have_text("one")
    await page.reload()
    await expect(page.locator("#status")).to_have_text("live")
    assert ADMIN not in page.url
    kept = "[localStorage.length, document.cookie, sessionStorage.length]"
    assert await page.evaluate(kept) == [0, "", 1]


async def test_a_router_that_is_gone_is_said_and_found_again(fleet: Fleet, page: Page) -> None:
    async with AsyncExitStack() as stack:
        first = await replace(fleet, stack=stack).router()
        port = int(first.url.rpartition(":")[2])
        await page.goto(f"{first.url}/ui")
        await expect(page.locator("#status")).to_have_text("live")
    await expect(page.locator("#status")).to_have_text("unreachable")
    await expect(page.locator("#notice")).to_have_text(
        re.compile(r"The router cannot be reached since \d\d:\d\d:\d\d\. The page shows the state")
    )
    await fleet.router(port=port)
    await expect(page.locator("#status")).to_have_text("live")
    await expect(page.locator("#notice")).to_be_hidden()


async def test_a_page_that_nobody_sees_asks_for_nothing(fleet: Fleet, page: Page) -> None:
    await page.add_init_script(
        "window.seen = true;"
        "Object.defineProperty(document, 'hidden', {get: () => !window.seen});"
        "window.see = (is) => { window.seen = is;"
        " document.dispatchEvent(new Event('visibilitychange')); };"
    )
    router = await fleet.router()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await page.clock.install()
    await page.goto(f"{router.url}/ui")
    await expect(page.locator("#status")).to_have_text("live")
    await page.evaluate("see(false)")
    await expect(page.locator("#status")).to_have_text("paused")
    await page.wait_for_load_state("networkidle")
    before = len(asked)
    await page.clock.run_for(60_000)
    assert len(asked) == before
    await page.evaluate("see(true)")
    await expect(page.locator("#status")).to_have_text("live")
    assert len(asked) > before


@pytest.mark.parametrize("width", [400, 1280])
async def test_nothing_is_wider_than_the_page(
    fleet: Fleet, client: aiohttp.ClientSession, page: Page, width: int
) -> None:
    fleet.one.will(stream(*chat_events("a")))
    replicas = (
        ReplicaConfig(url=fleet.one.url, instance_id="a-replica-with-a-very-long-name" * 3),
        ReplicaConfig(url=fleet.two.url, instance_id="two"),
    )
    router = await fleet.router(replicas=replicas)
    await ask(router, client, stream=True)
    await page.set_viewport_size({"width": width, "height": 800})
    await page.goto(f"{router.url}/ui")
    await expect(page.locator("#requests tr")).to_have_count(1)
    await page.fill("#explain-prompt", "hello")
    await page.click("#explain button")
    await expect(page.locator("#explained .verdict")).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth") <= width


async def test_the_chart_is_read_out_by_keys(
    fleet: Fleet, client: aiohttp.ClientSession, page: Page
) -> None:
    fleet.one.will(stream(*chat_events("a")))
    router = await fleet.router()
    await ask(router, client, stream=True)
    await page.goto(f"{router.url}/ui")
    chart = page.locator("#chart")
    await expect(chart).to_have_attribute("aria-label", re.compile("Median time .* cold .* ms"))
    await chart.focus()
    await page.keyboard.press("ArrowLeft")
    await expect(page.locator("#readout")).to_have_text(re.compile(r"cold: median .* of 1$"))
