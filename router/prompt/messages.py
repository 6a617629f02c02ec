"""OpenAI chat messages and tools, brought into the form that chat templates get.

vLLM 0.32 validates a request against typed dictionaries (which puts known keys
first, in their declared order) and then builds the conversation from it
(``renderers/chat_utils.py``). Templates can print all of it as JSON, so the
order of keys is part of the prompt. Whatever is not reproduced here with
certainty raises `Unsupported`: no tokens are better than wrong ones.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from router.config import BadRequest
from router.prompt.templates import ContentFormat, Message


@dataclass(frozen=True)
class Dialect:
    """In what an endpoint's messages differ from those of another."""

    parts: Mapping[str, str]
    """The kinds of content parts that are text, and where they keep it."""
    call: tuple[str, str]
    """The order of the fields of a called function."""


_PARTS: Final = {"text": "text", "refusal": "refusal", "thinking": "thinking"}
CHAT: Final = Dialect(_PARTS, ("arguments", "name"))
# Here vLLM makes the messages itself, and validates them no more.
RESPONSES: Final = Dialect({**_PARTS, "input_text": "text"}, ("name", "arguments"))

# The declared fields of all kinds of content parts; others are passed on to
# templates that take parts.
# fmt: off
_DECLARED_PART_FIELDS: Final = frozenset({
    "audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil",
    "image_url", "input_audio", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking",
    "type", "uuid", "video_embeds", "video_url",
})
# fmt: on

# Claude Code puts a line with a hash of the request here, which vLLM drops.
_BILLING_HEADER: Final = "x-anthropic-billing-header"


class Unsupported(Exception):  # noqa: N818  (not an error: a fact about the request)
    """What the replica makes of this request is not known here; the text says why."""


def conversation(
    messages: Sequence[Message], form: ContentFormat, dialect: Dialect = CHAT
) -> list[Message]:
    """Return the messages as a template with content ``form`` gets them.

    They are checked by `check_messages` before, and not changed. Raises `Unsupported`.
    """
    return [_converse(one, form, dialect, index) for index, one in enumerate(messages)]


def check_messages(value: object, name: str = "messages") -> list[Message]:
    """Return ``value`` if it can be a list of chat messages, else raise `BadRequest`."""
    if not isinstance(value, list):
        raise BadRequest(f"'{name}' must be a list of messages", param=name)
    if not value:
        raise BadRequest(f"'{name}' must hold at least one message", param=name)
    for index, one in enumerate(value):
        where = f"{name}[{index}]"
        if not isinstance(one, dict):
            raise BadRequest(f"'{where}' must be an object", param=where)
        if not isinstance(one.get("role"), str):
            raise BadRequest(f"'{where}.role' must be a string", param=f"{where}.role")
        content = one.get("content")
        if isinstance(content, dict):
            raise Unsupported("content that is an object")  # vLLM goes over its keys
        if content is not None and not isinstance(content, str | list):
            raise BadRequest(
                f"'{where}.content' must be a string or a list of parts", param=f"{where}.content"
            )
    return value


def _converse(message: Message, form: ContentFormat, dialect: Dialect, index: int) -> Message:
    role = message["role"]
    parts = _parts(message.get("content"), role)
    content = [_part(part, form, dialect.parts, index) for part in parts]
    result: Message = {
        "role": role,
        "content": content if form == "openai" else "\n".join(part for part in content if part),
    }
    if role == "assistant":
        _add_assistant_fields(result, message, dialect)
    elif role == "tool":
        _add_tool_fields(result, message)
    for key in ("name", "task"):
        if key in message:
            if not isinstance(message[key], str):
                raise Unsupported(f"'{key}' of message {index} is no string")
            result[key] = message[key]
    if role == "developer":
        result["tools"] = _developer_tools(message.get("tools"))
    return result


def _parts(content: Any, role: str) -> list[Any]:
    if content is None:
        return []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    if role != "system":
        return parts
    return [kept for part in parts if (kept := _without_billing_header(part)) is not None]


def _without_billing_header(part: Any) -> Any | None:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str) or not text.startswith(_BILLING_HEADER):
        return part
    rest = text.partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _part(part: Any, form: ContentFormat, kinds: Mapping[str, str], index: int) -> Any:
    """Return a text part as the template gets it; raise `Unsupported` for other kinds."""
    kind = part.get("type") if isinstance(part, dict) else None
    field = kinds.get(kind) if isinstance(kind, str) else None
    if field is None or part.get("uuid") is not None:
        raise Unsupported(f"a content part of type {kind!r} in message {index}")
    text = part.get(field)
    if not isinstance(text, str):
        raise Unsupported(f"a content part without {field} in message {index}")
    if form == "string":
        return text
    extra = {key: value for key, value in part.items() if key not in _DECLARED_PART_FIELDS}
    return {"type": "text", "text": text, **extra}


