"""Which callers get in, over real connections."""

import asyncio
import logging
from functools import partial
from typing import Any

import aiohttp
import anthropic
import click
import openai
import pytest
from yarl import URL

from router.api.access import new_key, sha256_of
from router.cli.explain import ask
from router.cli.router_client import RouterClient
from router.config.settings import AccessConfig, KeyConfig, ReplicaConfig
from router.record.records import Outcome
from tests.router.conftest import ADMIN_TOKEN, Fleet, Running, Wait
from tests.router.scripted import CHAT_ANSWER, chat_events, json_answer, stream
from warmroute_common.admin_token import HEADER as ADMIN_HEADER

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
LOCAL = {ADMIN_HEADER: ADMIN_TOKEN}
KEY, OTHER, ADMIN = new_key(), new_key(), new_key()
EVERYTHING = [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/models/m"), ("GET", "/nothing")]


@pytest.fixture
def client(stranger: aiohttp.ClientSession) -> aiohttp.ClientSession:
    return stranger


def one_key(**changes: Any) -> AccessConfig:
    return AccessConfig(keys=(KeyConfig(name="team", sha256=sha256_of(KEY), **changes),))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status_of(
    client: aiohttp.ClientSession, router: Running, path: str, **headers: str
) -> tuple[int, Any]:
    method = "POST" if path in (CHAT, "/explain") else "GET"
    body = ASK if method == "POST" else None
    async with client.request(method, router.url + path, headers=headers, json=body) as response:
        if response.content_type == "application/json":
            return response.status, await response.json()
        return response.status, await response.text()


@pytest.mark.parametrize(("method", "path"), EVERYTHING)
@pytest.mark.parametrize(
    "headers", [{}, bearer("wr-wrong"), {"Authorization": KEY}, {"X-Api-Key": KEY}, bearer("\xe9")]
)
async def test_without_a_known_key_nothing_is_answered(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    method: str,
    path: str,
    headers: dict[str, str],
) -> None:
    router = await fleet.router(access=one_key())
    async with client.request(method, router.url + path, headers=headers) as response:
        answer = await response.json()
        assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
        request_id = response.headers["X-Request-Id"]
    assert answer["error"]["code"] == "invalid_api_key"
    [record] = router.records
    assert (record.request_id, record.status, record.is_admitted) == (request_id, 401, False)
    assert (record.outcome, record.client) == (Outcome.REFUSED, "127.0.0.1")
    assert not fleet.one.seen
    async with client.get(f"{router.url}/health") as response:
        assert response.status == 200


async def test_the_libraries_of_clients_get_in_and_understand(fleet: Fleet) -> None:
    router = await fleet.router(access=one_key(models=("m",)))
    fleet.one.will(json_answer(CHAT_ANSWER))
    fleet.two.will(json_answer({"id": "msg", "type": "message", "content": []}))
    message: Any = {"role": "user", "content": "hello"}
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key=KEY, max_retries=0) as ours:
        await ours.chat.completions.create(model="m", messages=[message])
        with pytest.raises(
            openai.PermissionDeniedError, match="may not use the model 'other'"
        ) as caught:
            await ours.chat.completions.create(model="other", messages=[message])
        assert (caught.value.code, caught.value.param) == ("model_not_allowed", "model")
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="x", max_retries=0) as none:
        with pytest.raises(openai.AuthenticationError):
            await none.models.list()
    async with anthropic.AsyncAnthropic(base_url=router.url, api_key=KEY, max_retries=0) as claude:
        await claude.messages.create(model="m", max_tokens=1, messages=[message])
        with pytest.raises(anthropic.PermissionDeniedError):
            await claude.messages.create(model="other", max_tokens=1, messages=[message])
    async with anthropic.AsyncAnthropic(base_url=router.url, api_key="x", max_retries=0) as claude:
        with pytest.raises(anthropic.AuthenticationError):
            await claude.messages.create(model="m", max_tokens=1, messages=[message])
    seen = [*fleet.one.seen, *fleet.two.seen]
    assert len(seen) == 2
    assert not [each for each in seen if {"Authorization", "X-Api-Key"} & each.headers.keys()]
    assert [each.key for each in router.records if each.is_admitted] == ["team"] * 4


