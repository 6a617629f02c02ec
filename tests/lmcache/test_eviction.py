"""A real LMCache server, without a vLLM, whose disk is kept within a quota by the router."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from bench.lmcache.environment import is_installed, python
from bench.lmcache.replica import LmcacheReplica
from router.controller.controller import Controller
from router.launch.processes import ProcessGroup
from router.lmcache.lmcache import Lmcache
from router.lmcache.wire import ObjectKey
from tests.router.agent_server import serving
from tests.router.conftest import (
    Wait,
    client,  # noqa: F401  (a fixture)
    eventually,  # noqa: F401  (a fixture)
)
from tests.router.lmcache.told import batch, key, make_fleet

pytestmark = [pytest.mark.vllm, pytest.mark.lmcache, pytest.mark.timeout(300)]


def file_name(one: ObjectKey) -> str:
    """Return the file in which LMCache 0.5.6 keeps a key (its ``fs_l2_adapter``)."""
    model = one.model_name.replace("/", "-SEP-")
    return f"{model}@{one.kv_rank:#010x}@0@{one.chunk_hash.hex()}@{one.cache_salt}.data"


async def test_a_real_server_deletes_what_is_over_quota(
    tmp_path: Path,
    client: aiohttp.ClientSession,  # noqa: F811
    eventually: Wait,  # noqa: F811
) -> None:
    if not is_installed():
        pytest.skip("LMCache's environment is not there: make test-lmcache installs it")
    lmcache = Lmcache(make_fleet(), client)
    controller = Controller(list, client, limit_bytes=1 << 20, beside=lmcache.routes())
    keys = [key(number, salt="tenant") for number in range(5)]
    async with serving(controller.api()) as url:
        with ProcessGroup() as group:
            server = LmcacheReplica(
                group,
                "mp0",
                python=python(),
                model="m",
                served_name="m",
                directory=tmp_path,
                coordinator_url=url,
                index=0,
                of=1,
                max_model_tokens=1,
            )
            await asyncio.to_thread(server.start_server)
            await eventually(lambda: bool(lmcache.listing()))
            for each in keys:
                (server.disk / file_name(each)).write_bytes(bytes(1000))
            lmcache.coordinator.directory.apply(batch(1, tier="l2", keys=keys))
            async with client.put(f"{url}/quota/tenant", json={"limit_gb": 4000 / 2**30}) as told:
                assert told.status == 200
            await lmcache._eviction.sweep()
            assert (len(lmcache), len(list(server.disk.glob("*.data")))) == (4, 4)
            assert not (server.disk / file_name(keys[0])).exists()
            assert lmcache.counts["evicted"] == 1
            await asyncio.to_thread(group.stop, "lmcache-mp0")
