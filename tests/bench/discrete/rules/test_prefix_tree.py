"""The tree of sent prompts, against plain sets."""

import random

from bench.discrete.rules.cache_aware import PrefixTree


def test_a_prompt_is_found_by_what_it_shares_with_those_before() -> None:
    tree = PrefixTree(2, max_blocks=100)
    tree.insert([1, 2, 3], 0)
    tree.insert([1, 2, 4, 5], 1)
    assert tree.depth([1, 2, 3, 6], 0) == 3
    assert tree.depth([1, 2, 3, 6], 1) == 2
    assert tree.depth([1, 2, 3, 6]) == 3
    assert tree.depth([7]) == 0


def test_a_shared_block_is_whose_it_was_first() -> None:
    tree = PrefixTree(3, max_blocks=100)
    tree.insert([1, 2], 2)
    tree.insert([1, 2, 3], 0)
    assert tree.first_sent(2) == 2
    assert tree.first_sent(3) == 0


def test_a_cut_takes_the_least_recent_ends_of_a_part_that_is_over_its_bound() -> None:
    tree = PrefixTree(2, max_blocks=4)
    tree.insert([1, 2, 3], 0)
    tree.insert([1, 2, 4], 0)
    tree.insert([5], 0)
    tree.insert([1, 2, 3], 0)
    tree.insert([1, 2, 4, 6], 1)
    tree.cut()
    assert tree.depth([1, 2, 4], 0) == 2
    assert tree.depth([1, 2, 3], 0) == 3
    assert tree.depth([5], 0) == 1
    assert tree.depth([1, 2, 4, 6], 1) == 4


def test_a_block_that_was_cut_where_it_was_first_is_whose_it_still_is() -> None:
    tree = PrefixTree(3, max_blocks=3)
    for replica in (2, 0, 1):
        tree.insert([1, 2, 3], replica)
    tree.insert([4, 5, 6], 2)
    assert tree.first_sent(1) == 2
    tree.cut()
    assert tree.depth([1, 2, 3], 2) == 0
    assert tree.first_sent(1) == 0


def test_what_is_left_of_a_prompt_that_was_cut_goes_next() -> None:
    tree = PrefixTree(1, max_blocks=3)
    tree.insert([1, 2, 3, 4], 0)
    tree.cut()
    assert tree.depth([1, 2, 3, 4]) == 3
    tree.insert([5, 6], 0)
    tree.cut()
    assert tree.depth([1, 2, 3]) == 1
    assert tree.depth([5, 6]) == 2


def _grown(prompts: list[list[int]], chooser: random.Random, number: int) -> list[int]:
    """Return a prompt that continues an earlier one from some point, or a new one."""
    base = chooser.choice(prompts) if prompts else []
    keep = base[: chooser.randrange(len(base) + 1)]
    return keep + [number * 100 + at for at in range(chooser.randrange(1, 6))]


def test_depths_are_those_of_sets_of_blocks() -> None:
    chooser = random.Random(7)
    tree = PrefixTree(3, max_blocks=10_000)
    held: list[set[int]] = [set(), set(), set()]
    prompts: list[list[int]] = []
    for number in range(1, 400):
        prompt = _grown(prompts, chooser, number)
        for replica in range(3):
            expected = next((at for at, b in enumerate(prompt) if b not in held[replica]), -1)
            assert tree.depth(prompt, replica) == (len(prompt) if expected < 0 else expected)
        replica = chooser.randrange(3)
        tree.insert(prompt, replica)
        held[replica].update(prompt)
        prompts.append(prompt)


def test_cuts_keep_each_part_within_its_bound_and_without_gaps() -> None:
    chooser = random.Random(11)
    tree = PrefixTree(2, max_blocks=40)
    prompts: list[list[int]] = []
    for number in range(1, 300):
        prompts.append(_grown(prompts[-20:], chooser, number))
        tree.insert(prompts[-1], chooser.randrange(2))
        if number % 7 == 0:
            tree.cut()
            for replica in range(2):
                assert _held(tree, prompts, replica) <= 40
    tree.cut()
    assert min(_held(tree, prompts, replica) for replica in range(2)) > 30


def _held(tree: PrefixTree, prompts: list[list[int]], replica: int) -> int:
    """Return how many blocks a replica has; each with all before it, else the test fails."""
    held: set[int] = set()
    for prompt in prompts:
        depth = tree.depth(prompt, replica)
        for block in prompt[depth:]:
            assert tree.depth([block], replica) == 0
        held.update(prompt[:depth])
    return len(held)
