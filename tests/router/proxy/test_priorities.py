"""Which class a request gets, and what its replica is told: no key gets past its class."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from router.api.access import new_key, sha256_of
from router.config.settings import (
    AccessConfig,
    AdmissionConfig,
    KeyConfig,
    PriorityName,
    RatesConfig,
    ReplicaConfig,
    RouterConfig,
)
from router.policy import ParsedRequest, Plane, Policy
from router.priority import Priority
from tests.router.conftest import Fleet, Wait
from tests.router.scripted import CHAT_ANSWER, chat_events, json_answer, stream
from warmroute_common.api_errors import BadRequestError

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
HEADER = "x-vllm-priority"
KEY = new_key()


def parsed(
    body: dict[str, Any],
    *,
    best: Priority | None = None,
    numbers: bool = False,
    keyless: PriorityName = "normal",
    path: str = CHAT,
    plane: Plane = Plane.PROXY,
    **headers: str,
) -> ParsedRequest:
    admission = AdmissionConfig(replica_priorities=numbers, keyless_priority=keyless)
    sent = json.dumps(ASK | body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    policy = Policy(RouterConfig(admission=admission))
    return policy.parse(plane, "POST", path, named, sent, best=best)


@pytest.mark.parametrize(
    ("asked", "own"),
    [
        ({}, None),
        ({"priority": 0}, None),
        ({"priority": -1}, Priority.HIGH),
        ({"priority": -(2**63)}, Priority.HIGH),
        ({"priority": 7}, Priority.BATCH),
        ({"service_tier": "priority"}, Priority.HIGH),
        ({"service_tier": "default"}, Priority.NORMAL),
        ({"service_tier": "flex"}, Priority.BATCH),
        ({"service_tier": "batch"}, Priority.BATCH),
        ({"service_tier": "auto"}, None),
        ({"service_tier": "unheard-of"}, None),
        ({"service_tier": ["flex"]}, None),
        ({"priority": -1, "service_tier": "flex"}, Priority.BATCH),
        ({"priority": 1, "service_tier": "priority"}, Priority.BATCH),
    ],
)
@pytest.mark.parametrize("best", Priority)
def test_a_request_gets_what_it_asks_for_up_to_its_keys_class(
    asked: dict[str, Any], own: Priority | None, best: Priority
) -> None:
    """Without a wish it has the class of its key."""
    wanted = best if own is None else max(own, best)
    assert parsed(asked, best=best).priority is wanted
    assert parsed(asked, keyless=best.name.lower()).priority is wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("best", "asked", "number"),
    [
        (Priority.HIGH, None, -1),
        (Priority.HIGH, -50, -50),
        (Priority.HIGH, 3, 3),
        (Priority.NORMAL, None, 0),
        (Priority.NORMAL, -50, 0),
        (Priority.NORMAL, 3, 3),
        (Priority.BATCH, None, 1),
        (Priority.BATCH, 0, 1),
        (Priority.BATCH, -50, 1),
        (Priority.BATCH, 9, 9),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/inference/v1/generate"])
def test_replicas_get_a_number_of_the_class(
    best: Priority, asked: int | None, number: int, path: str
) -> None:
    """In the header, which goes before the body in vLLM; and in the body, if it has another."""
    body = {} if asked is None else {"priority": asked}
    request = parsed(body, best=best, numbers=True, path=path)
    assert request.vllm_priority == number
    assert json.loads(request.body).get("priority") in ((None,) if asked is None else (number, 0))
    in_header = parsed({}, best=best, numbers=True, path=path, x_vllm_priority=str(asked))
    assert in_header.vllm_priority == number
    request = parsed(body, best=best, numbers=False, path=path)
    assert request.vllm_priority == json.loads(request.body).get("priority", 0) == 0


def test_a_body_that_needs_no_change_stays_as_it_is() -> None:
    for body in ({}, {"priority": 0}, {"service_tier": "flex"}):
        assert parsed(body).body == json.dumps(ASK | body).encode()
    assert parsed({"priority": 4}, numbers=True).body == json.dumps(ASK | {"priority": 4}).encode()
    gateway = parsed({"priority": -4}, plane=Plane.GATEWAY)
    assert gateway.body == json.dumps(ASK | {"priority": -4}).encode(), "the gateway sends it"


def test_vllm_does_not_know_the_tier_batch() -> None:
    assert json.loads(parsed({"service_tier": "batch"}).body)["service_tier"] == "flex"


@pytest.mark.parametrize("path", [CHAT, "/inference/v1/generate", "/pooling"])
@pytest.mark.parametrize(
    "value", ["-5", "-" + "0" * 2000 + "5", -5.0, True, [1], {"a": 1}, 2**63, -(2**63) - 1]
)
def test_what_vllm_might_take_for_a_number_is_refused(path: str, value: object) -> None:
    with pytest.raises(BadRequestError, match="'priority' must be a whole number") as caught:
        parsed({"priority": value}, path=path)
    assert (caught.value.param, caught.value.code) == ("priority", "invalid_type")


def test_an_escaped_name_is_the_same_field() -> None:
    body = b'{"model": "m", "pri\\u006frity": -5}'
    for path in (CHAT, "/inference/v1/generate"):
        sent = Policy(RouterConfig()).parse(Plane.PROXY, "POST", path, {}, body).body
        assert json.loads(sent)["priority"] == 0


def test_fields_of_other_endpoints_are_their_own() -> None:
    request = parsed({"priority": "urgent"}, path="/v1/files")
    assert json.loads(request.body)["priority"] == "urgent"


@pytest.mark.parametrize("numbers", [False, True])
async def test_a_client_cannot_name_its_priority_to_the_replica(
    fleet: Fleet, stranger: aiohttp.ClientSession, numbers: bool
) -> None:
    key = KeyConfig(name="team", sha256=sha256_of(KEY), priority="batch")
    router = await fleet.router(
        access=AccessConfig(keys=(key,)), admission=AdmissionConfig(replica_priorities=numbers)
    )
    fleet.one.will(json_answer(CHAT_ANSWER))
    headers = {"Authorization": f"Bearer {KEY}", HEADER: "-9"}
    body = ASK | {"priority": -7, "service_tier": "priority"}
    async with stranger.post(router.url + CHAT, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
    (seen,) = fleet.one.seen
    assert seen.headers.get(HEADER) == ("1" if numbers else None)
    assert json.loads(seen.body)["priority"] == (1 if numbers else 0)


async def test_batch_requests_wait_until_the_others_are_gone(
    fleet: Fleet, stranger: aiohttp.ClientSession, eventually: Wait
) -> None:
    """A token takes ten seconds here, as far as the router knows, so all but the first wait."""
    gate = asyncio.Event()
    answers = [stream(*chat_events("a"), gates=(gate,)), *(stream(*chat_events("b")),) * 3]
    fleet.one.will(*answers)
    router = await fleet.router(
        policy="ttft",
        rates=RatesConfig(prefill_tokens_per_s=0.1),
        replicas=(ReplicaConfig(url=fleet.one.url, instance_id="one"),),
        admission=AdmissionConfig(max_wait_s=360_000.0, keyless_priority="high"),
    )

    async def ask(text: str, **fields: Any) -> None:
        body = {"model": "m", "prompt": text, "stream": True, **fields}
        async with stranger.post(f"{router.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            await response.read()

    asks = [asyncio.create_task(ask("first"))]
    await eventually(lambda: len(fleet.one.seen) == 1)
    others: list[tuple[str, dict[str, Any]]] = [
        ("b", {"service_tier": "flex"}),
        ("normal", {"service_tier": "default"}),
        ("the longest of all", {"priority": -1}),
    ]
    for text, fields in others:
        asks.append(asyncio.create_task(ask(text, **fields)))
        await eventually(lambda: len(router.parts.admission) == len(asks) - 1)
    gate.set()
    await asyncio.gather(*asks)
    prompts = [json.loads(each.body)["prompt"] for each in fleet.one.seen]
    assert prompts == ["first", "the longest of all", "normal", "b"]
