"""Small real models, made on the spot: nothing is downloaded.

    python -m bench.replica.model DIRECTORY [--kv-bytes-per-token 131072]

Their words mean nothing; their KV cache, their prefill time and their determinism are real:
bfloat16, a context of 32,768 tokens, a chat template with roles and tools. `SMALL` has 27 million
parameters and 8 KiB of KV a token. `LARGE_KV` has 21 million and 128 KiB, as a model of 8 billion
parameters has.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from bench.replica.text import library_files

VOCAB_SIZE = 4096
CONTEXT_TOKENS = 32_768


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a Llama model."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers, two bytes a number."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SMALL: Final = ModelShape(
    hidden_size=512, intermediate_size=1376, layers=8, heads=8, kv_heads=4, head_dim=64
)
LARGE_KV: Final = ModelShape(
    hidden_size=128, intermediate_size=256, layers=32, heads=8, kv_heads=8, head_dim=128
)
"""The KV of Llama 3 8B (32 layers, 8 KV heads of 128), and next to no other arithmetic: what
moves KV has as much to do as there, what computes it has not."""
SHAPES: Final[Mapping[int, ModelShape]] = {
    each.kv_bytes_per_token: each for each in (SMALL, LARGE_KV)
}
"""By the bytes of KV that a token has."""

SPECIAL_TOKENS = (
    "<|begin|>",
    "<|end|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
)

# Raised when anything that is written changes, so that an older model is made again.
_RECIPE = 1
_SEED = 20_250_101
_TRAINING_BYTES = 4_000_000

# Queries and keys are drawn wide enough that attention picks out single tokens
# of a long context. With the usual 0.02 it averages over thousands, and a
# damaged byte of KV would drown in the rounding instead of changing the answer.
# A narrower model sums over fewer numbers, and is given wider ones.
_ATTENTION_STD = 0.08 * SMALL.hidden_size**0.5
_OTHER_STD = 0.04

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
{{- '<|system|>You may call these tools, one JSON object a call:\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'developer', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role: ' + message.role) }}
{%- endif %}
{{- '<|' + ('system' if message.role == 'developer' else message.role) + '|>' }}
{%- if message.content is string %}{{ message.content }}{% endif %}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
{{- '\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{%- endfor %}
{%- endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""


def make_model(directory: Path, shape: ModelShape = SMALL) -> Path:
    """Make a model in ``directory`` unless it is there already; return the directory.

    Seconds of work, the same weights every time. The directory appears whole
    or not at all; one that holds something else is refused with ValueError.
    """
    stamp = directory / "recipe.json"
    recipe = {"recipe": _RECIPE, "seed": _SEED, "shape": asdict(shape)}
    if stamp.is_file() and json.loads(stamp.read_text()) == recipe:
        return directory
    if directory.exists() and any(directory.iterdir()) and not stamp.exists():
        raise ValueError(f"{directory} is not empty and holds no model of ours: name another")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as made:
        work = Path(made, "model")
        work.mkdir()
        tokenizer = _train_tokenizer()
        _write_tokenizer(work, tokenizer)
        _write_json(work / "config.json", _model_config(shape))
        _write_weights(work / "model.safetensors", shape, _silent_tokens(tokenizer))
        _write_json(work / stamp.name, recipe)
        if directory.exists():
            shutil.rmtree(directory)
        work.rename(directory)
    return directory


def _train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE on the standard library's own text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    begin = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A $B",
        special_tokens=[(begin, tokenizer.token_to_id(begin))],
    )
    return tokenizer


def _training_text() -> Iterator[str]:
    read = 0
    for path in library_files():
        if read > _TRAINING_BYTES:
            return
        text = path.read_text(encoding="utf-8", errors="replace")
        read += len(text)
        yield text


def _write_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    begin, end, pad = SPECIAL_TOKENS[:3]
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": begin,
            "eos_token": end,
            "pad_token": pad,
            "model_max_length": CONTEXT_TOKENS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _model_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def _silent_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that the model shall not say: roles, the end, parts of characters.

    Random weights would otherwise end an answer at a random place, or begin it
    with half a character, which no server streams before the other half.
    """
    decoded = [tokenizer.decode([i], skip_special_tokens=True) for i in range(VOCAB_SIZE)]
    return [i for i, text in enumerate(decoded) if not text.isascii() or not text.strip()]


def _tensor_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield each tensor's name, shape and standard deviation; 0.0 stands for a norm of ones."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention_std = _ATTENTION_STD / hidden**0.5
    yield "model.embed_tokens.weight", (VOCAB_SIZE, hidden), _OTHER_STD
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,), 0.0
        yield prefix + "self_attn.q_proj.weight", (query, hidden), attention_std
        yield prefix + "self_attn.k_proj.weight", (kv, hidden), attention_std
        yield prefix + "self_attn.v_proj.weight", (kv, hidden), _OTHER_STD
        yield prefix + "self_attn.o_proj.weight", (hidden, query), _OTHER_STD
        yield prefix + "post_attention_layernorm.weight", (hidden,), 0.0
        yield prefix + "mlp.gate_proj.weight", (inner, hidden), _OTHER_STD
        yield prefix + "mlp.up_proj.weight", (inner, hidden), _OTHER_STD
        yield prefix + "mlp.down_proj.weight", (hidden, inner), _OTHER_STD
    yield "model.norm.weight", (hidden,), 0.0
    yield "lm_head.weight", (VOCAB_SIZE, hidden), _OTHER_STD


def _draw(
    rng: np.random.Generator, shape: tuple[int, ...], std: float, zero_rows: list[int]
) -> npt.NDArray[np.uint16]:
    """Return a random tensor as the bit patterns of bfloat16."""
    if std == 0.0:
        values = np.ones(shape, dtype=np.float32)
    else:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(std)
    values[zero_rows] = 0.0
    # The upper half of a float32 is a bfloat16, truncated.
    return (values.view(np.uint32) >> 16).astype("<u2")


def _write_weights(path: Path, shape: ModelShape, silent: list[int]) -> None:
    """Write the safetensors file: header length, JSON header, tensors one after the other."""
    shapes = list(_tensor_shapes(shape))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, sizes, _ in shapes:
        end = offset + 2 * int(np.prod(sizes))
        header[name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    rng = np.random.default_rng(_SEED)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name, sizes, std in shapes:
            zero_rows = silent if name == "lm_head.weight" else []
            file.write(_draw(rng, sizes, std, zero_rows).tobytes())


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    """Make the model in the directory named on the command line, and print its path."""
    parser = argparse.ArgumentParser(description="Make a small model.")
    parser.add_argument("directory", type=Path, help="where to put it")
    parser.add_argument(
        "--kv-bytes-per-token",
        type=int,
        choices=SHAPES,
        default=SMALL.kv_bytes_per_token,
        help="which one (default: %(default)s)",
    )
    arguments = parser.parse_args()
    try:
        print(make_model(arguments.directory, SHAPES[arguments.kv_bytes_per_token]))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
