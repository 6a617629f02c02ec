"""`warmroute serve` as a process: it says where it is, drains, and ends."""

import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def serving(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the router in front of nobody; give the process and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "router", "serve", "--replica", "http://127.0.0.1:1", *args],
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if "OPENAI_BASE_URL=" in line:
                    break
            url = line.split("OPENAI_BASE_URL=")[1].strip().removesuffix("/v1")
            yield process, url
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_told_to_stop(number: signal.Signals) -> None:
    with serving("--port", "0") as (process, url):
        with urllib.request.urlopen(f"{url}/metrics") as response:
            assert response.status == 200
        process.send_signal(number)
        assert process.stderr is not None
        rest = process.stderr.read()
        assert process.wait() == 0
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
            with urllib.request.urlopen(f"{url}/metrics") as response:
                assert response.status == 200
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            for line in process.stderr:
                if "stopping" in line:
                    break
            process.send_signal(signal.SIGTERM)
            assert process.wait() == -signal.SIGTERM


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
    assert f"--port: 127.0.0.1:{port} is in use; choose another" in done.stderr
    assert "Traceback" not in done.stderr
