"""Stock LMCache as vLLM holds it inside, with the router as its controller.

Its engine, backends and worker are real and in processes of their own (`inside`); the vLLMs
around them are scripted, since LMCache's connector runs on no CPU.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from bench.lmcache.environment import is_installed, python
from cacheengine.launch.vllm_launch import free_ports
from router.config.settings import (
    ControllerConfig,
    IndexConfig,
    LmcacheWorkersConfig,
    ReplicaConfig,
)
from tests.router.agent_server import serving
from tests.router.conftest import Fleet, Running, client, eventually, fleet  # noqa: F401

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(300)]

CHUNK = 16
PROMPT = list(range(6 * CHUNK + 3))
WHOLE = 6 * CHUNK
CPU, DISK = "LocalCPUBackend", "LocalDiskBackend"
HASHES = [("builtin", "0"), ("sha256_cbor", None), ("xxhash", "42")]


@dataclass(kw_only=True)
class Inside:
    """One LMCache that runs."""

    process: asyncio.subprocess.Process
    answers: asyncio.StreamReader

    async def do(self, *command: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return await self.answered()

    async def answered(self) -> Any:
        line = await self.answers.readline()
        assert line, "LMCache has ended: see its log"
        return json.loads(line)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@dataclass(kw_only=True)
class Stage:
    """A router, and the LMCaches that are to register there."""

    fleet: Fleet
    client: aiohttp.ClientSession
    directory: Path
    settings: LmcacheWorkersConfig
    seed: str | None = None
    running: Running | None = None
    url: str = ""
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    routers: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start_router(self) -> None:
        names = {"one": self.fleet.one.url, "two": self.fleet.two.url}
        self.running = await self.fleet.router(
            policy="ttft",
            replicas=tuple(
                ReplicaConfig(url=url, instance_id=name, hash_seed=self.seed)
                for name, url in names.items()
            ),
            controller=ControllerConfig(port=0, monitor_port=0),
            lmcache_workers=self.settings,
            # What was sent is not believed to be on the GPU: the test asks again.
            index=IndexConfig(history_ttl_s=0.001),
        )
        controller = self.running.parts.controller
        assert controller is not None
        self.url = await self.routers.enter_async_context(serving(controller.api()))

    async def stop_router(self) -> None:
        assert self.running is not None
        await self.routers.aclose()
        await self.running.runner.cleanup()

    async def inside(self, name: str, worker_id: int = 0, of: int = 1, **more: Any) -> Inside:
        return await self.stack.enter_async_context(self._inside(name, worker_id, of, more))

    @asynccontextmanager
    async def _inside(
        self, name: str, worker_id: int, of: int, more: dict[str, Any]
    ) -> AsyncIterator[Inside]:
        own = f"{name}-{worker_id}"
        disk = self.directory / f"disk-{own}"
        disk.mkdir(exist_ok=True)
        settings = {
            "chunk_size": CHUNK,
            "max_local_cpu_size": 0.05,
            "local_disk": str(disk),
            "max_local_disk_size": 0.1,
            "pre_caching_hash_algorithm": self.settings.pre_caching_hash_algorithm,
            "enable_controller": True,
            "lmcache_instance_id": name,
            "controller_pull_url": f"127.0.0.1:{self.settings.pull_port}",
            "controller_reply_url": f"127.0.0.1:{self.settings.reply_port}",
            "lmcache_worker_ports": free_ports(of),
            "lmcache_worker_heartbeat_time": 1,
            "lmcache_worker_heartbeat_delay_time": 1,
            "extra_config": {
                "full_sync_startup_delay_s": 0.1,
                "full_sync_status_poll_interval_s": 0.2,
                "full_sync_batch_size": 2,
            },
        }
        path = self.directory / f"{own}.yaml"
        path.write_text(yaml.safe_dump(settings | more))
        environment = {**os.environ, "LMCACHE_CONFIG_FILE": str(path)}
        environment |= {"LMCACHE_TRACK_USAGE": "false"}
        if self.seed is not None:
            environment["PYTHONHASHSEED"] = self.seed
        made = await self._start(own, [str(worker_id), str(of)], environment)
        try:
            assert await made.answered() == "ready"
            yield made
        finally:
            await made.kill()

    async def _start(self, own: str, ranks: list[str], environment: dict[str, str]) -> Inside:
        reading, writing = os.pipe()
        program = Path(__file__).with_name("inside.py")
        with (self.directory / f"{own}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(str(python()), str(program), str(writing), *ranks),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[writing],
                env=environment,
            )
        os.close(writing)
        answers = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(answers), os.fdopen(reading, "rb")
        )
        return Inside(process=process, answers=answers)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110  (the state has no event to wait for)
            await asyncio.sleep(0.02)

    def held(self, replica: str) -> dict[str, int]:
        assert self.running is not None
        known = self.running.parts.fleet
        counts = known.index.held(known.replicas[replica].slot)
        return {str(tier): n for tier, n in counts.items() if n and str(tier) != "gpu"}

    def counts(self, what: str) -> int:
        assert self.running is not None
        return self.running.parts.lmcache.counts[f"worker_{what}"]

    async def ask(self) -> aiohttp.ClientResponse:
        assert self.running is not None
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
        url = f"{self.running.url}/v1/completions"
        async with self.client.post(url, json=body) as response:
            await response.read()
            assert response.status == 200
            return response

    async def call(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self.client.post(f"{self.url}{path}", json=body) as response:
            return response.status, await response.json()


@pytest.fixture
async def stage(
    fleet: Fleet,  # noqa: F811
    client: aiohttp.ClientSession,  # noqa: F811
    tmp_path: Path,
) -> AsyncIterator[Stage]:
    if not is_installed():
        pytest.skip("LMCache's environment is not there: make test-lmcache installs it")
    pull, reply, heartbeat = free_ports(3)
    settings = LmcacheWorkersConfig(
        pull_port=pull,
        reply_port=reply,
        heartbeat_port=heartbeat,
        timeout_s=5.0,
        chunk_size=CHUNK,
        pre_caching_hash_algorithm="sha256_cbor",
    )
    made = Stage(fleet=fleet, client=client, directory=tmp_path, settings=settings)
    async with made.routers, made.stack:
        yield made


@pytest.mark.parametrize(("algorithm", "seed"), HASHES)
async def test_a_request_goes_where_a_stock_worker_says_that_its_prompt_is(
    stage: Stage, algorithm: Any, seed: str | None
) -> None:
    """And what its worker can do reaches it; after SIGKILL it is forgotten."""
    stage.seed = seed
    stage.settings = replace(stage.settings, pre_caching_hash_algorithm=algorithm)
    await stage.start_router()
    two = await stage.inside("two")
    await two.do("store", PROMPT)
    await stage.until(lambda: stage.held("two") == {"cpu": 6, "disk": 6})
    answer = await stage.ask()
    assert answer.headers["x-warmroute-replica"] == "two"
    assert answer.headers["x-warmroute-matched-cpu"] == str(WHOLE)
    status, found = await stage.call("/lookup", {"tokens": PROMPT})
    assert (status, found["layout_info"]) == (200, {"two": [CPU, WHOLE]})

    about = {"instance_id": "two", "location": CPU}
    status, cleared = await stage.call("/clear", about)
    assert (status, cleared["dropped_tokens"]) == (200, {CPU: WHOLE})
    await stage.until(lambda: stage.held("two") == {"disk": 6})
    answer = await stage.ask()
    assert answer.headers["x-warmroute-matched-disk"] == str(WHOLE)
    assert "x-warmroute-prefetch" not in answer.headers
    assert await two.do("hits", PROMPT) == WHOLE, "LMCache finds it on its disk by itself"

    await two.kill()
    await stage.until(lambda: stage.counts("silent") == 1)
    assert stage.held("two") == {}
    status, _ = await stage.call("/clear", about)
    assert status == 404


async def test_a_restarted_router_has_the_keys_of_cpu_ram_sent_anew(stage: Stage) -> None:
    await stage.start_router()
    two = await stage.inside("two")
    await two.do("store", PROMPT)
    await stage.until(lambda: stage.held("two") == {"cpu": 6, "disk": 6})
    await stage.stop_router()
    await stage.start_router()
    assert stage.held("two") == {}
    await stage.until(lambda: stage.counts("synced") == 1)
    assert stage.held("two") == {"cpu": 6}, "of its disk LMCache 0.5 sends no keys"
    assert (await stage.ask()).headers["x-warmroute-replica"] == "two"
    more = list(range(1000, 1000 + 2 * CHUNK))

    async def stores() -> bool:
        await two.do("store", more)
        await asyncio.sleep(0.2)
        return stage.held("two") == {"cpu": 8, "disk": 2}

    while not await stores():
        pass
    assert stage.counts("gaps") == 0


async def test_a_restarted_worker_is_believed_to_hold_nothing(stage: Stage) -> None:
    stage.settings = replace(stage.settings, timeout_s=600)
    await stage.start_router()
    two = await stage.inside("two")
    await two.do("store", PROMPT)
    await stage.until(lambda: stage.held("two") == {"cpu": 6, "disk": 6})
    await two.kill()
    two = await stage.inside("two")
    await stage.until(lambda: stage.held("two") == {})
    await two.do("store", PROMPT[: 2 * CHUNK])
    await stage.until(lambda: stage.held("two").get("cpu") == 2)
    assert stage.counts("silent") == 0


async def test_two_ranks_are_one_instance(stage: Stage) -> None:
    await stage.start_router()
    ports = free_ports(2)
    ranks = [await stage.inside("two", rank, 2, lmcache_worker_ports=ports) for rank in range(2)]
    for each in ranks:
        await each.do("store", PROMPT)
    await stage.until(lambda: stage.counts("applied") == 24)
    assert stage.held("two") == {"cpu": 6, "disk": 6}
    about = {"instance_id": "two", "location": CPU}
    status, cleared = await stage.call("/clear", about)
    assert (status, cleared["dropped_tokens"]) == (200, {CPU: WHOLE})
    await stage.until(lambda: stage.held("two") == {"disk": 6})


async def test_a_move_over_p2p_reaches_the_worker_that_holds_the_chunks(stage: Stage) -> None:
    """Its channel is LMCache's own for tests; the real one, NIXL, wants RDMA or GPUs."""
    await stage.start_router()
    p2p = {"enable_p2p": True, "p2p_host": "127.0.0.1", "transfer_channel": "mock_memory"}
    both = []
    for name in ("one", "two"):
        init, lookup = free_ports(2)
        ports = {"p2p_init_ports": [init], "p2p_lookup_ports": [lookup]}
        both.append(await stage.inside(name, 0, 1, **p2p, **ports))
    await both[1].do("store", PROMPT)
    await stage.until(lambda: stage.held("two").get("cpu") == 6)
    body = {"old_position": ["two", CPU], "new_position": ["one", CPU], "tokens": PROMPT}
    status, moved = await stage.call("/move", {**body, "copy": True})
    assert (status, moved["num_tokens"]) == (200, WHOLE)
    await stage.until(lambda: stage.held("one").get("cpu") == 6)
    assert stage.held("two").get("cpu") == 6
