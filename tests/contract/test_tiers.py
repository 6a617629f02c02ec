"""The contract of `tiers.base`, for every tier there is."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.mooncake_store import MooncakeStore
from cacheengine.tiers.redis_store import RedisServer, RedisStore
from cacheengine.tiers.remote import SERDE_NAMES, RemoteTier, make_serde
from cacheengine.tiers.remote_url import parse_remote_url
from cacheengine.tiers.tier import GetOutcome, LocalTier, NullTier, PutOutcome, SharedTier, Tier
from tests.cacheengine.helpers import key, keys, payload, wait_until
from tests.servers import PATIENT, PATIENT_S, answers

CHUNK_BYTES = 3 * 512 * 1024 + 17  # several pieces, the last one odd

OpenTier = Callable[[], Tier]
MakeTier = Callable[[pytest.FixtureRequest], Callable[[Path], Tier]]


@pytest.fixture(scope="module")
def mooncake_keeper(mooncake_url: str) -> Iterator[str]:
    """A client that keeps all chunks: those in a client's own segment go with it."""
    extra = {"global_segment_size": 64 * 1024 * 1024}
    keeper = MooncakeStore.connect(mooncake_url, extra, PATIENT_S, environment={})
    wait_until(lambda: answers(keeper))
    yield mooncake_url
    keeper.close()


def _null(_request: pytest.FixtureRequest) -> Callable[[Path], Tier]:
    return lambda root: NullTier()


def _disk(_request: pytest.FixtureRequest) -> Callable[[Path], Tier]:
    return lambda root: DiskTier([root], "f" * 32, CHUNK_BYTES, 1 << 30)


def _remote(fixture: str, serde: str = "naive") -> MakeTier:
    def make(request: pytest.FixtureRequest) -> Callable[[Path], Tier]:
        url = parse_remote_url(f"{request.getfixturevalue(fixture)}?{PATIENT}")

        def open_(root: Path) -> Tier:
            # The test's own directory makes its chunks its own on the shared server.
            store = RedisStore(RedisServer.from_url(url))
            return RemoteTier(store, root.name, CHUNK_BYTES, make_serde(serde, "bfloat16"))

        return open_

    return make


def _mooncake(request: pytest.FixtureRequest) -> Callable[[Path], Tier]:
    url = request.getfixturevalue("mooncake_keeper")

    def open_(root: Path) -> Tier:
        store = MooncakeStore.connect(url, {"global_segment_size": 0}, PATIENT_S, environment={})
        wait_until(lambda: answers(store))  # a busy machine takes seconds to connect it
        return RemoteTier(store, root.name, CHUNK_BYTES, make_serde("naive", "bfloat16"))

    return open_


TIERS: dict[str, MakeTier] = {
    "null": _null,
    "disk": _disk,
    "redis": _remote("redis_url"),
    "valkey": _remote("valkey_url"),
    "mooncake": _mooncake,
    **{
        f"redis-{name}": _remote("redis_url", name)
        for name in SERDE_NAMES
        if name != "naive" and make_serde(name, "bfloat16").is_exact
    },
}


SLOW = ("mooncake",)
"""Their servers take seconds to start and to leave."""


@pytest.fixture(
    params=[
        pytest.param(make, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, make in TIERS.items()
    ]
)
def open_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenTier]:
    """Open the tier under test; every call opens the same storage again."""
    opened: list[Tier] = []
    make: Any = request.param(request)

    def open_() -> Tier:
        for tier in opened:
            tier.close()
        opened.append(make(tmp_path))
        _scan(opened[-1])
        return opened[-1]

    yield open_
    for tier in opened:
        tier.close()


def _scan(tier: Tier) -> list[bytes]:
    return tier.scan() if isinstance(tier, LocalTier) else []


def _payload(chunk: bytes) -> memoryview:
    return memoryview(payload(chunk, CHUNK_BYTES))


