"""The contract of `tiers.base`, for every tier there is."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cacheengine.tiers.base import GetOutcome, LocalTier, PutOutcome
from cacheengine.tiers.disk import DiskTier
from cacheengine.tiers.null import NullTier
from tests.cacheengine.building import key, keys, payload

CHUNK_BYTES = 3 * 512 * 1024 + 17  # several pieces, the last one odd

OpenTier = Callable[[], LocalTier]


def _open_null(root: Path) -> LocalTier:
    return NullTier()


def _open_disk(root: Path) -> LocalTier:
    return DiskTier(root, "f" * 32, CHUNK_BYTES, 1 << 30)


@pytest.fixture(params=[_open_null, _open_disk])
def open_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenTier]:
    """Open the tier under test; every call opens the same storage anew."""
    opened: list[LocalTier] = []

    def open_() -> LocalTier:
        for tier in opened:
            tier.close()
        opened.append(request.param(tmp_path))
        return opened[-1]

    yield open_
    for tier in opened:
        tier.close()


def _payload(chunk: bytes) -> memoryview:
    return memoryview(payload(chunk, CHUNK_BYTES))


def _get(tier: LocalTier, chunk: bytes) -> bytes | None:
    buffer = bytearray(CHUNK_BYTES)
    outcome = tier.get(chunk, memoryview(buffer))
    return bytes(buffer) if outcome is GetOutcome.OK else None


def test_gives_what_was_put_or_nothing(open_tier: OpenTier) -> None:
    tier = open_tier()
    tier.scan()
    for chunk in keys(1, 2):
        stored = tier.put(chunk, _payload(chunk)) is PutOutcome.STORED
        assert stored == (tier.capacity_bytes > 0)
        assert _get(tier, chunk) == (bytes(_payload(chunk)) if stored else None)


def test_what_was_never_put_is_missing(open_tier: OpenTier) -> None:
    tier = open_tier()
    assert tier.get(key(1), memoryview(bytearray(CHUNK_BYTES))) is GetOutcome.MISSING


def test_put_again_replaces(open_tier: OpenTier) -> None:
    tier = open_tier()
    tier.put(key(1), _payload(key(9)))
    if tier.put(key(1), _payload(key(1))) is PutOutcome.STORED:
        assert _get(tier, key(1)) == bytes(_payload(key(1)))


def test_deleted_chunks_are_missing_and_others_are_not(open_tier: OpenTier) -> None:
    tier = open_tier()
    outcomes = [tier.put(chunk, _payload(chunk)) for chunk in keys(1, 2)]
    tier.delete(keys(1, 3))
    assert _get(tier, key(1)) is None
    if outcomes[1] is PutOutcome.STORED:
        assert _get(tier, key(2)) == bytes(_payload(key(2)))


def test_scan_finds_exactly_what_an_earlier_life_stored(open_tier: OpenTier) -> None:
    tier = open_tier()
    assert tier.scan() == []
    stored = [c for c in keys(1, 2, 3) if tier.put(c, _payload(c)) is PutOutcome.STORED]
    tier.delete(keys(2))
    again = open_tier()
    found = again.scan()
    assert set(found) == set(stored) - {key(2)}
    for chunk in found:
        assert _get(again, chunk) == bytes(_payload(chunk))


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
