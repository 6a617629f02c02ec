"""Replicas that answer anything: the router stays as it is."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cacheengine.launch.vllm_launch import free_ports
from tests.cacheengine.helpers import wait_until
from tests.fuzz.bodies import CHAT
from tests.fuzz.exchange import Port, request
from tests.fuzz.json_text import dump, nearly
from tests.fuzz.odd_replica import (
    ANSWERS,
    WELL,
    Odd,
    answer,
)
from tests.fuzz.servers import Server, running

JSON: Final = (b"Content-Type", b"application/json")
CHAT_PATH: Final = "/v1/chat/completions"


MODELS: Final = answer(b'{"object":"list","data":[{"id":"sim","object":"model"}]}')


@contextmanager
def routing(directory: Path, **replica: Any) -> Iterator[tuple[Server, Port]]:
    (port,) = free_ports(1)
    config = {
        "port": port,
        "replicas": [replica],
        "access": {"metrics": "open"},
        "timeouts": {"health_interval_s": 0.05, "first_byte_s": 2.0, "drain_s": 1.0},
    }
    path = directory / "router.yaml"
    path.write_text(json.dumps(config))
    argv = ("-m", "router", "serve", "--config", str(path))
    url = f"http://127.0.0.1:{port}/health"
    with running(directory / "router.log", *argv, url=url) as server:
        yield server, Port("127.0.0.1", port)


@pytest.fixture(scope="module")
def odd() -> Iterator[Odd]:
    made = Odd()
    made.says = {"/health": WELL, "/v1/models": MODELS}
    yield made
    made.close()


@pytest.fixture(scope="module")
def before_odd(odd: Odd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Port]]:
    with routing(tmp_path_factory.mktemp("odd"), url=odd.url, instance_id="odd") as made:
        yield made


@pytest.fixture(autouse=True)
def clean(before_odd: tuple[Server, Port]) -> Iterator[None]:
    yield
    server, port = before_odd
    server.check()

    def is_idle() -> bool:
        got = port.send(request("/metrics", method="GET"), method="GET")
        assert b"warmroute_in_flight" in got.body
        return not re.search(rb"^warmroute_in_flight\{[^}]*\} [1-9]", got.body, re.M)

    wait_until(is_idle)  # a request is over a moment after its answer


CHUNKED: Final = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@given(says=ANSWERS, body=st.sampled_from(CHAT))
@example(says=b"HTTP/1.1 200 OK\r\n" + b"X-Many: 1\r\n" * 100_000, body=CHAT[0])
@example(says=b"HTTP/1.1 200 OK\r\nX: " + b"a" * 10_000_000, body=CHAT[0])
@example(says=b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, body=CHAT[0])
@example(
    says=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;" + b"x" * 10**7, body=CHAT[0]
)
def test_answers_that_are_hardly_http(
    odd: Odd, before_odd: tuple[Server, Port], says: bytes, body: Any
) -> None:
    odd.says[CHAT_PATH] = says
    got = before_odd[1].send(request(CHAT_PATH, dump(body), headers=[JSON]))
    assert b"the router failed" not in got.body, got


PROBED: Final = ("/health", "/v1/models", "/version", "/kv_event_sources", "/metrics", "/tokenize")
_MODEL: Final = {"object": "list", "data": [{"id": "sim", "root": "/x", "max_model_len": 5}]}
_SOURCES: Final = {"0": {"enable_kv_cache_events": True, "endpoint": "tcp://*:5", "topic": "x"}}
METRICS: Final = (
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="5",engine="0"} 1.0\n'
    b"vllm:num_requests_running 1\n"
)
PROBES: Final = st.one_of(
    ANSWERS,
    nearly([_MODEL, _SOURCES, {"version": "0.32.0"}, {"count": 1, "tokens": [5]}]).map(answer),
    st.sampled_from([METRICS, METRICS.replace(b"5", b"x"), METRICS.replace(b'"', b"")]).map(answer),
)


@given(path=st.sampled_from(PROBED), says=PROBES)
def test_what_is_asked_of_a_replica_is_answered_oddly(
    odd: Odd, before_odd: tuple[Server, Port], path: str, says: bytes
) -> None:
    usual = dict(odd.says)
    odd.says[path] = says
    try:
        odd.asked.acquire(timeout=0.1)  # of some it is asked all the time, of others seldom
        got = before_odd[1].send(request("/v1/models", method="GET"), method="GET")
        assert b"the router failed" not in got.body, got
    finally:
        odd.says = usual
