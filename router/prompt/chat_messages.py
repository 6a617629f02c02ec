"""Converts OpenAI messages and tools to the form that chat templates receive.

vLLM 0.32 first validates a request against typed dictionaries, which puts the known keys first in
their declared order. It then builds the conversation (``renderers/chat_utils.py``). A template can
print any of it as JSON, so the order of the keys is part of the prompt. `messages` and `tools`
convert the input of ``/v1/responses``: text messages, function calls and their outputs, and
reasoning in plain text. Input whose conversion is not certain raises `UnsupportedInputError`: the
router then uses no tokens, because wrong tokens are worse.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from router.prompt.chat_template import ContentFormat, Message
from warmroute_common.api_errors import BadRequestError
from warmroute_common.decoding import convert

T = TypeVar("T")


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
BILLING_HEADER: Final = "x-anthropic-billing-header"


class _AnyMessage(Struct):
    role: str
    content: str | list[Any] | dict[str, Any] | None = None


_MESSAGES: Final = Annotated[list[_AnyMessage], msgspec.Meta(min_length=1)]


class _Named(Struct):
    name: str = ""
    task: str = ""


class _CalledFunction(Struct):
    name: str
    arguments: str


class _Call(Struct):
    id: str
    type: Literal["function"]
    function: _CalledFunction


class _Assistant(_Named):
    tool_calls: list[_Call] | None = None
    reasoning: str | None = None


class _ToolResult(_Named):
    tool_call_id: str = ""


class Function(Struct):
    """A tool's function: its known fields in vLLM's order."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class _DeveloperTool(Struct):
    type: Literal["function"]
    function: Function


class _Developer(_Named):
    tools: list[_DeveloperTool] | None = None


class _NamedFunction(Struct):
    name: str


class _AnyTool(Struct):
    function: _NamedFunction


class _ChatTool(Struct):
    function: Function
    type: Literal["function"] = "function"
    defer_loading: bool | None = None


_SHAPES: Final[Mapping[str, type[_Named]]] = {
    "assistant": _Assistant,
    "tool": _ToolResult,
    "developer": _Developer,
}


_CHECKED: Final = 4096


class UnsupportedInputError(Exception):
    """What the replica makes of this request is not known here; the text says why."""


def checked(value: Any, shape: Any, name: str = "") -> Any:
    """Return ``value`` if it has the shape that every replica requires; raise `BadRequestError`."""
    at = 0
    try:
        if isinstance(value, list) and len(value) > _CHECKED:
            # In parts, because what is converted takes memory.
            for at in range(0, len(value), _CHECKED):
                convert(value[at : at + _CHECKED], shape)
        else:
            convert(value, shape)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        path = re.sub(r"^\[(\d+)\]", lambda found: f"[{at + int(found[1])}]", path)
        missing = re.search("missing required field `(.*)`", problem)
        where = name + path.rstrip("`").removesuffix("[...]")
        where = (where + (f".{missing[1]}" if missing else "")).removeprefix(".")
        raise BadRequestError(f"'{where}': {problem}", param=where) from None
    return value


def supported(value: Any, shape: type[T], what: str) -> T:
    """Return ``value`` as a shape whose rendering is known, else raise `UnsupportedInputError`."""
    try:
        return convert(value, shape)
    except msgspec.ValidationError as error:
        raise UnsupportedInputError(f"{what}: {error}") from None


def conversation(
    messages: Sequence[Message], form: ContentFormat, dialect: Dialect
) -> list[Message]:
    """Return the messages as a template with content ``form`` gets them.

    They are checked by `check_messages` before, and not changed. Raises `UnsupportedInputError`.
    """
    return [_converse(one, form, dialect, index) for index, one in enumerate(messages)]


def check_messages(value: object, name: str = "messages") -> list[Message]:
    """Return ``value`` if it can be a list of chat messages, else raise `BadRequestError`."""
    messages: list[Message] = checked(value, _MESSAGES, name)
    if any(isinstance(one.get("content"), dict) for one in messages):
        raise UnsupportedInputError("content that is an object")  # vLLM goes over its keys
    return messages


