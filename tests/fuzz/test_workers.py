"""The ports of LMCache's workers: odd messages, odd frames, and bytes that are not ZeroMQ."""

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest
import zmq
from hypothesis import example, given
from hypothesis import strategies as st

from router.lmcache.worker_protocol import (
    BatchedKVOperationMsg,
    BatchedP2PLookupMsg,
    DeRegisterMsg,
    FullSyncBatchMsg,
    FullSyncEndMsg,
    FullSyncStartMsg,
    FullSyncStatusMsg,
    HeartbeatMsg,
    KVOpEvent,
    RegisterMsg,
)
from tests.fuzz.bodies import nearly_bytes
from tests.fuzz.servers import Fleet
from tests.fuzz.streams import STREAMS

NAMES: Final = {"pull": zmq.PUSH, "reply": zmq.DEALER, "heartbeat": zmq.DEALER}
ANSWERS_MS: Final = 10_000
_WORKER: Final[dict[str, Any]] = {"instance_id": "odd", "worker_id": 0}
MESSAGES: Final = [
    RegisterMsg(**_WORKER, ip="127.0.0.1", port=9, peer_init_url="127.0.0.1:9"),
    HeartbeatMsg(**_WORKER, ip="127.0.0.1", port=9),
    DeRegisterMsg(**_WORKER),
    BatchedKVOperationMsg(
        **_WORKER,
        location="LocalCPUBackend",
        operations=[KVOpEvent(op_type="admit", key=2**63, seq_num=0)],
    ),
    FullSyncStartMsg(**_WORKER, location="LocalCPUBackend", sync_id="s", batch_count=1),
    FullSyncBatchMsg(
        **_WORKER, location="LocalCPUBackend", sync_id="s", batch_id=0, keys=[1, -1, 2**63]
    ),
    FullSyncEndMsg(**_WORKER, sync_id="s"),
    FullSyncStatusMsg(**_WORKER, sync_id="s"),
    BatchedP2PLookupMsg(**_WORKER, hashes=[1, -1]),
]
ENCODED: Final = [msgspec.msgpack.encode(each) for each in MESSAGES]


@pytest.fixture(scope="module")
def sockets(router: Fleet) -> Iterator[dict[str, Any]]:
    with zmq.Context() as context:
        made = {}
        for name, kind in NAMES.items():
            made[name] = context.socket(kind)
            made[name].setsockopt(zmq.LINGER, 0)
            made[name].setsockopt(zmq.RCVTIMEO, ANSWERS_MS)
            made[name].setsockopt(zmq.SNDTIMEO, ANSWERS_MS)
            made[name].connect(f"tcp://127.0.0.1:{router.ports[name].port}")
        yield made
        for each in made.values():
            each.close()


FRAMES: Final = st.one_of(
    st.sampled_from(ENCODED),
    st.sampled_from(ENCODED).flatmap(nearly_bytes),
    st.binary(max_size=20),
)


@pytest.mark.parametrize("name", NAMES)
@given(frames=st.lists(FRAMES, min_size=1, max_size=3), has_empty=st.booleans())
@example(frames=[b"\x81\xa4type" + b"\x91" * 100_000], has_empty=True)
@example(frames=[b"\xff" * 100], has_empty=False)
def test_messages_that_are_odd(
    router: Fleet, sockets: dict[str, Any], name: str, frames: list[bytes], has_empty: bool
) -> None:
    socket = sockets[name]
    socket.send_multipart([b"", *frames] if has_empty else frames)
    if name != "pull":
        *_, answer = socket.recv_multipart()
        msgspec.msgpack.decode(answer)
        assert b"the router failed" not in answer, answer


@pytest.mark.parametrize("name", NAMES)
@given(pieces=STREAMS)
def test_what_is_no_zeromq(router: Fleet, name: str, pieces: list[bytes]) -> None:
    router.ports[name].leave(b"".join(pieces))
