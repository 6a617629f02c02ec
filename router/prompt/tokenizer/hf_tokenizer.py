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

from tokenizers import Tokenizer

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

_BYTES: Final = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
_CHARACTERS: Final = {"fuse_unk": True, "byte_fallback": True}
_QWEN2_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Recipe(NamedTuple):
    """How a tokenizer is built."""

    parts: Callable[[Json, Mapping[str, Any]], Json] | None = None
    """(tokenizer_config.json, named special tokens) -> the class's own normalizer, pre-tokenizer
    and what describes its model; None takes tokenizer.json as it is."""
    doubt: str | None = None
    """Why transformers may build it in another way, or None."""
    special_tokens: Mapping[str, str] = MappingProxyType({})
    """The class's own, where the configuration names no others."""
    redeclares: bool = False
    """Whether special tokens are declared once more in the end, without their flags."""

    def build(self, description: Json, config: Json, named: Mapping[str, Any]) -> Tokenizer:
        """Return the backend, before tokens are added; ``description`` is tokenizer.json."""
        if self.parts is None:
            return Tokenizer.from_str(json.dumps(description))
        model = description["model"]
        if model.get("type") != "BPE":
            raise ValueError(f"a {model.get('type')} where a BPE is expected")
        parts = self.parts(config, named)
        own = {key: model[key] for key in ("type", "vocab", "merges")} | parts.pop("model")
        made = {**description, "normalizer": None, "decoder": None, "added_tokens": [], **parts}
        return Tokenizer.from_str(json.dumps({**made, "model": own}))


def recipe(config: Json, model: Json) -> Recipe:
    """Return how transformers builds the tokenizer of these two configurations."""
    if config.get("auto_map"):
        return Recipe(doubt="the tokenizer comes with code of its own")
    if config.get("split_special_tokens"):
        return Recipe(doubt="split_special_tokens is set")
    kind = model.get("model_type")
    name = config.get("tokenizer_class") or model.get("tokenizer_class")
    plain_name = str(name).removesuffix("Fast")
    if kind == "qwen2":
        plain_name = "Qwen2Tokenizer"  # whatever its configuration says
    elif kind in _PLAIN_MODELS or plain_name in _PLAIN_CLASSES or (not name and kind == "llama"):
        return Recipe()
    if plain_name in _RECIPES:
        return _RECIPES[plain_name]
    return Recipe(doubt=f"{name or 'a tokenizer without a class'} is not one known here")


def _byte_level(config: Json, *, use_regex: bool) -> Json:
    prefix = bool(config.get("add_prefix_space"))
    made = {"add_prefix_space": prefix, "trim_offsets": True, "use_regex": use_regex}
    return {"type": "ByteLevel", **made}


def _split(pattern: Json, behavior: str) -> Json:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}


def _qwen2(config: Json, named: Mapping[str, Any]) -> Json:
    steps = [_split({"Regex": _QWEN2_PATTERN}, "Isolated"), _byte_level(config, use_regex=False)]
    splitting = {"type": "Sequence", "pretokenizers": steps}
    return {"normalizer": {"type": "NFC"}, "pre_tokenizer": splitting, "model": _BYTES}


def _llama(config: Json, named: Mapping[str, Any]) -> Json:
    scheme = "always" if config.get("legacy") else "first"
    if config.get("add_prefix_space") is False:
        scheme = "never"
    splitting = {"replacement": "▁", "prepend_scheme": scheme, "split": False}
    return {"pre_tokenizer": {"type": "Metaspace", **splitting}, "model": _CHARACTERS}


def _gpt2(config: Json, named: Mapping[str, Any]) -> Json:
    return {"pre_tokenizer": _byte_level(config, use_regex=True), "model": _BYTES}


def _gemma(config: Json, named: Mapping[str, Any]) -> Json:
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": _split({"String": " "}, "MergedWithPrevious"),
        "model": {**_CHARACTERS, "unk_token": str(named["unk_token"])},
    }


_END: Final = "<|endoftext|>"
_RECIPES: Final[Mapping[str, Recipe]] = {
    "Qwen2Tokenizer": Recipe(
        _qwen2,
        special_tokens={"unk_token": _END, "eos_token": _END, "pad_token": _END},
        redeclares=True,
    ),
    "LlamaTokenizer": Recipe(
        _llama, special_tokens={"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    ),
    "GPT2Tokenizer": Recipe(
        _gpt2, special_tokens={"unk_token": _END, "bos_token": _END, "eos_token": _END}
    ),
    "GemmaTokenizer": Recipe(
        _gemma,
        special_tokens={
            f"{kind}_token": f"<{kind}>" for kind in ("unk", "bos", "eos", "pad", "mask")
        },
    ),
}
