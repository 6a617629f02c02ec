"""The remote tier over a store that does not matter: names, envelopes, serdes, outcomes."""

import logging
import struct
from collections.abc import Sequence

import pytest

from cacheengine.identity.chunk_layout import ChunkLayout
from cacheengine.tiers.remote import HEADER_BYTES, Envelope, RemoteTier
from cacheengine.tiers.serde import NaiveSerde, Part, Serde, SerdeError
from cacheengine.tiers.store import Blob, StoreError, StoreFullError, StorePausedError
from cacheengine.tiers.tier import GetOutcome, PutOutcome
from tests.cacheengine.helpers import key, keys, layout, payload
from tests.cacheengine.tiers.memory_store import MemoryStore
from warmroute_common.fleet_secret import FleetSecret

CHUNK_BYTES = 600 * 1024  # more than one piece of the checksum
FINGERPRINT = layout(CHUNK_BYTES).fingerprint()
SECRET = FleetSecret("known-to-the-fleet-alone")


class RunLength(Serde):
    """Says how often the first byte comes, if all are the same; else keeps them all, and a mark."""

    name = "run-length"
    code = 200
    is_exact = True

    def encode(self, payload: memoryview) -> Sequence[Part]:
        if payload.tobytes().count(payload[0]) == len(payload):
            return [b"R", struct.pack("<BQ", payload[0], len(payload))]
        return [b"K", payload]

    def decode(self, encoded: memoryview, into: memoryview) -> None:
        if len(encoded) != 10 or encoded[0] != ord("R"):
            raise SerdeError("not mine")
        byte, count = struct.unpack("<BQ", encoded[1:])
        if count != len(into):
            raise SerdeError("another size")
        into[:] = bytes([byte]) * count


class Rounding(RunLength):
    name = "rounding"
    code = 201
    is_exact = False


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def _tier(
    store: MemoryStore,
    serde: Serde | None = None,
    *,
    fingerprint: str = FINGERPRINT,
    readers: Sequence[Serde] = (),
    secret: FleetSecret | None = None,
) -> RemoteTier:
    serde = serde or NaiveSerde()
    return RemoteTier(store, fingerprint, CHUNK_BYTES, serde, readers=readers, secret=secret)


def _payload(chunk: bytes) -> memoryview:
    return memoryview(payload(chunk, CHUNK_BYTES))


def _put(tier: RemoteTier, chunk: bytes, content: bytes | memoryview | None = None) -> PutOutcome:
    return tier.put(chunk, memoryview(_payload(chunk) if content is None else content))


def _get(tier: RemoteTier, chunk: bytes, content: bytes | memoryview | None = None) -> GetOutcome:
    buffer = bytearray(b"\xaa" * CHUNK_BYTES)
    outcome = tier.get(chunk, memoryview(buffer))
    right = bytes(_payload(chunk) if content is None else content)
    assert outcome is not GetOutcome.OK or bytes(buffer) == right
    return outcome


def _name(chunk: bytes) -> str:
    return f"warmroute:{FINGERPRINT}:{chunk.hex()}"


def test_a_blob_is_named_by_layout_and_key_and_has_a_header(store: MemoryStore) -> None:
    assert _put(_tier(store), key(1)) is PutOutcome.STORED
    (name,) = store.blobs
    assert name == _name(key(1))
    assert store.blobs[name][HEADER_BYTES:] == _payload(key(1))


def test_a_naive_blob_is_sent_from_and_read_into_the_slot_itself(store: MemoryStore) -> None:
    seen: list[object] = []
    slot = bytearray(_payload(key(1)))

    class Watching(MemoryStore):
        def put_many(self, blobs: Sequence[Blob]) -> list[bool]:
            seen.extend(part.obj for part in blobs[0].parts if isinstance(part, memoryview))
            return super().put_many(blobs)

    _tier(Watching()).put(key(1), memoryview(slot))
    assert [each is slot for each in seen] == [True]


def test_a_blob_made_without_the_fleet_secret_is_damage(store: MemoryStore) -> None:
    """Whoever can write to the store knows names, and can compute all that is not keyed."""
    fleet = _tier(store, secret=SECRET)
    evil = bytes(CHUNK_BYTES)
    for secret in (None, FleetSecret("known-to-somebody-else")):
        assert _put(fleet, key(1)) is PutOutcome.STORED
        (name,) = store.blobs
        stranger = Envelope(FINGERPRINT, CHUNK_BYTES, secret=secret)
        stranger.prefix = name.removesuffix(key(1).hex())
        assert _get(fleet, key(1)) is GetOutcome.OK
        store.blobs[name] = stranger.header(key(1), NaiveSerde.code, [evil]) + evil
        assert _get(fleet, key(1), evil) is GetOutcome.DAMAGED


