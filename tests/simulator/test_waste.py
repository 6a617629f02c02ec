"""`warmroute waste` in front of simulated replicas: planted mistakes are named, with tokens."""

from collections.abc import Iterator

import pytest

from bench.replica.tiers import wait_until
from tests.router.waste.planted import Planted, access, of_key, report
from tests.simulator.fleet_process import Fleet, prompt, routing, simulating

BLOCK = 64
SIZES = ["--gpu-tokens", "8192", "--cpu-tokens", "4096", "--disk-tokens", "0"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with (
        simulating("--replicas", "1", "--speed", "20", *SIZES) as (process, where),
        routing(where, tmp_path_factory.mktemp("router"), access=access()) as router,
    ):
        yield Fleet(where, router)
        assert process.poll() is None


def test_planted_mistakes_are_named_with_their_tokens(fleet: Fleet) -> None:
    replica = fleet.where["replicas"][0]["url"]

    def evict() -> None:
        for seed in range(4):
            fleet.ask(prompt(seed), base=replica)
        wait_until("it has left the caches", lambda: not held())

    planted = Planted(fleet.router, "sim")
    history = planted.history(6)[:4]

    def held() -> int:
        return sum(fleet.explained_chat(history)["matched_tokens"].values())

    stamp, salt, sound = planted.stamp(), planted.salt(), planted.sound()
    cut, kept = planted.cut()
    ram = planted.ram(evict)
    shown, text = report(fleet.router)
    for agent in (stamp, salt, cut, ram):
        assert of_key(shown, agent.key)["computed_tokens"] == agent.computed
        assert shown["unreported_tokens"] == 0
    causes = {each: of_key(shown, each)["causes"] for each in ("stamp", "salt", "cut", "ram")}
    for agent, cause, lost in (
        (stamp, "changed", stamp.lost(BLOCK)),
        (salt, "declined", salt.lost(BLOCK)),
        (cut, "changed", kept // BLOCK * BLOCK - cut.cached[-1]),
        (ram, "evicted", ram.lost(BLOCK)),
    ):
        found = causes[agent.key][cause]["tokens"]
        assert abs(found - lost) <= max(BLOCK, 0.02 * agent.computed), (agent.key, found, lost)
    assert not {"changed", "evicted", "elsewhere"} & of_key(shown, "sound")["causes"].keys()
    assert sound.computed
    flat = " ".join(text.split())
    for words in (
        "the key 'stamp' sends something that changes near the beginning of messages[0].content",
        "the key 'cut' sends histories whose beginnings were cut",
        "the key 'salt' sends prompts of one session with changing salts",
        "the key 'ram' sends prompts whose KV had left the",
    ):
        assert words in flat, text
