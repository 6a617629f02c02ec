"""LMCache's controller API against scripted agents, over HTTP."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import encode_basic_auth

from router.api.access import Access, new_key, sha256_of
from router.config.settings import AccessConfig
from tests.router.agent_server import serving
from tests.router.lmcache.helpers import (
    CHUNK_TOKENS,
    TIERS,
    TOKENS,
    Controlled,
    FakeAgent,
    controlled,
    move,
    with_agents,
)
from warmroute_common import agent_protocol as wire

CPU, DISK, REMOTE = "LocalCPUBackend", "LocalDiskBackend", "RemoteBackend"


pytestmark = pytest.mark.usefixtures("urls")


# --- lookup


async def test_lookup_answers_in_both_of_lmcaches_shapes(
    control: Controlled, one: FakeAgent
) -> None:
    one.hold(cpu=range(3))
    answer = await control.ok("/lookup", {"tokens": TOKENS})
    event_id = answer.pop("event_id")
    assert event_id.startswith("Lookup")
    found = {"one": [CPU, 3 * CHUNK_TOKENS]}
    assert answer == {"layout_info": found, **found}, "who holds nothing is left out"


@pytest.mark.parametrize(
    ("held", "location", "chunks"),
    [
        ({"cpu": [0, 1, 2, 3, 4]}, CPU, 5),
        ({"cpu": [0, 1], "disk": [0, 1]}, CPU, 2),
        ({"cpu": [0, 1], "disk": [0, 1, 2]}, DISK, 3),
        ({"cpu": [0, 1, 4], "disk": [0, 1]}, CPU, 2),
        ({"disk": [0], "remote": [0, 1]}, REMOTE, 2),
        ({"disk": [0, 1], "remote": [0, 1]}, DISK, 2),
        # Chunk for chunk none of these comes from the remote store alone.
        ({"cpu": [0, 2], "disk": [0, 1], "remote": [0, 1, 2]}, REMOTE, 3),
        # Together they hold three, none alone more than one.
        ({"cpu": [0], "disk": [1], "remote": [2]}, CPU, 1),
    ],
)
async def test_lookup_names_the_location_that_holds_most(
    control: Controlled, two: FakeAgent, held: dict[str, list[int]], location: str, chunks: int
) -> None:
    two.hold(**held)
    answer = await control.ok("/lookup", {"tokens": TOKENS})
    assert answer["layout_info"] == {"two": [location, chunks * CHUNK_TOKENS]}


async def test_lookup_passes_the_salt_on(control: Controlled, one: FakeAgent) -> None:
    await control.ok("/lookup", {"tokens": TOKENS, "cache_salt": "s"})
    assert one.asked == [
        ("/lookup", wire.LookupRequest(tokens=TOKENS, cache_salt="s", tier=tier)) for tier in TIERS
    ]


async def test_lookup_of_nothing_asks_nobody(control: Controlled, one: FakeAgent) -> None:
    assert (await control.ok("/lookup", {"tokens": []}))["layout_info"] == {}
    assert one.asked == []


async def test_lookup_ignores_an_instance_that_fails(
    control: Controlled, one: FakeAgent, two: FakeAgent
) -> None:
    one.failure = 500
    two.hold(cpu=[0])
    answer = await control.ok("/lookup", {"tokens": TOKENS})
    assert answer["layout_info"] == {"two": [CPU, CHUNK_TOKENS]}
    assert "one: " in answer["errors"]["one"] and "500" in answer["errors"]["one"]
    two.failure = 500
    status, answer = await control.post("/lookup", {"tokens": TOKENS})
    assert status == 502
    assert "one: " in answer["error"]["message"] and "two: " in answer["error"]["message"]


async def test_an_instance_with_an_unlucky_name_does_not_hide_the_answer(
    control: Controlled,
) -> None:
    agent = FakeAgent("layout_info")
    agent.hold(cpu=[0])
    async with with_agents(control, [agent]):
        answer = await control.ok("/lookup", {"tokens": TOKENS})
    assert answer["layout_info"] == {"layout_info": [CPU, CHUNK_TOKENS]}


async def test_lookup_without_any_instance(control: Controlled) -> None:
    control.configured.clear()
    assert (await control.ok("/lookup", {"tokens": TOKENS}))["layout_info"] == {}


# --- agents that refuse or fail


@pytest.mark.parametrize("status", [400, 409, 413, 503])
async def test_an_agents_refusal_is_passed_on(
    control: Controlled, two: FakeAgent, status: int
) -> None:
    two.refusal = (status, "only into the cpu tier")
    got, answer = await control.post("/move", move())
    assert got == status
    assert answer["error"]["message"] == "two: only into the cpu tier"


async def test_an_agent_that_fails_is_named(control: Controlled, two: FakeAgent) -> None:
    two.refusal = (500, "broken")
    status, answer = await control.post("/move", move())
    assert status == 502
    assert answer["error"]["message"].startswith("two: http://127.0.0.1:")
    assert "broken" in answer["error"]["message"]


# --- pin, clear


@pytest.mark.parametrize("path", ["/pin", "/unpin"])
async def test_pin_and_unpin(control: Controlled, one: FakeAgent, path: str) -> None:
    one.hold(disk=range(2))
    body = {"tokens": TOKENS, "instance_id": "one", "location": DISK, "cache_salt": "s"}
    answer = await control.ok(path, body)
    assert answer == {"event_id": answer["event_id"], "num_tokens": 2 * CHUNK_TOKENS}
    assert one.asked == [
        (path, wire.PinRequest(tokens=TOKENS, cache_salt="s", tier="disk")),
    ]


@pytest.mark.parametrize(
    ("given", "tiers", "dropped"),
    [
        ({"location": CPU}, ["cpu"], {CPU: 3}),
        ({"locations": [CPU, DISK, CPU]}, ["cpu", "disk"], {CPU: 3, DISK: 2}),
        ({"location": None, "locations": None}, None, {CPU: 3, DISK: 2, REMOTE: 0}),
        ({}, None, {CPU: 3, DISK: 2, REMOTE: 0}),
    ],
)
@pytest.mark.parametrize("tokens", [None, TOKENS])
async def test_clear_by_location(
    control: Controlled,
    *,
    one: FakeAgent,
    given: dict[str, Any],
    tiers: list[str] | None,
    dropped: dict[str, int],
    tokens: list[int] | None,
) -> None:
    one.hold(cpu=range(3), disk=range(2))
    answer = await control.ok("/clear", {"instance_id": "one", "tokens": tokens, **given})
    ((path, asked),) = one.asked
    assert path == "/clear"
    assert isinstance(asked, wire.ClearRequest)
    assert (asked.tiers, asked.tokens) == (tiers, tokens)
    assert answer == {
        "event_id": answer["event_id"],
        "success": True,
        "num_tokens": sum(dropped.values()) * CHUNK_TOKENS,
        "dropped_tokens": {name: n * CHUNK_TOKENS for name, n in dropped.items()},
    }


# --- health and information


async def test_health(control: Controlled, one: FakeAgent) -> None:
    answer = await control.ok("/health", {"instance_id": "one"})
    assert answer == {"event_id": answer["event_id"], "error_codes": {"0": 0}}
    one.failure = 500
    answer = await control.ok("/health", {"instance_id": "one"})
    assert answer["error_codes"] == {"0": 1}
    assert answer["errors"]["0"].startswith("one: ")
    assert await control.get("/health") == (200, {"status": "ok", "instances": 2})


async def test_an_agent_that_is_silent_is_not_waited_for(
    control: Controlled, one: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for the other agent, which answers, on a machine that stands still for a moment.
    for name in ("_ANSWER_S", "_CLEAR_S", "_MOVE_S"):
        monkeypatch.setattr(f"router.agent_client.{name}", 1.0)
    one.silent = True
    pin = {"tokens": TOKENS, "instance_id": "one", "location": CPU}
    answer = await control.ok("/health", {"instance_id": "one"})
    assert answer["error_codes"] == {"0": 1}
    status, answer = await control.post("/pin", pin)
    assert status == 504
    message = answer["error"]["message"]
    assert message.startswith("one: ") and "no answer within 1 s" in message
    answer = await control.ok("/lookup", {"tokens": TOKENS})
    assert list(answer["errors"]) == ["one"]


async def test_an_agent_that_is_gone_is_named(control: Controlled) -> None:
    gone = FakeAgent("gone")
    async with with_agents(control, [gone]):
        pass
    body = {"tokens": TOKENS, "instance_id": "gone", "location": CPU}
    status, answer = await control.post("/pin", body)
    assert status == 502
    assert answer["error"]["message"].startswith("gone: http://127.0.0.1:")


async def test_a_server_that_is_not_an_agent(control: Controlled) -> None:
    from aiohttp import web

    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", hello)
    async with serving(app) as url:
        control.configured[0] = type(control.configured[0])(
            id="one", agent_url=url, incarnation=None
        )
        status, answer = await control.post("/move", move())
    assert status == 502
    assert "one: the answer is not a InstanceInfo" in answer["error"]["message"]


async def test_instances_lists_the_configured_ones_too(
    control: Controlled, urls: list[str]
) -> None:
    _, answer = await control.get("/instances")
    assert answer["instances"][0] == {
        "instance_id": "one",
        "agent_url": urls[0],
        "configured": True,
        "registered": False,
    }


# --- what cannot be done

PIN: dict[str, object] = {"tokens": [1], "instance_id": "one", "location": CPU}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/lookup", {}, "missing required field `tokens`; it takes a JSON object with tokens and"),
        ("/lookup", {"tokens": "abc"}, "Expected `array`, got `str` - at `$.tokens`"),
        ("/lookup", {"tokens": [1.5]}, "Expected `int`, got `float` - at `$.tokens[0]`"),
        ("/lookup", {"tokens": [True]}, "Expected `int`, got `bool`"),
        ("/lookup", {"tokens": [-1]}, "Expected `int` >= 0 - at `$.tokens[0]`"),
        ("/lookup", {"tokens": [2**40]}, "Expected `int` <= 4294967295"),
        ("/lookup", {"tokens": [1], "token": 1}, "unknown field `token`"),
        ("/lookup", [1], "Expected `object`, got `array`"),
        ("/lookup", b"", "/lookup: "),
        ("/lookup", b"{", "/lookup: "),
        ("/lookup", b'{"tokens": [1], "cache_salt": "\xff"}', "/lookup: "),
        ("/move", move(tokens=None), "Expected `array`, got `null` - at `$.tokens`"),
        ("/move", move(tokens=[]), "Expected `array` of length >= 1 - at `$.tokens`"),
        ("/move", move(old_position=["one"]), "Expected `array` of length 2 - at `$.old_position`"),
        ("/move", move(old_position="one"), "Expected `array`, got `str` - at `$.old_position`"),
        (
            "/move",
            move(new_position=["two", "cpu"]),
            "Invalid enum value 'cpu' - at `$.new_position[1]`; it takes a JSON object with old",
        ),
        ("/move", move(new_position=["one", CPU]), "both positions are the same"),
        ("/pin", {**PIN, "tokens": []}, "Expected `array` of length >= 1 - at `$.tokens`"),
        ("/pin", {"tokens": [1], "location": CPU}, "missing required field `instance_id`"),
        (
            "/unpin",
            {**PIN, "location": "GPU"},
            "; locations are LocalCPUBackend, LocalDiskBackend, RemoteBackend",
        ),
        ("/clear", {"instance_id": "one", "tokens": []}, "length >= 1 - at `$.tokens`; it takes"),
        ("/clear", {"instance_id": "one", "locations": []}, "length >= 1 - at `$.locations`; it"),
        (
            "/clear",
            {"instance_id": "one", "location": CPU, "locations": [CPU]},
            "give either 'location' or 'locations'",
        ),
        ("/clear", {"instance_id": "one", "token": [1]}, "unknown field `token`; it takes"),
        (
            "/clear",
            {"instance_id": "one", "location": "disk"},
            "Invalid enum value 'disk' - at `$.location`",
        ),
        ("/health", {}, "missing required field `instance_id`"),
        ("/check_finish", {"event_id": 1}, "Expected `str`, got `int` - at `$.event_id`"),
    ],
)
async def test_bad_requests_are_refused_with_a_fix(
    control: Controlled,
    *,
    one: FakeAgent,
    two: FakeAgent,
    path: str,
    body: object,
    message: str,
) -> None:
    status, answer = await control.post(path, body)
    assert status == 400, answer
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert one.asked == two.asked == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/move", move(old_position=["three", CPU])),
        ("/move", move(new_position=["three", CPU])),
        ("/pin", {**PIN, "instance_id": "three"}),
        ("/unpin", {**PIN, "instance_id": "three"}),
        ("/clear", {"instance_id": "three"}),
        ("/health", {"instance_id": "three"}),
    ],
)
async def test_an_unknown_instance(control: Controlled, path: str, body: object) -> None:
    status, answer = await control.post(path, body)
    assert status == 404
    assert answer["error"]["message"] == "no instance 'three'; known instances: one, two"
    assert answer["error"]["code"] == "unknown_instance"


async def test_an_agent_that_registers_at_the_wrong_port_is_told_the_right_one(
    control: Controlled,
) -> None:
    status, answer = await control.post("/register", {})
    assert status == 404
    assert "controller.monitor_port" in answer["error"]["message"]


async def test_a_body_that_never_arrives_times_out() -> None:
    """Or 128 such clients would keep all others out."""
    async with controlled(body_s=0.05) as control:
        url = urlsplit(control.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(
            b"POST /lookup HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 9\r\n\r\n{"
        )
        answer = await reader.readuntil(b"did not come whole within")
        assert answer.startswith(b"HTTP/1.1 408 ")
        writer.close()


async def test_an_admin_key_is_asked_for_as_a_secret_is() -> None:
    key = new_key()
    async with controlled(access=Access(AccessConfig(admin_sha256=(sha256_of(key),)))) as control:
        assert (await control.get("/instances"))[0] == 401
        for shown in (f"Bearer {key}", encode_basic_auth("any", key)):
            headers = {"Authorization": shown}
            async with control.session.get(f"{control.url}/instances", headers=headers) as answer:
                assert answer.status == 200
        assert (await control.tell("/register", {}))[0] == 400


async def test_other_paths_and_methods(control: Controlled) -> None:
    assert (await control.post("/nothing", {}))[0] == 404
    status, answer = await control.get("/move")
    assert status == 405
    assert answer["error"]["message"] == "/move takes POST, not GET"


async def test_a_body_over_the_limit(control: Controlled) -> None:
    status, answer = await control.post("/lookup", b" " * (1 << 21))
    assert status == 413
    assert "max_body_bytes" in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/query_worker_info", "/compress", "/decompress"])
async def test_calls_that_are_not_served_are_refused_by_name(
    control: Controlled, path: str
) -> None:
    status, answer = await control.post(path, {"instance_id": "one"})
    assert (status, answer["error"]["code"]) == (501, "not_supported")
    assert answer["error"]["message"].startswith(f"{path} is a call of LMCache's controller")
