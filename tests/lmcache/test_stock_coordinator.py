"""The router's coordinator beside the stock one: the same calls, the same answers."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import msgspec
import pytest

from bench.lmcache.environment import is_installed, python
from cacheengine.launch.launch import free_ports
from router.config.settings import ControllerConfig, ReplicaConfig
from router.controller.controller import Controller
from router.launch.processes import ProcessGroup
from router.lmcache.lmcache import Lmcache
from tests.router.agent_server import serving
from tests.router.conftest import (
    Fleet,
    Wait,
    client,  # noqa: F401  (a fixture)
    eventually,  # noqa: F401  (a fixture)
    fleet,  # noqa: F401  (a fixture)
)
from tests.router.lmcache.stand_in import StandIn, standing_in
from tests.router.lmcache.told import (
    CHUNK,
    MODEL,
    batch,
    key,
    make_fleet,
    transcript,
    transcript_tokens,
)

pytestmark = [pytest.mark.vllm, pytest.mark.lmcache, pytest.mark.timeout(300)]

TOKENS = {"model_name": MODEL, "world_size": 1, "token_ids": transcript_tokens()[:600]}
STORE = next(
    batch
    for each in transcript()
    if each["path"] == "/events"
    for batch in each["body"]["batches"]
    if batch["event_type"] == "store"
)
GROUP = STORE | {
    "seq": 100,
    "entries": [STORE["entries"][0] | {"key": STORE["entries"][0]["key"] | {"object_group_id": 3}}],
}

CALLS: list[tuple[str, str, Any]] = [
    *((each["method"], each["path"], each["body"]) for each in transcript()),
    *((each["method"], each["path"], each["body"]) for each in transcript()),  # all duplicates
    ("PUT", "/instances/mp0/heartbeat", None),
    ("PUT", "/instances/nobody/heartbeat", None),
    ("POST", "/directory/lookup", TOKENS),
    ("POST", "/directory/lookup", TOKENS | {"world_size": 2}),
    ("POST", "/directory/lookup", TOKENS | {"cache_salt": "tenant"}),
    ("POST", "/directory/lookup", {"keys": [STORE["entries"][0]["key"]]}),
    ("POST", "/directory/lookup", {}),
    ("GET", "/instances/usage", None),
    ("GET", "/instances/mp0/usage", None),
    ("GET", "/instances/nobody/usage", None),
    ("POST", "/cache/pins", TOKENS),
    ("POST", "/cache/pins", TOKENS | {"token_ids": transcript_tokens()[:256]}),
    ("GET", "/cache/pins", None),
    ("GET", "/cache/pins?limit=1&offset=1", None),
    ("GET", "/cache/pins?limit=0", None),
    ("DELETE", "/cache/pins", TOKENS),
    ("GET", "/cache/pins", None),
    ("GET", "/directory/keys", None),
    ("GET", "/directory/keys?tier=l2&instance_id=mp0&backend=fs_native&limit=1", None),
    ("GET", "/directory/keys?backend=other", None),
    ("GET", "/directory/keys?tier=l3", None),
    ("GET", "/directory/stats", None),
    ("POST", "/directory/blend-lookup", {"tokens_b64": "AAAAAA==", "model_name": MODEL}),
    ("POST", "/directory/blend-lookup", {"tokens_b64": "AAAAAA=="}),
    ("POST", "/directory/blend-lookup", {"tokens_b64": "AAA="}),
    ("POST", "/directory/blend-lookup", {"tokens_b64": "?", "model_name": MODEL}),
    ("POST", "/events", {"batches": [GROUP]}),
    ("POST", "/directory/lookup", TOKENS),
    ("GET", "/quota", None),
    ("GET", "/quota/config", None),
    ("PUT", "/quota/config", {"default_limit_gb": 7.5}),
    ("GET", "/quota/config", None),
    ("PUT", "/quota/config", {"default_limit_gb": -1}),
    ("PUT", "/quota/config", {"default_limit_gb": 1, "tier": "l1"}),
    ("PUT", "/quota/config", {}),
    ("GET", "/quota/config?tier=l1", None),
    ("PUT", "/quota/_default", {"limit_gb": 2.5}),
    ("PUT", "/quota/tenant", {"limit_gb": 100}),
    ("PUT", "/quota/tenant", {}),
    ("PUT", "/quota/tenant", {"limit_gb": 1, "tier": "all"}),
    ("GET", "/quota/tenant", None),
    ("GET", "/quota/_default", None),
    ("GET", "/quota/_default?tier=l1", None),
    ("GET", "/quota/nobody", None),
    ("GET", "/quota", None),
    ("GET", "/quota?tier=l1", None),
    ("GET", "/quota?tier=all", None),
    ("GET", "/quota?tier=l3", None),
    ("DELETE", "/quota/tenant", None),
    ("DELETE", "/quota/tenant", None),
    ("DELETE", "/quota/config", None),
    ("DELETE", "/quota/_default?tier=l1", None),
    ("DELETE", "/quota/_default", None),
    ("POST", "/cache/delete", TOKENS | {"instance_id": "nobody"}),
    ("POST", "/cache/delete", TOKENS | {"instance_id": "mp0", "tier": "l3"}),
    ("POST", "/cache/delete", TOKENS | {"instance_id": "mp0", "token_ids": [1]}),
    ("POST", "/cache/delete", TOKENS | {"instance_id": "mp0"}),  # nothing listens there
    ("POST", "/cache/prefetches", TOKENS | {"instance_id": "nobody"}),
    ("GET", "/cache/prefetches/nobody/job", None),
    ("POST", "/events", {"batches": [STORE | {"incarnation": 1}]}),
    ("POST", "/events", {"batches": [STORE | {"seq": 0}]}),
    ("POST", "/events", {"batches": [STORE | {"tier": "all"}]}),
    ("POST", "/events", {"batches": [STORE | {"incarnation": STORE["incarnation"] + 1}]}),
    ("POST", "/directory/lookup", TOKENS),
    ("GET", "/instances/usage", None),
    ("DELETE", "/instances/mp0", None),
    ("POST", "/directory/lookup", TOKENS),
    ("GET", "/instances/usage", None),
    ("GET", "/healthz", None),
]


@pytest.fixture(scope="module")
def stock_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A stock coordinator, as ``lmcache coordinator`` starts one."""
    if not is_installed():
        pytest.skip("LMCache's environment is not there: make test-lmcache installs it")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    log = tmp_path_factory.mktemp("coordinator") / "coordinator.log"
    command = [str(python().with_name("lmcache")), "coordinator", "--host", "127.0.0.1"]
    with ProcessGroup() as group:
        group.start("coordinator", [*command, "--port", str(port)], None, log)
        group.wait_ready("coordinator", f"{url}/healthz", 120)
        yield url


