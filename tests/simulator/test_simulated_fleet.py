"""Two simulated replicas and a real router, as processes, as a person would start them."""

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq

from bench.replica.tiers import call, wait_until
from tests.simulator.fleet_process import Fleet, prompt, routing, simulating
from tests.stored_chunks import stored_chunks

SIZES = ["--gpu-tokens", "16384", "--cpu-tokens", "8192", "--disk-tokens", "200000"]
_ENDS_S = 30


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with (
        simulating("--replicas", "2", "--speed", "10", *SIZES) as (process, where),
        routing(where, tmp_path_factory.mktemp("router")) as router,
    ):
        yield Fleet(where, router)
        assert process.poll() is None


def test_a_prompt_is_routed_to_where_its_kv_is_in_each_tier(fleet: Fleet) -> None:
    ids = prompt(1)
    first = fleet.ask(ids)
    home = first.replica
    assert first.cached_tokens == 0
    wait_until(
        "the router knows what the GPU holds",
        lambda: fleet.matched(ids, "gpu") >= 4032,
    )
    assert fleet.explained(ids)["exact_tokens"]

    warm = fleet.ask(ids)
    assert (warm.replica, warm.cached_tokens) == (home, 4032)
    assert fleet.last_request(home)["cached_tokens"] == {"gpu": 4032, "cpu": 0, "disk": 0}

    call(f"{fleet.url(home)}/reset_prefix_cache", {})
    wait_until(
        "the router knows that only CPU RAM has it",
        lambda: fleet.matched(ids, "cpu") == 4096 and fleet.matched(ids, "gpu") == 0,
    )
    loaded = fleet.ask(ids)
    assert (loaded.replica, loaded.matched("cpu")) == (home, 4096)
    assert fleet.last_request(home)["cached_tokens"] == {"gpu": 0, "cpu": 4096, "disk": 0}

    call(f"{fleet.url(home)}/reset_prefix_cache", {})
    call(f"{fleet.url(home, 'agent_url')}/clear", {"tiers": ["cpu"]})
    wait_until(
        "the router knows that only the disk has it",
        lambda: fleet.matched(ids, "disk") == 4096 and fleet.matched(ids, "gpu") == 0,
    )
    prefetched = fleet.ask(ids)
    assert (prefetched.replica, prefetched.matched("disk")) == (home, 4096)
    cached = fleet.last_request(home)["cached_tokens"]
    assert cached["gpu"] == 0
    assert cached["cpu"] + cached["disk"] == 4096
    truth = fleet.truth(home)
    assert truth["promoted_bytes"] == 4096 * truth["bytes_per_token"]
    assert truth["wrong_chunks"] == 0
    # 20,000 tokens a second, ten times as fast as the clock; a busy machine only slows it.
    rate = truth["read_bytes_per_s"] / truth["bytes_per_token"]
    assert 0 < rate <= 1.1 * 200_000


def told(endpoint: str) -> list[dict[str, Any]]:
    """Return all KV events that a replica has published, as its replay endpoint gives them."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        socket.connect(endpoint)
        socket.send_multipart([b"", bytes(8)])
        events: list[dict[str, Any]] = []
        while payload := socket.recv_multipart()[-1]:
            events += msgspec.msgpack.decode(payload)[1]
        return events


def test_kv_events_tell_of_all_tiers(fleet: Fleet) -> None:
    """As vLLM's do with the engine inside, for routers that have nothing else to go by."""
    ids = prompt(6, 1024)
    fleet.ask(ids, base=fleet.url("sim2"))

    def tiers() -> set[tuple[str, str | None]]:
        # What the disk has taken is told when the replica next has something to do.
        fleet.ask([1, 2, 3], base=fleet.url("sim2"))
        events = told(fleet.url("sim2", "kv_replay"))
        stored = (each for each in events if each.get("token_ids", ())[:256] == ids[:256])
        return {(each["medium"], each.get("locality")) for each in stored}

    everywhere = {("GPU", None), ("CPU", "LOCAL"), ("STORAGE", "LOCAL")}
    wait_until("all tiers were told", lambda: tiers() == everywhere)


def test_the_router_finds_its_tokens_confirmed(fleet: Fleet) -> None:
    for text in ("Grüße, 世界!", "<|user|> hi"):
        body = {"model": "sim", "messages": [{"role": "user", "content": text}]}
        answer = call(f"{fleet.router}/explain", body)
        theirs = call(f"{fleet.url('sim1')}/tokenize", body)
        assert answer["exact_tokens"]
        assert answer["prompt_tokens"] == theirs["count"]


