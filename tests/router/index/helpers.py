"""What tests here share."""

from collections.abc import Sequence

from router.index.holders import slots
from router.index.prefix_index import PrefixIndex
from router.index.prompt_keys import Match

CHAIN = list(range(100, 124))


def check_depths(index: PrefixIndex, keys: Sequence[int], step: int, among: int) -> None:
    """See that for each replica the depth is what its own match says, deepest first."""
    depths = index.depths(keys, step, among)
    assert [each.blocks for each in depths] == sorted(
        (each.blocks for each in depths), reverse=True
    )
    found = [
        (slot, each.gpu_blocks, each.blocks) for each in depths for slot in slots(each.replicas)
    ]
    matches = {slot: index.match(slot, keys, step) for slot in slots(among)}
    assert sorted(found) == [
        (slot, match.gpu_blocks, sum(match.tokens(1, step).values()))
        for slot, match in matches.items()
        if match != Match()
    ]
