"""Common beginnings of prompts, compared with plain sets."""

import random

from bench.discrete.rules.rule import ActivePrompts, Expectations, Prompts


def test_the_longest_common_beginning_counts() -> None:
    prompts = Prompts()
    prompts.add(1, [1, 2, 3])
    prompts.add(2, [1, 2, 4, 5])
    assert prompts.shared([1, 2, 4, 5, 6]) == 4
    assert prompts.shared([1, 2, 4]) == 3
    assert prompts.shared([7, 2]) == 0
    assert prompts.shared([]) == 0
    prompts.remove(2)
    assert prompts.shared([1, 2, 4, 5, 6]) == 2


def test_active_blocks_are_counted_once_as_prompts_come_and_go() -> None:
    chooser = random.Random(3)
    active = ActivePrompts()
    flying: dict[int, list[int]] = {}
    for number in range(500):
        base = chooser.choice([*flying.values(), []])
        prompt = base[: chooser.randrange(len(base) + 1)] + [number * 10 + at for at in range(4)]
        union = set().union(*flying.values())
        assert active.blocks == len(union)
        assert active.blocks_with(prompt) == len(union | set(prompt))
        active.add(number, prompt)
        flying[number] = prompt
        if len(flying) > 8:
            ended = chooser.choice(list(flying))
            active.remove(ended, flying.pop(ended))


def test_an_expectation_ends_on_time() -> None:
    expectations = Expectations(2, ttl_s=2.0)
    expectations.sent(1, [1, 2, 3], 10.0)
    expectations.sent(1, [1, 2], 11.0)
    assert expectations.depth(1, [1, 2, 3, 4]) == 3
    assert expectations.depth(0, [1, 2, 3, 4]) == 0
    expectations.expire(12.0)
    assert expectations.depth(1, [1, 2, 3, 4]) == 2
    expectations.expire(13.0)
    assert expectations.depth(1, [1, 2, 3, 4]) == 0
