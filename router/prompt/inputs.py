"""What of a request's body becomes its prompt, for each endpoint.

Each endpoint's body is read into a `ChatInput` (rendered by a template) or a
`TextInput`; fields that only steer sampling are left alone. Defaults and
precedence are those of vLLM 0.32's request classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from router.config import BadRequest
from router.prompt import anthropic, responses
from router.prompt.messages import (
    CHAT,
    RESPONSES,
    Dialect,
    Unsupported,
    chat_tools,
    check_messages,
)
from router.prompt.templates import ChatTemplate, Message

Body = Mapping[str, Any]

# Settings of the rendering itself, which a request cannot give as template variables.
# fmt: off
_NOT_VARIABLES: Final = frozenset({
    "self", "conversation", "messages", "tools", "chat_template", "tokenize", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
})
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Keep at most ``tokens`` (-1: what the model's context allows) of the prompt."""

    tokens: int
    side: str | None = None
    """``left`` keeps the end; None is the tokenizer's own side."""


@dataclass(frozen=True, kw_only=True)
class TextInput:
    """A prompt that is text, or token ids already."""

    prompt: str | list[int]
    add_special_tokens: bool = True
    truncation: Truncation | None = None
    doubt: str | None = None
    """Why the tokens may differ from the replica's all the same, or None."""


@dataclass(frozen=True, kw_only=True)
class ChatInput:
    """A conversation to be rendered."""

    messages: Sequence[Message]
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False
    truncation: Truncation | None = None
    dialect: Dialect = CHAT
    doubt: str | None = None


PromptInput = TextInput | ChatInput
TemplateFor = Callable[[bool], ChatTemplate | None]
"""The template used for a request (with tools or not)."""


def read_input(endpoint: str, body: Body, template_for: TemplateFor) -> PromptInput:
    """Return what ``body`` asks for; raise `BadRequest` for wrong types, or `Unsupported`."""
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
    raise Unsupported(f"no prompt is read from {endpoint}")


def _chat(body: Body) -> ChatInput:
    messages = [_with_reasoning(one) for one in check_messages(body.get("messages"))]
    return _chat_input(body, messages, chat_tools(body.get("tools")))


def _chat_input(
    body: Body, messages: Sequence[Message], tools: list[dict[str, Any]] | None
) -> ChatInput:
    _refuse_own_template(body)
    _refuse_given_tokens(body)
    effort = _typed(body, "reasoning_effort", str)
    extra = {
        "add_generation_prompt": _flag(body, "add_generation_prompt", True),
        "continue_final_message": _flag(body, "continue_final_message", False),
        "documents": _documents(body),
        **_effort(body, effort),
    }
    hidden = tools is not None and body.get("tool_choice") == "none"
    return ChatInput(
        messages=messages,
        tools=tools,
        variables=_variables(body, extra),
        add_special_tokens=_flag(body, "add_special_tokens", False),
        truncation=_truncation(body),
        doubt="the replica may leave out tools when tool_choice is none" if hidden else None,
    )


def _tokenize(body: Body) -> PromptInput:
    if "messages" not in body:
        text = body.get("prompt")
        if not isinstance(text, str):
            raise BadRequest("'prompt' must be a string", param="prompt")
        return TextInput(prompt=text, add_special_tokens=_flag(body, "add_special_tokens", True))
    _refuse_own_template(body)
    extra = {
        "add_generation_prompt": _flag(body, "add_generation_prompt", True),
        "continue_final_message": _flag(body, "continue_final_message", False),
    }
    return ChatInput(
        messages=check_messages(body["messages"]),
        tools=chat_tools(body.get("tools")),
        variables=_variables(body, extra),
        add_special_tokens=_flag(body, "add_special_tokens", False),
    )


def _completion(body: Body) -> TextInput:
    if body.get("prompt_embeds") is not None or body.get("suffix") is not None:
        raise Unsupported("a prompt with embeddings or a suffix")
    _refuse_given_tokens(body)
    return _text_input(body, "prompt")


def _embedding(body: Body) -> PromptInput:
    if body.get("padding") is not None:
        raise Unsupported("padding")
    if "messages" in body and "input" not in body:
        _refuse_own_template(body)
        extra = {
            "add_generation_prompt": _flag(body, "add_generation_prompt", False),
            "continue_final_message": _flag(body, "continue_final_message", False),
        }
        return ChatInput(
            messages=check_messages(body["messages"]),
            variables=_variables(body, extra),
            add_special_tokens=_flag(body, "add_special_tokens", False),
            truncation=_truncation(body),
        )
    return _text_input(body, "input")


def _responses(body: Body) -> ChatInput:
    if body.get("previous_response_id") is not None:
        raise Unsupported("what a previous response said is known only to its replica")
    if body.get("previous_input_messages") is not None:
        raise Unsupported("previous_input_messages")
    _refuse_given_tokens(body)
    reasoning = _typed(body, "reasoning", dict) or {}
    effort = _typed(reasoning, "effort", str)
    goes_on = responses.continues(body.get("input"))
    extra = {
        "add_generation_prompt": not goes_on,
        "continue_final_message": goes_on,
        **_effort(body, effort),
    }
    tools = responses.tools(body.get("tools"))
    hidden = tools is not None and body.get("tool_choice") == "none"
    cut = body.get("truncation", "disabled") != "disabled"
    return ChatInput(
        messages=responses.messages(body.get("input"), _typed(body, "instructions", str)),
        tools=tools,
        variables=_variables(body, extra),
        add_special_tokens=True,  # so it is in vLLM, unlike for chat completions
        truncation=Truncation(tokens=-1) if cut else None,
        dialect=RESPONSES,
        doubt="the replica may leave out tools when tool_choice is none" if hidden else None,
    )


