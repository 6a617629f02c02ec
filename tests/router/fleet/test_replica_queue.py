"""How long a replica's queue is thought to be, and what puts that right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.replica_queue import KvNeed, ReplicaQueue


def test_a_queue_queues_one_prefill_behind_another() -> None:
    queue = ReplicaQueue()
    queue.join(2.0, 10.0)
    assert queue.wait_s(10.0) == pytest.approx(2.0)
    queue.join(3.0, 11.0)
    assert queue.wait_s(11.0) == pytest.approx(4.0)
    assert queue.wait_s(20.0) == 0.0


def test_an_empty_queue_has_no_queue_whatever_was_expected() -> None:
    queue = ReplicaQueue()
    token = queue.join(50.0, 0.0)
    queue.leave(token, 1.0)
    assert queue.wait_s(1.0) == 0.0


def test_who_ends_early_lets_those_behind_come_earlier_once() -> None:
    queue = ReplicaQueue()
    first, second, _third = (queue.join(10.0, 0.0) for _ in range(3))
    queue.leave(first, 4.0)  # 6 s early: the rest is expected at 14 and 24
    assert queue.wait_s(4.0) == pytest.approx(20.0)
    queue.leave(second, 14.0)  # on its new time
    assert queue.wait_s(14.0) == pytest.approx(10.0)


def test_who_ends_late_makes_those_behind_come_later() -> None:
    queue = ReplicaQueue()
    first, second = queue.join(1.0, 0.0), queue.join(2.0, 0.0)
    assert queue.wait_s(5.0) == 0.0, "by the schedule both have been computed"
    queue.leave(first, 5.0)
    assert queue.wait_s(5.0) == pytest.approx(2.0)
    queue.leave(second, 7.0)
    assert queue.wait_s(7.0) == 0.0


def test_who_was_overtaken_no_longer_counts() -> None:
    """An answer lost on its way holds nobody up: prefills end in their order."""
    queue = ReplicaQueue()
    lost, seen, _ = (queue.join(10.0, 0.0) for _ in range(3))
    queue.leave(seen, 20.0)
    assert queue.wait_s(20.0) == pytest.approx(10.0)
    queue.leave(lost, 25.0)
    assert queue.wait_s(25.0) == pytest.approx(5.0), "it told nothing new"


def test_who_is_overtaken_before_its_time_is_still_to_be_computed() -> None:
    """It waits for KV from disk, or was not sent yet: the replica let another go first."""
    queue = ReplicaQueue()
    slow, quick = queue.join(10.0, 0.0), queue.join(0.5, 0.0)
    queue.leave(quick, 1.0)
    assert queue.wait_s(1.0) == pytest.approx(10.0)
    queue.leave(slow, 11.0)
    assert queue.wait_s(11.0) == 0.0


def test_an_end_that_was_not_seen_when_it_came_is_no_news() -> None:
    """Answers that are not streamed begin with their last token."""
    queue = ReplicaQueue()
    plain, _ = queue.join(1.0, 0.0), queue.join(10.0, 0.0)
    queue.leave(plain, 8.0, just_now=False)
    assert queue.wait_s(8.0) == pytest.approx(3.0), "the other is far on, not at its start"
    early, _ = queue.join(5.0, 8.0), queue.join(1.0, 8.0)
    queue.leave(early, 9.0, just_now=False)
    assert queue.wait_s(9.0) == pytest.approx(8.0), "the long one is not due: it may wait for KV"


@pytest.mark.parametrize(("given_up", "left_s"), [(0, 6.0), (1, 7.0), (2, 9.0)])
def test_what_is_given_up_takes_what_was_left_of_it(given_up: int, left_s: float) -> None:
    """Of 6, 4 and 2 seconds, one of which is over."""
    queue = ReplicaQueue()
    tokens = [queue.join(work_s, 0.0) for work_s in (6.0, 4.0, 2.0)]
    assert queue.wait_s(1.0) == pytest.approx(11.0)
    queue.end(tokens[given_up], 1.0)
    assert queue.wait_s(1.0) == pytest.approx(left_s)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "plain", "give up"]),
            st.floats(0, 10),
            st.floats(0, 5),
            st.integers(0, 9),
        ),
        max_size=60,
    )
)
def test_a_queue_is_empty_when_all_have_left(steps: list[tuple[str, float, float, int]]) -> None:
    """In whatever order they go; until then it is never longer than what has joined."""
    queue, now_s = ReplicaQueue(), 0.0
    waiting: dict[int, float] = {}
    for what, work_s, pause_s, which in steps:
        now_s += pause_s
        if what == "join" or not waiting:
            waiting[queue.join(work_s, now_s)] = work_s
        else:
            token = list(waiting)[which % len(waiting)]
            del waiting[token]
            if what == "give up":
                queue.end(token, now_s)
            else:
                queue.leave(token, now_s, just_now=what == "leave")
        assert 0 <= queue.wait_s(now_s) <= sum(waiting.values()) + 1e-6
    for token in waiting:
        queue.leave(token, now_s)
    assert queue.wait_s(now_s) <= 1e-6


# --- KV memory


def prompt_of(tokens: int, first_key: int = 0) -> KvNeed:
    """Return a prompt in parts of 100 tokens; equal keys are equal parts."""
    parts = range(first_key, first_key + tokens // 100)
    return KvNeed(keys=tuple(parts), tokens_per_key=100, tokens=tokens)


def decoding(queue: ReplicaQueue, *prompts: KvNeed) -> list[int]:
    """Let prompts be computed in no time; return their tokens."""
    queue_tokens = [queue.join(0.0, 0.0, kv=kv) for kv in prompts]
    for each in queue_tokens:
        queue.leave(each, 0.0)
    return queue_tokens


def test_a_prompt_waits_for_the_memory_that_answers_hold() -> None:
    queue = ReplicaQueue()
    queue.set_capacity(1000)
    queue.set_answer_s(12.0)
    first, second, _ = decoding(queue, *(prompt_of(300, 1000 * at) for at in range(3)))
    newcomer = prompt_of(400, 9000)
    assert queue.wait_s(0.0, prompt_of(100, 9000)) == 0.0, "there is room for as much"
    assert queue.wait_s(0.0, newcomer) == pytest.approx(4.0), "of three equal answers one ends"
    assert queue.wait_s(0.0, prompt_of(600, 9000)) == pytest.approx(4.0 + 6.0)
    queue.end(first, 1.0)
    assert queue.wait_s(1.0, newcomer) == 0.0
    queue.end(second, 1.0)
    assert queue.wait_s(1.0, prompt_of(700, 9000)) == 0.0


def test_requests_share_the_memory_of_equal_beginnings() -> None:
    """A burst of one long prompt holds it once."""
    queue = ReplicaQueue()
    queue.set_capacity(1000)
    queue.set_answer_s(10.0)
    burst = decoding(queue, *[prompt_of(900)] * 20)
    assert queue.wait_s(0.0, prompt_of(900)) == 0.0
    assert queue.wait_s(0.0, prompt_of(1000)) == 0.0, "a hundred tokens are its own"
    assert queue.wait_s(0.0, prompt_of(200, 5000)) > 0.0
    for each in burst:
        queue.end(each, 0.0)
    assert queue.wait_s(0.0, prompt_of(1000, 5000)) == 0.0


def test_prefills_in_the_queue_take_memory_in_their_turn() -> None:
    queue = ReplicaQueue()
    queue.set_capacity(1000)
    queue.set_answer_s(10.0)
    queue.join(2.0, 0.0, kv=prompt_of(800, 1000))
    queue.join(1.0, 0.0, kv=prompt_of(800, 2000))
    # The second begins when the first one's answer has ended, at 12; its own ends at 23.
    assert queue.wait_s(0.0) == pytest.approx(13.0)
    assert queue.wait_s(0.0, prompt_of(800, 3000)) == pytest.approx(23.0)


def test_a_prompt_that_never_fits_waits_for_all_and_no_longer() -> None:
    queue = ReplicaQueue()
    queue.set_capacity(1000)
    queue.set_answer_s(10.0)
    decoding(queue, prompt_of(500, 1000))
    assert queue.wait_s(0.0, prompt_of(5000, 9000)) == pytest.approx(10.0)


def test_without_a_known_capacity_memory_never_binds() -> None:
    queue = ReplicaQueue()
    queue.set_answer_s(10.0)
    decoding(queue, *(prompt_of(10**6, 10**5 * at) for at in range(3)))
    assert queue.wait_s(0.0, prompt_of(10**6, 10**8)) == 0.0


def test_a_request_whose_kv_comes_later_is_overtaken() -> None:
    queue = ReplicaQueue()
    late = queue.join(5.0, 0.0, ready_s=3.0)
    assert queue.wait_s(0.0) == 0.0
    early = queue.join(1.0, 0.0)
    assert (queue.end_s(early, 0.0), queue.end_s(late, 0.0)) == (1.0, 8.0)
    assert queue.wait_s(0.0) == pytest.approx(1.0)
    assert queue.wait_s(2.9) == 0.0
    assert queue.wait_s(3.0) == pytest.approx(5.0), "its KV is there: it is computed"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "end"]),
            st.integers(0, 5),
            st.floats(0.0, 2.0),
            st.floats(0.0, 1.0),
        ),
        max_size=30,
    )
)
def test_memory_that_never_binds_changes_nothing(
    steps: list[tuple[str, int, float, float]],
) -> None:
    """What is not told and what is more than enough are planned by different code."""
    untold, ample = ReplicaQueue(), ReplicaQueue()
    ample.set_capacity(1e12)
    now_s, tokens = 0.0, [0]
    for what, which, seconds, later_s in steps:
        now_s += later_s
        for queue in (untold, ample):
            if what == "join":
                ready_s = now_s + seconds if which == 0 else 0.0
                kv = KvNeed(keys=tuple(range(which)), tokens_per_key=16, tokens=16 * which + 3)
                token = queue.join(seconds, now_s, kv=kv, ready_s=ready_s)
            elif what == "leave":
                queue.leave(tokens[which % len(tokens)], now_s)
            else:
                queue.end(tokens[which % len(tokens)], now_s)
        if what == "join":
            tokens.append(token)
        assert untold.wait_s(now_s) == ample.wait_s(now_s)
        assert [untold.end_s(each, now_s) for each in tokens] == [
            ample.end_s(each, now_s) for each in tokens
        ]
