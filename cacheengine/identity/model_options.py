"""Which of vLLM's options change what a model computes, beside the model itself."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_CONFIG_FILE: Final = "--config"

_HARMLESS: Final = frozenset(
    {
        # the server and what it tells
        *("--host", "--port", "--uds", "--root-path", "--api-key", "--served-model-name"),
        *("--uvicorn-log-level", "--disable-uvicorn-access-log", "--enable-log-requests"),
        *("--disable-log-stats", "--enable-prompt-tokens-details", "--enable-request-id-headers"),
        *("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--ssl-cert-reqs"),
        *("--allowed-origins", "--allowed-methods", "--allowed-headers", "--allow-credentials"),
        *("--middleware", "--response-role", "--enable-server-load-tracking"),
        # how text becomes tokens, and answers become text: keys are made of tokens
        *("--tokenizer", "--tokenizer-mode", "--chat-template", "--chat-template-content-format"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser"),
        *("--generation-config", "--override-generation-config", "--max-logprobs"),
        # how much at once
        *("--max-num-seqs", "--max-num-batched-tokens", "--gpu-memory-utilization"),
        *("--num-gpu-blocks-override", "--enable-chunked-prefill", "--async-scheduling"),
        *("--scheduling-policy", "--enforce-eager", "--swap-space", "--api-server-count"),
        # known to the layout by themselves
        *("--model", "--dtype", "--block-size", "--prefix-caching-hash-algo"),
        *("--tensor-parallel-size", "--pipeline-parallel-size", "--enable-prefix-caching"),
    }
)
"""Options whose values leave a token's KV what it is."""


def option_of(argument: str) -> str | None:
    """Return the option that vLLM's parser takes an argument for, None if for a value.

    It reads underscores as dashes, and ``--option.key`` as a part of a JSON option.
    """
    if not argument.startswith("--"):
        return None
    return argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-")


def model_options_digest(vllm_args: Sequence[str]) -> str:
    """Return 32 hex digits that change with every option that may change KV; "" without any.

    Quantization, overrides of the model's configuration, its revision and so
    on. What is not known to be harmless counts: a cache lost is slow, a cache
    kept wrongly lies. vLLM's own ``--config`` file counts by its content.
    """
    kept = sorted(group for group in _groups(vllm_args) if option_of(group[0]) not in _HARMLESS)
    if not kept:
        return ""
    content = [[*group, *_config_content(group)] for group in kept]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def _groups(vllm_args: Sequence[str]) -> Iterator[list[str]]:
    """Yield each option with its values, ``--option=value`` split."""
    group: list[str] = []
    for argument in vllm_args:
        if argument.startswith("-") and group:
            yield group
            group = []
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            group += [name.replace("_", "-"), *([value] if equals else [])]
        else:
            group.append(argument)
    if group:
        yield group


def _config_content(group: Sequence[str]) -> list[str]:
    if group[0] != _CONFIG_FILE:
        return []
    # One that cannot be read is vLLM's to refuse.
    paths = [Path(value) for value in group[1:]]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()]
