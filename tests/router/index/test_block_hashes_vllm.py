"""Salts, adapters and media enter keys, events and the choice of an adapter as in vLLM."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from router.feeds.replica_answers import served_models
from router.index.kv_events import (
    BlocksStored,
    FirstBlocks,
    KvEventReader,
    explains,
    find_shape,
)
from router.index.prompt_keys import KvTier
from router.prompt.prompt_reader import PromptReader
from tests.router.fleet.helpers import make_fleet, place
from tests.router.prompt.helpers import image
from tests.router.prompt.prompts_given import GivenPrompt
from warmroute_common.keys import ALGORITHMS, HashScheme, key64, prompt_extra_keys

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
]

TOKENS = [(i * 7919) % 4096 for i in range(1000)]
ADAPTERS = {"adapter": "/adapters/a", "org/same": "org/same", "image": "/adapters/i"}
SALTS = (None, "pepper")
LORAS = (None, ("adapter", "/adapters/a"), ("org/same", "org/same"))
MEDIA = (None, (0, 50), (100, 50), (112, 16))
CASES: list[dict[str, Any]] = [
    {"tokens": TOKENS, "salt": salt, "lora": lora, "medium": medium}
    for salt in SALTS
    for lora in LORAS
    for medium in MEDIA
]
BODIES: list[dict[str, Any]] = [
    {"model": model, "messages": [{"role": "user", "content": content}]}
    for model in ("base", "adapter", "image")
    for content in ("text", [{"type": "text", "text": "a"}], [image()], [image(), image(b"two")])
]
HYBRIDS = [
    [("full", 16)],
    [("sliding", 16), ("full", 16)],
    [("full", 16), ("sliding", 16)],
    [("full", 16), ("mamba", 160)],
    [("mamba", 160), ("full", 16)],
    [("mamba", 800), ("full", 160)],
    [("sliding", 32), ("full", 16)],
    [("full", 32), ("sliding", 16)],
    [("sliding", 16), ("mamba", 64), ("full", 32)],
]
"""The cache groups of models, in vLLM's order, each with its tokens per block."""
PROMPTS = [TOKENS[:800], TOKENS[:640] + TOKENS[900:]]


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    """What vLLM says, in one process for all algorithms: it takes long to import."""
    question = {
        "algorithms": ALGORITHMS,
        "adapters": ADAPTERS,
        "cases": CASES,
        "bodies": BODIES,
        "hybrids": HYBRIDS,
        "prompts": PROMPTS,
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("vllm_keys.py"))],
        input=json.dumps(question),
        env={**os.environ, "PYTHONHASHSEED": "42", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_keys_are_vllms_up_to_the_first_medium(theirs: dict[str, Any], algorithm: str) -> None:
    scheme = HashScheme(algorithm, "42")
    for case, answer in zip(CASES, theirs["cases"][algorithm], strict=True):
        # From JSON, as in the router: equal strings are not one object there.
        lora = json.loads(json.dumps(case["lora"]))
        every, first = prompt_extra_keys(
            cache_salt=case["salt"], lora=tuple(lora) if lora else None
        )
        before = len(TOKENS) if case["medium"] is None else case["medium"][0]
        ours = scheme.chain(TOKENS[:before], 16, extra_keys=every, first_extra_keys=first)
        keys = [bytes.fromhex(key) for key in answer["keys"]]
        assert keys[: len(ours)] == ours, case
        assert len(keys) == len(TOKENS) // 16
        further = scheme.chain(TOKENS, 16, extra_keys=every, first_extra_keys=first)
        assert not set(keys[len(ours) :]) & set(further[len(ours) :]), case


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_event_shows_the_scheme_or_nothing(theirs: dict[str, Any], algorithm: str) -> None:
    for case, answer in zip(CASES, theirs["cases"][algorithm], strict=True):
        events = KvEventReader().read(0, bytes.fromhex(answer["event"])).events
        *first, stored = events
        assert isinstance(stored, BlocksStored)
        assert stored.keys == [key64(bytes.fromhex(key)) for key in answer["keys"]]
        if case["lora"] or case["medium"]:
            assert first == [], case
            continue
        (shown,) = first
        assert isinstance(shown, FirstBlocks)
        assert shown.cache_salt == case["salt"]
        shape = find_shape(shown, None)
        assert shape is not None
        assert shape.scheme == HashScheme(algorithm, "42")
        assert explains(shape, shown)


def test_the_list_of_models_tells_an_adapters_name_and_path(theirs: dict[str, Any]) -> None:
    served = {each.id: each for each in served_models(theirs["models"])}
    assert served["base"].adapter_path is None
    assert {name: served[name].adapter_path for name in ADAPTERS} == ADAPTERS
    assert {each.root for each in served.values()} == {"/models/base"}


def test_the_adapter_of_a_request_is_the_one_that_vllm_takes(theirs: dict[str, Any]) -> None:
    for body, used in zip(BODIES, theirs["used"], strict=True):
        prompt = PromptReader(None).read_now("/v1/chat/completions", body)
        ours = prompt.lora(ADAPTERS)
        assert (list(ours) if ours else None) == used, body


@pytest.mark.parametrize("groups", HYBRIDS, ids=str)
def test_a_hybrid_models_prompts_are_matched(
    theirs: dict[str, Any], groups: list[tuple[str, int]]
) -> None:
    """Whatever its first event is, and though its blocks may be larger than vLLM's hashes."""
    fleet, reader = make_fleet(1, agents=False), KvEventReader()
    replica = fleet.replicas["r0"]
    for number, message in enumerate(theirs["hybrids"][HYBRIDS.index(groups)]):
        fleet.apply_kv("r0", reader.read(number, bytes.fromhex(message)), 0.0)
        reader.shows_first = not replica.shape_checked
    assert replica.shape_problem is None
    for tokens in PROMPTS:
        whole = len(tokens) // max(size for kind, size in groups if kind == "full")
        matched = place(fleet, GivenPrompt(token_ids=tokens)).matched_tokens
        assert matched == {KvTier.GPU: whole * dict(groups)["full"]}


def test_a_client_cannot_make_blocks_outlive_their_eviction(theirs: dict[str, Any]) -> None:
    """Each report of reused blocks looks like a copy of them; the next answer shows the truth."""
    fleet, reader = make_fleet(1, agents=False), KvEventReader()
    fleet.following_kv("r0")
    believed = []
    for number, (cached_tokens, message) in enumerate(theirs["reported"]):
        decision = place(fleet, GivenPrompt(TOKENS), float(number))
        if number == 4:
            believed.append(decision.matched_tokens)
            ticket = fleet.start(decision, float(number))
            ticket.first_byte(float(number))
            used = {"prompt_tokens": len(TOKENS), "cached_tokens": cached_tokens}
            ticket.finish(float(number), ok=True, **used)
        fleet.apply_kv("r0", reader.read(number, bytes.fromhex(message)), float(number))
        fleet.tick(float(number))
        fleet.tick(float(number))
    believed.append(place(fleet, GivenPrompt(TOKENS), 6.0).matched_tokens)
    assert [cached for cached, _ in theirs["reported"]] == [0, 992, 992, 0, 0, 0]
    assert believed == [{KvTier.GPU: 992}, {}], "wrong once, then corrected"
