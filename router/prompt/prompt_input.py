"""From a request's body to what a prompt is made of: a `ChatInput` or a `TextInput`.

A `ChatInput` is rendered by a template. Fields that only steer sampling are left alone. Defaults
and precedence are those of vLLM 0.32's request classes.
"""

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from router.prompt import anthropic
from router.prompt import chat_messages as responses
from router.prompt.chat_messages import (
    CHAT,
    RESPONSES,
    Dialect,
    UnsupportedInputError,
    chat_tools,
    check_messages,
    checked,
)
from router.prompt.chat_template import ChatTemplate, Message
from router.prompt.long_strings import LARGEST_ID
from warmroute_common.api_errors import BadRequestError

Body = Mapping[str, Any]

# Settings of the rendering itself, which a request cannot give as template variables.
# fmt: off
_NOT_VARIABLES: Final = frozenset({
    "self", "conversation", "messages", "tools", "chat_template", "tokenize", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
})
# fmt: on

# Where an endpoint takes less than /v1/chat/completions does: the fields that it takes.
_RENDERING: Final = ("add_generation_prompt", "continue_final_message", "add_special_tokens")
_TOKENIZED: Final = (*_RENDERING, "chat_template", "chat_template_kwargs")
_EMBEDDED: Final = (*_TOKENIZED, "truncate_prompt_tokens", "truncation_side")
_ANSWERED: Final = ("chat_template_kwargs", "kv_transfer_params", "tool_choice")


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Keep at most ``tokens`` (-1: what the model's context allows) of the prompt."""

    tokens: int
    side: str | None = None
    """``left`` keeps the end; None is the tokenizer's own side."""


@dataclass(frozen=True, kw_only=True)
class TextInput:
    """A prompt that is text, or token ids already."""

    prompt: str | Sequence[int]
    add_special_tokens: bool
    truncation: Truncation | None = None
    doubt: str | None = None
    """Why the tokens may differ from the replica's all the same, or None."""


@dataclass(frozen=True, kw_only=True)
class ChatInput:
    """A conversation to be rendered."""

    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None
    variables: Mapping[str, Any]
    add_special_tokens: bool
    truncation: Truncation | None = None
    dialect: Dialect = CHAT
    doubt: str | None = None


PromptInput = TextInput | ChatInput
TemplateFor = Callable[[bool], ChatTemplate | None]
"""The template used for a request (with tools or not)."""


def read_input(endpoint: str, body: Body, template_for: TemplateFor) -> PromptInput:
    """Return the prompt of ``body``.

    Raises `BadRequestError` for wrong types, and `UnsupportedInputError`.
    """
    match endpoint:
        case "/v1/chat/completions":
            return _chat(body)
        case "/v1/completions":
            return _completion(body)
        case "/v1/embeddings":
            return _embedding(body)
        case "/v1/responses":
            return _responses(body)
        case "/v1/messages":
            return _messages(body, template_for)
        case "/tokenize":
            return _tokenize(body)
    raise UnsupportedInputError(f"no prompt is read from {endpoint}")


def _chat(body: Body) -> ChatInput:
    messages = [_with_reasoning(one) for one in check_messages(body.get("messages"))]
    return _chat_input(body, messages, chat_tools(body.get("tools")))


def _chat_input(
    body: Body, messages: Sequence[Message], tools: list[dict[str, Any]] | None
) -> ChatInput:
    if body.get("chat_template") is not None:
        raise UnsupportedInputError("a chat template of the request's own")
    _refuse_given_tokens(body)
    own = _typed(body, "chat_template_kwargs", dict[str, Any]) or {}
    if reserved := _NOT_VARIABLES & own.keys():
        raise UnsupportedInputError(f"chat_template_kwargs has {sorted(reserved)}")
    effort = _typed(body, "reasoning_effort", str)
    said = {
        "add_generation_prompt": _flag(body, "add_generation_prompt", True),
        "continue_final_message": _flag(body, "continue_final_message", False),
        "documents": _typed(body, "documents", list[dict[str, str]]),
        "reasoning_effort": effort,
    }
    if effort is not None and "enable_thinking" not in own:
        said["enable_thinking"] = effort != "none"
    hidden = tools is not None and body.get("tool_choice") == "none"
    return ChatInput(
        messages=messages,
        tools=tools,
        # vLLM takes None and "auto" for unset, wherever they stand; fields override variables.
        variables={
            key: value
            for given in (own, said)
            for key, value in given.items()
            if value not in (None, "auto")
        },
        add_special_tokens=_flag(body, "add_special_tokens", False),
        truncation=_truncation(body),
        doubt="the replica may leave out tools when tool_choice is none" if hidden else None,
    )


def _only(body: Body, fields: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key in fields}


def _tokenize(body: Body) -> PromptInput:
    if "messages" not in body:
        text = checked(body.get("prompt"), str, "prompt")
        return TextInput(prompt=text, add_special_tokens=_flag(body, "add_special_tokens", True))
    messages = check_messages(body["messages"])
    return _chat_input(_only(body, _TOKENIZED), messages, chat_tools(body.get("tools")))


def _completion(body: Body) -> TextInput:
    if body.get("prompt_embeds") is not None or body.get("suffix") is not None:
        raise UnsupportedInputError("a prompt with embeddings or a suffix")
    _refuse_given_tokens(body)
    return _text_input(body, "prompt")


def _embedding(body: Body) -> PromptInput:
    if body.get("padding") is not None:
        raise UnsupportedInputError("padding")
    given, chats = _first(body.get("input")), _first(body.get("messages"))
    if isinstance(given, dict) or isinstance(_first(given), dict) or isinstance(chats, list):
        raise UnsupportedInputError("several conversations, or one in the field for texts")
    if "messages" not in body or "input" in body:
        return _text_input(body, "input")
    chat = {"add_generation_prompt": False, **_only(body, _EMBEDDED)}
    return _chat_input(chat, check_messages(body["messages"]), None)


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) and value else None


