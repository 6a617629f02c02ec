"""What makes KV of two replicas the same: layout, weights, and options of the model.

`ChunkLayout` is the size and shape of a chunk's bytes; `weights_fingerprint` and
`model_options_digest` tell models apart whose names are equal. Chunks are only loaded,
copied or fetched where all three agree.

Called by connector, engine, launch and simulator. Imports nothing of the engine.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

_FORMAT: Final = 1
"""Raised when the bytes of a chunk change their meaning for equal layouts."""


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """The meaning of a chunk's bytes: the model they are KV of, and their order.

    Two engines may exchange chunks exactly when their layouts are equal; the
    disk tier keeps each layout in a directory of its own, named `fingerprint`.
    """

    model: str
    """vLLM's ``--model``: a path or a name."""
    dtype: str
    block_tokens: int
    chunk_tokens: int
    chunk_bytes: int
    """Payload of one chunk: one row of the pool, all layers and ranks."""
    parallel: str = ""
    """How ranks share a row (tensor, pipeline, context parallel sizes)."""
    hash_algorithm: str = "sha256"
    hash_seed: str = ""
    kv_layout: str = ""
    """vLLM's name for the order of a page's bytes, and the platform."""
    weights: str = ""
    """Identity of the weights behind ``model`` (`weights_fingerprint`),
    so that a model replaced in place does not meet its predecessor's KV."""
    model_options: str = ""
    """Digest of vLLM's options that change the model's KV."""
    lossy: str = ""
    """Name of the remote tier's serde if it is not exact: chunks that come back
    through it must never be taken, from disk or by a peer, for exact ones."""

    def __post_init__(self) -> None:
        for name in ("block_tokens", "chunk_tokens", "chunk_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.chunk_tokens % self.block_tokens:
            raise ValueError(
                f"chunk_size is {self.chunk_tokens} tokens, not a multiple of vLLM's block "
                f"size of {self.block_tokens}; set chunk_size to a multiple of it"
            )

    def fingerprint(self) -> str:
        """Return 32 hex digits, equal for equal layouts only."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


_SMALL_FILE_BYTES: Final = 1 << 20


def weights_fingerprint(model: str) -> str:
    """Return 32 hex digits that change when the files of a local model change.

    Covers every file directly in the directory: name and size of each,
    content of the small ones (configuration), modification time of the large
    ones (weights). Copying a model may change it, and then costs a cold
    cache; replacing one in place must change it. Returns "" when ``model`` is
    not a local directory: then the name alone says which weights are meant.
    """
    directory = Path(model)
    if not directory.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if not path.is_file():
            continue
        stat = path.stat()
        digest.update(f"{path.name}\0{stat.st_size}\0".encode())
        if stat.st_size <= _SMALL_FILE_BYTES:
            digest.update(path.read_bytes())
        else:
            digest.update(str(stat.st_mtime_ns).encode())
    return digest.hexdigest()[:32]


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
