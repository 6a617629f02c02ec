"""A body of ``/v1/messages`` as one of ``/v1/chat/completions``, as vLLM 0.32 converts it."""

import json
from collections.abc import Mapping
from typing import Any, Final

from router.config import BadRequest
from router.prompt.media import source_url
from router.prompt.messages import Unsupported
from router.prompt.templates import Message

# Claude Code's line with a hash of the request: vLLM drops the block that has it.
_BILLING_HEADER: Final = "x-anthropic-billing-header"
_ROLES: Final = ("user", "assistant", "system")


def chat_body(body: Mapping[str, Any], *, merge_inline_system: bool) -> dict[str, Any]:
    """Return the chat completion request that the replica makes of ``body``.

    ``merge_inline_system``: all system messages go to the front, for templates
    that take one only there.
    """
    messages = _checked(body.get("messages"))
    system = [_system_text(body.get("system"), "system")]
    if merge_inline_system:
        system += [_system_text(one["content"], "messages") for one in messages if _is_system(one)]
    made: list[Message] = []
    if text := "".join(system):
        made.append({"role": "system", "content": text})
    for message in messages:
        if not _is_system(message):
            made += _convert(message)
        elif not merge_inline_system and (inline := _system_text(message["content"], "messages")):
            made.append({"role": "system", "content": inline})
    chat: dict[str, Any] = {"messages": made}
    config = body.get("output_config")
    if isinstance(config, dict) and config.get("effort") is not None:
        chat["reasoning_effort"] = config["effort"]
    for key in ("chat_template_kwargs", "kv_transfer_params"):
        if body.get(key) is not None:
            chat[key] = body[key]
    if body.get("tools") is not None:
        chat["tools"] = _tools(body["tools"])
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "none":
        chat["tool_choice"] = "none"
    return chat


def disables_thinking(body: Mapping[str, Any]) -> bool:
    """Whether thinking is turned off, for which replicas have a setting of their own."""
    thinking = body.get("thinking")
    return isinstance(thinking, dict) and thinking.get("type") == "disabled"


def _checked(value: object) -> list[Message]:
    if not isinstance(value, list):
        raise BadRequest("'messages' must be a list of messages", param="messages")
    for index, one in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(one, dict) or one.get("role") not in _ROLES:
            raise BadRequest(
                f"'{where}' must be an object with role user, assistant or system", param=where
            )
        if not isinstance(one.get("content"), str | list):
            raise BadRequest(
                f"'{where}.content' must be a string or a list of blocks", param=f"{where}.content"
            )
    return value


def _is_system(message: Message) -> bool:
    return bool(message["role"] == "system")


def _system_text(content: object, param: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        # At the top level vLLM looks for the header in blocks only.
        inline = param == "messages"
        return "" if inline and content.startswith(_BILLING_HEADER) else content
    if not isinstance(content, list):
        raise BadRequest(f"'{param}' must be a string or a list of blocks", param=param)
    texts = [_field(block, "text") for block in content if _kind(block) == "text"]
    if len(texts) < len(content):
        raise Unsupported("a system message with blocks that are no text")
    return "".join(text for text in texts if not text.startswith(_BILLING_HEADER))


def _convert(message: Message) -> list[Message]:
    """Return the chat messages of one message: results of tools come first, on their own."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    before: list[Message] = []
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        match _kind(block):
            case "text":
                if text := _field(block, "text"):
                    parts.append({"type": "text", "text": text})
            case "image":
                parts += _image(block)
            case "thinking":
                thoughts.append(_field(block, "thinking"))
            case "redacted_thinking":
                pass  # opaque: the replica skips it
            case "tool_use":
                calls.append(_call(block))
            case "tool_result" if role == "user":
                before += _result(block)
            case kind:
                raise Unsupported(f"a block of type {kind!r}")
    return before + _with_content(role, parts, thoughts, calls)


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


def _call(block: Message) -> dict[str, Any]:
    arguments = block.get("input") or {}
    name = block.get("name") or ""
    if not isinstance(arguments, dict) or not isinstance(name, str) or not block.get("id"):
        raise Unsupported("a tool_use block without an id, a name or an input")
    return {
        "id": _field(block, "id"),
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


def _image(block: Message) -> list[dict[str, Any]]:
    """Return an image as a part of a chat message; none if it has no source."""
    source = block.get("source")
    if source is not None and not isinstance(source, dict):
        raise Unsupported("an image block whose source is no object")
    return [{"type": "image_url", "image_url": {"url": source_url(source)}}] if source else []


def _result(block: Message) -> list[Message]:
    """Return a tool's result; images in it come after it, in a message of their own."""
    content = block.get("content")
    images: list[dict[str, Any]] = []
    if isinstance(content, list):
        if any(_kind(one) not in ("text", "image") for one in content):
            raise Unsupported("a tool_result that is not all text and images")
        images = [part for one in content if one["type"] == "image" for part in _image(one)]
        content = "\n".join(_field(one, "text") for one in content if one["type"] == "text")
    elif content is not None and not isinstance(content, str):
        raise Unsupported("a tool_result whose content is no text")
    call_id = block.get("tool_use_id")
    if call_id is not None and not isinstance(call_id, str):
        raise Unsupported("a tool_result whose tool_use_id is no string")
    made: list[Message] = [
        {"role": "tool", "tool_call_id": call_id or "", "content": content or ""}
    ]
    return [*made, {"role": "user", "content": images}] if images else made


def _tools(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise BadRequest("'tools' must be a list", param="tools")
    made = []
    for index, tool in enumerate(value):
        where = f"tools[{index}]"
        schema = tool.get("input_schema") if isinstance(tool, dict) else None
        if not isinstance(schema, dict):
            raise BadRequest(f"'{where}' must be an object with an 'input_schema'", param=where)
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": schema if "type" in schema else {**schema, "type": "object"},
            "strict": tool.get("strict"),
            "defer_loading": tool.get("defer_loading"),
        }
        made.append({"type": "function", "function": function})
    return made


def _kind(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise BadRequest("every block needs a type", param="messages")
    return kind


def _field(block: Message, name: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise Unsupported(f"a {block['type']} block without {name}")
    return text
