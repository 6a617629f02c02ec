"""What is tokenized to find out whether a replica's tokens are ours.

Chosen to differ wherever tokenizers and templates are known to: spaces at the
ends, digits, contractions, case, scripts without spaces, marks that compose,
text that looks like special tokens; and for chats each role and kind of part.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

TEXT_PROBES: Final[Sequence[str]] = (
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "It's 12345 o'clock, DON'T wait: 3.14 + 1e-9!\r\n\r\n\tdef f(x):\n        return x  # ok",
    "naïve café, cafe\u0301, Ångström, Å, ﬁne, ½, ①, İstanbul, Straße, ΣΊΣΥΦΟΣ",
    "日本語の文章です。中文句子,没有空格。한국어 문장입니다. ไทย العربية עברית हिन्दी",
    "👩‍👩‍👧‍👦 🇪🇺 \u200b\u00a0\u3000 … —– “quotes” ▁under ▁▁ Ġ Ċ",  # noqa: RUF001
    "<s>[INST] not special? [/INST]</s><|im_start|>user\n<|endoftext|> <unk> <mask> x",
    "a" * 40 + " " * 40 + "\n" * 5 + "=" * 40,
)

_WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
_CALL: Final = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"place": "Zürich", "days": 2}'},
}

_USER: Final = {"role": "user", "content": "Hello, who are you?"}
_ANSWER: Final = {"role": "assistant", "content": "  An answer.\n"}

CHAT_PROBES: Final[Sequence[Mapping[str, Any]]] = (
    {"messages": [_USER]},
    {"messages": [_USER], "add_generation_prompt": False},
    {"messages": [{"role": "system", "content": " Be brief.\n"}, _USER]},
    {"messages": [_USER, _ANSWER, {"role": "user", "content": "日本語 <s> ok?"}]},
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}],
            }
        ]
    },
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": [_USER], "tools": [_WEATHER]},
    {
        "messages": [
            _USER,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": "rain"},
        ],
        "tools": [_WEATHER],
    },
)
