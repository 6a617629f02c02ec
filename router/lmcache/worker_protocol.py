"""Messages between LMCache's workers inside vLLM and their controller (lmcache 0.5.6).

Source: ``lmcache/v1/cache_controller/message.py``: msgpack maps whose ``type`` names the class.
Unknown fields are ignored, so that additions of later LMCache versions break nothing. The classes
have LMCache's names.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

_Name = Annotated[str, Meta(min_length=1, max_length=1024)]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_WorkerId = Annotated[int, Meta(ge=0, le=4095)]
_Host = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z._:-]{1,255}\Z")]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class FromWorker(_Message, frozen=True, kw_only=True):
    """Base of the messages that workers send."""

    instance_id: Annotated[str, Meta(pattern=r"\A[!-~]([ -~]{0,254}[!-~])?\Z")]
    """Its ``lmcache_instance_id``: printable ASCII, because logs and answers contain it."""
    worker_id: _WorkerId

    @property
    def name(self) -> tuple[str, int]:
        """What identifies the worker."""
        return (self.instance_id, self.worker_id)


class RegisterMsg(FromWorker, frozen=True, kw_only=True):
    """A worker has started; sent to the reply port."""

    ip: _Host
    port: Annotated[int, Meta(ge=1, le=65535)]
    """Where the worker takes calls."""
    peer_init_url: _Name | None = None
    """``host:port`` for its peers; None without ``enable_p2p``."""


class HeartbeatMsg(RegisterMsg, frozen=True, kw_only=True):
    """Sent to the heartbeat port. A restarted controller can register the worker from it."""


class DeRegisterMsg(FromWorker, frozen=True, kw_only=True):
    """The worker ends; pushed, like the next three messages."""


class KVOpEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk was stored or evicted."""

    op_type: Literal["admit", "evict"]
    key: int
    """The chunk's hash: 64 bits, signed or unsigned."""
    seq_num: _Count
    """Counts from 0 per location and worker process."""


class BatchedKVOperationMsg(FromWorker, frozen=True, kw_only=True):
    """Chunks were stored in a location, or evicted from it."""

    location: _Name
    operations: list[KVOpEvent]


class FullSyncBatchMsg(FromWorker, frozen=True, kw_only=True):
    """Some of the keys of a location."""

    location: _Name
    sync_id: _Name
    batch_id: _Count
    keys: list[int]


class FullSyncEndMsg(FromWorker, frozen=True, kw_only=True):
    """All batches of a full sync were sent."""

    sync_id: _Name


class FullSyncStartMsg(FromWorker, frozen=True, kw_only=True):
    """All keys of a location will be pushed; sent to the reply port, like the next two messages."""

    location: _Name
    sync_id: _Name
    batch_count: Annotated[int, Meta(ge=1, le=1_000_000)]


class FullSyncStatusMsg(FromWorker, frozen=True, kw_only=True):
    """Asks whether all batches have arrived; until then the worker stores nothing."""

    sync_id: _Name


class BatchedP2PLookupMsg(FromWorker, frozen=True, kw_only=True):
    """Asks which other instance holds the first of these chunks."""

    hashes: list[int]


Pushed = DeRegisterMsg | BatchedKVOperationMsg | FullSyncBatchMsg | FullSyncEndMsg
Requested = RegisterMsg | BatchedP2PLookupMsg | FullSyncStartMsg | FullSyncStatusMsg


class RegisterRetMsg(_Message, frozen=True, kw_only=True):
    """Answer to `RegisterMsg`."""

    extra_config: dict[str, str]
    """``heartbeat_url``: ``host:port``."""


class HeartbeatRetMsg(_Message, frozen=True, kw_only=True):
    """Answer to `HeartbeatMsg`."""

    commands: list[dict[str, Any]] = []


class BatchedP2PLookupRetMsg(_Message, frozen=True, kw_only=True):
    """Answer to `BatchedP2PLookupMsg`."""

    layout_info: list[tuple[str, str, int, str]]
    """Instance, location, number of chunks, ``peer_init_url``."""


class FullSyncStartRetMsg(_Message, frozen=True, kw_only=True):
    """Answer to `FullSyncStartMsg`."""

    sync_id: str
    accepted: bool
    error_msg: str | None = None


class FullSyncStatusRetMsg(_Message, frozen=True, kw_only=True):
    """Answer to `FullSyncStatusMsg`."""

    sync_id: str
    is_complete: bool
    global_progress: float
    can_exit_freeze: bool
    missing_batches: list[int] = []


class ErrorMsg(_Message, frozen=True, kw_only=True):
    """Answer of either side if a call fails."""

    error: str


class _ToWorker(_Message, frozen=True, kw_only=True):
    worker_event_id: str


class MoveWorkerMsg(_ToWorker, frozen=True, kw_only=True):
    """Send a prompt's chunks to a peer."""

    old_position: str
    new_position: tuple[str, str]
    """The peer's ``peer_init_url``, and a location there."""
    tokens: list[int]
    copy: bool


class ClearWorkerMsg(_ToWorker, frozen=True, kw_only=True):
    """Drop everything in a location."""

    location: str


class MoveWorkerRetMsg(_Message, frozen=True, kw_only=True):
    """Answer to `MoveWorkerMsg`."""

    num_tokens: _Count


class ClearWorkerRetMsg(_Message, frozen=True, kw_only=True):
    """Answer to `ClearWorkerMsg`."""

    num_tokens: _Count


ToWorker = MoveWorkerMsg | ClearWorkerMsg
FromCalledWorker = MoveWorkerRetMsg | ClearWorkerRetMsg | ErrorMsg


def full_sync(reason: str) -> dict[str, Any]:
    """Return the command that makes a worker send all keys of its CPU RAM."""
    return {"command_type": "full_sync", "reason": reason}


CPU: Final = "LocalCPUBackend"
DISK: Final = "LocalDiskBackend"
REMOTE: Final = "RemoteBackend"
