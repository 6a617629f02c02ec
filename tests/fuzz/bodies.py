"""Valid requests of every kind, which `json_text.nearly` makes odd."""

from typing import Any, Final

from hypothesis import strategies as st

_TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
_CALL: Final[dict[str, Any]] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"town": "Bonn"}'},
}
_IMAGE: Final = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

CHAT: Final[list[Any]] = [
    {"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": "baba caca"}]},
    {
        "model": "sim",
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "someone",
        "messages": [
            {"role": "system", "content": "dada"},
            {"role": "user", "content": [{"type": "text", "text": "baba"}, _IMAGE]},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "warm"},
        ],
        "tools": [_TOOL],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "documents": [{"title": "a", "text": "b"}],
        "truncate_prompt_tokens": 5,
        "cache_salt": "salt",
        "add_generation_prompt": True,
        "mm_processor_kwargs": {},
        "logprobs": True,
        "n": 1,
    },
]
COMPLETIONS: Final[list[Any]] = [
    {"model": "sim", "prompt": "baba caca dada", "max_tokens": 2},
    {"model": "sim", "prompt": [1, 2, 3], "max_tokens": 2, "stream": True},
    {"model": "sim", "prompt": ["baba", "caca"], "echo": True, "suffix": "x", "max_tokens": 1},
    {"model": "sim", "prompt": [[1, 2], [3]], "prompt_embeds": None, "max_tokens": 1},
]
RESPONSES: Final[list[Any]] = [
    {"model": "sim", "input": "baba", "instructions": "caca", "max_output_tokens": 2},
    {
        "model": "sim",
        "previous_response_id": "resp_1",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "baba"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
            {"type": "reasoning", "summary": [], "content": [{"type": "x", "text": "y"}]},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"},
    },
]
MESSAGES: Final[list[Any]] = [
    {"model": "sim", "max_tokens": 2, "messages": [{"role": "user", "content": "baba"}]},
    {
        "model": "sim",
        "max_tokens": 2,
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "baba"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "metadata": {"user_id": "u"},
    },
]
EMBEDDINGS: Final[list[Any]] = [
    {"model": "sim", "input": "baba"},
    {"model": "sim", "input": [[1, 2], [3]], "dimensions": 5, "encoding_format": "base64"},
    {"model": "sim", "messages": [{"role": "user", "content": "x"}], "truncate_prompt_tokens": -1},
]
OTHERS: Final[list[Any]] = [
    {"model": "sim", "query": "baba", "documents": ["caca", {"text": "dada"}]},
    {"model": "sim", "text_1": "a", "text_2": ["b"], "input_file_id": "file-1"},
    {"model": "sim", "prompt": "baba", "add_special_tokens": True},
]

BY_PATH: Final[dict[str, list[Any]]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/embeddings": EMBEDDINGS,
    "/v1/rerank": OTHERS,
    "/score": OTHERS,
    "/tokenize": [*OTHERS, *CHAT],
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/files": OTHERS,
    "/explain": [*CHAT, *COMPLETIONS, *RESPONSES, *MESSAGES, *EMBEDDINGS],
}


@st.composite
def nearly_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """Return bytes with some of them changed, left out or added."""
    found = bytearray(valid)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        odd = draw(st.one_of(st.binary(max_size=3), st.sampled_from([b"\x91" * 3000, b"\xcf"])))
        found[at : at + draw(st.integers(0, 3))] = odd
    return bytes(found)
