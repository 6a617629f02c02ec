"""A body of ``/v1/messages`` as one of ``/v1/chat/completions``, as vLLM 0.32 converts it."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from router.prompt.chat_messages import BILLING_HEADER, UnsupportedInputError, checked, supported
from router.prompt.chat_template import Message
from router.prompt.media import source_url


class _AnyBlock(Struct):
    type: str


class _AnyMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_AnyBlock]


class _AnyTool(Struct):
    input_schema: dict[str, Any]


class _Body(Struct):
    messages: list[_AnyMessage]
    system: str | list[_AnyBlock] | None = None
    tools: list[_AnyTool] | None = None


class _Block(Struct, tag_field="type"):
    """A block whose conversion is known."""


class _Text(_Block, tag="text"):
    text: str


class _Image(_Block, tag="image"):
    source: dict[str, Any] | None = None


class _Thinking(_Block, tag="thinking"):
    thinking: str


class _RedactedThinking(_Block, tag="redacted_thinking"):
    """Opaque: the replica skips it."""


class _ToolUse(_Block, tag="tool_use"):
    id: Annotated[str, Meta(min_length=1)]
    name: str | None = None
    input: dict[str, Any] | None = None


class _ToolResult(_Block, tag="tool_result"):
    tool_use_id: str | None = None
    content: str | list[_Text | _Image] | None = None


_Known = list[_Text | _Image | _Thinking | _RedactedThinking | _ToolUse | _ToolResult]


def chat_body(body: Mapping[str, Any], *, merge_inline_system: bool) -> dict[str, Any]:
    """Return the chat completion request that the replica makes of ``body``.

    ``merge_inline_system``: all system messages go to the front, for templates
    that take one only there.
    """
    checked(body, _Body)
    messages: list[Message] = body["messages"]
    # At the top level vLLM looks for the header in blocks only.
    system = body.get("system") or ""
    texts = [system if isinstance(system, str) else _system_text(system)]
    if merge_inline_system:
        texts += [_system_text(one["content"]) for one in messages if one["role"] == "system"]
    made: list[Message] = []
    if text := "".join(texts):
        made.append({"role": "system", "content": text})
    for message in messages:
        if message["role"] != "system":
            made += _convert(message)
        elif not merge_inline_system and (inline := _system_text(message["content"])):
            made.append({"role": "system", "content": inline})
    chat: dict[str, Any] = {"messages": made}
    config = body.get("output_config")
    if isinstance(config, dict) and config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]
    for key in ("chat_template_kwargs", "kv_transfer_params"):
        if body.get(key) is not None:
            chat[key] = body[key]
    if body.get("tools") is not None:
        chat["tools"] = [_tool(tool) for tool in body["tools"]]
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "none":
        chat["tool_choice"] = "none"
    return chat


def disables_thinking(body: Mapping[str, Any]) -> bool:
    """Whether thinking is turned off, for which replicas have a setting of their own."""
    thinking = body.get("thinking")
    return isinstance(thinking, dict) and thinking.get("type") == "disabled"


def _system_text(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return "" if content.startswith(BILLING_HEADER) else content
    blocks = supported(content, list[_Text], "a system message with blocks that are no text")
    return "".join(one.text for one in blocks if not one.text.startswith(BILLING_HEADER))


def _convert(message: Message) -> list[Message]:
    """Return the chat messages of one message: results of tools come first, on their own."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[Message] = []
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in supported(content, _Known, "a message"):
        match block:
            case _Text():
                parts += [{"type": "text", "text": block.text}] if block.text else []
            case _Image():
                parts += _image(block)
            case _Thinking():
                thoughts.append(block.thinking)
            case _ToolUse():
                calls.append(_call(block))
            case _ToolResult() if role == "user":
                results += _result(block)
            case _ToolResult():
                raise UnsupportedInputError("a tool's result that is not the user's")
    return results + _with_content(role, parts, thoughts, calls)


def _with_content(
    role: str, parts: list[dict[str, Any]], thoughts: list[str], calls: list[dict[str, Any]]
) -> list[Message]:
    made: Message = {"role": role}
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    if len(parts) == 1 and parts[0]["type"] == "text":
        made["content"] = parts[0]["text"]
    elif parts:
        made["content"] = parts
    elif role == "user":
        return []
    return [made]


def _call(block: _ToolUse) -> dict[str, Any]:
    function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
    return {"id": block.id, "type": "function", "function": function}


def _image(block: _Image) -> list[dict[str, Any]]:
    """Return an image as a part of a chat message; none if it has no source."""
    if not block.source:
        return []
    return [{"type": "image_url", "image_url": {"url": source_url(block.source)}}]


def _result(block: _ToolResult) -> list[Message]:
    """Return a tool's result; images in it come after it, in a message of their own."""
    content = block.content or ""
    images: list[dict[str, Any]] = []
    if not isinstance(content, str):
        images = [part for one in content if isinstance(one, _Image) for part in _image(one)]
        content = "\n".join(one.text for one in content if isinstance(one, _Text))
    result = {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": content}
    return [result, {"role": "user", "content": images}] if images else [result]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool["input_schema"]
    function = {key: tool.get(key) for key in ("name", "description", "strict", "defer_loading")}
    function["parameters"] = schema if "type" in schema else {**schema, "type": "object"}
    return {"type": "function", "function": function}
