"""The whole of it: contenders as they are started, and one small run."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from bench.environments import mark
from bench.overhead.__main__ import main
from bench.overhead.cases import DEFAULT as CASES
from bench.overhead.contenders import (
    BARE_PROXY,
    DIRECT,
    OURS_FULL,
    OURS_TEXT,
    OURS_TOKENS,
    PACKAGES,
    PEERS,
    CannotRunError,
    Contender,
    Launch,
    PeersPython,
    Running,
    check_knows_tokens,
    contenders,
    start,
)
from router.config.loading import load_router_config
from router.launch.processes import ProcessGroup
from simulator.openai_prompts import make_tokenizer

REPLICAS = ("http://127.0.0.1:8001", "http://127.0.0.1:8002")
KNOWN = contenders(PeersPython(Path("python")))


def command(name: str, directory: Path) -> list[str]:
    launch = KNOWN[name].launch
    assert launch is not None
    return launch(REPLICAS, directory).command


def test_ours_is_configured_with_its_replicas_alone(tmp_path: Path) -> None:
    """Its defaults are what is measured."""
    config = load_router_config(command(OURS_TEXT, tmp_path)[-1])
    assert [each.url for each in config.replicas] == list(REPLICAS)
    assert config.tokenizer.path is None
    assert (config.policy, config.admission.enabled) == ("ttft", True)


@pytest.mark.parametrize("name", [BARE_PROXY, *PEERS])
def test_others_get_every_replica(name: str, tmp_path: Path) -> None:
    assert set(REPLICAS) <= set(command(name, tmp_path))


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_asks_no_proxy_for_its_replicas(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HTTP_PROXY", "https_proxy", "MY_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    launch = KNOWN[name].launch
    assert launch is not None
    environment = launch(REPLICAS, tmp_path).environment
    assert environment is not None
    assert {"HTTP_PROXY", "https_proxy"}.isdisjoint(environment)
    assert {"MY_PROXY", "PATH"} <= environment.keys()


def test_peers_that_cannot_be_installed_are_left_out_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CannotRunError, match="not installed"):
        PeersPython(None, file / "peers").path()


def test_an_environment_that_exists_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / mark(PACKAGES)).touch()
    assert PeersPython(None, tmp_path).path() == tmp_path / "bin" / "python"


def test_a_contender_that_dies_is_left_out_with_its_last_lines(tmp_path: Path) -> None:
    dies = [sys.executable, "-c", "print('no such option'); raise SystemExit(2)"]
    contender = Contender(
        name="broken",
        launch=lambda _replicas, _: Launch(command=dies, url="", is_ready=lambda: False),
    )
    with (
        ProcessGroup() as group,
        pytest.raises(CannotRunError, match=r"exit code 2.*no such option"),
    ):
        start(contender, group, REPLICAS, tmp_path)


def test_clients_of_direct_use_the_replicas(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        assert start(KNOWN[DIRECT], group, REPLICAS, tmp_path).urls == REPLICAS


@contextmanager
def explaining(answer: dict[str, Any]) -> Iterator[Running]:
    """A router that explains every prompt like this."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Running(urls=(f"http://127.0.0.1:{server.server_port}",), pid=None)
        finally:
            server.shutdown()
            thread.join()


def explained(exact: bool, matched: Sequence[int]) -> dict[str, Any]:
    candidates = [{"matched_tokens": {"gpu": each}} for each in matched]
    return {"exact_tokens": exact, "prompt_tokens": 100, "candidates": candidates}


def test_a_router_that_knows_what_it_was_sent_by_its_tokens_is_let_in() -> None:
    with explaining(explained(True, [0, 96])) as running:
        check_knows_tokens(running, b"{}")


@pytest.mark.parametrize("answer", [explained(True, [0, 16]), explained(False, [96, 0])])
def test_a_router_that_measured_would_be_by_text_is_not(answer: dict[str, Any]) -> None:
    with explaining(answer) as running, pytest.raises(CannotRunError, match="of 100 tokens"):
        check_knows_tokens(running, b"{}")


@pytest.mark.slow
def test_a_small_run_measures_everybody_and_nothing_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tokenizer(tmp_path / "tokenizer")
    out = tmp_path / "out" / "overhead.json"
    names = [DIRECT, BARE_PROXY, OURS_TEXT, OURS_TOKENS]
    cases = ["1k-slow", "1k-whole", "conversation-piece"]
    options = ["--tokenizer", str(tmp_path / "tokenizer"), "--json", str(out)]
    assert main(["--quick", "--contender", *names, "--case", *cases, *options]) == 0
    shown = capsys.readouterr().out
    assert "left out" not in shown
    assert all(name in shown for name in (*names, *cases))
    report = json.loads(out.read_text())
    assert report["left_out"] == {}
    assert [each["case"] for each in report["cases"]] == cases
    for case in report["cases"]:
        found = {each["contender"]: each for each in case["contenders"]}
        assert list(found) == names
        assert {each["requests"] for each in found.values()} == {case["requests"]}
        assert {each["errors"] for each in found.values()} == {0}
        assert found[DIRECT]["cpu_ms"] is None
        for name in names[1:]:
            assert found[name]["cpu_ms"]["median"] > 0
            memory = found[name]["stream_kib"]
            assert (memory is not None) == (case["case"] == "1k-slow")


@pytest.mark.slow
def test_a_full_router_refuses_every_request_without_a_placing(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "tokenizer")
    out = tmp_path / "overhead.json"
    options = ["--tokenizer", str(tmp_path / "tokenizer"), "--json", str(out)]
    names = [OURS_TEXT, OURS_FULL]
    assert main(["--quick", "--contender", *names, "--case", "1k-piece", *options]) == 0
    report = json.loads(out.read_text())
    assert report["left_out"] == {}
    [case] = report["cases"]
    answering, refusing = case["contenders"]
    assert (refusing["requests"], refusing["errors"]) == (case["requests"], 0)
    assert answering["place_ms"]["median"] > 0 and refusing["place_ms"] is None


def test_a_case_or_contender_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--case", "2k-whole"], ["--contender", "nginx"], ["--rounds", "0"]):
        with pytest.raises(SystemExit):
            main(wrong)
    told = capsys.readouterr().err
    assert all(name in told for name in (CASES[0], DIRECT, "0 is less than 1"))
