"""Chat templates of the common kinds, and request bodies of every shape."""

from typing import Any

CHATML = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>' + (message.content or '') + '</s>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""

# Tools as JSON, calls and results, reasoning that is kept for the last turn
# only, a namespace, a generation tag, an option of the request.
AGENT = """\
{%- if tools %}
{{- '<|system|># Tools\\n' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ '</s>' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|assistant|>' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}
{% generation %}{{ message.content }}{% endgeneration %}
{%- for call in message.tool_calls or [] %}
{{- call.function.name + ' ' + call.function.arguments | tojson(indent=1) + ' ' + call | tojson }}
{%- endfor %}
{{- '</s>' }}
{%- else %}
{{- '<|' + message.role + '|>' + message.content + '</s>' }}
{%- endif %}
{%- endfor %}
{%- if documents %}{{ documents | tojson }}{% endif %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- if reasoning_effort %}{{ 'effort=' + reasoning_effort }}{% endif %}
{%- if custom is defined %}{{ custom | tojson }}{% endif %}
{%- endif %}
"""

# Everything about each message as JSON: the order of keys shows.
EVERYTHING = """\
{{- bos_token }}{% for message in messages %}<|user|>{{ message | tojson }}</s>
{% endfor %}{% if tools is not none %}{{ tools | default([]) | tojson }}{% endif %}
{%- if documents %}{{ documents | tojson }}{% endif %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""

# Content as a list of parts, looped over directly.
PARTS = """\
{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>
{%- if m['content'] is string %}{{ m['content'] }}{% else %}
{%- for part in m['content'] %}{{ part | tojson }}{{ part['text'] | trim }}
{%- if not loop.last %} {% endif %}{% endfor %}
{%- endif %}{{ m.reasoning or '' }}</s>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""

# The same through a macro and a slice of the messages.
MACRO = """\
{%- macro show(value) %}{% for part in value %}{{ part.text }}|{% endfor %}{% endmacro %}
{%- if messages[0].role == 'system' %}{% set system = messages[0] %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- if system %}<|system|>{{ show(system.content) }}</s>{% endif %}
{%- for message in rest %}<|{{ message.role }}|>{{ show(message.content) }}</s>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""

# Strict about the order of roles; trims; no generation prompt.
STRICT = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('system must be first') }}
{%- endif %}
{%- if message.role == 'user' %}{{ '<|user|> ' + message.content | trim + ' ' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'system' %}{{ '<|system|>' + message.content + '\\n' }}
{%- else %}{{ raise_exception('role ' + message.role + ' is not known') }}{% endif %}
{%- endfor %}
"""

# Knows developers, and what tools they bring.
DEVELOPER = """\
{%- for message in messages %}
{%- if message.role == "developer" %}<|system|>DEV
{{- message.content }}{{ message.tools | tojson }}</s>
{%- else %}<|{{ message.role }}|>{{ message.content }}{{ message.name or '' }}</s>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""

TEMPLATES: dict[str, str] = {
    "chatml": CHATML,
    "agent": AGENT,
    "everything": EVERYTHING,
    "parts": PARTS,
    "macro": MACRO,
    "strict": STRICT,
    "developer": DEVELOPER,
}

USER = {"role": "user", "content": "Hello, who are you?"}
SYSTEM = {"role": "system", "content": " Be brief.\n"}
ANSWER = {"role": "assistant", "content": " I am a fox. "}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "n": 1.5},
        "name": "weather",
        "description": "Wetter für <einen> Ort & 'so'",
    },
}
STRICT_TOOL: dict[str, Any] = {
    "function": {"name": "now", "strict": True, "unknown": 1},
    "extra": {"a": 1},
}
CALL: dict[str, Any] = {
    "type": "function",
    "id": "call_1",
    "function": {"name": "weather", "arguments": '{"place": "Zürich", "days": [1, 2.0]}'},
}


def called(arguments: str) -> dict[str, Any]:
    return {**CALL, "function": {"name": "weather", "arguments": arguments}}


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": one} for one in texts]


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}

MESSAGES: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, {"role": "user", "content": "And what else?"}],
    "empty content": [{"role": "user", "content": ""}],
    "empty system": [{"role": "system", "content": ""}, USER],
    "empty answer": [USER, {"role": "assistant", "content": ""}, USER],
    "no content": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
    "missing content": [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT],
    "two calls": [
        USER,
        {"role": "assistant", "content": "x", "tool_calls": [CALL, called("")]},
        RESULT,
    ],
    "odd arguments": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [called("[1]"), called("{no json")]},
        RESULT,
        USER,
    ],
    "no calls": [USER, {"role": "assistant", "content": "x", "tool_calls": []}, USER],
    "null calls": [USER, {"role": "assistant", "content": "x", "tool_calls": None}, USER],
    "parts": [{"role": "user", "content": text("one", " two\n", "", "four")}],
    "parts with more": [
        {
            "role": "user",
            "content": [
                {"text": "cached", "cache_control": {"type": "ephemeral"}, "type": "text"},
                {"type": "text", "text": "b", "zeta": 1, "alpha": None},
            ],
        }
    ],
    "system parts": [{"role": "system", "content": text("a", "b")}, USER],
    "answer parts": [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "text", "text": "t"},
                {"type": "refusal", "refusal": "no"},
            ],
        },
        USER,
    ],
    "tool parts": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": text("a", "b")},
    ],
    "tool without content parts": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "", "name": "weather"},
    ],
    "reasoning": [
        USER,
        {"role": "assistant", "content": "x", "reasoning": "because"},
        {**USER, "name": "bob"},
        {"role": "assistant", "reasoning_content": "older", "content": "y"},
    ],
    "both reasonings": [
        USER,
        {"role": "assistant", "content": "x", "reasoning": "new", "reasoning_content": "old"},
    ],
    "developer": [{"role": "developer", "content": "Be kind."}, USER],
    "developer later": [SYSTEM, USER, ANSWER, {"role": "developer", "content": text("D")}, USER],
    "developer tools": [{"role": "developer", "content": "Use these.", "tools": [WEATHER]}, USER],
    "own role": [{"role": "tool_plan", "content": "x", "name": "n"}, USER],
    "task": [{**USER, "task": "translate"}],
    "extra fields": [{"foo": 1, **USER, "refusal": None}],
    "unicode": [
        {"role": "user", "content": "日本語 한국어 café e\u0301 👩‍👩‍👧 \u200b\u00a0\u3000 ﬁ İ"}
    ],
    "special in text": [
        {"role": "user", "content": "<s></s><|user|> <|assistant|>\n<unk> <0x0A> [INST]"}
    ],
    "spaces": [{"role": "user", "content": "  a \t\n\n  b\r\n   "}],
    "billing": [
        {"role": "system", "content": "x-anthropic-billing-header: cch=1;\nreal"},
        USER,
        ANSWER,
        {"role": "system", "content": "x-anthropic-billing-header: cch=2;"},
        USER,
    ],
    "billing parts": [
        {"role": "system", "content": text("x-anthropic-billing-header: cch=1;", "real")},
        USER,
    ],
    "long": [{"role": "user", "content": "The quick brown fox jumps over the dog. " * 120}],
}

CHAT_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [WEATHER, STRICT_TOOL], "tool_choice": None},
    "one tool": {"tools": [WEATHER], "tool_choice": None},
    "no generation prompt": {"add_generation_prompt": False},
    "special tokens": {"add_special_tokens": True},
    "continue": {"add_generation_prompt": False, "continue_final_message": True},
    "variables": {"chat_template_kwargs": {"enable_thinking": False, "custom": {"b": 1, "a": "ü"}}},
    "unset variables": {"chat_template_kwargs": {"enable_thinking": None, "custom": "auto"}},
    "special overridden": {"chat_template_kwargs": {"bos_token": "<pad>"}},
}

# For /v1/chat/completions only.
COMPLETION_OPTIONS: dict[str, dict[str, Any]] = {
    "effort": {"reasoning_effort": "low"},
    "no effort": {"reasoning_effort": "none"},
    "effort and thinking": {
        "reasoning_effort": "high",
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "documents": {"documents": [{"title": "T", "text": "x"}]},
    "kept end": {"truncate_prompt_tokens": 9},
    "kept beginning": {"truncate_prompt_tokens": 9, "truncation_side": "right"},
    "all kept": {"truncate_prompt_tokens": 100_000},
}

COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "Hello world"},
    "empty": {"prompt": ""},
    "spaces": {"prompt": "  a \t\n\n  b\r\n   "},
    "special in text": {"prompt": "<s>x</s><|user|> y"},
    "unicode": {"prompt": "日本語 café e\u0301 👩‍👩‍👧 \u3000 ﬁ"},
    "no special tokens": {"prompt": "Hello", "add_special_tokens": False},
    "tokens": {"prompt": [1, 5, 6, 7, 300]},
    "tokens in a list": {"prompt": [[1, 5, 6, 7, 300]]},
    "text in a list": {"prompt": ["Hello world"]},
    "long": {"prompt": "The quick brown fox jumps over the dog. " * 120},
    "kept tokens": {"prompt": [1, 5, 6, 7, 300], "truncate_prompt_tokens": 2},
}

RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"input": "Hello"},
    "instructions": {"input": "Hello", "instructions": "Be brief."},
    "messages": {"input": [SYSTEM, USER, ANSWER, USER]},
    "parts": {
        "input": [
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_text", "text": "b"},
                ],
            }
        ]
    },
    "answer item": {
        "input": [
            USER,
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "a", "annotations": []}],
            },
            USER,
        ]
    },
    "calls": {
        "input": [
            USER,
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "d", "name": "now", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
            {"type": "function_call_output", "call_id": "d", "output": ""},
        ],
        "tools": [
            {"type": "function", "name": "weather", "parameters": {"b": 1, "a": 2}, "strict": True},
            {"type": "web_search"},
        ],
    },
    "effort": {"input": "Hello", "reasoning": {"effort": "low"}},
    "unfinished": {
        "input": [
            USER,
            {
                "type": "message",
                "role": "assistant",
                "status": "incomplete",
                "content": [{"type": "output_text", "text": "I am"}],
            },
        ]
    },
    "variables": {"input": "Hello", "chat_template_kwargs": {"enable_thinking": False}},
    "unset variables": {"input": "Hello", "chat_template_kwargs": {"enable_thinking": None}},
}

ANTHROPIC: dict[str, dict[str, Any]] = {
    "text": {"messages": [USER]},
    "system": {"system": "Be brief.", "messages": [USER, ANSWER, USER]},
    "blocks": {
        "system": [*text("x-anthropic-billing-header: cch=1;", "a", "b")],
        "messages": [
            {"role": "user", "content": text("a", "b")},
            {"role": "assistant", "content": text("c")},
            USER,
        ],
    },
    "inline system": {
        "system": "First.",
        "messages": [
            USER,
            ANSWER,
            {"role": "system", "content": "x-anthropic-billing-header: cch=1;"},
            {"role": "system", "content": text("Reminder.")},
            USER,
        ],
    },
    "tools": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "Let me see."},
                    {
                        "type": "tool_use",
                        "id": "t1",
                        "name": "weather",
                        "input": {"b": "ü", "a": 1},
                    },
                    {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                    {"type": "tool_result", "tool_use_id": "t2", "content": text("a", "b")},
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
        "tools": [
            {"name": "weather", "description": "d", "input_schema": {"properties": {}}},
            {"name": "now", "input_schema": {"type": "object"}},
        ],
    },
    "effort": {"messages": [USER], "output_config": {"effort": "high"}},
}
