"""docs/openapi.yaml is what a router does: its own endpoints, and the shape of their answers.

By hand, schemathesis 4.32 has been run against a router with simulated replicas. It is not among
the packages for tests: of its checks, those of statuses and schemas are made here.
"""

import asyncio
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import pytest
import yaml
from jsonschema import Draft202012Validator

from router.api.access import sha256_of
from router.config.settings import AccessConfig, KeyConfig, ReplicaConfig
from router.policy import PROMPTED
from router.ui.page import FILES
from tests.router.conftest import Fleet
from tests.router.scripted import chat_events, stream

DOCUMENT: Final[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[3] / "docs" / "openapi.yaml").read_text()
)
METHODS: Final = ("get", "post")
CHAT: Final = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello there " * 100}],
    "user": "u",
}


def resolved(value: dict[str, Any]) -> dict[str, Any]:
    """Follow a reference within the document."""
    found: Any = value
    if "$ref" in value:
        found = DOCUMENT
        for part in value["$ref"].removeprefix("#/").split("/"):
            found = found[part]
    assert isinstance(found, dict)
    return found


async def check(response: aiohttp.ClientResponse, method: str, path: str) -> Any:
    """Return an answer; AssertionError if the document does not allow its status or shape."""
    responses = DOCUMENT["paths"][path][method]["responses"]
    assert str(response.status) in responses, await response.text()
    content = resolved(responses[str(response.status)])["content"]
    [(kind, described)] = content.items()
    assert response.content_type == kind
    text = await response.text()
    if kind != "application/json":
        return text
    answer = await response.json()
    # The whole document, for its references.
    validator = Draft202012Validator({**DOCUMENT, **described["schema"]})
    assert [each.message for each in validator.iter_errors(answer)] == []
    return answer


def own_paths(resources: Any) -> set[str]:
    """Return the paths that a router answers itself, as the document writes them."""
    return {
        each.canonical
        for each in resources
        if each.canonical not in PROMPTED and each.canonical != "/{path}"
    }


async def test_every_own_endpoint_is_described_and_no_other(fleet: Fleet) -> None:
    router = await fleet.router()
    own = own_paths(router.runner.app.router.resources())
    assert own - (FILES.keys() - {"/ui"}) == DOCUMENT["paths"].keys()


async def test_answers_are_as_described(fleet: Fleet, client: aiohttp.ClientSession) -> None:
    router = await fleet.router(policy="ttft")
    for number in range(3):
        gate = asyncio.Event()  # parts of less than 0.5 ms are not told
        asyncio.get_running_loop().call_later(0.01, gate.set)
        for replica in (fleet.one, fleet.two):
            replica.will(stream(*chat_events("a", "b"), gates=(gate,)))
        async with client.post(
            f"{router.url}/v1/chat/completions", json={**CHAT, "stream": True}
        ) as response:
            await response.read()
            assert response.status == 200
        await router.record(number + 1)
    seen = {}
    for path in DOCUMENT["paths"].keys() - {"/explain"}:
        if "{" in path:
            continue
        async with client.get(f"{router.url}{path}") as response:
            assert response.status == 200
            seen[path] = await check(response, "get", path)
    # They have what is described, so that the comparison was one.
    assert {"replicas", "configuration", "tokens", "faults"} <= seen["/health"].keys()
    assert len(seen["/ui/state"]["requests"]) == 3
    assert seen["/ui/state"]["ttft"]["slices"]
    assert seen["/scaling"]["models"] and seen["/usage"]["usage"] and seen["/waste"]["keys"]
    asked = seen["/ui/state"]["requests"][0]["id"]
    async with client.get(f"{router.url}/requests/{asked}") as response:
        assert (await check(response, "get", "/requests/{id}"))["parts"]
    async with client.get(f"{router.url}/v1/models/m") as response:
        assert (await check(response, "get", "/v1/models/{model}"))["id"] == "m"
    async with client.post(f"{router.url}/explain", json=CHAT) as response:
        answer = await check(response, "post", "/explain")
    assert [each["replica_id"] for each in answer["candidates"]]
    # A resumed one is asked whether it is up.
    for verb, states in (("drain", {"draining"}), ("resume", {"unknown", "up"})):
        async with client.post(f"{router.url}/replicas/one/{verb}") as response:
            told = await check(response, "post", f"/replicas/{{id}}/{verb}")
            assert told["state"] in states


