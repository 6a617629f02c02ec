"""The input of ``/v1/responses`` as chat messages, as vLLM 0.32 converts it.

Only items whose conversion is certain: messages of text, function calls and
their outputs, reasoning in plain text.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from router.prompt.messages import (
    Function,
    UnsupportedInputError,
    check_messages,
    checked,
    function_tool,
    supported,
)
from router.prompt.templates import Message


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
    """Whether the last item is an unfinished answer, which the model goes on with."""
    if not isinstance(value, list) or not value or not isinstance(value[-1], dict):
        return False
    last = value[-1]
    if last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in ("in_progress", "incomplete")


def tools(value: object) -> list[dict[str, Any]] | None:
    """Return the function tools as templates get them, or None when there are no tools."""
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