def _converse(message: Message, form: ContentFormat, dialect: Dialect, index: int) -> Message:
    role = message["role"]
    supported(message, _SHAPES.get(role, _Named), f"message {index}")
    content = [
        _part(part, form, dialect.parts, index) for part in _parts(message.get("content"), role)
    ]
    result: Message = {
        "role": role,
        "content": content if form == "openai" else "\n".join(part for part in content if part),
    }
    if role == "assistant":
        # An empty list of calls is as none, so that templates see an ordinary answer.
        if calls := message.get("tool_calls"):
            result["tool_calls"] = [_tool_call(call, dialect) for call in calls]
        if (reasoning := message.get("reasoning")) is not None:
            result["reasoning"] = result["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        if isinstance(result["content"], list):
            # Most templates take only a string here, whatever they take elsewhere.
            result["content"] = "\n".join(part["text"] for part in result["content"])
    result |= {key: message[key] for key in ("name", "task") if key in message}
    if role == "developer":
        tools = message.get("tools")
        result["tools"] = None if tools is None else [_developer_tool(tool) for tool in tools]
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
    if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
        return part
    rest = text.partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _part(part: Any, form: ContentFormat, kinds: Mapping[str, str], index: int) -> Any:
    """Return a text part as the template gets it; raise `UnsupportedInputError` for other kinds."""
    kind = part.get("type") if isinstance(part, dict) else None
    field = kinds.get(kind) if isinstance(kind, str) else None
    if field is None or part.get("uuid") is not None:
        raise UnsupportedInputError(f"a content part of type {kind!r} in message {index}")
    text = part.get(field)
    if not isinstance(text, str):
        raise UnsupportedInputError(f"a content part without {field} in message {index}")
    if form == "string":
        return text
    extra = {key: value for key, value in part.items() if key not in _DECLARED_PART_FIELDS}
    return {"type": "text", "text": text, **extra}


def _tool_call(call: Message, dialect: Dialect) -> Message:
    function = in_order(call["function"], dialect.call)
    function["arguments"] = _arguments(function["arguments"])
    return in_order({**call, "function": function}, ("id", "function", "type"))


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as templates expect them: an object, empty if unusable."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _developer_tool(tool: Message) -> Message:
    function = in_order(tool["function"], ("name", "description", "parameters", "strict"))
    return in_order({**tool, "function": function}, ("function", "type"))


def chat_tools(value: object) -> list[dict[str, Any]] | None:
    """Return the request's tools as templates get them, or None.

    Unknown fields are dropped, missing ones are there as None.
    """
    if value is None:
        return None
    tools = checked(value, list[_AnyTool], "tools")
    return [_chat_tool(supported(tool, _ChatTool, f"tools[{at}]")) for at, tool in enumerate(tools)]


def _chat_tool(tool: _ChatTool) -> dict[str, Any]:
    deferred = tool.defer_loading
    if tool.function.defer_loading is None:
        tool.function.defer_loading = deferred
    made = function_tool(tool.function)
    return made if deferred is None else {**made, "defer_loading": deferred}


def function_tool(function: Function) -> dict[str, Any]:
    """Return a function as the tool that templates get."""
    fields = msgspec.structs.asdict(function)
    for name in ("strict", "defer_loading"):
        if fields[name] is None:
            del fields[name]
    return {"type": "function", "function": fields}


def in_order(value: dict[str, Any], first: Iterable[str]) -> dict[str, Any]:
    """Return a copy with the keys ``first`` in front, where present; the rest keep their order."""
    return {key: value[key] for key in first if key in value} | value


class _FunctionCall(Struct):
    call_id: str
    name: str
    arguments: str
    namespace: None = None


class _FunctionOutput(Struct):
    call_id: str
    output: str


class _OutputText(Struct):
    text: str
    type: Literal["output_text"]


class _Answer(Struct):
    content: Annotated[list[_OutputText], Meta(min_length=1)]
    type: Literal["message"]


class _ReasoningText(Struct):
    text: str
    type: Literal["reasoning_text"]


class _Reasoning(Struct):
    content: Annotated[list[_ReasoningText], Meta(min_length=1)]
    encrypted_content: Literal[""] | None = None


def messages(value: object, instructions: str | None) -> list[Message]:
    """Return the conversation; raise `BadRequestError` or `UnsupportedInputError`."""
    made: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(value, str):
        return [*made, {"role": "user", "content": value}]
    if isinstance(value, dict):
        raise UnsupportedInputError("input that is an object")
    items: list[Message] = []
    for item in checked(value, str | list[dict[str, Any]], "input"):
        _append(items, item)
    return made + items


def continues(value: object) -> bool:
    """Whether the last item is an unfinished answer, which the model continues."""
    if not isinstance(value, list) or not value or not isinstance(value[-1], dict):
        return False
    last = value[-1]
    if last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in ("in_progress", "incomplete")


def tools(value: object) -> list[dict[str, Any]] | None:
    """Return the function tools as templates get them, or None without tools."""
    given: list[dict[str, Any]] = checked(value, list[dict[str, Any]] | None, "tools") or []
    for tool in given:
        if tool.get("type") in ("custom", "namespace"):
            raise UnsupportedInputError(f"a tool of type {tool['type']!r}")
    functions = [tool for tool in given if tool.get("type") == "function"]
    made = [function_tool(supported(tool, Function, "a function tool")) for tool in functions]
    return made if given else None


def _append(items: list[Message], item: Message) -> None:
    """Add one item, to the answer before it where they are parts of one."""
    answer = items[-1] if items and items[-1]["role"] == "assistant" else None
    kind = item.get("type")
    if kind == "function_call":
        call = supported(item, _FunctionCall, "a function call")
        function = {"name": call.name, "arguments": call.arguments}
        if answer is None:
            answer = {"role": "assistant"}
            items.append(answer)
        calls = answer.setdefault("tool_calls", [])
        calls.append({"id": call.call_id, "function": function, "type": "function"})
    elif kind == "function_call_output":
        result = supported(item, _FunctionOutput, "a function's output")
        items.append({"role": "tool", "content": result.output, "tool_call_id": result.call_id})
    elif kind == "reasoning":
        thought = supported(item, _Reasoning, "reasoning that is not in plain text")
        _join(items, answer, "reasoning", thought.content[0].text)
    elif item.get("role") == "assistant":
        content = item.get("content")
        if not isinstance(content, str):
            content = supported(item, _Answer, "an answer that is no text").content[0].text
        _join(items, answer, "content", content)
    elif isinstance(item.get("role"), str) and kind in (None, "message"):
        items.append(check_messages([item], "input")[0])
    else:
        raise UnsupportedInputError(f"an input item of type {kind!r}")


def _join(items: list[Message], answer: Message | None, field: str, text: str) -> None:
    if answer is not None and answer.get(field) is None:
        answer[field] = text
    else:
        items.append({"role": "assistant", field: text})
