"""What the soak reads of a router, and how it takes its files away."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from bench.soak.fleet import Front, Replica
from bench.soak.harness import HOST
from router.launch.processes import ProcessGroup
from simulator.openai_server import serve_app

UP = 'warmroute_replica_up{{replica="sim1",state="{}"}} {}\n'
BREAKER = 'warmroute_breaker_closed{{replica="sim1",state="{}"}} {}\n'
SERVER = """
import socket, sys
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("ready", flush=True)
kept = []
while True:
    try:
        kept.append(listening.accept())
    except OSError:
        pass
"""


@pytest.fixture
def front(tmp_path: Path) -> Front:
    return Front(ProcessGroup(), tmp_path, by_envoy=False)


@pytest.fixture
def server(front: Front) -> Iterator[int]:
    """Run a server at the front's port that keeps each connection; yield its process id."""
    port = front.url.rpartition(":")[2]
    with subprocess.Popen([sys.executable, "-c", SERVER, port], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        front.pids["router"] = process.pid
        yield process.pid
        process.kill()


async def test_a_router_without_files_can_open_none_and_later_as_many_as_before(
    front: Front, server: int
) -> None:
    before = resource.prlimit(server, resource.RLIMIT_NOFILE)
    async with front.no_files():
        lower, most = resource.prlimit(server, resource.RLIMIT_NOFILE)
        opened = len([*Path(f"/proc/{server}/fd").iterdir()])
        assert (opened, most) == (lower, before[1])
    assert front.times_full == 1
    assert resource.prlimit(server, resource.RLIMIT_NOFILE) == before


@pytest.mark.parametrize(
    ("state", "breaker", "serves"),
    [
        ("up", "closed", True),
        ("up", "half-open", True),
        ("draining", "closed", True),
        ("down", "closed", False),
        ("up", "open", False),
    ],
)
async def test_a_replica_that_is_down_or_has_an_open_breaker_gets_no_requests(
    front: Front, tmp_path: Path, *, state: str, breaker: str, serves: bool
) -> None:
    text = UP.format(state, int(state == "up")) + BREAKER.format(breaker, int(breaker == "closed"))

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=text)

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    runner, _ = await serve_app(app, HOST, int(front.url.rpartition(":")[2]))
    replica = Replica(ProcessGroup(), tmp_path, 0, (1, 2, 3))
    assert await front.serves(replica) is serves
    await runner.cleanup()


def test_only_new_lines_of_the_log_call_a_replica_down(front: Front) -> None:
    old, new = "sim1 (http://h:1) is down: silent\n", "sim2 (http://h:2) is down: refused\n"
    front.log.write_text(old)
    assert front.called_down(len(old)) == []
    front.log.write_text(f"{old}sim2 (http://h:2) is up\n{new}")
    assert front.called_down(len(old)) == [new.strip()]
