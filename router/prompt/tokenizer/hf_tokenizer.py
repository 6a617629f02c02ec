"""How transformers 5 builds the backend of the tokenizer classes of most open models.

A plain class takes ``tokenizer.json`` as it is. Others take from it only the
vocabulary, the merges and the post-processor, and put their own normalizer and
pre-tokenizer to them, whatever the file has. Which class it is depends on the
model's type as well as on the name in ``tokenizer_config.json``.
"""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

Json = dict[str, Any]

# Names under which tokenizer_config.json asks for tokenizer.json as it is.
_PLAIN_CLASSES: Final = frozenset(
    {"PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend", "BloomTokenizer"}
)

# Models for which transformers takes tokenizer.json as it is, whatever class is named.
# fmt: off
_PLAIN_MODELS: Final = frozenset({
    "arctic", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "flex_olmo", "glm",
    "glm4", "glm4_moe", "glm4_moe_lite", "gpt_bigcode", "granite", "granitemoe",
    "granitemoehybrid", "granitemoeshared", "hyperclovax", "internlm2", "jamba", "kimi_linear",
    "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mistral3",
    "mixtral", "nemotron", "olmo2", "olmo3", "olmo_hybrid", "persimmon", "phi3", "phimoe",
    "stablelm", "step3p5",
})
# fmt: on

Build = Callable[[Json, Json, Mapping[str, Any]], Tokenizer]
"""(tokenizer.json, tokenizer_config.json, named special tokens) -> the backend, before
tokens are added."""


class Recipe(NamedTuple):
    """How a tokenizer is built."""

    build: Build
    doubt: str | None = None
    """Why transformers may build it in another way, or None."""
    special_tokens: Mapping[str, str] = MappingProxyType({})
    """The class's own, where the configuration names no others."""
    redeclares: bool = False
    """Whether special tokens are declared once more in the end, without their flags."""


def recipe(config: Json, model: Json) -> Recipe:
    """Return how transformers builds the tokenizer of these two configurations."""
    if config.get("auto_map"):
        return Recipe(_plain, "the tokenizer comes with code of its own")
    if config.get("split_special_tokens"):
        return Recipe(_plain, "split_special_tokens is set")
    kind = model.get("model_type")
    name = config.get("tokenizer_class") or model.get("tokenizer_class")
    plain_name = str(name).removesuffix("Fast")
    if kind == "qwen2":
        plain_name = "Qwen2Tokenizer"  # whatever its configuration says
    elif kind in _PLAIN_MODELS or plain_name in _PLAIN_CLASSES or (not name and kind == "llama"):
        return Recipe(_plain)
    if plain_name in _RECIPES:
        return _RECIPES[plain_name]
    return Recipe(_plain, f"{name or 'a tokenizer without a class'} is not one known here")


def _plain(description: Json, config: Json, named: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(description))


def _rebuilt(description: Json, **model: Any) -> Tokenizer:
    """Return a tokenizer with this vocabulary and post-processor only."""
    vocabulary = description["model"]
    if vocabulary.get("type") != "BPE":
        raise ValueError(f"a {vocabulary.get('type')} where a BPE is expected")
    own = {key: vocabulary[key] for key in ("type", "vocab", "merges")}
    without: Json = {"normalizer": None, "pre_tokenizer": None, "decoder": None, "added_tokens": []}
    return Tokenizer.from_str(json.dumps({**description, **without, "model": {**own, **model}}))


_QWEN2_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _qwen2(description: Json, config: Json, named: Mapping[str, Any]) -> Tokenizer:
    tokenizer = _rebuilt(description, continuing_subword_prefix="", end_of_word_suffix="")
    tokenizer.normalizer = normalizers.NFC()
    prefix = bool(config.get("add_prefix_space"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
    )
    return tokenizer


def _llama(description: Json, config: Json, named: Mapping[str, Any]) -> Tokenizer:
    tokenizer = _rebuilt(description, fuse_unk=True, byte_fallback=True)
    prefix = config.get("add_prefix_space")
    scheme = "never" if prefix is not None and not prefix else "first"
    if scheme == "first" and config.get("legacy"):
        scheme = "always"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme=scheme, split=False
    )
    return tokenizer


def _gpt2(description: Json, config: Json, named: Mapping[str, Any]) -> Tokenizer:
    tokenizer = _rebuilt(description, continuing_subword_prefix="", end_of_word_suffix="")
    prefix = bool(config.get("add_prefix_space"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return tokenizer


def _gemma(description: Json, config: Json, named: Mapping[str, Any]) -> Tokenizer:
    tokenizer = _rebuilt(
        description, fuse_unk=True, byte_fallback=True, unk_token=str(named["unk_token"])
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        pattern=" ", behavior="merged_with_previous", invert=False
    )
    return tokenizer


_END: Final = "<|endoftext|>"
_RECIPES: Final[Mapping[str, Recipe]] = {
    "Qwen2Tokenizer": Recipe(
        _qwen2,
        special_tokens={"unk_token": _END, "eos_token": _END, "pad_token": _END},
        redeclares=True,
    ),
    "LlamaTokenizer": Recipe(
        _llama,
        special_tokens={"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    ),
    "GPT2Tokenizer": Recipe(
        _gpt2,
        special_tokens={"unk_token": _END, "bos_token": _END, "eos_token": _END},
    ),
    "GemmaTokenizer": Recipe(
        _gemma,
        special_tokens={
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
}
