"""The coordinator's HTTP calls, asked as LMCache's servers and clients ask them."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from router.lmcache.controller import Controller
from router.lmcache.lmcache import Lmcache
from tests.router.agent_server import serving
from tests.router.lmcache.helpers import (
    CHUNK,
    MODEL,
    FakeServer,
    key,
    make_fleet,
    serving_fake,
    transcript,
    transcript_tokens,
)

PROMPT = list(range(2 * CHUNK + 5))
ASKED = {"model_name": MODEL, "world_size": 1, "token_ids": PROMPT, "cache_salt": ""}


@dataclass
class Caller:
    """Asks a controller's port."""

    url: str
    session: aiohttp.ClientSession

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        url = self.url + path
        async with self.session.request(method, url, json=body, headers=headers) as response:
            text = await response.text()
            return response.status, await response.json() if text else None


async def calling(
    stack: AsyncExitStack,
    session: aiohttp.ClientSession,
    secret: str | None = None,
    body_s: float = 60.0,
) -> Caller:
    lmcache = Lmcache(make_fleet(), session)
    controller = Controller(
        list,
        session,
        limit_bytes=1 << 20,
        body_s=body_s,
        secret=secret,
        lmcache=lmcache,
    )
    return Caller(await stack.enter_async_context(serving(controller.api())), session)


@pytest.fixture
async def caller(client: aiohttp.ClientSession) -> AsyncIterator[Caller]:
    async with AsyncExitStack() as stack:
        yield await calling(stack, client)


async def replay(caller: Caller) -> list[tuple[int, Any]]:
    """Send all that a real server has sent."""
    return [await caller.call(each["method"], each["path"], each["body"]) for each in transcript()]


async def test_a_real_servers_messages_are_all_accepted(caller: Caller) -> None:
    registered, *events = await replay(caller)
    assert registered == (200, {"instance_id": "mp0", "re_registered": False})
    assert {status for status, _ in events} == {200}
    assert sum(answer["applied"] for _, answer in events) == 11
    again = await replay(caller)
    assert again[0] == (200, {"instance_id": "mp0", "re_registered": True})
    assert sum(answer["duplicates"] for _, answer in again[1:]) == 11
    assert await caller.call("PUT", "/instances/mp0/heartbeat") == (200, {"instance_id": "mp0"})
    assert await caller.call("DELETE", "/instances/mp0") == (204, None)
    assert (await caller.call("PUT", "/instances/mp0/heartbeat"))[0] == 404
    assert await caller.call("DELETE", "/instances/mp0") == (204, None), "as often as it likes"


async def test_a_server_without_a_name_gets_one(caller: Caller) -> None:
    _, answer = await caller.call("POST", "/instances", {"ip": "10.0.0.1", "http_port": 8210})
    assert answer["instance_id"].startswith("mp-")
    _, listed = await caller.call("GET", "/instances")
    (server,) = listed["instances"]
    assert (server["ip"], server["http_port"], server["mq_port"]) == ("10.0.0.1", 8210, 0)


async def test_a_prompt_is_looked_up_by_its_tokens_or_keys(caller: Caller) -> None:
    await replay(caller)
    asked = {"token_ids": transcript_tokens()[:600], "model_name": MODEL}
    status, answer = await caller.call("POST", "/directory/lookup", asked)
    assert (status, answer["chunks"], len(answer["results"])) == (200, 2, 2)
    first = answer["results"][0]
    assert first["key"]["kv_rank"] == 0x1000100
    assert (first["token_ids"], first["access_count"]) == ([], 0), "they are not kept"
    assert [(each["tier"], each["backend"]) for each in first["placements"]] == [
        ("l1", "dram"),
        ("l2", "fs_native"),
    ]
    by_key = await caller.call("POST", "/directory/lookup", {"keys": [first["key"]]})
    assert by_key == (200, {"chunks": 1, "results": [first]})
    unknown = await caller.call("POST", "/directory/lookup", asked | {"world_size": 2})
    assert [each["placements"] for each in unknown[1]["results"]] == [[], [], [], []]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/directory/lookup", {}),
        ("/directory/lookup", {"token_ids": [1]}),
        ("/directory/lookup", {"token_ids": [-1], "model_name": "m"}),
        ("/directory/lookup", {"token_ids": [1], "model_name": "m", "world_size": 0}),
        ("/cache/prefetches", ASKED | {"instance_id": "mp0", "cache_salt": "a@b"}),
        ("/instances", {"ip": "", "http_port": 1}),
        ("/instances", {"ip": "a", "http_port": 0}),
        ("/instances", {"ip": "[", "http_port": 1}),
        ("/instances", {"ip": "a/b?", "http_port": 1}),
        ("/cache/prefetches", ASKED),
    ],
)
async def test_what_is_malformed_is_refused(caller: Caller, path: str, body: object) -> None:
    status, answer = await caller.call("POST", path, body)
    assert (status, list(answer)) == (422, ["detail"])


