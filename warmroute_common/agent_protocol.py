"""What an agent and its callers say to each other over HTTP.

Requests and small answers are JSON. The two that carry every key of a replica
(`Snapshot`, `EventBatch`) are msgpack, with keys packed as consecutive 8-byte
big-endian integers (`keys.key64`), so that a million keys are 8 MB and need no
parsing. Keys in requests are whole digests in hex: they name bytes to move.

This module is shared with the router: standard library and msgspec only.
"""

import hashlib
import re
import sys
from array import array
from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

TierName = Literal["cpu", "disk", "remote"]
"""The tiers that an engine reports. The GPU's are in vLLM's own KV events."""


MoveState = Literal["running", "done", "failed"]
"""How a move stands."""


MAX_PINNED_SHARE: Final = 0.75
"""Share of a CPU pool that can be pinned at once, for chunks being promoted or loaded."""


_Port = Annotated[int, Meta(ge=1, le=65535)]

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what they are to be."""


class TierInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One tier's size and its measured speed (0.0 while nothing was measured)."""

    capacity_bytes: Annotated[int, Meta(ge=0)]
    used_bytes: Annotated[int, Meta(ge=0)]
    read_bytes_per_s: Annotated[float, Meta(ge=0)] = 0.0
    """Towards the CPU pool; for the cpu tier, towards the GPU."""
    read_bytes: Annotated[int, Meta(ge=0)] = 0
    """All bytes that this was measured on."""
    write_bytes_per_s: Annotated[float, Meta(ge=0)] = 0.0


class ReplicaIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What ``/info`` says of a replica and its engine, and how its keys are made."""

    instance_id: str
    model: str
    """vLLM's ``--model``: a path or a name."""
    hash_algorithm: str
    hash_seed: str
    block_tokens: int
    chunk_tokens: int
    chunk_bytes: Annotated[int, Meta(ge=1)]
    kv_events_port: _Port | None = None
    """Port of vLLM's ZMQ publisher on the replica's host, if events are on."""
    kv_replay_port: _Port | None = None
    transfer_port: _Port | None = None
    """Port on the replica's host where other replicas fetch chunks, if it has one."""


class ComputeRates(msgspec.Struct, frozen=True, kw_only=True):
    """What the replica's model computes, in seconds, measured on vLLM's scheduler steps."""

    step_s: Annotated[float, Meta(ge=0)]
    """A step, however little there is to compute."""
    prefill_token_s: Annotated[float, Meta(ge=0)]
    """A prompt token, with its share of the steps."""
    attended_token_s: Annotated[float, Meta(ge=0)]
    """A prompt token, for each token that it attends to."""
    decode_token_s: Annotated[float, Meta(ge=0)]
    """A prompt token, for each sequence that decodes at the same time."""
    steps: Annotated[int, Meta(ge=0)]
    """Steps with prompt tokens that this was measured on."""
    tokens: Annotated[int, Meta(ge=0)]


class InstanceInfo(ReplicaIdentity, frozen=True, kw_only=True):
    """``GET /info``."""

    incarnation: str
    """New at every start: what was known of an earlier one is void."""
    tiers: dict[str, TierInfo]
    compute: ComputeRates | None = None
    """None while too few steps were measured."""
    layout: str = ""
    """Fingerprint of the chunk layout: only replicas with equal ones can exchange chunks."""
    version: str = ""


MAX_TOKENIZER_FILE_BYTES: Final = 64 << 20
"""The largest tokenizer.json of open models has some 35 MB."""
MAX_TOKENIZER_BYTES: Final = 128 << 20
"""For all files of one tokenizer."""
_TEMPLATE_NAME: Final = re.compile(r"\w[\w.-]{0,99}\.jinja")
_TOKENIZER_FILES: Final = frozenset(
    {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"),
        *("chat_template.jinja", "preprocessor_config.json", "processor_config.json"),
        *("tekken.json", "sentence_bert_config.json"),
    }
)
TEMPLATES_FOLDER: Final = "additional_chat_templates"
GIVEN_TEMPLATE: Final = "given_chat_template.jinja"
"""Name of the template of vLLM's ``--chat-template``: it goes before those of the model."""


