"""Commands that ask a running router say what is wrong with its address."""

import http.server
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from router.cli.commands import main


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.output


@pytest.fixture
def other_server() -> Iterator[str]:
    """The URL of a server that is not a router."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("command", [["top", "--once"], ["explain", "hi"], ["drain", "a"]])
def test_an_address_without_http(command: list[str]) -> None:
    code, output = run(*command, "--router", "127.0.0.1:8080")
    assert code == 2
    assert "'127.0.0.1:8080' is not an HTTP URL; write http://127.0.0.1:8080" in output


@pytest.mark.parametrize("command", [["top", "--once"], ["explain", "hi"]])
def test_another_server(other_server: str, command: list[str]) -> None:
    code, output = run(*command, "--router", other_server)
    assert code == 1
    assert f"the server at {other_server} is not a Warmroute router" in output
    assert "give the router's URL with --router" in output


def test_no_server(dead_port: int) -> None:
    code, output = run("explain", "hi", "--router", f"http://127.0.0.1:{dead_port}")
    assert code == 1
    assert "start one with 'warmroute serve', or give another URL with --router" in output


@pytest.mark.parametrize("prompt", ["", "  "])
def test_an_empty_prompt(prompt: str) -> None:
    code, output = run("explain", prompt)
    assert code == 2
    assert "PROMPT is empty" in output


def test_an_authority_file_of_no_use(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    path.write_text("nothing")
    code, output = run("top", "--router", "https://127.0.0.1:1", "--ca-file", str(path))
    assert code == 2
    assert "is not a PEM file with certificates" in output
