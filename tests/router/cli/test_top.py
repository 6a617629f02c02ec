"""`warmroute top`: one frame, and what is said where there is none."""

import asyncio
import contextlib
import io
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from copy import deepcopy
from functools import partial
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from router.api.access import new_key, sha256_of
from router.cli.commands import main
from router.cli.top_frame import frame
from router.config.settings import AccessConfig
from router.fleet.decision import Reason
from router.ui.page import state
from router.ui.recent import Recent
from tests.router.conftest import Fleet
from tests.router.fleet.helpers import blocks, make_fleet, place, stored
from tests.router.prompt.prompts_given import tokens
from tests.router.scripted import chat_events, stream
from tests.router.ui.recording import ended, matched

ADMIN = new_key()
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def shown() -> dict[str, Any]:
    """The state of a fleet of two, one of them down, after two requests."""
    from router.index.prompt_keys import KvTier

    fleet, recent = make_fleet(2), Recent(0.0)
    fleet.down("r1")
    fleet.set_kv_capacity("r0", 12_800)
    stored(fleet, "r0", KvTier.GPU, blocks(tokens(6400)))
    fleet.start(place(fleet, tokens(64)), 0.0)
    half = matched(gpu=40, cpu=20)
    recent.observe(ended(20.0, replica_id="r0", matched_tokens=half, ttft_s=0.045, answer_tokens=9))
    spilled = {"home": "r0", "reason": Reason.SESSION_SPILL, "predicted_ttft_s": 1.5}
    recent.observe(ended(25.0, replica_id="r1", ttft_s=2.0, status=500, **spilled))
    return state(fleet, recent, waiting=3, now_s=30.0, wall_s=1e9)


def lines(state: dict[str, Any], *, width: int = 118, **more: Any) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(frame(state, "http://router", **more))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_frame_has_totals_fleet_times_and_requests(shown: dict[str, Any]) -> None:
    text = lines(shown)
    assert "1 of 2 replicas up, policy ttft" in text[0]
    assert re.search(
        r"30% matched +45 ms TTFT warm +2.01 s cold +1\d\d ms TPOT +1 in flight, 3 held",
        text[1],
    )
    assert re.match(r"r0 +up +0 +0 +1 +0 +━+ +50% ", text[4])
    assert re.match(r"r1 +down +0 +0 +0 +0 ", text[5])
    assert re.match(r"TTFT cold +[▁-█ ]+ +2\.\d+ s", text[7])
    assert re.match(r"TTFT warm +[▁-█ ]+ +4\d ms", text[8])
    newest, oldest = text[11:]
    assert re.search(r"r1 +session-spill from r0 +100 .* 0% +1.50 s +2.00 s +- +500", newest)
    assert re.search(r"r0 +longest-match +100 .* 60% +- +45 ms +119 ms +200", oldest)


def test_an_empty_fleet_is_shown_too() -> None:
    empty = state(make_fleet(1), Recent(0.0), waiting=0, now_s=0.0, wall_s=1e9)
    assert lines(empty)[-1] == "No request has ended yet."


def test_a_frame_fits_into_the_terminal(shown: dict[str, Any]) -> None:
    shown["requests"] = [dict(shown["requests"][0], number=n) for n in range(50)]
    assert len(lines(shown, lines=24)) <= 24
    assert len(lines(shown, lines=60)) > 50


def test_names_command_no_terminal(shown: dict[str, Any]) -> None:
    hostile = deepcopy(shown)
    hostile["replicas"][0]["id"] = "\x1b]0;owned\x07[bold]x"
    hostile["requests"][0]["replica"] = "\x1b[2Jx"
    text = "\n".join(lines(hostile))
    assert "\x1b" not in text and "\x07" not in text
    assert "[bold]x" in text, "and markup of rich is text"


@contextlib.asynccontextmanager
async def pseudo_terminal(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Run the command in a terminal of its own."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", *arguments),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": "30"},
        # What runs the tests in the background may have it ignored, which children inherit.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        os.close(ours)


async def read_until(terminal: int, text: bytes) -> None:
    seen = b""
    while text not in seen:
        seen += await asyncio.to_thread(os.read, terminal, 65536)


async def top(*arguments: str, **environment: str) -> Result:
    runner = CliRunner(env=environment)
    return await asyncio.to_thread(runner.invoke, main, ["top", "--once", *arguments])


async def test_it_watches_until_it_is_interrupted(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    router = await fleet.router()
    fleet.one.will(stream(*chat_events("a")))
    async with pseudo_terminal("top", "--router", router.url) as (process, terminal):
        await read_until(terminal, b"No request has ended yet.")
        body = {"model": "m", "messages": HELLO, "stream": True}
        async with client.post(f"{router.url}/v1/chat/completions", json=body) as response:
            await response.read()
        await read_until(terminal, b"round-robin")
        await router.runner.cleanup()
        await read_until(terminal, b"no router answers at")
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0


async def test_once_prints_one_frame(fleet: Fleet) -> None:
    router = await fleet.router()
    for url in (router.url, f"{router.url}/v1"):
        done = await top("--router", url)
        assert done.exit_code == 0
        assert "2 of 2 replicas up" in done.output


async def test_it_says_why_it_is_refused(fleet: Fleet) -> None:
    router = await fleet.router(access=AccessConfig(admin_sha256=(sha256_of(ADMIN),)))
    refused = await top("--router", router.url, "--admin-key", "wrong")
    assert refused.exit_code == 1
    assert "/ui/state asks for an admin key" in refused.output
    for arguments, environment in (
        ((), {}),
        (("--admin-key", ADMIN), {}),
        (("--key", ADMIN), {}),
        ((), {"WARMROUTE_ADMIN_KEY": ADMIN}),
    ):
        done = await top("--url", router.url, *arguments, **environment)
        assert (done.exit_code, "2 of 2 replicas up" in done.output) == (0, True)


async def test_it_says_that_there_is_no_router(dead_port: int) -> None:
    done = await top("--router", f"http://127.0.0.1:{dead_port}")
    assert done.exit_code == 1
    assert "no router answers at" in done.output and "warmroute serve" in done.output


async def test_it_says_that_another_server_is_no_router(fleet: Fleet) -> None:
    done = await top("--router", fleet.one.url)
    assert done.exit_code == 1
    assert "Traceback" not in done.output
    assert "is not a Warmroute router" in done.output
