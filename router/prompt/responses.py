"""The input of ``/v1/responses`` as chat messages, as vLLM 0.32 converts it.

Only items whose conversion is certain: messages of text, function calls and
their outputs, reasoning in plain text.
"""

from typing import Any

from router.config import BadRequest
from router.prompt.messages import Unsupported, check_messages, function_definition
from router.prompt.templates import Message


def messages(value: object, instructions: str | None) -> list[Message]:
    """Return the conversation; raise `BadRequest` or `Unsupported`."""
    made: list[Message] = []
    if instructions:
        made.append({"role": "system", "content": instructions})
    if isinstance(value, str):
        return [*made, {"role": "user", "content": value}]
    if isinstance(value, dict):
        raise Unsupported("input that is an object")
    if not isinstance(value, list):
        raise BadRequest("'input' must be a string or a list of items", param="input")
    items: list[Message] = []
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise BadRequest(f"'input[{index}]' must be an object", param=f"input[{index}]")
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
    if value is None:
        return None
    if not isinstance(value, list):
        raise BadRequest("'tools' must be a list", param="tools")
    made = []
    for index, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise BadRequest(f"'tools[{index}]' must be an object", param=f"tools[{index}]")
        if tool.get("type") in ("custom", "namespace"):
            raise Unsupported(f"a tool of type {tool['type']!r}")
        if tool.get("type") == "function":
            made.append(
                {"type": "function", "function": function_definition(tool, f"tools[{index}]")}
            )
    return made if value else None


def _append(items: list[Message], item: Message) -> None:
    """Add one item, to the answer before it where they are parts of one."""
    answer = items[-1] if items and items[-1]["role"] == "assistant" else None
    kind = item.get("type")
    if kind == "function_call":
        call = _call(item)
        if answer is None:
            items.append({"role": "assistant", "tool_calls": [call]})
        else:
            answer.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        items.append(_output(item))
    elif kind == "reasoning":
        _join(items, answer, "reasoning", _reasoning(item))
    elif item.get("role") == "assistant":
        _join(items, answer, "content", _answer(item))
    elif isinstance(item.get("role"), str) and kind in (None, "message"):
        items.append(check_messages([item], "input")[0])
    else:
        raise Unsupported(f"an input item of type {kind!r}")


def _join(items: list[Message], answer: Message | None, field: str, text: str) -> None:
    if answer is not None and answer.get(field) is None:
        answer[field] = text
    else:
        items.append({"role": "assistant", field: text})


def _call(item: Message) -> dict[str, Any]:
    if item.get("namespace") is not None:
        raise Unsupported("a call of a namespaced function")
    fields = [item.get(key) for key in ("call_id", "name", "arguments")]
    if not all(isinstance(field, str) for field in fields):
        raise Unsupported("a function call without call_id, name or arguments")
    call_id, name, arguments = fields
    return {
        "id": call_id,
        "function": {"name": name, "arguments": arguments},
        "type": "function",
    }


def _output(item: Message) -> Message:
    output, call_id = item.get("output"), item.get("call_id")
    if not isinstance(output, str) or not isinstance(call_id, str):
        raise Unsupported("a function's output that is no text, or for no call")
    return {"role": "tool", "content": output, "tool_call_id": call_id}


def _reasoning(item: Message) -> str:
    content = item.get("content")
    if item.get("encrypted_content") or not isinstance(content, list) or not content:
        raise Unsupported("reasoning that is not in plain text")
    return _text(content[0], "reasoning_text")


def _answer(item: Message) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return content
    if item.get("type") != "message" or not isinstance(content, list) or not content:
        raise Unsupported("an answer that is no text")
    return _text(content[0], "output_text")


def _text(part: object, kind: str) -> str:
    if not isinstance(part, dict) or part.get("type") != kind:
        raise Unsupported(f"an answer that is no {kind}")
    text = part.get("text")
    if not isinstance(text, str):
        raise Unsupported(f"a {kind} without text")
    return text
