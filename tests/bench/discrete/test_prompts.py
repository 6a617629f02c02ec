"""Prompts without text: which blocks of two prompts are equal."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bench.discrete.conversation import Conversation
from bench.workloads.session import Span
from warmroute_common.keys import HashScheme

BLOCK = 4
SPANS = st.lists(st.builds(Span, st.integers(0, 2), st.integers(0, 7)), max_size=6)


def blocks(*spans: Span, answer: int = 1) -> list[bytes]:
    """Return the keys of a prompt's blocks."""
    made = Conversation(BLOCK).turn(spans, Span(-1, answer))
    return list(made.keys[: made.prompt_blocks])


def tokens(spans: list[Span]) -> list[tuple[int, int]]:
    """Return what a prompt says, token by token: the text's number and the place in it."""
    return [(span.number, at) for span in spans for at in range(span.tokens)]


@given(SPANS, SPANS)
def test_blocks_are_equal_where_all_tokens_up_to_their_end_are(
    one: list[Span], other: list[Span]
) -> None:
    ours, others = blocks(*one), blocks(*other)
    assert (len(ours), len(others)) == (len(tokens(one)) // BLOCK, len(tokens(other)) // BLOCK)
    for at, (key, another) in enumerate(zip(ours, others, strict=False), 1):
        end = at * BLOCK
        assert (key == another) == (tokens(one)[:end] == tokens(other)[:end])


def test_a_block_may_end_within_a_span() -> None:
    both, one = blocks(Span(1, 6), Span(2, 2)), blocks(Span(1, 8))
    assert both[0] == one[0]
    assert both[1] != one[1]


def test_the_same_text_elsewhere_is_another_block() -> None:
    first, second = blocks(Span(1, BLOCK), Span(1, BLOCK))
    assert first != second
    assert blocks(Span(2, 1), Span(1, BLOCK - 1)) != blocks(Span(1, BLOCK))


def test_a_turn_begins_with_all_that_was_said_and_answered() -> None:
    said = Conversation(BLOCK)
    prompts = [said.turn([Span(number, 5)], Span(-number, 3)) for number in (1, 2, 3)]
    assert [each.token_count for each in prompts] == [5, 13, 21]
    assert said.tokens == 24
    for before, after in pairwise(prompts):
        assert list(after.keys[: len(before.keys)]) == list(before.keys)


def test_another_answer_makes_other_blocks_after_it() -> None:
    def second_turn(answer: int) -> list[bytes]:
        said = Conversation(BLOCK)
        said.turn([Span(1, BLOCK)], Span(answer, BLOCK))
        made = said.turn([Span(2, BLOCK)], Span(-9, 1))
        return list(made.keys[: made.prompt_blocks])

    one, other = second_turn(-1), second_turn(-2)
    assert one[0] == other[0]
    assert not {*one[1:]} & {*other[1:]}


def test_an_answer_that_fills_no_block_shifts_what_comes_after_it() -> None:
    said = Conversation(BLOCK)
    said.turn([Span(1, BLOCK)], Span(-1, 1))
    after = said.turn([Span(2, BLOCK)], Span(-2, 1))
    alone = blocks(Span(1, BLOCK), Span(2, BLOCK))
    assert after.prompt_blocks == 2
    assert after.keys[0] == alone[0]
    assert after.keys[1] != alone[1]


def test_keys_go_on_into_the_answer_but_for_its_last_token() -> None:
    whole = Conversation(BLOCK).turn([Span(1, 4)], Span(-1, 9))
    assert (whole.prompt_blocks, len(whole.keys)) == (1, 3)
    cut = Conversation(BLOCK).turn([Span(1, 4)], Span(-1, 8))
    assert (cut.prompt_blocks, len(cut.keys)) == (1, 2)


def test_a_prompt_of_less_than_a_block_has_no_key() -> None:
    short = Conversation(BLOCK).turn([Span(1, 3)], Span(-1, 1))
    assert (short.prompt_blocks, list(short.keys), short.affinity) == (0, [], b"")


def test_the_router_reads_the_prompts_blocks_alone() -> None:
    made = Conversation(BLOCK).turn([Span(1, 9)], Span(-1, 20))
    assert made.chain(HashScheme(), BLOCK) == list(made.keys[:2])
    assert made.affinity == made.keys[0]
    assert made.text_chain() == []