def _get(tier: Tier, chunk: bytes) -> bytes | None:
    buffer = bytearray(CHUNK_BYTES)
    outcome = tier.get(chunk, memoryview(buffer))
    return bytes(buffer) if outcome is GetOutcome.OK else None


def test_gives_what_was_put_or_nothing(open_tier: OpenTier) -> None:
    tier = open_tier()
    for chunk in keys(1, 2):
        stored = tier.put(chunk, _payload(chunk)) is PutOutcome.STORED
        assert stored != isinstance(tier, NullTier)
        assert _get(tier, chunk) == (bytes(_payload(chunk)) if stored else None)


def test_a_batch_gives_each_chunk_its_own_outcome(open_tier: OpenTier) -> None:
    tier = open_tier()
    put = tier.put_many([(chunk, _payload(chunk)) for chunk in keys(1, 3)])
    buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(3)]
    got = tier.get_many(list(zip(keys(1, 2, 3), buffers, strict=True)))
    held = GetOutcome.MISSING if isinstance(tier, NullTier) else GetOutcome.OK
    assert put == [PutOutcome.STORED if held is GetOutcome.OK else PutOutcome.NO_SPACE] * 2
    assert got == [held, GetOutcome.MISSING, held]
    if held is GetOutcome.OK:
        assert (buffers[0], buffers[2]) == (_payload(key(1)), _payload(key(3)))


def test_an_empty_batch_is_no_work(open_tier: OpenTier) -> None:
    tier = open_tier()
    assert (tier.put_many([]), tier.get_many([])) == ([], [])
    tier.delete([])


def test_what_was_never_put_is_missing(open_tier: OpenTier) -> None:
    tier = open_tier()
    assert tier.get(key(1), memoryview(bytearray(CHUNK_BYTES))) is GetOutcome.MISSING


def test_put_again_replaces(open_tier: OpenTier, request: pytest.FixtureRequest) -> None:
    tier = open_tier()
    tier.put(key(1), _payload(key(9)))
    if tier.put(key(1), _payload(key(1))) is PutOutcome.STORED:
        # Mooncake's objects do not change, and a key's bytes do not either: the first stays.
        stays = request.node.callspec.id == "mooncake"
        assert _get(tier, key(1)) == bytes(_payload(key(9) if stays else key(1)))


def test_deleted_chunks_are_missing_and_others_are_not(open_tier: OpenTier) -> None:
    tier = open_tier()
    outcomes = [tier.put(chunk, _payload(chunk)) for chunk in keys(1, 2)]
    tier.delete(keys(1, 3))
    assert _get(tier, key(1)) is None
    if outcomes[1] is PutOutcome.STORED:
        assert _get(tier, key(2)) == bytes(_payload(key(2)))


def test_scan_or_find_tells_exactly_what_an_earlier_life_stored(open_tier: OpenTier) -> None:
    tier = open_tier()
    stored = [c for c in keys(1, 2, 3) if tier.put(c, _payload(c)) is PutOutcome.STORED]
    tier.delete(keys(2))
    again = open_tier()
    found = _found(again, keys(1, 2, 3, 4))
    assert found == set(stored) - {key(2)}
    for chunk in found:
        assert _get(again, chunk) == bytes(_payload(chunk))


def _found(tier: Tier, among: list[bytes]) -> set[bytes]:
    if isinstance(tier, SharedTier):
        answers = tier.find(among)
        assert answers is not None
        return {chunk for chunk, is_there in zip(among, answers, strict=True) if is_there}
    return set(_scan(tier))


def test_close_is_idempotent(open_tier: OpenTier) -> None:
    tier = open_tier()
    tier.close()
    tier.close()


def test_several_threads_may_work_on_different_keys(open_tier: OpenTier) -> None:
    tier = open_tier()
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(5):
            chunk = key(100 * number + turn)
            stored = tier.put(chunk, _payload(chunk)) is PutOutcome.STORED
            if _get(tier, chunk) != (bytes(_payload(chunk)) if stored else None):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