def _add_assistant_fields(result: Message, message: Message, dialect: Dialect) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        made = [_tool_call(call, dialect) for call in _list(calls, "tool_calls")]
        if made:  # an empty list is as none, so that templates see an ordinary answer
            result["tool_calls"] = made
    reasoning = message.get("reasoning")
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise Unsupported("'reasoning' of a message is no string")
        result["reasoning"] = reasoning
        result["reasoning_content"] = reasoning


def _add_tool_fields(result: Message, message: Message) -> None:
    if "tool_call_id" in message:
        if not isinstance(message["tool_call_id"], str):
            raise Unsupported("'tool_call_id' of a message is no string")
        result["tool_call_id"] = message["tool_call_id"]
    if isinstance(result["content"], list):
        # Most templates take only a string here, whatever they take elsewhere.
        result["content"] = "\n".join(part["text"] for part in result["content"])


def _tool_call(call: Any, dialect: Dialect) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type") != "function":
        raise Unsupported("a tool call that is no function call")
    function = call.get("function")
    if not isinstance(call.get("id"), str) or not isinstance(function, dict):
        raise Unsupported("a tool call without an id or a function")
    if not isinstance(function.get("arguments"), str) or not isinstance(function.get("name"), str):
        raise Unsupported("a tool call whose arguments or name are no strings")
    made = in_order(function, dialect.call)
    made["arguments"] = _arguments(function["arguments"])
    return in_order({**call, "function": made}, ("id", "function", "type"))


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as templates expect them: an object, empty if unusable."""
    if not text:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _developer_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    made = []
    for tool in _list(tools, "tools"):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise Unsupported("a developer message with a tool that is no function")
        if not isinstance(function.get("name"), str):
            raise Unsupported("a developer message with a function without a name")
        for key, kind in (("description", str), ("parameters", dict), ("strict", bool)):
            _optional(function, key, kind)
        function = in_order(function, ("name", "description", "parameters", "strict"))
        made.append(in_order({**tool, "function": function}, ("function", "type")))
    return made


def chat_tools(value: object) -> list[dict[str, Any]] | None:
    """Return the request's tools as templates get them, or None.

    Unknown fields are dropped, missing ones are there as None.
    """
    if value is None:
        return None
    if not isinstance(value, list):
        raise BadRequest("'tools' must be a list", param="tools")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(value)]


def _tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        raise BadRequest(f"'{where}' must be an object with a 'function'", param=where)
    if tool.get("type", "function") != "function":
        raise Unsupported(f"a tool of type {tool['type']!r}")
    deferred = _optional(tool, "defer_loading", bool)
    made: dict[str, Any] = {
        "type": "function",
        "function": function_definition(tool["function"], where, defer_loading=deferred),
    }
    if deferred is not None:
        made["defer_loading"] = deferred
    return made


def function_definition(
    function: Mapping[str, Any], where: str, *, defer_loading: bool | None = None
) -> dict[str, Any]:
    """Return a function's definition with its known fields only, in vLLM's order."""
    if not isinstance(function.get("name"), str):
        raise BadRequest(f"'{where}.function.name' must be a string", param=where)
    made: dict[str, Any] = {
        "name": function["name"],
        "description": _optional(function, "description", str),
        "parameters": _optional(function, "parameters", dict),
    }
    own = _optional(function, "defer_loading", bool)
    optional = {
        "strict": _optional(function, "strict", bool),
        "defer_loading": defer_loading if own is None else own,
    }
    return made | {key: value for key, value in optional.items() if value is not None}


def _optional(value: Mapping[str, Any], key: str, kind: type) -> Any:
    found = value.get(key)
    if found is not None and not isinstance(found, kind):
        raise Unsupported(f"'{key}' of a tool is no {kind.__name__}")
    return found


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise Unsupported(f"'{name}' of a message is no list")
    return value


def in_order(value: Mapping[str, Any], first: Iterable[str]) -> dict[str, Any]:
    """Return a copy with the keys ``first`` in front, where present; the rest keep their order."""
    known = {key: value[key] for key in first if key in value}
    return known | {key: one for key, one in value.items() if key not in known}
