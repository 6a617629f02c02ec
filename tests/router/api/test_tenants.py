"""What one key's clients learn of another's, and can do to them: nothing."""

from typing import Any

import aiohttp
import pytest

from router.api.access import new_key, sha256_of
from router.config.settings import AccessConfig, KeyConfig
from tests.router.conftest import ADMIN_TOKEN, Fleet, Running
from warmroute_common.admin_token import HEADER as ADMIN_HEADER

CHAT = "/v1/chat/completions"
ONE, TWO, ADMIN = new_key(), new_key(), new_key()
ACCESS = AccessConfig(
    keys=(
        KeyConfig(name="a", sha256=sha256_of(ONE)),
        KeyConfig(name="a/b", sha256=sha256_of(TWO)),
    ),
    admin_sha256=(sha256_of(ADMIN),),
)
SEEN_BY_ALL = {
    "x-warmroute-prompt-tokens",
    "x-warmroute-held-ms",
    "x-warmroute-retries",
}


async def send(
    client: aiohttp.ClientSession, router: Running, key: str | None, **headers: str
) -> dict[str, str]:
    """Send a chat; return the router's own headers of its answer."""
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello " * 999}]}
    if "user" in headers:
        body["user"] = headers.pop("user")
    bearer = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with client.post(router.url + CHAT, json=body, headers=bearer | headers) as response:
        await response.read()
        assert response.status == 200
        return {
            name.lower(): value
            for name, value in response.headers.items()
            if name.lower().startswith("x-warmroute-")
        }


async def test_placement_is_shown_to_administrators_or_where_there_are_no_keys(
    fleet: Fleet, stranger: aiohttp.ClientSession
) -> None:
    """A key's clients could see from it which prompts others have sent."""
    everything = await send(stranger, await fleet.router(), None)
    assert {"x-warmroute-replica", "x-warmroute-reason", "x-warmroute-matched-gpu"} < set(
        everything
    )
    router = await fleet.router(access=ACCESS)
    for wrong in ({}, {ADMIN_HEADER: "wrong"}, {ADMIN_HEADER: ONE}):
        assert set(await send(stranger, router, ONE, **wrong)) == SEEN_BY_ALL
    for key in (ADMIN, ADMIN_TOKEN):
        assert set(await send(stranger, router, ONE, **{ADMIN_HEADER: key})) == set(everything)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((ONE, {"x-session-id": "s"}), (TWO, {"x-session-id": "s"})),
        ((ONE, {"user": "s"}), (TWO, {"user": "s"})),
        # Nor by a session's name that holds another key's.
        ((ONE, {"x-session-id": "b/s"}), (TWO, {"x-session-id": "s"})),
        ((TWO, {"x-session-id": "s"}), (ONE, {"x-session-id": "a%2Fb/s"})),
    ],
)
async def test_a_session_is_its_keys_own(
    fleet: Fleet,
    stranger: aiohttp.ClientSession,
    first: tuple[str, dict[str, str]],
    second: tuple[str, dict[str, str]],
) -> None:
    router = await fleet.router(access=ACCESS)
    for number, (key, headers) in enumerate((first, second), start=1):
        await send(stranger, router, key, **headers)
        await router.record(number)
    assert len(router.parts.fleet.sessions) == 2
    await send(stranger, router, first[0], **first[1])
    assert len(router.parts.fleet.sessions) == 2


async def test_explain_takes_a_session_with_its_keys_name(
    fleet: Fleet, stranger: aiohttp.ClientSession
) -> None:
    router = await fleet.router(access=ACCESS, policy="session")
    await send(stranger, router, ONE, **{"x-session-id": "s"})
    home = (await router.record()).replica_id
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    headers = {ADMIN_HEADER: ADMIN, "x-session-id": "a/s"}
    async with stranger.post(f"{router.url}/explain", json=body, headers=headers) as response:
        answer = await response.json()
    assert (answer["replica"], answer["home"]) == (home, home)
