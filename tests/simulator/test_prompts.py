"""Prompts: their tokens and keys, whatever is remembered."""

import random

import pytest

from simulator import openai_prompts as module
from simulator.openai_prompts import NUM_WORDS, BadPromptError, Prompts, chat_text, text_of
from warmroute_common.keys import HashScheme, chunk_keys, prompt_extra_keys

SCHEME = HashScheme("sha256")
BLOCK = 16


def prompts(seed: int = 0) -> Prompts:
    return Prompts(SCHEME, BLOCK, 4, seed=seed)


def ids(count: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(NUM_WORDS), k=count)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 511, 512, 513, 3000])
@pytest.mark.parametrize("salt", [None, "tenant"])
def test_keys_are_those_of_the_whole_chain(count: int, salt: str | None) -> None:
    """Made piece by piece, from text or ids, new or remembered."""
    made = prompts()
    every, first = prompt_extra_keys(cache_salt=salt)
    for _ in range(2):
        for each in (
            made.of_text(text_of(ids(count)), 40, salt),
            made.of_ids(ids(count), 40, salt),
        ):
            assert each.token_ids.tolist() == ids(count)
            run = [*ids(count), *each.output_ids[:-1]]
            chain = SCHEME.chain(run, BLOCK, extra_keys=every, first_extra_keys=first)
            assert each.block_keys == chain
            assert each.chunk_keys == chunk_keys(chain, 4)
            assert each.tokens(0, count + 40) == [*run, each.output_ids[-1]]


def test_a_longer_prompt_begins_with_the_same_keys() -> None:
    made = prompts()
    short, long = made.of_text(text_of(ids(2000)), 1), made.of_text(text_of(ids(2600)), 1)
    other = made.of_text(text_of(ids(2000)), 1, "salt")
    full = 2000 // BLOCK
    assert short.block_keys[:full] == long.block_keys[:full]
    assert not set(short.block_keys) & set(other.block_keys)


def test_the_same_prompt_has_the_same_answer_and_another_seed_another() -> None:
    one, two = prompts().of_ids(ids(100), 30), prompts().of_text(text_of(ids(100)), 30)
    assert one.output_ids == two.output_ids
    assert one.output_ids != prompts(seed=5).of_ids(ids(100), 30).output_ids
    assert len(set(one.output_ids)) == 30
    # The part of the answer that both have is the same, so its KV can be used again.
    assert prompts().of_ids(ids(100), 10).output_ids == one.output_ids[:10]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PIECES", 3)
    made = prompts()
    for seed in range(5):
        made.of_text(text_of(ids(1000, seed)), 1)
    assert len(made._pieces) == 3
    again = made.of_text(text_of(ids(1000, 0)), 1)
    assert again.block_keys == SCHEME.chain(ids(1000, 0), BLOCK)


def test_prompts_that_cannot_be_say_why() -> None:
    made = prompts()
    for bad, said in (
        (["x"], "list of small integers"),
        ([10**6], "list of small integers"),
        ([-1], "list of small integers"),
        ([65_000], "out of vocabulary"),
        ([], "no tokens"),
    ):
        with pytest.raises(BadPromptError, match=said):
            made.of_ids(bad, 1)  # type: ignore[arg-type]
    for messages, said in (
        ([], "is empty"),
        ([{"role": "user", "content": 3}], "must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text parts"),
        (["hello"], "list of objects"),
    ):
        with pytest.raises(BadPromptError, match=said):
            chat_text(messages)  # type: ignore[arg-type]
