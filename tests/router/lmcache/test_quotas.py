"""Quotas of L2: set as LMCache's clients set them, kept by having servers delete what is over."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import pytest

from router.controller.controller import Controller
from router.lmcache.lmcache import Lmcache
from router.lmcache.wire import EncodedKey, ObjectKey
from tests.router.agent_server import serving
from tests.router.lmcache.stand_in import StandIn, standing_in
from tests.router.lmcache.test_api import ASKED, Caller
from tests.router.lmcache.told import CHUNK, batch, key, make_fleet, register

KEYS = [key(number) for number in range(10)]
SALTED = [key(number, salt="tenant") for number in range(10)]
KEY_GB = 1000 / 2**30
"""What a key of `batch` takes."""


@dataclass
class Rig:
    """A coordinator with two servers, which have told of twenty keys on their disk."""

    lmcache: Lmcache
    caller: Caller
    servers: tuple[StandIn, StandIn]

    async def set(self, path: str, **limit: Any) -> None:
        assert (await self.caller.call("PUT", f"/quota/{path}", limit))[0] == 200

    async def evicted(self) -> list[list[ObjectKey]]:
        """Return what each server is told to delete now."""
        for each in self.servers:
            each.deleted.clear()
        await self.lmcache._eviction.sweep()
        return [
            [
                msgspec.convert(one, EncodedKey).key()
                for body in each.deleted
                for one in body["keys"]
            ]
            for each in self.servers
        ]


@pytest.fixture
async def rig(client: aiohttp.ClientSession) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        servers = StandIn("mp0"), StandIn("mp1")
        lmcache = Lmcache(make_fleet(), client)
        for each in servers:
            await stack.enter_async_context(standing_in(each))
            port = int(each.url.rpartition(":")[2])
            register(lmcache.coordinator, each.instance_id, "127.0.0.1", port)
        lmcache.coordinator.apply([batch(1, tier="l2", keys=KEYS + SALTED)])
        controller = Controller(list, client, limit_bytes=1 << 20, beside=lmcache.routes())
        url = await stack.enter_async_context(serving(controller.api()))
        yield Rig(lmcache, Caller(url, client), servers)


async def test_of_a_salt_at_its_quota_the_keys_used_first_go(rig: Rig) -> None:
    assert await rig.evicted() == [[], []], "as long as no quota is set"
    await rig.set("tenant", limit_gb=10.5 * KEY_GB)
    assert await rig.evicted() == [[], []], "while it is not reached"
    await rig.set("tenant", limit_gb=9 * KEY_GB)
    rig.lmcache.coordinator.apply([batch(2, "access", "l2", keys=SALTED[:1])])
    assert await rig.evicted() == [SALTED[1:3], []]
    assert rig.servers[0].deleted[0] | {"keys": []} == {
        "keys": [],
        "tier": "l2",
        "adapter": "fs_native",
    }
    assert rig.lmcache.counts["evicted"] == 2
    assert await rig.evicted() == [[], []]
    status, told = await rig.caller.call("GET", "/quota/tenant")
    assert (status, told["usage_gb"]) == (200, pytest.approx(8 * KEY_GB))


async def test_pinned_chunks_stay_in_all_their_groups(rig: Rig) -> None:
    group = SALTED[0]._replace(object_group_id=2)
    rig.lmcache.coordinator.apply([batch(2, tier="l2", keys=[group])])
    pinned = ASKED | {"cache_salt": "tenant", "token_ids": list(range(2 * CHUNK))}
    assert (await rig.caller.call("POST", "/cache/pins", pinned))[1]["affected"] == 2
    await rig.set("tenant", limit_gb=0)
    assert await rig.evicted() == [SALTED[2:], []], "a quota of nothing takes all else"


async def test_the_default_quota_is_for_salts_without_one(rig: Rig) -> None:
    await rig.set("tenant", limit_gb=100)
    await rig.set("config", default_limit_gb=0)
    assert await rig.evicted() == [KEYS, []]
    await rig.caller.call("DELETE", "/quota/tenant")
    assert await rig.evicted() == [SALTED, []]
    rig.lmcache.coordinator.directory.check()
    assert len(rig.lmcache) == 0


async def test_another_server_deletes_from_a_shared_backend_when_one_has_ended(rig: Rig) -> None:
    shared: dict[str, Any] = {"backend": "s3", "shared": True, "tier": "l2"}
    one = key(0, salt="other")
    rig.lmcache.coordinator.apply([batch(2, keys=[one], **shared)])
    rig.lmcache.coordinator.deregister("mp0")
    await rig.set("other", limit_gb=0)
    await rig.set("tenant", limit_gb=0)
    assert await rig.evicted() == [[], [one]], "of what mp0 alone reached nothing"


async def test_a_server_that_refuses_or_fails_is_asked_again(rig: Rig) -> None:
    rig.servers[0].refusal = 503
    await rig.set("tenant", limit_gb=0)
    assert await rig.evicted() == [[], []]
    assert rig.lmcache.counts["eviction_failed"] == 1
    rig.servers[0].refusal, rig.servers[0].error = None, "the disk is read-only"
    assert await rig.evicted() == [SALTED, []]
    assert rig.lmcache.counts["eviction_failed"] == 2
    rig.servers[0].error = ""
    assert await rig.evicted() == [SALTED, []]
    assert (rig.lmcache.counts["eviction_failed"], rig.lmcache.counts["evicted"]) == (2, 10)


async def test_a_clients_deletion_is_passed_on_but_for_pinned_keys(rig: Rig) -> None:
    asked = ASKED | {"instance_id": "mp0"}
    path, server = "/cache/delete", rig.servers[0]
    first = ASKED | {"token_ids": list(range(CHUNK))}
    await rig.caller.call("POST", "/cache/pins", first)
    group = KEYS[1]._replace(object_group_id=2)
    rig.lmcache.coordinator.apply([batch(2, keys=[group])])
    told = {"instance_id": "mp0", "requested": 2, "affected": 2, "skipped": 1, "status": "deleted"}
    assert await rig.caller.call("POST", path, asked) == (200, told)
    sent = {"keys": [KEYS[1].encoded(), group.encoded()], "tier": "all", "force": False}
    assert server.deleted == [sent]
    _, answer = await rig.caller.call("POST", path, asked | {"tier": "l1"})
    assert (answer["affected"], answer["skipped"]) == (3, 0), "pins are L2's"
    _, answer = await rig.caller.call("POST", path, asked | {"force": True})
    assert (answer["affected"], answer["skipped"]) == (3, 0)
    assert (await rig.caller.call("GET", "/cache/pins"))[1]["total"] == 0
    server.refusal = 503
    assert (await rig.caller.call("POST", path, asked))[0] == 502
