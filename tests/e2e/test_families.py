"""Which of the field's model families work: each served small, by real vLLM, or refused at start.

`families` has the models. Where vLLM itself cannot serve a family on CPUs, it is not here. One of
each kind of layers is run every time, all of them by ``make test-families``.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.families import CHUNK_TOKENS, CHUNKS, FAMILIES

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

_NOT_TO_BE_JOINED = "Failed to promote local KV cache specs to one unified type."
REFUSED = {
    "mamba2": "this model's layers keep something other than the KV of every token (MambaSpec)",
    # vLLM's own words, before it asks the connector.
    "falcon-h1": _NOT_TO_BE_JOINED,
    "granite-hybrid": _NOT_TO_BE_JOINED,
    "qwen3-next": _NOT_TO_BE_JOINED,
}
"""What those say that the engine cannot keep."""
IN_EVERY_RUN = {"llama", "gemma3", "gpt-oss", "mamba2", "falcon-h1"}
CHOSEN = set(FAMILIES) if os.environ.get("WARMROUTE_FAMILIES") == "all" else IN_EVERY_RUN


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came out for each family, all in one process."""
    directory = tmp_path_factory.mktemp("families")
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.families", str(directory), *sorted(CHOSEN)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"family"')]
    return {line.pop("family"): line for line in lines}


@pytest.mark.parametrize("family", sorted(CHOSEN - REFUSED.keys()))
def test_answers_from_every_tier_are_the_gpus(
    family: str, found: dict[str, dict[str, Any]]
) -> None:
    result = found[family]
    # In bfloat16 vLLM's own hits differ from a cold prefill.
    assert result.pop("same_tokens") or FAMILIES[family].dtype == "bfloat16"
    assert result == {
        "cold_cached": 0,
        "cached": [CHUNKS * CHUNK_TOKENS] * 3,
        "same_to_the_bit": True,
        # Else damaged KV would not show.
        "looks_back": True,
    }


@pytest.mark.parametrize("family", sorted(CHOSEN & REFUSED.keys()))
def test_what_the_engine_cannot_keep_is_refused_at_start(
    family: str, found: dict[str, dict[str, Any]]
) -> None:
    error = found[family]["error"]
    assert REFUSED[family] in error
    assert "\n" not in error