@pytest.fixture
def ours(client: aiohttp.ClientSession) -> Lmcache:  # noqa: F811
    return Lmcache(make_fleet(), client)


@pytest.fixture
async def our_url(ours: Lmcache, client: aiohttp.ClientSession) -> AsyncIterator[str]:  # noqa: F811
    controller = Controller(
        list,
        client,
        limit_bytes=1 << 20,
        beside=ours.routes(),
        beside_instances=ours.listing,
    )
    async with serving(controller.api()) as url:
        yield url


def level(path: str, told: Any) -> None:
    """Take out of the stock one's answer what nobody may count on."""
    if path == "/directory/stats":
        told["blend"]["table_size"] = 0  # room that is made before there is need
    elif path.startswith("/directory/keys"):
        for each in told["keys"]:
            each["placements"].sort(key=lambda at: (at["instance_id"], at["tier"]))


async def test_both_answer_alike(
    stock_url: str,
    our_url: str,
    client: aiohttp.ClientSession,  # noqa: F811
) -> None:
    for method, path, body in CALLS:
        answers: list[tuple[int, Any]] = []
        for url in (stock_url, our_url):
            async with client.request(method, url + path, json=body) as response:
                text = await response.text()
                answers.append((response.status, await response.json() if text else None))
        (status, expected), (ours, answer) = answers
        assert ours == status, (method, path, answer)
        if status < 400:
            level(path, expected)
            assert answer == expected, (method, path)
        else:
            assert list(answer) == list(expected or ()), (method, path)


