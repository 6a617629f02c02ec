"""A model's tokenizer, from its files to the one that transformers makes of them.

A replica tokenizes with what transformers 5 loads, which is not always what
``tokenizer.json`` says: special tokens named elsewhere are added, and some
classes build normalizer, pre-tokenizer and model anew. The classes handled
here are those of most open models; for any other, `Loaded.doubt` says so and
nothing counts as exact until a replica has confirmed it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from router.prompt.tokenizer.hf_tokenizer import Json, recipe
from warmroute_common.config_reader import ConfigError

_KINDS: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_NAMED_TOKENS: Final = tuple(f"{kind}_token" for kind in _KINDS)

# Models whose prompts vLLM does not make from a chat template at all.
_OWN_RENDERING: Final = frozenset(
    {"gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "inkling"}
)

# Models whose processors put media at the prompt's start, wherever they stand in the
# conversation (``PromptInsertion`` in vLLM), or change the text before them.
_MEDIA_AT_START: Final = frozenset(
    {"blip-2", "clip", "colmodernvbert", "molmo", "molmo2", "openvla", "paligemma", "siglip"}
)

# Files of models that are not (only) text, or that have a tokenizer of another kind.
_OTHER_PROCESSING: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "tekken.json",
    "sentence_bert_config.json",
)


@dataclass(frozen=True, kw_only=True)
class Loaded:
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
    media_doubt: str | None = None
    """Why media may stand elsewhere than in their messages, or None."""


def load_directory(path: Path) -> Loaded:
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
    return Loaded(
        tokenizer=tokenizer,
        special_tokens={name: str(token) for name, token in named.items()},
        templates=_templates(path, config),
        doubt=how.doubt or beside,
        chat_doubt=f"vLLM renders {kind} in a way of its own" if kind in _OWN_RENDERING else None,
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
    """Add the tokens that the files name beside tokenizer.json, as transformers does."""
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
