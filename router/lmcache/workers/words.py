"""The words of LMCache's workers and their controller (lmcache 0.5.6), as far as they are used.

Source: ``lmcache/v1/cache_controller/message.py``: msgpack maps whose ``type`` names the class.
Fields that are not known are passed over, so that a later version's additions break nothing.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

_Name = Annotated[str, Meta(min_length=1, max_length=1024)]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_WorkerId = Annotated[int, Meta(ge=0, le=4095)]
_Host = Annotated[str, Meta(pattern=r"\A[0-9A-Za-z._:-]{1,255}\Z")]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Any message."""


class FromWorker(_Message, frozen=True, kw_only=True):
    """Any message of a worker's; the worker's name is ``(instance_id, worker_id)``."""

    instance_id: Annotated[str, Meta(pattern=r"\A[!-~]([ -~]{0,254}[!-~])?\Z")]
    """Its ``lmcache_instance_id``: printable ASCII, since it stands in logs and answers."""
    worker_id: _WorkerId

    @property
    def name(self) -> tuple[str, int]:
        """The worker's name."""
        return (self.instance_id, self.worker_id)


class RegisterMsg(FromWorker, frozen=True, kw_only=True):
    """A worker has started; asked for on the reply port."""

    ip: _Host
    port: Annotated[int, Meta(ge=1, le=65535)]
    """Where it takes calls."""
    peer_init_url: _Name | None = None
    """``host:port`` where its peers reach it; None without ``enable_p2p``."""


class HeartbeatMsg(RegisterMsg, frozen=True, kw_only=True):
    """It lives; on the heartbeat port. It has all that a controller which has restarted needs."""


class DeRegisterMsg(FromWorker, frozen=True, kw_only=True):
    """It ends; pushed, like the next four."""


class KVOpEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk came or went."""

    op_type: Literal["admit", "evict"]
    key: int
    """The chunk's hash: 64 bits, signed or not."""
    seq_num: _Count
    """Counts from 0 up, in each location of each worker's process."""


class BatchedKVOperationMsg(FromWorker, frozen=True, kw_only=True):
    """Chunks came to a location, or went."""

    location: _Name
    operations: list[KVOpEvent]


class FullSyncBatchMsg(FromWorker, frozen=True, kw_only=True):
    """A part of all keys of a location."""

    location: _Name
    sync_id: _Name
    batch_id: _Count
    keys: list[int]


class FullSyncEndMsg(FromWorker, frozen=True, kw_only=True):
    """All parts were sent."""

    sync_id: _Name


class FullSyncStartMsg(FromWorker, frozen=True, kw_only=True):
    """All keys of a location will be pushed; asked for on the reply port, like the next two."""

    location: _Name
    sync_id: _Name
    batch_count: Annotated[int, Meta(ge=1, le=1_000_000)]


class FullSyncStatusMsg(FromWorker, frozen=True, kw_only=True):
    """Whether all parts have come; until they have, the worker stores nothing."""

    sync_id: _Name


class BatchedP2PLookupMsg(FromWorker, frozen=True, kw_only=True):
    """Which other instance holds the first of these chunks."""

    hashes: list[int]


Pushed = DeRegisterMsg | BatchedKVOperationMsg | FullSyncBatchMsg | FullSyncEndMsg
Asked = RegisterMsg | BatchedP2PLookupMsg | FullSyncStartMsg | FullSyncStatusMsg


class RegisterRetMsg(_Message, frozen=True, kw_only=True):
    """The answer to `RegisterMsg`."""

    extra_config: dict[str, str]
    """``heartbeat_url``: ``host:port``."""


class HeartbeatRetMsg(_Message, frozen=True, kw_only=True):
    """The answer to `HeartbeatMsg`."""

    commands: list[dict[str, Any]] = []


class BatchedP2PLookupRetMsg(_Message, frozen=True, kw_only=True):
    """The answer to `BatchedP2PLookupMsg`."""

    layout_info: list[tuple[str, str, int, str]]
    """Instance, location, how many of the chunks, ``peer_init_url``."""


class FullSyncStartRetMsg(_Message, frozen=True, kw_only=True):
    """The answer to `FullSyncStartMsg`."""

    sync_id: str
    accepted: bool
    error_msg: str | None = None


class FullSyncStatusRetMsg(_Message, frozen=True, kw_only=True):
    """The answer to `FullSyncStatusMsg`."""

    sync_id: str
    is_complete: bool
    global_progress: float
    can_exit_freeze: bool
    missing_batches: list[int] = []


class ErrorMsg(_Message, frozen=True, kw_only=True):
    """What is answered instead, by both sides."""

    error: str


class _ToWorker(_Message, frozen=True, kw_only=True):
    """Any call to a worker."""

    worker_event_id: str


class MoveWorkerMsg(_ToWorker, frozen=True, kw_only=True):
    """Send a prompt's chunks to a peer."""

    old_position: str
    new_position: tuple[str, str]
    """The peer's ``peer_init_url``, and a location there."""
    tokens: list[int]
    copy: bool


class PinWorkerMsg(_ToWorker, frozen=True, kw_only=True):
    """Keep a prompt's chunks."""

    location: str
    tokens: list[int]


class ClearWorkerMsg(_ToWorker, frozen=True, kw_only=True):
    """Drop all that is in a location."""

    location: str


class HealthWorkerMsg(_ToWorker, frozen=True, kw_only=True):
    """Whether the worker is well."""


class MoveWorkerRetMsg(_Message, frozen=True, kw_only=True):
    """The answer to `MoveWorkerMsg`."""

    num_tokens: _Count


class PinWorkerRetMsg(_Message, frozen=True, kw_only=True):
    """The answer to `PinWorkerMsg`."""

    num_tokens: _Count


class ClearWorkerRetMsg(_Message, frozen=True, kw_only=True):
    """The answer to `ClearWorkerMsg`."""

    num_tokens: _Count


class HealthWorkerRetMsg(_Message, frozen=True, kw_only=True):
    """The answer to `HealthWorkerMsg`: 0 if it is well."""

    error_code: int


ToWorker = MoveWorkerMsg | PinWorkerMsg | ClearWorkerMsg | HealthWorkerMsg
TokensMoved = MoveWorkerRetMsg | PinWorkerRetMsg | ClearWorkerRetMsg
Answer = TokensMoved | HealthWorkerRetMsg | ErrorMsg


def full_sync(reason: str) -> dict[str, Any]:
    """Return the command that has a worker send all keys of its CPU RAM."""
    return {"command_type": "full_sync", "reason": reason}


CPU: Final = "LocalCPUBackend"
DISK: Final = "LocalDiskBackend"
REMOTE: Final = "RemoteBackend"