async def test_a_key_for_certain_models_must_name_one(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    """Or the replica's own choice would be outside of them."""
    fleet.one.models = ["m", "dear"]
    router = await fleet.router(access=one_key(models=("m",)))
    async with client.post(
        router.url + CHAT, json={"messages": ASK["messages"]}, headers=bearer(KEY)
    ) as response:
        assert response.status == 403
    assert not fleet.one.seen and not fleet.two.seen
    _, listed = await status_of(client, router, "/v1/models", **bearer(KEY))
    assert [each["id"] for each in listed["data"]] == ["m"]
    assert (await status_of(client, router, "/v1/models/dear", **bearer(KEY)))[0] == 404


async def test_a_replica_gets_its_own_key_and_never_a_clients(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    replica = ReplicaConfig(url=fleet.one.url, instance_id="one", api_key="theirs")
    router = await fleet.router(access=one_key(), replicas=(replica,))
    assert (await status_of(client, router, CHAT, **bearer(KEY)))[0] == 200
    (seen,) = fleet.one.seen
    assert seen.headers.getall("Authorization") == ["Bearer theirs"]
    assert KEY not in str(seen)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_key_that_is_used_up_gets_429(
    fleet: Fleet, client: aiohttp.ClientSession, streamed: bool
) -> None:
    router = await fleet.router(access=one_key(tokens_per_minute=50))
    told = {**CHAT_ANSWER, "usage": {"completion_tokens": 60}}
    words = ["word"] * 100
    fleet.one.will(stream(*chat_events(*words)) if streamed else json_answer(told))
    assert (await status_of(client, router, CHAT, **bearer(KEY)))[0] == 200
    await router.record()
    async with client.post(router.url + CHAT, json=ASK, headers=bearer(KEY)) as response:
        answer = await response.json()
        assert response.status == 429
        assert 1 <= int(response.headers["Retry-After"]) <= 60
    assert answer["error"]["code"] == "rate_limit_exceeded"
    assert not fleet.two.seen
    _, text = await status_of(client, router, "/metrics", **LOCAL)
    assert 'warmroute_access_refused_total{cause="tokens",key="team"} 1.0' in text


@pytest.mark.parametrize("path", ["/explain", "/metrics", "/replicas"])
async def test_administration_asks_for_its_own_key(
    fleet: Fleet, client: aiohttp.ClientSession, path: str
) -> None:
    access = AccessConfig(keys=one_key().keys, admin_sha256=(sha256_of(OTHER), sha256_of(ADMIN)))
    router = await fleet.router(access=access)
    assert (await status_of(client, router, path))[0] == 401
    assert (await status_of(client, router, path, **bearer(KEY)))[0] == 401
    assert (await status_of(client, router, path, **bearer(ADMIN)))[0] == 200
    assert (await status_of(client, router, CHAT, **bearer(ADMIN)))[0] == 401


@pytest.mark.parametrize("path", ["one/drain", "one/resume", "nothing", "one/drain/", ""])
async def test_all_below_replicas_is_administration(
    fleet: Fleet, client: aiohttp.ClientSession, path: str
) -> None:
    access = AccessConfig(keys=one_key().keys, admin_sha256=(sha256_of(ADMIN),))
    router = await fleet.router(access=access)
    for headers in ({}, bearer(KEY)):
        async with client.post(f"{router.url}/replicas/{path}", headers=headers) as response:
            assert response.status == 401


@pytest.mark.parametrize(
    "path",
    [
        "/%6detrics",
        "/%72eplicas/one/drain",
        "/replicas/%6fne/drain",
        "//replicas/one/drain",
        "/%2emetrics",
        "//metrics",
        "/metrics/",
        "/health/../metrics",
        "/%2568ealth",
        "/Metrics",
    ],
)
async def test_no_other_spelling_of_a_path_gets_past(
    fleet: Fleet, client: aiohttp.ClientSession, path: str
) -> None:
    access = AccessConfig(keys=one_key().keys, admin_sha256=(sha256_of(ADMIN),))
    router = await fleet.router(access=access)
    async with client.get(URL(router.url + path, encoded=True)) as response:
        assert response.status == 401


async def test_explain_is_asked_with_the_admin_key(fleet: Fleet) -> None:
    router = await fleet.router(access=AccessConfig(admin_sha256=(sha256_of(ADMIN),)))
    asked = partial(ask, text="hello", model="m", session=None)
    with_key = RouterClient(router.url, admin_key=ADMIN)
    assert (await asyncio.to_thread(asked, with_key))["replica"] == "one"
    with pytest.raises(click.ClickException, match="asks for an admin key"):
        await asyncio.to_thread(asked, RouterClient(router.url, admin_key="wrong"))


PROXIES: list[dict[str, str]] = [
    {},
    {"Host": "127.0.0.1:8000"},  # nginx's proxy_pass, as it is by default
    {"Host": "localhost"},
    {"X-Forwarded-For": "127.0.0.1"},
    {"Forwarded": "for=127.0.0.1"},
    {ADMIN_HEADER: ""},
    {"Authorization": "Bearer "},
]
"""What a request from another machine looks like behind proxies on the router's machine."""


@pytest.mark.parametrize("headers", PROXIES)
async def test_nobody_administers_by_address(
    fleet: Fleet, client: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    router = await fleet.router()
    for method, path in (
        ("POST", "/replicas/one/drain"),
        ("POST", "/replicas/one/resume"),
        ("GET", "/replicas"),
        ("GET", "/ui/state"),
        ("GET", "/waste"),
        ("GET", "/metrics"),
        ("POST", "/explain"),
    ):
        async with client.request(method, router.url + path, headers=headers) as response:
            answer = await response.json()
            assert response.status == 401, path
        assert "'warmroute key --admin' makes one" in answer["error"]["message"]
        assert ("{metrics: open}" in answer["error"]["message"]) is (path == "/metrics")
    assert router.parts.fleet.replicas["one"].state == "up"
    async with client.get(f"{router.url}/health", headers=headers) as response:
        assert "replicas" not in await response.json()


async def test_the_token_of_this_machine_administers(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    """Also with admin keys; and no replica sees it."""
    for access in (AccessConfig(), AccessConfig(admin_sha256=(sha256_of(ADMIN),))):
        router = await fleet.router(access=access)
        for path in ("/metrics", "/replicas", "/explain"):
            assert (await status_of(client, router, path, **LOCAL))[0] == 200
            assert (await status_of(client, router, path, **bearer(ADMIN_TOKEN)))[0] == 200
    assert (await status_of(client, router, CHAT, **LOCAL))[0] == 200
    assert ADMIN_HEADER not in fleet.one.seen[0].headers
    await asyncio.to_thread(RouterClient(router.url).ask, "/replicas/one/drain", b"")
    assert router.parts.fleet.replicas["one"].state == "draining"


async def test_metrics_can_be_open(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    router = await fleet.router(access=AccessConfig(metrics="open"))
    assert (await status_of(client, router, "/metrics"))[0] == 200
    assert (await status_of(client, router, "/explain"))[0] == 401


async def test_health_tells_no_addresses_but_to_the_administration(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    router = await fleet.router(access=AccessConfig(admin_sha256=(sha256_of(ADMIN),)))
    status, answer = await status_of(client, router, "/health")
    assert (status, answer) == (
        200,
        {"status": "ok", "first_probes": "done", "states": {"up": 2}},
    )
    _, answer = await status_of(client, router, "/health", **bearer(ADMIN))
    assert answer["replicas"]["one"] == {"url": fleet.one.url, "state": "up"}


async def test_no_key_and_no_prompt_is_in_the_log(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
    eventually: Wait,
) -> None:
    """Nor what a body has where a word of the API belongs, nor what a defect quotes."""
    caplog.set_level(logging.DEBUG)
    router = await fleet.router(access=one_key())
    said = "my secret prompt"
    fleet.one.will(json_answer({"error": {"message": said}}, status=400))
    bodies: list[tuple[str, Any]] = [
        (CHAT, {"model": "m", "messages": [{"role": "user", "content": said}]}),
        ("/v1/messages", {"model": "m", "messages": [{"role": said, "content": said}]}),
        (CHAT, {"model": "m", "messages": said}),
        ("/v1/completions", {"model": "m", "prompt": {said: said}}),
        ("/v1/responses", {"model": "m", "input": [{"type": said, "role": said}]}),
        (CHAT, f'{{"model": "m", "messages": "{said}'),
    ]
    for path, body in bodies:
        given: dict[str, Any] = {"data" if isinstance(body, str) else "json": body}
        async with client.post(router.url + path, headers=bearer(KEY), **given) as response:
            await response.read()
    async with client.post(router.url + CHAT, json=ASK, headers=bearer(OTHER)) as response:
        assert response.status == 401
    await router.record(len(bodies) + 1)

    def broken(*args: object) -> None:
        raise ValueError(said)

    router.parts.prompts.reader_for = broken  # type: ignore[method-assign, assignment]
    async with client.post(router.url + CHAT, json=ASK, headers=bearer(KEY)) as response:
        assert response.status == 500
    # A thread writes the request log: its lines come after the records.
    await eventually(
        lambda: sum(each.name == "warmroute.requests" for each in caplog.records) == len(bodies) + 2
    )
    assert "ValueError" in caplog.text and "reader_for" in caplog.text
    assert CHAT in caplog.text and "key=team" in caplog.text
    for each in (said, KEY, OTHER):
        assert each not in caplog.text


async def test_a_path_writes_no_lines_of_its_own_into_the_log(
    fleet: Fleet,
    client: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
    eventually: Wait,
) -> None:
    caplog.set_level(logging.INFO)
    router = await fleet.router(access=AccessConfig(admin_sha256=(sha256_of(ADMIN),)))
    url = URL(f"{router.url}/replicas/%0a2026-01-01%20ERROR%20fake/drain", encoded=True)
    async with client.post(url) as response:
        assert response.status == 401
    await eventually(lambda: any(each.name == "warmroute.requests" for each in caplog.records))
    [refused] = [each.getMessage() for each in caplog.records if each.name == "warmroute.requests"]
    assert "\n" not in refused and "%0a2026" in refused.lower()


async def test_an_admin_key_sent_as_a_clients_key_is_explained(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    access = AccessConfig(keys=one_key().keys, admin_sha256=(sha256_of(ADMIN),))
    router = await fleet.router(access=access)
    status, answer = await status_of(client, router, CHAT, **bearer(ADMIN))
    assert status == 401
    assert "an admin key was sent" in answer["error"]["message"]
