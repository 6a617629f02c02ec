"""What one key's clients learn of another's, and can do to them: nothing."""

import json
from dataclasses import replace
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


# --- the cached KV of a key


SALTED = replace(ACCESS, cache="per-key")
PROMPT: dict[str, Any] = {"model": "m", "prompt": "hello " * 999}


async def salt_of(
    fleet: Fleet, router: Running, key: str, body: bytes, path: str = "/v1/completions"
) -> tuple[Any, Any, bytes]:
    """Send a body; return the salt in what the replica got, the tokens matched, and the former."""
    headers = {"Authorization": f"Bearer {key}", ADMIN_HEADER: ADMIN, "X-Session-Id": "s"}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(router.url + path, data=body) as response,
    ):
        assert response.status == 200, await response.text()
        matched = response.headers.get("x-warmroute-matched-gpu")
    sent = (fleet.one.seen + fleet.two.seen)[-1].body
    fleet.one.seen.clear()
    fleet.two.seen.clear()
    return json.loads(sent).get("cache_salt"), matched, sent


async def test_keys_share_no_kv_if_the_router_sets_their_salts(fleet: Fleet) -> None:
    """So a key's clients cannot see from times whether another has sent a prompt."""
    router = await fleet.router(access=SALTED, policy="ttft")
    body = json.dumps(PROMPT).encode()
    salts = []
    for key in (ONE, TWO):
        salt, matched, _ = await salt_of(fleet, router, key, body)
        assert matched == "0"
        again, matched, _ = await salt_of(fleet, router, key, body)
        assert again == salt
        assert int(matched) > 900
        salts.append(salt)
    other = await fleet.router(access=SALTED)
    assert (await salt_of(fleet, other, ONE, body))[0] == salts[0], "in every router"
    assert salts[0] != salts[1]
    assert all(len(each) <= 128 and each.isalnum() for each in salts), "as vLLM takes them"
    hashes = [each.sha256 for each in ACCESS.keys]
    assert not any(each in salt for each in hashes for salt in salts)
    # Nor may one key use a salt that another has chosen, or that the router has given it.
    for chosen in ("team", salts[0]):
        named = json.dumps({**PROMPT, "cache_salt": chosen}).encode()
        found = {(await salt_of(fleet, router, key, named))[0] for key in (ONE, TWO)}
        assert len(found) == 2
        assert not found & {"team", *salts}


@pytest.mark.parametrize(
    ("path", "body", "rest"),
    [
        ("/v1/completions", b' {"prompt":"x", "seed" : 1.50}', b'"prompt":"x", "seed" : 1.50}'),
        ("/v1/completions", b'{"prompt":"x","cache_salt":null}', b'"prompt":"x"'),
        ("/v1/completions", b'{"cache\\u005fsalt":"a","prompt":"x"}', b'"prompt":"x"'),
        ("/v1/completions", b'{"cache_salt":"a","prompt":"x","cache_salt":"b"}', b'"prompt":"x"'),
        ("/score", b'{"text_1":"x","cache_salt":"a"}', b'"text_1":"x"'),
        ("/v1/chat/completions/batch", b'{"messages":[]}', b'"messages":[]'),
        ("/inference/v1/generate", b"{}", b"}"),
    ],
)
async def test_each_body_that_is_computed_has_its_keys_salt_once(
    fleet: Fleet, path: str, body: bytes, rest: bytes
) -> None:
    router = await fleet.router(access=SALTED)
    salt, _, sent = await salt_of(fleet, router, ONE, body, path)
    assert len(salt) == 64
    assert sent.count(b"salt") == 1
    assert rest in sent


async def test_what_cannot_be_read_or_is_not_computed_stays_as_it_is(fleet: Fleet) -> None:
    router = await fleet.router(access=SALTED)
    for path, body in (("/score", b'{"x": NaN}'), ("/v1/batches", b'{"input_file_id":"f"}')):
        _, _, sent = await salt_of(fleet, router, ONE, body, path)
        assert sent == body
    unset = await fleet.router(access=ACCESS)
    body = json.dumps({**PROMPT, "cache_salt": "own"}).encode()
    assert (await salt_of(fleet, unset, ONE, body))[2] == body
