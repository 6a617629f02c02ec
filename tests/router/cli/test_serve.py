"""`warmroute serve` as a process: it says where it is, drains, and ends."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.router.cli.helpers import serving
from warmroute_common.admin_token import admin_token_headers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_told_to_stop(number: signal.Signals) -> None:
    with serving("--port", "0") as (process, url):
        own = urllib.request.Request(f"{url}/metrics", headers=admin_token_headers(url))
        with urllib.request.urlopen(own) as response:
            assert response.status == 200
        process.send_signal(number)
        assert process.stderr is not None
        rest = process.stderr.read()
        assert process.wait() == 0
    assert not admin_token_headers(url)
    assert "stopping" in rest
    assert "Traceback" not in rest


def test_a_second_signal_does_not_wait() -> None:
    """A request that never ends would hold the first signal up for drain_s."""
    with (
        socket.create_server(("127.0.0.1", 0)) as deaf,
        serving("--replica", f"http://127.0.0.1:{deaf.getsockname()[1]}", "--port", "0") as (
            process,
            url,
        ),
    ):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
            )
            with urllib.request.urlopen(f"{url}/ui") as response:
                assert response.status == 200
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            for line in process.stderr:
                if "stopping" in line:
                    break
            process.send_signal(signal.SIGTERM)
            assert process.wait() == -signal.SIGTERM


@pytest.fixture
def with_controller(tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments for a router with a controller on the ports given."""

    def arguments(**ports: int) -> list[str]:
        path = tmp_path / "router.yaml"
        replica = {"url": "http://127.0.0.1:1", "instance_id": "one", "agent_url": "http://a:1"}
        settings = {"port": 0, "replicas": [replica], "controller": ports}
        path.write_text(json.dumps(settings))  # JSON is YAML
        return ["--config", str(path)]

    return arguments


def test_the_controller_runs_beside_the_proxy(with_controller: Callable[..., list[str]]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "router", "serve", *with_controller(port=0, monitor_port=0)],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "OPENAI_BASE_URL=" in line:
                    break
            (said,) = [each for each in lines if "controller's API is at" in each]
            api, monitor = re.findall(r"http://[\d.:]+", said)
            with urllib.request.urlopen(f"{api}/instances") as response:
                (instance,) = json.load(response)["instances"]
            assert (instance["instance_id"], instance["agent_url"]) == ("one", "http://a:1")
            with pytest.raises(urllib.error.HTTPError, match="400"):
                urllib.request.urlopen(f"{monitor}/register", data=b"{}")
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            assert process.wait() == 0
        finally:
            process.kill()
    assert "Traceback" not in rest


