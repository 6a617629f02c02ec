"""The ports of the controller, its monitor and LMCache's calls; an agent's port."""

import json
from collections.abc import Mapping
from typing import Any, Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fuzz.bodies import CHAT
from tests.fuzz.exchange import Got, Port, request
from tests.fuzz.json_text import HUGE, TEXT, nearly
from tests.fuzz.servers import Fleet
from tests.fuzz.streams import METHODS, SEGMENTS, STREAMS

JSON: Final = (b"Content-Type", b"application/json")
FEWER: Final = settings(max_examples=settings().max_examples // 4)
"""For each of many calls."""
TOKENS: Final = [*range(300)]

CONTROLLER: Final[dict[str, list[Any]]] = {
    "POST /lookup": [{"tokens": TOKENS, "cache_salt": "x"}],
    "POST /move": [
        {
            "old_position": ["sim1", "LocalCPUBackend"],
            "new_position": ["sim2", "LocalDiskBackend"],
            "tokens": TOKENS,
            "copy": True,
        }
    ],
    "POST /check_finish": [{"event_id": "Move1"}],
    "POST /pin": [{"instance_id": "sim1", "location": "LocalCPUBackend", "tokens": TOKENS}],
    "POST /unpin": [{"instance_id": "sim1", "location": "LocalDiskBackend", "tokens": TOKENS}],
    "POST /clear": [{"instance_id": "sim1", "locations": ["LocalCPUBackend"], "tokens": TOKENS}],
    "POST /health": [{"instance_id": "sim1"}],
    "GET /health": [{}],
    "GET /instances": [{}],
    "POST /register": [{}],
}
_REGISTRATION: Final = {
    "instance_id": "odd",
    "incarnation": "1",
    "agent_url": "http://127.0.0.1:9",
    "transfer_port": 5,
    "heartbeat_s": 1.0,
}
MONITOR: Final[dict[str, list[Any]]] = {
    "POST /register": [_REGISTRATION],
    "POST /heartbeat": [{"instance_id": "odd", "incarnation": "1"}],
    "POST /deregister": [{"instance_id": "odd", "incarnation": "1"}],
}
_KEY: Final = {
    "model_name": "m",
    "kv_rank": 0,
    "chunk_hash": "00ff",
    "object_group_id": 0,
    "cache_salt": "",
}
_PROMPT: Final = {"model_name": "m", "world_size": 1, "token_ids": TOKENS, "cache_salt": ""}
COORDINATOR: Final[dict[str, list[Any]]] = {
    "POST /instances": [
        {"instance_id": "odd", "ip": "127.0.0.1", "http_port": 9, "l1_capacity_bytes": 5}
    ],
    "PUT /instances/odd/heartbeat": [{}],
    "DELETE /instances/odd": [{}],
    "POST /events": [
        {
            "instance_id": "odd",
            "incarnation": "1",
            "sequence_number": 1,
            "events": [
                {"type": "stored", "key": _KEY, "tier": "l1", "token_ids": TOKENS},
                {"type": "evicted", "keys": [_KEY]},
            ],
        }
    ],
    "POST /directory/lookup": [{"keys": [_KEY]}, _PROMPT],
    "POST /directory/blend-lookup": [{"tokens_b64": "AAAAAA==", "model_name": "m"}],
    "GET /healthz": [{}],
    "POST /cache/prefetches": [{"instance_id": "odd", **_PROMPT}],
    "GET /cache/prefetches/odd/1": [{}],
}
AGENT: Final[dict[str, list[Any]]] = {
    "GET /health": [{}],
    "GET /info": [{}],
    "POST /lookup": [{"tokens": TOKENS, "cache_salt": "x", "tier": "cpu"}, {"keys": ["00" * 32]}],
    "GET /snapshot": [{}],
    "GET /events?after=0&wait_s=0&incarnation=x": [{}],
    "GET /metrics": [{}],
    "POST /prefetch": [{"keys": ["00" * 32], "wait_s": 0.0, "pin_s": 1.0}],
    "POST /pin": [{"tokens": TOKENS, "tier": "disk"}],
    "POST /unpin": [{"keys": ["00" * 32], "tier": "cpu"}],
    "POST /clear": [{"tokens": TOKENS, "tiers": ["cpu"]}],
    "POST /move": [
        {
            "source": {
                "agent_url": "http://127.0.0.1:9",
                "transfer_address": "127.0.0.1:9",
                "tier": "cpu",
            },
            "tokens": TOKENS,
            "copy": True,
            "stall_s": 0.2,
        }
    ],
    "GET /moves/1?wait_s=0": [{}],
}
PORTS: Final[Mapping[str, Mapping[str, list[Any]]]] = {
    "controller": CONTROLLER | COORDINATOR,
    "monitor": MONITOR,
    "agent": AGENT,
}


def port_of(router: Fleet, name: str) -> Port:
    return (
        Port.of(router.where["replicas"][0]["agent_url"]) if name == "agent" else router.ports[name]
    )


def check(got: Got) -> None:
    assert got.status is not None, "closed without an answer"
    assert got.status < 500 or got.status in (501, 502, 503, 504), got


@pytest.mark.parametrize(
    ("port", "call"), [(port, call) for port, calls in PORTS.items() for call in calls]
)
@FEWER
@given(data=st.data())
def test_calls_that_are_nearly_right(
    router: Fleet, port: str, call: str, data: st.DataObject
) -> None:
    method, _, path = call.partition(" ")
    body = data.draw(nearly(PORTS[port][call]))
    check(
        port_of(router, port).send(
            request(path, body, method=method, headers=[JSON]), method=method
        )
    )


@pytest.mark.parametrize("port", PORTS)
@given(data=st.data(), value=TEXT, body=st.binary(max_size=60))
def test_names_and_numbers_in_paths(
    router: Fleet, port: str, data: st.DataObject, value: str, body: bytes
) -> None:
    call = data.draw(st.sampled_from([*PORTS[port]]))
    method, _, path = call.partition(" ")
    given_path, _, query = path.partition("?")
    odd = "".join(f"%{byte:02x}" for byte in value.encode(errors="surrogatepass"))
    parts = given_path.split("/")
    parts[data.draw(st.integers(1, len(parts) - 1))] = odd or "-"
    names = [each.partition("=")[0] for each in query.split("&") if each]
    target = "/".join(parts) if data.draw(st.booleans()) else given_path
    target += "".join(f"{'&' if at else '?'}{name}={odd}" for at, name in enumerate(names))
    check(port_of(router, port).send(request(target, body, method=method), method=method))


@pytest.mark.parametrize("port", PORTS)
@given(
    method=st.sampled_from(METHODS),
    segments=st.lists(SEGMENTS, max_size=4),
    query=st.one_of(st.none(), st.binary(max_size=30)),
)
def test_paths(
    router: Fleet, port: str, method: str, segments: list[bytes], query: bytes | None
) -> None:
    target = b"/" + b"/".join(segments) + (b"" if query is None else b"?" + query)
    sent = request(target, b"{}", method=method)
    got = port_of(router, port).send(sent, method=method, closes=True)
    assert got.status != 500, got


@pytest.mark.parametrize("port", PORTS)
@given(pieces=STREAMS)
def test_what_is_hardly_http(router: Fleet, port: str, pieces: list[bytes]) -> None:
    answered = port_of(router, port).all_answers(b"".join(pieces))
    assert b" 500 " not in answered, answered[-2000:]


@pytest.mark.parametrize("port", PORTS)
@given(encoding=st.sampled_from([b"gzip", b"deflate", b"br", b"zstd", b"x"]), body=st.binary())
@example(encoding=b"gzip", body=b"{}")
@example(encoding=b"deflate", body=b"\x00")
def test_bodies_that_are_not_encoded_as_they_say(
    router: Fleet, port: str, encoding: bytes, body: bytes
) -> None:
    path = next(call for call in PORTS[port] if call.startswith("POST ")).partition(" ")[2]
    headers = [JSON, (b"Content-Encoding", encoding)]
    got = port_of(router, port).send(request(path, body, headers=headers), closes=True)
    assert got.status != 500, got


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize(
    "body",
    [
        b"[" * HUGE,
        b'{"tokens":[' + b"5," * (HUGE - 1) + b"5]}",
        b'{"keys":[' + b'"' + b"00" * 32 + b'",' * 10 + b'"x"]}',
        b'{"tokens":[' + b"9" * HUGE + b"]}",
        b'{"instance_id":"' + b"x" * HUGE + b'","event_id":"' + b"y" * HUGE + b'"}',
        json.dumps(CHAT[0]).encode(),
    ],
    ids=["nested", "tokens", "keys", "number", "names", "chat"],
)
def test_large_bodies(router: Fleet, port: str, body: bytes) -> None:
    for call in PORTS[port]:
        method, _, path = call.partition(" ")
        sent = request(path, body, method=method, headers=[JSON])
        check(port_of(router, port).send(sent, method=method))
