"""`warmroute serve` is told to stop under load, as a real process: nothing is lost."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.cli.serve import leave_s
from router.config.settings import TimeoutsConfig
from tests.router.scripted import CHAT_ANSWER, Scripted, chat_events, json_answer, scripted, stream

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@dataclass(kw_only=True)
class Served:
    """A router that runs as a process, and what it has logged."""

    process: asyncio.subprocess.Process
    url: str
    log: list[str]
    reading: asyncio.Task[None] = field(repr=False)

    async def logs(self, words: str) -> None:
        while not any(words in line for line in self.log):  # noqa: ASYNC110  (a list has no event)
            await asyncio.sleep(0.01)

    async def knows_replicas(self) -> None:
        """Wait for its first probes: on a slow machine its port is open before they have ended."""
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{self.url}/health") as response:
                    told = await response.json()
                    if (response.status, told["first_probes"]) == (200, "done"):
                        return
                await asyncio.sleep(0.01)

    async def end(self) -> tuple[int, str]:
        """Wait for its end; return its exit code and its log."""
        code = await self.process.wait()
        await self.reading
        return code, "\n".join(self.log)


@asynccontextmanager
async def serving(directory: Path, *replicas: Scripted, **timeouts: float) -> AsyncIterator[Served]:
    path = directory / "router.yaml"
    urls = [{"url": each.url} for each in replicas]
    path.write_text(json.dumps({"port": 0, "replicas": urls, "timeouts": timeouts}))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "serve", "--config", str(path)),
        stderr=asyncio.subprocess.PIPE,
    )
    log: list[str] = []

    async def read() -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            log.append(line.decode().rstrip())

    reading = asyncio.create_task(read())
    served = Served(process=process, url="", log=log, reading=reading)
    try:
        await served.logs("OPENAI_BASE_URL=")
        (line,) = (each for each in log if "OPENAI_BASE_URL=" in each)
        served.url = line.split("OPENAI_BASE_URL=")[1].removesuffix("/v1")
        await served.knows_replicas()
        yield served
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await served.end()


@dataclass(kw_only=True)
class Load:
    """Clients that keep their connections, behind a balancer that looks at the router's health."""

    url: str
    answers: int = 0
    told_to_close: int = 0
    under_way: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the balancer has found that nothing more should be sent there."""

    async def client(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            while not self.left.is_set():
                async with session.post(f"{self.url}/v1/chat/completions", json=ASK) as response:
                    assert response.status == 200
                    assert (await response.json())["usage"]["prompt_tokens"] == 9
                    self.told_to_close += response.headers.get("Connection") == "close"
                self.answers += 1
                if self.answers >= 100:
                    self.under_way.set()

    async def balancer(self) -> str:
        """Look until it says 503; return what it says then."""
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{self.url}/health") as response:
                    if response.status == 503:
                        self.left.set()
                        return str((await response.json())["status"])
                await asyncio.sleep(0.02)


async def test_nothing_is_lost_when_it_is_told_to_stop(tmp_path: Path) -> None:
    async with (
        scripted() as replica,
        serving(tmp_path, replica, leave_s=8.0, drain_s=60.0) as served,
    ):
        end = asyncio.Event()
        replica.will(stream(*chat_events("a", "b"), gates=(None, end)), json_answer(CHAT_ANSWER))
        load = Load(url=served.url)
        async with (
            aiohttp.ClientSession() as session,
            asyncio.TaskGroup() as group,
            session.post(f"{served.url}/v1/chat/completions", json=ASK) as long,
        ):
            await long.content.readany()
            balancer = group.create_task(load.balancer())
            clients = [group.create_task(load.client()) for _ in range(20)]
            await load.under_way.wait()
            served.process.send_signal(signal.SIGTERM)
            assert await balancer == "draining"
            await asyncio.gather(*clients)
            assert load.told_to_close > 0
            # It listens no more, and the request that runs there still does.
            await served.logs("stopping")
            with pytest.raises(aiohttp.ClientConnectorError):
                while True:
                    async with aiohttp.ClientSession() as late:
                        await late.get(f"{served.url}/health")
            end.set()
            assert b"[DONE]" in await long.read()
        code, log = await served.end()
        assert code == 0
        assert "Traceback" not in log


async def test_ctrl_c_does_not_wait_for_load_balancers(tmp_path: Path) -> None:
    async with scripted() as replica, serving(tmp_path, replica, leave_s=3600) as served:
        served.process.send_signal(signal.SIGINT)
        code, log = await served.end()
        assert code == 0
        assert "leaving" not in log


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_at_once(tmp_path: Path, second: signal.Signals) -> None:
    async with scripted() as replica, serving(tmp_path, replica, leave_s=3600) as served:
        served.process.send_signal(signal.SIGTERM)
        await served.logs("leaving: /health answers 503; requests are accepted for 3600 s")
        served.process.send_signal(second)
        assert (await served.end())[0] == -second


@pytest.mark.parametrize(
    ("host", "given_s", "found_s"),
    [
        ("127.0.0.1", None, 0.0),
        ("::1", None, 0.0),
        ("0.0.0.0", None, 5.0),
        ("10.1.2.3", None, 5.0),
        ("0.0.0.0", 0.0, 0.0),
        ("127.0.0.1", 2.0, 2.0),
    ],
)
def test_only_what_other_machines_reach_leaves_slowly(
    host: str, given_s: float | None, found_s: float
) -> None:
    assert leave_s(TimeoutsConfig(leave_s=given_s), host) == found_s
