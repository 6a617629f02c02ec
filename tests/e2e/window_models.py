"""The small model with attention that does not reach back to the beginning.

The weights stay what they are: which tokens a layer looks at stands in
``config.json`` alone.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from bench.replica.model import SMALL


def windowed(model_dir: Path, target: Path, *, window_tokens: int) -> Path:
    """Every layer looks back ``window_tokens``, as in Mistral 7B: one KV group, a sliding one."""
    return _variant(
        model_dir,
        target,
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        sliding_window=window_tokens,
    )


def hybrid(model_dir: Path, target: Path, *, window_tokens: int) -> Path:
    """Every second layer has a window, the others have none: several KV groups."""
    kinds = ["sliding_attention", "full_attention"]
    return _variant(
        model_dir,
        target,
        layer_types=[kinds[layer % 2] for layer in range(SMALL.layers)],
        sliding_window=window_tokens,
    )


def _variant(model_dir: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(model_dir, target, copy_function=_link)
    config = target / "config.json"
    settings = json.loads(config.read_text()) | changes
    config.unlink()
    config.write_text(json.dumps(settings))
    return target


def _link(source: str, copy: str) -> None:
    Path(copy).symlink_to(source)