def is_tokenizer_file(name: str) -> bool:
    """Whether a file of this name may be one of a tokenizer; no such name leaves its directory."""
    if name in _TOKENIZER_FILES or name == GIVEN_TEMPLATE:
        return True
    folder, _, template = name.partition("/")
    return folder == TEMPLATES_FOLDER and _TEMPLATE_NAME.fullmatch(template) is not None


class TokenizerFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a tokenizer; ``GET /tokenizer/SHA256`` answers its bytes."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    size: Annotated[int, Meta(ge=0, le=MAX_TOKENIZER_FILE_BYTES)]


class TokenizerManifest(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /tokenizer``: the files from which the replica's tokenizer and chats are made, by name.

    404 if the replica has none, or if they are larger than `MAX_TOKENIZER_BYTES`.
    """

    files: Annotated[dict[str, TokenizerFile], Meta(max_length=100)]

    def digest(self) -> str:
        """Return a text that names this content."""
        lines = (f"{each.sha256} {name}\n" for name, each in sorted(self.files.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


Lora = tuple[str, str]
"""Name and path of an adapter, as vLLM was told them."""


class ChunkSelection(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The chunks of a prefix: those of ``tokens`` (with their salt), or of ``keys`` in hex."""

    tokens: list[int] | None = None
    cache_salt: str | None = None
    keys: list[str] | None = None
    lora: Lora | None = None
    """The adapter that its KV is of."""
    keys_are_stored: bool = False
    """Between agents: ``keys`` are those in tiers, which differ from vLLM's for adapters' KV."""


class LookupRequest(ChunkSelection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /lookup``. With ``tier`` only what that tier holds counts, else what any holds."""

    tier: TierName | None = None


class LookupReply(msgspec.Struct, frozen=True, kw_only=True):
    """How far the prompt's chunks are held without a gap, and where.

    ``tiers`` has, chunk by chunk, the fastest tier that holds it.
    """

    matched_tokens: int
    tokens_by_tier: dict[str, int]
    tiers: list[str]


class PrefetchRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """``POST /prefetch``: promote these chunks to the cpu tier and pin them.

    A chunk's pin lasts for ``pin_s``, or until as many requests have used the chunk as
    prefetched it. The answer comes when all is there, or after ``wait_s``, whichever is first;
    the promotion goes on in either case.
    """

    keys: list[str]
    lora: Lora | None = None
    wait_s: float = 0.0
    pin_s: float = 10.0


class PrefetchReply(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the chunks so far; the counts add up to those asked for."""

    resident: int
    """In the cpu tier before the call."""
    promoted: int
    """Brought there by the call, whole and pinned."""
    pending: int
    """Still being read."""
    missing: int
    """In no tier, damaged, or no room for them; after the first such chunk the
    rest of the prefix is not fetched either."""
    promoted_bytes: int


class PinRequest(ChunkSelection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /pin`` and ``/unpin``: keep a prefix's chunks in a tier until they are unpinned.

    Chunks up to the first that the tier does not hold are pinned; how much may
    be pinned at once is bounded.
    """

    tier: TierName = "cpu"


class PinReply(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that are pinned now (after ``/unpin``: no longer)."""

    num_tokens: int


class ClearRequest(ChunkSelection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /clear``: drop chunks, all where none are named, from these tiers or from all."""

    tiers: list[TierName] | None = None


class ClearReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Chunks dropped, by tier."""

    dropped: dict[str, int]
    not_cleared: list[str] = []
    """Tiers in which chunks may be left that could be found: the remote store, if it fails."""


class MoveSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The replica that chunks come from, and the tier that is to lose them if they move."""

    agent_url: str
    transfer_address: str
    """``host:port`` of its `InstanceInfo.transfer_port`; "" if it is the agent's own replica.

    With a fleet secret, both have the same host, which must prove that it knows the secret.
    """
    tier: TierName | None = "cpu"
    """None, for copies only: each chunk from whichever tier has it."""


class MoveRequest(ChunkSelection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /move``, to the agent of the replica that is to get the chunks.

    The agent fetches from ``source`` what its tier holds of the prefix, into
    ``tier`` of its own, and pins it for ``pin_s``. Without
    ``copy`` the source then drops what has arrived.
    """

    source: MoveSource
    tier: TierName = "cpu"
    copy: bool = False
    pin_s: float = 0.0
    stall_s: float = 30.0
    """Give up when no chunk has come for this time: requests that want those on the way wait."""


class MoveReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer comes at once; the bytes follow. Ask ``GET /moves/EVENT_ID`` how it went."""

    event_id: str
    num_tokens: int
    """Tokens whose chunks the source's tier holds and that are on their way."""


class MoveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /moves/EVENT_ID?wait_s=S``: answers when the move is over, or after S seconds.

    404 for an event that is unknown or was forgotten (the latest are kept).
    """

    event_id: str
    state: MoveState
    """``failed``: not all chunks arrived (those arrived are usable), or all did and
    the source could not be told to drop them (both have them); see ``error``."""
    asked_chunks: int
    arrived_chunks: int
    """Now held by the destination, those it had before included."""
    moved_bytes: int
    error: str = ""
    """Why not all chunks arrived."""
    note: str = ""
    """Why there was none to move, which is not a failure."""


class Registration(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """``POST /register`` at the controller's monitor port, by an agent that starts.

    Then ``POST /heartbeat`` (`Heartbeat`) at least every ``heartbeat_s``; the
    controller answers 404 to an unknown agent, which then registers anew.
    ``POST /deregister`` (`Heartbeat`) at the end.
    """

    instance_id: str
    incarnation: str
    agent_url: str
    """Where the controller reaches the agent; with an empty host, at the
    address that the registration came from."""
    transfer_port: int | None
    heartbeat_s: float
    openai_url: str | None = None
    """Where clients reach the replica, likewise; a router that permits it sends requests there."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``POST /heartbeat`` and ``/deregister``: which agent is alive, or goes."""

    instance_id: str
    incarnation: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /snapshot``: all keys by tier, as of event ``seq`` of ``incarnation``."""

    incarnation: str
    seq: int
    tiers: dict[str, bytes]


class KeyEvent(msgspec.Struct, frozen=True, array_like=True):
    """Chunks that a tier gained or lost, packed keys."""

    tier: str
    stored: bool
    keys: bytes


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """``GET /events?after=SEQ&wait_s=S``: what happened after event SEQ, in order.

    ``seq`` is that of the last event in it (SEQ itself when there is none).
    The agent answers 410 when SEQ is older than its history or of another
    incarnation: take a new snapshot.
    """

    incarnation: str
    seq: int
    events: list[KeyEvent]


MSGPACK: Final = "application/msgpack"


def pack_keys(keys: Iterable[int]) -> bytes:
    """Pack 64-bit keys, 8 bytes each, big-endian."""
    return _swapped(array("Q", keys)).tobytes()


def unpack_keys(packed: bytes) -> list[int]:
    """Return the 64-bit keys of `pack_keys`."""
    keys = array("Q")
    try:
        keys.frombytes(packed)
    except ValueError:
        raise ValueError(f"packed keys have {len(packed)} bytes, not a multiple of 8") from None
    return _swapped(keys).tolist()


def _swapped(keys: "array[int]") -> "array[int]":
    """Turn native byte order to big-endian, or back, in place."""
    if sys.byteorder == "little":
        keys.byteswap()
    return keys
