"""What fake replicas answer: always the same bytes, in the form of vLLM's answers.

The usage tells nothing of cached tokens, as vLLM does unless it is told to. Its
prompt tokens are no prompt's: no contender reads them.
"""

from typing import Any, Final

import orjson

from bench.overhead.case import AnswerForm
from bench.overhead.prompts import MODEL

_ID: Final = "chatcmpl-0123456789abcdef0123456789abcdef"
_CREATED: Final = 1_750_000_000
_WORD: Final = " word"
_PROMPT_TOKENS: Final = 1_000


def expected(form: AnswerForm, tokens: int) -> bytes:
    """Return the body of an answer, whatever pieces it comes in."""
    return whole(tokens) if form == "whole" else b"".join(events(tokens))


def whole(tokens: int) -> bytes:
    """Return an answer that is not streamed."""
    message = {"role": "assistant", "content": _WORD * tokens}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    head = _head("chat.completion")
    return orjson.dumps({**head, "choices": [choice], "usage": _usage(tokens)})


def events(tokens: int) -> list[bytes]:
    """Return a streamed answer's pieces, a token in each.

    The first tells the role too, the last the usage and the end.
    """
    pieces = [_event({"content": _WORD}) for _ in range(tokens - 1)]
    pieces.append(_event({"content": _WORD}, finish_reason="length"))
    pieces[0] = _event({"role": "assistant", "content": ""}) + pieces[0]
    usage = {**_head("chat.completion.chunk"), "choices": [], "usage": _usage(tokens)}
    pieces[-1] += _data(usage) + b"data: [DONE]\n\n"
    return pieces


def _event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return _data({**_head("chat.completion.chunk"), "choices": [choice]})


def _data(chunk: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % orjson.dumps(chunk)


def _head(kind: str) -> dict[str, Any]:
    return {"id": _ID, "object": kind, "created": _CREATED, "model": MODEL}


def _usage(tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": _PROMPT_TOKENS,
        "total_tokens": _PROMPT_TOKENS + tokens,
        "completion_tokens": tokens,
    }
