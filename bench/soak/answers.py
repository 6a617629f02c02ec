"""The right answer of a simulated replica to a prompt, and the check of every byte. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from simulator.engine_storage import HASH_ALGORITHM
from simulator.openai_prompts import Prompts, chat_text, text_of
from warmroute_common.keys import HashScheme

BLOCK_TOKENS: Final = 64
CHUNK_TOKENS: Final = 256
_DATA: Final = b"data: "
_DONE: Final = _DATA + b"[DONE]"
_ERROR_NAME: Final = b"event: error\n"


class WrongAnswerError(Exception):
    """Bytes of an answer are not the right ones; the text says which."""


class End(StrEnum):
    """How a stream ended."""

    WHOLE = "whole"
    ERROR = "error"
    """It broke off, and an error event reported that."""
    SHORT = "short"
    """It broke off without an error event."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The one right answer to a request."""

    request_id: str
    is_chat: bool
    text: str
    output_tokens: int
    prompt_tokens: int

    @property
    def answer_id(self) -> str:
        """The id in each of its events."""
        return f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.request_id}"


class Answers:
    """Computes answers as the replicas of a fleet do, which all have the same seed."""

    def __init__(self) -> None:
        scheme = HashScheme(HASH_ALGORITHM)
        self._prompts = Prompts(scheme, BLOCK_TOKENS, CHUNK_TOKENS // BLOCK_TOKENS)

    def expected(self, request_id: str, body: Mapping[str, Any]) -> Expected:
        """Return the right answer to a request's body, which must have ``max_tokens``."""
        is_chat = "messages" in body
        text = chat_text(body["messages"]) if is_chat else body["prompt"]
        prompt = self._prompts.of_text(text, body["max_tokens"])
        return Expected(
            request_id=request_id,
            is_chat=is_chat,
            text=text_of(prompt.output_ids),
            output_tokens=len(prompt.output_ids),
            prompt_tokens=len(prompt.token_ids),
        )


def check_whole(expected: Expected, body: bytes) -> None:
    """Raise `WrongAnswerError` unless the body is the whole answer."""
    try:
        parsed = json.loads(body)
        (choice,) = parsed["choices"]
        text = choice["message"]["content"] if expected.is_chat else choice["text"]
    except (ValueError, KeyError, TypeError):
        raise WrongAnswerError(f"not an answer: {body[:200]!r}") from None
    if parsed["id"] != expected.answer_id:
        raise WrongAnswerError(f"answers {parsed['id']}, not {expected.answer_id}")
    if text != expected.text:
        raise WrongAnswerError(f"the text is not that of {expected.answer_id}")
    _check_usage(expected, parsed["usage"])


class StreamCheck:
    """Reads a stream's bytes as they come, and compares each event."""

    def __init__(self, expected: Expected) -> None:
        self._expected = expected
        self._rest = b""
        self._at = 0
        """How many characters of the text have come."""
        self._broken = b""
        """An event that is cut in half: only an error event may come after it."""
        self._finished = self._used = self._done = self._failed = False
        self.has_content = False
        """Whether more than comments and an error has come."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes; raise `WrongAnswerError`."""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for each in events:
            self._take(each)

    def end(self) -> End:
        """Return how it ended, so far."""
        if self._failed:
            return End.ERROR
        if self._done and not self._rest:
            return End.WHOLE
        return End.SHORT

    def _take(self, event: bytes) -> None:
        if event.startswith(b":") and not self._broken:
            return
        parsed = self._json(event)
        is_error = parsed is not None and "error" in parsed
        # The end of the transfer itself may be missing where all events have come, and vLLM ends
        # a stream with [DONE] after an error, too.
        may_come = event == _DONE and not self._done if self._failed else is_error or not self._done
        if not may_come:
            raise WrongAnswerError(f"after the end came {event[:200]!r}")
        if not event and not self._broken:
            raise WrongAnswerError("an empty event")
        if event == _DONE:
            if not self._failed:
                self._check_end()
            self._done = True
        elif is_error:
            self._failed = True
        elif parsed is None:
            self._broken = self._broken or event
        elif self._broken:
            raise WrongAnswerError(f"an event is cut in half: {self._broken[:200]!r}")
        else:
            self._take_chunk(parsed)

    def _json(self, event: bytes) -> dict[str, Any] | None:
        event = event.lstrip(b"\n").removeprefix(_ERROR_NAME)
        if not event.startswith(_DATA):
            return None
        try:
            parsed = json.loads(event[len(_DATA) :])
        except ValueError:
            return None
        return parsed if isinstance(parsed, dict) else None

    def _take_chunk(self, parsed: Mapping[str, Any]) -> None:
        expected = self._expected
        if parsed["id"] != expected.answer_id:
            raise WrongAnswerError(
                f"an event of {parsed['id']} in the stream of {expected.answer_id}"
            )
        self.has_content = True
        if not parsed["choices"]:
            _check_usage(expected, parsed["usage"])
            self._used = True
            return
        (choice,) = parsed["choices"]
        text = choice["delta"]["content"] if expected.is_chat else choice["text"]
        if self._finished or not expected.text.startswith(text, self._at):
            wanted = expected.text[self._at : self._at + 40]
            raise WrongAnswerError(f"{text[:40]!r} came instead of {wanted!r}")
        self._at += len(text)
        self._finished = choice["finish_reason"] is not None

    def _check_end(self) -> None:
        if self._broken or not self._finished or self._at != len(self._expected.text):
            come = f"{self._at} of {len(self._expected.text)} characters"
            raise WrongAnswerError(f"[DONE] came after {come}")
        if not self._used:
            raise WrongAnswerError("the usage that was asked for is missing")


def _check_usage(expected: Expected, usage: Mapping[str, Any]) -> None:
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    if counts != (expected.prompt_tokens, expected.output_tokens):
        raise WrongAnswerError(f"usage says {counts}")
