"""The checks of answers find every wrong byte, and accept every right answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.soak.answers import (
    Answers,
    End,
    Expected,
    StreamCheck,
    WrongAnswerError,
    check_whole,
)
from simulator.openai_prompts import NUM_WORDS, text_of
from simulator.openai_server import DONE, CompletionBody

ERROR = b'data: {"error":{"message":"the replica\'s answer broke off"}}\n\n'
BODY = {"messages": [{"role": "user", "content": text_of(range(100))}], "max_tokens": 12}


def expected(*, is_chat: bool = True, name: str = "one") -> Expected:
    body = BODY if is_chat else {"prompt": text_of(range(100)), "max_tokens": 12}
    return Answers().expected(name, body)


def events(wanted: Expected) -> list[bytes]:
    """Return the events of a simulated replica's stream."""
    ids = [_id_of(word) for word in wanted.text.split()]
    answer = CompletionBody(
        request_id=wanted.request_id,
        model="sim",
        is_chat=wanted.is_chat,
        prompt_tokens=wanted.prompt_tokens,
    )
    last = len(ids) - 1
    return [
        *([answer.role()] if wanted.is_chat else []),
        *(
            answer.chunk([each], is_first=at == 0, is_last=at == last)
            for at, each in enumerate(ids)
        ),
        answer.usage_event(len(ids), 0),
        DONE,
    ]


def _id_of(word: str) -> int:
    return text_of(range(NUM_WORDS)).split().index(word)


def whole(wanted: Expected) -> bytes:
    answer = CompletionBody(
        request_id=wanted.request_id,
        model="sim",
        is_chat=wanted.is_chat,
        prompt_tokens=wanted.prompt_tokens,
    )
    return answer.whole([_id_of(word) for word in wanted.text.split()], 0)


def end_of(wanted: Expected, data: bytes, *, piece: int = 1000) -> End:
    check = StreamCheck(wanted)
    for at in range(0, len(data), piece):
        check.feed(data[at : at + piece])
    return check.end()


@pytest.mark.parametrize("is_chat", [True, False])
@given(piece=st.integers(1, 400))
def test_a_whole_stream_is_right_however_it_is_cut_into_pieces(is_chat: bool, piece: int) -> None:
    wanted = expected(is_chat=is_chat)
    assert end_of(wanted, b"".join(events(wanted)), piece=piece) is End.WHOLE
    check_whole(wanted, whole(wanted))


def test_answers_to_different_prompts_differ() -> None:
    other = Answers().expected("one", {"prompt": text_of(range(1, 101)), "max_tokens": 12})
    assert other.text != expected(is_chat=False).text


@given(at=st.data())
def test_a_lost_doubled_or_foreign_event_is_wrong(at: st.DataObject) -> None:
    wanted, foreign = expected(), expected(name="two")
    stream = events(wanted)
    index = at.draw(st.integers(1, len(stream) - 3))
    for changed in (
        [*stream[:index], *stream[index + 1 :]],
        [*stream[: index + 1], *stream[index:]],
        [*stream[:index], events(foreign)[index], *stream[index + 1 :]],
        [*stream, stream[index]],
    ):
        with pytest.raises(WrongAnswerError):
            end_of(wanted, b"".join(changed))


@given(at=st.data())
def test_a_changed_letter_is_wrong(at: st.DataObject) -> None:
    wanted = expected()
    stream = events(wanted)
    index = at.draw(st.integers(1, len(stream) - 3))
    word = wanted.text.split()[index - 1].encode()
    changed = stream[index].replace(word, b"x" + word[1:] if word[:1] != b"x" else b"b" + word[1:])
    with pytest.raises(WrongAnswerError):
        end_of(wanted, b"".join([*stream[:index], changed, *stream[index + 1 :]]))
    with pytest.raises(WrongAnswerError):
        check_whole(wanted, whole(wanted).replace(word, b"xxxx", 1))


@given(at=st.data())
def test_a_stream_that_breaks_off_is_an_error_or_short_and_never_whole(at: st.DataObject) -> None:
    wanted = expected()
    stream = b"".join(events(wanted))
    cut = stream[: at.draw(st.integers(0, len(stream) - 1))]
    assert end_of(wanted, cut) is End.SHORT
    gap = b"" if cut.endswith(b"\n\n") or not cut else b"\n\n"
    assert end_of(wanted, cut + gap + ERROR) is End.ERROR


@given(piece=st.integers(1, 400))
def test_comments_are_no_content_and_change_no_answer(piece: int) -> None:
    wanted, comment = expected(), b": keep-alive\n\n"
    stream = comment + b"".join(each + comment for each in events(wanted))
    assert end_of(wanted, stream, piece=piece) is End.WHOLE
    check = StreamCheck(wanted)
    check.feed(2 * comment + ERROR)
    assert check.end() is End.ERROR and not check.has_content
    check = StreamCheck(wanted)
    check.feed(comment + events(wanted)[0])
    assert check.has_content


def test_a_comment_cannot_hide_an_event_that_was_cut_in_half() -> None:
    wanted = expected()
    stream = events(wanted)
    cut = stream[0] + stream[1][:-20] + b"\n\n: keep-alive\n\n"
    with pytest.raises(WrongAnswerError, match="in half"):
        end_of(wanted, cut + b"".join(stream[2:]))


def test_done_alone_may_follow_an_error_and_once() -> None:
    wanted = expected()
    stream = events(wanted)
    assert end_of(wanted, stream[0] + ERROR + DONE) is End.ERROR
    for more in (stream[1], ERROR, 2 * DONE):
        with pytest.raises(WrongAnswerError, match="after the end"):
            end_of(wanted, stream[0] + ERROR + more)


def test_nothing_may_follow_an_event_that_was_cut_in_half_but_an_error() -> None:
    wanted = expected()
    stream = events(wanted)
    with pytest.raises(WrongAnswerError, match="in half"):
        end_of(wanted, stream[0] + stream[1][:-20] + b"\n\n" + b"".join(stream[2:]))


def test_an_answer_that_ends_before_its_text_does_is_wrong() -> None:
    wanted = expected()
    stream = events(wanted)
    with pytest.raises(WrongAnswerError, match=r"\[DONE\]"):
        end_of(wanted, b"".join(stream[:5]) + DONE)
    with pytest.raises(WrongAnswerError, match="usage"):
        end_of(wanted, b"".join([*stream[:-2], DONE]))
