"""Loads a model's tokenizer from its files, as transformers 5 builds it.

A replica tokenizes with what transformers loads, which can differ from ``tokenizer.json``: special
tokens named in other files are added, and some classes replace parts of it. A plain class takes
``tokenizer.json`` as it is. Other classes take only the vocabulary, the merges and the
post-processor, and use their own normalizer and pre-tokenizer. The class depends on the model's
type and on the name in ``tokenizer_config.json``. The classes of most open models are handled here.
For any other, `TokenizerFiles.doubt` says so, and its tokens are used only after a replica has
confirmed them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, Tokenizer

from router.prompt.token_trust import RENDER_CHAT, TOKENIZE
from warmroute_common.config_reader import ConfigError

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


_KINDS: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_NAMED_TOKENS: Final = tuple(f"{kind}_token" for kind in _KINDS)

# Models whose prompts vLLM makes without a chat template, and where a replica tells their tokens.
# /tokenize of 0.32 renders gpt_oss with its template, which chats do not use, and leaves
# tool_choice and response_format out, which kimi_k3 renders.
_OWN_RENDERING: Final[Mapping[object, str | None]] = {
    "gpt_oss": RENDER_CHAT,
    "kimi_k3": None,
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "deepseek_v41", "inkling"), TOKENIZE),
}

# Models whose processors put all media at the start of the prompt (``PromptInsertion`` in vLLM), or
# change the text before the media.
_MEDIA_AT_START: Final = frozenset(
    {"blip-2", "clip", "colmodernvbert", "molmo", "molmo2", "openvla", "paligemma", "siglip"}
)

# Files of multimodal models, and of models with another kind of tokenizer.
_OTHER_PROCESSING: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "tekken.json",
    "sentence_bert_config.json",
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


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """A tokenizer and what else its directory says about prompts."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    """Named special tokens, as templates may use them (``bos_token`` and so on)."""
    templates: Mapping[str, str]
    """Chat templates by name; a single one is ``default``."""
    doubt: str | None
    """Why a replica's tokens may differ, or None."""
    chat_doubt: str | None
    """Why a replica's rendering of chats may differ, or None."""
    chat_path: str | None = TOKENIZE
    """Where a replica tells the tokens that it has for a chat; None: nowhere."""
    media_doubt: str | None = None
    """Why media may stand elsewhere than in their messages, or None."""


def load_directory(path: Path) -> TokenizerFiles:
    """Load the tokenizer in a model's directory; raise `ConfigError` when there is none."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            str(path), "", "has no tokenizer.json", "name the directory of a model's tokenizer"
        )
    description = _read_json(file)
    config = _read_json(path / "tokenizer_config.json")
    model = _read_json(path / "config.json")
    if "added_tokens_decoder" not in config:
        config = config | _read_json(path / "special_tokens_map.json")
    how = recipe(config, model)
    try:
        named, extra = _special_tokens(config, description)
        for name, token in how.special_tokens.items():
            named.setdefault(name, token)
        tokenizer = how.build(description, config, named)
        _add_tokens(tokenizer, _configured_tokens(config, description), named, extra)
        if how.redeclares:
            every = dict.fromkeys(str(token) for token in [*named.values(), *extra])
            tokenizer.add_tokens([AddedToken(token, special=True) for token in every])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            str(path), "", f"holds a tokenizer that cannot be used ({error})", "check its files"
        ) from error
    except Exception as error:
        # tokenizers raises plain Exception for a file it cannot parse
        raise ConfigError(str(file), "", f"is no tokenizer ({error})", "check the file") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    kind = model.get("model_type")
    others = [name for name in _OTHER_PROCESSING if (path / name).exists()]
    beside = f"{others[0]} stands beside the tokenizer" if others else None
    return TokenizerFiles(
        tokenizer=tokenizer,
        special_tokens={name: str(token) for name, token in named.items()},
        templates=_templates(path, config),
        doubt=how.doubt or beside,
        chat_doubt=f"vLLM renders {kind} in a way of its own" if kind in _OWN_RENDERING else None,
        chat_path=_OWN_RENDERING.get(kind, TOKENIZE),
        media_doubt=f"{kind} has its media before the text" if kind in _MEDIA_AT_START else None,
    )


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), "", f"cannot be read ({error})", "check the file") from error
    if not isinstance(value, dict):
        raise ConfigError(str(path), "", "holds no JSON object", "check the file")
    return value


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name: files of their own go before the configuration."""
    found: dict[str, str] = {}
    single = path / "chat_template.jinja"
    if single.is_file():
        found["default"] = single.read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if found:
        return found
    given = config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        return {one["name"]: one["template"] for one in given}
    return dict(given or {})


def _token(value: Any) -> Any:
    """Return a token of the configuration, text or description, as transformers takes it."""
    if not isinstance(value, dict):
        return value
    return AddedToken(**{key: one for key, one in value.items() if key not in ("__type", "id")})


def _configured_tokens(config: Mapping[str, Any], description: Json) -> dict[int, Any]:
    """Return the added tokens by id, as the configuration has them or else tokenizer.json."""
    configured = config.get("added_tokens_decoder")
    if configured is not None:
        return {int(index): _token(token) for index, token in configured.items()}
    return {token["id"]: _token(token) for token in description.get("added_tokens") or ()}


def _special_tokens(config: Json, description: Json) -> tuple[dict[str, Any], list[Any]]:
    """Return the named special tokens and the extra ones."""
    known = {str(token): token for token in _configured_tokens(config, description).values()}
    own = [key for key, one in config.items() if key.endswith("_token") and isinstance(one, str)]
    names = dict.fromkeys([*_NAMED_TOKENS, *own])
    given = {name: _token(config[name]) for name in names if config.get(name) is not None}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):  # a model's own, by name
        given |= extra
        extra = []
    named = {name: known.get(str(token), token) for name, token in given.items()}
    return named, [_token(token) for token in extra]


def _add_tokens(
    tokenizer: Tokenizer, configured: dict[int, Any], named: Mapping[str, Any], extra: list[Any]
) -> None:
    """Add the tokens that the files name besides tokenizer.json, as transformers does."""
    present = tokenizer.get_added_tokens_decoder()
    same = {repr(token) for token in present.values()}
    adding = [token for _, token in sorted(configured.items()) if repr(token) not in same]
    contents = {str(token) for token in [*present.values(), *adding]}
    for token in [*named.values(), *extra]:
        if str(token) not in contents:
            contents.add(str(token))
            adding.append(token)
    special = {str(token) for token in named.values()}
    tokens = [
        AddedToken(token, special=True) if isinstance(token, str) else token for token in adding
    ]
    for token in tokens:
        token.special = token.special or str(token) in special
    tokenizer.add_tokens(tokens)