def _responses(body: Body) -> ChatInput:
    if body.get("previous_response_id") is not None:
        raise UnsupportedInputError("what a previous response said is known only to its replica")
    if body.get("previous_input_messages") is not None:
        raise UnsupportedInputError("previous_input_messages")
    given = as_lists(body.get("input"))
    goes_on = responses.continues(given)
    reasoning = _typed(body, "reasoning", dict[str, Any]) or {}
    chat = _only(body, _ANSWERED) | {
        "add_generation_prompt": not goes_on,
        "continue_final_message": goes_on,
        "add_special_tokens": True,  # so it is in vLLM, unlike for chat completions
        "reasoning_effort": _typed(reasoning, "effort", str),
    }
    messages = responses.messages(given, _typed(body, "instructions", str))
    made = _chat_input(chat, messages, responses.tools(body.get("tools")))
    cut = body.get("truncation", "disabled") != "disabled"
    return replace(made, dialect=RESPONSES, truncation=Truncation(tokens=-1) if cut else None)


def _messages(body: Body, template_for: TemplateFor) -> ChatInput:
    templates = [template_for(with_tools) for with_tools in (False, True)]
    merge = any(one is None or one.wants_system_first for one in templates)
    chat = anthropic.chat_body(body, merge_inline_system=merge)
    made = _chat_input(chat, chat["messages"], chat_tools(chat.get("tools")))
    used = frozenset[str]().union(*(one.variables for one in templates if one))
    if anthropic.disables_thinking(body) and used & {"reasoning_effort", "enable_thinking"}:
        raise UnsupportedInputError("how the replica turns thinking off is its own setting")
    return made


def _text_input(body: Body, name: str) -> TextInput:
    prompt = body.get(name)
    doubt = None
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list | array):
        doubt = "only the first of several prompts is looked at" if len(prompt) > 1 else None
        prompt = prompt[0]
    return TextInput(
        prompt=_text_or_tokens(prompt, name),
        add_special_tokens=_flag(body, "add_special_tokens", True),
        truncation=_truncation(body),
        doubt=doubt,
    )


def _text_or_tokens(prompt: object, name: str) -> str | Sequence[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, array) and prompt:
        return prompt  # `LongStrings` has checked it
    if not isinstance(prompt, list) or not prompt:
        raise BadRequestError(
            f"'{name}' must be a string, a list of token ids, or a list of those", param=name
        )
    # Exact types: True is an int to isinstance, and 70,000 checks must be quick.
    kinds = set(map(type, prompt))
    if kinds != {int} and kinds <= {int, bool, float}:
        raise UnsupportedInputError("token ids that are no whole numbers")
    if kinds != {int} or min(prompt) < 0 or max(prompt) > LARGEST_ID:
        raise BadRequestError(f"'{name}' holds something that is no token id", param=name)
    return prompt


def as_lists(value: Any) -> Any:
    """Return a prompt's field with lists in place of arrays of token ids."""
    if isinstance(value, list) and any(isinstance(each, array) for each in value):
        return [as_lists(each) for each in value]
    return value.tolist() if isinstance(value, array) else value


def _with_reasoning(message: Message) -> Message:
    """Rename the older ``reasoning_content``, which a given ``reasoning`` overrides."""
    if "reasoning_content" not in message:
        return message
    renamed = {key: value for key, value in message.items() if key != "reasoning_content"}
    if renamed.get("reasoning") is None and message["reasoning_content"] is not None:
        renamed["reasoning"] = message["reasoning_content"]
    return renamed


def _refuse_given_tokens(body: Body) -> None:
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        raise UnsupportedInputError("token ids handed over in kv_transfer_params")


def _truncation(body: Body) -> Truncation | None:
    tokens = body.get("truncate_prompt_tokens")
    if tokens is None:
        return None
    if isinstance(tokens, bool | float | str):
        raise UnsupportedInputError(
            f"truncate_prompt_tokens is {tokens!r}, which a replica may read"
        )
    checked(tokens, Annotated[int, Meta(ge=-1)], "truncate_prompt_tokens")
    side = _typed(body, "truncation_side", Literal["left", "right"])
    return Truncation(tokens=tokens, side=side)


def _flag(body: Body, name: str, default: bool) -> bool:
    value = body.get(name, default)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):
        raise UnsupportedInputError(
            f"'{name}' is {value!r}, which a replica may take for true or false"
        )
    return bool(checked(value, bool, name))


def _typed(body: Body, name: str, kind: Any) -> Any:
    value = body.get(name)
    return None if value is None else checked(value, kind, name)