def test_fleets_with_other_secrets_leave_each_other_s_blobs_alone(store: MemoryStore) -> None:
    fleets = [
        _tier(store, secret=secret) for secret in (None, SECRET, FleetSecret("of-another-fleet"))
    ]
    for fleet in fleets:
        assert _get(fleet, key(1)) is GetOutcome.MISSING
        assert _put(fleet, key(1)) is PutOutcome.STORED
    assert [_get(fleet, key(1)) for fleet in fleets] == [GetOutcome.OK] * 3


@pytest.mark.parametrize("position", [*range(HEADER_BYTES), HEADER_BYTES, 333_333, -1])
def test_a_flipped_bit_anywhere_is_damage_and_removed(store: MemoryStore, position: int) -> None:
    tier = _tier(store)
    _put(tier, key(1))
    blob = bytearray(store.blobs[_name(key(1))])
    blob[position] ^= 0x10
    store.blobs[_name(key(1))] = bytes(blob)
    assert _get(tier, key(1)) is GetOutcome.DAMAGED
    assert store.blobs == {}


@pytest.mark.parametrize("code", [1, 200, 201, 65535])
def test_another_serdes_code_on_the_same_bytes_is_damage(store: MemoryStore, code: int) -> None:
    tier = _tier(store, readers=[RunLength()])
    _put(tier, key(1))
    blob = bytearray(store.blobs[_name(key(1))])
    struct.pack_into("<H", blob, 10, code)
    store.blobs[_name(key(1))] = bytes(blob)
    assert _get(tier, key(1)) is GetOutcome.DAMAGED


@pytest.mark.parametrize(
    "size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + CHUNK_BYTES - 1, 2 * CHUNK_BYTES]
)
def test_a_blob_of_another_size_is_damage_and_removed(store: MemoryStore, size: int) -> None:
    tier = _tier(store)
    _put(tier, key(1))
    store.blobs[_name(key(1))] = store.blobs[_name(key(1))].ljust(size, b"\0")[:size]
    assert _get(tier, key(1)) is GetOutcome.DAMAGED
    assert store.blobs == {}


def test_another_keys_blob_is_damage(store: MemoryStore) -> None:
    tier = _tier(store)
    _put(tier, key(1))
    store.blobs[_name(key(2))] = store.blobs[_name(key(1))]
    assert _get(tier, key(2)) is GetOutcome.DAMAGED
    assert _get(tier, key(1)) is GetOutcome.OK


def test_layouts_never_meet(store: MemoryStore) -> None:
    """Also when a blob of one is put under the other's name by force."""
    other = _tier(store, fingerprint="0" * 32)
    _put(other, key(1))
    tier = _tier(store)
    assert _get(tier, key(1)) is GetOutcome.MISSING
    store.blobs[_name(key(1))] = store.blobs.pop(f"warmroute:{'0' * 32}:{key(1).hex()}")
    assert _get(tier, key(1)) is GetOutcome.DAMAGED


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "n"},
        {"dtype": "float16"},
        {"block_tokens": 32},
        {"parallel": "tp2"},
        {"kv_layout": "HND"},
        {"weights": "1"},
    ],
)
def test_what_makes_caches_incompatible_is_in_the_name(
    store: MemoryStore, changed: dict[str, object]
) -> None:
    values: dict[str, object] = {
        "model": "m",
        "dtype": "bfloat16",
        "block_tokens": 16,
        "chunk_tokens": 256,
        "chunk_bytes": CHUNK_BYTES,
        **changed,
    }
    _put(_tier(store), key(1))
    other = ChunkLayout(**values)  # type: ignore[arg-type]
    assert _tier(store, fingerprint=other.fingerprint()).find([key(1)]) == [False]


def test_an_encoded_chunk_comes_back_and_takes_less(store: MemoryStore) -> None:
    tier = _tier(store, RunLength())
    even = b"\x07" * CHUNK_BYTES
    assert _put(tier, key(1), even) is PutOutcome.STORED
    assert len(store.blobs[_name(key(1))]) == HEADER_BYTES + 10
    assert _get(tier, key(1), even) is GetOutcome.OK


def test_what_does_not_shrink_is_stored_as_it_is(store: MemoryStore) -> None:
    tier = _tier(store, RunLength())
    _put(tier, key(1))
    assert len(store.blobs[_name(key(1))]) == HEADER_BYTES + CHUNK_BYTES
    assert _get(tier, key(1)) is GetOutcome.OK


def test_exact_serdes_read_each_others_chunks(store: MemoryStore) -> None:
    even = b"\x07" * CHUNK_BYTES
    _put(_tier(store, RunLength()), key(1), even)
    _put(_tier(store), key(2))
    assert _get(_tier(store, readers=[RunLength()]), key(1), even) is GetOutcome.OK
    assert _get(_tier(store, RunLength()), key(2)) is GetOutcome.OK