def _messages(body: Body, template_for: TemplateFor) -> ChatInput:
    templates = [template_for(with_tools) for with_tools in (False, True)]
    merge = any(one is None or one.wants_system_first for one in templates)
    chat = anthropic.chat_body(body, merge_inline_system=merge)
    made = _chat_input(chat, chat["messages"], chat_tools(chat.get("tools")))
    if not anthropic.disables_thinking(body):
        return made
    used = frozenset[str]().union(*(one.variables for one in templates if one))
    if used & {"reasoning_effort", "enable_thinking"}:
        raise Unsupported("how the replica turns thinking off is its own setting")
    return made


def _text_input(body: Body, name: str) -> TextInput:
    prompt = body.get(name)
    doubt = None
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        doubt = "only the first of several prompts is looked at" if len(prompt) > 1 else None
        prompt = prompt[0]
    return TextInput(
        prompt=_text_or_tokens(prompt, name),
        add_special_tokens=_flag(body, "add_special_tokens", True),
        truncation=_truncation(body),
        doubt=doubt,
    )


def _text_or_tokens(prompt: object, name: str) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest(
            f"'{name}' must be a string, a list of token ids, or a list of those", param=name
        )
    # Exact types: True is an int to isinstance, and 70,000 checks must be quick.
    kinds = set(map(type, prompt))
    if kinds != {int} and kinds <= {int, bool, float}:
        raise Unsupported("token ids that are no whole numbers")
    if kinds != {int} or min(prompt) < 0 or max(prompt) > 0x7FFF_FFFF:
        raise BadRequest(f"'{name}' holds something that is no token id", param=name)
    return prompt


def _with_reasoning(message: Message) -> Message:
    """Rename the older ``reasoning_content``, which a given ``reasoning`` overrides."""
    if "reasoning_content" not in message:
        return message
    renamed = {key: value for key, value in message.items() if key != "reasoning_content"}
    if renamed.get("reasoning") is None and message["reasoning_content"] is not None:
        renamed["reasoning"] = message["reasoning_content"]
    return renamed


def _effort(body: Body, effort: str | None) -> dict[str, Any]:
    own = _typed(body, "chat_template_kwargs", dict) or {}
    thinking = (
        {} if effort is None or "enable_thinking" in own else {"enable_thinking": effort != "none"}
    )
    return {"reasoning_effort": effort, **thinking}


def _variables(body: Body, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables: the request's own, overridden by what its fields say."""
    own = _typed(body, "chat_template_kwargs", dict) or {}
    if reserved := _NOT_VARIABLES & own.keys():
        raise Unsupported(f"chat_template_kwargs has {sorted(reserved)}")
    # vLLM takes None and "auto" for unset, wherever they stand.
    return _set(own) | _set(extra)


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value not in (None, "auto")}


def _documents(body: Body) -> list[dict[str, str]] | None:
    documents: list[dict[str, str]] | None = _typed(body, "documents", list)
    for document in documents or ():
        if not isinstance(document, dict) or not all(
            isinstance(value, str) for value in document.values()
        ):
            raise BadRequest("'documents' must hold objects of strings", param="documents")
    return documents


def _refuse_own_template(body: Body) -> None:
    if body.get("chat_template") is not None:
        raise Unsupported("a chat template of the request's own")


def _refuse_given_tokens(body: Body) -> None:
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        raise Unsupported("token ids handed over in kv_transfer_params")


def _truncation(body: Body) -> Truncation | None:
    tokens = body.get("truncate_prompt_tokens")
    if tokens is None:
        return None
    if isinstance(tokens, bool | float | str):
        raise Unsupported(f"truncate_prompt_tokens is {tokens!r}, which a replica may read")
    if not isinstance(tokens, int) or tokens < -1:
        raise BadRequest(
            "'truncate_prompt_tokens' must be a whole number, at least -1",
            param="truncate_prompt_tokens",
        )
    side = _typed(body, "truncation_side", str)
    if side not in (None, "left", "right"):
        raise BadRequest("'truncation_side' must be left or right", param="truncation_side")
    return Truncation(tokens=tokens, side=side)


def _flag(body: Body, name: str, default: bool) -> bool:
    value = body.get(name, default)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float | str):
        raise Unsupported(f"'{name}' is {value!r}, which a replica may take for true or false")
    raise BadRequest(f"'{name}' must be true or false", param=name)


def _typed(body: Body, name: str, kind: type[str] | type[dict[str, Any]] | type[list[Any]]) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        words = {"str": "a string", "dict": "an object", "list": "a list"}
        raise BadRequest(f"'{name}' must be {words[kind.__name__]}", param=name)
    return value