@pytest.mark.parametrize(
    "case",
    [
        ("get", "/v1/models/{model}", "/v1/models/none", 404),
        ("get", "/requests/{id}", "/requests/none", 404),
        ("post", "/explain", "/explain", 400),
        ("post", "/explain", "/explain?endpoint=/nothing", 400),
        ("post", "/replicas/{id}/drain", "/replicas/none/drain", 404),
        ("post", "/replicas/{id}/drain", "/replicas/one/drain?wait_s=-1", 400),
        ("post", "/replicas/{id}/resume", f"/replicas/{quote('a/b', safe='')}/resume", 404),
    ],
)
async def test_errors_are_as_described(
    fleet: Fleet, client: aiohttp.ClientSession, case: tuple[str, str, str, int]
) -> None:
    method, path, asked, status = case
    router = await fleet.router()
    async with client.request(method, f"{router.url}{asked}", json={}) as response:
        await check(response, method, path)
        assert response.status == status


async def test_who_may_call_what_is_as_described(
    fleet: Fleet, stranger: aiohttp.ClientSession
) -> None:
    """With keys, a client without one reaches what needs none, and nothing else."""
    access = AccessConfig(admin_sha256=("0" * 64,), keys=())
    router = await fleet.router(access=access)
    for path, described in DOCUMENT["paths"].items():
        for method in METHODS:
            if method not in described:
                continue
            is_open = {} in described[method].get("security", DOCUMENT["security"])
            asked = path.replace("{id}", "one").replace("{model}", "m")
            async with stranger.request(method, f"{router.url}{asked}", json={}) as response:
                await check(response, method, path)
                assert (response.status == 401) is not is_open, path


async def test_limits_of_keys_are_as_described(
    fleet: Fleet, stranger: aiohttp.ClientSession
) -> None:
    key = KeyConfig(
        name="team",
        sha256=sha256_of("wr-1"),
        requests_per_minute=9,
        tokens_per_minute=9,
        tokens_per_day=9,
        valid_until="2999-12-31",
    )
    router = await fleet.router(access=AccessConfig(keys=(key,)))
    headers = {"Authorization": "Bearer wr-1"}
    async with stranger.get(f"{router.url}/usage", headers=headers) as response:
        [limits] = (await check(response, "get", "/usage"))["limits"]
    assert limits["tokens_per_day"]["limit"] == 9


async def test_no_answer_has_the_password_of_a_replicas_url(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    url = fleet.one.url.replace("://", "://me:hidden@")
    router = await fleet.router(replicas=(ReplicaConfig(url=url),), policy="ttft")
    for path in ("/health", "/replicas", "/ui/state", "/metrics"):
        async with client.get(f"{router.url}{path}") as response:
            text = await response.text()
            assert fleet.one.url.removeprefix("http://") in text, path
            assert "hidden" not in text
    async with client.post(f"{router.url}/explain", json=CHAT) as response:
        answer = await response.json()
    assert answer["url"] == fleet.one.url


async def test_a_router_without_replicas_answers_as_described(
    fleet: Fleet, client: aiohttp.ClientSession, dead_port: int
) -> None:
    router = await fleet.router(replicas=(ReplicaConfig(url=f"http://127.0.0.1:{dead_port}"),))
    for path in ("/health", "/v1/models"):
        async with client.get(f"{router.url}{path}") as response:
            await check(response, "get", path)
            assert response.status == 503
