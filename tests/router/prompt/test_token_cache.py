"""Keys are hashed once, found again by what they stand for, and forgotten in order."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prompt.token_cache import Memo, Piece
from warmroute_common.keys import HashScheme, prompt_extra_keys

SCHEME = HashScheme("xxhash")


def pieces_of(memo: Memo, *texts: str) -> list[Piece]:
    """Return pieces of as many tokens as each text has characters."""
    found = memo.find(texts)
    return [
        found.get(text) or memo.add(text, [ord(char) for char in text], len(text)) for text in texts
    ]


def ids_of(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.ids]


def test_a_longer_prompt_hashes_only_its_new_blocks() -> None:
    memo = Memo(1 << 20)
    first = pieces_of(memo, "a" * 30, "b" * 30)
    memo.chain(first, ids_of(first), SCHEME, 16)
    assert memo.blocks_hashed == 3
    longer = pieces_of(memo, "a" * 30, "b" * 30, "c" * 40)
    keys = memo.chain(longer, ids_of(longer), SCHEME, 16)
    assert keys == SCHEME.chain(ids_of(longer), 16)
    assert memo.blocks_hashed == 6


def test_the_same_piece_elsewhere_has_other_keys() -> None:
    memo = Memo(1 << 20)
    for texts in (("x" * 16, "y" * 16), ("y" * 16, "x" * 16), ("y" * 16, "y" * 16)):
        pieces = pieces_of(memo, *texts)
        assert memo.chain(pieces, ids_of(pieces), SCHEME, 16) == SCHEME.chain(ids_of(pieces), 16)


def test_schemes_blocks_and_salts_do_not_mix() -> None:
    memo = Memo(1 << 20)
    pieces = pieces_of(memo, "a" * 64)
    every, first = prompt_extra_keys(cache_salt="s")
    plain = memo.chain(pieces, ids_of(pieces), SCHEME, 16)
    salted = memo.chain(
        pieces, ids_of(pieces), SCHEME, 16, extra_keys=every, first_extra_keys=first
    )
    assert not set(plain) & set(salted)
    assert memo.chain(pieces, ids_of(pieces), SCHEME, 32) == SCHEME.chain(ids_of(pieces), 32)
    assert memo.chain(pieces, ids_of(pieces), HashScheme(), 16) == HashScheme().chain(
        ids_of(pieces), 16
    )
    assert memo.blocks_hashed == 4 + 4 + 2 + 4


def test_the_least_recently_used_goes_first() -> None:
    memo = Memo(5_000)
    pieces_of(memo, "kept" * 10)
    for number in range(100):
        pieces_of(memo, f"text {number}")
        pieces_of(memo, "kept" * 10)
        memo.check()
    tokenized = memo.tokens_tokenized
    pieces_of(memo, "kept" * 10)
    assert memo.tokens_tokenized == tokenized
    assert not memo.find(["text 0"])


def test_who_comes_second_with_the_same_text_gets_the_piece_of_the_first() -> None:
    # Two threads found nothing and both tokenized: keys must hang on one serial.
    memo = Memo(1 << 20)
    first = memo.add("text", [1, 2], 4)
    assert memo.add("text", [1, 2], 4) is first


def test_token_ids_are_pieces_too() -> None:
    memo = Memo(1 << 20)
    ids = list(range(1000))
    pieces = memo.runs(ids)
    assert ids_of(pieces) == ids
    memo.chain(pieces, ids, SCHEME, 16)
    memo.chain(memo.runs([*ids, 7]), [*ids, 7], SCHEME, 16)
    assert memo.blocks_hashed <= 62 + 7  # the last run is another now
    assert memo.tokens_tokenized == 0


@settings(max_examples=60)
@given(
    st.integers(0, 2**32), st.sampled_from([0, 3_000, 1 << 20]), st.sampled_from([1, 4, 16, 128])
)
def test_keys_are_those_of_the_scheme_whatever_is_remembered(
    seed: int, max_bytes: int, block_tokens: int
) -> None:
    rng = random.Random(seed)
    memo = Memo(max_bytes)
    texts = ["".join(rng.choices("abc", k=rng.choice([0, 1, 7, 16, 200]))) for _ in range(6)]
    for _ in range(20):
        pieces = pieces_of(memo, *rng.choices(texts, k=rng.randint(0, 6)))
        ids = ids_of(pieces)
        every, first = prompt_extra_keys(cache_salt=rng.choice([None, "s"]))
        assert memo.chain(
            pieces, ids, SCHEME, block_tokens, extra_keys=every, first_extra_keys=first
        ) == SCHEME.chain(ids, block_tokens, extra_keys=every, first_extra_keys=first)
        memo.check()


def test_a_prompt_that_is_not_made_of_pieces_is_hashed_as_it_is() -> None:
    memo = Memo(1 << 20)
    assert memo.chain((), [1] * 40, SCHEME, 16) == SCHEME.chain([1] * 40, 16)
    assert memo.used_bytes == 0


@pytest.mark.parametrize("max_bytes", [0, 1_000, 1 << 20])
def test_the_bound_is_kept(max_bytes: int) -> None:
    memo = Memo(max_bytes)
    for number in range(50):
        pieces = pieces_of(memo, f"{number} " * 50)
        memo.chain(pieces, ids_of(pieces), SCHEME, 4)
        memo.check()
        assert memo.used_bytes <= max_bytes


def test_each_salt_has_steps_of_its_own_which_leave_in_their_turn() -> None:
    """A system prompt that all tenants share must not gather the keys of all of them."""
    memo = Memo(200_000)
    pieces = memo.runs(range(3200))
    for tenant in range(100):
        every, first = prompt_extra_keys(cache_salt=f"tenant {tenant}")
        for _ in range(2):
            hashed = memo.blocks_hashed
            keys = memo.chain(
                pieces, ids_of(pieces), SCHEME, 16, extra_keys=every, first_extra_keys=first
            )
            assert len(keys) == 200
        assert memo.blocks_hashed == hashed
        memo.check()
    every, first = prompt_extra_keys(cache_salt="tenant 0")
    memo.chain(pieces, ids_of(pieces), SCHEME, 16, extra_keys=every, first_extra_keys=first)
    assert memo.blocks_hashed == hashed + 200, "the first tenant's have left"
