"""The simulated model's tokenizer: ours, the router's and the file's are one."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.prompt.prompt_reader import PromptReader
from router.prompt.token_trust import CHAT_PROBES, TEXT_PROBES
from router.prompt.tokenizer_files import load_directory
from simulator.openai_prompts import (
    NUM_WORDS,
    chat_text,
    make_tokenizer,
    text_of,
    tokens_of,
    vocabulary_size,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    loaded = load_directory(directory)
    assert (loaded.doubt, loaded.chat_doubt) == (None, None)
    return loaded.tokenizer


def test_words_are_tokens_both_ways(tokenizer: Tokenizer) -> None:
    ids = random.Random(1).choices(range(NUM_WORDS), k=5000)
    assert tokens_of(text_of(ids)) == ids
    assert tokenizer.encode(text_of(ids)).ids == ids


def test_twelve_thousand_tokens_are_sixty_kilobytes() -> None:
    assert len(text_of(range(0, NUM_WORDS, 1))) == 5 * NUM_WORDS - 1


@pytest.mark.parametrize(
    "text",
    [
        *TEXT_PROBES,
        "baba babax bab <|user|>x <|user|> ##a ##ab <unk>x <unk>",
        "a\x1cb \x1f \x85 c\u2028d \u200b \ufeff",
        " ".join(["q" * 100, "q" * 101, "é" * 50, "é" * 51]),
    ],
)
def test_any_text_has_the_tokens_that_the_file_gives(text: str, tokenizer: Tokenizer) -> None:
    assert tokens_of(text) == tokenizer.encode(text, add_special_tokens=True).ids


@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_all_other_text_has_too(text: str, tokenizer: Tokenizer) -> None:
    assert tokens_of(text) == tokenizer.encode(text).ids


def test_ids_that_are_no_words_have_no_text() -> None:
    with pytest.raises(ValueError, match="below 10000"):
        text_of([NUM_WORDS, vocabulary_size()])


@pytest.mark.parametrize("body", CHAT_PROBES, ids=range(len(CHAT_PROBES)))
def test_chats_are_rendered_as_the_router_does(body: dict[str, object], directory: Path) -> None:
    prompt = PromptReader.load(directory).read_now("/tokenize", body)
    messages = body["messages"]
    assert isinstance(messages, list)
    generation = body.get("add_generation_prompt", True) is not False
    ours = tokens_of(chat_text(messages, add_generation_prompt=generation))
    assert ours == list(prompt.token_ids or ())


def test_the_next_turn_continues_the_tokens_of_the_last_one_and_its_answer() -> None:
    turn = [{"role": "user", "content": "baba bebe"}]
    answer = text_of([1, 2, 3])
    first = [*tokens_of(chat_text(turn)), 1, 2, 3]
    second = [*turn, {"role": "assistant", "content": answer}, {"role": "user", "content": "bibi"}]
    assert tokens_of(chat_text(second))[: len(first)] == first
