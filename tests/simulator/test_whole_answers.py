"""Answers that are not streamed, in front of a router: they hold nobody up.

One simulated replica and a real router, as processes.
"""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bench.replica.tiers import call, wait_until
from simulator.openai_prompts import text_of
from tests.simulator.fleet_process import Fleet, prompt, routing, simulating

SIZES = ["--gpu-tokens", "65536", "--cpu-tokens", "32768", "--disk-tokens", "0", "--speed", "2"]
LONG_TOKENS = 16_000
"""A prefill of two seconds; of one by the clock, which is long enough to be held."""
DECODED_TOKENS = 8_000
"""An answer of 50 seconds."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with (
        simulating("--replicas", "1", *SIZES) as (_, where),
        routing(where, tmp_path) as router,
    ):
        yield Fleet(where, router)


def begin(fleet: Fleet, ids: list[int], *, stream: bool) -> http.client.HTTPConnection:
    """Send a request with a long answer, and read none of it."""
    connection = http.client.HTTPConnection(urlsplit(fleet.router).netloc, timeout=60)
    body = {"prompt": text_of(ids), "max_tokens": DECODED_TOKENS, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body))
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_long_prompt_does_not_wait_for_the_end_of_an_answer_whose_kv_was_loaded(
    fleet: Fleet, *, stream: bool
) -> None:
    """It was held for all of it, before a replica that could have begun."""
    loaded = prompt(1, 8192)
    fleet.ask(loaded)
    call(f"{fleet.url('sim1')}/reset_prefix_cache", {})
    wait_until("only CPU RAM has it", lambda: fleet.matched(loaded, "cpu") == 8192)
    with closing(begin(fleet, loaded, stream=stream)):
        wait_until("it is there", lambda: fleet.truth("sim1")["requests"] == 2)
        fleet.ask(prompt(2, LONG_TOKENS), max_tokens=1, stream=True)
        truth = fleet.truth("sim1")
    assert (truth["running"], truth["finished"]) == (1, 2), "the answer before is under way"
    assert truth["cached_tokens"]["cpu"] == 8192