async def test_prefetches_are_passed_on(caller: Caller) -> None:
    async with serving_fake(FakeServer()) as server:
        port = int(server.url.rpartition(":")[2])
        body = {"instance_id": "mp0", "ip": "127.0.0.1", "http_port": port}
        await caller.call("POST", "/instances", body)
        asked = ASKED | {"instance_id": "mp0"}
        _, answer = await caller.call("POST", "/cache/prefetches", asked)
        told = {"instance_id": "mp0", "request_id": "job2", "chunks": 2, "status": "submitted"}
        assert answer == told
        assert server.asked == [ASKED]
        _, answer = await caller.call("GET", "/cache/prefetches/mp0/job2")
        assert (answer["found_keys"], answer["total_keys"]) == (2, 2)
        polled = server.polled
        other = await caller.call("GET", "/cache/prefetches/mp0/..%2F..%2Fstatus")
        assert (other[0], server.polled) == (404, polled + 1), "no other path of the server's"
        short = asked | {"token_ids": [1]}
        assert (await caller.call("POST", "/cache/prefetches", short))[1]["status"] == "noop"
        server.refusal = 503
        assert (await caller.call("POST", "/cache/prefetches", asked))[0] == 502
    assert (await caller.call("POST", "/cache/prefetches", asked))[0] == 502
    assert (await caller.call("GET", "/cache/prefetches/nobody/job2"))[0] == 404


async def test_one_server_too_many_is_refused_and_the_others_go_on(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.lmcache.coordinator.MAX_SERVERS", 1)
    await replay(caller)
    more = {"instance_id": "one-more", "ip": "10.0.0.1", "http_port": 8210}
    status, answer = await caller.call("POST", "/instances", more)
    assert (status, answer) == (503, {"detail": "the limit of 1 registered servers is reached"})
    assert (await caller.call("PUT", "/instances/one-more/heartbeat"))[0] == 404
    assert (await caller.call("PUT", "/instances/mp0/heartbeat"))[0] == 200
    (_, answer), *_ = await replay(caller)
    assert answer == {"instance_id": "mp0", "re_registered": True}
    await caller.call("DELETE", "/instances/mp0")
    assert (await caller.call("POST", "/instances", more))[0] == 200, "there is room again"


async def test_half_a_body_delays_no_other_call(client: aiohttp.ClientSession) -> None:
    async with AsyncExitStack() as stack:
        caller = await calling(stack, client, body_s=1.0)
        await replay(caller)
        url = urlsplit(caller.url)
        for length, status, told in (
            (90, 408, "the body did not come whole within 1 s"),
            (1 << 21, 413, "the body may have 1048576 bytes and 2097152 bytes were announced"),
        ):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            head = f"POST /events HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{{"
            writer.write(head.encode())
            assert (await caller.call("PUT", "/instances/mp0/heartbeat"))[0] == 200
            answer = (await asyncio.wait_for(reader.readuntil(b"}"), 10)).decode()
            assert answer.startswith(f"HTTP/1.1 {status} ")
            assert '{"detail":"' + told in answer
            writer.close()


async def test_a_secret_is_asked_of_every_caller(client: aiohttp.ClientSession) -> None:
    """LMCache's servers take a URL alone, and send its password: it works unpatched."""
    async with AsyncExitStack() as stack:
        caller = await calling(stack, client, secret="s3cr€t")
        known = b64encode("any:s3cr€t".encode()).decode()
        for value, status in (
            (None, 401),
            (f"Basic {known}", 200),
            (f"Basic {b64encode(b'any:wrong').decode()}", 401),
            (f"Basic {b64encode('s3cr€t:'.encode()).decode()}", 401),
            ("Basic %", 401),
            ("Bearer s3cr€t", 200),
            ("Bearer", 401),
            ("Other s3cr€t", 401),
        ):
            headers = {} if value is None else {"Authorization": value}
            assert (await caller.call("GET", "/healthz", headers=headers))[0] == status, value


async def test_a_prompt_of_too_many_keys_is_refused(caller: Caller) -> None:
    asked = ASKED | {"world_size": 255, "token_ids": [1] * (400 * CHUNK)}
    status, answer = await caller.call("POST", "/directory/lookup", asked)
    text = "this call looks up 102000 keys; the limit is 100000: split it into several calls"
    assert (status, answer) == (400, {"detail": text})


async def test_so_are_too_many_keys(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.lmcache.coordinator_protocol._MAX_KEYS", 1)
    keys = [key(number).encoded() for number in range(2)]
    assert (await caller.call("POST", "/directory/lookup", {"keys": keys}))[0] == 400
    assert (await caller.call("POST", "/directory/lookup", {"keys": keys[:1]}))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "named"),
    [
        ("GET", "/quota", "LMCache's quotas"),
        ("GET", "/quota/config", "LMCache's quotas"),
        ("PUT", "/quota/tenant", "LMCache's quotas"),
        ("DELETE", "/quota/tenant", "LMCache's quotas"),
        ("GET", "/instances/usage", "LMCache's usage reports"),
        ("GET", "/instances/mp0/usage", "LMCache's usage reports"),
        ("GET", "/directory/stats", "LMCache's usage reports"),
        ("GET", "/directory/keys", "LMCache's listing of keys"),
        ("POST", "/cache/delete", "LMCache's deletion of keys"),
        ("POST", "/cache/pins", "LMCache's pins"),
        ("DELETE", "/cache/pins", "LMCache's pins"),
    ],
)
async def test_calls_that_routing_does_not_need_are_refused_by_name(
    caller: Caller, method: str, path: str, named: str
) -> None:
    status, answer = await caller.call(method, path)
    assert (status, list(answer)) == (501, ["detail"])
    assert answer["detail"].startswith(f"{method} {path}: Warmroute does not serve {named}")


async def test_no_chunk_of_another_server_is_blended(caller: Caller) -> None:
    body = {"tokens_b64": "AAAAAA==", "model_name": MODEL}
    assert await caller.call("POST", "/directory/blend-lookup", body) == (200, {"matches": []})