def test_an_unknown_serdes_chunk_is_missing_and_left_to_those_who_know_it(
    store: MemoryStore,
) -> None:
    _put(_tier(store, RunLength()), key(1), b"\x07" * CHUNK_BYTES)
    assert _get(_tier(store), key(1)) is GetOutcome.MISSING
    assert _name(key(1)) in store.blobs


def test_a_lossy_serde_has_names_of_its_own(store: MemoryStore) -> None:
    even = b"\x07" * CHUNK_BYTES
    _put(_tier(store, Rounding()), key(1), even)
    assert list(store.blobs) == [f"warmroute:{FINGERPRINT}-rounding:{key(1).hex()}"]
    assert _tier(store).find([key(1)]) == [False]
    assert _get(_tier(store, Rounding()), key(1), even) is GetOutcome.OK


def test_bytes_that_the_serde_did_not_write_are_damage(store: MemoryStore) -> None:
    class Wrong(RunLength):
        def encode(self, payload: memoryview) -> Sequence[Part]:
            return [b"nonsense"]

    _put(_tier(store, Wrong()), key(1))
    assert _get(_tier(store, RunLength()), key(1)) is GetOutcome.DAMAGED
    assert store.blobs == {}


def test_in_a_batch_each_chunk_has_its_outcome_and_only_the_damaged_goes(
    store: MemoryStore,
) -> None:
    tier = _tier(store)
    tier.put_many([(chunk, _payload(chunk)) for chunk in keys(1, 3)])
    store.blobs[_name(key(3))] = b"?"
    buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(3)]
    calls = store.calls
    outcomes = tier.get_many(list(zip(keys(1, 2, 3), buffers, strict=True)))
    assert outcomes == [GetOutcome.OK, GetOutcome.MISSING, GetOutcome.DAMAGED]
    assert store.calls == calls + 2  # one to read, one to remove
    assert list(store.blobs) == [_name(key(1))]


def test_a_store_that_fails_is_a_failure_of_each_chunk_and_nothing_is_removed(
    store: MemoryStore,
) -> None:
    tier = _tier(store)
    _put(tier, key(1))
    store.error = StoreError("gone")
    assert _put(tier, key(2)) is PutOutcome.FAILED
    assert _get(tier, key(1)) is GetOutcome.FAILED
    assert tier.find(keys(1, 2)) is None
    tier.delete(keys(1))
    store.error = None
    assert tier.find(keys(1, 2)) == [True, False]
    assert _get(tier, key(1)) is GetOutcome.OK


def test_a_store_that_fails_as_the_damaged_is_removed_raises_nothing() -> None:
    class Half(MemoryStore):
        def remove(self, names: Sequence[str]) -> None:
            raise StoreError("gone")

    half = Half()
    half.blobs[_name(key(1))] = b"?"
    assert _get(_tier(half), key(1)) is GetOutcome.DAMAGED


def test_a_full_store_is_no_space(store: MemoryStore) -> None:
    tier = _tier(store)
    store.error = StoreFullError("full")
    assert _put(tier, key(1)) is PutOutcome.NO_SPACE


def test_an_outage_is_said_once_and_its_end_too(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    tier = _tier(store)
    with caplog.at_level(logging.WARNING):
        for error in (StoreError("gone"), StoreError("gone"), None, None):
            store.error = error
            tier.find(keys(1))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "fails, and its chunks count as misses: gone" in said[0]
    assert "answers again" in said[1]


def test_a_full_server_is_said_once_until_it_takes_something(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    tier = _tier(store)
    with caplog.at_level(logging.WARNING):
        for error in (StoreFullError("full"), StoreFullError("full"), None, StoreFullError("full")):
            store.error = error
            _put(tier, key(1))
    assert len(caplog.records) == 2


@pytest.mark.parametrize(("chunk_bytes", "chunks"), [(1, 16), (2 << 20, 16), (84 << 20, 1)])
def test_a_batch_is_bounded_in_chunks_and_bytes(chunk_bytes: int, chunks: int) -> None:
    assert RemoteTier(MemoryStore(), "f", chunk_bytes, NaiveSerde()).batch_chunks == chunks


def test_closing_closes_the_store(store: MemoryStore) -> None:
    _tier(store).close()
    assert store.is_closed


def test_a_put_while_the_server_is_left_alone_was_not_tried() -> None:
    class Resting(MemoryStore):
        def put_many(self, blobs: Sequence[Blob]) -> list[bool]:
            raise StorePausedError("failed lately; asked again in 1.0 s")

    tier = RemoteTier(Resting(), "f" * 32, 8192, NaiveSerde())
    assert tier.put(b"key", memoryview(bytes(8192))) is PutOutcome.NOT_TRIED
