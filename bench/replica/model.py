"""A small real model, made on the spot: nothing is downloaded.

Its words mean nothing; its KV cache, its prefill time and its determinism are
real. 27 million parameters in bfloat16, 8 KiB of KV a token, a context of
32,768 tokens, a chat template with roles and tools.

    python -m bench.replica.model DIRECTORY
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from bench.replica.text import library_files

VOCAB_SIZE = 4096
HIDDEN_SIZE = 512
INTERMEDIATE_SIZE = 1376
LAYERS = 8
HEADS = 8
KV_HEADS = 4
HEAD_DIM = 64
CONTEXT_TOKENS = 32_768

SPECIAL_TOKENS = (
    "<|begin|>",
    "<|end|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
)

# Raised when anything that is written changes, so that an older model is made anew.
_RECIPE = 1
_SEED = 20_250_101
_TRAINING_BYTES = 4_000_000

# Queries and keys are drawn wide enough that attention picks out single tokens
# of a long context. With the usual 0.02 it averages over thousands, and a
# damaged byte of KV would drown in the rounding instead of changing the answer.
_ATTENTION_STD = 0.08
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


def make_model(directory: Path) -> Path:
    """Make the model in ``directory`` unless it is there already; return the directory.

    Seconds of work, the same weights every time. The directory appears whole
    or not at all; one that holds something else is refused with ValueError.
    """
    stamp = directory / "recipe.json"
    recipe = {"recipe": _RECIPE, "seed": _SEED}
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
        _write_json(work / "config.json", _model_config())
        _write_weights(work / "model.safetensors", _silent_tokens(tokenizer))
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


def _model_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
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


def _tensor_shapes() -> Iterator[tuple[str, tuple[int, ...], float]]:
    """Yield each tensor's name, shape and standard deviation; 0.0 stands for a norm of ones."""
    query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    yield "model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN_SIZE), _OTHER_STD
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (HIDDEN_SIZE,), 0.0
        yield prefix + "self_attn.q_proj.weight", (query, HIDDEN_SIZE), _ATTENTION_STD
        yield prefix + "self_attn.k_proj.weight", (kv, HIDDEN_SIZE), _ATTENTION_STD
        yield prefix + "self_attn.v_proj.weight", (kv, HIDDEN_SIZE), _OTHER_STD
        yield prefix + "self_attn.o_proj.weight", (HIDDEN_SIZE, query), _OTHER_STD
        yield prefix + "post_attention_layernorm.weight", (HIDDEN_SIZE,), 0.0
        yield prefix + "mlp.gate_proj.weight", (INTERMEDIATE_SIZE, HIDDEN_SIZE), _OTHER_STD
        yield prefix + "mlp.up_proj.weight", (INTERMEDIATE_SIZE, HIDDEN_SIZE), _OTHER_STD
        yield prefix + "mlp.down_proj.weight", (HIDDEN_SIZE, INTERMEDIATE_SIZE), _OTHER_STD
    yield "model.norm.weight", (HIDDEN_SIZE,), 0.0
    yield "lm_head.weight", (VOCAB_SIZE, HIDDEN_SIZE), _OTHER_STD


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


def _write_weights(path: Path, silent: list[int]) -> None:
    """Write the safetensors file: header length, JSON header, tensors one after the other."""
    shapes = list(_tensor_shapes())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, _ in shapes:
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    rng = np.random.default_rng(_SEED)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name, shape, std in shapes:
            zero_rows = silent if name == "lm_head.weight" else []
            file.write(_draw(rng, shape, std, zero_rows).tobytes())


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    """Make the model in the directory named on the command line, and print its path."""
    parser = argparse.ArgumentParser(description="Make the small test model.")
    parser.add_argument("directory", type=Path, help="where to put it")
    try:
        print(make_model(parser.parse_args().directory))
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