@pytest.mark.parametrize("key", ["port", "monitor_port"])
def test_a_controllers_port_in_use_is_one_line(
    with_controller: Callable[..., list[str]], key: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"port": 0, "monitor_port": 0, key: port}
        done = subprocess.run(
            [sys.executable, "-m", "router", "serve", *with_controller(**ports)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    said = f"router.yaml: controller.{key}: 127.0.0.1:{port} is already in use; stop the program"
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "router", "serve", "-r", "http://127.0.0.1:1", "--port", port],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    problem = f"--port: 127.0.0.1:{port} is already in use"
    fix = "stop the program that uses it, or choose another port"
    assert f"{problem}; {fix}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_router_that_everyone_may_use_says_so() -> None:
    with serving("--port", "0", "--host", "0.0.0.0") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "every client that reaches http://0.0.0.0" in process.stderr.read()


def test_it_reads_its_configuration_again_on_hangup(tmp_path: Path) -> None:
    """What the command line adds stays: here a replica."""
    path = tmp_path / "router.yaml"
    path.write_text("replicas: [{url: 'http://127.0.0.1:2'}]\nport: 0\n")

    def replicas(url: str) -> set[str]:
        try:
            asked = urllib.request.Request(f"{url}/health", headers=admin_token_headers(url))
            with urllib.request.urlopen(asked) as response:
                told = json.load(response)
        except urllib.error.HTTPError as error:  # no replica is up
            told = json.load(error)
        return {each["url"] for each in told["replicas"].values()}

    with serving("--config", str(path)) as (process, url):
        assert replicas(url) == {"http://127.0.0.1:1", "http://127.0.0.1:2"}
        assert process.stderr is not None
        path.write_text("replicas: [{url: 'http://127.0.0.1:3'}]\nport: 0\nretries: 9\n")
        process.send_signal(signal.SIGHUP)
        said = ""
        for said in process.stderr:
            if "127.0.0.1:2 has left the fleet" in said:
                break
        assert replicas(url) == {"http://127.0.0.1:1", "http://127.0.0.1:3"}
        path.write_text("nonsense: 1\n")
        process.send_signal(signal.SIGHUP)
        for said in process.stderr:
            if "configuration not reloaded" in said:
                break
        assert f"{path}: nonsense: unknown key" in said
        process.terminate()
        assert "Traceback" not in process.stderr.read()


def test_it_opens_as_many_files_as_it_may_and_says_if_that_is_few() -> None:
    few = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (200, 300)); import runpy, sys; "
    run = "sys.argv[1:] = ['serve', '--replica', 'http://127.0.0.1:1', '--port', '0']; "
    with subprocess.Popen(
        [sys.executable, "-c", f"{few}{run}runpy.run_module('router', run_name='__main__')"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "OPENAI_BASE_URL=" in line:
                break
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        process.terminate()
        process.stderr.read()
    (said,) = [each for each in lines if "may open" in each]
    assert "may open only 300 files" in said
    assert re.search(r"Max open files +300 +300 ", limits)


_TELLS_OBJECTS = """
import atexit, gc, sys
from router.cli.commands import main

def tell():
    counts = len(gc.get_objects()), gc.get_freeze_count()
    print(*counts, sys.getswitchinterval(), file=sys.stderr)

atexit.register(tell)
main()
"""


def test_neither_garbage_collection_nor_threads_hold_requests_up() -> None:
    argv = [sys.executable, "-c", _TELLS_OBJECTS, "serve", "--replica", "http://127.0.0.1:1"]
    with subprocess.Popen([*argv, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "OPENAI_BASE_URL=" in line:
                break
        process.send_signal(signal.SIGTERM)
        collected, kept, switch_s = map(float, process.stderr.read().splitlines()[-1].split())
    assert collected < kept / 10, "a full collection halts all requests"
    assert switch_s <= 0.001, "each turn of the loop waits for as long while metrics are rendered"


def test_a_client_writes_no_lines_into_the_log() -> None:
    forged = "x\n2026-01-01 00:00:00,000 ERROR   warmroute fake\x1b[2J\x9b\u2028"
    body = json.dumps({"model": forged, "messages": [{"role": "user", "content": "x"}]}).encode()
    with serving("--port", "0") as (process, url):
        for path, headers in (
            # As UTF-8: a terminal takes U+009B for the beginning of a command.
            ("/v1/chat/completions", {"X-Request-Id": "a\xc2\x9b2J\xe2\x80\xa8b"}),
            ("/v1/rerank", {"traceparent": "\x9b"}),
            ("/replicas/%0a2026%1b/drain", {}),
            ("/v1/%0a2026%1b%c2%9b", {}),
            ("/nothing%0d%0a2026", {"Authorization": "Bearer \x9b"}),
        ):
            request = urllib.request.Request(url + path, data=body, headers=headers)
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(request)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        lines = process.stderr.read().removesuffix("\n").split("\n")
    assert any("/v1/chat/completions" in each for each in lines)
    for each in lines:
        assert each.isprintable() and re.match(r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ +warmroute", each)
        assert not each.startswith("2026-01-01 00:00:00,000")


def test_the_log_can_be_json(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text("log_format: json\nport: 0\nreplicas: [{url: http://127.0.0.1:2}]\n")
    with serving("--config", str(path)) as (process, url):
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(url + "/metrics")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        lines = [json.loads(each) for each in process.stderr.read().splitlines()]
    assert lines and all(each["time"].endswith("Z") for each in lines)
    assert any(each["logger"] == "warmroute.requests" for each in lines)


_FREEING = """
import threading
from router.cli.serve import return_large_memory

def resident_kib():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(each.split()[1]) for each in lines if each.startswith("VmRSS"))

def work():
    for _ in range(2):
        bytes(16 << 20)  # once freed, the C library would keep blocks of this size
    body = bytearray(b"x" * (8 << 20))
    kept.append(bytes(200_000))
    del body

return_large_memory()
kept, before = [], resident_kib()
for _ in range(4):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
print(resident_kib() - before)
"""


def test_freed_bodies_are_returned_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FREEING], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 4 << 10, "KiB; 16 MiB or more if they are kept"