async def test_both_have_servers_delete_the_same_keys(
    stock_url: str,
    our_url: str,
    ours: Lmcache,
    client: aiohttp.ClientSession,  # noqa: F811
    eventually: Wait,  # noqa: F811
) -> None:
    """What a client asks to be deleted, and what is evicted by quota."""
    keys = [key(number, salt="evicted") for number in range(10)]
    asked = {
        "model_name": MODEL,
        "world_size": 1,
        "token_ids": list(range(3 * CHUNK)),
        "cache_salt": "evicted",
    }
    told: dict[str, Any] = {"instance_id": "evicting", "tier": "l2"}
    batches = [batch(1, keys=keys, **told), batch(2, "access", keys=keys[3:5], **told)]
    async with standing_in(StandIn()) as by_stock, standing_in(StandIn()) as by_ours:
        for url, server in ((stock_url, by_stock), (our_url, by_ours)):
            port = int(server.url.rpartition(":")[2])
            member = {"instance_id": "evicting", "ip": "127.0.0.1", "http_port": port}
            for method, path, body in (
                ("POST", "/instances", member),
                ("POST", "/events", {"batches": msgspec.to_builtins(batches)}),
                ("POST", "/cache/pins", asked | {"token_ids": list(range(CHUNK))}),
                ("POST", "/cache/delete", asked | {"instance_id": "evicting"}),
                ("PUT", "/quota/evicted", {"limit_gb": 10_000 / 2**30}),
            ):
                async with client.request(method, url + path, json=body) as response:
                    assert response.status == 200, (path, await response.text())
        await ours._eviction.sweep()
        await eventually(lambda: len(by_stock.deleted) >= 2)
        assert by_ours.deleted[0] == by_stock.deleted[0]
        assert by_ours.deleted[1]["keys"] == by_stock.deleted[1]["keys"]
        assert by_ours.deleted[1]["keys"] == [each.encoded() for each in keys[1:3]]
        async with client.delete(f"{stock_url}/instances/evicting"):
            pass


async def test_the_stock_one_is_asked_where_a_fleet_has_it(
    stock_url: str,
    fleet: Fleet,  # noqa: F811
    client: aiohttp.ClientSession,  # noqa: F811
) -> None:
    async with standing_in(StandIn()) as server:
        port = int(server.url.rpartition(":")[2])
        member = {"instance_id": "mp0", "ip": "127.0.0.1", "http_port": port}
        await client.post(f"{stock_url}/instances", json=member)
        for each in transcript():
            if each["path"] == "/events":
                await client.post(f"{stock_url}/events", json=each["body"])
        root: dict[str, object] = {"id": "m", "object": "model", "root": MODEL}
        fleet.one.entries = fleet.two.entries = [root]
        running = await fleet.router(
            policy="ttft",
            replicas=(
                ReplicaConfig(url=fleet.two.url, instance_id="two"),
                ReplicaConfig(url=fleet.one.url, instance_id="one", lmcache=server.url),
            ),
            controller=ControllerConfig(port=0, monitor_port=0),
            lmcache_coordinator=stock_url,
        )
        asked = {"model": "m", "prompt": transcript_tokens(), "max_tokens": 1}
        async with client.post(f"{running.url}/v1/completions", json=asked) as response:
            assert response.headers["x-warmroute-replica"] == "one"
            assert response.headers["x-warmroute-matched-cpu"] == "512"
