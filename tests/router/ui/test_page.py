"""The page and its state over real connections: who gets them, and what they may not do."""

import re
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

import router.ui
from router.api.access import new_key, sha256_of
from router.config.settings import AccessConfig, KeyConfig
from router.ui.page import FILES
from tests.router.conftest import ADMIN_TOKEN, Fleet
from tests.router.scripted import chat_events, stream

STATIC = Path(router.ui.__file__).parent / "static"
KEY, ADMIN = new_key(), new_key()
KEYED = AccessConfig(
    keys=(KeyConfig(name="team", sha256=sha256_of(KEY)),), admin_sha256=(sha256_of(ADMIN),)
)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_file_of_the_page_is_served_and_none_is_missing() -> None:
    assert {each.name for each in STATIC.iterdir()} == set(FILES.values())


@pytest.mark.parametrize("name", sorted(FILES.values()))
def test_no_file_names_another_host(name: str) -> None:
    text = (STATIC / name).read_text()
    hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}", text))
    assert hosts <= {"http://www.w3.org"}, "namespaces of SVG are no addresses"
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text


@pytest.mark.parametrize("path", sorted(FILES))
async def test_files_want_no_key_and_run_nothing_from_elsewhere(
    fleet: Fleet, client: aiohttp.ClientSession, path: str
) -> None:
    running = await fleet.router(access=KEYED)
    async with client.get(running.url + path) as response:
        assert response.status == 200
        assert await response.read() == (STATIC / FILES[path]).read_bytes()
        policy = response.headers["Content-Security-Policy"]
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'; script-src 'self'" in policy
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    async with client.head(running.url + path) as response:
        assert response.status == 200
    async with client.post(running.url + path, json={}) as response:
        assert response.status == 405
    assert not fleet.one.seen and not fleet.two.seen


async def test_scripts_have_a_type_that_browsers_run(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    running = await fleet.router()
    types = {}
    for path in ("/ui", "/ui/main.js", "/ui/style.css", "/ui/icon.svg"):
        async with client.get(running.url + path) as response:
            types[path] = response.content_type
    # The one type in Python 3.11, the other from 3.12 on.
    assert types.pop("/ui/main.js") in ("application/javascript", "text/javascript")
    assert types == {
        "/ui": "text/html",
        "/ui/style.css": "text/css",
        "/ui/icon.svg": "image/svg+xml",
    }


@pytest.mark.parametrize("path", ["/ui/nothing.js", "/ui/../cli.py", "/ui/%2e%2e/cli.py", "/ui/"])
async def test_what_is_no_file_of_the_page_is_not_found(
    fleet: Fleet, client: aiohttp.ClientSession, path: str
) -> None:
    running = await fleet.router()
    async with client.get(URL(running.url + path, encoded=True)) as response:
        assert response.status == 404
    assert not fleet.one.seen and not fleet.two.seen


async def test_another_spelling_of_a_file_does_not_pass_the_guard(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    """Where all is passed through, a request without a key must not get to a replica by it."""
    running = await fleet.router(access=KEYED, passthrough=("/ui/*",))
    for path in ("/ui%2Fmain.js", "/ui%2fmain.js"):
        async with client.get(URL(running.url + path, encoded=True)) as response:
            assert response.status == 401
    assert not fleet.one.seen and not fleet.two.seen


async def test_the_state_wants_the_admins_key(
    fleet: Fleet, stranger: aiohttp.ClientSession
) -> None:
    for access in (KEYED, AccessConfig()):
        running = await fleet.router(access=access)
        statuses = []
        for key in (None, KEY, ADMIN, ADMIN_TOKEN):
            headers = {} if key is None else bearer(key)
            async with stranger.get(f"{running.url}/ui/state", headers=headers) as response:
                statuses.append(response.status)
        assert statuses == [401, 401, 200 if access is KEYED else 401, 200]
        assert response.headers["Cache-Control"] == "no-store"
        assert running.parts.page.recent.count == 0


async def test_a_request_shows_up_when_it_has_ended(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    fleet.one.will(stream(*chat_events("a")))
    running = await fleet.router()
    ask = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi " * 2000}]}
    async with client.post(f"{running.url}/v1/chat/completions", json=ask) as response:
        await response.read()
    await running.record()
    async with client.get(f"{running.url}/ui/state") as response:
        state = await response.json()
    (request,) = state["requests"]
    assert (request["replica"], request["reason"], request["status"]) == ("one", "round-robin", 200)
    assert request["ttft_s"] > 0 and request["prompt_tokens"] > 0
    assert state["totals"]["requests"] == 1
    assert state["totals"]["cold"]["count"] == 1
    assert {each["id"]: each["state"] for each in state["replicas"]} == {"one": "up", "two": "up"}
    assert state["models"] == ["m"]
    assert "hi hi" not in str(state)
