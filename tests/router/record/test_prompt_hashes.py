"""Hashes in a log, by which prompts with the same beginning are found."""

from collections.abc import Sequence
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.index.prompt_keys import PromptKeys
from router.record.prompt_hashes import PromptHashes, places

BLOCKS = st.integers(1, 700)


def hashes(keys: Sequence[int], block_tokens: int, session: str | None = None) -> PromptHashes:
    return PromptHashes.of(PromptKeys(keys=keys, block_tokens=block_tokens), session)


def test_places_are_close_at_the_beginning_and_far_apart_later() -> None:
    found = list(islice(places(16), 140))
    assert found[:3] == [128, 256, 384]
    assert found[126:131] == [16_256, 16_384, 17_408, 18_432, 19_456]
    assert list(islice(places(512), 40))[30:34] == [15_872, 16_384, 17_408, 18_432]
    assert list(islice(places(100), 3)) == [200, 300, 400], "where whole blocks end"


@given(block_tokens=BLOCKS, shared=st.integers(0, 400), more=st.tuples(BLOCKS, BLOCKS))
def test_equal_beginnings_have_equal_hashes(
    block_tokens: int, shared: int, more: tuple[int, int]
) -> None:
    """As many as there are places in the shared part."""
    one = hashes([*range(shared), *range(10**6, 10**6 + more[0])], block_tokens)
    two = hashes([*range(shared), *range(10**7, 10**7 + more[1])], block_tokens)
    common = sum(end <= shared * block_tokens for end in one.ends)
    assert one.hashes[:common] == two.hashes[:common]
    assert not {*one.hashes[common:]} & {*two.hashes[common:]}
    assert all(end <= (shared + more[0]) * block_tokens for end in one.ends)


@given(keys=st.lists(st.integers(0, 2**64 - 1), max_size=300), block_tokens=BLOCKS)
def test_the_log_gives_them_back(keys: list[int], block_tokens: int) -> None:
    found = hashes(keys, block_tokens, "a session")
    assert PromptHashes.from_json(found.to_json()) == found
    assert "a session" not in str(found.to_json())


def test_a_very_long_prompt_takes_a_bounded_line() -> None:
    told = hashes(range(10_000_000 // 16), 16).to_json()
    assert len(told["hashes"]) == 8 * 1024


def test_a_line_is_compact() -> None:
    assert len(hashes(range(8_000 // 16), 16).to_json()["hashes"]) == 8 * 62


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"block_tokens": 0, "hashes": "", "session": None},
        {"block_tokens": 16, "hashes": 7, "session": None},
        {"block_tokens": 16, "hashes": "AAAA", "session": None},
        {"block_tokens": 16, "hashes": "not base64", "session": None},
        {"block_tokens": 16, "hashes": "", "session": 7},
    ],
)
def test_what_is_not_that_is_refused(told: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        PromptHashes.from_json(told)
