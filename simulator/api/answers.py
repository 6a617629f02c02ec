"""What an OpenAI server answers, byte for byte in vLLM's order of fields."""

import time
from collections.abc import Sequence
from typing import Any, Final

import orjson

from simulator.api.vocabulary import text_of

DONE: Final = b"data: [DONE]\n\n"


class Answer:
    """The answer to one request: its chunks when streamed, or all of it at once."""

    def __init__(self, *, request_id: str, model: str, is_chat: bool, prompt_tokens: int) -> None:
        self._is_chat = is_chat
        self._prompt_tokens = prompt_tokens
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        chunk = dict(self._head)
        if is_chat:
            chunk["object"] = "chat.completion.chunk"
        self._chunk_head = orjson.dumps(chunk)[:-1]

    def role(self) -> bytes:
        """Return a chat stream's first chunk."""
        delta = {"role": "assistant", "content": ""}
        return self._event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])

    def chunk(self, output_ids: Sequence[int], *, is_first: bool, is_last: bool) -> bytes:
        """Return the event that tells the next tokens."""
        text = _text(output_ids, is_first=is_first)
        what = {"delta": {"content": text}} if self._is_chat else {"text": text}
        reason = "length" if is_last else None
        return self._event(
            [{"index": 0, **what, "logprobs": None, "finish_reason": reason, "stop_reason": None}]
        )

    def usage_event(self, output_tokens: int, cached_tokens: int) -> bytes:
        """Return the event that ends a stream whose caller wants to know its usage."""
        return self._event([], self._usage(output_tokens, cached_tokens))

    def whole(self, output_ids: Sequence[int], cached_tokens: int) -> bytes:
        """Return the body of an answer that is not streamed."""
        text = _text(output_ids, is_first=True)
        what: dict[str, Any] = {"text": text}
        if self._is_chat:
            what = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, **what, "logprobs": None, "finish_reason": "length"}
        return orjson.dumps(
            {
                **self._head,
                "choices": [choice | {"stop_reason": None}],
                "usage": self._usage(len(output_ids), cached_tokens),
            }
        )

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        body = b'%s,"choices":%s' % (self._chunk_head, orjson.dumps(choices))
        if usage is not None:
            body += b',"usage":%s' % orjson.dumps(usage)
        return b"data: %s}\n\n" % body

    def _usage(self, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "total_tokens": self._prompt_tokens + output_tokens,
            "completion_tokens": output_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


def _text(output_ids: Sequence[int], *, is_first: bool) -> str:
    text = text_of(output_ids)
    return text if is_first else f" {text}"


def error_body(message: str, status: int, *, kind: str, param: str | None = None) -> bytes:
    """Return an error as vLLM answers it."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return orjson.dumps({"error": error})