def test_kv_is_copied_from_one_replica_to_the_other(fleet: Fleet) -> None:
    ids = prompt(2)
    fleet.ask(ids, base=fleet.url("sim1"))
    info = call(f"{fleet.url('sim1', 'agent_url')}/info")
    agent = fleet.url("sim2", "agent_url")
    source = {
        "agent_url": fleet.url("sim1", "agent_url"),
        "transfer_address": f"127.0.0.1:{info['transfer_port']}",
    }
    moved = call(f"{agent}/move", {"source": source, "tokens": ids, "copy": True, "pin_s": 60.0})
    status = call(f"{agent}/moves/{moved['event_id']}?wait_s=30")
    assert (status["state"], status["arrived_chunks"], status["error"]) == ("done", 16, "")
    warm = fleet.ask(ids, base=fleet.url("sim2"))
    assert warm.cached_tokens == 4096
    assert fleet.truth("sim2")["wrong_chunks"] == 0
    assert fleet.truth("sim2")["received_bytes"] == 16 * info["chunk_bytes"]


def test_a_client_that_goes_away_frees_its_place(fleet: Fleet) -> None:
    before = fleet.truth("sim1")["cancelled"]
    split = urlsplit(fleet.url("sim1"))
    connection = http.client.HTTPConnection(split.netloc, timeout=60)
    body = {"prompt": prompt(3, 64), "max_tokens": 16_000, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    assert fleet.truth("sim1")["running"] == 1
    response.close()
    connection.close()
    wait_until("it was cancelled", lambda: fleet.truth("sim1")["cancelled"] == before + 1)
    truth = fleet.truth("sim1")
    assert (truth["running"], truth["held_tokens"]["gpu_in_use"]) == (0, 0)


def test_unknown_paths_are_refused_in_openais_format(fleet: Fleet) -> None:
    split = urlsplit(fleet.url("sim1"))
    connection = http.client.HTTPConnection(split.netloc, timeout=60)
    connection.request("POST", "/v1/responses", b"{}")
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    connection.close()
    assert (response.status, error["code"], error["type"]) == (404, 404, "NotFoundError")
    assert "does not serve POST /v1/responses" in error["message"]


def test_streams_tell_the_first_token_alone_and_end_with_the_usage(fleet: Fleet) -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    split = urlsplit(fleet.url("sim1"))
    connection = http.client.HTTPConnection(split.netloc, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    lines = connection.getresponse().read().decode().split("\n\n")
    connection.close()
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [each["choices"][0]["delta"]["content"] for each in chunks[1:-1]]
    assert len("".join(texts).split()) == 3
    assert len(texts[0].split()) == 1
    assert [each["choices"][0]["finish_reason"] for each in chunks[:-1]][-1] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": "x", "model": "other"}, 404, "does not exist"),
        ({"prompt": ["x", "y"]}, 400, "list of small integers"),
        ({"prompt": "baba", "max_tokens": 10**6}, 400, "maximum context length is 16384"),
        ({"prompt": "baba", "max_tokens": 0}, 400, "at least 1"),
        ({"prompt": "baba", "max_tokens": 2**62}, 400, "maximum context length"),
        ({"prompt": "baba", "model": [[]]}, 404, "does not exist"),
        ({"prompt": "baba", "n": 2}, 400, "only one answer"),
        ({}, 400, "'prompt' must be"),
    ],
)
def test_what_vllm_refuses_is_refused(
    fleet: Fleet, body: dict[str, Any], status: int, said: str
) -> None:
    with pytest.raises(OSError, match=said) as refused:
        call(f"{fleet.url('sim1')}/v1/completions", body)
    assert f": {status}: " in str(refused.value)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_leaves_nothing(number: signal.Signals) -> None:
    with simulating("--replicas", "1") as (process, where):
        directory = Path(where["tokenizer"]).parent
        assert directory.exists()
        process.send_signal(number)
        out, err = process.communicate(timeout=_ENDS_S)
        assert (process.returncode, out) == (0, "")
        assert "1 simulated replica is ready" in err and "warmroute serve --config" in err
        assert not directory.exists()


def test_disk_files_outlive_the_fleet(tmp_path: Path) -> None:
    options = ["--replicas", "1", "--disk-files", "--directory", str(tmp_path), "--speed", "10"]
    ids = prompt(5, 1024)
    for expected in (0, 1024):
        with simulating(*options) as (process, where):
            fleet = Fleet(where, "")
            assert fleet.ask(ids, base=fleet.url("sim1")).cached_tokens == expected
            wait_until("all is on disk", lambda: len(stored_chunks(tmp_path / "disk")) == 4)
            process.terminate()
            assert process.wait(_ENDS_S) == 0


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "simulator", "--replicas", "1", "--port", port],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
        )
    assert done.returncode == 2
    assert done.stderr.startswith("warmroute simulate: a port is already in use (")
    assert done.stderr.endswith("choose others with --port and --agent-port\n")


def test_what_cannot_be_simulated_is_said(tmp_path: Path) -> None:
    for options, said in (
        (["--chunk-tokens", "100"], "make chunk_tokens a multiple of block_tokens"),
        (["--cpu-tokens", "10"], "give the CPU tier room"),
        (["--speed", "0"], "speed"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "simulator", *options],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[3],
        )
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr
