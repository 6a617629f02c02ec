"""A replica whose tokens differ from the router's: prompts are matched by text there alone."""

import pytest

from router.fleet.fleet import Fleet
from router.index.prompt_keys import KvTier
from tests.router.fleet.helpers import blocks, make_fleet, place, stored
from tests.router.prompt.prompts_given import GivenPrompt

PROMPT = GivenPrompt(range(1600), "a" * 6400)


@pytest.fixture
def fleet() -> Fleet:
    made = make_fleet(2)
    made.match_by_text({"r1"})
    return made


def held(fleet: Fleet) -> dict[str, int]:
    found = place(fleet, PROMPT).candidates
    return {each.replica_id: sum(each.matched_tokens.values()) for each in found}


def test_what_was_sent_there_is_found_by_its_text(fleet: Fleet) -> None:
    fleet.start(place(fleet, PROMPT, exclude=("r0",)), 0.0)
    assert held(fleet)["r0"] == 0
    assert held(fleet)["r1"] > 1000


def test_keys_of_the_routers_tokens_say_nothing_about_it(fleet: Fleet) -> None:
    for name in ("r0", "r1"):
        stored(fleet, name, KvTier.GPU, blocks(PROMPT))
    assert held(fleet) == {"r0": 1600, "r1": 0}


def test_it_gives_no_chunks_to_those_that_are_matched_by_tokens(fleet: Fleet) -> None:
    fleet.start(place(fleet, PROMPT, exclude=("r0",)), 0.0)
    candidates = place(fleet, PROMPT).candidates
    assert [each.source for each in candidates] == [None] * len(candidates)


def test_it_is_matched_by_tokens_again_when_they_agree(fleet: Fleet) -> None:
    stored(fleet, "r1", KvTier.GPU, blocks(PROMPT))
    fleet.match_by_text(set())
    assert held(fleet) == {"r0": 0, "r1": 1600}
