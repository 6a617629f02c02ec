"""The prompts of a session in simulated time, as the keys of their blocks."""

from array import array
from collections.abc import Iterable

import xxhash

from bench.workloads.session import Span
from replay.requests import ModelPrompt


class Conversation:
    """The blocks of a session's prompts: each turn's begins with all that was said before."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._chain: list[bytes] = []
        self._last = b"\0" * 8
        self._open = array("q")
        """Spans of the last block, which is not full: number, first and last token."""
        self._open_tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens said so far."""
        return len(self._chain) * self._block_tokens + self._open_tokens

    def turn(self, spans: Iterable[Span], answer: Span) -> ModelPrompt:
        """Say the spans, then the answer; return the prompt that asks for the answer."""
        for span in spans:
            self._say(span)
        tokens, blocks = self.tokens, len(self._chain)
        self._say(answer)
        # The last token of an answer is never run: nothing follows it.
        run = (self.tokens - 1) // self._block_tokens
        return ModelPrompt(self._chain[:run], blocks, tokens)

    def _say(self, span: Span) -> None:
        said = 0
        while said < span.tokens:
            tokens = min(self._block_tokens - self._open_tokens, span.tokens - said)
            self._open.extend((span.number, said, said + tokens))
            self._open_tokens += tokens
            said += tokens
            if self._open_tokens == self._block_tokens:
                self._close_block()

    def _close_block(self) -> None:
        self._last = xxhash.xxh3_64_digest(self._last + self._open.tobytes())
        self._chain.append(self._last)
        self._open = array("q")
        self._open_tokens = 0
