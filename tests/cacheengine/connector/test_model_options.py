"""Which options of vLLM are part of a model's identity."""

import dataclasses
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.slow,
    # Importing vLLM and its dependencies warns about their own deprecations.
    pytest.mark.filterwarnings("default"),
]


class HfConfig:
    """Stands where a configuration of transformers does."""

    def __init__(self, rope: str) -> None:
        self._rope = rope

    def to_dict(self) -> dict[str, Any]:
        return {"layers": 2, "rope_parameters": {"full": {"rope_type": self._rope}}}


@dataclasses.dataclass
class ModelConfig:
    """Some of the fields of vLLM's."""

    hf_config: HfConfig
    max_model_len: int = 4096
    seed: int = 0
    trust_remote_code: bool = False
    allow_deprecated_quantization: bool = False
    quantization: str | None = None


def fields(rope: str = "default", **changes: Any) -> Any:
    from cacheengine.connector import model_identity

    config = ModelConfig(HfConfig(rope), **changes)
    return model_identity._fields(config, model_identity._HARMLESS_OF_MODEL)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"max_model_len": 8192},
        {"trust_remote_code": True},
        {"allow_deprecated_quantization": True},
    ],
    ids=str,
)
def test_what_changes_no_kv_is_not_part_of_it(change: dict[str, Any]) -> None:
    assert fields(**change) == fields()


@pytest.mark.parametrize("rope", ["longrope", "su", "dynamic"])
def test_the_length_counts_where_the_rotary_embedding_depends_on_it(rope: str) -> None:
    assert fields(rope, max_model_len=8192) != fields(rope)
    assert fields(rope, seed=1) == fields(rope)


def test_other_options_count() -> None:
    assert fields(quantization="fp8") != fields()
    assert fields("yarn") != fields()
